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
#define TOP 0     // the likeliest tokens are asked for
#define BLOCKS 2  // at once on a multiprocessor
#endif
#define GREEDY 0
#define CLUSTER 1
#define THREADS 512
#define LARGE __noinline__

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
    Entry tops[MOST_TOP];          // the row's likeliest tokens
    float total, raw_total;        // masses of all tokens relative to the peak's, as logarithms: sampled without filters, raw
};
__shared__ Workspace work;
extern __shared__ __align__(16) Entry held[];  // the row's candidates, CAPACITY; and as many for those of them that are put in order
#define sorted (held + CAPACITY)

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
#pragma unroll 1
    for (int run = 2; run <= size; run *= 2) {
#pragma unroll 1
        for (int apart = run / 2; apart; apart /= 2) {
#pragma unroll 1
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
        const float threshold = p.slot_thresholds[static_cast<i64>(row) * p.slots + slot];
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
    const double offset = exp2(-static_cast<double>(offset_error));
    work.rest = (sum - 0.6931471805599453 * slope_error * by_octave) * offset;
    work.doubt = (sum * REST_ERROR - by_octave * REST_ERROR_BY_OCTAVE) * offset;
}

// The best of a thread's part of the held entries with keys from `first` on, and of as many sorted ones as are kept.
__device__ __noinline__ Candidate draw_from(int first, int held_count, int kept, const Stream& stream, float spread) {
    Candidate best = {NOTHING_ORDER, NO_TOKEN, 0.0f};
#pragma unroll 1
    for (int i = threadIdx.x; i < held_count + kept; i += THREADS) {
        const Entry entry = i < held_count ? held[i] : sorted[i - held_count];
        const int key = key_of_entry(entry);
        if (i >= held_count || key >= first) keep_better(best, winner_of(make_float2(value_of(key), __int_as_float(id_of_entry(entry))), stream, spread));
    }
    return best;
}

// The block's best, and with it the row's results.
__device__ __forceinline__ void write_result(const Params& p, int row, const Candidate& mine, float peak, float temperature, u64 kept_mass) {
    const Candidate best = reduce_block(Best{mine}).candidate;
    if (threadIdx.x == 0) write_filtered(p, row, best, peak, temperature, kept_mass);
    if (threadIdx.x < 32) write_raw(p, row, best.logit);
}

// Leaves a row to finish.cu, with an empty histogram in place of its candidates. They hold its likeliest tokens, or those are looked for
// as well (`topping`).
__device__ __forceinline__ void leave_open(const Params& p, int row, const Filters& filters, const Scale& scale, bool topping, float high) {
    Entry* const bins = p.entries + static_cast<i64>(row) * CAPACITY;
    for (int i = threadIdx.x; i < CAPACITY; i += THREADS) bins[i] = 0;
    if (threadIdx.x != 0) return;
    OpenRow open = {};
    open.lowest = filters.min_p ? work.cut : key_of(-infinity()) + 1;
    begin_filters(p, open, work.request, filters, scale, high);
    if (topping) {
        open.topping = 1;
        open.floor = {key_of(-infinity()), NO_ID};
        begin_count(open, scale, p.num_top);
    }
    p.open[row] = open;
    atomicAdd(&p.progress[0], 1);
    if (p.open_rows) atomicAdd(p.open_rows, 1ull);
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
    OpenRow open = {};
    open.mode = WEIGHING;
    open.floor = {key_of(-infinity()), NO_ID};
    open.first = min(key_of(scale.lowest), key_of(work.threshold) - 1);
    open.last = key_of(work.threshold) - 1;
    open.weighed = 1;
    open.above = above;
    p.open[row] = open;
    atomicAdd(&p.progress[0], 1);
    if (p.open_rows) atomicAdd(p.open_rows, 1ull);
}

// Calls step(entry) for the candidates. Once in the code, and not unrolled: all of this runs once a row, and reading code for the first
// time costs more than running it.
template <typename Step>
__device__ __forceinline__ void each_held(int count, Step step) {
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += THREADS) step(held[i]);
}

// Puts the candidates whose keys lie between two in order; says how many they are.
__device__ __noinline__ int list(int held_count, int first, int last) {
    if (threadIdx.x == 0) work.listed = 0;
    __syncthreads();
    each_held(held_count, [&](Entry entry) {
        const int key = key_of_entry(entry);
        if (key >= first && key <= last) sorted[atomicAdd(&work.listed, 1)] = entry;
    });
    __syncthreads();
    const int count = work.listed;
    int size = 64;
    while (size < count) size *= 2;
    for (int i = count + threadIdx.x; i < size; i += THREADS) sorted[i] = 0;
    __syncthreads();
    sort(size);
    return count;
}

// THREADS bins of the keys between two.
struct KeyBins {
    int lowest, shift;
    __device__ __forceinline__ KeyBins(int lowest, int highest) : lowest(lowest), shift(max(0, 32 - __clz(static_cast<u32>(highest) - static_cast<u32>(lowest)) - 9)) {
        static_assert(THREADS == 1 << 9, "shift");
    }
    __device__ __forceinline__ int bin_of(int key) const { return (static_cast<u32>(key) - static_cast<u32>(lowest)) >> shift; }
    __device__ __forceinline__ int first_of(int bin) const { return static_cast<int>(static_cast<u32>(lowest) + (static_cast<u32>(bin) << shift)); }
    // Of the last of so many bins from the top.
    __device__ __forceinline__ int first_of_upper(int count) const { return first_of(THREADS - count); }
};

// Finds the row's likeliest tokens, and how many copies its peak has. False if they are not surely among the candidates.
__device__ __forceinline__ bool find_tops(const Params& p, int held_count, int threshold, int peak, int& ties) {
    const KeyBins bins(threshold, peak);
    u32 mine_at_peak = 0;
    each_held(held_count, [&](Entry entry) {
        const int key = key_of_entry(entry);
        if (key < threshold) return;
        atomicAdd(&work.bins[bins.bin_of(key)], 1);
        mine_at_peak += key == peak;
    });
    ties = static_cast<int>(reduce_block(Number{mine_at_peak}).sum);
    const u32 in_bin = work.bins[THREADS - 1 - threadIdx.x];
    const Running running = scan_block(Binned{in_bin, 0.0f});
    work.bins[THREADS - 1 - threadIdx.x] = 0;
    const bool inside = running.through.count - in_bin < p.num_top;
    const int count = list(held_count, bins.first_of_upper(__syncthreads_count(inside)), HIGHEST_KEY);
    if (threadIdx.x < MOST_TOP) work.tops[threadIdx.x] = threadIdx.x < min(count, p.num_top) ? sorted[threadIdx.x] : 0;
    __syncthreads();
    return count >= p.num_top || work.threshold == LOWEST_LOGIT;
}

// Writes them; those from `last` on are kept, and at most `most`.
__device__ __forceinline__ void write_tops(const Params& p, int row, Entry last, i64 most, float temperature, float peak, double total) {
    const int i = threadIdx.x;
    if (i >= p.num_top) return;
    const Entry entry = work.tops[i];
    p.tops[static_cast<i64>(row) * p.num_top + i] = entry;
    if (p.raw_top_ids) write_raw_top(p, row, i, entry, peak, work.raw_total);
    if (p.top_ids) write_top(p, row, i, entry, entry >= last && i < most, temperature, peak, total);
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
        if (!TOP) return;
    }
    const u32 told = p.peaks[row], gathered = p.gathered[row];
    const float peak = order_score(turned_back(told));
    if (!possible(request) || told == 0 || turned_back(told) == NAN_ORDER || !(peak > -infinity())) {
        if (threadIdx.x == 0 && filters.any()) write_invalid(p, row);
        for (int i = threadIdx.x; TOP && i < p.num_top; i += THREADS) {
            const i64 at = static_cast<i64>(row) * p.num_top + i;
            if (p.top_ids) p.top_ids[at] = -1, p.top_logprobs[at] = not_a_number();
            if (p.raw_top_ids) p.raw_top_ids[at] = -1, p.raw_top_logprobs[at] = not_a_number();
        }
        return;
    }

    // Candidates
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
        if ((threadIdx.x & 31) == 0) {
            work.total = total;
            if (filters.any()) p.log_masses[row] = peak == infinity() ? peak : peak / request.temperature + total;
        }
    }
#endif
#if RAW
    if (warp == 7) {
        const float total = log_total_of_warp(p.raw_masses + static_cast<i64>(row) * p.mass_tiles, p.mass_tiles, peak, LOG2E);
        if ((threadIdx.x & 31) == 0) work.raw_total = total;
    }
#endif
    const int stored = min(gathered, CAPACITY);
#pragma unroll 2
    for (int i = threadIdx.x; i < stored; i += THREADS) held[i] = __ldcg(&p.entries[static_cast<i64>(row) * CAPACITY + i]);
    work.bins[threadIdx.x] = 0;
    __syncthreads();
    if (gathered > CAPACITY) return leave_open(p, row, filters, scale, TOP, peak);
    const int threshold = key_of(work.threshold);
    if (TOP) {
        int ties;
        if (!find_tops(p, stored, threshold, key_of(peak), ties)) return leave_open(p, row, filters, scale, true, peak);
        // As they are without filters
        const i64 most = request.temperature > 0.0f ? p.num_top : kept_of_greedy(request, p.V, ties);
        write_tops(p, row, 0, most, request.temperature, peak, work.total);
        if (!filters.any()) return;
    }

    // What min-p keeps of them, in bins
    const int lowest = filters.min_p ? max(threshold, work.cut) : threshold;
    const KeyBins bins(lowest, key_of(peak));
    u64 my_mass = 0;
    each_held(stored, [&](Entry entry) {
        const int key = key_of_entry(entry);
        if (key < lowest) return;
        if (filters.top_k || filters.top_p) atomicAdd(&work.bins[bins.bin_of(key)], 1);
        if ((filters.top_p || MASS) && !filters.top_k) my_mass += units(value_of(key), scale, work.table);
    });
    u64 kept_mass = reduce_block(Number{my_mass}).sum;
    if (!filters.top_k && !filters.top_p && (work.threshold == LOWEST_LOGIT || work.cut >= threshold)) {
        const Candidate best = draw_from(lowest, stored, 0, stream, spread);
        if (TOP) write_tops(p, row, static_cast<Entry>(turned(lowest)) << 32, p.num_top, request.temperature, peak, log(kept_mass * 0x1p-40));
        return write_result(p, row, best, peak, request.temperature, kept_mass);
    }

    // Where the last of what is kept seems to be: for a top-k in all bins down to it, for a top-p alone in those around it
    const int bin = THREADS - 1 - threadIdx.x;  // from the top
    const u32 in_bin = work.bins[bin];
    const float middle = value_of(bins.first_of(bin) + (1 << bins.shift >> 1)), share = middle < peak ? exp2_approx((middle - peak) * scale.slope) : 1.0f;
    const Binned of_bin = {in_bin, in_bin ? in_bin * share : 0.0f};
    const Running running = scan_block(of_bin);
    const int found = running.total.count;
    const bool whole = work.threshold == LOWEST_LOGIT || (filters.min_p && work.cut >= threshold) || (filters.top_k && request.top_k <= found);
    if (!whole && !(filters.mass_of_all() && work.agreed)) return leave_open(p, row, filters, scale, false, work.threshold);
    const int most = filters.top_k ? static_cast<int>(min(static_cast<i64>(found), request.top_k)) : found;
    const double unit = exp((static_cast<double>(work.threshold) - peak) / request.temperature) * 0x1p40, rest = whole ? 0.0 : work.rest * unit;
    const float sought = request.top_p * (running.total.measure + static_cast<float>(rest * 0x1p-40));
    const bool above = !filters.top_k && running.through.measure < (1.0f - SLACK) * sought;
    const bool inside = filters.top_k ? running.through.count - in_bin < most : running.through.measure - of_bin.measure < (1.0f + SLACK) * sought;
    const int bins_above = __syncthreads_count(above), bins_inside = __syncthreads_count(inside);  // from the top
    int last_listed = filters.top_k || !bins_above ? HIGHEST_KEY : bins.first_of_upper(bins_above) - 1, first_listed = bins.first_of_upper(bins_inside);

    int kept = most;           // of the list
    for (bool all = false;; all = true) {
        if (all) last_listed = HIGHEST_KEY, first_listed = lowest;
        u64 mass_above = 0;
        if (!filters.top_k) {
            each_held(stored, [&](Entry entry) {
                if (key_of_entry(entry) > last_listed) mass_above += units(value_of(key_of_entry(entry)), scale, work.table);
            });
            mass_above = reduce_block(Number{mass_above}).sum;
        }
        const int count = list(stored, first_listed, last_listed);
        if (!filters.top_p && !MASS) break;

        // What top-p keeps of the list: each thread has neighbours
        const int among = min(count, most), each = (among + THREADS - 1) / THREADS, first = min(among, each * static_cast<int>(threadIdx.x)), end = min(among, first + each);
        u64 sum = 0, total;
#pragma unroll 1
        for (int i = first; i < end; ++i) sum += units(value_of(key_of_entry(sorted[i])), scale, work.table);
        u64 before = scan_block(sum, total) - sum + mass_above;
        total += mass_above;
        if (filters.top_k) kept_mass = total;
        if (!filters.top_p) break;
        const double of = static_cast<double>(kept_mass) + rest, target = fmax(request.top_p * of, 0.5);
        const double doubt = whole ? 0.0 : request.top_p * (work.doubt * unit + 0.5 * p.V) + of * 0x1p-44;
        const bool complete = all || filters.top_k;
        if (!complete && !(static_cast<double>(mass_above) < target - doubt && static_cast<double>(total) > target + doubt)) continue;
        if (!whole && !(static_cast<double>(total) > target + doubt)) return leave_open(p, row, filters, scale, false, work.threshold);  // not even all of them reach it
        u64 needed = 0;
        [[maybe_unused]] u64 through = 0;
        bool open = false;
#pragma unroll 1
        for (int i = first; i < end; ++i) {
            const double over = static_cast<double>(before) - target;
            open |= before && !whole && fabs(over) <= doubt;
            before += units(value_of(key_of_entry(sorted[i])), scale, work.table);
            if (over < 0.0 || (i == 0 && !mass_above)) ++needed, through = before;
        }
        if (__syncthreads_or(open)) {
            if (count > LISTED) return leave_open(p, row, filters, scale, false, work.threshold);
            const Candidate best = draw_from(last_listed == HIGHEST_KEY ? HIGHEST_KEY : last_listed + 1, stored, 0, stream, spread);
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

    const int first_above = last_listed == HIGHEST_KEY ? HIGHEST_KEY : last_listed + 1;
    const Candidate best = draw_from(first_above, filters.top_k ? 0 : stored, kept, stream, spread);
    if (TOP) write_tops(p, row, kept ? sorted[kept - 1] : static_cast<Entry>(turned(last_listed + 1)) << 32, p.num_top, request.temperature, peak, log(kept_mass * 0x1p-40));
    write_result(p, row, best, peak, request.temperature, kept_mass);
}
