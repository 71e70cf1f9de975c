// Launches the screen of a draw, or (RESCORE) its last step, on the CPU.
#include "ptx.h"

#ifdef RESCORE
#include "rescore.cu"
#else
#include "screen.cu"
#endif

extern "C" __attribute__((visibility("default"))) int params_bytes() { return sizeof(Params); }

#ifdef RESCORE
inline Operands operands;
#else
struct Operands;
#endif

// Says what went wrong, or nullptr. `products` are two [rows, V].
extern "C" __attribute__((visibility("default"))) const char* launch(const Params* params, const int* first, const int* second, const Operands* of, int blocks, int slots,
                                                                     int dynamic_bytes, unsigned long long seed, int poison) {
#ifdef RESCORE
    operands = *of;
    const emulated::Shape shape = {static_cast<u32>(slots), THREADS, sizeof(Scratch), 0, true};
    auto kernel = [](const void* with) { rescore_tokens(*static_cast<const Params*>(with), operands); };
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
