// The screen of a draw: all tokens' scores from a head of 8 bits, as intervals, and those that could win.
//
// w_v = s_v q_v + e_v, a token's weights and their bytes; h = a (q1 + q2 / 254) + r, a row's hidden state and its two parts of bytes. The
// products of bytes are whole numbers, without error, so
//
//     | h . w_v - s_v a (q1 + q2 / 254) . q_v |  <=  |h| |e_v| + |r| (|w_v| + |e_v|)
//
// by Cauchy and Schwarz. screen.py makes both sides' lengths, rounded up, and adds to the second what the conversion to fp32 takes here and
// what a dot product in fp32 takes in rescore.cu. All that follows (bias, scale > 0, cap, logit bias, noise) grows with the logit, and so do
// its roundings: a score lies between those of the ends of its interval.
//
// The tiles are the draw's (categorical.cu), of upper bounds: no token is passed over whose upper score reaches the best lower score so
// far. Those are written down, and rescore.cu takes the few of them that can still win.
//
// A block alone would take long to find a good lower score, and write down thousands. So all tell theirs to all: of the first tile before
// anything of it is written down, and of the others for the next tile's sake.
#ifndef SCREEN
#define SCREEN 1
#endif
#include "draw.cuh"
#include "patience.cuh"
#include "pipeline.cuh"

static_assert(TURNS && SETS == 1 && CLUSTER == 1, "a set for each part of the rows' bytes");

constexpr int WARP_ROWS = 8 * HALVES;
constexpr u32 PATIENCE = 1 << 13;                // cycles
constexpr int SPARE_BYTES = 4 * WARP_CODES * 4;  // for the warps of one warpgroup, beside their codes

// Upper bounds of the head's products, from those of bytes.
__device__ __forceinline__ void make_uppers(float (&x)[IDS], const int (&products)[PARTS_OF_ROW][IDS], const Params& p, const Row (&rows)[2], int v0) {
#pragma unroll
    for (int i = 0; i < IDS / 2; i += 2) {
        const int id = v0 + offset_at(i);  // with its neighbour
        const float2 scale = *reinterpret_cast<const float2*>(p.id_scales + id), error = *reinterpret_cast<const float2*>(p.id_errors + id),
                     length = *reinterpret_cast<const float2*>(p.id_lengths + id);
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int at = register_at(i + j, h);
                const int first = products[0][at], second = PACKED ? products[0][register_at(i + j, 1)] : products[PARTS_OF_ROW - 1][at];
                const float middle = (j ? scale.y : scale.x) * fmaf(rows[h].first, __int2float_rn(first), rows[h].second * __int2float_rn(second));
                x[at] = middle + fmaf(rows[h].of_error, j ? error.y : error.x, rows[h].of_length * (j ? length.y : length.x));
            }
        }
    }
}

__device__ __forceinline__ void make_all_bounds(const Row (&rows)[2], u32* codes, int id0) {
#if !GREEDY
#pragma unroll
    for (int part = 0; part < SLOTS / 2; part += 3 - HALVES) make_bounds(rows, codes, id0, part);  // an odd part is a second row's
#endif
}

// ---- what blocks tell each other: it decides how much is written down, never what wins

__device__ __forceinline__ void ask_floors(u32 (&floors)[2], const Params& p, const Row (&rows)[2]) {
#pragma unroll
    for (int h = 0; h < HALVES; ++h) floors[h] = rows[h].valid ? load_relaxed(&p.floors[rows[h].row]) : 0;
}

__device__ __forceinline__ void learn_floors(Row (&rows)[2], const u32 (&floors)[2]) {
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
        rows[h].best.order = max(rows[h].best.order, turned_back(floors[h]));
        rows[h].floor = fmaxf(rows[h].floor, floor_of(turned_back(floors[h]), rows[h].spread));
    }
}

__device__ __forceinline__ void tell_floors(const Params& p, const Row (&rows)[2], const u32 (&known)[2]) {
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
        const u32 best = turned(over_row(rows[h].best.order, [](int a, int b) { return max(a, b); }));
        if ((threadIdx.x & 3) == 0 && rows[h].valid && best > known[h]) atomicMax(&p.floors[rows[h].row], best);
    }
}

// The floors of half of all blocks' first tiles: the others' would add little, and to wait for the last of them would hold up the
// matmul.
__device__ __forceinline__ void share_floors(u32 (&floors)[2], const Params& p, Row (&rows)[2], int warp_row) {
    tell_floors(p, rows, floors);
    u32* const told = &p.told[warp_row / WARP_ROWS];
    __syncwarp();
    if ((threadIdx.x & 31) == 0) atomicAdd(told, 1u);
    be_patient(PATIENCE, [&] { return 2 * load_relaxed(told) >= gridDim.y; });
    ask_floors(floors, p, rows);
    learn_floors(rows, floors);
}

__device__ __forceinline__ void consume(const Params& p, u32 stages, u32 full, u32 empty, u32 turn, u32* all_codes, u32* spare) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warpgroup = warp >> 2, warp_row = blockIdx.x * ROWS + WARP_ROWS * (warp & 3);
    const int steps = (p.D + TILE_D - 1) / TILE_D;
    u32* const codes = all_codes + warp * WARP_CODES;
    Row rows[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) rows[h] = make_row(p, warp_row, (lane >> 2) + 8 * h);
    if (PACKED) rows[1].valid = rows[1].drawn = false;

    int products[PARTS_OF_ROW][IDS];
    float x[IDS];
    Ring ring;
    u32 turn_parity = 0;
    int q = warpgroup;
    if (q == 1) ring.skip(steps);
    for (; tile_at(q) < p.tiles; q += 2) {
        const int tile = tile_at(q), v0 = tile * TILE_V + 2 * (lane & 3), id0 = first_id(p) + v0;
        if (rows[0].warp_valid) {  // while the other warpgroup multiplies
            __syncwarp();
            make_all_bounds(rows, codes, id0);
        }
        if (q > 0) {
            barrier_wait(turn + 8 * warpgroup, turn_parity);
            turn_parity ^= 1;
        }
        u32 floors[2];
        ask_floors(floors, p, rows);  // the answer comes during the matmul
        const int last = multiply(products, steps, stages, full, empty, ring, [](int) {});
        if (lane == 0) barrier_arrive(turn + 8 * (warpgroup ^ 1));
        wgmma_wait<0>();
        release(empty, last);
        ring.skip(steps);
        if (!rows[0].warp_valid) continue;
        __syncwarp();
        make_uppers(x, products, p, rows, v0);
        head_transform(x, p, v0, (tile + 1) * TILE_V);
#if SOFTCAP
#pragma unroll
        for (int i = 0; i < IDS / 2 * HALVES; ++i) x[register_at(i / HALVES, i % HALVES)] += 4e-6f * p.softcap;  // the approximation of tanh grows only up to so much
#endif
        request_transform(x, p, rows, v0, (tile + 1) * TILE_V);
        if (q == 1) ask_floors(floors, p, rows);  // the other warpgroup knows by now what the first tiles told
        learn_floors(rows, floors);
        if (q == 0) {
            draw(x, p, rows, codes, spare + warp * WARP_CODES, id0, false);
            share_floors(floors, p, rows, warp_row);
            __syncwarp();
        }
        draw(x, p, rows, codes, codes, id0);
        tell_floors(p, rows, floors);
    }
}

extern "C" __global__ void __launch_bounds__(CONSUMER_THREADS + 128, 1)
    screen_tiles(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap hidden, const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) unsigned char memory[];  // the swizzle needs stages at multiples of 1,024 bytes
    const u32 stages = shared_address(memory);
    u32* const codes = reinterpret_cast<u32*>(memory + STAGES * STAGE_BYTES);
    u32* const spare = reinterpret_cast<u32*>(memory + STAGES * STAGE_BYTES + CODE_BYTES);
    const u32 full = stages + STAGES * STAGE_BYTES + CODE_BYTES + SPARE_BYTES, empty = full + 8 * STAGES, turn = empty + 8 * STAGES;
    if (stages & 1023) __trap();
    allow_dependents();
    if (threadIdx.x == 0) {
        prefetch_map(&weight);
        prefetch_map(&hidden);
        begin_pipeline(full, empty, turn);
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMER_THREADS) {
        give_registers<24>();
        if (threadIdx.x != CONSUMER_THREADS) return;
        Ring ring;
        produce_first(&weight, p, stages, full);
        wait_for_primary();  // that makes the rows' bytes
        produce(&weight, &hidden, p, blockIdx.x * ROWS, stages, full, empty, ring);
    } else {
        take_registers<240>();
        wait_for_primary();
        consume(p, stages, full, empty, turn, codes, spare);
    }
}
