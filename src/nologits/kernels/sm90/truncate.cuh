// Filters under the matmul: Qrita's truncation (arXiv 2602.01518) in the epilogue. Logits at or above a row's threshold are its
// candidates, among which choose.cu finds what is kept; nothing else of the row leaves the chip.
//
// The threshold comes from a pilot, the first tile of every block: each tells the largest logit of two halves of it. The k-th largest
// of those never exceeds the k-th largest logit of the row, so for a top-k the candidates hold all that is kept; so they do for a
// min-p, whose bound under the pilot's largest logit is at most the bound under the row's. A top-p has no such bound, and gets as many
// candidates as it usually needs.
//
// Blocks wait for the pilot while they already multiply their next tile, and not for ever: a threshold decides how much there is to
// choose from, and whether it is enough is certified later. It never decides what is kept.
#pragma once
#include "patience.cuh"
#include "pipeline.cuh"

constexpr int PIECES = 2;              // of the pilot's tile
constexpr int MOST_PILOT = 9;          // logits of a lane: of up to 144 blocks
constexpr float WANTED = 1024.0f;      // candidates, for a top-p
constexpr float ROOM = 2800.0f;        // the most of them, for a min-p that may keep more than there is room for
constexpr float MARGIN_OF_K = 1.3f;    // candidates for each that a top-k keeps, where the pilot is smaller than k
constexpr u32 PATIENCE = 1 << 18;      // cycles
static_assert(32 * MOST_PILOT <= WARP_CODES, "the pilot fits where noise codes are kept");

// ---- the pilot

// 0 says that nobody has told it yet.
__device__ __forceinline__ void tell(u32* word, float logit) { store_relaxed(word, turned(score_order(logit))); }

// Tells the largest logits of a warp's rows.
__device__ __forceinline__ void tell_pilot(const float (&x)[IDS], const Params& p, const Row (&rows)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            constexpr int WIDTH = IDS / 2 / PIECES;
            float peak = -infinity();
#pragma unroll
            for (int i = piece * WIDTH; i < (piece + 1) * WIDTH; ++i) peak = fmaxf(peak, x[register_at(i, h)]);
            peak = over_row(peak, [](float a, float b) { return fmaxf(a, b); });
            if ((threadIdx.x & 3) == 0 && rows[h].valid)
                tell(&p.pilot[(static_cast<i64>(rows[h].row) * gridDim.y + blockIdx.y) * PIECES + piece], peak);
        }
    }
}

// The pilot's logit from which on a row has about so many, as a rank among them.
__device__ __forceinline__ int rank_for(float wanted, int pilot, int V) {
    const float pieces = static_cast<float>(V) / (TILE_V / PIECES);
    return max(1, min(pilot, static_cast<int>(pilot * (1.0f - exp2_approx(-wanted / pieces * LOG2E)))));
}

// What the pilot told of a row, for one warp. In shared memory, for the registers hold logits.
struct Pilot {
    volatile u32* told;  // a lane's are every 32nd
    u32 lowest, highest;

    // Waits for it.
    __device__ __forceinline__ Pilot(const Params& p, int row, u32* memory) : told(memory + (threadIdx.x & 31)) {
        const int size = gridDim.y * PIECES, lane = threadIdx.x & 31;
        const u32* const words = p.pilot + static_cast<i64>(row) * size + lane;
        be_patient(PATIENCE, [&] {
            bool all = true;
            lowest = 0xFFFFFFFF, highest = 0;
#pragma unroll
            for (int i = 0; i < MOST_PILOT; ++i) {
                const bool there = lane + 32 * i < size;
                const u32 word = there ? load_relaxed(&words[32 * i]) : 0;
                all &= !there || word;
                if (there) lowest = min(lowest, word), highest = max(highest, word);
                told[32 * i] = word;
            }
            return all;
        });
        lowest = __reduce_min_sync(ALL, lowest);
        highest = __reduce_max_sync(ALL, highest);
    }

    __device__ __forceinline__ float peak() const { return order_score(turned_back(highest)); }

    // The rank-th largest, rounded down: a threshold may lie below it. What nobody has told is no number, and fmaxf passes over it.
    __device__ __forceinline__ float ranked(u32 rank) const {
        u32 low = lowest, high = highest;
        while (high - low > 1 << 12) {
            const u32 middle = low + (high - low) / 2;
            u32 count = 0;
#pragma unroll
            for (int i = 0; i < MOST_PILOT; ++i) count += told[32 * i] >= middle;
            if (__reduce_add_sync(ALL, count) >= rank) low = middle;
            else high = middle;
        }
        return fmaxf(LOWEST, order_score(turned_back(low)));
    }
};

// The threshold of a row, by a warp.
__device__ __forceinline__ float pilot_threshold(const Params& p, int row, u32* memory) {
    const Request request = request_of(p, row);
    const Filters filters(request, vocab_of(p));
    const int size = gridDim.y * PIECES, ranks = SHARD ? p.ranks : 1;  // each shard looks for its share of what is wanted
    if (p.V <= room_of(p) || !possible(request.temperature)) return LOWEST;
    const Pilot pilot(p, row, memory);
    int rank = filters.top_k && request.top_k <= size ? static_cast<int>(request.top_k) : 0;
    if (filters.top_k && !rank) rank = rank_for(MARGIN_OF_K * request.top_k / ranks, size, p.V);
    if (filters.mass_of_all()) rank = rank_for(WANTED / ranks, size, p.V);
    if (!filters.any() || rank) rank = max(rank, min(size, p.num_top));
    float threshold = pilot.ranked(rank ? rank : rank_for(ROOM / ranks, size, p.V));
    if (filters.min_p) {  // any below the bound will do
        const float peak = pilot.peak(), reach = request.temperature * logf(static_cast<float>(request.min_p));
        threshold = fmaxf(threshold, peak + reach - (fabsf(peak) + fabsf(reach)) * 1e-6f);
        if (p.num_top) threshold = fminf(threshold, pilot.ranked(max(rank, min(size, p.num_top))));
    }
    return threshold;
}

// Finds every row's threshold. Each block works out those of a few rows, and tells the others. Of warpgroups that take turns the
// first does so, for both. `memory` is the warp's, which gather() uses later.
__device__ __forceinline__ void learn_thresholds(const float (&x)[SETS][IDS], const Params& p, const Row (&rows)[SETS][2], float* thresholds, int warp_row, u32* memory) {
    if (!rows[0][0].warp_valid) return;
    const int lane = threadIdx.x & 31, warpgroup = threadIdx.x >> 7, of_warp = TURNS ? 16 * (threadIdx.x >> 5 & 3) : 16 * (threadIdx.x >> 5);
    const int ready = 10 + (threadIdx.x >> 5 & 3);  // barrier of this warp and its twin with the same rows
    if (TURNS && warpgroup == 1) {
        named_barrier<64>(ready);
    } else {
#pragma unroll
        for (int set = 0; set < SETS; ++set) tell_pilot(x[set], p, rows[set]);
#pragma unroll 1
        for (int i = blockIdx.y; i < 16 * SETS; i += gridDim.y) {
            const int row = warp_row + (i & 15) + 64 * (i >> 4);
            if (row >= p.B) continue;
            const float threshold = pilot_threshold(p, row, memory);
            if (lane == 0) tell(&p.thresholds[row], threshold);
        }
        const int offset = (lane & 15) + 64 * (lane >> 4), row = warp_row + offset;
        const bool mine = lane < 16 * SETS && row < p.B;
        u32 told = 0;
        be_patient(2 * PATIENCE, [&] {
            if (mine) told = load_relaxed(&p.thresholds[row]);
            return !mine || told;
        });
        if (mine) thresholds[of_warp + offset] = told ? order_score(turned_back(told)) : LOWEST;
        __syncwarp();
        if (TURNS && tile_at(1) < p.tiles) named_barrier_arrive<64>(ready);
    }
}

// ---- candidates

// Calls step(slot, word, logit) for those of the staged logits, four to each taken slot, that are candidates.
template <typename Step>
__device__ __forceinline__ void each_candidate(const float4* staged, const float* thresholds, u32 taken, Step step) {
    for (int i = 0; taken; ++i, taken &= taken - 1) {
        const int slot = __ffs(taken) - 1;
        const float threshold = thresholds[slot & 1 ? 8 : 0];
        const float4 four = staged[i * 32];
        const float logit[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int w = 0; w < 4; ++w)
            if (!(logit[w] < threshold)) step(slot, w, logit[w]);
    }
}

// Appends the logits of a tile that reach their row's threshold; NaNs as well. `thresholds`: of the thread's first row. Calls meanwhile()
// once, while it waits for memory to say where they go.
template <typename Meanwhile>
__device__ __forceinline__ void gather(const float (&x)[IDS], const Params& p, Row (&rows)[2], const float* thresholds, u32* codes, int id0, Meanwhile meanwhile) {
    u32 reached = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float threshold = rows[h].gathered ? thresholds[8 * h] : infinity();
#pragma unroll
        for (int slot = h; slot < SLOTS; slot += 2) {
            const int g = slot >> 1;
            const float largest = max_or_nan(max_or_nan(x[register_of(g, 0, h)], x[register_of(g, 1, h)]), max_or_nan(x[register_of(g, 2, h)], x[register_of(g, 3, h)]));
            rows[h].peak = max_or_nan(rows[h].peak, largest);
            if (!(largest < threshold)) reached |= 1u << slot;
        }
    }
    reached &= (rows[0].gathered ? 0x55555555u : 0) | (rows[1].gathered ? 0xAAAAAAAAu : 0);
    // Registers cannot be indexed by a number known at run time: the logits go through shared memory.
    float4* const staged = reinterpret_cast<float4*>(codes) + (threadIdx.x & 31);
    bool waited = false;
    do {
        const u32 wanted = __reduce_or_sync(ALL, reached);
        u32 taken = 0;
        int count = 0;
        __syncwarp();
#pragma unroll
        for (int chunk = 0; chunk < SLOTS; chunk += 4) {
            if (!(wanted >> chunk & 15)) continue;  // the same in all lanes
#pragma unroll
            for (int slot = chunk; slot < chunk + 4; ++slot) {
                if ((reached >> slot & 1) && count < STAGED) {
                    const int g = slot >> 1, h = slot & 1;
                    staged[count++ * 32] = make_float4(x[register_of(g, 0, h)], x[register_of(g, 1, h)], x[register_of(g, 2, h)],
                                                       x[register_of(g, 3, h)]);
                    taken |= 1u << slot;
                }
            }
        }
        reached &= ~taken;
        u32 found[2] = {0, 0}, place[2] = {0, 0};
        each_candidate(staged, thresholds, taken, [&](int slot, int, float) { (slot & 1 ? found[1] : found[0]) += 1; });
#pragma unroll
        for (int h = 0; h < 2; ++h)
            if (found[h]) place[h] = atomicAdd(&p.gathered[rows[h].row], found[h]);
        if (!waited) meanwhile();
        waited = true;
        each_candidate(staged, thresholds, taken, [&](int slot, int w, float logit) {
            const u32 at = slot & 1 ? place[1]++ : place[0]++;
            const int row = slot & 1 ? rows[1].row : rows[0].row;
            if (at < CAPACITY) p.entries[static_cast<i64>(row) * CAPACITY + at] = make_entry(key_of(logit), id0 + group_offset(slot >> 1) + word_offset(w));
        });
        __syncwarp();
    } while (__any_sync(ALL, reached));
}

// ---- the mass of all that is no candidate

constexpr int ADDED_IN_FP32 = 8;  // terms of a rest, in a tree; such sums are added in fp64

template <int count, typename Term>
__device__ __forceinline__ float tree_sum(int first, Term term) {
    if constexpr (count == 1) return term(first);
    else return tree_sum<count / 2>(first, term) + tree_sum<count / 2>(first + count / 2, term);
}

// Adds a tile's. What the roundings make of the sum is known (leave.cuh).
__device__ __forceinline__ void weigh_rest(const float (&x)[IDS], Row (&rows)[2], const float* thresholds) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (!__any_sync(ALL, rows[h].weighs)) continue;
        const float threshold = thresholds[8 * h], inverse = rows[h].inverse, scaled = rest_offset(threshold, inverse);
#pragma unroll
        for (int first = 0; first < IDS / 2; first += ADDED_IN_FP32) {
            rows[h].rest += tree_sum<ADDED_IN_FP32>(first, [&](int i) {
                const float logit = x[register_at(i, h)];
                return logit < threshold ? exp2_approx(__fmaf_rn(logit, inverse, scaled)) : 0.0f;
            });
        }
    }
}

__device__ __forceinline__ void set_rest(Candidate& best, double rest) { best.order = __double2hiint(rest), best.token = static_cast<u32>(__double2loint(rest)); }
__device__ __forceinline__ double rest_of(const Candidate& best) { return __hiloint2double(best.order, best.token); }

// When the block is done: a row's rest in place of its winner, and its largest logit to all.
__device__ __forceinline__ void finish_candidates(const Params& p, Row& row) {
    const double rest = over_row(row.rest, [](double a, double b) { return a + b; });
    const float peak = over_row(row.peak, max_or_nan);
    if (row.valid && !row.drawn) set_rest(row.best, rest);
    if (row.gathered && (threadIdx.x & 3) == 0) atomicMax(&p.peaks[row.row], turned(score_order(peak)));
}
