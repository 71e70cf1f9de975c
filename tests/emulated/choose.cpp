// Launches the kernel that chooses among candidates on the CPU, row after row.
#include "ptx.h"

#include "choose.cu"

extern "C" __attribute__((visibility("default"))) int params_bytes() { return sizeof(Params); }

// Says what went wrong, or nullptr.
extern "C" __attribute__((visibility("default"))) const char* launch(const Params* params, int rows, int dynamic_bytes, unsigned long long seed, int poison) {
    const emulated::Shape shape = {CLUSTER, THREADS, (sizeof(Exchange) + 63) / 64 * 64 + sizeof(Workspace), static_cast<u32>(dynamic_bytes)};
    auto kernel = [](const void* with) { choose_tokens(*static_cast<const Params*>(with)); };
    for (int row = 0; row < rows; ++row)
        if (const char* failure = emulated::run_cluster(kernel, params, shape, row, seed ? seed + row : 0, poison)) return failure;
    return nullptr;
}
