// What choose.cu leaves of a row: results, or an open row for finish.cu.
#pragma once
#include "held.cuh"

__device__ __forceinline__ void write_invalid(const Params& p, int row) {
    p.tokens[row] = -1;
#if MASS
    p.logprobs[row] = p.log_masses[row] = not_a_number();
#endif
#if RAW
    p.raw_logprobs[row] = not_a_number();
#endif
}

// Of all blocks, or of all shards; by one warp. Shards have thresholds of their own: what a lower one makes a candidate is no candidate
// of the row (choose.cu), and their rests come in other units.
__device__ __forceinline__ void join_slots(const Params& p, int row, float temperature) {
#if SHARD
    const int shard = threadIdx.x & 31;
    const i64 at = static_cast<i64>(row) * p.slots + shard;
    const float threshold = shard < p.slots ? p.slot_thresholds[at] : LOWEST_LOGIT;
    float highest = threshold;
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) highest = fmaxf(highest, __shfl_xor_sync(ALL, highest, lanes));
    Below below = {highest, true, 0.0, 0.0};
    if (p.rests && shard < p.slots) {
        const double unit = temperature > 0.0f ? exp((static_cast<double>(threshold) - highest) / temperature) : 0.0;
        below.rest = p.rests[at] * unit;
        below.doubt = p.doubts[at] * unit;
    }
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) {
        below.rest += __shfl_xor_sync(ALL, below.rest, lanes);
        below.doubt += __shfl_xor_sync(ALL, below.doubt, lanes);
    }
#else
    const Below below = below_slots(p, row, temperature);
#endif
    if ((threadIdx.x & 31) != 0) return;
    work.threshold = below.threshold;
    work.agreed = below.agreed;
    work.rest = below.rest;
    work.doubt = below.doubt;
}

// The block's best, and with it the row's results.
__device__ __forceinline__ void write_result(const Params& p, int row, const Candidate& mine, float peak, float temperature, u64 kept_mass) {
    const Candidate best = reduce_block(Best{mine}).candidate;
    if (threadIdx.x == 0) write_filtered(p, row, best, peak, temperature, kept_mass);
    if (threadIdx.x < 32) write_raw(p, row, best.logit);
}

// Leaves a row to finish.cu, with an empty histogram in place of its candidates. They hold its likeliest tokens, or those are looked for
// as well (`topping`).
__device__ __forceinline__ void leave_open(const Params& p, int row, const Filters& filters, const Scale& scale, bool topping, float high) {
    Entry* const bins = p.entries + static_cast<i64>(row) * CAPACITY;
    for (int i = threadIdx.x; i < CAPACITY; i += THREADS) bins[i] = 0;
    if (threadIdx.x != 0) return;
    OpenRow open = {};
    open.lowest = filters.min_p ? work.cut : key_of(-infinity()) + 1;
    begin_filters(p, open, work.request, filters, scale, high);
    if (topping) {
        open.topping = 1;
        open.floor = {key_of(-infinity()), NO_ID};
        begin_count(open, scale, p.num_top);
    }
    p.open[row] = open;
    atomicAdd(&p.progress[0], 1);
    if (p.open_rows) atomicAdd(p.open_rows, 1ull);
}

// Leaves a row to finish.cu whose boundary is known but for the exact mass of what is no candidate: one of the list's. Before them come
// candidates of mass `above`, the best of which is `best`.
__device__ __forceinline__ void leave_in_doubt(const Params& p, int row, const Scale& scale, const Candidate& best, int count, u64 above, u64 mass) {
    Entry* const words = p.entries + static_cast<i64>(row) * CAPACITY;
    for (int i = threadIdx.x; i < CAPACITY; i += THREADS) words[i] = i >= LIST && i < LIST + count ? sorted[i - LIST] : 0;
    __syncthreads();
    if (threadIdx.x != 0) return;
    words[0] = mass;
    words[KEPT] = above;
    words[COUNT] = count;
    store_winner(words + DRAWN, best);
    OpenRow open = {};
    open.mode = WEIGHING;
    open.floor = {key_of(-infinity()), NO_ID};
    open.first = min(key_of(scale.lowest), key_of(work.threshold) - 1);
    open.last = key_of(work.threshold) - 1;
    open.weighed = 1;
    open.above = above;
    p.open[row] = open;
    atomicAdd(&p.progress[0], 1);
    if (p.open_rows) atomicAdd(p.open_rows, 1ull);
}

// Finds the row's likeliest tokens, and how many copies its peak has. False if they are not surely among the candidates.
__device__ __forceinline__ bool find_tops(const Params& p, int held_count, int threshold, int peak, int& ties) {
    const KeyBins bins(threshold, peak);
    u32 mine_at_peak = 0;
    each_held(held_count, [&](Entry entry) {
        const int key = key_of_entry(entry);
        if (key < threshold) return;
        atomicAdd(&work.bins[bins.bin_of(key)], 1);
        mine_at_peak += key == peak;
    });
    ties = static_cast<int>(reduce_block(Number{mine_at_peak}).sum);
    const u32 in_bin = work.bins[THREADS - 1 - threadIdx.x];
    const Running running = scan_block(Binned{in_bin, 0.0f});
    work.bins[THREADS - 1 - threadIdx.x] = 0;
    const bool inside = running.through.count - in_bin < p.num_top;
    const int count = list(held_count, bins.first_of_upper(__syncthreads_count(inside)), HIGHEST_KEY);
    if (threadIdx.x < MOST_TOP) work.tops[threadIdx.x] = threadIdx.x < min(count, p.num_top) ? sorted[threadIdx.x] : 0;
    __syncthreads();
    return count >= p.num_top || work.threshold == LOWEST_LOGIT;
}

// Writes them; those from `last` on are kept, and at most `most`.
__device__ __forceinline__ void write_tops(const Params& p, int row, Entry last, i64 most, float temperature, float peak, double total) {
    const int i = threadIdx.x;
    if (i >= p.num_top) return;
    const Entry entry = work.tops[i];
    p.tops[static_cast<i64>(row) * p.num_top + i] = entry;
    if (p.raw_top_ids) write_raw_top(p, row, i, entry, peak, work.raw_total);
    if (p.top_ids) write_top(p, row, i, entry, entry >= last && i < most, temperature, peak, total);
}
