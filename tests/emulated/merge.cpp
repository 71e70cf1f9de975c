// Launches the kernel that merges a row's slots on the CPU, row after row.
#include "ptx.h"

#include "merge.cu"

extern "C" __attribute__((visibility("default"))) int params_bytes() { return sizeof(Params); }

// Says what went wrong, or nullptr.
extern "C" __attribute__((visibility("default"))) const char* launch(const Params* params, int rows, unsigned long long seed, int poison) {
    const emulated::Shape shape = {1, THREADS, sizeof(Candidate) * WARPS, 0, false};
    auto kernel = [](const void* with) { categorical_merge(*static_cast<const Params*>(with)); };
    for (int row = 0; row < rows; ++row)
        if (const char* failure = emulated::run_cluster(kernel, params, shape, row, seed ? seed + row : 0, poison)) return failure;
    return nullptr;
}
