// The boundary of a kept set, exactly: Qrita's pivot search (arXiv 2602.01518) by a cluster of blocks that holds the row.
//
// Tokens are ordered by (logit descending, id ascending); a filter keeps the shortest prefix whose measure reaches a target. The
// measure is a count (top-k) or a mass in whole units (top-p), so that it has no order of summation.
//
//     guess a bracket of logits that holds the boundary      sigma-truncation, or a histogram of the range
//     probe it: measure above and inside, inside on a list   one sweep over the row, exact
//     boundary inside, and the list is short                 pivot search on the list
//     otherwise                                              smaller range, new guess
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
constexpr int SEARCHERS = 8;                          // warps of a block that search the list
constexpr int PER_THREAD = 4;                         // entries of theirs
constexpr int LISTED = PER_THREAD * 32 * SEARCHERS;   // entries of a row
constexpr int LOCAL = CLUSTER == 1 ? LISTED : 512;    // of a block
constexpr int SURVIVORS = 256;                        // that sigma-truncation aims at, or twice k
constexpr u32 MARGIN = 64;                            // a first bracket takes so many more elements on both sides
constexpr int EVERY_ID = 0x7FFFFFFF, NO_ID = -1, MAX_IDS = 1 << 22;
constexpr int HIGHEST_KEY = 0x7FFFFFFF, LOWEST_KEY = static_cast<int>(0x80000000);  // no logit has them

// Keeps keys above `key`, and of those equal the ones with an id up to `last_id`.
struct Boundary {
    int key, last_id;
};

struct Found {
    Boundary boundary;
    u32 copies;  // of the boundary's key that are kept
};

struct Entry {
    int key, id;
};

struct Statistics {
    float sum, squares;  // of logits above -inf, less the row's `shift`
    int peak;            // key
    u32 count;           // above -inf
    u32 broken;          // NaNs

    __device__ __forceinline__ Statistics over_lanes() const {
        return {sum_lanes(sum), sum_lanes(squares), max_lanes(peak), sum_lanes(count), sum_lanes(broken)};
    }
    static __device__ __forceinline__ Statistics nothing() { return {0.0f, 0.0f, LOWEST_KEY, 0, 0}; }
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
    Measure above, through, total;  // above it; that and inside; that and below, down to the floor

    __device__ __forceinline__ Probe over_lanes() const {
        return {sum_lanes(count), min_lanes(smallest), max_lanes(largest), sum_lanes(above), sum_lanes(through), sum_lanes(total)};
    }
    static __device__ __forceinline__ Probe nothing() { return {0, HIGHEST_KEY, LOWEST_KEY, 0, 0, 0}; }
};

__device__ __forceinline__ u32 count_of(const Slot& part) { return static_cast<u32>(part.words[0]); }  // of any Probe

struct Workspace {
    Exchange exchange;
    double table[16];
    u64 barriers[MAX_PIECES];
    u32 histogram[BINS];
    Entry list[2][LOCAL];  // two, so that nobody overwrites what others still read
    u32 listed;
    u32 before, until;  // counts around the bin that is looked for
    int bin, lowest, highest;
    int cut;
    Found found;
};

struct Search {
    Workspace& work;
    const Chunk& chunk;
    const Statistics& stats;
    const Scale& scale;
    u32& turn;
    float shift;  // some logit of the row, or 0
};

__device__ __forceinline__ int key_of(float x) { return score_order(x); }
__device__ __forceinline__ float value_of(int key) { return order_score(key); }

// No number has the key -1 (that of -0.0).
__device__ __forceinline__ float first_value(int key) { return value_of(key == -1 ? 0 : key); }
__device__ __forceinline__ float last_value(int key) { return value_of(key == -1 ? -2 : key); }

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
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Measure each = mass ? units(x[i], s.scale, work.table) : 1;
            if (x[i] > high) mine.above += each;
            if (x[i] >= low) mine.through += each;
            if (x[i] >= least) mine.total += each;
            inside |= x[i] >= low && x[i] <= high;
        }
        if (!inside) return;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (!(x[i] >= low && x[i] <= high)) continue;
            const int key = key_of(x[i]);
            mine.count += 1;
            mine.smallest = min(mine.smallest, key);
            mine.largest = max(mine.largest, key);
            const u32 place = atomicAdd(&work.listed, 1);
            if (place < LOCAL) work.list[list][place] = {key, s.chunk.first + at + i};
        }
    });
    return reduce_row(work.exchange, s.turn, mine, parts);
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
    static_assert(BINS == 1 << 10, "shift");
    Workspace& work = s.work;
    const float low = first_value(range.first), high = last_value(range.last);
    const float width = (high - low) * (1.0f / BINS), inverse = 1.0f / width;
    const u32 span = static_cast<u32>(range.last) - static_cast<u32>(range.first);
    const int shift = max(0, 32 - __clz(span) - 10);
    work.histogram[threadIdx.x] = work.histogram[threadIdx.x + THREADS] = 0;
    if (threadIdx.x == 0) work.bin = 0, work.before = work.until = 0xFFFFFFFF, work.lowest = BINS - 1, work.highest = 0;
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

    // Two bins a thread, from the top
    const int upper = BINS - 1 - 2 * threadIdx.x;
    u64 parts[CLUSTER];
#pragma unroll
    for (int r = 0; r < CLUSTER; ++r) {
#if CLUSTER == 1
        parts[r] = *reinterpret_cast<const u64*>(&work.histogram[upper - 1]);
#else
        parts[r] = load_remote(remote_address(&work.histogram[upper - 1], r));
#endif
    }
    u32 count[2] = {0, 0};
#pragma unroll
    for (int r = 0; r < CLUSTER; ++r) {
        count[0] += static_cast<u32>(parts[r] >> 32);
        count[1] += static_cast<u32>(parts[r]);
    }
    Binned bin[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float each = 1.0f;
        if (mass) {
            const float middle = range.by_key ? value_of(range.first + static_cast<int>(static_cast<u32>(upper - i) << shift))
                                              : low + (upper - i + 0.5f) * width;
            each = middle < s.scale.peak ? exp2_approx((middle - s.scale.peak) * s.scale.slope) : 1.0f;
        }
        bin[i] = {count[i], count[i] ? count[i] * each : 0.0f};
    }
    const Running running = scan_block(work.exchange.scratch[s.turn & 1], {count[0] + count[1], bin[0].measure + bin[1].measure});
    ++s.turn;
    if (share > 0.0f) target = share * (running.total.measure + rest);

    // The bin that reaches the target, and the counts before and through it
    const Binned through = running.through;
    const Binned middle = {through.count - count[1], through.measure - bin[1].measure};
    const Binned before = {middle.count - count[0], middle.measure - bin[0].measure};
    if (middle.measure < target && target <= through.measure) work.bin = upper - 1, work.before = middle.count, work.until = through.count;
    else if (before.measure < target && target <= middle.measure) work.bin = upper, work.before = before.count, work.until = middle.count;
    __syncthreads();
    const int found = work.bin;
    const u32 found_before = work.before, found_until = work.until;
    const int pad = mass && !range.by_key ? 1 : 0;
    const u32 margin = range.by_key || found_until == 0xFFFFFFFF ? 0 : MARGIN;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int at = upper - i;
        const u32 until = i ? through.count : middle.count, until_before = i ? middle.count : before.count;
        if (at <= found && (at >= found - pad || until - found_until <= margin)) atomicMin(&work.lowest, at);
        if (at >= found && (at <= found + pad || found_before - until_before <= margin)) atomicMax(&work.highest, at);
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

// ---- the pivot search on the list, by the first SEARCHERS warps of every block alike

template <bool mass>
struct Sums {
    typedef typename MeasureOf<mass>::type Measure;
    int smallest, largest;
    Measure from[ARITY - 1];

    __device__ __forceinline__ Sums over_lanes() const {
        Sums sums = {min_lanes(smallest), max_lanes(largest), {}};
#pragma unroll
        for (int j = 0; j < ARITY - 1; ++j) sums.from[j] = sum_lanes(from[j]);
        return sums;
    }
    static __device__ __forceinline__ Sums nothing() { return {HIGHEST_KEY, LOWEST_KEY, {}}; }
};

struct Count {
    u32 value;
    __device__ __forceinline__ Count over_lanes() const { return {sum_lanes(value)}; }
    static __device__ __forceinline__ Count nothing() { return {0}; }
};

struct Mass {
    u64 value;
    __device__ __forceinline__ Mass over_lanes() const { return {sum_lanes(value)}; }
    static __device__ __forceinline__ Mass nothing() { return {0}; }
};

template <typename T>
__device__ __forceinline__ T reduce_searchers(const Search& s, u32& turn, const T& mine) {
    return reduce_warps<SEARCHERS>(s.work.exchange.scratch[turn++ & 1], mine);
}

// Largest key between `low` and `high` from which on the entries reach `target` (`above` counts towards it): ARITY - 1 pivots a
// round, until one value is left between them. `above` becomes the measure of larger keys.
template <bool mass, typename Measure>
__device__ __forceinline__ int find_pivot(const Search& s, u32& turn, const int (&keys)[PER_THREAD], const Measure (&each)[PER_THREAD],
                                          int low, int high, u64& above, double target) {
    while (low < high) {
        const u32 stride = (static_cast<u32>(high) - static_cast<u32>(low)) / ARITY;
        int pivot[ARITY - 1];
        Sums<mass> sums = Sums<mass>::nothing();
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) {
            if (keys[i] < low || keys[i] > high) continue;
            sums.smallest = min(sums.smallest, keys[i]);
            sums.largest = max(sums.largest, keys[i]);
        }
#pragma unroll
        for (int j = 0; j < ARITY - 1; ++j) {
            pivot[j] = static_cast<int>(static_cast<u32>(low) + stride * (j + 1) + 1);
#pragma unroll
            for (int i = 0; i < PER_THREAD; ++i)
                if (keys[i] >= pivot[j] && keys[i] <= high) sums.from[j] += each[i];
        }
        sums = reduce_searchers(s, turn, sums);
        if (sums.smallest >= sums.largest) return sums.largest;
        int next_low = sums.smallest, next_high = sums.largest;
        u64 next_above = above;
#pragma unroll
        for (int j = 0; j < ARITY - 1; ++j) {
            const u64 reached = above + sums.from[j];
            if (static_cast<double>(reached) >= target) next_low = max(next_low, pivot[j]);
            else if (pivot[j] <= next_high) {  // the lowest that does not reach it
                next_high = pivot[j] - 1;
                next_above = reached;
            }
        }
        low = next_low;
        high = next_high;
        above = next_above;
    }
    return low;
}

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

// The boundary among entries, given with their measures.
template <bool mass, typename Measure>
__device__ __forceinline__ Found search_entries(const Search& s, u32& turn, const int (&keys)[PER_THREAD], const int (&ids)[PER_THREAD],
                                                const Measure (&each)[PER_THREAD], int low, int high, u64 above, double target) {
    const int key = find_pivot<mass>(s, turn, keys, each, low, high, above, target);
    u32 is_copy[PER_THREAD], mine = 0;
    int reverse[PER_THREAD];
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        is_copy[i] = keys[i] == key;
        mine += is_copy[i];
        reverse[i] = is_copy[i] ? -1 - ids[i] : LOWEST_KEY;
    }
    const u32 copies = reduce_searchers(s, turn, Count{mine}).value;
    const u32 kept = copies_kept(above, mass ? units(value_of(key), s.scale, s.work.table) : 1, copies, target);
    if (kept == copies || !DUPLICATES) return {{key, EVERY_ID}, copies};
    u64 none = 0;
    return {{key, -1 - find_pivot<false>(s, turn, reverse, is_copy, -MAX_IDS, -1, none, kept)}, kept};
}

// The boundary of a top-k, and if p < 1 of the top-p of what it keeps, or of a top-p alone, among the list's entries: `all.count`
// of the row, those of each block with it.
template <bool mass>
__device__ __forceinline__ Found search_list(const Search& s, const Probe<mass>& all, const Slot* parts, u32 list, double target, double p) {
    if (threadIdx.x < 32 * SEARCHERS) {
        int keys[PER_THREAD], ids[PER_THREAD];
        typename MeasureOf<mass>::type each[PER_THREAD];
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) {
            u32 at = threadIdx.x + i * 32 * SEARCHERS, rank = 0;
            const bool there = at < all.count;
            keys[i] = LOWEST_KEY;
            ids[i] = NO_ID;
            if (there) {
                while (rank + 1 < CLUSTER && at >= count_of(parts[rank])) at -= count_of(parts[rank++]);
#if CLUSTER == 1
                const Entry entry = s.work.list[list][at];
                keys[i] = entry.key;
                ids[i] = entry.id;
#else
                const u64 entry = load_remote(remote_address(&s.work.list[list][at], rank));
                keys[i] = static_cast<int>(entry);
                ids[i] = static_cast<int>(entry >> 32);
#endif
            }
            each[i] = !there ? 0 : mass ? units(value_of(keys[i]), s.scale, s.work.table) : 1;
        }
        u32 turn = 0;
        Found found = search_entries<mass>(s, turn, keys, ids, each, all.smallest, all.largest, all.above, target);
        if (!mass && p < 1.0) {
            u64 kept[PER_THREAD], mine = 0;
#pragma unroll
            for (int i = 0; i < PER_THREAD; ++i) {
                const bool keep = keys[i] > found.boundary.key || (keys[i] == found.boundary.key && ids[i] <= found.boundary.last_id);
                if (!keep) keys[i] = LOWEST_KEY;
                kept[i] = keep ? units(value_of(keys[i]), s.scale, s.work.table) : 0;
                mine += kept[i];
            }
            const double total = static_cast<double>(reduce_searchers(s, turn, Mass{mine}).value);
            const int lowest = found.boundary.key;
            const Found nucleus = search_entries<true>(s, turn, keys, ids, kept, lowest, all.largest, 0, fmax(p * total, 0.5));
            // All its copies are all that top-k has left.
            if (nucleus.boundary.key != lowest || nucleus.boundary.last_id != EVERY_ID) found = nucleus;
        }
        if (threadIdx.x == 0) s.work.found = found;
    }
    __syncthreads();
    return s.work.found;
}

// ---- copies over the whole row

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
            float x[4];
            s.chunk.load(at, x);
            u32 count = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) count += x[i] == value;
            const Running running = scan_block(s.work.exchange.scratch[turn++ & 1], {count, 0.0f});
            u32 before = passed + running.through.count - count;
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (x[i] == value && ++before == n) id = s.chunk.first + at + i;
            passed += running.total.count;
        }
    }
    __syncthreads();
    const Slot* ignored;
    return reduce_row(s.work.exchange, s.turn, Latest{id}, ignored).id;
}

// The first `kept` of the copies of a key.
__device__ __forceinline__ Found cut_copies(const Search& s, int key, u32 kept, u32 copies, const Slot* parts) {
    if (kept == copies || !DUPLICATES) return {{key, EVERY_ID}, copies};
    return {{key, nth_copy(s, value_of(key), kept, parts)}, kept};
}

// ---- the search

// Where sigma-truncation cuts: above it, a normal row of this mean and deviation has about SURVIVORS elements.
__device__ __forceinline__ int truncation(const Search& s, u64 k) {
    const float inverse = 1.0f / s.stats.count, share = max(static_cast<u64>(SURVIVORS), 2 * k) * inverse;
    if (!(share < 0.5f) || 2 * k > LISTED / 2) return LOWEST_KEY;
    const float mean = s.stats.sum * inverse, sigma = sqrtf(s.stats.squares * inverse - mean * mean);
    const float at = s.shift + mean - sigma * normcdfinvf(share);
    return at == at ? key_of(at) : LOWEST_KEY;
}

// The shortest prefix of what `floor` keeps that reaches k elements, or (mass) the share p of its mass. Of a top-k that ends on the
// list, the top-p too: `p` is 1 then.
template <bool mass>
__device__ __forceinline__ Found find_boundary(const Search& s, const Found& floor, u64 k, double& p) {
    const int floor_key = floor.boundary.key;
    const u64 floor_each = !mass || !floor.copies ? 0 : units(value_of(floor_key), s.scale, s.work.table);
    const u64 floor_mass = floor.copies * floor_each;
    Range range = {floor_key + 1, s.stats.peak, false};
    if (mass) range.first = max(range.first, key_of(s.scale.lowest));
    range.first = min(range.first, range.last);  // nothing but copies of the floor: one probe says so

    double target = static_cast<double>(k);
    u64 over = 0;  // measure above the range
    bool known = false, located = mass || !TRUNCATE;
    Range bracket = range;
    if (located) locate<mass>(s, bracket, mass ? 0.0f : static_cast<float>(k), mass ? static_cast<float>(p) : 0.0f, floor_mass * 0x1p-40f);
    else bracket.first = max(range.first, min(range.last, truncation(s, k)));
    for (u32 list = 0;; list ^= 1) {
        const Slot* parts;
        const Probe<mass> found = probe<mass>(s, bracket.first, bracket.last, known ? bracket.first - 1 : floor_key, list, parts);
        if (!known) {
            const u64 total = found.total;
            if (mass) target = fmax(p * static_cast<double>(total + floor_mass), 0.5);
            else if (total <= k) return floor;
            known = true;
            if (static_cast<double>(total) < target) {  // it lies among the copies that the floor keeps
                const u32 kept = copies_kept(total, floor_each, floor.copies, target);
                if (kept == floor.copies) return floor;
                probe<false>(s, floor_key, floor_key, floor_key - 1, list ^ 1, parts);
                return cut_copies(s, floor_key, kept, floor.copies, parts);
            }
        }
        if (static_cast<double>(found.above) >= target) {
            range.first = bracket.last + 1;
        } else if (static_cast<double>(found.through) < target) {
            range.last = bracket.first - 1;
            over = found.through;
        } else if (found.smallest == found.largest) {
            const u32 kept = copies_kept(found.above, (found.through - found.above) / found.count, found.count, target);
            return cut_copies(s, found.smallest, kept, found.count, parts);
        } else {
            bool listed = TIERED && found.count <= LISTED;
#pragma unroll
            for (int r = 0; r < CLUSTER; ++r) listed = listed && count_of(parts[r]) <= LOCAL;
            if (listed) {
                const bool whole = !mass && bracket.last == s.stats.peak;  // the list holds all that top-k keeps
                const Found result = search_list<mass>(s, found, parts, list, target, whole ? p : 1.0);
                if (whole) p = 1.0;
                return result;
            }
            range = {found.smallest, found.largest, range.by_key};
            over = found.above;
        }
        range.by_key = located;
        located = true;
        bracket = range;
        const double left = target - static_cast<double>(over);
        locate<mass>(s, bracket, static_cast<float>(mass ? left * 0x1p-40 : left), 0.0f, 0.0f);
    }
}
