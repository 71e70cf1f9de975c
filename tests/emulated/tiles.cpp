// Launches the tile kernel, or (FINISH) the one that settles open rows, on the CPU: all blocks of a row of them together.
#include "ptx.h"

#ifdef FINISH
#include "finish.cu"
#else
#include "categorical.cu"
#endif

extern "C" __attribute__((visibility("default"))) int params_bytes() { return sizeof(Params); }

// Says what went wrong, or nullptr. `logits` [rows, V] are the matmul's.
extern "C" __attribute__((visibility("default"))) const char* launch(const Params* params, const float* logits, int row_blocks, int slots, int dynamic_bytes,
                                                                     unsigned long long seed, int poison) {
    emulated::logits = logits;
    emulated::rows = params->B;
    emulated::vocab = params->V;
    const emulated::Shape shape = {static_cast<u32>(slots), CONSUMER_THREADS + 128, 4096, static_cast<u32>(dynamic_bytes), true};
    auto kernel = [](const void* with) {
#ifdef FINISH
        finish_rows({}, {}, *static_cast<const Params*>(with));
#else
        categorical_tiles({}, {}, *static_cast<const Params*>(with));
#endif
    };
    for (int row = 0; row < row_blocks; ++row)
        if (const char* failure = emulated::run_cluster(kernel, params, shape, row, seed ? seed + row : 0, poison)) return failure;
    return nullptr;
}
