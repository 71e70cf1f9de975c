// What the filters keep of a row, found among its candidates, and the draw from it; and the draws of rows without filters.
//
// The candidates are all logits from a threshold on (truncate.cuh). They are sorted, and every filter keeps a prefix. Whether the
// candidates hold all that is kept is certain if
//
//     min-p      its bound lies above the threshold
//     top-k      there are at least k
//     top-p      (of all the row) their mass reaches the share p of it, beyond the doubt about the mass of the others
//
// and if there was room for them. Other rows stay open: finish.cu settles those.
//
// Grid: rows. Launched while the tile kernel still runs; waits for it on the device.
#ifndef MASS
#define MASS 0
#define RAW 0
#endif
#define GREEDY 0
#define CLUSTER 1
#define THREADS 512

#include "cluster.cuh"
#include "request.cuh"
#include "winners.cuh"

struct Workspace {
    Request request;
    double table[PARTS];
    double rest;      // mass below the threshold, in the threshold's units
    float threshold;  // of all blocks; the highest
    bool agreed;      // it was the same for all
    int cut;          // first key that min-p keeps
    u64 kept;         // mass
};
__shared__ Workspace work;
extern __shared__ __align__(16) Entry sorted[];  // as many as there are candidates, up to a power of two

struct Number {
    u64 sum;
    __device__ __forceinline__ Number over_lanes() const { return {sum_lanes(sum)}; }
    static __device__ __forceinline__ Number nothing() { return {0}; }
};

struct Best {
    Candidate candidate;
    __device__ __forceinline__ Best over_lanes() const { return {best_of_lanes(candidate)}; }
    static __device__ __forceinline__ Best nothing() { return {{NOTHING_ORDER, NO_TOKEN, 0.0f}}; }
};

// Largest first. A warp's pairs of up to 32 apart are its own, and need no barrier with others.
__device__ __forceinline__ void sort(int size) {
    for (int run = 2; run <= size; run *= 2) {
        for (int apart = run / 2; apart; apart /= 2) {
            for (int i = threadIdx.x; i < size / 2; i += THREADS) {
                const int low = 2 * i - (i & (apart - 1)), high = low + apart;
                const Entry a = sorted[low], b = sorted[high];
                if ((a < b) == !(low & run)) sorted[low] = b, sorted[high] = a;
            }
            if (apart > 32 || (apart == 1 && run >= 64)) __syncthreads();
            else __syncwarp();
        }
    }
    __syncthreads();
}

// How many of the first `count` sorted entries have a key from `key` on.
__device__ __forceinline__ int count_from(int key, int count) {
    const Entry least = static_cast<Entry>(turned(key)) << 32;
    int low = 0, high = count;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (sorted[middle] >= least) low = middle + 1;
        else high = middle;
    }
    return low;
}

// What a row without filters has drawn; by one warp.
__device__ __forceinline__ void write_drawn(const Params& p, int row, float temperature, bool valid) {
    const Stream stream = row_stream(p, row);
    Candidate best = {NOTHING_ORDER, NO_TOKEN, 0.0f};
    for (int slot = threadIdx.x; slot < p.slots; slot += 32)
        keep_better(best, winner_of(p.winners[static_cast<i64>(row) * p.slots + slot], stream, row_spread(temperature)));
    best = best_of_lanes(best);
    valid = valid && best.order > score_order(-infinity()) && best.order != NAN_ORDER;
    if (threadIdx.x == 0) p.tokens[row] = valid ? static_cast<i64>(best.token) : -1;
#if MASS
    const bool certain = temperature == 0.0f || best.logit == infinity();
    const float total = log_total_of_warp(p.masses + static_cast<i64>(row) * p.mass_tiles, p.mass_tiles, best.logit, row_inverse(temperature));
    if (threadIdx.x == 0) {
        p.logprobs[row] = valid ? (certain ? 0.0f : -total) : not_a_number();
        p.log_masses[row] = valid ? (certain ? best.logit : best.logit / temperature + total) : not_a_number();
    }
#endif
    if (valid) {
        write_raw(p, row, best.logit);
    } else if (threadIdx.x == 0) {
#if RAW
        p.raw_logprobs[row] = not_a_number();
#endif
    }
}

__device__ __forceinline__ void write_invalid(const Params& p, int row) {
    p.tokens[row] = -1;
#if MASS
    p.logprobs[row] = p.log_masses[row] = not_a_number();
#endif
#if RAW
    p.raw_logprobs[row] = not_a_number();
#endif
}

// Highest threshold of all blocks, and the mass below it; by one warp.
__device__ __forceinline__ void join_slots(const Params& p, int row) {
    float lowest = infinity(), highest = -infinity();
    double rest = 0.0;
    for (int slot = threadIdx.x & 31; slot < p.slots; slot += 32) {
        const float2 mine = p.winners[static_cast<i64>(row) * p.slots + slot];
        lowest = fminf(lowest, mine.x);
        highest = fmaxf(highest, mine.x);
        rest += mine.y;
    }
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) {
        lowest = fminf(lowest, __shfl_xor_sync(ALL, lowest, lanes));
        highest = fmaxf(highest, __shfl_xor_sync(ALL, highest, lanes));
        rest += __shfl_xor_sync(ALL, rest, lanes);
    }
    if ((threadIdx.x & 31) == 0) work.threshold = highest, work.agreed = lowest == highest, work.rest = rest;
}

// Leaves a row to finish.cu, with an empty histogram in place of its candidates.
__device__ __forceinline__ void leave_open(const Params& p, int row, const Filters& filters, const Scale& scale) {
    Entry* const bins = p.entries + static_cast<i64>(row) * CAPACITY;
    for (int i = threadIdx.x; i < CAPACITY; i += THREADS) bins[i] = 0;
    if (threadIdx.x != 0) return;
    const int floor = filters.min_p ? work.cut - 1 : key_of(-infinity());
    const int first = filters.top_k ? floor + 1 : max(floor + 1, key_of(scale.lowest));
    const int mode = filters.top_k ? BY_COUNT : filters.top_p ? BY_MASS : DRAWING;
    p.open[row] = {mode, {floor, NO_ID}, first, key_of(scale.peak), 1, 0, 0, 0, filters.top_k ? static_cast<double>(work.request.top_k) : 0.0};
    atomicAdd(&p.progress[0], 1);
    atomicAdd(p.open_rows, 1ull);
}

extern "C" __global__ void __launch_bounds__(THREADS) choose_tokens(const __grid_constant__ Params p) {
    const int row = blockIdx.x, warp = threadIdx.x >> 5;
    read_request(work.request, p, row);
    wait_for_primary();
    __syncthreads();
    const Request& request = work.request;
    const Filters filters(request, p.V);
    if (threadIdx.x == 0) p.open[row].mode = SETTLED;
    if (!filters.any()) {
        if (warp == 0) write_drawn(p, row, request.temperature, possible(request));
        return;
    }
    const u32 told = p.peaks[row], gathered = p.gathered[row];
    const float peak = order_score(turned_back(told));
    if (!possible(request) || told == 0 || turned_back(told) == NAN_ORDER || !(peak > -infinity())) {
        if (threadIdx.x == 0) write_invalid(p, row);
        return;
    }

    // Candidates in order
    const Scale scale = make_scale(peak, request.temperature);
    fill_table(work.table, scale);
    if (warp == 4) join_slots(p, row);
    if (warp == 5 && filters.min_p) {
        const int cut = lowest_likely(scale, request.min_p, request.temperature);
        if ((threadIdx.x & 31) == 0) work.cut = cut;
    }
#if MASS
    if (warp == 6) {
        const float total = log_total_of_warp(p.masses + static_cast<i64>(row) * p.mass_tiles, p.mass_tiles, peak, row_inverse(request.temperature));
        if ((threadIdx.x & 31) == 0) p.log_masses[row] = peak == infinity() ? peak : peak / request.temperature + total;
    }
#endif
    const int stored = min(gathered, CAPACITY);
    int size = 64;
    while (size < stored) size *= 2;
    for (int i = threadIdx.x; i < size; i += THREADS) sorted[i] = i < stored ? p.entries[static_cast<i64>(row) * CAPACITY + i] : 0;
    __syncthreads();
    if (gathered > CAPACITY) return leave_open(p, row, filters, scale);
    sort(size);
    const int threshold = key_of(work.threshold), found = count_from(threshold, stored);

    // What min-p and top-k keep
    int kept = filters.min_p ? count_from(max(threshold, work.cut), found) : found;
    const bool whole = work.threshold == LOWEST_LOGIT || (filters.min_p && work.cut >= threshold) || (filters.top_k && request.top_k <= kept);
    if (!whole && !(filters.mass_of_all() && work.agreed)) return leave_open(p, row, filters, scale);
    if (filters.top_k) kept = min(static_cast<i64>(kept), request.top_k);

    // What top-p keeps of that: each thread has neighbours
    u64 kept_mass = 0;
    if (filters.top_p || MASS) {
        const int each = (kept + THREADS - 1) / THREADS, first = min(kept, each * static_cast<int>(threadIdx.x)), last = min(kept, first + each);
        u64 mine = 0, total;
        for (int i = first; i < last; ++i) mine += units(value_of(key_of_entry(sorted[i])), scale, work.table);
        u64 before = scan_block(mine, total) - mine;
        kept_mass = total;
        if (filters.top_p) {
            double target = fmax(request.top_p * static_cast<double>(total), 0.5), doubt = -1.0;
            if (!whole) {
                const double unit = exp((static_cast<double>(work.threshold) - peak) / request.temperature) * 0x1p40;
                const double rest = work.rest * unit, all = total + rest;
                target = request.top_p * all;
                doubt = request.top_p * (rest * REST_ERROR + unit * REST_LEAST + 0.5 * p.V) + all * 0x1p-44;
            }
            bool open = static_cast<double>(total) <= target + doubt;
            u64 needed = 0;
            [[maybe_unused]] u64 through = 0;
            for (int i = first; i < last; ++i) {
                const double past = static_cast<double>(before) - target;
                if (i > 0 && fabs(past) <= doubt) open = true;
                before += units(value_of(key_of_entry(sorted[i])), scale, work.table);
                if (i == 0 || past < 0.0) ++needed, through = before;
            }
            if (__syncthreads_or(!whole && open)) return leave_open(p, row, filters, scale);
            kept = static_cast<int>(reduce_block(Number{needed}).sum);
#if MASS
            __syncthreads();
            if (kept > first && kept <= last) work.kept = through;
            __syncthreads();
            kept_mass = work.kept;
#endif
        }
    }

    // The draw
    const Stream stream = row_stream(p, row);
    const float spread = row_spread(request.temperature);
    Candidate best = {NOTHING_ORDER, NO_TOKEN, 0.0f};
    for (int i = threadIdx.x; i < kept; i += THREADS) {
        const float logit = value_of(key_of_entry(sorted[i]));
        keep_better(best, winner_of(make_float2(logit, __int_as_float(id_of_entry(sorted[i]))), stream, spread));
    }
    best = reduce_block(Best{best}).candidate;
    if (threadIdx.x == 0) write_filtered(p, row, best, peak, request.temperature, kept_mass);
    if (warp == 0) write_raw(p, row, best.logit);
}
