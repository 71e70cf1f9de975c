// The boundary of a kept set, exactly: Qrita's pivot search (arXiv 2602.01518) by a cluster of blocks that holds the row.
//
// Tokens are ordered by (logit descending, id ascending); a filter keeps the shortest prefix whose measure reaches a target. The
// measure is a count (top-k) or a mass in whole units (top-p), so that it has no order of summation.
//
//     guess a bracket of logits that holds the boundary      sigma-truncation, or a histogram of the range
//     probe it: measure above, inside; inside goes on a list   one sweep over the row, exact
//     boundary inside, and the list is short                   pivot search on the list
//     otherwise                                                smaller range, new guess
//
// A guess costs time if it is wrong, never exactness: ranges shrink until a bracket is one value, whose copies go by id.
#pragma once
#include "chunk.cuh"
#include "share.cuh"

// Switches of the ablation, as shipped
#ifndef ARITY
#define ARITY 4       // of the pivot search on the list: 2, 3 or 4
#define TRUNCATE 1    // first guess of a top-k from the row's mean and deviation; 0: from a histogram of its whole range
#define DUPLICATES 1  // 0: copies of the boundary value are all kept (wrong unless values differ)
#define TIERED 1      // 0: no list, every level of the search sweeps the whole row
#endif

constexpr int BINS = 2 * THREADS;
constexpr int PER_THREAD = 4;                        // entries of the list
constexpr int LISTED = PER_THREAD * THREADS;         // of a row
constexpr int LOCAL = CLUSTER == 1 ? LISTED : 1024;  // of a block
constexpr int SURVIVORS = 512;                       // that sigma-truncation aims at, or twice k
constexpr u32 MARGIN = 256;                          // a first bracket takes so many more elements on both sides

// Keeps keys above `key`, and of those equal the ones with an id up to `last_id`.
struct Boundary {
    int key, last_id;

    __device__ __forceinline__ bool keeps(int other, int id) const { return other > key || (other == key && id <= last_id); }
};

constexpr int EVERY_ID = 0x7FFFFFFF, NO_ID = -1;
constexpr int MAX_IDS = 1 << 22;

struct Entry {
    int key, id;
};

struct Statistics {
    double mean, squares;  // of the finite logits; squares around the mean
    float peak, lowest;    // lowest above -inf
    u32 count;             // above -inf
    u32 broken;            // a NaN is there
};

struct Probe {
    u64 above, inside, below;  // measures; below down to the floor
    u32 count;                 // inside
    int smallest, largest;     // keys inside
};

struct Workspace {
    Exchange exchange;
    double table[16];
    u64 barriers[MAX_PIECES];
    u32 histogram[BINS];
    Entry list[2][LOCAL];  // two, so that nobody overwrites what others still read
    u32 listed;
    float estimate;
    u32 found[3];
    int cut[2];
};

struct Search {
    Workspace& work;
    const Chunk& chunk;
    const Statistics& stats;
    const Scale& scale;
    u32& turn;
};

__device__ __forceinline__ int key_of(float x) { return score_order(x); }
__device__ __forceinline__ float value_of(int key) { return order_score(key); }

// No number has the key -1 (that of -0.0).
__device__ __forceinline__ float first_value(int key) { return value_of(key == -1 ? 0 : key); }
__device__ __forceinline__ float last_value(int key) { return value_of(key == -1 ? -2 : key); }

// ---- one sweep: what lies above, inside and below first .. last

template <bool mass>
__device__ __forceinline__ Probe probe(const Search& s, int first, int last, int floor, u32 list, const Slot*& parts) {
    const float low = first_value(first), high = last_value(last), least = first_value(floor + 1);
    Workspace& work = s.work;
    if (threadIdx.x == 0) work.listed = 0;
    __syncthreads();
    Probe mine = {0, 0, 0, 0, 0x7FFFFFFF, static_cast<int>(0x80000000)};
    s.chunk.sweep([&](const float(&x)[4], int at) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (!(x[i] >= least)) continue;
            const u64 each = mass ? units(x[i], s.scale, work.table) : 1;
            if (x[i] > high) mine.above += each;
            else if (x[i] < low) mine.below += each;
            else {
                mine.inside += each;
                const int key = key_of(x[i]);
                mine.count += 1;
                mine.smallest = min(mine.smallest, key);
                mine.largest = max(mine.largest, key);
                const u32 place = atomicAdd(&work.listed, 1);
                if (place < LOCAL) work.list[list][place] = {key, s.chunk.first + at + i};
            }
        }
    });
    return row_reduce(
        work.exchange, s.turn, mine,
        [](const Probe& a, const Probe& b) {
            return Probe{a.above + b.above, a.inside + b.inside, a.below + b.below, a.count + b.count, min(a.smallest, b.smallest),
                         max(a.largest, b.largest)};
        },
        parts);
}

// ---- a guess from a histogram

struct Range {
    int first, last;  // keys
    u64 above;        // measure of what lies above
    bool by_key;      // bins are equal in keys; at first they are equal in value
};

struct Binned {
    u32 count;
    float measure;
    __device__ __forceinline__ Binned operator+(const Binned& other) const { return {count + other.count, measure + other.measure}; }
};

// The bracket of bins around the one in which the measure seems to reach `target`. A mass is estimated from counts; `share`
// above 0 makes the target that share of the range's mass and `rest`.
template <bool mass>
__device__ __forceinline__ void locate(const Search& s, Range& range, float target, double share, float rest) {
    Workspace& work = s.work;
    const float low = first_value(range.first), high = last_value(range.last);
    const float width = (high - low) / BINS, inverse = 1.0f / width;
    const u32 span = static_cast<u32>(range.last) - static_cast<u32>(range.first);
    const int shift = max(0, 32 - __clz(span) - 10);
    static_assert(BINS == 1 << 10, "shift");
    work.histogram[threadIdx.x] = work.histogram[threadIdx.x + THREADS] = 0;
    if (threadIdx.x == 0) work.found[2] = 0;
    __syncthreads();
    s.chunk.sweep([&](const float(&x)[4], int) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (!(x[i] >= low && x[i] <= high)) continue;
            const int bin = range.by_key ? (static_cast<u32>(key_of(x[i])) - static_cast<u32>(range.first)) >> shift
                                         : static_cast<int>((x[i] - low) * inverse);
            atomicAdd(&work.histogram[max(0, min(BINS - 1, bin))], 1);
        }
    });
    sync_row();

    // Two bins a thread, from the top
    const int upper = BINS - 1 - 2 * threadIdx.x;
    u32 count[2] = {0, 0};
#pragma unroll
    for (int r = 0; r < CLUSTER; ++r) {
#if CLUSTER == 1
        const u64 both = *reinterpret_cast<const u64*>(&work.histogram[upper - 1]);
#else
        const u64 both = load_remote(remote_address(&work.histogram[upper - 1], r));
#endif
        count[0] += static_cast<u32>(both >> 32);
        count[1] += static_cast<u32>(both);
    }
    Binned bin[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float each = 1.0f;
        if (mass) {
            const float middle = range.by_key ? value_of(range.first + static_cast<int>(static_cast<u32>(upper - i) << shift))
                                              : low + (upper - i + 0.5f) * width;
            each = exp2_approx((middle - s.scale.peak) * static_cast<float>(s.scale.factor / 16.0));
            if (middle >= s.scale.peak) each = 1.0f;
        }
        bin[i] = {count[i], count[i] ? count[i] * each : 0.0f};
    }
    const Binned through = block_scan(work.exchange, s.turn, bin[0] + bin[1]);
    if (share > 0.0) {
        if (threadIdx.x == THREADS - 1) work.estimate = through.measure;
        __syncthreads();
        target = static_cast<float>(share) * (work.estimate + rest);
    }
    // The bin that reaches the target: its number, and the counts through it and before it
    const Binned before1 = {through.count - count[1], through.measure - bin[1].measure};
    const Binned before0 = {before1.count - count[0], before1.measure - bin[0].measure};
    if (before1.measure < target && target <= through.measure) {
        work.found[0] = before1.count, work.found[1] = through.count, work.found[2] = upper;
    } else if (before0.measure < target && target <= before1.measure) {
        work.found[0] = before0.count, work.found[1] = before1.count, work.found[2] = upper + 1;
    }
    if (threadIdx.x == 0) work.cut[0] = BINS - 1, work.cut[1] = 0;
    __syncthreads();
    const bool none = work.found[2] == 0;  // by rounding: then it is the lowest
    const int bin_found = none ? 0 : static_cast<int>(work.found[2]) - 1;
    const u32 count_before = none ? 0xFFFFFFFF : work.found[0], count_through = none ? 0xFFFFFFFF : work.found[1];
    const int pad = mass && !range.by_key ? 1 : 0;
    const u32 margin = range.by_key || none ? 0 : MARGIN;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int at = upper - i;
        const u32 until = i ? through.count : before1.count, until_before = i ? before1.count : before0.count;
        if (at <= bin_found && (at >= bin_found - pad || until - count_through <= margin)) atomicMin(&work.cut[0], at);
        if (at >= bin_found && (at <= bin_found + pad || count_before - until_before <= margin)) atomicMax(&work.cut[1], at);
    }
    __syncthreads();
    const int lowest = work.cut[0], highest = work.cut[1];
    int first = range.first, last = range.last;
    if (range.by_key) {
        first = range.first + static_cast<int>(static_cast<u32>(lowest) << shift);
        if (highest < static_cast<int>(span >> shift)) last = range.first + static_cast<int>(static_cast<u32>(highest + 1) << shift) - 1;
    } else {
        if (lowest > 0) first = key_of(low + lowest * width);
        if (highest < BINS - 1) last = key_of(low + (highest + 1) * width) - 1;
    }
    first = max(range.first, min(range.last, first));
    last = max(first, min(range.last, last));
    range.first = first;
    range.last = last;
}

// ---- the pivot search on the list

template <bool mass>
struct MeasureOf {
    typedef u32 type;
};
template <>
struct MeasureOf<true> {
    typedef u64 type;
};

// Largest key between `low` and `high` from which on the entries reach `target` (`above` counts towards it): ARITY - 1 pivots a
// round. `above` becomes the measure of larger keys.
template <bool mass, typename Measure>
__device__ __forceinline__ int find_pivot(const Search& s, const int (&keys)[PER_THREAD], const Measure (&each)[PER_THREAD], int low,
                                          int high, u64& above, double target) {
    struct Sums {
        Measure from[ARITY - 1];
    };
    while (low < high) {
        const u32 span = static_cast<u32>(high) - static_cast<u32>(low);
        const u32 stride = (span - 1) / ARITY + 1;
        int pivot[ARITY - 1];
        Sums sums;
#pragma unroll
        for (int j = 0; j < ARITY - 1; ++j) {
            const u64 offset = static_cast<u64>(stride) * (j + 1);
            pivot[j] = offset > span ? high : static_cast<int>(static_cast<u32>(low) + static_cast<u32>(offset));
            sums.from[j] = 0;
#pragma unroll
            for (int i = 0; i < PER_THREAD; ++i)
                if (keys[i] >= pivot[j] && keys[i] <= high) sums.from[j] += each[i];
        }
        sums = block_reduce(s.work.exchange, s.turn, sums, [](const Sums& a, const Sums& b) {
            Sums sum;
#pragma unroll
            for (int j = 0; j < ARITY - 1; ++j) sum.from[j] = a.from[j] + b.from[j];
            return sum;
        });
        int next_high = high;
        u64 next_above = above;
#pragma unroll
        for (int j = 0; j < ARITY - 1; ++j) {
            if (static_cast<double>(above + sums.from[j]) >= target) low = pivot[j];
            else if (pivot[j] <= next_high) {  // the lowest that does not reach it
                next_high = pivot[j] - 1;
                next_above = above + sums.from[j];
            }
        }
        high = next_high;
        above = next_above;
    }
    return low;
}

// How many of the copies of a value are kept: copy j is while above + j each < target, and one in any case.
__device__ __forceinline__ u32 copies_kept(u64 above, u64 each, u32 copies, double target) {
    if (!each) return copies;  // beyond the target no copy is asked about
    const double wanted = ceil((target - static_cast<double>(above)) / static_cast<double>(each));
    u32 kept = wanted >= copies ? copies : wanted > 1.0 ? static_cast<u32>(wanted) : 1;
    // The division is rounded; the rule is not.
    while (kept > 1 && !(static_cast<double>(above + (kept - 1) * each) < target)) --kept;
    while (kept < copies && static_cast<double>(above + kept * each) < target) ++kept;
    return kept;
}

struct Found {
    Boundary boundary;
    u32 copies;  // of the boundary's key that are kept
};

// The boundary among a list's entries: at most LISTED of the row, those of each block with it.
template <bool mass>
__device__ __forceinline__ Found search_list(const Search& s, const Probe& all, const Slot* parts, u32 list, double target) {
    typedef typename MeasureOf<mass>::type Measure;
    int keys[PER_THREAD], ids[PER_THREAD];
    Measure each[PER_THREAD];
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        u32 at = threadIdx.x + i * THREADS, rank = 0;
        keys[i] = NOTHING_ORDER;
        ids[i] = NO_ID;
        each[i] = 0;
        if (at >= all.count) continue;
        while (rank + 1 < CLUSTER) {
            const u32 count = reinterpret_cast<const Probe*>(&parts[rank])->count;
            if (at < count) break;
            at -= count;
            ++rank;
        }
#if CLUSTER == 1
        const Entry entry = s.work.list[list][at];
        keys[i] = entry.key;
        ids[i] = entry.id;
#else
        const u64 entry = load_remote(remote_address(&s.work.list[list][at], rank));
        keys[i] = static_cast<int>(entry);
        ids[i] = static_cast<int>(entry >> 32);
#endif
        each[i] = mass ? units(value_of(keys[i]), s.scale, s.work.table) : 1;
    }
    u64 above = all.above;
    const int key = find_pivot<mass>(s, keys, each, all.smallest, all.largest, above, target);

    u32 copies = 0;
    u32 is_copy[PER_THREAD];
    int reverse[PER_THREAD];
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        is_copy[i] = keys[i] == key;
        copies += is_copy[i];
        reverse[i] = is_copy[i] ? -1 - ids[i] : NOTHING_ORDER;
    }
    copies = block_reduce(s.work.exchange, s.turn, copies, [](u32 a, u32 b) { return a + b; });
    const u32 kept = copies_kept(above, mass ? units(value_of(key), s.scale, s.work.table) : 1, copies, target);
    if (kept == copies || !DUPLICATES) return {{key, EVERY_ID}, copies};
    u64 none = 0;
    return {{key, -1 - find_pivot<false>(s, reverse, is_copy, -MAX_IDS, -1, none, kept)}, kept};
}

// The id of the n-th copy (from 1) of a value by id, over the row; `parts` has each block's number of copies.
__device__ __forceinline__ int nth_copy(const Search& s, float value, u32 n, const Slot* parts) {
    int id = NO_ID;
    const u32 rank = row_rank();
    for (u32 r = 0; r < rank; ++r) n -= reinterpret_cast<const Probe*>(&parts[r])->count;
    if (n - 1 < reinterpret_cast<const Probe*>(&parts[rank])->count) {  // unsigned: neither before nor after this block
        u32 turn = 0, passed = 0;                                       // the other blocks do not take these turns
        for (int base = 0; base < s.chunk.count; base += PIECE) {
            const int at = base + 4 * threadIdx.x;
            float x[4];
            s.chunk.load(at, x);
            u32 count = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) count += x[i] == value;
            u32 before = passed + block_scan(s.work.exchange, turn, count) - count;
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (x[i] == value && ++before == n) id = s.chunk.first + at + i;
            passed += block_reduce(s.work.exchange, turn, count, [](u32 a, u32 b) { return a + b; });
        }
    }
    __syncthreads();
    const Slot* ignored;
    return row_reduce(s.work.exchange, s.turn, id, [](int a, int b) { return max(a, b); }, ignored);
}

// The first `kept` of the copies of a key.
__device__ __forceinline__ Found cut_copies(const Search& s, int key, u32 kept, u32 copies, const Slot* parts) {
    if (kept == copies || !DUPLICATES) return {{key, EVERY_ID}, copies};
    return {{key, nth_copy(s, value_of(key), kept, parts)}, kept};
}

// ---- the search

// Where sigma-truncation cuts: above it, a normal row of this mean and deviation has about SURVIVORS elements.
__device__ __forceinline__ int truncation(const Search& s, u64 k) {
    const double share = static_cast<double>(max(static_cast<u64>(SURVIVORS), 2 * k)) / s.stats.count;
    if (!(share < 0.5) || 2 * k > LISTED / 2) return NOTHING_ORDER;
    const float sigma = sqrtf(static_cast<float>(s.stats.squares / s.stats.count));
    const float at = static_cast<float>(s.stats.mean) - sigma * normcdfinvf(static_cast<float>(share));
    return at == at ? key_of(at) : NOTHING_ORDER;
}

// The shortest prefix of what `floor` keeps that reaches k elements, or the share p of its mass.
template <bool mass>
__device__ __forceinline__ Found find_boundary(const Search& s, const Found& floor, u64 k, double p) {
    const int floor_key = floor.boundary.key;
    const u64 floor_each = !floor.copies ? 0 : mass ? units(value_of(floor_key), s.scale, s.work.table) : 1;
    const u64 floor_measure = floor.copies * floor_each;
    const int peak = key_of(s.stats.peak);
    Range range = {floor_key + 1, peak, 0, false};
    if (mass) range.first = max(range.first, key_of(s.scale.lowest));
    if (range.first > range.last) range.first = range.last;  // nothing but copies of the floor: one probe says so

    double target = static_cast<double>(k);
    bool known = false, located = true;
    Range bracket = range;
    if (!mass && TRUNCATE) {
        bracket.first = max(range.first, min(range.last, truncation(s, k)));
        located = false;
    } else {
        const float rest = static_cast<float>(floor_measure) * 0x1p-40f;
        locate<mass>(s, bracket, mass ? 0.0f : static_cast<float>(k), mass ? p : 0.0, rest);
    }
    for (u32 list = 0;; list ^= 1) {
        const Slot* parts;
        const Probe found = probe<mass>(s, bracket.first, bracket.last, known ? bracket.first - 1 : floor_key, list, parts);
        if (!known) {
            const u64 over_floor = found.above + found.inside + found.below;
            if (mass) target = fmax(p * static_cast<double>(over_floor + floor_measure), 0.5);
            else if (over_floor <= k) return floor;
            known = true;
            if (static_cast<double>(over_floor) < target) {  // it lies among the copies that the floor keeps
                const u32 kept = copies_kept(over_floor, floor_each, floor.copies, target);
                if (kept == floor.copies) return floor;
                probe<false>(s, floor_key, floor_key, floor_key, list ^ 1, parts);
                return cut_copies(s, floor_key, kept, floor.copies, parts);
            }
        }
        if (static_cast<double>(found.above) >= target) {
            range.first = bracket.last + 1;
        } else if (static_cast<double>(found.above + found.inside) < target) {
            range.last = bracket.first - 1;
            range.above = found.above + found.inside;
        } else if (found.smallest == found.largest) {
            const u32 kept = copies_kept(found.above, found.inside / found.count, found.count, target);
            return cut_copies(s, found.smallest, kept, found.count, parts);
        } else {
            bool listed = TIERED && found.count <= LISTED;
#pragma unroll
            for (int r = 0; r < CLUSTER; ++r) listed = listed && reinterpret_cast<const Probe*>(&parts[r])->count <= LOCAL;
            if (listed) return search_list<mass>(s, found, parts, list, target);
            range = {found.smallest, found.largest, found.above, range.by_key};
        }
        range.by_key = located;
        located = true;
        bracket = range;
        const double left = target - static_cast<double>(range.above);
        locate<mass>(s, bracket, static_cast<float>(mass ? left * 0x1p-40 : left), 0.0, 0.0f);
    }
}
