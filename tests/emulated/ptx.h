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
