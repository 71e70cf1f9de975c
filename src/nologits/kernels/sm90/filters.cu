// Top-k, top-p and min-p on rows of logits: the exact kept set, and what is made of it.
//
// A cluster of blocks takes one row. Each block brings its chunk on chip once (chunk.cuh); statistics, searches and results sweep
// what is there, and the blocks tell each other counts and masses through their shared memory.
//
// Grid: CLUSTER blocks a row. MASK writes the kept logits, DRAW one token a row.
#include "search.cuh"

#ifndef MASK
#define MASK 1      // filtered logits
#define DRAW 0      // a draw from what is kept
#define LOGPROBS 0  // with its log-probability
#endif

struct Params {
    const Element* logits;
    const float* temperature;
    const void* top_k;  // i64 if `wide`, else i32; shares fp64, else fp32
    const void* top_p;
    const void* min_p;
    const i64* seed;
    const i64* position;
    const i64* entropy;
    Element* out;
    i64* tokens;
    float* logprobs;
    float* log_masses;
    i64 stride_logits, stride_out, stride_temperature, stride_top_k, stride_top_p, stride_min_p, stride_seed, stride_position;
    i64 top_k_value;
    double top_p_value, min_p_value;
    int rows, ahead;  // rows of logits; how many later is the row that the next blocks will take
    int V, chunk, top_k_wide, top_p_wide, min_p_wide;
    float temperature_value, mask_value;
};

// What one row asks for.
struct Request {
    float temperature;
    i64 top_k;
    double top_p, min_p;
    bool possible;
};

template <typename Wide, typename Narrow>
__device__ __forceinline__ Wide of_row(const void* values, bool wide, Wide value, i64 at) {
    if (!values) return value;
    return wide ? static_cast<const Wide*>(values)[at] : static_cast<Wide>(static_cast<const Narrow*>(values)[at]);
}

__device__ __forceinline__ Request make_request(const Params& p, int row) {
    Request request = {p.temperature ? p.temperature[row * p.stride_temperature] : p.temperature_value,
                       of_row<i64, int>(p.top_k, p.top_k_wide, p.top_k_value, row * p.stride_top_k),
                       of_row<double, float>(p.top_p, p.top_p_wide, p.top_p_value, row * p.stride_top_p),
                       of_row<double, float>(p.min_p, p.min_p_wide, p.min_p_value, row * p.stride_min_p), true};
    auto share = [](double x) { return x >= 0.0 && x <= 1.0; };
    request.possible = possible(request.temperature) && request.top_k >= -1 && share(request.top_p) && share(request.min_p);
    return request;
}

// Of the chunk's first piece. The sums only guide a guess.
__device__ __forceinline__ Sample chunk_sample(const Chunk& chunk, float shift) {
    Sample mine = Sample::nothing();
    chunk.sweep_arriving(1, [&](const float(&x)[4], int) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const bool there = x[i] > -infinity();
            const float value = there ? x[i] - shift : 0.0f;
            mine.count += there;
            mine.sum += value;
            mine.squares = fmaf(value, value, mine.squares);
        }
    });
    return mine;
}

// While the chunk arrives; logits from `cut` on go on list 0.
__device__ __forceinline__ Statistics chunk_statistics(const Chunk& chunk, float cut, Workspace& work) {
    Statistics mine = Statistics::nothing();
    float peak = -infinity(), lowest = infinity();
    chunk.sweep_arriving(chunk.steps(), [&](const float(&x)[4], int at) {
        const float largest = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
        peak = fmaxf(peak, largest);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            mine.broken += x[i] != x[i];
            if (x[i] > -infinity()) {
                mine.count += 1;
                lowest = fminf(lowest, x[i]);
            }
        }
        if (!(largest >= cut)) return;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (!(x[i] >= cut)) continue;
            const int key = key_of(x[i]);
            mine.survivors += 1;
            const u32 place = atomicAdd(&work.listed, 1);
            if (place < LISTED) work.list[0][place] = make_entry(key, chunk.first + at + i);
        }
    });
    mine.peak = key_of(peak);
    mine.lowest = key_of(lowest);
    return mine;
}

// The smallest key whose share of the peak's probability is at least min_p; by one warp.
__device__ __forceinline__ int lowest_likely(const Scale& scale, double min_p, float temperature) {
    auto likely = [&](int key) {
        const float x = value_of(key);
        if (x == scale.peak) return true;
        return exp((static_cast<double>(x) - static_cast<double>(scale.peak)) / static_cast<double>(temperature)) >= min_p;
    };
    const int lane = threadIdx.x & 31, peak = key_of(scale.peak);
    const int guess = key_of(static_cast<float>(scale.peak + temperature * log(min_p)));
    int low = max(guess, key_of(-infinity()) + 17) - 17, high = peak;  // low is not likely, high is
    u32 yes = __ballot_sync(ALL, likely(min(low + lane, peak)));
    if (!(yes & 1) && yes) return min(low + __ffs(yes) - 1, peak);
    low = key_of(-infinity());
    while (high - static_cast<i64>(low) > 1) {
        const i64 stride = (high - static_cast<i64>(low) + 31) / 32;
        const i64 key = low + stride * (lane + 1);
        yes = __ballot_sync(ALL, key >= high || likely(static_cast<int>(key)));
        const int step = __ffs(yes) - 1;
        high = static_cast<int>(min(static_cast<i64>(high), low + stride * (step + 1)));
        low = static_cast<int>(low + stride * step);
    }
    return high;
}

struct Drawn {
    Candidate best;
    u32 padding;
    u64 kept, total;  // masses

    __device__ __forceinline__ Drawn over_lanes() const {
        Drawn drawn = {best, 0, 0, 0};
#pragma unroll
        for (int lanes = 16; lanes; lanes >>= 1) keep_better(drawn.best, shuffle_xor(drawn.best, lanes));
#if LOGPROBS
        drawn.kept = sum_lanes(kept);
        drawn.total = sum_lanes(total);
#endif
        return drawn;
    }
    static __device__ __forceinline__ Drawn nothing() { return {{NOTHING_ORDER, NO_TOKEN, 0.0f}, 0, 0, 0}; }
};

__device__ __forceinline__ void keep_drawn(Drawn& drawn, float x, int id, u32 word, float spread) {
    keep_better(drawn.best, {score_order(score(x, spread, word)), static_cast<u32>(id), x});
}

// The winner among the list's first entries: the same in every block.
__device__ __forceinline__ Drawn draw_listed(const Search& s, u32 kept, const Stream& stream, float spread) {
    Drawn drawn = Drawn::nothing();
    if (threadIdx.x < kept) {
        const Entry entry = s.work.sorted[threadIdx.x];
        const u32 id = id_of_entry(entry);
        uint4 words[1];
        philox(words, {id & ~72u}, stream);
        const u32 low = id & 8 ? words[0].y : words[0].x, high = id & 8 ? words[0].w : words[0].z;
        keep_drawn(drawn, value_of(key_of_entry(entry)), id, id & 64 ? high : low, spread);
    }
    Slot(&scratch)[WARPS] = s.work.exchange.scratch[s.turns.scratch++ & 1];
    return reduce_block(scratch, drawn);
}

// The winner among this block's kept logits. A score is at most logit + spread (32 + log2 ln 2 - log2(r + 1/2)), r being the word
// of its noise (contract.cuh); logarithms are spared where that is below the best of the warp.
__device__ __forceinline__ Drawn draw(const Search& s, const Boundary& boundary, const Stream& stream, float spread) {
    const float above = last_value(boundary.key), equal = value_of(boundary.key);
    const int lane = threadIdx.x & 31;
    Drawn drawn = Drawn::nothing();
    float floor = -infinity();
    for (int base = 128 * (threadIdx.x >> 5); base < s.chunk.count; base += 128 * WARPS) {
        const int at = base + (lane & 7) + 16 * (lane >> 3), id = s.chunk.first + at;
        float x[4];
        bool keep[4];
        bool any = false;
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const int offset = (w & 1) * 8 + (w >> 1) * 64;
            x[w] = s.chunk.load_one(at + offset);
            keep[w] = x[w] > above || (x[w] == equal && id + offset <= boundary.last_id);
            any |= keep[w];
#if LOGPROBS
            if (x[w] > -infinity()) {
                const u64 mass = units(x[w], s.scale, s.work.table);
                drawn.total += mass;
                if (keep[w]) drawn.kept += mass;
            }
#endif
        }
        if (!__any_sync(ALL, any)) continue;
        if (any) {
            uint4 words[1];
            philox(words, {static_cast<u32>(id)}, stream);
            const u32 word[4] = {words[0].x, words[0].y, words[0].z, words[0].w};
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                const float bound = fmaf(spread, 31.4722f - log2_approx(static_cast<float>(word[w]) + 0.5f), x[w]);
                if (!keep[w] || bound < floor) continue;
                keep_drawn(drawn, x[w], id + (w & 1) * 8 + (w >> 1) * 64, word[w], spread);
            }
        }
        const int best = __reduce_max_sync(ALL, drawn.best.order);
        if (best != NOTHING_ORDER) {
            const float score = order_score(best);
            floor = score - fabsf(score) * 4.8e-7f - spread * 1e-4f;
        }
    }
    return drawn;
}

__device__ __forceinline__ void write_kept(const Params& p, const Chunk& chunk, const Boundary& boundary, bool valid, Element* out) {
    const float above = last_value(boundary.key), equal = value_of(boundary.key);
    const Element dropped = as_element(p.mask_value);
    const bool whole = (reinterpret_cast<u64>(out) & (sizeof(Quad) - 1)) == 0;
    for (int at = 4 * threadIdx.x; at < chunk.count; at += PIECE) {
        Quad quad = chunk.load(at);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float x = as_float(quad.e[i]);
            const bool keep = valid && (x > above || (x == equal && chunk.first + at + i <= boundary.last_id));
            if (!keep) quad.e[i] = dropped;
        }
        if (whole && at + 4 <= chunk.count) {
            store_streaming(out + at, quad);
        } else {
            for (int i = 0; i < 4 && at + i < chunk.count; ++i) out[at + i] = quad.e[i];
        }
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 2) filter_rows(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ Workspace work;
    const int row = blockIdx.x / CLUSTER, first = row_rank() * p.chunk;
    const Element* const logits = p.logits + row * p.stride_logits;
    Chunk chunk = {logits + first, reinterpret_cast<Element*>(memory), work.barriers, first, max(0, min(p.chunk, p.V - first)),
                   (reinterpret_cast<u64>(logits + first) & 15) == 0};
    chunk.fetch();
    if (threadIdx.x == 0 && row < p.rows - p.ahead) prefetch_chunk(chunk.global + p.ahead * p.stride_logits, chunk.count);
    if (threadIdx.x == 0) work.listed = 0;
    const Request request = make_request(p, row);
    const bool top_k = request.top_k > 0 && request.top_k < p.V;
    sync_row();  // also: all blocks have started, and can be written to

    // Statistics, and what survives sigma-truncation
    Turns turns = {};
    const Slot* parts;
    float cut = infinity();
    if (TRUNCATE && TIERED && top_k && !(request.min_p > 0.0)) {
        const float any = as_float(logits[0]), shift = fabsf(any) < infinity() ? any : 0.0f;
        cut = truncation(reduce_row(work.exchange, turns, chunk_sample(chunk, shift), parts), shift, p.V, request.top_k);
        if (!(cut == cut)) cut = infinity();
    }
    const Statistics stats = reduce_row(work.exchange, turns, chunk_statistics(chunk, cut, work), parts);
    const bool valid = request.possible && !stats.broken && stats.count;

    // Boundary
    u32 listed = 0;  // the list's first so many entries are all that is kept, if not 0
    Found found = {{key_of(-infinity()), NO_ID}, 0};
    const Scale scale = make_scale(value_of(stats.peak), request.temperature);
    const Search search = {work, chunk, stats, scale, turns};
    fill_table(work.table, scale);
    __syncthreads();
    if (valid) {
        bool top_p = request.top_p < 1.0;
        if (request.min_p > 0.0) {
            if (threadIdx.x < 32) {
                const int key = lowest_likely(scale, request.min_p, request.temperature);
                if (threadIdx.x == 0) work.cut = key;
            }
            __syncthreads();
            found.boundary.key = work.cut - 1;
        }
        if (top_k && request.top_k < stats.count) {
            if (request.top_k <= stats.survivors && stats.survivors <= LISTED) {
                found = search_list(search, false, stats.survivors, 0, parts, 0, static_cast<double>(request.top_k), request.top_p, listed);
                if (listed) top_p = false;  // done there
            } else {
                found = find_boundary<false>(search, found, request.top_k, 1.0);
            }
        }
        if (top_p) found = find_boundary<true>(search, found, 0, request.top_p);
    }

    // Results
#if MASK
    write_kept(p, chunk, found.boundary, valid, p.out + row * p.stride_out + first);
#endif
#if DRAW
    i64 seed = p.seed ? p.seed[row * p.stride_seed] : -1, position = p.seed && p.position ? p.position[row * p.stride_position] : 0;
    if (seed == -1 && p.entropy) seed = *p.entropy, position = row;
    Drawn drawn = Drawn::nothing();
    if (valid) {
        const Stream stream = make_stream(seed, position);
        const float spread = row_spread(request.temperature);
        if (listed && !LOGPROBS) {
            drawn = draw_listed(search, listed, stream, spread);
        } else {
            drawn = draw(search, found.boundary, stream, spread);
            drawn = reduce_row(work.exchange, turns, drawn, parts);
        }
    }
    if (threadIdx.x == 0 && row_rank() == 0) {
        p.tokens[row] = valid ? static_cast<i64>(drawn.best.token) : -1;
#if LOGPROBS
        const double temperature = request.temperature, peak = scale.peak;
        const bool certain = temperature == 0.0 || drawn.best.logit == infinity();
        const double logprob = certain ? 0.0 : (drawn.best.logit - peak) / temperature - log(drawn.kept * 0x1p-40);
        const double log_mass = temperature == 0.0 || scale.peak == infinity() ? peak : peak / temperature + log(drawn.total * 0x1p-40);
        p.logprobs[row] = valid ? static_cast<float>(logprob) : not_a_number();
        p.log_masses[row] = valid ? static_cast<float>(log_mass) : not_a_number();
#endif
    }
#endif
    sync_row();  // a block must not leave while others may still read from it
}
