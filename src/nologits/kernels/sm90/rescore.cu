// The last step of a screened draw (screen.cu): the exact scores of the few tokens that could win, and the winner.
//
// Rows that cannot be settled so are marked, for the kernels that read all weights: those with more candidates than there is room for, and
// those with hidden states that are no numbers.
//
// Grid: rows. Launched while the screen still runs; waits for it on the device.
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

// h . w, by one warp, in fp32.
__device__ __forceinline__ float dot(const void* hidden, const void* weight, int D) {
    float sum = 0.0f;
    for (int d = threadIdx.x & 31; d < D; d += 32) sum = fmaf(load_float<OPERAND_TYPE>(hidden, d), load_float<OPERAND_TYPE>(weight, d), sum);
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

extern "C" __global__ void __launch_bounds__(THREADS) rescore_tokens(const __grid_constant__ Params p, const void* hidden, i64 stride_hidden, const void* weight, i64 stride_weight) {
    __shared__ Candidate best_of_warp[WARPS];
    const int row = blockIdx.x, warp = threadIdx.x >> 5;
    allow_dependents();
    wait_for_primary();
    const u32 count = p.gathered[row];
    const float temperature = row_temperature(p, row), reach = p.row_scales[row].z;
    if (count > CAPACITY || !(fabsf(reach) < infinity())) {
        if (threadIdx.x == 0) p.left[1 + row] = 1, atomicAdd(&p.left[0], 1u);
        return;
    }
    const int floor = turned_back(max(p.floors[row], turned(NOTHING_ORDER)));
    const Stream stream = row_stream(p, row);
    const float spread = row_spread(temperature);
    const Entry* const entries = p.entries + static_cast<i64>(row) * CAPACITY;
    const char* const state = static_cast<const char*>(hidden) + row * stride_hidden * 2;

    Candidate best = {NOTHING_ORDER, NO_TOKEN, 0.0f};
    for (u32 i = warp; i < count; i += WARPS) {
        const Entry entry = __ldcg(&entries[i]);
        if (key_of_entry(entry) < floor) continue;
        const int id = id_of_entry(entry), at = id - first_id(p);
        const float logit = transformed(p, dot(state, static_cast<const char*>(weight) + (at - (SHARD ? p.skip : 0)) * stride_weight * 2, p.D), row, at);
        keep_better(best, winner_of(make_float2(logit, __int_as_float(id)), stream, spread));
    }
    if ((threadIdx.x & 31) == 0) best_of_warp[warp] = best;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int w = 0; w < WARPS; ++w) keep_better(best, best_of_warp[w]);
    const bool valid = best.order > score_order(-infinity()) && best.order != NAN_ORDER && possible(temperature);
    p.tokens[row] = valid ? static_cast<i64>(best.token) : -1;
}
