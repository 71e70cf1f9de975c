// The matmul's pipeline: one warp keeps the copy engine busy, warpgroups multiply what it brings.
#pragma once
#include "tile.cuh"

// A position in the ring of stages, and the parity of the barriers' phase there.
struct Ring {
    int stage = 0;
    u32 parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    __device__ __forceinline__ void skip(int count) {
        stage += count;
        parity ^= (stage / STAGES) & 1;
        stage %= STAGES;
    }
};

// The q-th tile of this block.
__device__ __forceinline__ int tile_at(int q) {
    return NEIGHBOURS ? 2 * (blockIdx.y + (q >> 1) * gridDim.y) + (q & 1) : blockIdx.y + q * gridDim.y;
}

__device__ __forceinline__ u32 piece_bytes(int box_rows) { return WEIGHT_BYTES + PARTS_OF_ROW * box_rows * PITCH_BYTES; }

#if SCREEN
// Loads the first weights, before there are rows.
__device__ __forceinline__ void produce_first(const TensorMap* weight, const Params& p, u32 stages, u32 full) {
    for (int i = 0; i < STAGES && i * TILE_D < p.D && tile_at(0) < p.tiles; ++i) {
        barrier_expect_bytes(full + 8 * i, piece_bytes(p.box_rows));
        copy_box(stages + i * STAGE_BYTES, weight, full + 8 * i, i * TILE_D, tile_at(0) * TILE_V);
    }
}
#endif

// Loads the block's tiles of the vocabulary with the rows from `row0` on.
__device__ __forceinline__ void produce(const TensorMap* weight, const TensorMap* hidden, const Params& p, int row0, u32 stages, u32 full,
                                        u32 empty, Ring& ring) {
    const u32 bytes = piece_bytes(p.box_rows);
    for (int q = 0; tile_at(q) < p.tiles; ++q) {
        const int weight_row = tile_at(q) * TILE_V - (SHARD ? p.skip : 0);  // zeros come from before the first
#pragma unroll 1  // few registers are left here
        for (int d = 0; d < p.D; d += PAIR * TILE_D) {
            Ring next = ring;
#pragma unroll
            for (int i = 0; i < PAIR && d + i * TILE_D < p.D; ++i, next.advance()) barrier_wait(empty + 8 * next.stage, next.parity ^ 1);
#pragma unroll
            for (int i = 0; i < PAIR && d + i * TILE_D < p.D; ++i, ring.advance()) {
                const int column = d + i * TILE_D;
                const u32 barrier = full + 8 * ring.stage, target = stages + ring.stage * STAGE_BYTES;
#if SCREEN
                if (q > 0 || column >= STAGES * TILE_D) {
                    barrier_expect_bytes(barrier, bytes);
                    copy_box(target, weight, barrier, column, weight_row);
                }
                if (!PACKED) copy_box(target + WEIGHT_BYTES + ROWS * PITCH_BYTES, hidden, barrier, column, p.B + row0);
#elif CLUSTER == 1
                barrier_expect_bytes(barrier, bytes);
                copy_box(target, weight, barrier, column, weight_row);
#else
                barrier_expect_bytes(barrier, bytes);
                const u32 part = cluster_rank();
                copy_box_multicast(target + part * (WEIGHT_BYTES / CLUSTER), weight, barrier, column,
                                   weight_row + part * (TILE_V / CLUSTER), (1 << CLUSTER) - 1);
#endif
                copy_box(target + WEIGHT_BYTES, hidden, barrier, column, row0);
            }
        }
    }
}

// A consumer warp is done with a stage: tells every block that writes to it.
__device__ __forceinline__ void release(u32 empty, int stage) {
    if ((threadIdx.x & 31) < CLUSTER) {
#if CLUSTER == 1
        barrier_arrive(empty + 8 * stage);
#else
        barrier_arrive_remote(empty + 8 * stage, threadIdx.x & 31);
#endif
    }
}

// A consumer warpgroup multiplies a tile; all but the last pieces are done on return, and the stage of those is returned.
// Calls between(step) while the tensor cores work.
template <typename Number, int sets, typename Between>
__device__ __forceinline__ int multiply(Number (&x)[sets][IDS], int steps, u32 stages, u32 full, u32 empty, Ring& ring, Between between) {
    const int warpgroup = threadIdx.x >> 7;
    int previous = 0;
    for (int step = 0; step < steps; ++step) {
        const u32 stage = stages + ring.stage * STAGE_BYTES;
        const u64 weight = operand(stage), hidden = operand(stage + WEIGHT_BYTES + (TURNS ? 0 : warpgroup * (64 * PITCH_BYTES)));
        barrier_wait(full + 8 * ring.stage, ring.parity);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < PITCH_BYTES / 32; ++k)
#pragma unroll
            for (int set = 0; set < sets; ++set)
                wgmma(x[set], hidden + set * (64 * PITCH_BYTES >> 4) + 2 * k, weight + 2 * k, step + k > 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (step > 0) release(empty, previous);
        between(step);
        previous = ring.stage;
        ring.advance();
    }
    return previous;
}

// The barriers of the stages; by one thread.
__device__ __forceinline__ void begin_pipeline(u32 full, u32 empty, u32 turn) {
    for (int s = 0; s < STAGES; ++s) {
        barrier_init(full + 8 * s, 1);
        barrier_init(empty + 8 * s, (TURNS ? 4 : 8) * CLUSTER);  // one arrival a warp that reads it
    }
    for (int w = 0; w < 2; ++w) barrier_init(turn + 8 * w, 4);
    barrier_init_fence();
}
