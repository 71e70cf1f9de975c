// In place of ptx.cuh: what the kernels use of it.
#pragma once
#include "device.h"

inline u32 shared_address(const void* pointer) { return emulated::shared_address(pointer); }

inline void prefetch_bytes(const void* source, u32 bytes) {
    if (reinterpret_cast<uintptr_t>(source) % 16 || bytes % 16) emulated::fail("a prefetch that is not of sixteens of bytes");
    static volatile char read;
    for (u32 i = 0; i < bytes; i += 16) read = static_cast<const char*>(source)[i];
}

// ---- clusters

inline u32 cluster_rank() { return emulated::current->block->rank; }
inline void cluster_sync() { emulated::meet(emulated::whole, "cluster_sync"); }

// ---- dependent launches: what the kernel waits for is there

inline void wait_for_primary() {}
inline void allow_dependents() {}

// ---- what blocks tell each other: who looks for it lets others run

inline u32 load_relaxed(const u32* word) {
    emulated::yield();
    return *word;
}
inline u32 load_acquire(const u32* word) { return load_relaxed(word); }
inline void store_relaxed(u32* word, u32 value) { *word = value; }

inline u64 load_system(const u64* word) { return *word; }
inline void store_system(u64* word, u64 value) { *word = value; }
template <typename Wanted>
inline u64 wait_system(const u64* word, Wanted wanted) {
    while (!wanted(*word)) emulated::yield();
    return *word;
}

inline u32 clock_cycles() {
    static u32 cycles = 0;
    return ++cycles;
}

// ---- barriers of some threads

template <int threads>
inline void named_barrier(int id) {
    emulated::meet_named(id, threads, true);
}
template <int threads>
inline void named_barrier_arrive(int id) {
    emulated::meet_named(id, threads, false);
}

// ---- the matmul's machinery, of which nothing is left (pipeline.h)

struct TensorMap {};
inline void prefetch_map(const TensorMap*) {}
inline void barrier_wait(u32, u32) {}
inline void barrier_arrive(u32) {}
template <int count>
inline void take_registers() {}
template <int count>
inline void give_registers() {}
template <int pending>
inline void wgmma_wait() {}
