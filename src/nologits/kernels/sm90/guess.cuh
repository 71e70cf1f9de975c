// A guess at a row from a sample spread over it: which logits to put aside while the row is read (the paper's sigma-truncation), and
// what range the others' histogram covers. A bad guess costs time, nothing else.
#pragma once
#include "search.cuh"

// Logits to put aside: for a top-k that is not larger; for a nucleus, which often has fewer in a peaked row; for a min-p, which searches
// no list.
constexpr float AIM_K = 160.0f, AIM_P = 256.0f, AIM_MIN_P = 512.0f;
constexpr float OUTLIER = 6.0f;  // sigmas from the mean; of a normal sample the farthest lies at about 4
constexpr float FINITE = 3.4028234663852886e38f;

__device__ __forceinline__ float root(float x) { return exp2_approx(0.5f * log2_approx(x)); }

// How many sigmas above the mean a share (up to a half) of a normal row begins, to .003 (Abramowitz and Stegun 26.2.22).
__device__ __forceinline__ float normal_quantile(float share) {
    const float t = root(-2.0f * LN2 * log2_approx(share));
    return t - __fdividef(fmaf(t, 0.27061f, 2.30753f), fmaf(t, fmaf(t, 0.04481f, 0.99229f), 1.0f));
}

struct Moments {
    float sum, squares;  // of logits above -inf, less `shift`
    u32 count;
    float lowest, peak;

    __device__ __forceinline__ Moments over_lanes() const {
        return {sum_lanes(sum), sum_lanes(squares), sum_lanes(count), value_of(min_lanes(key_of(lowest))), value_of(max_lanes(key_of(peak)))};
    }
    static __device__ __forceinline__ Moments nothing() { return {0.0f, 0.0f, 0, infinity(), -infinity()}; }
    __device__ __forceinline__ float mean() const { return __fdividef(sum, count); }
    __device__ __forceinline__ float sigma() const { return root(fmaxf(0.0f, __fdividef(squares, count) - mean() * mean())); }
};

struct Counted {
    u32 count;
    __device__ __forceinline__ Counted over_lanes() const { return {sum_lanes(count)}; }
    static __device__ __forceinline__ Counted nothing() { return {0}; }
};

// A thread's part of the sample: of 64 segments of 128 neighbours, evenly over the row.
constexpr int SEGMENTS = 64, SAMPLED = SEGMENTS * 128, SAMPLED_QUADS = SEGMENTS / WARPS;

struct Sample {
    float first, x[4 * SAMPLED_QUADS];

    __device__ __forceinline__ Sample(const Chunk& row, bool wanted) : first(as_float(row.global[0])) {
        if (!wanted) return;
#pragma unroll
        for (int q = 0; q < SAMPLED_QUADS; ++q) {
            const i64 segment = SAMPLED_QUADS * (threadIdx.x >> 5) + q;
            const Quad quad = row.load((static_cast<int>((row.count - 128) * segment / (SEGMENTS - 1)) & ~7) + 4 * (threadIdx.x & 31));
#pragma unroll
            for (int i = 0; i < 4; ++i) x[4 * q + i] = as_float(quad.e[i]);
        }
    }

    // Of what lies between `low` and `high`.
    __device__ __forceinline__ Moments moments(float shift, float low, float high) const {
        Moments mine = Moments::nothing();
#pragma unroll
        for (int i = 0; i < 4 * SAMPLED_QUADS; ++i) {
            if (!(x[i] >= low && x[i] <= high)) continue;
            const float value = x[i] - shift;
            mine.count += 1;
            mine.sum += value;
            mine.squares = fmaf(value, value, mine.squares);
            mine.lowest = fminf(mine.lowest, x[i]);
            mine.peak = fmaxf(mine.peak, x[i]);
        }
        return reduce_block(mine);
    }

    __device__ __forceinline__ u32 count_from(float top) const {
        Counted mine = {0};
#pragma unroll
        for (int i = 0; i < 4 * SAMPLED_QUADS; ++i) mine.count += x[i] >= top;
        return reduce_block(mine).count;
    }
};

// Every block of a cluster makes the same guess, from the same logits.
__device__ __forceinline__ Guess guess_row(const Sample& sample, int count, i64 top_k) {
    const Request& request = work.request;
    Guess guess = {infinity(), 0.0f, {1, 0, false}};
    const float shift = fabsf(sample.first) < infinity() ? sample.first : 0.0f;
    Moments m = sample.moments(shift, -FINITE, FINITE);
    guess.anchor = m.count ? m.peak : 0.0f;

    // In the sample: how many stand for those to put aside, for all of k in any case
    const float stride = static_cast<float>(count) / SAMPLED, k = top_k / stride;
    const float wanted = top_k ? fmaxf(AIM_K / stride, k + 4.0f * root(k) + 4.0f) : (request.min_p > 0.0 ? AIM_MIN_P : AIM_P) / stride;
    if (wanted * stride > 0.75f * GATHERED * CLUSTER) return guess;
    if (m.count < 2.0f * wanted) {
        guess.top = -FINITE;  // all there are
        return guess;
    }
    for (int turn = 0; turn < 2 && !(fmaxf(m.peak - shift - m.mean(), shift + m.mean() - m.lowest) < OUTLIER * m.sigma()); ++turn) {  // without outliers
        const float reach = m.sigma() < infinity() ? OUTLIER * m.sigma() : FINITE / 2;
        m = sample.moments(shift, fmaxf(shift + m.mean() - reach, -FINITE), fminf(shift + m.mean() + reach, FINITE));
        if (!m.count) return guess;
    }

    // A normal row has as many above this; for others the sample is asked, by halves
    float low = m.lowest, high = m.peak, top = shift + m.mean() + m.sigma() * normal_quantile(__fdividef(wanted, m.count));
#pragma unroll 1
    for (int turn = 0; turn < 10; ++turn) {
        const float found = sample.count_from(top);
        if (2.0f * found < wanted) {
            high = top;
        } else if (found > 2.0f * wanted) {
            low = top;
        } else {
            guess.top = top;
            break;
        }
        top = 0.5f * low + 0.5f * high;
    }

    if (guess.top < infinity() && request.top_p < 1.0 && !top_k && !(request.min_p > 0.0)) {
        const float low = fmaxf(m.lowest, lowest_wanted(guess.anchor, LOG2E / request.temperature, count, request.top_p));
        guess.others = {min(key_of(low), key_of(guess.top) - 1), key_of(guess.top) - 1, false};
    }
    return guess;
}
