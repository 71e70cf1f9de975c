// What the kernels after the matmul make of a row's slots: the winner, and the row's mass.
#pragma once
#include "params.cuh"
#include "request.cuh"

// The winner of a slot: its score is made again from its logit and token, bit for bit.
__device__ __forceinline__ Candidate winner_of(float2 slot, const Stream& stream, float spread) {
    const u32 token = __float_as_uint(slot.y);
    if (token == NO_TOKEN) return {NOTHING_ORDER, NO_TOKEN, 0.0f};
    float value = slot.x;
#if !GREEDY
    uint4 words[1];
    philox(words, {token & ~72u}, stream);
    const u32 low = token & 8 ? words[0].y : words[0].x, high = token & 8 ? words[0].w : words[0].z;
    value = score(value, spread, token & 64 ? high : low);
#endif
    return {score_order(value), token, slot.x};
}

__device__ __forceinline__ Candidate best_of_lanes(Candidate best) {
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) keep_better(best, shuffle_xor(best, lanes));
    return best;
}

constexpr int MASS_THREADS = 128;  // the order of a row's masses is that of so many threads

// A thread's part of a row's mass relative to `logit`.
__device__ __forceinline__ float mass_of_thread(const float2* masses, int tiles, int thread, float logit, float inverse) {
    float total = 0.0f;
    for (int t = thread; t < tiles; t += MASS_THREADS) {
        const float2 mass = masses[t];
        if (mass.y > 0.0f) total += mass.y * exp2_approx((mass.x - logit) * inverse);
    }
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) total += __shfl_xor_sync(ALL, total, lanes);
    return total;
}

#ifndef LARGE
#define LARGE __forceinline__  // beside wgmma no function may be called
#endif

// Mass of the row relative to `logit`, as a natural logarithm, by one warp; the same bits as by four.
__device__ LARGE float log_total_of_warp(const float2* masses, int tiles, float logit, float inverse) {
    float total = 0.0f;
#pragma unroll 1
    for (int w = 0; w < MASS_THREADS / 32; ++w) total += mass_of_thread(masses, tiles, 32 * w + (threadIdx.x & 31), logit, inverse);
    return LN2 * __log2f(total);
}

// Writes a filtered row's draw. `kept`: the mass of what the filters keep, in units of 2^-40 of the largest logit's.
__device__ __forceinline__ void write_filtered(const Params& p, int row, const Candidate& best, float peak, float temperature, u64 kept) {
    p.tokens[row] = best.token;
#if MASS
    const double logprob = (static_cast<double>(best.logit) - peak) / temperature - log(kept * 0x1p-40);
    p.logprobs[row] = best.logit == infinity() ? 0.0f : static_cast<float>(logprob);
#endif
}

// A logit whose mass is not much less than the row's, whatever was drawn: under a high temperature that may be far below.
__device__ __forceinline__ float reference_of_thread(const float2* masses, int tiles, int thread) {
    float reference = LOWEST_LOGIT;
    for (int t = thread; t < tiles; t += MASS_THREADS)
        if (masses[t].y > 0.0f) reference = fmaxf(reference, masses[t].x);
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) reference = fmaxf(reference, __shfl_xor_sync(ALL, reference, lanes));
    return reference;
}

// The token's log-probability under the head's own logits, by one warp.
__device__ __forceinline__ void write_raw(const Params& p, int row, float logit) {
#if RAW
    const float2* const masses = p.raw_masses + static_cast<i64>(row) * p.mass_tiles;
    float reference = LOWEST_LOGIT;
#pragma unroll 1
    for (int w = 0; w < MASS_THREADS / 32; ++w) reference = fmaxf(reference, reference_of_thread(masses, p.mass_tiles, 32 * w + (threadIdx.x & 31)));
    const float total = log_total_of_warp(masses, p.mass_tiles, reference, LOG2E);
    if ((threadIdx.x & 31) == 0) p.raw_logprobs[row] = logit == infinity() ? 0.0f : logit - reference - total;
#endif
}

// What a row without filters has drawn; by one warp.
__device__ __forceinline__ void write_drawn(const Params& p, int row, float temperature, bool valid) {
    const Stream stream = row_stream(p, row);
    Candidate best = {NOTHING_ORDER, NO_TOKEN, 0.0f};
    for (int slot = threadIdx.x; slot < p.slots; slot += 32)
        keep_better(best, winner_of(p.winners[static_cast<i64>(row) * p.slots + slot], stream, row_spread(temperature)));
    best = best_of_lanes(best);
    valid = valid && best.order > score_order(-infinity()) && best.order != NAN_ORDER;
    if (threadIdx.x == 0) p.tokens[row] = valid ? static_cast<i64>(best.token) : -1;
#if MASS
    const bool certain = temperature == 0.0f || best.logit == infinity();
    const float total = log_total_of_warp(p.masses + static_cast<i64>(row) * p.mass_tiles, p.mass_tiles, best.logit, row_inverse(temperature));
    if (threadIdx.x == 0) {
        p.logprobs[row] = valid ? (certain ? 0.0f : -total) : not_a_number();
        p.log_masses[row] = valid ? (certain ? best.logit : best.logit / temperature + total) : not_a_number();
    }
#endif
    if (valid) {
        write_raw(p, row, best.logit);
    } else if (threadIdx.x == 0) {
#if RAW
        p.raw_logprobs[row] = not_a_number();
#endif
    }
}

// What a row's blocks say of what lies below their thresholds: the highest of those, whether it is that of all, the mass below in its
// units, and how far that may be off.
struct Below {
    float threshold;
    bool agreed;
    double rest, doubt;
};

// By one warp; its first lane has the mass.
__device__ __forceinline__ Below below_slots(const Params& p, int row, float temperature) {
    float lowest = infinity(), highest = -infinity();
    double sum = 0.0;
    for (int slot = threadIdx.x & 31; slot < p.slots; slot += 32) {
        const float threshold = p.slot_thresholds[static_cast<i64>(row) * p.slots + slot];
        lowest = fminf(lowest, threshold);
        highest = fmaxf(highest, threshold);
        if (p.rests) sum += p.rests[static_cast<i64>(row) * p.slots + slot];
    }
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) {
        lowest = fminf(lowest, __shfl_xor_sync(ALL, lowest, lanes));
        highest = fmaxf(highest, __shfl_xor_sync(ALL, highest, lanes));
        sum += __shfl_xor_sync(ALL, sum, lanes);
    }
    Below below = {highest, lowest == highest, 0.0, 0.0};
    if ((threadIdx.x & 31) != 0) return below;
    // Exponents were (x inverse + offset), both factors rounded: by a share of the exponent, and by as much for all. How many octaves lie
    // below the threshold, on average, is not known; at most as many as if all tokens had the same share.
    const float inverse = row_inverse(temperature);
    const double slope_error = 0.6931471805599453 * (inverse * static_cast<double>(temperature) / 1.4426950408889634 - 1.0);
    const float offset_error = __fmaf_rn(highest, inverse, rest_offset(highest, inverse));
    const double offset = exp2(-static_cast<double>(offset_error)), octaves = sum * fmaxf(0.0f, 1e-3f + log2_approx(p.V / fmaxf(1e-30f, static_cast<float>(sum))));
    below.rest = (sum + 0.5 * slope_error * octaves) * offset;
    below.doubt = (sum * REST_ERROR + octaves * (REST_ERROR_BY_OCTAVE + 0.5 * fabs(slope_error))) * offset;
    return below;
}

// Has top-p's boundary looked for, at first in bins that are equal in logits: below, all of a row together has less than the share 1 - p;
// above `high` it does not lie.
__device__ __forceinline__ void begin_mass(const Params& p, OpenRow& open, const Request& request, const Scale& scale, float high) {
    open.mode = BY_MASS;
    open.weighed = 1;
    open.first = max(open.floor.key, key_of(scale.lowest));
    open.last = key_of(scale.peak);
    open.above = 0;
    open.target = 0.0;
    open.low = scale.peak - request.temperature * logf(2.0f * vocab_of(p) / static_cast<float>(fmax(1.0 - request.top_p, 1e-13)));
    open.inverse = BINS / (high - open.low);
    if (!(open.inverse > 0.0f && open.inverse < 1e30f)) open.inverse = 0.0f;
}

// Has the boundary of the `count` largest looked for that `floor` keeps.
__device__ __forceinline__ void begin_count(OpenRow& open, const Scale& scale, i64 count) {
    open.mode = BY_COUNT;
    open.first = open.floor.key + 1;
    open.last = key_of(scale.peak);
    open.above = 0;
    open.target = static_cast<double>(count);
    open.inverse = 0.0f;
}

// Has a row's filters looked for from the start; `high` as above.
__device__ __forceinline__ void begin_filters(const Params& p, OpenRow& open, const Request& request, const Filters& filters, const Scale& scale, float high) {
    open.floor = {open.lowest - 1, NO_ID};
    open.weighed = open.topping = 0;
    if (filters.top_k) begin_count(open, scale, request.top_k);
    else if (filters.top_p) begin_mass(p, open, request, scale, high);
    else open.mode = filters.any() ? DRAWING : SETTLED;
}

// A winner in two words.
__device__ __forceinline__ void store_winner(Entry* words, const Candidate& best) {
    words[0] = static_cast<u64>(turned(best.order)) << 32 | best.token;
    words[1] = __float_as_uint(best.logit);
}
__device__ __forceinline__ Candidate load_winner(const Entry* words) {
    const Entry first = __ldcg(words);
    return {turned_back(first >> 32), static_cast<u32>(first), __uint_as_float(static_cast<u32>(__ldcg(words + 1)))};
}

// ---- the likeliest tokens

// Of a greedy row with `ties` tokens at its peak the filters keep so many.
__device__ __forceinline__ i64 kept_of_greedy(const Request& request, int V, i64 ties) {
    i64 kept = request.min_p > 0.0 ? ties : V;
    if (request.top_k > 0) kept = min(kept, request.top_k);
    if (request.top_p < 1.0) kept = max(1ll, static_cast<i64>(ceil(request.top_p * static_cast<double>(min(kept, ties)))));
    return kept;
}

// Writes the i-th of the row's likeliest tokens (0: there are fewer) as it is under the head's own logits, whose total is `raw_total`
// relative to the peak, as a logarithm.
__device__ __forceinline__ void write_raw_top(const Params& p, int row, int i, Entry entry, float peak, float raw_total) {
    const i64 at = static_cast<i64>(row) * p.num_top + i;
    const float logit = value_of(key_of_entry(entry));
    p.raw_top_ids[at] = entry ? id_of_entry(entry) : -1;
    p.raw_top_logprobs[at] = !entry ? -infinity() : logit == infinity() ? 0.0f : logit - peak - raw_total;
}

// And as it is sampled, if it is kept: `total` is the kept mass relative to the peak's, as a logarithm.
__device__ __forceinline__ void write_top(const Params& p, int row, int i, Entry entry, bool kept, float temperature, float peak, double total) {
    const i64 at = static_cast<i64>(row) * p.num_top + i;
    const float logit = value_of(key_of_entry(entry));
    double logprob = (static_cast<double>(logit) - peak) / temperature - total;
    if (temperature == 0.0f) logprob = i == 0 ? 0.0 : -infinity();
    if (logit == infinity()) logprob = 0.0;
    p.top_ids[at] = entry && kept ? id_of_entry(entry) : -1;
    p.top_logprobs[at] = entry && kept ? static_cast<float>(logprob) : -infinity();
}
