// Waiting for other blocks, but not for ever.
#pragma once
#include "contract.cuh"
#include "ptx.cuh"

// Calls ask() until it says, in all lanes, that it knows enough, or for long enough.
template <typename Ask>
__device__ __forceinline__ void be_patient(u32 cycles, Ask ask) {
    const u32 start = clock_cycles();
    while (!__all_sync(ALL, ask())) {
        if (__any_sync(ALL, clock_cycles() - start > cycles)) break;
    }
}
