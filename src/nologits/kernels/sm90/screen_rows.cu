// Hidden states of 8 bits, in two parts, and what they count for in the screen's bound (screen.py is the specification).
//
// Rows of bytes are those of all first parts, then of all second ones; or, packed, 8 of the first, 8 of the second, and so on.
//
// Grid: rows.
#include "contract.cuh"

#ifndef OPERAND
#define OPERAND "bf16"
#endif

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / 32;
constexpr int WIDTH = 8;  // neighbours that a thread takes together
typedef unsigned short Operand;

__device__ __forceinline__ float operand_of(Operand bits) {
    if constexpr (OPERAND[0] == 'b') return __uint_as_float(static_cast<u32>(bits) << 16);
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
    return y;
}

struct Eight {
    float x[WIDTH];
};

// The 8 from `d` on; 0 beyond D.
__device__ __forceinline__ Eight load_eight(const Operand* state, int d, int D) {
    Eight eight;
    if (d + WIDTH <= D) {
        const uint4 words = *reinterpret_cast<const uint4*>(state + d);
        const u32 word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) eight.x[i] = operand_of(word[i / 2] >> 16 * (i % 2));
    } else {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) eight.x[i] = d + i < D ? operand_of(state[d + i]) : 0.0f;
    }
    return eight;
}

// Rows of parts have room for what lies beyond D.
__device__ __forceinline__ void store_eight(signed char* part, int d, const float (&q)[WIDTH]) {
    u64 bytes = 0;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) bytes |= static_cast<u64>(static_cast<int>(q[i]) & 255) << 8 * i;
    *reinterpret_cast<u64*>(part + d) = bytes;
}

struct Lengths {
    double whole, left;  // squared
};

__device__ __forceinline__ Lengths add(Lengths a, double whole, double left) { return {a.whole + whole, a.left + left}; }

extern "C" __global__ void __launch_bounds__(THREADS)
    screen_rows(const Operand* hidden, i64 stride, int B, int D, signed char* parts, i64 pitch, float4* scales, u32* words, int num_words, bool packed) {
    __shared__ Lengths lengths[WARPS];
    __shared__ float peaks[WARPS];
    const int row = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const Operand* const state = hidden + row * stride;
    signed char* const part1 = parts + pitch * (packed ? 16 * (row / 8) + row % 8 : row);
    signed char* const part2 = part1 + pitch * (packed ? 8 : B);
    allow_dependents();
    for (int i = row * THREADS + threadIdx.x; i < num_words; i += B * THREADS) words[i] = 0;  // what the next kernels tell each other

    float peak = 0.0f;
    for (int d = threadIdx.x * WIDTH; d < D; d += THREADS * WIDTH) {
        const Eight eight = load_eight(state, d, D);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) peak = max_or_nan(peak, fabsf(eight.x[i]));
    }
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) peak = max_or_nan(peak, __shfl_xor_sync(ALL, peak, lanes));
    if (lane == 0) peaks[warp] = peak;
    __syncthreads();
    peak = peaks[0];
#pragma unroll
    for (int w = 1; w < WARPS; ++w) peak = max_or_nan(peak, peaks[w]);
    const float first = __fdiv_rn(peak, 127.0f), second = __fdiv_rn(first, 254.0f), inverse = __fdiv_rn(1.0f, fmaxf(first, 1e-38f));

    Lengths sum = {0.0, 0.0};
    for (int d = threadIdx.x * WIDTH; d < D; d += THREADS * WIDTH) {
        const Eight eight = load_eight(state, d, D);
        float q1[WIDTH], q2[WIDTH];
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            const float x = eight.x[i];
            q1[i] = fmaxf(-127.0f, fminf(127.0f, rintf(__fmul_rn(x, inverse))));
            const float rest = __fadd_rn(x, -__fmul_rn(first, q1[i]));
            q2[i] = fmaxf(-127.0f, fminf(127.0f, rintf(__fmul_rn(__fmul_rn(rest, inverse), 254.0f))));
            const double gone = static_cast<double>(x) - static_cast<double>(first) * q1[i] - static_cast<double>(second) * q2[i];
            sum = add(sum, static_cast<double>(x) * x, gone * gone);
        }
        store_eight(part1, d, q1);
        store_eight(part2, d, q2);
    }
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) sum = add(sum, __shfl_xor_sync(ALL, sum.whole, lanes), __shfl_xor_sync(ALL, sum.left, lanes));
    if (lane == 0) lengths[warp] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int w = 1; w < WARPS; ++w) sum = add(sum, lengths[w].whole, lengths[w].left);
    constexpr double UP = 1.0 + 0x1p-20;
    const double length = sqrt(sum.whole), rounding = 0x1p-20 + (D / 32.0 + 16.0) * 0x1p-24;
    scales[row] = make_float4(first, second, static_cast<float>(length * UP), static_cast<float>((sqrt(sum.left) + rounding * length) * UP));
}
