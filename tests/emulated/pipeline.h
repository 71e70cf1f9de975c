// In place of pipeline.cuh: logits that are given, in the registers where the tensor cores would leave them.
#pragma once
#include "tile.cuh"

namespace emulated {
inline const float* const* logits;  // of each device: [rows, V] of the head, before anything is added
inline int rows, vocab[8];
inline const int* products[2];  // or [rows, V] of each part of the rows' bytes
}  // namespace emulated

struct Ring {
    int stage = 0;
    u32 parity = 0;
    void skip(int) {}
};

inline int tile_at(int q) { return emulated::current->tile = NEIGHBOURS ? 2 * (blockIdx.y + (q >> 1) * gridDim.y) + (q & 1) : blockIdx.y + q * gridDim.y; }

inline void produce_first(const TensorMap*, const Params&, u32, u32) {}
inline void produce(const TensorMap*, const TensorMap*, const Params&, int, u32, u32, u32, Ring&) {}
inline void release(u32, int) {}
inline void begin_pipeline(u32, u32, u32) {}

// The tile is the last one that was asked for, the rows are those that were made last.
template <typename Number, int sets, typename Between>
inline int multiply(Number (&x)[sets][IDS], int steps, u32, u32, u32, Ring&, Between between) {
    const int lane = threadIdx.x & 31, row0 = emulated::current->row0 - 64 * (SETS - 1), v0 = emulated::current->tile * TILE_V + 2 * (lane & 3);
    for (int step = 0; step < steps; ++step) between(step);
    const float* const logits = SCREEN ? nullptr : emulated::logits[emulated::device()];
    const int vocab = emulated::vocab[emulated::device()];
    for (int set = 0; set < sets; ++set)
        for (int h = 0; h < 2; ++h)
            for (int i = 0; i < IDS / 2; ++i) {
                const int part = PACKED ? h : set;
                const int row = row0 + (SCREEN ? 0 : 64 * set) + (lane >> 2) + (PACKED ? 0 : 8 * h), id = v0 + offset_at(i);
                const i64 at = static_cast<i64>(row) * vocab + id;
                x[set][register_at(i, h)] = row >= emulated::rows || id >= vocab ? 0 : SCREEN ? emulated::products[part][at] : logits[at];
            }
    return 0;
}
