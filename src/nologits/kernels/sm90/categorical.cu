// The draw, fused with the matmul that makes the logits, for Hopper's tensor cores (FlashSampling, stage 1).
//
//     score[b, v] = logits[b, v] + T[b] * g[b, v]          token[b] = argmax_v score, ties to the smaller id
//
// Persistent blocks walk over tiles of the vocabulary. One warp keeps the copy engine busy; two warpgroups multiply 64 rows x
// WIDTH ids each into their registers. How they share the work depends on the batch: they take turns, one drawing from its tile
// while the other multiplies the next; or they have the two halves of a tile's ids; or of its rows.
//
// The batch lies along M and the vocabulary along N: a thread holds WIDTH / 4 ids of two rows, among them the four ids of
// every noise group, and a row belongs to four lanes of one warp. No reduction crosses a warp, and winners stay in registers
// until the block is done.
//
// The noise does not depend on the logits, so it is made while the tensor cores work. There are no registers to keep it in;
// what is kept is one byte a token, an upper bound (contract.cuh), in shared memory. When a tile is done, one multiply-add a
// token compares logit + bound with the best score so far, and only groups that could still win have their noise made again,
// exactly. The bounds change how much work is done, never the result.
//
// Grid: (blocks of rows, slots), so that neighbours read the same weights at the same time; a cluster of two row blocks shares
// each weight tile by multicast. Outputs: a winner a row and slot (logit and token: the merge makes its score again), and for
// log-probabilities the mass of every 256 ids relative to a reference, summed in an order that nothing else changes.
#include "contract.cuh"

// What the launcher defines; the values here let the file compile by itself.
#ifndef SHARING
#define SHARING 0      // what the warpgroups do: 0 take turns, 1 halve the ids of a tile, 2 halve its rows
#define STAGES 4       // pieces of operands in flight
#define PAIR 2         // pieces loaded together: neighbouring 128 bytes of the same weight rows suit DRAM
#define CLUSTER 1      // row blocks that share weight tiles
#define GREEDY 0       // no noise
#define MASS 0         // masses of the tempered logits
#define RAW 0          // masses of the head's own logits
#define BIAS 0         // type of the head's bias: 0 none, 1 fp32, 2 bf16, 3 fp16
#define HEAD_SCALE 0
#define SOFTCAP 0
#define LOGIT_BIAS 0   // type of the dense logit bias
#define SPARSE_BIAS 0
#define ALLOWED 0
#endif

enum { TURNS, SPLIT_IDS, SPLIT_ROWS };
constexpr int TILE_V = SHARING == TURNS ? 128 : 256;
constexpr int TILE_D = 64;  // 128 bytes: the width of the swizzle
constexpr int ROWS = SHARING == SPLIT_ROWS ? 128 : 64;
constexpr int WIDTH = SHARING == SPLIT_ROWS ? 256 : 128;  // ids of a tile that one warpgroup has
constexpr int CONSUMER_THREADS = 256;
constexpr int WEIGHT_BYTES = TILE_V * TILE_D * 2;
constexpr int STAGE_BYTES = WEIGHT_BYTES + ROWS * TILE_D * 2;
constexpr int IDS = WIDTH / 2;     // logits of a thread
constexpr int SLOTS = WIDTH / 8;   // its noise groups: half of them for each of its two rows
constexpr int STAGED = SLOTS / 4;  // float4s that fit where its codes were
constexpr int CODE_BYTES = CONSUMER_THREADS * SLOTS * 4;
// Masses are kept for 256 ids, so warpgroups that take turns need neighbouring tiles then; otherwise any will do, and a
// block's tiles lie apart.
constexpr bool NEIGHBOURS = SHARING == TURNS && (MASS || RAW);
constexpr bool EXCHANGE = SHARING != SPLIT_ROWS;  // the warpgroups have the same rows
// Bounds exceed the scores of winners by up to 0.25 + 0.09 (quantisation) + 0.02 (E against u), in units of the spread.
constexpr float FIRST_ROUND = 0.36f;
constexpr float LOWEST = -3.4028234e38f;  // the floor of a row without a score: -inf never wins
constexpr u32 ALL = 0xFFFFFFFF;

// A position in the ring of stages, and the parity of the barriers' phase there.
struct Ring {
    int stage = 0;
    u32 parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    __device__ __forceinline__ void skip(int count) {
        stage += count;
        parity ^= (stage / STAGES) & 1;
        stage %= STAGES;
    }
};

// The q-th tile of this block.
__device__ __forceinline__ int tile_at(int q) {
    return NEIGHBOURS ? 2 * (blockIdx.y + (q >> 1) * gridDim.y) + (q & 1) : blockIdx.y + q * gridDim.y;
}

// ---- where things lie in a thread's accumulators: chunk c of 8 ids holds [row][id] in registers 4c .. 4c + 3

__device__ __forceinline__ constexpr int register_of(int group, int word, int half) {
    const int chunk = (group >> 3) * 16 + ((group >> 1) & 3) * 2 + (word & 1) + 8 * (word >> 1);
    return 4 * chunk + 2 * half + (group & 1);
}

// First id of a group, relative to the tile and this lane's first id.
__device__ __forceinline__ int group_offset(int group) { return (group >> 3) * 128 + ((group >> 1) & 3) * 16 + (group & 1); }

__device__ __forceinline__ constexpr int word_offset(int word) { return (word & 1) * 8 + (word >> 1) * 64; }

// Register of the i-th id of a row, and the id's distance from this lane's first.
__device__ __forceinline__ constexpr int register_at(int i, int half) { return 4 * (i >> 1) + 2 * half + (i & 1); }

__device__ __forceinline__ constexpr int offset_at(int i) { return 8 * (i >> 1) + (i & 1); }

template <int type>  // 1: fp32, 2: bf16, 3: fp16
__device__ __forceinline__ float load_float(const void* pointer, i64 index) {
    if constexpr (type == 1) return static_cast<const float*>(pointer)[index];
    const unsigned short bits = static_cast<const unsigned short*>(pointer)[index];
    if constexpr (type == 2) return __uint_as_float(static_cast<u32>(bits) << 16);
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
    return y;
}

__device__ __forceinline__ float tanh_of(float x) {
    const float decay = exp2_approx(fabsf(x) * (-2.0f * LOG2E));
    return copysignf((1.0f - decay) / (1.0f + decay), x);
}

// What a consumer thread keeps of one of its two rows while it walks over the vocabulary.
struct Row {
    int row;
    bool valid;
    Stream stream;
    float spread;   // T ln 2
    float inverse;  // 1 / (T ln 2)
    float floor;    // a bound below this cannot win
    Candidate best;
};

// The best score of a row turns into the floor of its bounds: logit - 32 spread v < floor cannot reach that score, with
// room for the rounding of both sides.
__device__ __forceinline__ float floor_of(int order, float spread) {
    if (order == NAN_ORDER) return infinity();
    const float score = order == NOTHING_ORDER ? LOWEST : order_score(order);
    if (score == infinity()) return score;
#if GREEDY
    return fmaxf(score, LOWEST);
#else
    return fmaxf(score - spread * BOUND_OFFSET - (fabsf(score) + 128.0f * spread) * 4.8e-7f, LOWEST);
#endif
}

// ---- the producer

__device__ __forceinline__ void produce(const TensorMap* weight, const TensorMap* hidden, const Params& p, u32 stages, u32 full,
                                        u32 empty) {
    const u32 bytes = WEIGHT_BYTES + p.box_rows * TILE_D * 2;
    const int row0 = blockIdx.x * ROWS;
    Ring ring;
    for (int q = 0; tile_at(q) < p.tiles; ++q) {
        const int tile = tile_at(q);
#pragma unroll 1  // few registers are left here
        for (int d = 0; d < p.D; d += PAIR * TILE_D) {
            Ring next = ring;
#pragma unroll
            for (int i = 0; i < PAIR && d + i * TILE_D < p.D; ++i, next.advance()) barrier_wait(empty + 8 * next.stage, next.parity ^ 1);
#pragma unroll
            for (int i = 0; i < PAIR && d + i * TILE_D < p.D; ++i, ring.advance()) {
                const int column = d + i * TILE_D;
                const u32 barrier = full + 8 * ring.stage, target = stages + ring.stage * STAGE_BYTES;
                barrier_expect_bytes(barrier, bytes);
#if CLUSTER == 1
                copy_box(target, weight, barrier, column, tile * TILE_V);
#else
                const u32 part = cluster_rank();
                copy_box_multicast(target + part * (WEIGHT_BYTES / CLUSTER), weight, barrier, column,
                                   tile * TILE_V + part * (TILE_V / CLUSTER), (1 << CLUSTER) - 1);
#endif
                copy_box(target + WEIGHT_BYTES, hidden, barrier, column, row0);
            }
        }
    }
}

// A consumer warp is done with a stage: tells every block that writes to it.
__device__ __forceinline__ void release(u32 empty, int stage) {
    if ((threadIdx.x & 31) < CLUSTER) {
#if CLUSTER == 1
        barrier_arrive(empty + 8 * stage);
#else
        barrier_arrive_remote(empty + 8 * stage, threadIdx.x & 31);
#endif
    }
}

// ---- the logits of a tile

// The head's own post-processing; ids beyond the vocabulary become -inf.
__device__ __forceinline__ void head_transform(float (&x)[IDS], const Params& p, int v0, int end) {
#pragma unroll
    for (int i = 0; i < IDS / 2; ++i) {
        const int id = v0 + offset_at(i);
#if BIAS
        const float bias = id < p.V ? load_float<BIAS>(p.bias, id * p.stride_bias) : 0.0f;
#endif
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float& logit = x[register_at(i, h)];
#if BIAS
            logit += bias;
#endif
#if HEAD_SCALE
            logit *= p.scale;
#endif
#if SOFTCAP
            logit = p.softcap * tanh_of(logit / p.softcap);
#endif
        }
    }
    if (end > p.V) {
#pragma unroll
        for (int i = 0; i < IDS / 2; ++i)
            if (v0 + offset_at(i) >= p.V) x[register_at(i, 0)] = x[register_at(i, 1)] = -infinity();
    }
}

// What the request adds: + logit bias (dense, sparse), mask to -inf.
__device__ __forceinline__ void request_transform(float (&x)[IDS], const Params& p, const Row (&rows)[2], int v0) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (!rows[h].valid) continue;
        [[maybe_unused]] const i64 row = rows[h].row;
#if LOGIT_BIAS
#pragma unroll
        for (int i = 0; i < IDS / 2; ++i) {
            const int id = v0 + offset_at(i);
            if (id < p.V) x[register_at(i, h)] += load_float<LOGIT_BIAS>(p.logit_bias, row * p.stride_logit_bias_b + id * p.stride_logit_bias_v);
        }
#endif
#if SPARSE_BIAS
        for (int k = 0; k < p.num_biased; ++k) {
            // Lane q of a row holds the ids that are 2q or 2q + 1 modulo 8; v0 is its first.
            const i64 at = p.bias_ids[row * p.stride_bias_ids_b + k * p.stride_bias_ids_k] - v0;
            if (at < 0 || at >= WIDTH || (at & 7) > 1) continue;
            const float value = p.bias_values[row * p.stride_bias_values_b + k * p.stride_bias_values_k];
#pragma unroll
            for (int i = 0; i < IDS / 2; ++i)
                if (offset_at(i) == at) x[register_at(i, h)] += value;
        }
#endif
#if ALLOWED
        const int shift = (threadIdx.x & 3) * 2;
#pragma unroll
        for (int w = 0; w < WIDTH / 32; ++w) {
            const int word = (v0 >> 5) + w;
            const u32 bits = word * 32 < p.V ? p.allowed[row * p.stride_allowed_b + word * p.stride_allowed_w] >> shift : 0;
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (!(bits >> offset_at(i) & 1)) x[register_at(8 * w + i, h)] = -infinity();
        }
#endif
    }
}

// ---- masses

// A sum of 2^((x - reference) inverse). The order of its terms is fixed: within 128 ids by row_mass, of the two halves of 256
// ids by combine, of those by the merge. So a row's mass has the same bits in every launch.
struct Mass {
    float reference, sum;
};

__device__ __forceinline__ Mass combine(const Mass& low, const Mass& high, float inverse) {
    if (!(high.sum > 0.0f)) return low;
    if (!(low.sum > 0.0f)) return high;
    const float reference = fmaxf(low.reference, high.reference);
    return {reference, low.sum * exp2_approx((low.reference - reference) * inverse) +
                           high.sum * exp2_approx((high.reference - reference) * inverse)};
}

// Over 32 ids of a thread and the four lanes that share the row.
template <int start, bool fused>
__device__ __forceinline__ float row_sum(const float (&x)[IDS], int h, float inverse, float reference) {
    const float scaled = reference * inverse;
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        const float logit = x[register_at(start + i, h)];
        sum[i & 3] += exp2_approx(fused ? __fmaf_rn(logit, inverse, -scaled) : (logit - reference) * inverse);
    }
    float total = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    total += __shfl_xor_sync(ALL, total, 1);
    total += __shfl_xor_sync(ALL, total, 2);
    // `scaled` is rounded once, for all terms alike; what that makes of them is known exactly.
    return fused ? total * exp2_approx(__fmaf_rn(-reference, inverse, scaled)) : total;
}

template <int start, int ids>
__device__ __forceinline__ float row_peak(const float (&x)[IDS], int h) {
    float peak = x[register_at(start, h)];
#pragma unroll
    for (int i = 1; i < ids; ++i) peak = fmaxf(peak, x[register_at(start + i, h)]);
    peak = fmaxf(peak, __shfl_xor_sync(ALL, peak, 1));
    peak = fmaxf(peak, __shfl_xor_sync(ALL, peak, 2));
    return peak == -infinity() ? 0.0f : peak;
}

// Any reference will do that lets no term overflow: the largest of a few logits, or where that fails the largest of all. One
// multiply-add a term will do unless the exponents are so large that rounding the reference shows.
template <int start>
__device__ __forceinline__ Mass row_mass(const float (&x)[IDS], int h, float inverse) {
    Mass mass;
    mass.reference = row_peak<start, 4>(x, h);
    mass.sum = row_sum<start, true>(x, h, inverse, mass.reference);
    const bool failed = !(mass.sum < 1.0e18f && fabsf(mass.reference * inverse) < 1.0e6f);
    if (__any_sync(ALL, failed)) {
        const float peak = row_peak<start, 32>(x, h), again = row_sum<start, false>(x, h, inverse, peak);
        if (failed) mass = {peak, again};
    }
    return mass;
}

// Stores the masses of this warp's rows, 256 ids at a time. Of warpgroups with the same rows the first one leaves its half in
// `halves` ([2 kinds][16 rows] of this warp) for the second, unless it is `alone`.
__device__ __forceinline__ void store_masses(const float (&x)[IDS], const Params& p, const Row (&rows)[2], float2* halves, int tile,
                                             bool alone, bool tempered, float2* masses) {
    const int lane = threadIdx.x & 31, warpgroup = threadIdx.x >> 7;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float inverse = tempered ? rows[h].inverse : LOG2E;
        Mass mass = row_mass<0>(x, h, inverse);
        if constexpr (SHARING == SPLIT_ROWS) mass = combine(mass, row_mass<IDS / 2 - 32>(x, h, inverse), inverse);
        float2* const half = halves + (tempered ? 0 : 16) + (lane >> 2) + 8 * h;
        if (EXCHANGE && warpgroup == 0 && !alone) {
            if ((lane & 3) == 0) *half = make_float2(mass.reference, mass.sum);
            continue;
        }
        if (EXCHANGE && warpgroup == 1) mass = combine({half->x, half->y}, mass, inverse);
        if ((lane & 3) == 0 && rows[h].valid)
            masses[static_cast<i64>(rows[h].row) * p.mass_tiles + (SHARING == TURNS ? tile >> 1 : tile)] = make_float2(mass.reference, mass.sum);
    }
}

// ---- noise and winners

// The bounds of two groups of one row, which share the keys of Philox's rounds; `part` counts to SLOTS / 2.
__device__ __forceinline__ void make_bounds(const Row (&rows)[2], u32* codes, int v0, int part) {
    const int slot = 4 * (part >> 1) + (part & 1);
    const u32 first = v0 + group_offset(slot >> 1);
    uint4 words[2];
    philox(words, {first, first + 1}, part & 1 ? rows[1].stream : rows[0].stream);
    codes[slot * 32 + (threadIdx.x & 31)] = noise_codes(words[0]);
    codes[(slot + 2) * 32 + (threadIdx.x & 31)] = noise_codes(words[1]);
}

// The largest bound of every group: slot 2g + h is group g of row h.
__device__ __forceinline__ void group_bounds(float (&bounds)[SLOTS], const float (&x)[IDS], const Row (&rows)[2], const u32* codes) {
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
        const int g = slot >> 1, h = slot & 1;
        float bound[4];
#if !GREEDY
        const u32 code = codes[slot * 32 + (threadIdx.x & 31)];
#endif
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            bound[w] = x[register_of(g, w, h)];
#if !GREEDY
            bound[w] = __fmaf_rn(noise_code(code, w), -32.0f * rows[h].spread, bound[w]);
#endif
        }
        bounds[slot] = max_or_nan(max_or_nan(bound[0], bound[1]), max_or_nan(bound[2], bound[3]));
    }
}

// Exact scores of the ids of one slot, whose logits have been staged.
__device__ __forceinline__ void consider(Row (&rows)[2], const float4& logits, int slot, int v0) {
    const bool second = slot & 1;
    const u32 group = v0 + group_offset(slot >> 1);
    Candidate best = second ? rows[1].best : rows[0].best;
    const float logit[4] = {logits.x, logits.y, logits.z, logits.w};
#if !GREEDY
    const float spread = second ? rows[1].spread : rows[0].spread;
    uint4 words[1];
    philox(words, {group}, second ? rows[1].stream : rows[0].stream);
    const u32 word[4] = {words[0].x, words[0].y, words[0].z, words[0].w};
#endif
#pragma unroll
    for (int w = 0; w < 4; ++w) {
#if GREEDY
        const float value = logit[w];
#else
        const float value = score(logit[w], spread, word[w]);
#endif
        keep_better(best, {score_order(value), group + word_offset(w), logit[w]});
    }
    if (second) rows[1].best = best;
    else rows[0].best = best;
}

// Updates the rows' winners with a tile. Groups whose bound reaches the floor of their row are considered, each by the lane
// that holds it. A floor is known only once something has been considered, so the first round takes those near the
// largest bound, which usually settles it; later rounds take what the floor found then leaves, until it leaves nothing.
__device__ __forceinline__ void draw(const float (&x)[IDS], Row (&rows)[2], u32* codes, int v0) {
    float bounds[SLOTS];
    group_bounds(bounds, x, rows, codes);
    float target[2];
    bool hopeful = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float top = bounds[h];
#pragma unroll
        for (int slot = 2 + h; slot < SLOTS; slot += 2) top = max_or_nan(top, bounds[slot]);
        top = max_or_nan(top, __shfl_xor_sync(ALL, top, 1));
        top = max_or_nan(top, __shfl_xor_sync(ALL, top, 2));
        hopeful |= rows[h].valid && !(top < rows[h].floor);  // not less: a NaN has to be seen
        target[h] = fmaxf(rows[h].floor, top - FIRST_ROUND * rows[h].spread);
    }
    if (!__any_sync(ALL, hopeful)) return;

    float4* const staged = reinterpret_cast<float4*>(codes) + (threadIdx.x & 31);  // in place of the codes
    __syncwarp();                                                                  // which every lane has read
    u32 open = (rows[0].valid ? 0x55555555u : 0) | (rows[1].valid ? 0xAAAAAAAAu : 0);
    while (true) {
        u32 reached = 0;
#pragma unroll
        for (int slot = 0; slot < SLOTS; ++slot)
            if (!(bounds[slot] < target[slot & 1])) reached |= 1u << slot;
        reached &= open;

        // Registers cannot be indexed by a number known at run time: the logits go through shared memory.
        const u32 wanted = __reduce_or_sync(ALL, reached);
        u32 taken = 0;
        int count = 0;
#pragma unroll
        for (int chunk = 0; chunk < SLOTS; chunk += 4) {
            if (!(wanted >> chunk & 15)) continue;  // the same in all lanes
#pragma unroll
            for (int slot = chunk; slot < chunk + 4; ++slot) {
                if ((reached >> slot & 1) && count < STAGED) {
                    const int g = slot >> 1, h = slot & 1;
                    staged[count++ * 32] = make_float4(x[register_of(g, 0, h)], x[register_of(g, 1, h)], x[register_of(g, 2, h)],
                                                       x[register_of(g, 3, h)]);
                    taken |= 1u << slot;
                }
            }
        }
        open &= ~taken;
        bool unsettled = reached & ~taken;
        for (int i = 0; taken; ++i, taken &= taken - 1) consider(rows, staged[i * 32], __ffs(taken) - 1, v0);
        __syncwarp();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int order = rows[h].best.order;
            order = max(order, __shfl_xor_sync(ALL, order, 1));
            order = max(order, __shfl_xor_sync(ALL, order, 2));
            rows[h].floor = floor_of(order, rows[h].spread);
            unsettled |= rows[h].valid && rows[h].floor < target[h];
            target[h] = rows[h].floor;
        }
        // What lies below the old target lies below a floor that has reached it.
        if (!__any_sync(ALL, unsettled)) break;
    }
}

// ---- the consumers

__device__ __forceinline__ Row make_row(const Params& p, int row) {
    const bool valid = row < p.B;
    const int at = valid ? row : 0;
    const float temperature = row_temperature(p, at);
    return {row, valid, row_stream(p, at), possible(temperature) ? temperature * LN2 : 0.0f, row_inverse(temperature), LOWEST,
            {NOTHING_ORDER, NO_TOKEN, 0.0f}};
}

__device__ __forceinline__ void consume(const Params& p, u32 stages, u32 full, u32 empty, u32 turn, u32* codes, float2* halves,
                                        Candidate* winners) {
    const int lane = threadIdx.x & 31, warpgroup = threadIdx.x >> 7;
    const int warp_row = blockIdx.x * ROWS + 16 * ((threadIdx.x >> 5) & (ROWS / 16 - 1));
    const bool active = warp_row < p.B;  // warps without rows only take part in the multiplication
    const int steps = (p.D + TILE_D - 1) / TILE_D;
    // What this warpgroup has of a stage, and its first id in a tile.
    const u32 hidden_at = WEIGHT_BYTES + (SHARING == SPLIT_ROWS ? warpgroup * (64 * TILE_D * 2) : 0);
    const u32 weight_at = SHARING == SPLIT_IDS ? warpgroup * (128 * TILE_D * 2) : 0;
    const int first_id = (SHARING == SPLIT_IDS ? warpgroup * 128 : 0) + 2 * (lane & 3);
    const int q_step = SHARING == TURNS ? 2 : 1;
    Row rows[2] = {make_row(p, warp_row + (lane >> 2)), make_row(p, warp_row + (lane >> 2) + 8)};

    float x[IDS];
    Ring ring;
    u32 turn_parity = 0;
    int made = 0;  // parts of this tile's noise
    int q = SHARING == TURNS ? warpgroup : 0;
    if (q == 1) {
        ring.skip(steps);
        if (!GREEDY && active && tile_at(q) < p.tiles)
            for (; made < SLOTS / 2; ++made) make_bounds(rows, codes, tile_at(q) * TILE_V + first_id, made);
    }
    for (; tile_at(q) < p.tiles; q += q_step) {
        const int tile = tile_at(q), v0 = tile * TILE_V + first_id;

        // Logits tile
        if (SHARING == TURNS && q > 0) {
            barrier_wait(turn + 8 * warpgroup, turn_parity);
            turn_parity ^= 1;
        }
        int previous = 0;
        for (int step = 0; step < steps; ++step) {
            const u32 stage = stages + ring.stage * STAGE_BYTES;
            const u64 a = operand(stage + hidden_at), b = operand(stage + weight_at);
            barrier_wait(full + 8 * ring.stage, ring.parity);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < TILE_D / 16; ++k) wgmma(x, a + 2 * k, b + 2 * k, step + k > 0);
            wgmma_commit();
            wgmma_wait<1>();
            if (step > 0) release(empty, previous);
            if (SHARING != TURNS && !GREEDY && active)
                for (; made * steps < SLOTS / 2 * (step + 1); ++made) make_bounds(rows, codes, v0, made);
            previous = ring.stage;
            ring.advance();
        }
        if (SHARING == TURNS && lane == 0) barrier_arrive(turn + 8 * (warpgroup ^ 1));
        wgmma_wait<0>();
        release(empty, previous);
        if (SHARING == TURNS) ring.skip(steps);
        if (!active) continue;

        // The first tile's noise; that of the others was made while waiting for a turn, or between multiplications.
        if (!GREEDY)
            for (; made < SLOTS / 2; ++made) make_bounds(rows, codes, v0, made);
        __syncwarp();

        // Transform, and masses before and after what the request adds
        head_transform(x, p, v0, v0 - (lane & 3) * 2 + WIDTH);
#if MASS || RAW
        const int pair = 2 + ((threadIdx.x >> 5) & 3);  // barriers of this warp and its twin with the same rows
        const bool more = tile_at(q + 1) < p.tiles, alone = SHARING == TURNS && warpgroup == 0 && !more;
        if (EXCHANGE && warpgroup == 0 && q > 0) named_barrier<64>(pair + 4);  // the halves have been read
        if (EXCHANGE && warpgroup == 1) named_barrier<64>(pair);               // the halves are there
#endif
#if RAW
        store_masses(x, p, rows, halves, tile, alone, false, p.raw_masses);
#endif
        request_transform(x, p, rows, v0);
#if MASS
        store_masses(x, p, rows, halves, tile, alone, true, p.masses);
#endif
#if MASS || RAW
        if (EXCHANGE && warpgroup == 0 && !alone) named_barrier_arrive<64>(pair);
        if (EXCHANGE && warpgroup == 1 && more) named_barrier_arrive<64>(pair + 4);
#endif

        // Scores of those who could win; then, while the other warpgroup multiplies, the next tile's noise
        draw(x, rows, codes, v0);
        made = 0;
        if (SHARING == TURNS && !GREEDY && tile_at(q + q_step) < p.tiles) {
            __syncwarp();
            for (; made < SLOTS / 2; ++made) make_bounds(rows, codes, tile_at(q + q_step) * TILE_V + first_id, made);
        }
    }

    // Reduce over the four lanes of a row, and over warpgroups with the same rows; store
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        Candidate best = rows[h].best;
        keep_better(best, shuffle_xor(best, 1));
        keep_better(best, shuffle_xor(best, 2));
        if (EXCHANGE) {
            const int at = 16 * ((threadIdx.x >> 5) & 3) + (lane >> 2) + 8 * h;
            if (warpgroup == 1 && (lane & 3) == 0) winners[at] = best;
            named_barrier<CONSUMER_THREADS>(1);
            if (warpgroup == 1) continue;
            keep_better(best, winners[at]);
        }
        if ((lane & 3) == 0 && rows[h].valid)
            p.winners[static_cast<i64>(rows[h].row) * gridDim.y + blockIdx.y] = make_float2(best.logit, __uint_as_float(best.token));
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(CONSUMER_THREADS + 128, 1)
    categorical_tiles(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap hidden,
                      const __grid_constant__ Params p) {
    extern __shared__ unsigned char memory[];
    __shared__ Candidate winners[64];
    __shared__ float2 halves[4][32];
    // Stages first: the swizzle needs them at multiples of 1,024 bytes.
    const u32 stages = (shared_address(memory) + 1023) & ~1023u;
    u32* const codes = reinterpret_cast<u32*>(memory + (stages - shared_address(memory)) + STAGES * STAGE_BYTES);
    const u32 full = stages + STAGES * STAGE_BYTES + CODE_BYTES, empty = full + 8 * STAGES, turn = empty + 8 * STAGES;

    allow_dependents();  // the merge kernel may start and wait
    if (threadIdx.x == 0) {
        prefetch_map(&weight);
        prefetch_map(&hidden);
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, (SHARING == TURNS ? 4 : 8) * CLUSTER);  // one arrival a warp that reads it
        }
        for (int w = 0; w < 2; ++w) barrier_init(turn + 8 * w, 4);
        barrier_init_fence();
    }
#if CLUSTER == 1
    __syncthreads();
#else
    cluster_sync();
#endif

    if (threadIdx.x >= CONSUMER_THREADS) {
        give_registers<24>();
        if (threadIdx.x == CONSUMER_THREADS) produce(&weight, &hidden, p, stages, full, empty);
        __syncwarp();
    } else {
        take_registers<240>();
        consume(p, stages, full, empty, turn, codes + (threadIdx.x >> 5) * (SLOTS * 32), halves[(threadIdx.x >> 5) & 3], winners);
    }
#if CLUSTER > 1
    cluster_sync();  // a block must not leave while others may still arrive at its barriers
#endif
}
