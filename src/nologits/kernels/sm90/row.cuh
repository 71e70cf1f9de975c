// What the parts of the filters' kernel share: the order of a row's tokens, what a block knows of the row, its workspace.
#pragma once
#include "chunk.cuh"
#include "share.cuh"

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
constexpr int NO_ID = -1, EVERY_ID = 0x7FFFFFFF, MAX_IDS = 1 << 22;
constexpr int HIGHEST_KEY = 0x7FFFFFFF, LOWEST_KEY = static_cast<int>(0x80000000);  // no logit has them

// ---- the order of a row's tokens: logit descending, then id ascending

__device__ __forceinline__ int key_of(float x) { return score_order(x); }
__device__ __forceinline__ float value_of(int key) { return order_score(key); }

// No number has the key -1 (that of -0.0).
__device__ __forceinline__ float first_value(int key) { return value_of(key == -1 ? 0 : key); }
__device__ __forceinline__ float last_value(int key) { return value_of(key == -1 ? -2 : key); }

// Keeps keys above `key`, and of those equal the ones with an id up to `last_id`.
struct Boundary {
    int key, last_id;
    __device__ __forceinline__ bool keeps(int other, int id) const { return other > key || (other == key && id <= last_id); }
};

struct Found {
    Boundary boundary;
    u32 copies;  // of the boundary's key that are kept
};

// A token of the row; a larger one comes first: larger key, then smaller id.
typedef u64 Entry;
struct alignas(16) Pair {
    Entry first, second;
};

__device__ __forceinline__ Entry make_entry(int key, int id) { return static_cast<u64>(static_cast<u32>(key) ^ 0x80000000u) << 32 | ~static_cast<u32>(id); }
__device__ __forceinline__ int key_of_entry(Entry entry) { return static_cast<int>(static_cast<u32>(entry >> 32) ^ 0x80000000u); }
__device__ __forceinline__ int id_of_entry(Entry entry) { return static_cast<int>(~static_cast<u32>(entry)); }

// ---- what is known of a row

// What it asks for; a top-k of 0: none.
struct Request {
    float temperature;
    i64 top_k;
    double top_p, min_p;
    bool possible;
};

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
    u64 below, below_error;  // mass of the others, in units of the guess's anchor, and how far it may be off

    __device__ __forceinline__ Statistics over_lanes() const {
        return {sum_lanes(gathered), sum_lanes(lost), min_lanes(lowest), max_lanes(peak), sum_lanes(count), sum_lanes(broken), sum_lanes(below), sum_lanes(below_error)};
    }
    static __device__ __forceinline__ Statistics nothing() { return {0, 0, HIGHEST_KEY, LOWEST_KEY, 0, 0, 0, 0}; }
};

struct Workspace {
    Exchange exchange;
    // Of the row, the same in all its blocks. Here, for registers are scarce.
    Request request;
    Guess guess;
    Statistics stats;
    Scale scale;

    double table[PARTS];
    alignas(16) u32 histogram[BINS];    // of this block
    alignas(16) u32 totals[BINS];       // of the row
    alignas(16) Entry list[2][LISTED];  // of this block; two, so that nobody overwrites what others still read
    alignas(16) Entry sorted[LISTED];
    u32 gathered, listed;
    u32 before, until;         // counts around the bin that is looked for
    float to_upper, to_lower;  // elements between the boundary and the edges of that bin
    int bin, lowest, highest;
    int cut;
};

// What a block has put aside of its chunk.
struct Gathered {
    const Entry* entries;
    int count;
};

// A search in a row, by all threads of its cluster: among what the blocks have put aside, or in the whole row.
struct Search {
    Workspace& work;
    const Chunk& chunk;
    const Gathered& aside;
    Turns& turns;

    __device__ __forceinline__ u64 units_of(int key) const { return units(value_of(key), work.scale, work.table); }
    __device__ __forceinline__ Slot (&next_scratch() const)[WARPS] { return work.exchange.scratch[turns.scratch++ & 1]; }

    // Calls step(x, at) for four elements at a time, -inf beyond the last.
    template <typename Step>
    __device__ __forceinline__ void sweep(bool near, Step step) const {
        if (!near) return chunk.sweep(step);
#pragma unroll 1
        for (int at = 4 * threadIdx.x; at < aside.count; at += 4 * THREADS) {
            float x[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) x[i] = at + i < aside.count ? value_of(key_of_entry(aside.entries[at + i])) : -infinity();
            step(x, at);
        }
    }
    __device__ __forceinline__ int id(bool near, int at) const { return near ? id_of_entry(aside.entries[at]) : chunk.id(at); }
    __device__ __forceinline__ int terms(bool near) const { return near ? aside.count / THREADS + 4 : chunk.terms(); }  // elements of a thread
};
