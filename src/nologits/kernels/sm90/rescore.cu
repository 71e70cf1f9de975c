// The last step of a screened draw (screen.cu): the exact scores of the few tokens that could win, and the winner.
//
// First a few with the largest upper scores: one of them is the winner as a rule, and its exact score is more than any certain one, so that
// few others can still reach it. Rows that cannot be settled so are marked, for the kernels that read all weights: those with more
// candidates than there is room for, those with numbers that are none, and those in which the bounds cannot be true, as a score lies above
// its own or none reaches the one that was certain. Then the bytes are not those of these weights.
//
// Grid: rows, and blocks that share a row's candidates. Launched while the screen still runs; waits for it on the device.
#define TURNS 1
#ifndef ROWS
#define ROWS 64
#define STAGES 6
#define PAIR 2
#define CLUSTER 1
#define MASS 0
#define RAW 0
#define GREEDY 0
#define BIAS 0
#define HEAD_SCALE 0
#define SOFTCAP 0
#define LOGIT_BIAS 0
#define SPARSE_BIAS 0
#define ALLOWED 0
#define FILTER 0
#define REST 0
#endif
#define SCREEN 1

#include "tile.cuh"
#include "winners.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
#ifndef OPERAND
#define OPERAND "bf16"
#endif
constexpr int OPERAND_TYPE = OPERAND[0] == 'b' ? 2 : 3;

// Two neighbours of an operand, times two of the other.
__device__ __forceinline__ float add_products(float sum, u32 a, u32 b) {
    sum = fmaf(float_of<OPERAND_TYPE>(a), float_of<OPERAND_TYPE>(b), sum);
    return fmaf(float_of<OPERAND_TYPE>(a >> 16), float_of<OPERAND_TYPE>(b >> 16), sum);
}

// h . w, by one warp, in fp32: screen.py counts the roundings.
__device__ __forceinline__ float dot(const void* hidden, const void* weight, int D) {
    const uint4 *const h = static_cast<const uint4*>(hidden), *const w = static_cast<const uint4*>(weight);
    float sum = 0.0f;
#pragma unroll 16
    for (int i = threadIdx.x & 31; i < D / 8; i += 32) {
        const uint4 a = h[i], b = w[i];
        sum = add_products(sum, a.x, b.x);
        sum = add_products(sum, a.y, b.y);
        sum = add_products(sum, a.z, b.z);
        sum = add_products(sum, a.w, b.w);
    }
    const int rest = D / 8 * 8 + (threadIdx.x & 31);
    if (rest < D) sum = fmaf(load_float<OPERAND_TYPE>(hidden, rest), load_float<OPERAND_TYPE>(weight, rest), sum);
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) sum += __shfl_xor_sync(ALL, sum, lanes);
    return sum;
}

// What head and request make of a product (tile.cuh), for one id.
__device__ __forceinline__ float transformed(const Params& p, float x, int row, int at) {
#if BIAS
    x += load_float<BIAS>(p.bias, at);
#endif
#if HEAD_SCALE
    x = __fmul_rn(x, p.scale);
#endif
#if SOFTCAP
    x = __fmul_rn(p.softcap, tanh_of(__fdividef(x, p.softcap)));
#endif
#if LOGIT_BIAS
    x += load_float<LOGIT_BIAS>(p.logit_bias, static_cast<i64>(row) * p.stride_logit_bias + at);
#endif
#if SPARSE_BIAS
    for (int k = 0; k < p.num_biased; ++k)
        if (p.bias_ids[static_cast<i64>(row) * p.stride_bias_ids + k] - first_id(p) == at) x += p.bias_values[static_cast<i64>(row) * p.stride_bias_values + k];
#endif
    return x;  // what a mask hides is no candidate
}

// To the kernels that read all weights.
__device__ __forceinline__ void leave(const Params& p, int row) {
    p.left[1 + row] = 1;
    atomicAdd(&p.left[0], 1u);
}

struct Scratch {
    Entry first[WARPS];       // the most promising candidates
    Candidate best[WARPS];
    u32 listed;
    unsigned short list[CAPACITY];  // the others that can still win, of this block's part
};

struct Operands {
    const char* hidden;
    i64 stride_hidden;
    const char* weight;
    i64 stride_weight;
};

extern "C" __global__ void __launch_bounds__(THREADS) rescore_tokens(const __grid_constant__ Params p, const __grid_constant__ Operands operands) {
    __shared__ Scratch scratch;
    const int row = blockIdx.x, part = blockIdx.y, parts = gridDim.y, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    allow_dependents();
    const float temperature = row_temperature(p, row);
    const Stream stream = row_stream(p, row);
    const float spread = row_spread(temperature);
    const Entry* const entries = p.entries + static_cast<i64>(row) * CAPACITY;
    const char* const state = operands.hidden + row * operands.stride_hidden * 2;
    Candidate best;

    // Twice, first without candidates but some token: so there is code in the caches when they come.
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
        int count = 0, reached = NOTHING_ORDER;
        Entry mine = make_entry(0, first_id(p) + (SHARD ? p.skip : 0));
        best = {NOTHING_ORDER, NO_TOKEN, 0.0f};
        if (pass == 1) {
            wait_for_primary();
            const u32 gathered = p.gathered[row];
            if (gathered > CAPACITY || !(fabsf(p.row_scales[row].z) < infinity())) {
                if (threadIdx.x == 0 && part == 0) leave(p, row);
                return;
            }
            count = gathered, reached = turned_back(p.floors[row]), mine = 0;
        }

        // The largest of each warp's
        for (int i = threadIdx.x; i < count; i += THREADS) mine = max(mine, __ldcg(&entries[i]));
#pragma unroll
        for (int lanes = 16; lanes; lanes >>= 1) mine = max(mine, __shfl_xor_sync(ALL, mine, lanes));
        const Entry first = mine;
        if (mine && key_of_entry(mine) < reached) mine = 0;

        u32 next = warp;
        for (bool listed = false; true;) {
            if (mine) {
                const int id = id_of_entry(mine), at = id - first_id(p);
                const float product = dot(state, operands.weight + (at - (SHARD ? p.skip : 0)) * operands.stride_weight * 2, p.D);
                Candidate candidate = winner_of(make_float2(transformed(p, product, row, at), __int_as_float(id)), stream, spread);
                if (pass == 1 && candidate.order > key_of_entry(mine)) candidate.order = NAN_ORDER;
                keep_better(best, candidate);
            }
            if (listed) {
                next += WARPS;
            } else {  // all others that reach the best of these
                if (lane == 0) scratch.first[warp] = first, scratch.best[warp] = best;
                if (threadIdx.x == 0) scratch.listed = 0;
                __syncthreads();
                for (int w = 0; w < WARPS; ++w) reached = max(reached, scratch.best[w].order);
                for (int i = part + parts * static_cast<int>(threadIdx.x); i < count; i += parts * THREADS) {
                    const Entry entry = __ldcg(&entries[i]);
                    bool open = key_of_entry(entry) >= reached;
                    for (int w = 0; w < WARPS; ++w) open &= entry != scratch.first[w];
                    if (open) scratch.list[atomicAdd(&scratch.listed, 1u)] = static_cast<unsigned short>(i);
                }
                __syncthreads();
                listed = true;
            }
            if (next >= scratch.listed) break;
            mine = __ldcg(&entries[scratch.list[next]]);
        }
        __syncthreads();
        if (lane == 0) scratch.best[warp] = best;
        __syncthreads();
    }
    if (threadIdx.x != 0) return;
    for (int w = 0; w < WARPS; ++w) keep_better(best, scratch.best[w]);

    // The best of all parts
    atomicMax(&p.exact_winners[row], make_entry(best.order, static_cast<int>(best.token)));
    __threadfence();
    if (atomicAdd(&p.rescored[row], 1u) != parts - 1) return;
    const Entry winner = atomicMax(&p.exact_winners[row], static_cast<Entry>(0));
    const int order = key_of_entry(winner);
    if (order == NAN_ORDER || order < turned_back(p.floors[row])) return leave(p, row);
    const bool valid = order > score_order(-infinity()) && possible(temperature);
    p.tokens[row] = valid ? static_cast<i64>(static_cast<u32>(id_of_entry(winner))) : -1;
}
