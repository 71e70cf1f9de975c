// Hidden states of 8 bits, in two parts, and what they count for in the screen's bound (screen.py is the specification).
//
// Grid: rows.
#include "contract.cuh"

#ifndef OPERAND
#define OPERAND "bf16"
#endif

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

__device__ __forceinline__ float operand_of(unsigned short bits) {
    if constexpr (OPERAND[0] == 'b') return __uint_as_float(static_cast<u32>(bits) << 16);
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
    return y;
}

// Over the block; `scratch` has a number a warp.
template <typename T, typename Combine>
__device__ __forceinline__ T over_block(T mine, T* scratch, Combine combine) {
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) mine = combine(mine, __shfl_xor_sync(ALL, mine, lanes));
    __syncthreads();
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = mine;
    __syncthreads();
    T all = scratch[0];
    for (int w = 1; w < WARPS; ++w) all = combine(all, scratch[w]);
    return all;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    screen_rows(const unsigned short* hidden, i64 stride, int B, int D, signed char* parts, i64 pitch, float4* scales, u32* words, int num_words) {
    __shared__ double sums[WARPS];
    __shared__ float peaks[WARPS];
    const int row = blockIdx.x;
    const unsigned short* const state = hidden + row * stride;
    allow_dependents();
    for (int i = row * THREADS + threadIdx.x; i < num_words; i += B * THREADS) words[i] = 0;  // what the next kernels tell each other

    float peak = 0.0f;
    for (int d = threadIdx.x; d < D; d += THREADS) peak = max_or_nan(peak, fabsf(operand_of(state[d])));
    peak = over_block(peak, peaks, [](float a, float b) { return max_or_nan(a, b); });
    const float first = __fdiv_rn(peak, 127.0f), second = __fdiv_rn(first, 254.0f), safe = fmaxf(first, 1e-38f);

    double length = 0.0, left = 0.0;  // squared
    for (int d = threadIdx.x; d < D; d += THREADS) {
        const float x = operand_of(state[d]);
        const float q1 = fmaxf(-127.0f, fminf(127.0f, rintf(__fdiv_rn(x, safe))));
        const float rest = __fadd_rn(x, -__fmul_rn(first, q1));
        const float q2 = fmaxf(-127.0f, fminf(127.0f, rintf(__fmul_rn(__fdiv_rn(rest, safe), 254.0f))));
        parts[row * pitch + d] = static_cast<signed char>(q1);
        parts[(static_cast<i64>(B) + row) * pitch + d] = static_cast<signed char>(q2);
        const double gone = static_cast<double>(x) - static_cast<double>(first) * q1 - static_cast<double>(second) * q2;
        length += static_cast<double>(x) * x;
        left += gone * gone;
    }
    auto add = [](double a, double b) { return a + b; };
    length = sqrt(over_block(length, sums, add));
    left = sqrt(over_block(left, sums, add));
    if (threadIdx.x == 0) {
        constexpr double UP = 1.0 + 0x1p-20;
        const double rounding = 0x1p-20 + (D / 32.0 + 16.0) * 0x1p-24;
        scales[row] = make_float4(first, second, static_cast<float>(length * UP), static_cast<float>((left + rounding * length) * UP));
    }
}
