// Rows whose candidates did not settle what they keep (choose.cu): flat rows, wide nuclei, more ties than there is room for. Their
// logits are made again, as often as it takes, and never stored.
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

#include "pipeline.cuh"
#include "winners.cuh"

constexpr int PITCH = TILE_V + 4;    // of a row of the tile in shared memory; lanes write to different banks
constexpr int WARP_ROWS = 16;
constexpr int BLOCK_THREADS = CONSUMER_THREADS + 32;  // that tell each other when to go on

struct Workspace {
    double table[ROWS][PARTS];
    float tile[8][WARP_ROWS][PITCH];
    Scale scale[ROWS];
    OpenRow open[ROWS];
    Candidate best[8][WARP_ROWS];
    u64 kept[8][WARP_ROWS];
    Stream stream[ROWS];
    float spread[ROWS];
    u32 any[2];  // rows of the group are open
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

__device__ __forceinline__ void sweep(const Params& p, Workspace& work, int row0, u32 stages, u32 full, u32 empty, u32 turn, Ring& ring, u32& turn_parity) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warpgroup = warp >> 2, warp_row = WARP_ROWS * (warp & 3);
    const int steps = (p.D + TILE_D - 1) / TILE_D;
    float(&tile)[WARP_ROWS][PITCH] = work.tile[warp];
    Row rows[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) rows[h] = make_row(p, row0 + warp_row, (lane >> 2) + 8 * h);
    if (lane < WARP_ROWS) work.best[warp][lane] = {NOTHING_ORDER, NO_TOKEN, 0.0f}, work.kept[warp][lane] = 0;
    __syncwarp();

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
        const int first = (lane & 7) + 16 * (lane >> 3), id = at * TILE_V + first;
#pragma unroll 1
        for (int r = 0; r < WARP_ROWS; ++r) {
            const int row = warp_row + r;
            const OpenRow& open = work.open[row];
            if (open.mode == SETTLED) continue;
            float logits[4];
#pragma unroll
            for (int w = 0; w < 4; ++w) logits[w] = tile[r][first + word_offset(w)];
            if (open.mode != DRAWING) add_bins(open, work.scale[row], work.table[row], words_of(p, row0 + row), logits, id);
            if (open.mode >= COLLECTING)
                draw_row(open, work.scale[row], work.table[row], work.stream[row], work.spread[row], logits, id, open.mode == DRAWING ? LOWEST_KEY : open.last,
                         work.best[warp][r], work.kept[warp][r]);
        }
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
    if (lane < WARP_ROWS && work.open[warp_row + lane].mode >= COLLECTING) {
        Entry* const words = words_of(p, row0 + warp_row + lane);
        const Candidate best = work.best[warp][lane];
        store_winner(words + DRAWN + 2 * (2 * blockIdx.y + warpgroup), best);
        if (MASS) atomicAdd(&words[KEPT], work.kept[warp][lane]);
    }
}

// ---- between sweeps: what they told of a row, by one warp

__device__ __forceinline__ u64 words_through(u64 mine) {
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes <<= 1) {
        const u64 other = __shfl_up_sync(ALL, mine, lanes);
        if ((threadIdx.x & 31) >= lanes) mine += other;
    }
    return mine;
}

// The row keeps what `floor` keeps, of all or of its likeliest tokens. What comes next?
__device__ __forceinline__ void go_on(const Params& p, OpenRow& open, const Request& request, const Filters& filters, const Scale& scale) {
    if (open.topping) {
        open.topping = 2;
        open.mode = COLLECTING;
        open.first = open.floor.key;
        open.last = key_of(scale.peak);
    } else if (filters.top_p && !open.weighed) {
        begin_mass(p, open, request, scale, scale.peak);
    } else {
        open.mode = DRAWING;
    }
}

__device__ __forceinline__ void empty_words(Entry* words) {
    for (int i = threadIdx.x & 31; i < CAPACITY; i += 32) words[i] = 0;
}

// The range's keys that a bin has.
__device__ __forceinline__ void enter_bin(OpenRow& open, int bin) {
    const OpenRow range = open;
    auto first_in = [&](int from) {  // first key of that bin or a later one
        i64 low = range.first, high = static_cast<i64>(range.last) + 1;
        while (low < high) {
            const i64 middle = (low + high) >> 1;
            if (bin_of(range, static_cast<int>(middle)) >= from) high = middle;
            else low = middle + 1;
        }
        return low;
    };
    open.first = static_cast<int>(first_in(bin));
    open.last = static_cast<int>(first_in(bin + 1) - 1);
    open.inverse = 0.0f;
}

__device__ __forceinline__ void narrow(const Params& p, int row, OpenRow open, const Scale& scale, const double (&table)[PARTS]) {
    const int lane = threadIdx.x & 31;
    constexpr int EACH = BINS / 32;
    const Request request = request_of(p, row);
    const Filters filters(request, p.V);
    Entry* const words = words_of(p, row);
    const int upper = BINS - 1 - EACH * lane;
    u64 mine = 0;
#pragma unroll 8
    for (int i = 0; i < EACH; ++i) mine += __ldcg(&words[upper - i]);
    const u64 through = words_through(mine), total = __shfl_sync(ALL, through, 31);
    if (open.mode == BY_MASS && open.target == 0.0) open.target = fmax(request.top_p * static_cast<double>(total), 0.5);

    // The bin that reaches the target: first the lane that has it, then all look at that lane's bins
    u64 before = open.above + through - mine, measure = 0;
    const bool reaches = static_cast<double>(before) < open.target && static_cast<double>(before + mine) >= open.target;
    const u32 reached = __ballot_sync(ALL, reaches);
    int bin = -1;
    if (reached) {
        const int source = __ffs(reached) - 1;
        static_assert(EACH == 64, "two bins a lane");
        const int first = BINS - 1 - EACH * source - 2 * lane;
        const u64 upper_bin = __ldcg(&words[first]), lower_bin = __ldcg(&words[first - 1]);
        before = __shfl_sync(ALL, before, source) + words_through(upper_bin + lower_bin) - (upper_bin + lower_bin);
        if (static_cast<double>(before) < open.target && static_cast<double>(before + upper_bin) >= open.target) {
            bin = first;
            measure = upper_bin;
        } else if (static_cast<double>(before + upper_bin) < open.target && static_cast<double>(before + upper_bin + lower_bin) >= open.target) {
            bin = first - 1;
            before += upper_bin;
            measure = lower_bin;
        }
    }
    const u32 found = __ballot_sync(ALL, bin >= 0);
    empty_words(words);  // all lanes have read theirs
    if (!found) {        // fewer tokens than top-k asks for
        if (lane == 0) go_on(p, open, request, filters, scale);
    } else if (lane == __ffs(found) - 1) {
        open.above = before;
        if (open.mode == BY_ID) {
            const int shift = shift_of(open.id_last - open.id_first);
            open.id_first += (BINS - 1 - bin) << shift;
            open.id_last = min(open.id_last, open.id_first + (1 << shift) - 1);
            if (open.id_first == open.id_last) {
                open.floor = {open.first, open.id_first};
                go_on(p, open, request, filters, scale);
            }
        } else {
            enter_bin(open, bin);
            const u64 least = open.weighed ? units(value_of(open.first), scale, table) : 1;
            if (least && measure / least <= LISTED) {
                open.mode = COLLECTING;
            } else if (open.first == open.last) {
                const u32 copies = measure / least, kept = copies_kept(before, least, copies, open.target);
                if (kept < copies) {
                    open.mode = BY_ID;
                    open.id_first = 0;
                    open.id_last = p.V - 1;
                    open.above = 0;
                    open.target = kept;
                } else {
                    if (open.first != open.floor.key) open.floor = {open.first, EVERY_ID};
                    go_on(p, open, request, filters, scale);
                }
            }
        }
    }
    if (lane == (found ? __ffs(found) - 1 : 0)) p.open[row] = open;
}

// A list's entries and their measures, on chip.
struct List {
    Entry* entries;
    u64* measures;
    int count;
};

// The last entry of a list that is kept: the largest from which on the measure reaches the target.
__device__ __forceinline__ Entry last_kept(const OpenRow& open, const List& list) {
    const bool weighing = open.mode == WEIGHING;  // the list lies above the range
    const Entry lowest = weighing ? 0 : static_cast<Entry>(turned(open.first)) << 32, highest = weighing ? ~0ull : static_cast<Entry>(turned(open.last)) << 32 | 0xFFFFFFFFu;
    const int bits = 64 - __clzll(lowest ^ highest);
    Entry found = bits == 64 ? 0 : lowest >> bits << bits;
#pragma unroll 1
    for (int bit = bits - 1; bit >= 0; --bit) {
        const Entry from = found | 1ull << bit;
        u64 sum = 0;
        for (int i = threadIdx.x & 31; i < list.count; i += 32) sum += list.entries[i] >= from ? list.measures[i] : 0;
        sum = __shfl_sync(ALL, words_through(sum), 31);
        if (static_cast<double>(open.above + sum) >= open.target) found = from;
    }
    return found;
}

// The results of a row that keeps what `boundary` does and has been drawn from: `best` and `kept` are a lane's, of what its slots lack.
__device__ __forceinline__ void settle(const Params& p, int row, float peak, const Boundary& boundary, Candidate best, u64 kept) {
    const int lane = threadIdx.x & 31;
    const Entry* const words = words_of(p, row);
    for (int i = lane; i < 2 * gridDim.y; i += 32) keep_better(best, load_winner(words + DRAWN + 2 * i));
    best = best_of_lanes(best);
    kept = __shfl_sync(ALL, words_through(kept), 31) + __ldcg(&words[KEPT]);
    const float temperature = row_temperature(p, row);
    if (lane == 0) {
        write_filtered(p, row, best, peak, temperature, kept);
        p.open[row].mode = SETTLED;
    }
    write_raw(p, row, best.logit);
    for (int i = lane; p.top_ids && i < p.num_top; i += 32) {
        const Entry entry = __ldcg(&p.tops[static_cast<i64>(row) * p.num_top + i]);
        write_top(p, row, i, entry, boundary.keeps(key_of_entry(entry), id_of_entry(entry)), temperature, peak, log(kept * 0x1p-40));
    }
}

// A list that is the row's likeliest tokens.
__device__ __forceinline__ void settle_tops(const Params& p, int row, const Request& request, const Filters& filters, const Scale& scale, const List& list) {
    const int lane = threadIdx.x & 31;
    float total = 0.0f, raw_total = 0.0f;
#if MASS
    total = log_total_of_warp(p.masses + static_cast<i64>(row) * p.mass_tiles, p.mass_tiles, scale.peak, row_inverse(request.temperature));
#endif
#if RAW
    raw_total = log_total_of_warp(p.raw_masses + static_cast<i64>(row) * p.mass_tiles, p.mass_tiles, scale.peak, LOG2E);
#endif
    u32 ties = 0;
    for (int i = lane; i < list.count; i += 32) ties += key_of_entry(list.entries[i]) == key_of(scale.peak);
    const i64 most = request.temperature > 0.0f ? p.num_top : kept_of_greedy(request, p.V, __reduce_add_sync(ALL, ties));
    for (int i = lane; i < p.num_top; i += 32) {
        const Entry entry = i < list.count ? list.entries[i] : 0;
        int place = i;
        if (entry) {
            place = 0;
            for (int j = 0; j < list.count; ++j) place += list.entries[j] > entry;
        }
        p.tops[static_cast<i64>(row) * p.num_top + place] = entry;
        if (p.raw_top_ids) write_raw_top(p, row, place, entry, scale.peak, raw_total);
        if (p.top_ids && !filters.any()) write_top(p, row, place, entry, place < most, request.temperature, scale.peak, total);
    }
}

// What is kept of a list, and the row's results, or what comes next.
__device__ __forceinline__ void settle_list(const Params& p, int row, OpenRow open, const Scale& scale, const double (&table)[PARTS], const Stream& stream, float spread, List list) {
    const int lane = threadIdx.x & 31;
    Entry* const words = words_of(p, row);
    const Request request = request_of(p, row);
    const Filters filters(request, p.V);
    if (open.mode == WEIGHING) {
        u64 mass = 0;
#pragma unroll 8
        for (int i = lane; i < BINS; i += 32) mass += __ldcg(&words[i]);
        open.target = fmax(request.top_p * static_cast<double>(__shfl_sync(ALL, words_through(mass), 31)), 0.5);
    }
    list.count = min(static_cast<int>(__ldcg(&words[COUNT])), LISTED);
    for (int i = lane; i < list.count; i += 32) {
        list.entries[i] = __ldcg(&words[LIST + i]);
        list.measures[i] = open.weighed ? units(value_of(key_of_entry(list.entries[i])), scale, table) : 1;
    }
    __syncwarp();
    if (open.topping == 2) {
        settle_tops(p, row, request, filters, scale, list);
        begin_filters(p, open, request, filters, scale, scale.peak);
    } else {
        const Entry last = last_kept(open, list);
        open.floor = {key_of_entry(last), id_of_entry(last)};
        if (!open.topping && (open.weighed || !filters.top_p)) {
            Candidate best = {NOTHING_ORDER, NO_TOKEN, 0.0f};
            u64 kept = 0;
            for (int i = lane; i < list.count; i += 32) {
                const Entry entry = list.entries[i];
                if (entry < last) continue;
                const float logit = value_of(key_of_entry(entry));
                keep_better(best, winner_of(make_float2(logit, __int_as_float(id_of_entry(entry))), stream, spread));
                if (MASS) kept += units(logit, scale, table);
            }
            return settle(p, row, scale.peak, open.floor, best, kept);
        }
        go_on(p, open, request, filters, scale);
    }
    empty_words(words);
    if (lane == 0) p.open[row] = open;
}

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

// What the sweep needs to know of its rows.
__device__ __forceinline__ void load_rows(const Params& p, Workspace& work, int row0, u32 parity) {
    if (threadIdx.x == 0) work.any[parity ^ 1] = 0;  // its readers are past it, or have read 0
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
        const u32 some = __ballot_sync(ALL, open.mode != SETTLED);
        if ((threadIdx.x & 31) == 0 && some) atomicOr(&work.any[parity], 1);
    }
    named_barrier<CONSUMER_THREADS>(1);
    for (int i = threadIdx.x; i < ROWS * PARTS; i += CONSUMER_THREADS)
        if (work.open[i / PARTS].mode != SETTLED) work.table[i / PARTS][i % PARTS] = table_entry(i % PARTS, work.scale[i / PARTS]);
}

extern "C" __global__ void __launch_bounds__(CONSUMER_THREADS + 128, 1)
    finish_rows(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap hidden, const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) unsigned char memory[];  // the swizzle needs stages at multiples of 1,024 bytes
    if (!p.progress[0]) return;
    const u32 stages = shared_address(memory);
    Workspace& work = *reinterpret_cast<Workspace*>(memory + STAGES * STAGE_BYTES);
    __shared__ u64 barriers[2 * STAGES + 2];
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES, turn = empty + 8 * STAGES;
    if (threadIdx.x == 0) {
        begin_pipeline(full, empty, turn);
        work.any[0] = work.any[1] = 0;
    }
    __syncthreads();

    Ring ring;
    u32 parity = 0;
    if (threadIdx.x >= CONSUMER_THREADS) {
        give_registers<24>();
        if (threadIdx.x >= BLOCK_THREADS) return;
        for (int row0 = 0; row0 < p.B; row0 += ROWS) {
            while (true) {
                named_barrier<BLOCK_THREADS>(2);
                const bool any = work.any[parity];
                parity ^= 1;
                if (!any) break;
                if (threadIdx.x == CONSUMER_THREADS) produce(&weight, &hidden, p, row0, stages, full, empty, ring);
                __syncwarp();
            }
        }
    } else {
        take_registers<240>();
        const int warp = threadIdx.x >> 5;
        u32 turn_parity = 0, arrived = 0;
        for (int row0 = 0; row0 < p.B; row0 += ROWS) {
            while (true) {
                load_rows(p, work, row0, parity);
                named_barrier<BLOCK_THREADS>(2);
                const bool any = work.any[parity];
                parity ^= 1;
                if (!any) break;
                sweep(p, work, row0, stages, full, empty, turn, ring, turn_parity);
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
