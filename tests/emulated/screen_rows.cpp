// Launches the kernel that makes hidden states of 8 bits on the CPU.
#include "ptx.h"

#include "screen_rows.cu"

struct Arguments {
    const unsigned short* hidden;
    signed char* parts;
    float4* scales;
    u32* words;
    i64 stride, pitch;
    int B, D, num_words, packed;
};

// Says what went wrong, or nullptr.
extern "C" __attribute__((visibility("default"))) const char* launch(const Arguments* with, unsigned long long seed, int poison) {
    const emulated::Shape shape = {1, THREADS, (sizeof(Lengths) + sizeof(float)) * WARPS, 0, false};
    auto kernel = [](const void* given) {
        const Arguments& a = *static_cast<const Arguments*>(given);
        screen_rows(a.hidden, a.stride, a.B, a.D, a.parts, a.pitch, a.scales, a.words, a.num_words, a.packed);
    };
    for (int row = 0; row < with->B; ++row)
        if (const char* failure = emulated::run_cluster(kernel, with, shape, row, seed ? seed + row : 0, poison)) return failure;
    return nullptr;
}
