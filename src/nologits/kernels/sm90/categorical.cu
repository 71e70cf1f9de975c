// The draw, fused with the matmul that makes the logits, for Hopper's tensor cores (FlashSampling, stage 1).
//
//     score[b, v] = logits[b, v] + T[b] * g[b, v]          token[b] = argmax_v score, ties to the smaller id
//
// Persistent blocks walk over tiles of the vocabulary. One warp keeps the copy engine busy; two warpgroups multiply rows x ids
// into their registers. Up to 128 rows they take turns on tiles of 128 ids, one drawing from its tile while the other multiplies
// the next. Beyond, where arithmetic is the limit, they share tiles of 128 rows x 256 ids, half of the rows each: that reads
// shared memory least.
//
// The batch lies along M and the vocabulary along N: a thread holds TILE_V / 4 ids of two rows, among them the four ids of
// every noise group, and a row belongs to four lanes of one warp. No reduction crosses a warp, and winners stay in registers
// until the block is done.
//
// The noise does not depend on the logits, so it is made while the tensor cores work. There are no registers to keep it in;
// what is kept is one byte a token, an upper bound (contract.cuh), in shared memory. When a tile is done, one multiply-add a
// token compares logit + bound with the best score so far, and only groups that could still win have their noise made again,
// exactly. The bounds change how much work is done, never the result.
//
// Grid: (blocks of rows, slots), so that neighbours read the same weights at the same time; a cluster of two row blocks shares
// each weight tile by multicast. Outputs: a winner a row and slot (logit and token: the merge makes its score again), and for
// log-probabilities the mass of every 256 ids relative to a reference, summed in an order that nothing else changes.
#include "draw.cuh"
#include "mass.cuh"
#include "pipeline.cuh"
#if FILTER
#include "truncate.cuh"
#endif

// What a block has of a row, with what its other warpgroup has: the better winner, or the sum of rests.
__device__ __forceinline__ void join(Row& row, const Candidate& other) {
#if FILTER
    if (!row.drawn) return set_rest(row.best, rest_of(row.best) + rest_of(other));
#endif
    keep_better(row.best, other);
}

// What the slot has of the row: its winner or the rest, and the threshold.
__device__ __forceinline__ void store_slot(const Params& p, const Row& row, const float* thresholds) {
    const i64 slot = static_cast<i64>(row.row) * gridDim.y + blockIdx.y;
#if FILTER
    if (row.gathered) p.slot_thresholds[slot] = thresholds[row.row - blockIdx.x * ROWS];
#if REST
    if (!row.drawn) p.rests[slot] = rest_of(row.best);
#endif
    if (!row.drawn) return;
#endif
    p.winners[slot] = make_float2(row.best.logit, __uint_as_float(row.best.token));
}

// All that is left to make of a tile's bounds.
__device__ __forceinline__ void make_all_bounds(const Row (&rows)[SETS][2], u32* codes, int id0, int made) {
#if !GREEDY
#pragma unroll
    for (int set = 0; set < SETS; ++set)
        for (int part = made; rows[set][0].warp_drawn && part < SLOTS / 2; ++part) make_bounds(rows[set], codes + set * SLOTS * 32, id0, part);
#endif
}

__device__ __forceinline__ void consume(const Params& p, u32 stages, u32 full, u32 empty, u32 turn, u32* all_codes, float2* halves, float* thresholds) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warpgroup = warp >> 2;
    const int warp_row = blockIdx.x * ROWS + 16 * (TURNS ? warp & 3 : warp);
    const int steps = (p.D + TILE_D - 1) / TILE_D;
    const int q_step = TURNS ? 2 : 1;
    u32* const codes = all_codes + warp * WARP_CODES;
    Row rows[SETS][2];
#pragma unroll
    for (int set = 0; set < SETS; ++set)
#pragma unroll
        for (int h = 0; h < 2; ++h) rows[set][h] = make_row(p, warp_row + 64 * set, (lane >> 2) + 8 * h);
#if FILTER
#pragma unroll
    for (int set = 0; set < SETS; ++set) rows[set][0].warp_drawn |= rows[set][1].warp_drawn;
    const float* const of_rows = thresholds + 16 * (TURNS ? warp & 3 : warp) + (lane >> 2);
    bool informed = false;
#endif

    float x[SETS][IDS];
    Ring ring;
    u32 turn_parity = 0;
    int made = 0;  // parts of this tile's bounds
    int q = TURNS ? warpgroup : 0;
    if (q == 1) {
        ring.skip(steps);
        if (tile_at(q) < p.tiles) make_all_bounds(rows, codes, first_id(p) + tile_at(q) * TILE_V + 2 * (lane & 3), 0);
        made = SLOTS / 2;
    }
    for (; tile_at(q) < p.tiles; q += q_step) {
        const int tile = tile_at(q), v0 = tile * TILE_V + 2 * (lane & 3), id0 = first_id(p) + v0;

        // Logits tile
        if (TURNS && q > 0) {
            barrier_wait(turn + 8 * warpgroup, turn_parity);
            turn_parity ^= 1;
        }
        const int last = multiply(x, steps, stages, full, empty, ring, [&](int step) {
            if (!TURNS && !GREEDY && rows[0][0].warp_drawn)
                for (; made * steps < SLOTS / 2 * (step + 1); ++made) make_bounds(rows[0], codes, id0, made);
        });
        if (TURNS && lane == 0) barrier_arrive(turn + 8 * (warpgroup ^ 1));
        wgmma_wait<0>();
        release(empty, last);
        if (TURNS) ring.skip(steps);

        // The first tile's noise; that of the others was made while waiting for a turn, or between multiplications.
        make_all_bounds(rows, codes, id0, made);
        __syncwarp();

        // Transform, and masses before and after what the request adds
#if MASS || RAW
        const int ready = 2 + (warp & 3), read = ready + 4;  // barriers of this warp and its twin with the same rows
        const bool more = tile_at(q + 1) < p.tiles, alone = TURNS && warpgroup == 0 && !more;
        if (TURNS && warpgroup == 0 && q > 0) named_barrier<64>(read);
        if (TURNS && warpgroup == 1) named_barrier<64>(ready);
#endif
#pragma unroll
        for (int set = 0; set < SETS; ++set) {
            if (!rows[set][0].warp_valid) continue;
            head_transform(x[set], p, v0, (tile + 1) * TILE_V);
#if RAW
            store_masses(x[set], p, rows[set], halves + 32 * set + 16, tile, alone, false, p.raw_masses);
#endif
            request_transform(x[set], p, rows[set], v0, (tile + 1) * TILE_V);
#if MASS
            store_masses(x[set], p, rows[set], halves + 32 * set, tile, alone, true, p.masses);
#endif
        }
#if MASS || RAW
        if (TURNS && warpgroup == 0 && !alone) named_barrier_arrive<64>(ready);
        if (TURNS && warpgroup == 1 && more) named_barrier_arrive<64>(read);
#endif

        // Scores of those who could win; then, while the other warpgroup multiplies, the next tile's bounds
#pragma unroll
        for (int set = 0; set < SETS; ++set)
            if (rows[set][0].warp_drawn) draw(x[set], p, rows[set], codes + set * SLOTS * 32, codes + set * SLOTS * 32, id0);
#if FILTER
        if (!informed) learn_thresholds(x, p, rows, thresholds, warp_row, codes);
        informed = true;
#pragma unroll
        for (int set = 0; set < SETS; ++set) {
            if (!rows[set][0].warp_valid) continue;
            gather(x[set], p, rows[set], of_rows + 64 * set, codes + set * SLOTS * 32, id0, [&] {
#if REST
                weigh_rest(x[set], rows[set], of_rows + 64 * set);
#endif
            });
        }
#endif
        made = 0;
        if (TURNS && tile_at(q + q_step) < p.tiles) {
            __syncwarp();
            make_all_bounds(rows, codes, first_id(p) + tile_at(q + q_step) * TILE_V + 2 * (lane & 3), 0);
            made = SLOTS / 2;
        }
    }

    // Reduce over the four lanes of a row, and over warpgroups that took turns; store
    if (TURNS) named_barrier<CONSUMER_THREADS>(1);  // nobody needs the codes any more
    Candidate* const exchange = reinterpret_cast<Candidate*>(all_codes) + 32 * SETS * (warp & 3) + (lane >> 2);
#pragma unroll
    for (int set = 0; set < SETS; ++set) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            Candidate& best = rows[set][h].best;
            keep_better(best, shuffle_xor(best, 1));
            keep_better(best, shuffle_xor(best, 2));
#if FILTER
            finish_candidates(p, rows[set][h]);
#endif
            if (TURNS && warpgroup == 1 && (lane & 3) == 0) exchange[32 * set + 8 * h] = best;
        }
    }
    if (TURNS) named_barrier<CONSUMER_THREADS>(1);
    if (TURNS && warpgroup == 1) return;
#pragma unroll
    for (int set = 0; set < SETS; ++set) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            Row& row = rows[set][h];
            if (TURNS) join(row, exchange[32 * set + 8 * h]);
            if ((lane & 3) == 0 && row.valid) store_slot(p, row, thresholds);
        }
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(CONSUMER_THREADS + 128, 1)
    categorical_tiles(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap hidden,
                      const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) unsigned char memory[];  // the swizzle needs stages at multiples of 1,024 bytes
    const u32 stages = shared_address(memory);
    u32* const codes = reinterpret_cast<u32*>(memory + STAGES * STAGE_BYTES);
    const u32 full = stages + STAGES * STAGE_BYTES + CODE_BYTES, empty = full + 8 * STAGES, turn = empty + 8 * STAGES;
    float* const thresholds = reinterpret_cast<float*>(memory + STAGES * (STAGE_BYTES + 16) + CODE_BYTES + 16);  // if there is a FILTER
#if TURNS && (MASS || RAW)
    __shared__ float2 halves[4][SETS * 32];
#else
    float2* const halves[4] = {};
#endif
    if (stages & 1023) __trap();

    allow_dependents();  // the merge kernel may start and wait
#if LEFT
    wait_for_primary();
    if (!p.left[0]) return;
#endif
    if (threadIdx.x == 0) {
        prefetch_map(&weight);
        prefetch_map(&hidden);
        begin_pipeline(full, empty, turn);
    }
#if CLUSTER == 1
    __syncthreads();
#else
    cluster_sync();
#endif

    if (threadIdx.x >= CONSUMER_THREADS) {
        give_registers<24>();
        Ring ring;
        if (threadIdx.x == CONSUMER_THREADS) produce(&weight, &hidden, p, blockIdx.x * ROWS, stages, full, empty, ring);
        __syncwarp();
    } else {
        take_registers<240>();
        consume(p, stages, full, empty, turn, codes, halves[(threadIdx.x >> 5) & 3], thresholds);
    }
#if CLUSTER > 1
    cluster_sync();  // a block must not leave while others may still arrive at its barriers
#endif
}
