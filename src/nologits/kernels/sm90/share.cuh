// Exact shares of a row's mass: exp((l - peak) / T) in units of 2^-40, whole numbers, so that sums have no order
// (selection.py is the specification).
#pragma once
#include "order.cuh"

constexpr int MASS_BITS = 40;

// exp((l - peak) / T) is made as 2^n 2^(j/64) 2^(f/64): a table for the middle part, a polynomial in |f| <= 1/2 for the last.
constexpr int PARTS = 64;

struct Scale {
    float peak;
    float lowest;   // logits below have no unit of mass
    float slope;    // 1 / (T ln 2)
    double factor;  // 64 times that
    double offset;  // -peak times that, rounded; the table has what is missing
};

__device__ __forceinline__ Scale make_scale(float peak, float temperature) {
    const double factor = PARTS * 1.4426950408889634074 / temperature;
    // exp(-29) is less than half a unit. At T = 0 the peak alone has mass.
    return {peak, temperature > 0.0f ? peak - 29.0f * temperature : peak, static_cast<float>(factor / PARTS), factor, -peak * factor};
}

__constant__ double EIGHTHS[8] = {1.0, 1.0905077326652577, 1.189207115002721, 1.2968395546510096,
                                 1.4142135623730951, 1.5422108254079407, 1.681792830507429, 1.8340080864093424};
__constant__ double SIXTY_FOURTHS[8] = {1.0, 1.0108892860517005, 1.0218971486541166, 1.0330248790212284,
                                       1.0442737824274138, 1.0556451783605572, 1.0671404006768237, 1.0787607977571199};

// 2^(j/64) in units, times 2^(r/64) for the r that the offset lacks.
__device__ __forceinline__ double table_entry(int j, const Scale& scale) {
    const double missing = -fma(static_cast<double>(scale.peak), scale.factor, scale.offset);
    const double power = EIGHTHS[j >> 3] * SIXTY_FOURTHS[j & 7] * 0x1p40;
    return fma(power, missing * 0.010830424696249145, power);
}

// Threads need a barrier before they use it.
__device__ __forceinline__ void fill_table(double (&table)[PARTS], const Scale& scale) {
    if (threadIdx.x < PARTS) table[threadIdx.x] = table_entry(threadIdx.x, scale);
}

// Units of a logit at most the peak; NaN-free. No branches: several of them overlap.
__device__ __forceinline__ u64 units(float x, const Scale& scale, const double (&table)[PARTS]) {
    constexpr double ROUNDER = 6755399441055744.0;  // 1.5 2^52: its sum with a number has that number's whole part in its last bits
    const double y = fma(static_cast<double>(x), scale.factor, scale.offset);
    const double rounded = y + ROUNDER;
    const double f = y - (rounded - ROUNDER);
    const int n = __double2loint(rounded);
    // (ln 2 / 64)^k / k!
    double power = 5.732851688640402e-10;
    power = fma(power, f, 2.1173137155464776e-07);
    power = fma(power, f, 5.86490495505617e-05);
    power = fma(power, f, 0.010830424696249145);
    power = fma(power, f, 1.0);
    const double base = table[n & (PARTS - 1)];
    const double scaled = __hiloint2double(__double2hiint(base) + ((n >> 6) << 20), __double2loint(base));
    const u64 made = __double_as_longlong(fma(power, scaled, ROUNDER)) - __double_as_longlong(ROUNDER);
    return x == scale.peak ? 1ull << MASS_BITS : x < scale.lowest ? 0 : made;
}

// How many of the copies of a value are kept: copy j is while above + j each < target, and one in any case.
__device__ __forceinline__ u32 copies_kept(u64 above, u64 each, u32 copies, double target) {
    if (copies <= 1 || !each) return copies;  // of no mass: beyond the target no copy is asked about
    const double wanted = ceil((target - static_cast<double>(above)) / static_cast<double>(each));
    u32 kept = wanted >= copies ? copies : wanted > 1.0 ? static_cast<u32>(wanted) : 1;
    // The division is rounded; the rule is not.
    while (kept > 1 && !(static_cast<double>(above + (kept - 1) * each) < target)) --kept;
    while (kept < copies && static_cast<double>(above + kept * each) < target) ++kept;
    return kept;
}
