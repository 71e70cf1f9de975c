// Between sweeps: what they told of an open row, by one warp. The next range, or the row's results.
#pragma once
#include "sweep.cuh"

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
    const Filters filters(request, vocab_of(p));
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
                    open.id_last = vocab_of(p) - 1;
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
    const i64 most = request.temperature > 0.0f ? p.num_top : kept_of_greedy(request, vocab_of(p), __reduce_add_sync(ALL, ties));
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
    const Filters filters(request, vocab_of(p));
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
