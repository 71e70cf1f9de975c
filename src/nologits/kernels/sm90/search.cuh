// The boundary of a kept set, exactly: Qrita's pivot search (arXiv 2602.01518) by a cluster of blocks, among what they have put aside
// (`near`) or in the whole row.
//
// Tokens are ordered by (logit descending, id ascending); a filter keeps the shortest prefix whose measure reaches a target. The
// measure is a count (top-k) or a mass in whole units (top-p), so that it has no order of summation.
//
//     guess a bracket of logits that holds the boundary      a histogram of the range
//     probe it: measure above and inside, inside on a list   one sweep, exact
//     boundary inside, and the list is short                 sort the list (list.cuh)
//     otherwise                                              smaller range, new guess
//
// A guess costs time if it is wrong, never exactness: ranges shrink until a bracket is one value, whose copies go by id.
#pragma once
#include "row.cuh"

template <bool mass>
struct MeasureOf {
    typedef u32 type;
};
template <>
struct MeasureOf<true> {
    typedef u64 type;
};

template <bool mass>
struct Probe {
    typedef typename MeasureOf<mass>::type Measure;
    u32 count;              // inside the bracket
    int smallest, largest;  // keys inside
    Measure inside, above, total;  // in it; higher; all, down to the floor

    __device__ __forceinline__ Measure through() const { return above + inside; }
    __device__ __forceinline__ Probe over_lanes() const {
        return {sum_lanes(count), min_lanes(smallest), max_lanes(largest), sum_lanes(inside), sum_lanes(above), sum_lanes(total)};
    }
    static __device__ __forceinline__ Probe nothing() { return {0, HIGHEST_KEY, LOWEST_KEY, 0, 0, 0}; }
};

__device__ __forceinline__ u32 count_of(const Slot& part) { return static_cast<u32>(part.words[0]); }  // of Probe; gathered of Statistics

// ---- one sweep: what lies above, inside and below first .. last

template <bool mass>
__device__ __noinline__ Probe<mass> probe(bool near, int first, int last, int floor, Entry* list) {
    typedef typename MeasureOf<mass>::type Measure;
    const float low = first_value(first), high = last_value(last), least = first_value(floor + 1);
    const Scale scale = work.scale;
    if (threadIdx.x == 0) work.listed = 0;
    __syncthreads();
    Probe<mass> mine = Probe<mass>::nothing();
    sweep(near, [&](const float(&x)[4], int at) {
        bool inside = false;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Measure each = mass ? units(x[i], scale, work.table) : 1;
            if (x[i] >= least) mine.total += each;
            if (x[i] > high) mine.above += each;
            inside |= x[i] >= low && x[i] <= high;
        }
        if (!inside) return;
#pragma unroll 1
        for (int i = 0; i < 4; ++i) {
            const float y = i == 0 ? x[0] : i == 1 ? x[1] : i == 2 ? x[2] : x[3];
            if (!(y >= low && y <= high)) continue;
            const int key = key_of(y);
            mine.count += 1;
            mine.inside += mass ? units(y, scale, work.table) : 1;
            mine.smallest = min(mine.smallest, key);
            mine.largest = max(mine.largest, key);
            const u32 place = atomicAdd(&work.listed, 1);
            if (place < LISTED) list[place] = make_entry(key, id_at(near, at + i));
        }
    });
    return reduce_row(mine);
}

// ---- a guess from a histogram

// A range in BINS parts.
struct Bins {
    float low, high, width, inverse;
    int first, shift;
    bool by_key;

    __device__ __forceinline__ explicit Bins(const Range& range)
        : low(first_value(range.first)), high(last_value(range.last)), width((high - low) * (1.0f / BINS)), inverse(1.0f / width), first(range.first),
          shift(max(0, 32 - __clz(static_cast<u32>(range.last) - static_cast<u32>(range.first)) - 11)), by_key(range.by_key) {
        static_assert(BINS == 1 << 11, "shift");
    }
    __device__ __forceinline__ bool holds(float x) const { return x >= low && x <= high; }
    __device__ __forceinline__ u32 bin_of(float x) const {
        const int bin = by_key ? (static_cast<u32>(key_of(x)) - static_cast<u32>(first)) >> shift : static_cast<int>((x - low) * inverse);
        return max(0, min(BINS - 1, bin));
    }
    __device__ __forceinline__ int key_from(int bin) const { return first + static_cast<int>(static_cast<u32>(bin) << shift); }
    __device__ __forceinline__ float middle(int bin) const { return by_key ? value_of(key_from(bin)) : low + (bin + 0.5f) * width; }
};

constexpr int FOURS = BINS / 4;  // threads that have four bins each

__device__ __forceinline__ void clear_histogram() {
    if (threadIdx.x < FOURS) *reinterpret_cast<uint4*>(&work.histogram[4 * threadIdx.x]) = make_uint4(0, 0, 0, 0);
}

// What a histogram is asked: where the measure from the top, and `over` from above it, reaches `target`; or (share above 0) that share
// of all the measure, of which `beside` lies outside the range. Masses are in units of the peak's.
struct Goal {
    float target, over, share, beside;
};

// Narrows the range to the bins around the one that seems to reach the goal, from the histograms that all blocks have filled. Masses
// are estimated from counts. False if none reaches it; `inside` becomes the measure of the range.
template <bool mass>
__device__ __noinline__ bool narrow(Range& range, const Goal& goal, float& inside) {
    const Bins bins(range);
    const u32 span = static_cast<u32>(range.last) - static_cast<u32>(range.first);
    if (threadIdx.x == 0) work.bin = -1, work.before = work.until = 0xFFFFFFFF, work.to_upper = work.to_lower = MARGIN, work.lowest = BINS - 1, work.highest = 0;
    sync_row();

    // Every block adds up its share of the bins, and tells the others: that moves less than if each added up all
    constexpr int SHARE = FOURS / CLUSTER;
    const u32 block = threadIdx.x / SHARE, place = threadIdx.x % SHARE, four = row_rank() * SHARE + place;
    const bool busy = threadIdx.x < FOURS;
    uint4* const parts = reinterpret_cast<uint4*>(work.list);
    if (busy) parts[threadIdx.x] = load_remote(&work.histogram[4 * four], block);
    __syncthreads();
    if (busy) {
        uint4 sum = make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int r = 0; r < CLUSTER; ++r) {
            const uint4 part = parts[r * SHARE + place];
            sum = make_uint4(sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w);
        }
        store_remote(remote_address(&work.totals[4 * four], block), static_cast<u64>(sum.y) << 32 | sum.x);
        store_remote(remote_address(&work.totals[4 * four + 2], block), static_cast<u64>(sum.w) << 32 | sum.z);
    }
    sync_row();

    // Four bins a thread, from the top
    const int upper = BINS - 1 - 4 * threadIdx.x;
    const uint4 mine = busy ? *reinterpret_cast<const uint4*>(&work.totals[upper - 3]) : make_uint4(0, 0, 0, 0);
    const u32 count[4] = {mine.w, mine.z, mine.y, mine.x};
    float each[4];
    Binned all = {0, 0.0f};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float middle = bins.middle(max(0, upper - i));
        each[i] = mass && middle < work.scale.peak ? exp2_approx((middle - work.scale.peak) * work.scale.slope) : 1.0f;
        all.count += count[i];
        if (count[i]) all.measure += count[i] * each[i];
    }
    const Running running = scan_block(all);
    inside = running.total.measure;
    const float target = (goal.share > 0.0f ? goal.share * (inside + goal.beside) : goal.target) - goal.over;

    // The bin that reaches the target, and how far the boundary seems to lie from its edges
    Binned before = {running.through.count - all.count, running.through.measure - all.measure};
    const u32 first_count = before.count;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const Binned through = {before.count + count[i], before.measure + (count[i] ? count[i] * each[i] : 0.0f)};
        if (before.measure < target && target <= through.measure) {
            work.bin = upper - i;
            work.before = before.count;
            work.until = through.count;
            work.to_upper = (target - before.measure) / each[i];
            work.to_lower = (through.measure - target) / each[i];
        }
        before = through;
    }
    __syncthreads();
    const int found = max(0, work.bin);
    const bool reached = work.bin >= 0;
    const u32 found_before = work.before, found_until = work.until;
    const float margin = range.by_key || !mass ? 0.0f : MARGIN, to_upper = work.to_upper, to_lower = work.to_lower;
    u32 until = first_count;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int at = upper - i;
        const u32 until_before = until;
        until += count[i];
        if (!busy) break;
        if (at == found || (at < found && until_before - found_until + to_lower < margin)) atomicMin(&work.lowest, at);
        if (at == found || (at > found && found_before - until + to_upper < margin)) atomicMax(&work.highest, at);
    }
    __syncthreads();
    const int lowest = work.lowest, highest = work.highest, first = range.first, last = range.last;
    if (range.by_key) {
        range.first = bins.key_from(lowest);
        if (highest < static_cast<int>(span >> bins.shift)) range.last = bins.key_from(highest + 1) - 1;
    } else {
        if (lowest > 0) range.first = key_of(bins.low + lowest * bins.width);
        if (highest < BINS - 1) range.last = key_of(bins.low + (highest + 1) * bins.width) - 1;
    }
    range.first = max(first, min(last, range.first));
    range.last = max(range.first, min(last, range.last));
    return reached;
}

template <bool mass>
__device__ __noinline__ bool locate(bool near, Range& range, const Goal& goal, float& inside) {
    const Bins bins(range);
    __syncthreads();
    clear_histogram();
    __syncthreads();
    sweep(near, [&](const float(&x)[4], int) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 bin = bins.bin_of(x[i]);
            if (bins.holds(x[i])) atomicAdd(&work.histogram[bin], 1);
        }
    });
    return narrow<mass>(range, goal, inside);
}

// ---- copies over the whole row

struct Latest {
    int id;
    __device__ __forceinline__ Latest over_lanes() const { return {max_lanes(id)}; }
    static __device__ __forceinline__ Latest nothing() { return {NO_ID}; }
};

// The id of the n-th copy (from 1) of a value by id; the last reduction over the row began with each block's number of copies.
__device__ __noinline__ int nth_copy(float value, u32 n) {
    const Chunk chunk = work.chunk;
    const Slot* const parts = last_board();
    const u32 rank = row_rank();
    int id = NO_ID;
    for (u32 r = 0; r < rank; ++r) n -= count_of(parts[r]);
    if (n - 1 < count_of(parts[rank])) {  // unsigned: neither before nor after this block
        u32 passed = 0;
        for (int base = 0; base < chunk.count; base += 4 * THREADS) {
            const int at = base + 4 * threadIdx.x;
            const Quad quad = chunk.load(at);
            u32 count = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) count += as_float(quad.e[i]) == value;
            const Running running = scan_block({count, 0.0f});
            u32 before = passed + running.through.count - count;
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (as_float(quad.e[i]) == value && ++before == n) id = chunk.id(at + i);
            passed += running.total.count;
        }
    }
    return reduce_row(Latest{id}).id;
}

// The first `kept` of the copies of a key.
__device__ __forceinline__ Found cut_copies(int key, u32 kept, u32 copies) {
    if (kept == copies || !DUPLICATES) return {{key, EVERY_ID}, copies};
    return {{key, nth_copy(value_of(key), kept)}, kept};
}

#include "list.cuh"

// ---- the search

// Below, all of the row together has less than the share 1 - p of the peak alone; twice, for shares are rounded to units.
__device__ __forceinline__ float lowest_wanted(float peak, float slope, u32 count, double p) {
    return peak - log2_approx(2.0f * count / static_cast<float>(fmax(1.0 - p, 1e-13))) * 1.001f / slope;
}

// The shortest prefix of what `floor` keeps that reaches k elements, or (mass) the share p of its mass. `guess`, if it is not empty,
// is a bracket that seems to hold the boundary.
template <bool mass>
__device__ __noinline__ Found find_boundary(bool near, const Found& floor, u64 k, double p, Range guess = {1, 0, false}) {
    const int floor_key = floor.boundary.key;
    const u64 floor_each = mass && floor.copies ? units_of(floor_key) : 0, floor_mass = floor.copies * floor_each;
    Range range = {max(floor_key + 1, work.stats.lowest), work.stats.peak, false};
    if (mass) range.first = max(range.first, key_of(fmaxf(work.scale.lowest, lowest_wanted(work.scale.peak, work.scale.slope, work.stats.count, p))));
    range.first = min(range.first, range.last);  // nothing but copies of the floor: one probe says so

    double target = static_cast<double>(k);
    u64 over = 0;  // measure above the range
    bool known = false;
    for (u32 turn = 0;; turn ^= 1) {
        Entry* list = work.list[turn];
        Range bracket = guess;
        if (guess.first > guess.last) {
            bracket = range;
            const float unit = mass ? 0x1p-40f : 1.0f;
            const Goal goal = {static_cast<float>((target - static_cast<double>(over)) * unit), 0.0f, mass && !known ? static_cast<float>(p) : 0.0f,
                               floor_mass * unit};
            float ignored;
            locate<mass>(near, bracket, goal, ignored);
        }
        guess = {1, 0, false};
        const Probe<mass> found = probe<mass>(near, bracket.first, bracket.last, known ? bracket.first - 1 : floor_key, list);
        if (!known) {
            if (mass) target = fmax(p * static_cast<double>(found.total + floor_mass), 0.5);
            else if (found.total <= k) return floor;
            known = true;
            if (static_cast<double>(found.total) < target) {  // it lies among the copies that the floor keeps
                const u32 kept = copies_kept(found.total, floor_each, floor.copies, target);
                if (kept == floor.copies) return floor;
                probe<false>(near, floor_key, floor_key, floor_key - 1, work.list[turn ^ 1]);
                return cut_copies(floor_key, kept, floor.copies);
            }
        }
        if (static_cast<double>(found.above) >= target) {
            range.first = bracket.last + 1;
        } else if (static_cast<double>(found.through()) < target) {
            range.last = bracket.first - 1;
            over = found.through();
        } else if (found.smallest == found.largest) {
            return cut_copies(found.smallest, copies_kept(found.above, found.inside / found.count, found.count, target), found.count);
        } else if (TIERED && found.count <= LISTED) {
            u32 kept;
            return search_list(mass, found.count, found.above, list, target, kept);
        } else {
            range = {found.smallest, found.largest};
            over = found.above;
        }
        range.by_key = true;
    }
}
