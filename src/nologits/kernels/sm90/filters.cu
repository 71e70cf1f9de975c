// Top-k, top-p and min-p on rows of logits: the exact kept set, and what is made of it.
//
// A cluster of blocks takes one row. A sample of the row says roughly where the largest logits begin (guess.cuh); while the row is
// read once, those are put aside on chip (read.cuh). If the boundary lies among them, and that is certain, nothing is read twice
// (list.cuh); otherwise the search sweeps the row again, out of the cache or memory (search.cuh). The blocks tell each other counts
// and masses through their shared memory.
//
// Grid: CLUSTER blocks a row. MASK writes the kept logits, DRAW one token a row.
#ifndef MASK
#define MASK 1      // filtered logits
#define DRAW 0      // a draw from what is kept
#define LOGPROBS 0  // with its log-probability
#endif

#include "read.cuh"
#include "results.cuh"

constexpr int PREFETCHED = 192 * THREADS;  // bytes of a chunk: half of the cache for all blocks, while they look at samples

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
    int* again;  // 1: the row was swept again to find its boundary
    i64 stride_logits, stride_out, stride_temperature, stride_top_k, stride_top_p, stride_min_p, stride_seed, stride_position;
    i64 top_k_value;
    double top_p_value, min_p_value;
    int V, chunk, apart;  // apart: `out` shares no memory with `logits`
    int top_k_wide, top_p_wide, min_p_wide;
    float temperature_value, mask_value;
};

// A top-p of a row of which the largest logits are put aside and the others were weighed. True if the boundary lies among the former.
__device__ __noinline__ bool find_nucleus(double p, Found& found) {
#if ARITY == 0
    const int top = key_of(work.guess.top);
    const u32 count = work.stats.gathered;
    const double unit = exp2((static_cast<double>(work.guess.anchor) - work.scale.peak) * work.scale.factor / PARTS);
    const u64 below = __double2ull_rn(work.rest.mass * unit), below_error = __double2ull_ru(work.rest.error * unit + 1.0);
    u64 mass;  // of what is put aside
    if (count <= LISTED) {
        if (settle(aside, count, p, 0, below, below_error, found, mass)) return true;
    } else {
        Entry* const list = work.list[0];
        mass = probe<true>(true, top, top - 1, top - 1, list).total;
        if (static_cast<double>(mass) >= p * static_cast<double>(mass + below)) {
            Range bracket = {top, work.stats.peak, false};
            float ignored;
            locate<true>(true, bracket, {0.0f, 0.0f, static_cast<float>(p), below * 0x1p-40f}, ignored);
            const Probe<true> around = probe<true>(true, bracket.first, bracket.last, top - 1, list);
            u64 inside;
            if (around.count <= LISTED && settle(list, around.count, p, around.above, around.total - around.through() + below, below_error, found, inside)) return true;
            found = find_boundary<true>(false, found, 0, p);
            return false;
        }
    }
    Range bracket = work.guess.others;
    float ignored;
    narrow<true>(bracket, {static_cast<float>(p * static_cast<double>(mass + below)) * 0x1p-40f, mass * 0x1p-40f, 0.0f, 0.0f}, ignored);
    found = find_boundary<true>(false, found, 0, p, bracket);
#else
    found = find_boundary<true>(false, found, 0, p);
#endif
    return false;
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1024 / THREADS) filter_rows(const __grid_constant__ Params p) {
    const int row = blockIdx.x / CLUSTER, first = row_rank() * p.chunk;
    const Element* const logits = p.logits + row * p.stride_logits;
    const bool aligned = (reinterpret_cast<u64>(logits) & (sizeof(Quad) - 1)) == 0;  // and so is every chunk
    const bool whole = TIERED && p.chunk <= GATHERED;
    const Sample sample({logits, 0, p.V, aligned}, TRUNCATE && TIERED && !whole);  // on its way
    begin_exchange();
    read_request(work.request, p, row);
    if (threadIdx.x == 0) {
        work.chunk = {logits + first, first, max(0, min(p.chunk, p.V - first)), aligned};
        work.chunk.prefetch(PREFETCHED);
        work.gathered = 0;
    }
    sync_row();  // also: all blocks have started, and can be written to
    const Request& request = work.request;
    const bool top_k = request.top_k > 0 && request.top_k < p.V, top_p = request.top_p < 1.0, min_p = request.min_p > 0.0;

    // One sweep
    Guess guess = {infinity(), 0.0f, {1, 0, false}};
    if (TRUNCATE && TIERED && !whole && (top_k || top_p || min_p)) guess = guess_row(sample, p.V, top_k ? request.top_k : 0);
    const bool weigh = guess.others.first <= guess.others.last && LOG2E / request.temperature < infinity();
    __syncthreads();
    if (threadIdx.x == 0) work.guess = guess;
    if (weigh) clear_histogram();
    __syncthreads();
    const Element dropped = as_element(p.mask_value);
    Element* blank = nullptr;
#if MASK
    // Where little is kept, the rest is written at once. A top-p alone may keep much.
    Element* const out = p.out + row * p.stride_out + first;
    const bool little = top_k || (min_p && guess.anchor + request.temperature * logf(static_cast<float>(request.min_p)) >= guess.top);
    if (p.apart && little && guess.top < infinity()) blank = out;
#endif
    {
        Rest rest;
        const Statistics mine = weigh ? read_chunk<true>(whole, blank, dropped, rest) : read_chunk<false>(whole, blank, dropped, rest);
        if (weigh) {
            rest = reduce_row(rest);
            if (threadIdx.x == 0) work.rest = rest;
        }
        const Statistics stats = reduce_row(mine);
        if (threadIdx.x == 0) work.stats = stats;
        if (top_p || min_p || LOGPROBS) {
            const Scale scale = make_scale(value_of(stats.peak), request.temperature);
            fill_table(work.table, scale);
            if (threadIdx.x == 0) work.scale = scale;
        }
        __syncthreads();
    }
    const Statistics& stats = work.stats;
    const bool valid = possible(request) && !stats.broken && stats.count;

    // Boundary
    u32 listed = 0;          // the list's first so many entries are all that is kept, if not 0
    bool near_only = whole;  // what is kept is among what is put aside
    Found found = {{key_of(-infinity()), NO_ID}, 0};
    if (valid) {
        Boundary& boundary = found.boundary;
        if (min_p) {
            if (threadIdx.x < 32) {
                const int key = lowest_likely(work.scale, request.min_p, request.temperature);
                if (threadIdx.x == 0) work.cut = key;
            }
            __syncthreads();
            boundary.key = work.cut - 1;
        }
        if (!whole && work.guess.top < infinity() && !stats.lost) {
            const int below = key_of(work.guess.top) - 1;
            near_only = boundary.key >= below || (top_k && request.top_k <= stats.gathered) || stats.gathered == stats.count;
            if (near_only) boundary.key = max(boundary.key, below);
        }
        if (weigh && !near_only && !stats.lost && fabsf(work.scale.peak) < infinity()) {
            near_only = find_nucleus(request.top_p, found);
        } else if (ARITY == 0 && near_only && stats.gathered <= LISTED) {
            if (top_k || top_p) found = filter_list(stats.gathered, boundary.key, top_k ? request.top_k : LISTED, request.top_p, listed);
        } else {
            if (top_k && request.top_k < stats.count) found = find_boundary<false>(near_only, found, request.top_k, 1.0);
            if (top_p) found = find_boundary<true>(near_only, found, 0, request.top_p);
        }
    }

    if (p.again && threadIdx.x == 0 && row_rank() == 0) p.again[row] = valid && !near_only && (top_k || top_p);

    // Results
#if MASK
    if (whole || (blank && (near_only || !valid))) write_gathered(found.boundary, valid, whole, out, dropped);
    else write_kept(found.boundary, valid, out, dropped);
#endif
#if DRAW
    i64 seed = p.seed ? p.seed[row * p.stride_seed] : -1, position = p.seed && p.position ? p.position[row * p.stride_position] : 0;
    if (seed == -1 && p.entropy) seed = *p.entropy, position = row;
    Drawn drawn = Drawn::nothing();
    if (valid) {
        const Stream stream = make_stream(seed, position);
        const float spread = row_spread(request.temperature);
        if (listed && !LOGPROBS) {
            drawn = reduce_block(draw_listed(listed, stream, spread));  // every block has the list
        } else {
            drawn = reduce_row(near_only && !LOGPROBS ? draw_gathered(found.boundary, stream, spread) : draw_chunk(found.boundary, stream, spread));
        }
    }
    if (threadIdx.x == 0 && row_rank() == 0) {
        p.tokens[row] = valid ? static_cast<i64>(drawn.best.token) : -1;
#if LOGPROBS
        const double temperature = request.temperature, peak = work.scale.peak;
        const bool certain = temperature == 0.0 || drawn.best.logit == infinity();
        const double logprob = certain ? 0.0 : (drawn.best.logit - peak) / temperature - log(drawn.kept * 0x1p-40);
        const double log_mass = temperature == 0.0 || peak == infinity() ? peak : peak / temperature + log(drawn.total * 0x1p-40);
        p.logprobs[row] = valid ? static_cast<float>(logprob) : not_a_number();
        p.log_masses[row] = valid ? static_cast<float>(log_mass) : not_a_number();
#endif
    }
#endif
    sync_row();  // a block must not leave while others may still read from it
}
