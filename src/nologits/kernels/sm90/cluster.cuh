// Reductions over a thread block and over a cluster of them that works on one row. All results are known to all threads.
#pragma once
#include "contract.cuh"

#ifndef CLUSTER
#define CLUSTER 8  // thread blocks a row
#endif

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / 32;

struct alignas(16) Slot {
    u64 words[8];
};

struct Exchange {
    Slot board[2][CLUSTER];  // what each block of the cluster said; two, so that nobody overwrites what others still read
    Slot scratch[2][WARPS];
};

__device__ __forceinline__ u32 remote_address(const void* pointer, u32 rank) {
    u32 remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(pointer)), "r"(rank));
    return remote;
}

__device__ __forceinline__ void store_remote(u32 address, u64 word) {
    asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(address), "l"(word) : "memory");
}

__device__ __forceinline__ u64 load_remote(u32 address) {
    u64 word;
    asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(word) : "r"(address) : "memory");
    return word;
}

// Every thread of the cluster is here, and sees what all of them have written before.
__device__ __forceinline__ void sync_row() {
#if CLUSTER == 1
    __syncthreads();
#else
    cluster_sync();
#endif
}

__device__ __forceinline__ u32 row_rank() {
#if CLUSTER == 1
    return 0;
#else
    return cluster_rank();
#endif
}

template <typename T>
__device__ __forceinline__ T shuffle_words(const T& mine, int lanes) {
    static_assert(sizeof(T) % 4 == 0, "in words");
    T other;
    const u32* from = reinterpret_cast<const u32*>(&mine);
    u32* to = reinterpret_cast<u32*>(&other);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T) / 4); ++i) to[i] = __shfl_xor_sync(ALL, from[i], lanes);
    return other;
}

// Of a block. `turn` counts reductions and exchanges alike.
template <typename T, typename Combine>
__device__ __forceinline__ T block_reduce(Exchange& exchange, u32& turn, T mine, Combine combine) {
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) mine = combine(mine, shuffle_words(mine, lanes));
    Slot(&scratch)[WARPS] = exchange.scratch[turn++ & 1];
    if ((threadIdx.x & 31) == 0) *reinterpret_cast<T*>(&scratch[threadIdx.x >> 5]) = mine;
    __syncthreads();
    mine = *reinterpret_cast<const T*>(&scratch[threadIdx.x & (WARPS - 1)]);
#pragma unroll
    for (int lanes = WARPS / 2; lanes; lanes >>= 1) mine = combine(mine, shuffle_words(mine, lanes));
    return mine;
}

// Of a row: `parts` becomes what each block has.
template <typename T, typename Combine>
__device__ __forceinline__ T row_reduce(Exchange& exchange, u32& turn, T mine, Combine combine, const Slot*& parts) {
    static_assert(sizeof(T) <= sizeof(Slot), "fits a slot");
    Slot(&board)[CLUSTER] = exchange.board[turn & 1];
    mine = block_reduce(exchange, turn, mine, combine);
    if (threadIdx.x < CLUSTER) {
        Slot slot;
        *reinterpret_cast<T*>(&slot) = mine;
        const u32 target = remote_address(&board[row_rank()], threadIdx.x);
#pragma unroll
        for (int i = 0; i < static_cast<int>((sizeof(T) + 7) / 8); ++i) store_remote(target + 8 * i, slot.words[i]);
    }
    sync_row();
    parts = board;
    mine = *reinterpret_cast<const T*>(&board[0]);
#pragma unroll
    for (int r = 1; r < CLUSTER; ++r) mine = combine(mine, *reinterpret_cast<const T*>(&board[r]));
    return mine;
}

// Sums over the threads up to this one, in the order of their numbers, for whatever can be added.
template <typename T>
__device__ __forceinline__ T block_scan(Exchange& exchange, u32& turn, T mine) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes <<= 1) {
        T other;
        const u32* from = reinterpret_cast<const u32*>(&mine);
        u32* to = reinterpret_cast<u32*>(&other);
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(T) / 4); ++i) to[i] = __shfl_up_sync(ALL, from[i], lanes);
        if (lane >= lanes) mine = other + mine;
    }
    Slot(&scratch)[WARPS] = exchange.scratch[turn++ & 1];
    if (lane == 31) *reinterpret_cast<T*>(&scratch[warp]) = mine;
    __syncthreads();
    T before{};
#pragma unroll
    for (int w = 0; w < WARPS; ++w)
        if (w < warp) before = before + *reinterpret_cast<const T*>(&scratch[w]);
    return before + mine;
}
