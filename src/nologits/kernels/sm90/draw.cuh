// Noise and winners of a tile: bounds for all its tokens, exact scores for the few that could win. `id0` is the first of a lane's ids in
// the tile, counted over the whole vocabulary.
#pragma once
#include "tile.cuh"

// The bounds of two groups of one row, which share the keys of Philox's rounds; `part` counts to SLOTS / 2.
__device__ __forceinline__ void make_bounds(const Row (&rows)[2], u32* codes, int id0, int part) {
    const int slot = 4 * (part >> 1) + (part & 1);
    const u32 first = id0 + group_offset(slot >> 1);
    uint4 words[2];
    philox(words, {first, first + 1}, part & 1 ? rows[1].stream : rows[0].stream);
    codes[slot * 32 + (threadIdx.x & 31)] = noise_codes(words[0]);
    codes[(slot + 2) * 32 + (threadIdx.x & 31)] = noise_codes(words[1]);
}

// The largest bound of every group: slot 2g + h is group g of row h.
__device__ __forceinline__ void group_bounds(float (&bounds)[SLOTS], const float (&x)[IDS], const Row (&rows)[2], const u32* codes) {
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
        const int g = slot >> 1, h = slot & 1;
        if (h >= HALVES) continue;
        float bound[4];
#if !GREEDY
        const u32 code = codes[slot * 32 + (threadIdx.x & 31)];
#endif
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            bound[w] = x[register_of(g, w, h)];
#if !GREEDY
            bound[w] = __fmaf_rn(noise_code(code, w), -32.0f * rows[h].spread, bound[w]);
#endif
        }
        bounds[slot] = max_or_nan(max_or_nan(bound[0], bound[1]), max_or_nan(bound[2], bound[3]));
    }
}

#if SCREEN
// How far the logit of an id may lie below its upper bound: twice the bound on what 8 bits say of the head's logit, and what rounding
// takes.
__device__ __forceinline__ float width_of(const Params& p, float of_error, float of_length, int id, float upper) {
    const float bound = fmaf(of_error, p.id_errors[id], of_length * p.id_lengths[id]);
    return fmaf(HEAD_SCALE ? 2.0f * p.scale : 2.0f, bound, 2e-6f * fabsf(upper)) + (SOFTCAP ? 1.6e-5f * p.softcap : 0.0f);
}

// Scores of the ids of one slot, whose upper bounds have been staged: the best that is certain decides about others, and those that
// could win become candidates, if the row `gathers` them.
__device__ __forceinline__ void consider(const Params& p, Row (&rows)[2], const float4& uppers, int slot, int id0, bool gathers) {
    const bool second = slot & 1;
    const u32 group = id0 + group_offset(slot >> 1);
    Candidate best = second ? rows[1].best : rows[0].best;
    const int row = second ? rows[1].row : rows[0].row;
    const float spread = second ? rows[1].spread : rows[0].spread;
    const float of_error = second ? rows[1].of_error : rows[0].of_error, of_length = second ? rows[1].of_length : rows[0].of_length;
    const float upper[4] = {uppers.x, uppers.y, uppers.z, uppers.w};
    u32 word[4] = {};
#if !GREEDY
    uint4 words[1];
    philox(words, {group}, second ? rows[1].stream : rows[0].stream);
    word[0] = words[0].x, word[1] = words[0].y, word[2] = words[0].z, word[3] = words[0].w;
#endif
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        if (upper[w] == -infinity()) continue;
        const u32 id = group + word_offset(w);
        const float lower = upper[w] - width_of(p, of_error, of_length, id - first_id(p), upper[w]);
        const float most = GREEDY ? upper[w] : score(upper[w], spread, word[w]), least = GREEDY ? lower : score(lower, spread, word[w]);
        if (gathers && score_order(most) >= best.order) {
            const u32 at = atomicAdd(&p.gathered[row], 1u);
            if (at < CAPACITY) p.entries[static_cast<i64>(row) * CAPACITY + at] = make_entry(score_order(most), id);
        }
        if (fabsf(least) < infinity()) keep_better(best, {score_order(least), id, lower});  // what is no number is not certain
    }
    if (second) rows[1].best = best;
    else rows[0].best = best;
}
#else
// Exact scores of the ids of one slot, whose logits have been staged.
__device__ __forceinline__ void consider(const Params&, Row (&rows)[2], const float4& logits, int slot, int id0, bool) {
    const bool second = slot & 1;
    const u32 group = id0 + group_offset(slot >> 1);
    Candidate best = second ? rows[1].best : rows[0].best;
    const float logit[4] = {logits.x, logits.y, logits.z, logits.w};
#if !GREEDY
    const float spread = second ? rows[1].spread : rows[0].spread;
    uint4 words[1];
    philox(words, {group}, second ? rows[1].stream : rows[0].stream);
    const u32 word[4] = {words[0].x, words[0].y, words[0].z, words[0].w};
#endif
#pragma unroll
    for (int w = 0; w < 4; ++w) {
#if GREEDY
        const float value = logit[w];
#else
        const float value = score(logit[w], spread, word[w]);
#endif
        keep_better(best, {score_order(value), group + word_offset(w), logit[w]});
    }
    if (second) rows[1].best = best;
    else rows[0].best = best;
}
#endif

// Updates the rows' winners with a tile. Groups whose bound reaches the floor of their row are considered, each by the lane
// that holds it. A floor is known only once something has been considered, so the first round takes those near the
// largest bound, which usually settles it; later rounds take what the floor found then leaves, until it leaves nothing.
// `staging` may lie where the codes do, which are gone then.
__device__ __forceinline__ void draw(const float (&x)[IDS], const Params& p, Row (&rows)[2], const u32* codes, u32* staging, int id0, bool gathers = true) {
    float bounds[SLOTS];
    group_bounds(bounds, x, rows, codes);
    float target[2];
    bool hopeful = false;
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
        float top = bounds[h];
#pragma unroll
        for (int slot = 2 + h; slot < SLOTS; slot += 2) top = max_or_nan(top, bounds[slot]);
        top = over_row(top, max_or_nan);
        hopeful |= rows[h].drawn && !(top < rows[h].floor);  // not less: a NaN has to be seen
        target[h] = fmaxf(rows[h].floor, top - FIRST_ROUND * rows[h].spread);
    }
    if (!__any_sync(ALL, hopeful)) return;

    float4* const staged = reinterpret_cast<float4*>(staging) + (threadIdx.x & 31);
    __syncwarp();  // every lane has read the codes
    u32 open = (rows[0].drawn ? 0x55555555u : 0) | (rows[1].drawn ? 0xAAAAAAAAu : 0);
    while (true) {
        u32 reached = 0;
#pragma unroll
        for (int slot = 0; slot < SLOTS; ++slot)
            if ((slot & 1) < HALVES && !(bounds[slot] < target[slot & 1])) reached |= 1u << slot;
        reached &= open;

        // Registers cannot be indexed by a number known at run time: the logits go through shared memory.
        const u32 wanted = __reduce_or_sync(ALL, reached);
        u32 taken = 0;
        int count = 0;
#pragma unroll
        for (int chunk = 0; chunk < SLOTS; chunk += 4) {
            if (!(wanted >> chunk & 15)) continue;  // the same in all lanes
#pragma unroll
            for (int slot = chunk; slot < chunk + 4; ++slot) {
                if ((slot & 1) < HALVES && (reached >> slot & 1) && count < STAGED) {
                    const int g = slot >> 1, h = slot & 1;
                    staged[count++ * 32] = make_float4(x[register_of(g, 0, h)], x[register_of(g, 1, h)], x[register_of(g, 2, h)],
                                                       x[register_of(g, 3, h)]);
                    taken |= 1u << slot;
                }
            }
        }
        open &= ~taken;
        bool unsettled = reached & ~taken;
        for (int i = 0; taken; ++i, taken &= taken - 1) consider(p, rows, staged[i * 32], __ffs(taken) - 1, id0, gathers);
        __syncwarp();
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
            const int order = over_row(rows[h].best.order, [](int a, int b) { return max(a, b); });
            rows[h].floor = floor_of(order, rows[h].spread);
            unsettled |= rows[h].drawn && rows[h].floor < target[h];
            target[h] = rows[h].floor;
        }
        // What lies below the old target lies below a floor that has reached it.
        if (!__any_sync(ALL, unsettled)) break;
    }
}
