// In place of ptx.cuh: what the filters' kernel uses of it. Bulk copies arrive when somebody waits for them, and not before.
#pragma once
#include "device.h"

inline u32 shared_address(const void* pointer) { return emulated::shared_address(pointer); }

// ---- mbarriers of one phase: the word counts arrivals (in its upper half) and bytes that are still to come

inline u64& barrier_word(u32 barrier) { return *static_cast<u64*>(emulated::shared_pointer(barrier, 8)); }
inline void barrier_init(u32 barrier, u32 arrivals) { barrier_word(barrier) = static_cast<u64>(arrivals) << 32; }
inline void barrier_init_fence() {}
inline void barrier_expect_bytes(u32 barrier, u32 bytes) { barrier_word(barrier) += bytes - (1ull << 32); }

inline void barrier_wait(u32 barrier, u32 parity) {
    u64& word = barrier_word(barrier);
    if (parity) emulated::fail("a second phase of a barrier is not emulated");
    auto& copies = emulated::current->block->copies;
    for (size_t i = 0; word && i < copies.size();) {
        if (copies[i].barrier == &word) {
            memcpy(copies[i].target, copies[i].source, copies[i].bytes);
            word -= copies[i].bytes;
            copies[i] = copies.back();
            copies.pop_back();
        } else {
            ++i;
        }
    }
    if (word) emulated::fail("a wait for bytes or threads that will not come");
}

// ---- bulk copies

inline void copy_bytes_once(u32 target, const void* source, u32 barrier, u32 bytes) {
    if (reinterpret_cast<uintptr_t>(source) % 16 || bytes % 16 || !bytes) emulated::fail("a bulk copy that is not of sixteens of bytes");
    emulated::current->block->copies.push_back({emulated::shared_pointer(target, 16), source, bytes, &barrier_word(barrier)});
}

inline void prefetch_bytes(const void* source, u32 bytes) {
    if (reinterpret_cast<uintptr_t>(source) % 16 || bytes % 16) emulated::fail("a prefetch that is not of sixteens of bytes");
    static volatile char read;
    for (u32 i = 0; i < bytes; i += 16) read = static_cast<const char*>(source)[i];
}

// ---- clusters

inline u32 cluster_rank() { return emulated::current->block->rank; }
inline void cluster_sync() { emulated::meet(emulated::whole, "cluster_sync"); }
