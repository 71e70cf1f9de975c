// Launches the screen of a draw, or (RESCORE) its last step, on the CPU.
#include "ptx.h"

#ifdef RESCORE
#include "rescore.cu"
#else
#include "screen.cu"
#endif

extern "C" __attribute__((visibility("default"))) int params_bytes() { return sizeof(Params); }

struct Operands {
    const void *hidden, *weight;
    i64 stride_hidden, stride_weight;
};
inline Operands operands;

// Says what went wrong, or nullptr. `products` are two [rows, V].
extern "C" __attribute__((visibility("default"))) const char* launch(const Params* params, const int* first, const int* second, const Operands* of, int blocks, int slots,
                                                                     int dynamic_bytes, unsigned long long seed, int poison) {
    operands = *of;
#ifdef RESCORE
    const emulated::Shape shape = {1, THREADS, sizeof(Candidate) * WARPS, 0, false};
    auto kernel = [](const void* with) { rescore_tokens(*static_cast<const Params*>(with), operands.hidden, operands.stride_hidden, operands.weight, operands.stride_weight); };
#else
    emulated::products[0] = first, emulated::products[1] = second;
    emulated::rows = params->B;
    emulated::vocab[0] = params->V;
    const emulated::Shape shape = {static_cast<u32>(slots), CONSUMER_THREADS + 128, 4096, static_cast<u32>(dynamic_bytes), true};
    auto kernel = [](const void* with) { screen_tiles({}, {}, *static_cast<const Params*>(with)); };
#endif
    for (int row = 0; row < blocks; ++row)
        if (const char* failure = emulated::run_cluster(kernel, params, shape, row, seed ? seed + row : 0, poison)) return failure;
    return nullptr;
}
