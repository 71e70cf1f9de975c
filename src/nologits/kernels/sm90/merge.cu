// The draw's second stage: the winner among a row's slots, and its log-probabilities.
//
//     log_mass = l / T + log(sum_t mass_t exp((r_t - l) / T))        logprob = l / T - log_mass
//
// l is the winner's logit and r_t the reference of the mass of the t-th 256 ids. A slot holds a logit and a token:
// the score is made again from them, bit for bit, which halves the scratch. Sums run in an order that depends on V alone.
//
// Grid: rows. Launched while the tile kernel still runs; waits for it on the device.
#ifndef GREEDY
#define GREEDY 0
#define MASS 0
#define RAW 0
#endif

#include "winners.cuh"

constexpr int THREADS = MASS_THREADS;
constexpr int WARPS = THREADS / 32;

// Mass of the row relative to `logit`, as a logarithm in base 2; the same in all threads.
__device__ __forceinline__ float log2_total(const float2* masses, int tiles, float logit, float inverse, float* scratch) {
    float total = mass_of_thread(masses, tiles, threadIdx.x, logit, inverse);
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = total;
    __syncthreads();
    total = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) total += scratch[w];
    __syncthreads();
    return __log2f(total);
}

extern "C" __global__ void __launch_bounds__(THREADS) categorical_merge(const __grid_constant__ Params p) {
    __shared__ Candidate candidates[WARPS];
#if MASS || RAW
    __shared__ float scratch[WARPS];
#endif
    const int row = blockIdx.x;
    const float temperature = row_temperature(p, row);
    const Stream stream = row_stream(p, row);
    [[maybe_unused]] const float spread = row_spread(temperature);
    wait_for_primary();
#if LEFT
    if (!p.left[1 + row]) return;
#endif

    // Winner
    Candidate best = {NOTHING_ORDER, NO_TOKEN, 0.0f};
    for (int slot = threadIdx.x; slot < p.slots; slot += THREADS) keep_better(best, winner_of(p.winners[static_cast<i64>(row) * p.slots + slot], stream, spread));
    best = best_of_lanes(best);
    if ((threadIdx.x & 31) == 0) candidates[threadIdx.x >> 5] = best;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; ++w) keep_better(best, candidates[w]);

    const bool valid = best.order > score_order(-infinity()) && best.order != NAN_ORDER && possible(temperature);
    const bool infinite = best.logit == infinity();
    if (threadIdx.x == 0) p.tokens[row] = valid ? static_cast<i64>(best.token) : -1;

    // Log-probabilities
#if MASS
    {
        const float total = LN2 * log2_total(p.masses + static_cast<i64>(row) * p.mass_tiles, p.mass_tiles, best.logit, row_inverse(temperature), scratch);
        const float logprob = temperature == 0.0f || infinite ? 0.0f : -total;
        const float log_mass = temperature == 0.0f || infinite ? best.logit : best.logit / temperature + total;
        if (threadIdx.x == 0) {
            p.logprobs[row] = valid ? logprob : not_a_number();
            p.log_masses[row] = valid ? log_mass : not_a_number();
        }
    }
#endif
#if RAW
    {
        const float2* const masses = p.raw_masses + static_cast<i64>(row) * p.mass_tiles;
        const float of_warp = reference_of_thread(masses, p.mass_tiles, threadIdx.x);
        if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = of_warp;
        __syncthreads();
        float reference = of_warp;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) reference = fmaxf(reference, scratch[w]);
        __syncthreads();
        const float total = LN2 * log2_total(masses, p.mass_tiles, reference, LOG2E, scratch);
        if (threadIdx.x == 0) p.raw_logprobs[row] = valid ? (infinite ? 0.0f : best.logit - reference - total) : not_a_number();
    }
#endif
}
