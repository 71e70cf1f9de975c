// Exact shares of a row's mass: exp((l - peak) / T) in units of 2^-40, whole numbers, so that sums have no order
// (selection.py is the specification).
#pragma once
#include "contract.cuh"

constexpr int MASS_BITS = 40;

// exp((l - peak) / T) is made as 2^n 2^(j/16) 2^(f/16): a table for the middle part, a polynomial in |f| <= 1/2 for the last.
struct Scale {
    float peak;
    float lowest;   // logits below have no unit of mass
    float slope;    // 1 / (T ln 2)
    double factor;  // 16 times that
};

__device__ __forceinline__ Scale make_scale(float peak, float temperature) {
    const double factor = 16.0 * 1.4426950408889634074 / temperature;
    // exp(-29) is less than half a unit. At T = 0 the peak alone has mass.
    return {peak, temperature > 0.0f ? peak - 29.0f * temperature : peak, static_cast<float>(factor * 0.0625), factor};
}

__constant__ double SIXTEENTHS[16] = {  // 2^(j/16)
    1.0, 1.0442737824274138, 1.0905077326652577, 1.1387886347566916, 1.189207115002721, 1.241857812073484, 1.2968395546510096,
    1.3542555469368927, 1.4142135623730951, 1.4768261459394993, 1.5422108254079407, 1.6104903319492543, 1.681792830507429,
    1.7562521603732995, 1.8340080864093424, 1.9152065613971474};

// Units of a logit at most the peak; NaN-free. No branches: several of them overlap.
__device__ __forceinline__ u64 units(float x, const Scale& scale, const double (&table)[16]) {
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
    const u64 made = __double_as_longlong(fma(power, scaled, ROUNDER)) - __double_as_longlong(ROUNDER);
    return x == scale.peak ? 1ull << MASS_BITS : x < scale.lowest ? 0 : made;
}
