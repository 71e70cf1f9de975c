// Exact shares of a row's mass: exp((l - peak) / T) in units of 2^-40, whole numbers, so that sums have no order
// (selection.py is the specification).
#pragma once
#include "contract.cuh"

constexpr int MASS_BITS = 40;

// exp((l - peak) / T) is made as 2^n 2^(j/16) 2^(f/16): a table for the middle part, a polynomial in |f| <= 1/2 for the last.
struct Scale {
    float peak;
    double factor;  // 16 / (T ln 2)
    float lowest;   // logits below have no unit of mass
};

__device__ __forceinline__ Scale make_scale(float peak, float temperature) {
    // exp(-29) is less than half a unit. At T = 0 the peak alone has mass.
    return {peak, 16.0 * 1.4426950408889634074 / temperature, temperature > 0.0f ? peak - 29.0f * temperature : peak};
}

__device__ __forceinline__ void fill_table(double (&table)[16]) {
    if (threadIdx.x < 16) table[threadIdx.x] = exp2(threadIdx.x / 16.0);
}

// Units of a logit at most the peak; NaN-free.
__device__ __forceinline__ u64 units(float x, const Scale& scale, const double (&table)[16]) {
    if (x == scale.peak) return 1ull << MASS_BITS;
    if (x < scale.lowest) return 0;
    constexpr double ROUNDER = 6755399441055744.0;  // 1.5 2^52: its sum with a number has that number's whole part in its last bits
    const double y = (static_cast<double>(x) - static_cast<double>(scale.peak)) * scale.factor;
    const double rounded = y + ROUNDER;
    const double f = y - (rounded - ROUNDER);
    const int n = __double2loint(rounded);
    // (ln 2 / 16)^k / k!
    double power = 9.181219573844438e-12;
    power = fma(power, f, 1.2715871950558131e-09);
    power = fma(power, f, 1.467610032291943e-07);
    power = fma(power, f, 1.3550807779497457e-05);
    power = fma(power, f, 0.0009383847928089872);
    power = fma(power, f, 0.04332169878499658);
    power = fma(power, f, 1.0);
    const double base = table[n & 15];
    const double scaled = __hiloint2double(__double2hiint(base) + (((n >> 4) + MASS_BITS) << 20), __double2loint(base));
    return __double_as_longlong(fma(power, scaled, ROUNDER)) - __double_as_longlong(ROUNDER);
}
