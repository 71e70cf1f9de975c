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

// All entries of the row's list, at most one a thread, in order; `parts` has each block's number of them. A bitonic sort: partners
// in a warp exchange by shuffles, others through shared memory.
__device__ __forceinline__ void sort_list(const Search& s, u32 count, const Slot* parts, u32 list) {
    const u32 thread = threadIdx.x;
    Entry mine = 0;  // after every other
    if (thread < count) {
        u32 at = thread, rank = 0;
        while (rank + 1 < CLUSTER && at >= count_of(parts[rank])) at -= count_of(parts[rank++]);
        mine = load_remote(&s.work.list[list][at], rank);
    }
    Entry* const sorted = s.work.sorted;
    auto exchange = [&](Entry other, u32 size, u32 stride) {
        const bool larger = ((thread & size) == 0) == ((thread & stride) == 0);  // this thread keeps the larger of the two
        mine = (other > mine) == larger ? other : mine;
    };
#pragma unroll
    for (u32 size = 2; size <= 32; size *= 2) {
#pragma unroll
        for (u32 stride = size / 2; stride; stride /= 2) exchange(__shfl_xor_sync(ALL, mine, stride), size, stride);
    }
#pragma unroll 1
    for (u32 size = 64; size < 2 * count; size *= 2) {
#pragma unroll 1
        for (u32 stride = size / 2; stride >= 32; stride /= 2) {
            __syncthreads();
            sorted[thread] = mine;
            __syncthreads();
            exchange(sorted[thread ^ stride], size, stride);
        }
#pragma unroll
        for (u32 stride = 16; stride; stride /= 2) exchange(__shfl_xor_sync(ALL, mine, stride), size, stride);
    }
    __syncthreads();
    sorted[thread] = mine;
    __syncthreads();
}

// Of sorted entries, as many are kept as are needed while those before them (and `above`) have not reached the target; p < 1 makes
// that a share of their mass.
__device__ __forceinline__ u32 masses_needed(const Search& s, u32 count, u64 above, double p, double target) {
    const u64 mine = threadIdx.x < count ? s.units_of(key_of_entry(s.work.sorted[threadIdx.x])) : 0;
    u64 total;
    const u64 through = scan_masses(s.work.exchange.scratch[s.turn++ & 1], mine, total);
    if (p < 1.0) target = fmax(p * static_cast<double>(total), 0.5);
    return __syncthreads_count(threadIdx.x < count && static_cast<double>(above + through - mine) < target);
}

// The boundary of a top-k, and with p < 1 of the top-p of what it keeps; or (mass) of a top-p. `above` is what the target counts
// before the list.
__device__ __forceinline__ Found search_list(const Search& s, bool mass, u32 count, u64 above, const Slot* parts, u32 list, double target, double p) {
    sort_list(s, count, parts, list);
    u32 kept = mass ? count : static_cast<u32>(target) - static_cast<u32>(above);
    if (mass || p < 1.0) kept = masses_needed(s, kept, above, p, target);
    const Entry last = s.work.sorted[kept - 1];
    const int key = key_of_entry(last);
    const u32 copies = __syncthreads_count(threadIdx.x < kept && key_of_entry(s.work.sorted[threadIdx.x]) == key);
    return {{key, id_of_entry(last)}, copies};
}
