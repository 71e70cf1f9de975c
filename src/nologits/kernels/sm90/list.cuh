// The boundary among the entries of a list: the few elements of a row that a probe has found inside its bracket. Every block of the
// cluster gathers them and does the same work, so that nobody waits for an answer.
#pragma once
#include "row.cuh"

// One of the row's list's entries for each thread, or 0, which comes after every other; the last reduction over the row began with
// each block's number of them.
__device__ __forceinline__ Entry listed_entry(const Entry* list, u32 count) {
    if (threadIdx.x >= count) return 0;
    const Slot* const parts = last_board();
    u32 at = threadIdx.x, rank = 0;
    while (rank + 1 < CLUSTER && at >= count_of(parts[rank])) at -= count_of(parts[rank++]);
    return load_remote(&list[at], rank);
}

#if ARITY == 0

// Puts the entries in order: the place of one is how many are larger. Threads share the comparisons with an entry, where they can.
__device__ __noinline__ void sort_list(u32 count, Entry mine) {
    u32(&places)[BINS] = work.totals;
    __syncthreads();
    if (threadIdx.x < LISTED) {
        work.sorted[threadIdx.x] = mine;
        places[threadIdx.x] = 0;
    }
    __syncthreads();
    const u32 width = (count + 31) & ~31u, shares = THREADS / width, share = threadIdx.x / width, entry = threadIdx.x - share * width;
    if (share < shares) {
        const u32 length = (count + 2 * shares - 1) / (2 * shares) * 2, end = min(count, (share + 1) * length);
        const Entry compared = work.sorted[entry];
        u32 larger = 0;
#pragma unroll 4
        for (u32 i = share * length; i < end; i += 2) {
            const Pair pair = *reinterpret_cast<const Pair*>(&work.sorted[i]);
            larger += pair.first > compared;
            larger += pair.second > compared;
        }
        atomicAdd(&places[entry], larger);
    }
    __syncthreads();
    if (threadIdx.x < count) work.sorted[places[threadIdx.x]] = mine;
    __syncthreads();
}

// Of sorted entries, as many are kept as are needed while those before them (and `above`) have not reached the target; p < 1 makes
// that a share of their mass.
__device__ __forceinline__ u32 masses_needed(u32 count, u64 above, double p, double target) {
    const u64 mine = threadIdx.x < count ? units_of(key_of_entry(work.sorted[threadIdx.x])) : 0;
    u64 total;
    const u64 through = scan_block(mine, total);
    if (p < 1.0) target = fmax(p * static_cast<double>(total), 0.5);
    return __syncthreads_count(threadIdx.x < count && static_cast<double>(above + through - mine) < target);
}

// The id and key up to which the first `kept` of the sorted entries go.
__device__ __forceinline__ Found last_kept(u32 kept) {
    const Entry last = work.sorted[kept - 1];
    const int key = key_of_entry(last);
    const u32 copies = __syncthreads_count(threadIdx.x < kept && key_of_entry(work.sorted[threadIdx.x]) == key);
    return {{key, DUPLICATES ? id_of_entry(last) : EVERY_ID}, copies};
}

// The boundary of a top-p among entries above which there is the mass `above`; what lies below was weighed in fp32, which may be off by
// `doubt`. False if that leaves it open. `inside` becomes the entries' mass. An entry is needed if the mass before it, less p times
// the whole, is negative.
__device__ __noinline__ bool settle(const Entry* list, u32 count, double p, u64 above, u64 below, u64 below_error, Found& found, u64& inside) {
    if (!count) return inside = 0;
    const Entry entry = listed_entry(list, count);
    scan_block(threadIdx.x < count ? units_of(key_of_entry(entry)) : 0, inside);
    const double total = static_cast<double>(above + inside + below), doubt = p * below_error + total * 0x1p-44;
    if (!(above < p * total - doubt && above + inside > p * total + doubt)) return false;
    sort_list(count, entry);
    const u64 mine = threadIdx.x < count ? units_of(key_of_entry(work.sorted[threadIdx.x])) : 0;
    const u64 through = scan_block(mine, inside);
    const double before = static_cast<double>(above + through - mine) - p * total;
    if (__syncthreads_or(threadIdx.x < count && fabs(before) <= doubt)) return false;
    found = last_kept(__syncthreads_count(threadIdx.x < count && before < 0.0));
    return true;
}

// The boundary of a top-k, or (mass) of a top-p; `above` is what the target counts before the list. `kept` becomes how many
// entries are kept, the first of the sorted ones.
__device__ __forceinline__ Found search_list(bool mass, u32 count, u64 above, const Entry* list, double target,
                                             u32& kept) {
    sort_list(count, listed_entry(list, count));
    kept = mass ? masses_needed(count, above, 1.0, target) : static_cast<u32>(target) - static_cast<u32>(above);
    return last_kept(kept);
}

// Top-k and top-p of what is put aside and above `floor`, where that is all there is.
__device__ __forceinline__ Found filter_list(u32 count, int floor, u64 k, double p, u32& kept) {
    sort_list(count, listed_entry(aside, count));
    kept = __syncthreads_count(threadIdx.x < count && key_of_entry(work.sorted[threadIdx.x]) > floor);
    if (k < kept) kept = static_cast<u32>(k);
    if (p < 1.0) kept = masses_needed(kept, 0, p, 0.0);
    return last_kept(kept);
}

#else  // the paper's pivot search, for comparison

struct Sums {
    int smallest, largest;
    u64 from[ARITY - 1];

    __device__ __forceinline__ Sums over_lanes() const {
        Sums sums = {min_lanes(smallest), max_lanes(largest), {}};
#pragma unroll
        for (int j = 0; j < ARITY - 1; ++j) sums.from[j] = sum_lanes(from[j]);
        return sums;
    }
    static __device__ __forceinline__ Sums nothing() { return {HIGHEST_KEY, LOWEST_KEY, {}}; }
};

// Largest key between `low` and `high` from which on the entries, one a thread, reach the target (`above` counts towards it):
// ARITY - 1 pivots a round, until one value is left between them. `above` becomes the measure of larger keys.
__device__ __forceinline__ int find_pivot(int key, u64 each, int low, int high, u64& above, double target) {
    while (low < high) {
        const u32 stride = (static_cast<u32>(high) - static_cast<u32>(low)) / ARITY;
        int pivot[ARITY - 1];
        Sums sums = Sums::nothing();
        const bool inside = key >= low && key <= high;
        if (inside) sums.smallest = sums.largest = key;
#pragma unroll
        for (int j = 0; j < ARITY - 1; ++j) {
            pivot[j] = static_cast<int>(static_cast<u32>(low) + stride * (j + 1) + 1);
            if (inside && key >= pivot[j]) sums.from[j] = each;
        }
        sums = reduce_block(sums);
        if (sums.smallest >= sums.largest) return sums.largest;
        int next_low = sums.smallest, next_high = sums.largest;
        u64 next_above = above;
#pragma unroll
        for (int j = 0; j < ARITY - 1; ++j) {
            const u64 reached = above + sums.from[j];
            if (static_cast<double>(reached) >= target) {
                next_low = max(next_low, pivot[j]);
            } else if (pivot[j] <= next_high) {  // the lowest that does not reach it
                next_high = pivot[j] - 1;
                next_above = reached;
            }
        }
        low = next_low;
        high = next_high;
        above = next_above;
    }
    return low;
}

// As above; `kept` is 0.
__device__ __forceinline__ Found search_list(bool mass, u32 count, u64 above, const Entry* list, double target,
                                             u32& kept) {
    const Entry entry = listed_entry(list, count);
    const bool there = threadIdx.x < count;
    const int mine = there ? key_of_entry(entry) : LOWEST_KEY;
    const u64 each = !there ? 0 : mass ? units_of(mine) : 1;
    const int key = find_pivot(mine, each, LOWEST_KEY + 1, HIGHEST_KEY - 1, above, target);
    const bool copy = there && mine == key;
    const u32 copies = __syncthreads_count(copy), wanted = copies_kept(above, mass ? units_of(key) : 1, copies, target);
    kept = 0;
    if (wanted == copies || !DUPLICATES) return {{key, EVERY_ID}, copies};
    u64 none = 0;
    const int reverse = copy ? -1 - id_of_entry(entry) : LOWEST_KEY;
    return {{key, -1 - find_pivot(reverse, copy, -MAX_IDS, -1, none, wanted)}, wanted};
}

__device__ __forceinline__ Found filter_list(u32, int, u64, double, u32&) { return {}; }  // not asked

#endif
