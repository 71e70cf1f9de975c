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

#include "leave.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) choose_tokens(const __grid_constant__ Params p) {
    const int row = blockIdx.x, warp = threadIdx.x >> 5;
    read_request(work.request, p, row);
    wait_for_primary();
    __syncthreads();
    const Request& request = work.request;
    const Filters filters(request, vocab_of(p));
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
    work.bins[threadIdx.x] = work.upper[threadIdx.x] = 0;
    __syncthreads();
    if (gathered > CAPACITY) return leave_open(p, row, filters, scale, TOP, peak);
    const int threshold = key_of(work.threshold);
    if (TOP) {
        int ties;
        if (!find_tops(p, stored, threshold, key_of(peak), ties)) return leave_open(p, row, filters, scale, true, peak);
        // As they are without filters
        const i64 most = request.temperature > 0.0f ? p.num_top : kept_of_greedy(request, vocab_of(p), ties);
        write_tops(p, row, 0, most, request.temperature, peak, work.total);
        if (!filters.any()) return;
    }

    // What min-p keeps of them, in bins: how many, for a top-k, or what they weigh
    const int lowest = filters.min_p ? max(threshold, work.cut) : threshold;
    const bool by_min_p = work.threshold == LOWEST_LOGIT || (filters.min_p && work.cut >= threshold);  // that is all that min-p keeps
    const KeyBins bins(lowest, key_of(peak));
    u64 my_mass = 0;
#if SHARD
    u64 dropped = 0;  // mass of what is a candidate of its shard and not of the row
#endif
    each_held(stored, [&](Entry entry) {
        const int key = key_of_entry(entry);
#if SHARD
        if (key < threshold && filters.mass_of_all()) dropped += units(value_of(key), scale, work.table);
#endif
        if (key < lowest) return;
        if (filters.top_k) {
            atomicAdd(&work.bins[bins.bin_of(key)], 1);
        } else if (filters.top_p) {
            add_mass(bins.bin_of(key), units(value_of(key), scale, work.table));
        } else if (MASS) {
            my_mass += units(value_of(key), scale, work.table);
        }
    });
    __syncthreads();
    u64 kept_mass;
    if (!filters.top_k && !filters.top_p) {
        if (!by_min_p) return leave_open(p, row, filters, scale, false, work.threshold);
        kept_mass = reduce_block(Number{my_mass}).sum;
        const Candidate best = draw_from(lowest, stored, 0, stream, spread);
        if (TOP) write_tops(p, row, static_cast<Entry>(turned(lowest)) << 32, p.num_top, request.temperature, peak, log(kept_mass * 0x1p-40));
        return write_result(p, row, best, peak, request.temperature, kept_mass);
    }

#if SHARD
    dropped = reduce_block(Number{dropped}).sum;
#endif

    // Where the last of what is kept lies: for a top-k in all bins down to its own, for a top-p alone in that or, in doubt, a few
    const int bin = THREADS - 1 - threadIdx.x;  // from the top
    const u64 in_bin = filters.top_k ? work.bins[bin] : mass_of(bin, bin == bins.bin_of(key_of(peak))), through = scan_block(in_bin, kept_mass);
    const bool whole = by_min_p || (filters.top_k && request.top_k <= kept_mass);
    if (!whole && !(filters.mass_of_all() && work.agreed)) return leave_open(p, row, filters, scale, false, work.threshold);
    double target = 0.0, doubt = 0.0;
    auto aim = [&](double rest) { target = fmax(request.top_p * (static_cast<double>(kept_mass) + rest), 0.5); };
    int most = stored;
    if (filters.top_k) {
        most = static_cast<int>(min(static_cast<i64>(kept_mass), request.top_k));
    } else if (whole) {
        aim(0.0);
    } else {
        const double unit = exp((static_cast<double>(work.threshold) - peak) / request.temperature) * 0x1p40;
#if SHARD
        const double rest = work.rest * unit + static_cast<double>(dropped);
#else
        const double rest = work.rest * unit;
#endif
        aim(rest);
        doubt = request.top_p * (work.doubt * unit + 0.5 * vocab_of(p)) + (static_cast<double>(kept_mass) + rest) * 0x1p-44;
        if (!(static_cast<double>(kept_mass) > target + doubt)) return leave_open(p, row, filters, scale, false, work.threshold);
    }
    const bool above = !filters.top_k && static_cast<double>(through) < target - doubt;
    const bool inside = filters.top_k ? through - in_bin < most : static_cast<double>(through - in_bin) < target + doubt;
    const int bins_above = __syncthreads_count(above);  // from the top
    if (threadIdx.x == bins_above - 1) work.above = through;
    const int bins_inside = __syncthreads_count(inside);
    const u64 mass_above = bins_above ? work.above : 0;
    const int last_listed = bins_above ? bins.first_of_upper(bins_above) - 1 : HIGHEST_KEY;
    const int count = list(stored, bins.first_of_upper(bins_inside), last_listed);

    int kept = min(count, most);  // of the list
    if (filters.top_p || MASS) {
        // Each thread has neighbours
        const int each = (kept + THREADS - 1) / THREADS, first = min(kept, each * static_cast<int>(threadIdx.x)), end = min(kept, first + each);
        u64 sum = 0, total;
#pragma unroll 1
        for (int i = first; i < end; ++i) sum += units(value_of(key_of_entry(sorted[i])), scale, work.table);
        u64 before = scan_block(sum, total) - sum + mass_above;
        if (filters.top_k) {
            kept_mass = total;
            aim(0.0);
        }
        if (filters.top_p) {
            u64 needed = 0;
            [[maybe_unused]] u64 upto = 0;
            bool open = false;
#pragma unroll 1
            for (int i = first; i < end; ++i) {
                const double over = static_cast<double>(before) - target;
                open |= before && fabs(over) <= doubt && !whole;
                before += units(value_of(key_of_entry(sorted[i])), scale, work.table);
                if (over < 0.0 || (i == 0 && !mass_above)) ++needed, upto = before;
            }
            if (__syncthreads_or(open)) {
                if (count > LISTED) return leave_open(p, row, filters, scale, false, work.threshold);
                const Candidate best = draw_from(last_listed == HIGHEST_KEY ? HIGHEST_KEY : last_listed + 1, stored, 0, stream, spread);
                return leave_in_doubt(p, row, scale, reduce_block(Best{best}).candidate, count, mass_above, kept_mass);
            }
            kept = static_cast<int>(reduce_block(Number{needed}).sum);
#if MASS
            __syncthreads();
            if (kept > first && kept <= end) work.above = upto;
            __syncthreads();
            kept_mass = kept ? work.above : mass_above;
#endif
        }
    }

    const int first_above = last_listed == HIGHEST_KEY ? HIGHEST_KEY : last_listed + 1;
    const Candidate best = draw_from(first_above, filters.top_k ? 0 : stored, kept, stream, spread);
    if (TOP) write_tops(p, row, kept ? sorted[kept - 1] : static_cast<Entry>(turned(last_listed + 1)) << 32, p.num_top, request.temperature, peak, log(kept_mass * 0x1p-40));
    write_result(p, row, best, peak, request.temperature, kept_mass);
}
