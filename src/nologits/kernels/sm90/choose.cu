// What the filters keep of a row, found among its candidates, and the draw from it; and the draws of rows without filters.
//
// The candidates are all logits from a threshold on (truncate.cuh). Filters keep a prefix of them in order; a histogram says which part
// of that order has to be known, and only that is sorted. Whether the candidates hold all that is kept is certain if
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
#define BLOCKS 2  // at once on a multiprocessor
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
    double rest, doubt;  // mass below the threshold, in the threshold's units, and how far it may be off
    float threshold;  // of all blocks; the highest
    bool agreed;      // it was the same for all
    int cut;          // first key that min-p keeps
    u64 kept;         // mass
    u32 listed;
    u32 bins[THREADS];
};
__shared__ Workspace work;
extern __shared__ __align__(16) Entry sorted[];  // CAPACITY

constexpr int EACH = CAPACITY / THREADS;
constexpr float SLACK = 0.03f;  // of the mass that is sought, for at first it is estimated

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
__device__ __forceinline__ void join_slots(const Params& p, int row, float temperature) {
    float lowest = infinity(), highest = -infinity();
    double sum = 0.0, by_octave = 0.0;
    for (int slot = threadIdx.x & 31; slot < p.slots; slot += 32) {
        const float threshold = p.winners[static_cast<i64>(row) * p.slots + slot].x;
        lowest = fminf(lowest, threshold);
        highest = fmaxf(highest, threshold);
        if (p.rests) {
            const double2 rest = p.rests[static_cast<i64>(row) * p.slots + slot];
            sum += rest.x;
            by_octave += rest.y;
        }
    }
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) {
        lowest = fminf(lowest, __shfl_xor_sync(ALL, lowest, lanes));
        highest = fmaxf(highest, __shfl_xor_sync(ALL, highest, lanes));
        sum += __shfl_xor_sync(ALL, sum, lanes);
        by_octave += __shfl_xor_sync(ALL, by_octave, lanes);
    }
    if ((threadIdx.x & 31) != 0) return;
    // Exponents were (x inverse + offset), both factors rounded: by a share of the exponent, and by as much for all
    const float inverse = row_inverse(temperature);
    const double slope_error = inverse * static_cast<double>(temperature) / 1.4426950408889634 - 1.0;
    const float offset_error = __fmaf_rn(highest, inverse, rest_offset(highest, inverse));
    work.threshold = highest;
    work.agreed = lowest == highest;
    work.rest = (sum - 0.6931471805599453 * slope_error * by_octave) * exp2(-static_cast<double>(offset_error));
    work.doubt = sum * REST_ERROR - by_octave * REST_ERROR_BY_OCTAVE;
}

__device__ __forceinline__ Candidate score_entry(Entry entry, const Stream& stream, float spread) {
    return winner_of(make_float2(value_of(key_of_entry(entry)), __int_as_float(id_of_entry(entry))), stream, spread);
}

// The block's best, and with it the row's results.
__device__ __forceinline__ void write_result(const Params& p, int row, const Candidate& mine, float peak, float temperature, u64 kept_mass) {
    const Candidate best = reduce_block(Best{mine}).candidate;
    if (threadIdx.x == 0) write_filtered(p, row, best, peak, temperature, kept_mass);
    if (threadIdx.x < 32) write_raw(p, row, best.logit);
}

// Leaves a row to finish.cu, with an empty histogram in place of its candidates.
__device__ __forceinline__ void leave_open(const Params& p, int row, const Filters& filters, const Scale& scale, bool overflown = false) {
    Entry* const bins = p.entries + static_cast<i64>(row) * CAPACITY;
    for (int i = threadIdx.x; i < CAPACITY; i += THREADS) bins[i] = 0;
    if (threadIdx.x != 0) return;
    OpenRow open = {filters.top_k ? BY_COUNT : DRAWING, {filters.min_p ? work.cut - 1 : key_of(-infinity()), NO_ID}};
    open.first = open.floor.key + 1;
    open.last = key_of(scale.peak);
    open.target = static_cast<double>(work.request.top_k);
    if (filters.top_p && !filters.top_k) begin_mass(p, open, work.request, scale, overflown ? scale.peak : work.threshold);
    p.open[row] = open;
    atomicAdd(&p.progress[0], 1);
    atomicAdd(p.open_rows, 1ull);
}

// Leaves a row to finish.cu whose boundary is known but for the exact mass of what is no candidate: one of the list's. Before them come
// candidates of mass `above`, the best of which is `best`.
__device__ __forceinline__ void leave_in_doubt(const Params& p, int row, const Scale& scale, const Candidate& best, int count, u64 above, u64 mass) {
    Entry* const words = p.entries + static_cast<i64>(row) * CAPACITY;
    for (int i = threadIdx.x; i < CAPACITY; i += THREADS) words[i] = i >= LIST && i < LIST + count ? sorted[i - LIST] : 0;
    __syncthreads();
    if (threadIdx.x != 0) return;
    words[0] = mass;
    words[KEPT] = above;
    words[COUNT] = count;
    store_winner(words + DRAWN, best);
    OpenRow open = {WEIGHING, {key_of(-infinity()), NO_ID}};
    open.first = min(key_of(scale.lowest), key_of(work.threshold) - 1);
    open.last = key_of(work.threshold) - 1;
    open.weighed = 1;
    open.above = above;
    p.open[row] = open;
    atomicAdd(&p.progress[0], 1);
    atomicAdd(p.open_rows, 1ull);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) choose_tokens(const __grid_constant__ Params p) {
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
    const Stream stream = row_stream(p, row);
    const float spread = row_spread(request.temperature);
    fill_table(work.table, scale);
    if (warp == 4) join_slots(p, row, request.temperature);
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
    Entry mine[EACH];
    const int stored = min(gathered, CAPACITY);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int at = threadIdx.x + i * THREADS;
        mine[i] = at < stored ? p.entries[static_cast<i64>(row) * CAPACITY + at] : 0;
    }
    work.bins[threadIdx.x] = 0;
    __syncthreads();
    if (gathered > CAPACITY) return leave_open(p, row, filters, scale, true);

    // What min-p keeps of them, in bins
    const int threshold = key_of(work.threshold), lowest = filters.min_p ? max(threshold, work.cut) : threshold;
    const int shift = max(0, 32 - __clz(static_cast<u32>(key_of(peak)) - static_cast<u32>(lowest)) - 9);
    u64 my_mass = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int key = key_of_entry(mine[i]);
        if (key < lowest || !mine[i]) {
            mine[i] = 0;
            continue;
        }
        if (filters.top_k || filters.top_p) atomicAdd(&work.bins[(static_cast<u32>(key) - static_cast<u32>(lowest)) >> shift], 1);
        if ((filters.top_p || MASS) && !filters.top_k) my_mass += units(value_of(key), scale, work.table);
    }
    u64 kept_mass = reduce_block(Number{my_mass}).sum;
    if (!filters.top_k && !filters.top_p && (work.threshold == LOWEST_LOGIT || work.cut >= threshold)) {
        Candidate best = {NOTHING_ORDER, NO_TOKEN, 0.0f};
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (mine[i]) keep_better(best, score_entry(mine[i], stream, spread));
        return write_result(p, row, best, peak, request.temperature, kept_mass);
    }

    // Where the last of what is kept seems to be: for a top-k in all bins down to it, for a top-p alone in those around it
    const int bin = THREADS - 1 - threadIdx.x;  // from the top
    auto first_of = [&](int bin) { return static_cast<int>(static_cast<u32>(lowest) + (static_cast<u32>(bin) << shift)); };
    const u32 in_bin = work.bins[bin];
    const float middle = value_of(first_of(bin) + (1 << shift >> 1)), share = middle < peak ? exp2_approx((middle - peak) * scale.slope) : 1.0f;
    const Binned of_bin = {in_bin, in_bin ? in_bin * share : 0.0f};
    const Running running = scan_block(of_bin);
    const int found = running.total.count;
    const bool whole = work.threshold == LOWEST_LOGIT || (filters.min_p && work.cut >= threshold) || (filters.top_k && request.top_k <= found);
    if (!whole && !(filters.mass_of_all() && work.agreed)) return leave_open(p, row, filters, scale);
    const int most = filters.top_k ? static_cast<int>(min(static_cast<i64>(found), request.top_k)) : found;
    const double unit = exp((static_cast<double>(work.threshold) - peak) / request.temperature) * 0x1p40, rest = whole ? 0.0 : work.rest * unit;
    const float sought = request.top_p * (running.total.measure + static_cast<float>(rest * 0x1p-40));
    const bool above = !filters.top_k && running.through.measure < (1.0f - SLACK) * sought;
    const bool inside = filters.top_k ? running.through.count - in_bin < most : running.through.measure - of_bin.measure < (1.0f + SLACK) * sought;
    const int bins_above = __syncthreads_count(above), bins_inside = __syncthreads_count(inside);  // from the top
    int last_listed = filters.top_k || !bins_above ? HIGHEST_KEY : first_of(THREADS - bins_above) - 1, first_listed = first_of(THREADS - bins_inside);

    int kept = most;           // of the list
    for (bool all = false;; all = true) {
        if (all) last_listed = HIGHEST_KEY, first_listed = lowest;
        if (threadIdx.x == 0) work.listed = 0;
        __syncthreads();
        u64 mass_above = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int key = key_of_entry(mine[i]);
            if (!mine[i] || key < first_listed) continue;
            if (key <= last_listed) sorted[atomicAdd(&work.listed, 1)] = mine[i];
            else mass_above += units(value_of(key), scale, work.table);
        }
        if (!filters.top_k) mass_above = reduce_block(Number{mass_above}).sum;
        __syncthreads();
        const int count = work.listed;
        int size = 64;
        while (size < count) size *= 2;
        for (int i = count + threadIdx.x; i < size; i += THREADS) sorted[i] = 0;
        __syncthreads();
        sort(size);
        if (!filters.top_p && !MASS) break;

        // What top-p keeps of the list: each thread has neighbours
        const int among = min(count, most), each = (among + THREADS - 1) / THREADS, first = min(among, each * static_cast<int>(threadIdx.x)), end = min(among, first + each);
        u64 sum = 0, total;
        for (int i = first; i < end; ++i) sum += units(value_of(key_of_entry(sorted[i])), scale, work.table);
        u64 before = scan_block(sum, total) - sum + mass_above;
        total += mass_above;
        if (filters.top_k) kept_mass = total;
        if (!filters.top_p) break;
        const double of = static_cast<double>(kept_mass) + rest, target = fmax(request.top_p * of, 0.5);
        const double doubt = whole ? 0.0 : request.top_p * (work.doubt * unit + 0.5 * p.V) + of * 0x1p-44;
        const bool complete = all || filters.top_k;
        if (!complete && !(static_cast<double>(mass_above) < target - doubt && static_cast<double>(total) > target + doubt)) continue;
        if (!whole && !(static_cast<double>(total) > target + doubt)) return leave_open(p, row, filters, scale);  // not even all of them reach it
        u64 needed = 0;
        [[maybe_unused]] u64 through = 0;
        bool open = false;
        for (int i = first; i < end; ++i) {
            const double over = static_cast<double>(before) - target;
            open |= before && !whole && fabs(over) <= doubt;
            before += units(value_of(key_of_entry(sorted[i])), scale, work.table);
            if (over < 0.0 || (i == 0 && !mass_above)) ++needed, through = before;
        }
        if (__syncthreads_or(open)) {
            if (count > LISTED) return leave_open(p, row, filters, scale);
            Candidate best = {NOTHING_ORDER, NO_TOKEN, 0.0f};
#pragma unroll
            for (int i = 0; i < EACH; ++i)
                if (mine[i] && key_of_entry(mine[i]) > last_listed) keep_better(best, score_entry(mine[i], stream, spread));
            return leave_in_doubt(p, row, scale, reduce_block(Best{best}).candidate, count, mass_above, kept_mass);
        }
        kept = static_cast<int>(reduce_block(Number{needed}).sum);
#if MASS
        __syncthreads();
        if (kept > first && kept <= end) work.kept = through;
        __syncthreads();
        kept_mass = work.kept;
#endif
        break;
    }

    Candidate best = {NOTHING_ORDER, NO_TOKEN, 0.0f};
    for (int i = threadIdx.x; i < kept; i += THREADS) keep_better(best, score_entry(sorted[i], stream, spread));
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        if (mine[i] && key_of_entry(mine[i]) > last_listed) keep_better(best, score_entry(mine[i], stream, spread));
    write_result(p, row, best, peak, request.temperature, kept_mass);
}
