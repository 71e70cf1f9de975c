// What the parts of the filters' kernel share: what a block knows of its row, its workspace.
#pragma once
#include "chunk.cuh"
#include "request.cuh"

// Switches of the ablation, as shipped
#ifndef ARITY
#define ARITY 0       // 2, 3 or 4: the list is searched with so many parts a round, as in the paper; 0: it is sorted
#define TRUNCATE 1    // the largest logits are put aside while the row is read; 0: every level of the search sweeps the row
#define DUPLICATES 1  // 0: copies of the boundary value are all kept (wrong unless values differ)
#define TIERED 1      // 0: no list, the search sweeps until its bracket is one value
#endif

#ifndef GATHERED
#define GATHERED 8192  // logits that a block can put aside
#endif

constexpr int BINS = 2048;
constexpr int LISTED = 512;             // entries of a row's list
constexpr float MARGIN = 32.0f;         // elements on both sides of where a histogram says the boundary is

// ---- what is known of a row

struct Range {
    int first, last;  // keys
    bool by_key;      // bins are equal in keys; at first they are equal in value
};

struct Guess {
    float top;     // logits from here on are put aside
    float anchor;  // the sample's peak
    Range others;  // for the histogram of the rest
};

struct Statistics {
    u32 gathered;    // logits that are put aside; at least all of those above the guess
    u32 lost;        // blocks that had no room for theirs
    int lowest;      // key of the lowest logit above -inf
    int peak;        // key of the largest logit
    u32 count;       // above -inf
    u32 broken;      // NaNs

    __device__ __forceinline__ Statistics over_lanes() const {
        return {sum_lanes(gathered), sum_lanes(lost), min_lanes(lowest), max_lanes(peak), sum_lanes(count), sum_lanes(broken)};
    }
    static __device__ __forceinline__ Statistics nothing() { return {0, 0, HIGHEST_KEY, LOWEST_KEY, 0, 0}; }
};

// The mass of what is not put aside, in units of the guess's anchor, and how far it may be off.
struct Rest {
    u64 mass, error;

    __device__ __forceinline__ Rest over_lanes() const { return {sum_lanes(mass), sum_lanes(error)}; }
    static __device__ __forceinline__ Rest nothing() { return {0, 0}; }
};

// What a block knows of its row, in shared memory: registers are scarce, and the parts of the kernel are functions of their own.
struct Workspace {
    Request request;
    Chunk chunk;
    Guess guess;
    Statistics stats;
    Rest rest;
    Scale scale;
    double table[PARTS];

    u32 gathered;  // of this chunk
    u32 listed;
    alignas(16) Entry list[2][LISTED];  // two, so that nobody overwrites what others still read
    alignas(16) Entry sorted[LISTED];   // the row's
    alignas(16) u32 histogram[BINS];    // of this chunk
    alignas(16) u32 totals[BINS];       // of the row
    u32 before, until;         // counts around the bin that is looked for
    float to_upper, to_lower;  // elements between the boundary and the edges of that bin
    int bin, lowest, highest;
    int cut;
};
__shared__ Workspace work;
extern __shared__ __align__(16) Entry aside[];  // GATHERED entries: the largest logits of the chunk, or all of it

__device__ __forceinline__ u64 units_of(int key) { return units(value_of(key), work.scale, work.table); }
__device__ __forceinline__ int gathered() { return static_cast<int>(min(work.gathered, GATHERED)); }

// Calls step(x, at) for four elements at a time, -inf beyond the last: of what is put aside (near), or of the chunk.
template <typename Step>
__device__ __forceinline__ void sweep(bool near, Step step) {
    if (!near) {
        const Chunk chunk = work.chunk;
        return chunk.sweep(step);
    }
#pragma unroll 1
    for (int at = 4 * threadIdx.x; at < gathered(); at += 4 * THREADS) {
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = at + i < gathered() ? value_of(key_of_entry(aside[at + i])) : -infinity();
        step(x, at);
    }
}
__device__ __forceinline__ int id_at(bool near, int at) { return near ? id_of_entry(aside[at]) : work.chunk.id(at); }
