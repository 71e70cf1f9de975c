// Launches the tile kernel, or (FINISH) the one that settles open rows, on the CPU: all blocks of a row of them together, of all ranks of a
// sharded head where they wait for one another.
#include "ptx.h"

#ifdef FINISH
#include "finish.cu"
#else
#include "categorical.cu"
#endif

struct Rank {
    const Params* params;
    const void* links;
};

extern "C" __attribute__((visibility("default"))) int params_bytes() { return sizeof(Params); }

// Says what went wrong, or nullptr. `logits` [rows, V] of each rank are the matmul's.
extern "C" __attribute__((visibility("default"))) const char* launch(const Rank* of, int ranks, const float* const* logits, int row_blocks, int slots, int dynamic_bytes,
                                                                     unsigned long long seed, int poison) {
    emulated::logits = logits;
    emulated::rows = of->params->B;
    for (int rank = 0; rank < ranks; ++rank) emulated::vocab[rank] = of[rank].params->V;
    const emulated::Shape shape = {static_cast<u32>(ranks * slots), CONSUMER_THREADS + 128, 4096, static_cast<u32>(dynamic_bytes), true, static_cast<u32>(ranks)};
    auto kernel = [](const void* with) {
        const Rank& mine = static_cast<const Rank*>(with)[emulated::device()];
#ifdef FINISH
        finish_rows({}, {}, *mine.params, *static_cast<const Links*>(mine.links));
#else
        categorical_tiles({}, {}, *mine.params);
#endif
    };
    for (int row = 0; row < row_blocks; ++row)
        if (const char* failure = emulated::run_cluster(kernel, of, shape, row, seed ? seed + row : 0, poison)) return failure;
    return nullptr;
}
