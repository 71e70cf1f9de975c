// The boundary among the entries of a list: the few elements of a row that a probe has found inside its bracket. Every block of the
// cluster gathers them and does the same work, so that nobody waits for an answer.
#pragma once
#include "cluster.cuh"

// Sums of masses over the threads up to this one.
__device__ __forceinline__ u64 scan_masses(Slot (&scratch)[WARPS], u64 mine, u64& total) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes <<= 1) {
        const u64 other = __shfl_up_sync(ALL, mine, lanes);
        if (lane >= lanes) mine += other;
    }
    if (lane == 31) scratch[warp].words[0] = mine;
    __syncthreads();
    const u64 other = lane < WARPS ? scratch[lane].words[0] : 0;
    total = sum_lanes(other);
    return sum_lanes(lane < warp ? other : 0ull) + mine;
}

// All entries of the row's list, at most one a thread; `parts` has each block's number of them.
__device__ __forceinline__ void gather_list(const Search& s, u32 count, const Slot* parts, u32 list) {
    Entry entry = 0;  // after every other
    if (threadIdx.x < count) {
        u32 at = threadIdx.x, rank = 0;
        while (rank + 1 < CLUSTER && at >= count_of(parts[rank])) at -= count_of(parts[rank++]);
        entry = load_remote(&s.work.list[list][at], rank);
    }
    s.work.gathered[threadIdx.x] = entry;
    __syncthreads();
}

// Puts the entries in order, by counting for each how many come before it; several threads count for one entry.
__device__ __forceinline__ void rank_list(const Search& s, u32 count) {
    const int helpers = count > THREADS / 2 ? 1 : min(32, THREADS >> (32 - __clz(count - 1)));
    const u32 entry = threadIdx.x / helpers, part = threadIdx.x % helpers;
    const Entry mine = s.work.gathered[entry];
    const ulonglong2* const pairs = reinterpret_cast<const ulonglong2*>(s.work.gathered);
    u32 rank = 0;
#pragma unroll 4
    for (u32 at = part; at < (count + 1) / 2; at += helpers) {
        const ulonglong2 pair = pairs[at];
        rank += pair.x > mine;
        rank += pair.y > mine;
    }
    for (int lanes = helpers / 2; lanes; lanes >>= 1) rank += __shfl_xor_sync(ALL, rank, lanes);
    if (part == 0 && entry < count) s.work.ranked[rank] = mine;
    __syncthreads();
}

// Of ranked entries, as many are kept as are needed while those before them (and `above`) have not reached the target.
__device__ __forceinline__ u32 masses_needed(const Search& s, u32 count, u64 above, double p, double target) {
    const u64 mine = threadIdx.x < count ? units(value_of(key_of_entry(s.work.ranked[threadIdx.x])), s.scale, s.work.table) : 0;
    u64 total;
    const u64 through = scan_masses(s.work.exchange.scratch[s.turn++ & 1], mine, total);
    if (p < 1.0) target = fmax(p * static_cast<double>(total), 0.5);
    return __syncthreads_count(threadIdx.x < count && static_cast<double>(above + through - mine) < target);
}

// The boundary of a top-k, and with p < 1 of the top-p of what it keeps; or (mass) of a top-p.
template <bool mass>
__device__ __forceinline__ Found search_list(const Search& s, const Probe<mass>& all, const Slot* parts, u32 list, double target, double p) {
    gather_list(s, all.count, parts, list);
    rank_list(s, all.count);
    u32 kept;
    if (mass) {
        kept = masses_needed(s, all.count, all.above(), 1.0, target);
    } else {
        kept = static_cast<u32>(target) - all.above();
        if (p < 1.0) kept = masses_needed(s, kept, 0, p, 0.0);
    }
    const Entry last = s.work.ranked[kept - 1];
    const int key = key_of_entry(last);
    const u32 copies = __syncthreads_count(threadIdx.x < kept && key_of_entry(s.work.ranked[threadIdx.x]) == key);
    return {{key, id_of_entry(last)}, copies};
}
