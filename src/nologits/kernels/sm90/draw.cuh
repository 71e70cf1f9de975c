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

// Exact scores of the ids of one slot, whose logits have been staged.
__device__ __forceinline__ void consider(Row (&rows)[2], const float4& logits, int slot, int id0) {
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

// Updates the rows' winners with a tile. Groups whose bound reaches the floor of their row are considered, each by the lane
// that holds it. A floor is known only once something has been considered, so the first round takes those near the
// largest bound, which usually settles it; later rounds take what the floor found then leaves, until it leaves nothing.
__device__ __forceinline__ void draw(const float (&x)[IDS], Row (&rows)[2], u32* codes, int id0) {
    float bounds[SLOTS];
    group_bounds(bounds, x, rows, codes);
    float target[2];
    bool hopeful = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float top = bounds[h];
#pragma unroll
        for (int slot = 2 + h; slot < SLOTS; slot += 2) top = max_or_nan(top, bounds[slot]);
        top = over_row(top, max_or_nan);
        hopeful |= rows[h].drawn && !(top < rows[h].floor);  // not less: a NaN has to be seen
        target[h] = fmaxf(rows[h].floor, top - FIRST_ROUND * rows[h].spread);
    }
    if (!__any_sync(ALL, hopeful)) return;

    float4* const staged = reinterpret_cast<float4*>(codes) + (threadIdx.x & 31);  // in place of the codes
    __syncwarp();                                                                  // which every lane has read
    u32 open = (rows[0].drawn ? 0x55555555u : 0) | (rows[1].drawn ? 0xAAAAAAAAu : 0);
    while (true) {
        u32 reached = 0;
#pragma unroll
        for (int slot = 0; slot < SLOTS; ++slot)
            if (!(bounds[slot] < target[slot & 1])) reached |= 1u << slot;
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
                if ((reached >> slot & 1) && count < STAGED) {
                    const int g = slot >> 1, h = slot & 1;
                    staged[count++ * 32] = make_float4(x[register_of(g, 0, h)], x[register_of(g, 1, h)], x[register_of(g, 2, h)],
                                                       x[register_of(g, 3, h)]);
                    taken |= 1u << slot;
                }
            }
        }
        open &= ~taken;
        bool unsettled = reached & ~taken;
        for (int i = 0; taken; ++i, taken &= taken - 1) consider(rows, staged[i * 32], __ffs(taken) - 1, id0);
        __syncwarp();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int order = over_row(rows[h].best.order, [](int a, int b) { return max(a, b); });
            rows[h].floor = floor_of(order, rows[h].spread);
            unsettled |= rows[h].drawn && rows[h].floor < target[h];
            target[h] = rows[h].floor;
        }
        // What lies below the old target lies below a floor that has reached it.
        if (!__any_sync(ALL, unsettled)) break;
    }
}
