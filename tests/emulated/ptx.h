// In place of ptx.cuh: what the filters' kernel uses of it.
#pragma once
#include "device.h"

inline u32 shared_address(const void* pointer) { return emulated::shared_address(pointer); }

// ---- clusters

inline u32 cluster_rank() { return emulated::current->block->rank; }
inline void cluster_sync() { emulated::meet(emulated::whole, "cluster_sync"); }
