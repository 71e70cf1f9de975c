// A row's candidates in shared memory: bins of them, parts of them in order, draws from them (choose.cu).
#pragma once
#include "cluster.cuh"
#include "request.cuh"
#include "winners.cuh"

struct Workspace {
    Request request;
    double table[PARTS];
    double rest, doubt;  // mass below the threshold, in the threshold's units, and how far it may be off
    float threshold;  // of all blocks; the highest
    bool agreed;      // it was the same for all
    int cut;          // first key that min-p keeps
    u64 above;        // mass that is kept beyond doubt; then all that is
    u32 listed;
    u32 bins[THREADS], upper[THREADS];  // counts; or masses, their lower 20 bits and the others apart, for adding 64 bits takes turns
    Entry tops[MOST_TOP];          // the row's likeliest tokens
    float total, raw_total;        // masses of all tokens relative to the peak's, as logarithms: sampled without filters, raw
};
__shared__ Workspace work;
extern __shared__ __align__(16) Entry held[];  // the row's candidates, CAPACITY; and as many for those of them that are put in order
#define sorted (held + CAPACITY)

struct Number {
    u64 sum;
    __device__ __forceinline__ Number over_lanes() const { return {sum_lanes(sum)}; }
    static __device__ __forceinline__ Number nothing() { return {0}; }
};

struct Best {
    Candidate candidate;
    __device__ __forceinline__ Best over_lanes() const { return {best_of_lanes(candidate)}; }
    static __device__ __forceinline__ Best nothing() { return {{NOTHING_ORDER, NO_TOKEN, 0.0f}}; }
};

// Largest first. A warp's pairs of up to 32 apart are its own, and need no barrier with others.
__device__ __forceinline__ void sort(int size) {
#pragma unroll 1
    for (int run = 2; run <= size; run *= 2) {
#pragma unroll 1
        for (int apart = run / 2; apart; apart /= 2) {
#pragma unroll 1
            for (int i = threadIdx.x; i < size / 2; i += THREADS) {
                const int low = 2 * i - (i & (apart - 1)), high = low + apart;
                const Entry a = sorted[low], b = sorted[high];
                if ((a < b) == !(low & run)) sorted[low] = b, sorted[high] = a;
            }
            if (apart > 32 || (apart == 1 && run >= 64)) __syncthreads();
            else __syncwarp();
        }
    }
    __syncthreads();
}

// Calls step(entry) for the candidates. Once in the code, and not unrolled: all of this runs once a row, and reading code for the first
// time costs more than running it.
template <typename Step>
__device__ __forceinline__ void each_held(int count, Step step) {
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += THREADS) step(held[i]);
}

// Puts the candidates whose keys lie between two in order; says how many they are.
__device__ __noinline__ int list(int held_count, int first, int last) {
    if (threadIdx.x == 0) work.listed = 0;
    __syncthreads();
    each_held(held_count, [&](Entry entry) {
        const int key = key_of_entry(entry);
        if (key >= first && key <= last) sorted[atomicAdd(&work.listed, 1)] = entry;
    });
    __syncthreads();
    const int count = work.listed;
    int size = 64;
    while (size < count) size *= 2;
    for (int i = count + threadIdx.x; i < size; i += THREADS) sorted[i] = 0;
    __syncthreads();
    sort(size);
    return count;
}

// THREADS bins of the keys between two.
struct KeyBins {
    int lowest, shift;
    __device__ __forceinline__ KeyBins(int lowest, int highest) : lowest(lowest), shift(max(0, 32 - __clz(static_cast<u32>(highest) - static_cast<u32>(lowest)) - 9)) {
        static_assert(THREADS == 1 << 9, "shift");
    }
    __device__ __forceinline__ int bin_of(int key) const { return (static_cast<u32>(key) - static_cast<u32>(lowest)) >> shift; }
    __device__ __forceinline__ int first_of(int bin) const { return static_cast<int>(static_cast<u32>(lowest) + (static_cast<u32>(bin) << shift)); }
    // Of the last of so many bins from the top.
    __device__ __forceinline__ int first_of_upper(int count) const { return first_of(THREADS - count); }
};

__device__ __forceinline__ void add_mass(int bin, u64 mass) {
    atomicAdd(&work.bins[bin], static_cast<u32>(mass) & 0xFFFFF);
    atomicAdd(&work.upper[bin], static_cast<u32>(mass >> 20));
}

// A bin's. As many copies of the peak as there is room for overflow, by one.
__device__ __forceinline__ u64 mass_of(int bin, bool has_peak) {
    const u64 mass = work.bins[bin] + (static_cast<u64>(work.upper[bin]) << 20);
    static_assert(CAPACITY == 1 << 12, "so that at most one bit is lost");
    return has_peak && mass >> MASS_BITS == 0 ? 1ull << (MASS_BITS + 12) : mass;
}

// The best of a thread's part of the held entries with keys from `first` on, and of as many sorted ones as are kept.
__device__ __noinline__ Candidate draw_from(int first, int held_count, int kept, const Stream& stream, float spread) {
    Candidate best = {NOTHING_ORDER, NO_TOKEN, 0.0f};
#pragma unroll 1
    for (int i = threadIdx.x; i < held_count + kept; i += THREADS) {
        const Entry entry = i < held_count ? held[i] : sorted[i - held_count];
        const int key = key_of_entry(entry);
        if (i >= held_count || key >= first) keep_better(best, winner_of(make_float2(value_of(key), __int_as_float(id_of_entry(entry))), stream, spread));
    }
    return best;
}
