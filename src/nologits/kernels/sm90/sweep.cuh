// A sweep over the head for open rows: their logits are made again, and added up, listed or drawn from (finish.cu).
#pragma once
#include "pipeline.cuh"
#include "winners.cuh"
#include "exchange.cuh"

constexpr int PITCH = TILE_V + 4;    // of a row of the tile in shared memory; lanes write to different banks
constexpr int WARP_ROWS = 16;
constexpr int BLOCK_THREADS = CONSUMER_THREADS + 32;  // that tell each other when to go on

// What is to be done for a group of rows: nothing, a sweep that multiplies, one over logits that a sweep before has kept.
enum Todo { NOTHING, MULTIPLY, READ };

struct Workspace {
    double table[ROWS][PARTS];
    float tile[8][WARP_ROWS][PITCH];
    Scale scale[ROWS];
    OpenRow open[ROWS];
    Candidate best[8][WARP_ROWS];
    u64 kept[8][WARP_ROWS];
    Stream stream[ROWS];
    float spread[ROWS];
    int slot[ROWS];  // where the row's logits are kept once made; -1: there is no room for them
    u32 todo[2];     // Todo
};
static_assert(sizeof(Workspace) <= 112 << 10, "as much as the launcher gives");
static_assert(sizeof(float[2][WARP_ROWS][PITCH]) >= 2 * LISTED * sizeof(Entry), "a list fits in the tiles of two warps");

__device__ __forceinline__ Entry* words_of(const Params& p, int row) { return p.entries + static_cast<i64>(row) * CAPACITY; }

__device__ __forceinline__ int shift_of(u32 span) { return max(0, 32 - __clz(span) - 11); }

__device__ __forceinline__ int key_shift(const OpenRow& open) { return shift_of(static_cast<u32>(open.last) - static_cast<u32>(open.first)); }

// Grows with the key.
__device__ __forceinline__ int bin_of(const OpenRow& open, int key) {
    if (open.inverse > 0.0f) return max(0, min(BINS - 1, static_cast<int>((value_of(key) - open.low) * open.inverse)));
    return (static_cast<u32>(key) - static_cast<u32>(open.first)) >> key_shift(open);
}

// ---- a row's part of a tile, by one warp; a lane has the four ids of a noise group

__device__ __forceinline__ void add_bins(const OpenRow& open, const Scale& scale, const double (&table)[PARTS], u64* words, const float (&x)[4], int id) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        const int key = key_of(x[w]), mine = id + word_offset(w);
        if (key < open.first || key > open.last || !open.floor.keeps(key, mine)) continue;
        if (open.mode == COLLECTING) {
            const u64 place = atomicAdd(&words[COUNT], 1ull);
            if (place < LISTED) words[LIST + place] = make_entry(key, mine);
        } else if (open.mode == BY_ID) {
            if (mine >= open.id_first && mine <= open.id_last) atomicAdd(&words[BINS - 1 - ((mine - open.id_first) >> shift_of(open.id_last - open.id_first))], 1ull);
        } else {
            const u64 each = open.mode == BY_COUNT ? 1 : units(x[w], scale, table);
            if (each) atomicAdd(&words[open.mode == WEIGHING ? mine & (BINS - 1) : bin_of(open, key)], each);
        }
    }
}

// Draws from what is kept above the key `over`.
__device__ __forceinline__ void draw_row(const OpenRow& open, const Scale& scale, const double (&table)[PARTS], const Stream& stream, float spread,
                                         const float (&x)[4], int id, int over, Candidate& row_best, u64& row_kept) {
    Candidate best = {NOTHING_ORDER, NO_TOKEN, 0.0f};
    u64 kept = 0;
    bool keep[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        const int key = key_of(x[w]);
        keep[w] = key > over && open.floor.keeps(key, id + word_offset(w));
        if (MASS && keep[w]) kept += units(x[w], scale, table);
    }
    if (keep[0] || keep[1] || keep[2] || keep[3]) {
        uint4 words[1];
        philox(words, {static_cast<u32>(id)}, stream);
        const u32 word[4] = {words[0].x, words[0].y, words[0].z, words[0].w};
#pragma unroll
        for (int w = 0; w < 4; ++w)
            if (keep[w]) keep_better(best, {score_order(score(x[w], spread, word[w])), static_cast<u32>(id + word_offset(w)), x[w]});
    }
    best = best_of_lanes(best);
#if MASS
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) kept += __shfl_xor_sync(ALL, kept, lanes);
#endif
    if ((threadIdx.x & 31) == 0) {
        Candidate mine = row_best;
        keep_better(mine, best);
        row_best = mine;
        row_kept += kept;
    }
    __syncwarp();
}

// ---- a sweep over the block's tiles

// Tiles of a row that is kept: of a shard those of the whole vocabulary, which all ranks have made.
__device__ __forceinline__ int row_tiles(const Params& p) { return SHARD ? (vocab_of(p) + TILE_V - 1) / TILE_V : p.tiles; }

__device__ __forceinline__ i64 made_at(const Params& p, int slot) { return static_cast<i64>(slot) * row_tiles(p) * TILE_V; }
__device__ __forceinline__ float* made_of(const Params& p, int slot) { return p.made + made_at(p, slot); }

#if SHARD
// A warp gives its rows' part of a tile to all ranks.
template <typename Logit>
__device__ __forceinline__ void give_tile(const Params& p, const Workspace& work, const Links& links, int at, Logit logit) {
    const int lane = threadIdx.x & 31, warp_row = WARP_ROWS * (threadIdx.x >> 5 & 3);
#pragma unroll 1
    for (int r = 0; r < WARP_ROWS; ++r) {
        const int slot = work.slot[warp_row + r];
        if (slot < 0) continue;
#pragma unroll 1
        for (int rank = 0; rank < p.ranks; ++rank) {
            float* const made = reinterpret_cast<float*>(links.buffers[rank] + links.made_at) + made_at(p, slot) + p.first;
            for (int place = lane; place < TILE_V; place += 32)
                if (has_id(p, at * TILE_V + place)) made[at * TILE_V + place] = logit(r, place);
        }
    }
}
#endif

// A warp takes its rows' part of a tile, whose logits are logit(row of the warp, slot, place in the tile).
template <typename Logit>
__device__ __forceinline__ void take_tile(const Params& p, Workspace& work, int row0, int at, Logit logit) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warp_row = WARP_ROWS * (warp & 3);
    const int first = (lane & 7) + 16 * (lane >> 3), id = at * TILE_V + first;
#pragma unroll 1
    for (int r = 0; r < WARP_ROWS; ++r) {
        const int row = warp_row + r, slot = work.slot[row];
        const OpenRow& open = work.open[row];
        if (open.mode == SETTLED) continue;
        float logits[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            logits[w] = logit(r, slot, first + word_offset(w));
            if (!SHARD && slot >= 0) made_of(p, slot)[at * TILE_V + first + word_offset(w)] = logits[w];
        }
        if (open.mode != DRAWING) add_bins(open, work.scale[row], work.table[row], words_of(p, row0 + row), logits, id);
        if (open.mode >= COLLECTING)
            draw_row(open, work.scale[row], work.table[row], work.stream[row], work.spread[row], logits, id, open.mode == DRAWING ? LOWEST_KEY : open.last,
                     work.best[warp][r], work.kept[warp][r]);
    }
}

__device__ __forceinline__ void leave_winners(const Params& p, Workspace& work, int row0) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warpgroup = warp >> 2, warp_row = WARP_ROWS * (warp & 3);
    if (lane < WARP_ROWS && work.open[warp_row + lane].mode >= COLLECTING) {
        Entry* const words = words_of(p, row0 + warp_row + lane);
        store_winner(words + DRAWN + 2 * (2 * blockIdx.y + warpgroup), work.best[warp][lane]);
        if (MASS) atomicAdd(&words[KEPT], work.kept[warp][lane]);
    }
}

__device__ __forceinline__ void sweep(const Params& p, [[maybe_unused]] const Links& links, Workspace& work, int row0, u32 stages, u32 full, u32 empty, u32 turn, Ring& ring, u32& turn_parity, Todo todo) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warpgroup = warp >> 2, warp_row = WARP_ROWS * (warp & 3);
    const int steps = (p.D + TILE_D - 1) / TILE_D;
    float(&tile)[WARP_ROWS][PITCH] = work.tile[warp];
    Row rows[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) rows[h] = make_row(p, row0 + warp_row, (lane >> 2) + 8 * h);
    if (lane < WARP_ROWS) work.best[warp][lane] = {NOTHING_ORDER, NO_TOKEN, 0.0f}, work.kept[warp][lane] = 0;
    __syncwarp();

    if (todo == READ) {
        for (int q = warpgroup; tile_at(q) < row_tiles(p); q += 2)
            take_tile(p, work, row0, tile_at(q), [&](int, int slot, int place) {
                const int at = tile_at(q) * TILE_V + place;
                return !SHARD || at < vocab_of(p) ? __ldcg(&made_of(p, slot)[at]) : -infinity();
            });
        return leave_winners(p, work, row0);
    }
    Ring end = ring;
    float x[SETS][IDS];
    int q = warpgroup;
    if (q == 1) ring.skip(steps);
    for (; tile_at(q) < p.tiles; q += 2) {
        const int at = tile_at(q), v0 = at * TILE_V + 2 * (lane & 3);
        if (q > 0) {
            barrier_wait(turn + 8 * warpgroup, turn_parity);
            turn_parity ^= 1;
        }
        const int last = multiply(x, steps, stages, full, empty, ring, [](int) {});
        if (lane == 0) barrier_arrive(turn + 8 * (warpgroup ^ 1));
        wgmma_wait<0>();
        release(empty, last);
        ring.skip(steps);
        if (!rows[0].warp_valid) continue;

        // The logits, through shared memory: then a warp has one row at a time
        head_transform(x[0], p, v0, (at + 1) * TILE_V);
        request_transform(x[0], p, rows, v0, (at + 1) * TILE_V);
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int i = 0; i < IDS / 2; i += 2)
                *reinterpret_cast<float2*>(&tile[(lane >> 2) + 8 * h][offset_at(i) + 2 * (lane & 3)]) =
                    make_float2(x[0][register_at(i, h)], x[0][register_at(i + 1, h)]);
        __syncwarp();
#if SHARD
        give_tile(p, work, links, at, [&](int r, int place) { return tile[r][place]; });
#else
        take_tile(p, work, row0, at, [&](int r, int, int place) { return tile[r][place]; });
#endif
        __syncwarp();
    }

    // Both warpgroups stand where the sweep ends, and nobody's turn is left over
    int tiles = 0;
    while (tile_at(tiles) < p.tiles) ++tiles;
    end.skip(tiles * steps);
    ring = end;
    if (tiles > 0 && (tiles & 1) == warpgroup) {
        barrier_wait(turn + 8 * warpgroup, turn_parity);
        turn_parity ^= 1;
    }
    if (!SHARD) leave_winners(p, work, row0);
}
