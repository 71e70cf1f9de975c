// The order of a row's tokens (logit descending, then id ascending), and what a filter keeps of it: a prefix.
#pragma once
#include "contract.cuh"

constexpr int NO_ID = -1, EVERY_ID = 0x7FFFFFFF, MAX_IDS = 1 << 22;
constexpr int HIGHEST_KEY = 0x7FFFFFFF, LOWEST_KEY = static_cast<int>(0x80000000);  // no logit has them

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

// An order with its sign turned: unsigned, and 0 is less than any.
__device__ __forceinline__ u32 turned(int order) { return static_cast<u32>(order) ^ 0x80000000u; }
__device__ __forceinline__ int turned_back(u32 order) { return static_cast<int>(order ^ 0x80000000u); }
