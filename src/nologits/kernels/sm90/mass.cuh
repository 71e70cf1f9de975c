// Masses of a tile: sums of exponentials for log-probabilities, with the same bits in every launch.
#pragma once
#include "tile.cuh"

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
    const float total = over_row((sum[0] + sum[1]) + (sum[2] + sum[3]), [](float a, float b) { return a + b; });
    // `scaled` is rounded once, for all terms alike; what that makes of them is known exactly.
    return fused ? total * exp2_approx(__fmaf_rn(-reference, inverse, scaled)) : total;
}

template <int start, int ids>
__device__ __forceinline__ float row_peak(const float (&x)[IDS], int h) {
    float peak = x[register_at(start, h)];
#pragma unroll
    for (int i = 1; i < ids; ++i) peak = fmaxf(peak, x[register_at(start + i, h)]);
    peak = over_row(peak, [](float a, float b) { return fmaxf(a, b); });
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

// Stores the masses of a warp's rows, 256 ids at a time. Of warpgroups that take turns the first leaves its half in `half` for
// the second, unless it is `alone`.
__device__ __forceinline__ void store_masses(const float (&x)[IDS], const Params& p, const Row (&rows)[2], float2* half, int tile,
                                             bool alone, bool tempered, float2* masses) {
    const int lane = threadIdx.x & 31, warpgroup = threadIdx.x >> 7;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float inverse = tempered ? rows[h].inverse : LOG2E;
        Mass mass = row_mass<0>(x, h, inverse);
        if constexpr (!TURNS) mass = combine(mass, row_mass<IDS / 2 - 32>(x, h, inverse), inverse);
        float2& mine = half[(lane >> 2) + 8 * h];
        if (TURNS && warpgroup == 0 && !alone) {
            if ((lane & 3) == 0) mine = make_float2(mass.reference, mass.sum);
            continue;
        }
        if (TURNS && warpgroup == 1) mass = combine({mine.x, mine.y}, mass, inverse);
        if ((lane & 3) == 0 && rows[h].valid)
            masses[static_cast<i64>(rows[h].row) * p.mass_tiles + (TURNS ? tile >> 1 : tile)] = make_float2(mass.reference, mass.sum);
    }
}
