// Rows whose candidates did not settle what they keep (choose.cu): flat rows, wide nuclei, more ties than there is room for. Their
// logits are made again, as often as it takes. Those of a few rows of a group are kept when they are made, and once only such rows are
// open, sweeps read those.
//
//     BY_COUNT, BY_MASS   a sweep adds up what the row keeps at most, in 2,048 bins of the range that holds the boundary; the bin that
//                         reaches the target is the next range
//     COLLECTING          few logits are left in the range: a sweep lists them, and draws from what lies above
//     BY_ID               many are, all copies of one: the bins are ids'
//     WEIGHING            the boundary is one of a few candidates: it takes the row's exact mass to say which
//     DRAWING             the boundary is known: a sweep draws from what it keeps
//
// A wide nucleus takes two sweeps.
//
// Counts and masses are whole numbers (share.cuh), so nothing depends on the order in which blocks add them.
//
// The rows of shards are made by all ranks for all: a sweep that multiplies only gives away what it makes, of as many rows as there is
// room for, and from then on every rank does the same with the same logits. The others' turn comes when those are settled.
//
// Grid: as many blocks as run at once, for they wait for one another. 64 rows at a time; a sweep is a matmul of all of them.
#ifndef MASS
#define MASS 0
#define RAW 0
#endif
#define GREEDY 0
#define FILTER 0
#define TURNS 1
#define ROWS 64
#define STAGES 4
#define PAIR 2
#define CLUSTER 1

#include "settle.cuh"

// ---- all blocks together

__device__ __forceinline__ void grid_barrier(u32* arrived, u32& target) {
    __threadfence();
    named_barrier<CONSUMER_THREADS>(1);
    target += gridDim.y;
    if (threadIdx.x == 0) {
        atomicAdd(arrived, 1);
        while (load_acquire(arrived) < target) {}
    }
    named_barrier<CONSUMER_THREADS>(1);
    __threadfence();
}

#if SHARD
// All blocks of all ranks.
__device__ __forceinline__ void meet_ranks(const Params& p, const Links& links, u32& arrived) {
    __threadfence_system();
    grid_barrier(&p.progress[1], arrived);
    if (blockIdx.y == 0 && threadIdx.x == 0) rank_barrier(links, p.ranks);
    grid_barrier(&p.progress[1], arrived);
}
#endif

// What the sweep needs to know of its rows.
__device__ __forceinline__ void load_rows(const Params& p, Workspace& work, int row0, u32 parity, bool first) {
    if (threadIdx.x < ROWS) {
        const int row = row0 + threadIdx.x;
        OpenRow open = {};
        if (row < p.B) {
            const uint4* const source = reinterpret_cast<const uint4*>(&p.open[row]);
            static_assert(sizeof(OpenRow) % 16 == 0, "in whole vectors");
#pragma unroll
            for (int i = 0; i < static_cast<int>(sizeof(OpenRow) / 16); ++i) reinterpret_cast<uint4*>(&open)[i] = __ldcg(source + i);
        }
        work.open[threadIdx.x] = open;
        if (open.mode != SETTLED) {
            const float temperature = row_temperature(p, row);
            work.scale[threadIdx.x] = make_scale(order_score(turned_back(p.peaks[row])), temperature);
            work.stream[threadIdx.x] = row_stream(p, row);
            work.spread[threadIdx.x] = row_spread(temperature);
        }
    }
    named_barrier<CONSUMER_THREADS>(1);
    if (threadIdx.x == 0) {
        Todo todo = NOTHING;
        int used = 0;
        for (int r = 0; r < ROWS; ++r) {
            if (first) work.slot[r] = work.open[r].mode != SETTLED && used < p.made_rows ? used++ : -1;
            if (SHARD && work.slot[r] < 0) work.open[r].mode = SETTLED;  // in this round
            if (work.open[r].mode != SETTLED && todo != MULTIPLY) todo = first || work.slot[r] < 0 ? MULTIPLY : READ;
        }
        work.todo[parity] = todo;
    }
    for (int i = threadIdx.x; i < ROWS * PARTS; i += CONSUMER_THREADS)
        if (work.open[i / PARTS].mode != SETTLED) work.table[i / PARTS][i % PARTS] = table_entry(i % PARTS, work.scale[i / PARTS]);
}

extern "C" __global__ void __launch_bounds__(CONSUMER_THREADS + 128, 1)
    finish_rows(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap hidden, const __grid_constant__ Params p, const __grid_constant__ Links links) {
    extern __shared__ __align__(1024) unsigned char memory[];  // the swizzle needs stages at multiples of 1,024 bytes
    if (!p.progress[0]) return;
    const u32 stages = shared_address(memory);
    Workspace& work = *reinterpret_cast<Workspace*>(memory + STAGES * STAGE_BYTES);
    __shared__ u64 barriers[2 * STAGES + 2];
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES, turn = empty + 8 * STAGES;
    if (threadIdx.x == 0) begin_pipeline(full, empty, turn);
    __syncthreads();

    Ring ring;
    u32 parity = 0, todo = NOTHING;
    if (threadIdx.x >= CONSUMER_THREADS) {
        give_registers<24>();
        if (threadIdx.x >= BLOCK_THREADS) return;
        for (int row0 = 0; row0 < p.B; row0 += ROWS) {
            for (bool first = true;; first = SHARD && todo == NOTHING) {
                named_barrier<BLOCK_THREADS>(2);
                todo = work.todo[parity];
                parity ^= 1;
                if (todo == NOTHING && (first || !SHARD)) break;
                if (todo == MULTIPLY && threadIdx.x == CONSUMER_THREADS) produce(&weight, &hidden, p, row0, stages, full, empty, ring);
                __syncwarp();
            }
        }
    } else {
        take_registers<240>();
        const int warp = threadIdx.x >> 5;
        u32 turn_parity = 0, arrived = 0;
        for (int row0 = 0; row0 < p.B; row0 += ROWS) {
            for (bool first = true;; first = SHARD && todo == NOTHING) {
                load_rows(p, work, row0, parity, first);
                named_barrier<BLOCK_THREADS>(2);
                todo = work.todo[parity];
                parity ^= 1;
                if (todo == NOTHING && (first || !SHARD)) break;
                if (todo == NOTHING) continue;
#if SHARD
                if (todo == MULTIPLY) meet_ranks(p, links, arrived);  // nobody reads what is there now
#endif
                sweep(p, links, work, row0, stages, full, empty, turn, ring, turn_parity, static_cast<Todo>(todo));
#if SHARD
                if (todo == MULTIPLY) {
                    meet_ranks(p, links, arrived);
                    continue;
                }
#endif
                grid_barrier(&p.progress[1], arrived);
                // Every other warp, for a list takes the tiles of two
                for (int r = blockIdx.y + warp / 2 * gridDim.y; warp % 2 == 0 && r < ROWS; r += 4 * gridDim.y) {
                    const OpenRow& open = work.open[r];
                    Entry* const list = reinterpret_cast<Entry*>(work.tile[warp]);
                    if (open.mode == DRAWING) settle(p, row0 + r, work.scale[r].peak, open.floor, {NOTHING_ORDER, NO_TOKEN, 0.0f}, 0);
                    else if (open.mode == COLLECTING || open.mode == WEIGHING) settle_list(p, row0 + r, open, work.scale[r], work.table[r], work.stream[r], work.spread[r], {list, list + LISTED, 0});
                    else if (open.mode != SETTLED) narrow(p, row0 + r, open, work.scale[r], work.table[r]);
                }
                grid_barrier(&p.progress[1], arrived);
            }
        }
    }
}
