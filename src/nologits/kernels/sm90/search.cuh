// The boundary of a kept set, exactly: Qrita's pivot search (arXiv 2602.01518) by a cluster of blocks that holds the row.
//
// Tokens are ordered by (logit descending, id ascending); a filter keeps the shortest prefix whose measure reaches a target. The
// measure is a count (top-k) or a mass in whole units (top-p), so that it has no order of summation.
//
//     guess a bracket of logits that holds the boundary      sigma-truncation, or a histogram of the range
//     probe it: measure above and inside, inside on a list   one sweep over the row, exact
//     boundary inside, and the list is short                 sort the list (list.cuh)
//     otherwise                                              smaller range, new guess
//
// A guess costs time if it is wrong, never exactness: ranges shrink until a bracket is one value, whose copies go by id. For a top-p
// the first probe is an estimate in fp32 with a bound on its error, which settles almost every row; exact masses of the whole row
// take fp64 and are summed only where it does not.
#pragma once
#include "chunk.cuh"
#include "share.cuh"

// Switches of the ablation, as shipped
#ifndef ARITY
#define ARITY 0       // 2, 3 or 4: the list is searched with so many parts a round, as in the paper; 0: it is sorted
#define TRUNCATE 1    // first guess of a top-k from the row's mean and deviation; 0: from a histogram of its whole range
#define DUPLICATES 1  // 0: copies of the boundary value are all kept (wrong unless values differ)
#define TIERED 1      // 0: no list, every level of the search sweeps the whole row
#endif

constexpr int BINS = 4 * THREADS;
constexpr int LISTED = THREADS;       // entries of a row's list
constexpr int SURVIVORS = 128;        // that sigma-truncation aims at, or twice k
constexpr float MARGIN = 32.0f;       // elements on both sides of where a histogram says the boundary is
constexpr int NO_ID = -1, EVERY_ID = 0x7FFFFFFF, MAX_IDS = 1 << 22;
constexpr int HIGHEST_KEY = 0x7FFFFFFF, LOWEST_KEY = static_cast<int>(0x80000000);  // no logit has them

// Keeps keys above `key`, and of those equal the ones with an id up to `last_id`.
struct Boundary {
    int key, last_id;
};

struct Found {
    Boundary boundary;
    u32 copies;  // of the boundary's key that are kept
};

// An element of the list; a larger one comes first: larger key, then smaller id.
typedef u64 Entry;

__device__ __forceinline__ Entry make_entry(int key, int id) { return static_cast<u64>(static_cast<u32>(key) ^ 0x80000000u) << 32 | ~static_cast<u32>(id); }
__device__ __forceinline__ int key_of_entry(Entry entry) { return static_cast<int>(static_cast<u32>(entry >> 32) ^ 0x80000000u); }
__device__ __forceinline__ int id_of_entry(Entry entry) { return static_cast<int>(~static_cast<u32>(entry)); }

struct Sample {
    float sum, squares;  // of logits above -inf, less the row's `shift`
    u32 count;

    __device__ __forceinline__ Sample over_lanes() const { return {sum_lanes(sum), sum_lanes(squares), sum_lanes(count)}; }
    static __device__ __forceinline__ Sample nothing() { return {0.0f, 0.0f, 0}; }
};

struct Statistics {
    u32 survivors;  // of sigma-truncation; they are on list 0
    int lowest;     // key of the lowest logit above -inf
    int peak;       // key of the largest logit
    u32 count;      // above -inf
    u32 broken;     // NaNs

    __device__ __forceinline__ Statistics over_lanes() const {
        return {sum_lanes(survivors), min_lanes(lowest), max_lanes(peak), sum_lanes(count), sum_lanes(broken)};
    }
    static __device__ __forceinline__ Statistics nothing() { return {0, HIGHEST_KEY, LOWEST_KEY, 0, 0}; }
};

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
    Measure inside, below, total;  // in it; lower, down to the floor; higher too

    __device__ __forceinline__ Measure above() const { return total - below - inside; }
    __device__ __forceinline__ Measure through() const { return total - below; }
    __device__ __forceinline__ Probe over_lanes() const {
        return {sum_lanes(count), min_lanes(smallest), max_lanes(largest), sum_lanes(inside), sum_lanes(below), sum_lanes(total)};
    }
    static __device__ __forceinline__ Probe nothing() { return {0, HIGHEST_KEY, LOWEST_KEY, 0, 0, 0}; }
};

// Masses in units, estimated, and how far they may be off.
struct Estimate {
    u32 count;              // inside the bracket
    int smallest, largest;  // keys inside
    u64 above, below, above_error, below_error;

    __device__ __forceinline__ Estimate over_lanes() const {
        return {sum_lanes(count), min_lanes(smallest), max_lanes(largest), sum_lanes(above), sum_lanes(below), sum_lanes(above_error), sum_lanes(below_error)};
    }
    static __device__ __forceinline__ Estimate nothing() { return {0, HIGHEST_KEY, LOWEST_KEY, 0, 0, 0, 0}; }
};

__device__ __forceinline__ u32 count_of(const Slot& part) { return static_cast<u32>(part.words[0]); }  // of Probe and Estimate; survivors of Statistics

__device__ __forceinline__ int key_of(float x) { return score_order(x); }
__device__ __forceinline__ float value_of(int key) { return order_score(key); }

// No number has the key -1 (that of -0.0).
__device__ __forceinline__ float first_value(int key) { return value_of(key == -1 ? 0 : key); }
__device__ __forceinline__ float last_value(int key) { return value_of(key == -1 ? -2 : key); }

struct Workspace {
    Exchange exchange;
    double table[PARTS];
    u64 barriers[MAX_PIECES];
    alignas(16) u32 histogram[BINS];     // of this block
    alignas(16) u32 totals[BINS];        // of the row
    alignas(16) Entry list[2][LISTED];  // of this block; two, so that nobody overwrites what others still read
    Entry sorted[LISTED];
    u32 listed;
    u32 before, until;          // counts around the bin that is looked for
    float to_upper, to_lower;   // elements between the boundary and the edges of that bin
    int bin, lowest, highest;
    int cut;
};

struct Search {
    Workspace& work;
    const Chunk& chunk;
    const Statistics& stats;
    const Scale& scale;
    Turns& turns;

    __device__ __forceinline__ u64 units_of(int key) const { return units(value_of(key), scale, work.table); }
};

// ---- one sweep: what lies above, inside and below first .. last

template <bool mass>
__device__ __forceinline__ Probe<mass> probe(const Search& s, int first, int last, int floor, u32 list, const Slot*& parts) {
    typedef typename MeasureOf<mass>::type Measure;
    const float low = first_value(first), high = last_value(last), least = first_value(floor + 1);
    Workspace& work = s.work;
    if (threadIdx.x == 0) work.listed = 0;
    __syncthreads();
    Probe<mass> mine = Probe<mass>::nothing();
    s.chunk.sweep([&](const float(&x)[4], int at) {
        bool inside = false;
        Measure each[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            each[i] = mass ? units(x[i], s.scale, work.table) : 1;
            if (x[i] >= least) mine.total += each[i];
            if (x[i] >= least && x[i] < low) mine.below += each[i];
            inside |= x[i] >= low && x[i] <= high;
        }
        if (!inside) return;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (!(x[i] >= low && x[i] <= high)) continue;
            const int key = key_of(x[i]);
            mine.count += 1;
            mine.inside += each[i];
            mine.smallest = min(mine.smallest, key);
            mine.largest = max(mine.largest, key);
            const u32 place = atomicAdd(&work.listed, 1);
            if (place < LISTED) work.list[list][place] = make_entry(key, s.chunk.first + at + i);
        }
    });
    return reduce_row(work.exchange, s.turns, mine, parts);
}

// The same for masses in fp32. The error of a term: 2^-22 of the exponential and three roundings of its exponent y, |y| 2^-24 ln 2
// each, relative; sums of four terms; and the whole units that exact masses are rounded to.
__device__ __forceinline__ Estimate estimate(const Search& s, int first, int last, int floor, u32 list, const Slot*& parts) {
    constexpr float TERM = 5.0e-7f, PER_OCTAVE = 1.3e-7f;
    const float low = first_value(first), high = last_value(last), least = first_value(floor + 1);
    Workspace& work = s.work;
    if (threadIdx.x == 0) work.listed = 0;
    __syncthreads();
    Estimate mine = Estimate::nothing();
    double above = 0.0, below = 0.0;
    float above_error = 0.0f, below_error = 0.0f;
    s.chunk.sweep([&](const float(&x)[4], int at) {
        float up = 0.0f, down = 0.0f;
        bool inside = false;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float y = (x[i] - s.scale.peak) * s.scale.slope, share = exp2_approx(y), error = fmaf(y, -PER_OCTAVE, TERM);
            if (x[i] > high) {
                up += share;
                above_error = fmaf(share, error, above_error);
            }
            if (x[i] >= least && x[i] < low) {
                down += share;
                below_error = fmaf(share, error, below_error);
            }
            inside |= x[i] >= low && x[i] <= high;
        }
        above += up;
        below += down;
        if (!inside) return;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (!(x[i] >= low && x[i] <= high)) continue;
            const int key = key_of(x[i]);
            mine.count += 1;
            mine.smallest = min(mine.smallest, key);
            mine.largest = max(mine.largest, key);
            const u32 place = atomicAdd(&work.listed, 1);
            if (place < LISTED) work.list[list][place] = make_entry(key, s.chunk.first + at + i);
        }
    });
    const double rounding = s.chunk.steps() * 4.0;  // half a unit for each term, twice
    mine.above = __double2ull_rn(above * 0x1p40);
    mine.below = __double2ull_rn(below * 0x1p40);
    mine.above_error = __double2ull_ru(above_error * 1.01 * 0x1p40 + rounding);
    mine.below_error = __double2ull_ru(below_error * 1.01 * 0x1p40 + rounding);
    return reduce_row(work.exchange, s.turns, mine, parts);
}

// ---- a guess from a histogram

struct Range {
    int first, last;  // keys
    bool by_key;      // bins are equal in keys; at first they are equal in value
};

// Narrows the range to the bins around the one in which the measure, from the top of the range, seems to reach `target`. A mass is
// estimated from counts, in units of the peak's; with `share` above 0 the target is that share of the range's mass and `rest`.
template <bool mass>
__device__ __forceinline__ void locate(const Search& s, Range& range, float target, float share, float rest) {
    static_assert(BINS == 1 << 11, "shift");
    Workspace& work = s.work;
    const float low = first_value(range.first), high = last_value(range.last);
    const float width = (high - low) * (1.0f / BINS), inverse = 1.0f / width;
    const u32 span = static_cast<u32>(range.last) - static_cast<u32>(range.first);
    const int shift = max(0, 32 - __clz(span) - 11);
    *reinterpret_cast<uint4*>(&work.histogram[4 * threadIdx.x]) = make_uint4(0, 0, 0, 0);
    if (threadIdx.x == 0) work.bin = 0, work.before = work.until = 0xFFFFFFFF, work.to_upper = work.to_lower = MARGIN, work.lowest = BINS - 1, work.highest = 0;
    __syncthreads();
    s.chunk.sweep([&](const float(&x)[4], int) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int bin = range.by_key ? (static_cast<u32>(key_of(x[i])) - static_cast<u32>(range.first)) >> shift
                                         : static_cast<int>((x[i] - low) * inverse);
            if (x[i] >= low && x[i] <= high) atomicAdd(&work.histogram[max(0, min(BINS - 1, bin))], 1);
        }
    });
    sync_row();

    // Every block adds up its share of the bins, and tells the others: that moves less than if each added up all
    constexpr int SHARE = THREADS / CLUSTER;  // in fours of bins
    const u32 block = threadIdx.x / SHARE, place = threadIdx.x % SHARE, four = row_rank() * SHARE + place;
    uint4* const parts = reinterpret_cast<uint4*>(work.list);
    parts[threadIdx.x] = load_remote(&work.histogram[4 * four], block);
    __syncthreads();
    uint4 sum = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int r = 0; r < CLUSTER; ++r) {
        const uint4 part = parts[r * SHARE + place];
        sum = make_uint4(sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w);
    }
    store_remote(remote_address(&work.totals[4 * four], block), static_cast<u64>(sum.y) << 32 | sum.x);
    store_remote(remote_address(&work.totals[4 * four + 2], block), static_cast<u64>(sum.w) << 32 | sum.z);
    sync_row();

    // Four bins a thread, from the top
    const int upper = BINS - 1 - 4 * threadIdx.x;
    const uint4 mine = *reinterpret_cast<const uint4*>(&work.totals[upper - 3]);
    const u32 count[4] = {mine.w, mine.z, mine.y, mine.x};
    float each[4];
    Binned all = {0, 0.0f};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        each[i] = 1.0f;
        if (mass) {
            const float middle = range.by_key ? value_of(range.first + static_cast<int>(static_cast<u32>(upper - i) << shift))
                                              : low + (upper - i + 0.5f) * width;
            each[i] = middle < s.scale.peak ? exp2_approx((middle - s.scale.peak) * s.scale.slope) : 1.0f;
        }
        all.count += count[i];
        if (count[i]) all.measure += count[i] * each[i];
    }
    const Running running = scan_block(work.exchange.scratch[s.turns.scratch++ & 1], all);
    if (share > 0.0f) target = share * (running.total.measure + rest);

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
    const int found = work.bin;
    const u32 found_before = work.before, found_until = work.until;
    const float margin = range.by_key || !mass ? 0.0f : MARGIN, to_upper = work.to_upper, to_lower = work.to_lower;
    u32 until = first_count;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int at = upper - i;
        const u32 until_before = until;
        until += count[i];
        if (at == found || (at < found && until_before - found_until + to_lower < margin)) atomicMin(&work.lowest, at);
        if (at == found || (at > found && found_before - until + to_upper < margin)) atomicMax(&work.highest, at);
    }
    __syncthreads();
    const int lowest = work.lowest, highest = work.highest, first = range.first, last = range.last;
    if (range.by_key) {
        range.first = first + static_cast<int>(static_cast<u32>(lowest) << shift);
        if (highest < static_cast<int>(span >> shift)) range.last = first + static_cast<int>(static_cast<u32>(highest + 1) << shift) - 1;
    } else {
        if (lowest > 0) range.first = key_of(low + lowest * width);
        if (highest < BINS - 1) range.last = key_of(low + (highest + 1) * width) - 1;
    }
    range.first = max(first, min(last, range.first));
    range.last = max(range.first, min(last, range.last));
}

// ---- copies over the whole row

// How many of the copies of a value are kept: copy j is while above + j each < target, and one in any case.
__device__ __forceinline__ u32 copies_kept(u64 above, u64 each, u32 copies, double target) {
    if (copies <= 1 || !each) return copies;  // of no mass: beyond the target no copy is asked about
    const double wanted = ceil((target - static_cast<double>(above)) / static_cast<double>(each));
    u32 kept = wanted >= copies ? copies : wanted > 1.0 ? static_cast<u32>(wanted) : 1;
    // The division is rounded; the rule is not.
    while (kept > 1 && !(static_cast<double>(above + (kept - 1) * each) < target)) --kept;
    while (kept < copies && static_cast<double>(above + kept * each) < target) ++kept;
    return kept;
}

struct Latest {
    int id;
    __device__ __forceinline__ Latest over_lanes() const { return {max_lanes(id)}; }
    static __device__ __forceinline__ Latest nothing() { return {NO_ID}; }
};

// The id of the n-th copy (from 1) of a value by id; `parts` has each block's number of copies.
__device__ __forceinline__ int nth_copy(const Search& s, float value, u32 n, const Slot* parts) {
    int id = NO_ID;
    const u32 rank = row_rank();
    for (u32 r = 0; r < rank; ++r) n -= count_of(parts[r]);
    if (n - 1 < count_of(parts[rank])) {  // unsigned: neither before nor after this block
        u32 turn = 0, passed = 0;         // the other blocks do not take these turns
        for (int base = 0; base < s.chunk.count; base += PIECE) {
            const int at = base + 4 * threadIdx.x;
            const Quad quad = s.chunk.load(at);
            u32 count = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) count += as_float(quad.e[i]) == value;
            const Running running = scan_block(s.work.exchange.scratch[turn++ & 1], {count, 0.0f});
            u32 before = passed + running.through.count - count;
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (as_float(quad.e[i]) == value && ++before == n) id = s.chunk.first + at + i;
            passed += running.total.count;
        }
    }
    __syncthreads();
    const Slot* ignored;
    return reduce_row(s.work.exchange, s.turns, Latest{id}, ignored).id;
}

// The first `kept` of the copies of a key.
__device__ __forceinline__ Found cut_copies(const Search& s, int key, u32 kept, u32 copies, const Slot* parts) {
    if (kept == copies || !DUPLICATES) return {{key, EVERY_ID}, copies};
    return {{key, nth_copy(s, value_of(key), kept, parts)}, kept};
}

#include "list.cuh"

// ---- the search

// Where sigma-truncation cuts: a normal row of the sample's mean and deviation has about SURVIVORS elements, or twice k, above it.
__device__ __forceinline__ float truncation(const Sample& sample, float shift, int vocab, u64 k) {
    const float share = max(static_cast<u64>(SURVIVORS), 2 * k) / static_cast<float>(vocab), inverse = 1.0f / sample.count;
    if (!(share < 0.5f) || 2 * k > LISTED / 2) return infinity();
    const float mean = sample.sum * inverse, sigma = sqrtf(sample.squares * inverse - mean * mean);
    return shift + mean - sigma * normcdfinvf(share);
}

// The shortest prefix of what `floor` keeps that reaches k elements, or (mass) the share p of its mass.
template <bool mass>
__device__ __forceinline__ Found find_boundary(const Search& s, const Found& floor, u64 k, double p) {
    const int floor_key = floor.boundary.key;
    const u64 floor_each = mass && floor.copies ? s.units_of(floor_key) : 0, floor_mass = floor.copies * floor_each;
    Range range = {max(floor_key + 1, s.stats.lowest), s.stats.peak, false};
    if (mass) {
        // Below, all of the row together has less than the share 1 - p of the peak alone; twice, for shares are rounded to units.
        const float reach = log2_approx(2.0f * s.stats.count / static_cast<float>(fmax(1.0 - p, 1e-13))) * 1.001f;
        range.first = max(range.first, key_of(fmaxf(s.scale.lowest, s.scale.peak - reach / s.scale.slope)));
    }
    range.first = min(range.first, range.last);  // nothing but copies of the floor: one probe says so

    double target = static_cast<double>(k);
    u64 over = 0;  // measure above the range
    bool known = false;
    for (u32 list = 0;; list ^= 1) {
        Range bracket = range;
        const double left = target - static_cast<double>(over);
        locate<mass>(s, bracket, static_cast<float>(mass ? left * 0x1p-40 : left), mass && !known ? static_cast<float>(p) : 0.0f,
                     floor_mass * 0x1p-40f);
        const Slot* parts;
#if ARITY == 0
        // Nothing to estimate where the range is empty, or masses are not finite.
        if (mass && TIERED && !known && range.first > floor_key && s.scale.slope < infinity() && fabsf(s.scale.peak) < infinity()) {
            const Estimate guess = estimate(s, bracket.first, bracket.last, floor_key, list, parts);
            Found result;
            if (guess.count <= LISTED && settle(s, guess, parts, list, p, floor_mass, result)) return result;
            list ^= 1;
        }
#endif
        const Probe<mass> found = probe<mass>(s, bracket.first, bracket.last, known ? bracket.first - 1 : floor_key, list, parts);
        if (!known) {
            if (mass) target = fmax(p * static_cast<double>(found.total + floor_mass), 0.5);
            else if (found.total <= k) return floor;
            known = true;
            if (static_cast<double>(found.total) < target) {  // it lies among the copies that the floor keeps
                const u32 kept = copies_kept(found.total, floor_each, floor.copies, target);
                if (kept == floor.copies) return floor;
                probe<false>(s, floor_key, floor_key, floor_key - 1, list ^ 1, parts);
                return cut_copies(s, floor_key, kept, floor.copies, parts);
            }
        }
        if (static_cast<double>(found.above()) >= target) {
            range.first = bracket.last + 1;
        } else if (static_cast<double>(found.through()) < target) {
            range.last = bracket.first - 1;
            over = found.through();
        } else if (found.smallest == found.largest) {
            return cut_copies(s, found.smallest, copies_kept(found.above(), found.inside / found.count, found.count, target), found.count, parts);
        } else if (TIERED && found.count <= LISTED) {
            u32 kept;
            return search_list(s, mass, found.count, found.above(), parts, list, target, 1.0, kept);
        } else {
            range = {found.smallest, found.largest};
            over = found.above();
        }
        range.by_key = true;
    }
}
