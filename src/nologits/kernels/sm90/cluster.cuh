// Reductions over a thread block and over the cluster of them that works on one row.
//
// What is reduced is a struct with two members: `over_lanes()`, the reduction over a warp, known to all its lanes, and `nothing()`,
// what changes no reduction.
#pragma once
#include "contract.cuh"

#ifndef CLUSTER
#define CLUSTER 8  // thread blocks a row
#endif

#ifndef THREADS
#define THREADS 512
#endif
constexpr int WARPS = THREADS / 32;

struct alignas(16) Slot {
    u64 words[6];
};

struct Exchange {
    Slot board[2][CLUSTER];  // what each block of the cluster said; two, used in turn, for some may still read while others write
    Slot scratch[WARPS];     // what each warp of this block said
    u32 turn;                // the board that was used last
};
__shared__ Exchange exchanged;

__device__ __forceinline__ u32 remote_address(const void* pointer, u32 rank) {
    u32 remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(pointer)), "r"(rank));
    return remote;
}

__device__ __forceinline__ void store_remote(u32 address, u64 word) {
    asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(address), "l"(word) : "memory");
}

// What another block had there at the last barrier of the cluster.
__device__ __forceinline__ u64 load_remote(const u64* pointer, u32 rank) {
#if CLUSTER == 1
    return *pointer;
#else
    u64 word;
    asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(word) : "r"(remote_address(pointer, rank)));
    return word;
#endif
}

__device__ __forceinline__ uint4 load_remote(const u32* pointer, u32 rank) {
#if CLUSTER == 1
    return *reinterpret_cast<const uint4*>(pointer);
#else
    uint4 words;
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "r"(remote_address(pointer, rank)));
    return words;
#endif
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

// ---- over the lanes of a warp

__device__ __forceinline__ u32 sum_lanes(u32 x) { return __reduce_add_sync(ALL, x); }

// Sums below 2^62, in three parts that cannot overflow.
__device__ __forceinline__ u64 sum_lanes(u64 x) {
    const u64 low = sum_lanes(static_cast<u32>(x) & 0x3FFFFF), middle = sum_lanes(static_cast<u32>(x >> 22) & 0x3FFFFF),
              high = sum_lanes(static_cast<u32>(x >> 44));
    return low + (middle << 22) + (high << 44);
}

__device__ __forceinline__ float sum_lanes(float x) {
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) x += __shfl_xor_sync(ALL, x, lanes);
    return x;
}

__device__ __forceinline__ int min_lanes(int x) { return __reduce_min_sync(ALL, x); }
__device__ __forceinline__ int max_lanes(int x) { return __reduce_max_sync(ALL, x); }

// ---- over more. All threads of the block, or of the row, call these together

// Over a block; known to all threads.
template <typename T>
__device__ __forceinline__ T reduce_block(const T& mine) {
    const int lane = threadIdx.x & 31;
    const T of_warp = mine.over_lanes();
    __syncthreads();
    if (lane == 0) *reinterpret_cast<T*>(&exchanged.scratch[threadIdx.x >> 5]) = of_warp;
    __syncthreads();
    const T other = lane < WARPS ? *reinterpret_cast<const T*>(&exchanged.scratch[lane]) : T::nothing();
    return other.over_lanes();
}

// Before the first reduction over a row.
__device__ __forceinline__ void begin_exchange() {
    if (threadIdx.x == 0) exchanged.turn = 0;
}

// What each block of the row gave to the last reduction over it.
__device__ __forceinline__ const Slot* last_board() { return exchanged.board[exchanged.turn]; }

// Over a row; known to all threads.
template <typename T>
__device__ __forceinline__ T reduce_row(const T& mine) {
    static_assert(sizeof(T) <= sizeof(Slot), "fits a slot");
    const int lane = threadIdx.x & 31;
    const T of_warp = mine.over_lanes();
    __syncthreads();
    if (threadIdx.x == 0) exchanged.turn ^= 1;
    if (lane == 0) *reinterpret_cast<T*>(&exchanged.scratch[threadIdx.x >> 5]) = of_warp;
    __syncthreads();
    const Slot* const board = last_board();
    if (threadIdx.x < 32) {
        const T other = lane < WARPS ? *reinterpret_cast<const T*>(&exchanged.scratch[lane]) : T::nothing();
        Slot slot;
        *reinterpret_cast<T*>(&slot) = other.over_lanes();
        if (lane < CLUSTER) {
            const u32 target = remote_address(&board[row_rank()], lane);
#pragma unroll
            for (int i = 0; i < static_cast<int>((sizeof(T) + 7) / 8); ++i) store_remote(target + 8 * i, slot.words[i]);
        }
    }
    sync_row();
    const T other = lane < CLUSTER ? *reinterpret_cast<const T*>(&board[lane]) : T::nothing();
    return other.over_lanes();
}

// ---- running sums over the threads of a block

struct Binned {
    u32 count;
    float measure;
};

struct Running {
    Binned through, total;  // up to this thread with it; of all
};

__device__ __forceinline__ Running scan_block(Binned mine) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes <<= 1) {
        const Binned other = {__shfl_up_sync(ALL, mine.count, lanes), __shfl_up_sync(ALL, mine.measure, lanes)};
        if (lane >= lanes) mine = {mine.count + other.count, mine.measure + other.measure};
    }
    __syncthreads();
    if (lane == 31) *reinterpret_cast<Binned*>(&exchanged.scratch[warp]) = mine;
    __syncthreads();
    const Binned other = lane < WARPS ? *reinterpret_cast<const Binned*>(&exchanged.scratch[lane]) : Binned{0, 0.0f};
    const bool earlier = lane < warp;
    return {{sum_lanes(earlier ? other.count : 0u) + mine.count, sum_lanes(earlier ? other.measure : 0.0f) + mine.measure},
            {sum_lanes(other.count), sum_lanes(other.measure)}};
}

__device__ __forceinline__ u64 scan_block(u64 mine, u64& total) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes <<= 1) {
        const u64 other = __shfl_up_sync(ALL, mine, lanes);
        if (lane >= lanes) mine += other;
    }
    __syncthreads();
    if (lane == 31) exchanged.scratch[warp].words[0] = mine;
    __syncthreads();
    const u64 other = lane < WARPS ? exchanged.scratch[lane].words[0] : 0;
    total = sum_lanes(other);
    return sum_lanes(lane < warp ? other : 0ull) + mine;
}
