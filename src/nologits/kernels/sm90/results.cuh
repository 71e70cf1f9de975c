// What is made of a row whose boundary is known: a token, or the kept logits.
#pragma once
#include "search.cuh"

#ifndef LOGPROBS
#define LOGPROBS 0
#endif

struct Drawn {
    Candidate best;
    u32 padding;
    u64 kept, total;  // masses

    __device__ __forceinline__ Drawn over_lanes() const {
        Drawn drawn = {best, 0, 0, 0};
#pragma unroll
        for (int lanes = 16; lanes; lanes >>= 1) keep_better(drawn.best, shuffle_xor(drawn.best, lanes));
#if LOGPROBS
        drawn.kept = sum_lanes(kept);
        drawn.total = sum_lanes(total);
#endif
        return drawn;
    }
    static __device__ __forceinline__ Drawn nothing() { return {{NOTHING_ORDER, NO_TOKEN, 0.0f}, 0, 0, 0}; }

    __device__ __forceinline__ void consider(float x, int id, u32 word, float spread) {
        keep_better(best, {score_order(score(x, spread, word)), static_cast<u32>(id), x});
    }
    __device__ __forceinline__ void consider(Entry entry, const Stream& stream, float spread) {
        const u32 id = id_of_entry(entry);
        uint4 words[1];
        philox(words, {id & ~72u}, stream);
        const u32 low = id & 8 ? words[0].y : words[0].x, high = id & 8 ? words[0].w : words[0].z;
        consider(value_of(key_of_entry(entry)), id, id & 64 ? high : low, spread);
    }
};

// The winner of a thread's part of the first `kept` sorted entries.
__device__ __forceinline__ Drawn draw_listed(u32 kept, const Stream& stream, float spread) {
    Drawn drawn = Drawn::nothing();
    if (threadIdx.x < kept) drawn.consider(work.sorted[threadIdx.x], stream, spread);
    return drawn;
}

// The same of what is put aside and kept.
__device__ __forceinline__ Drawn draw_gathered(const Boundary& boundary, const Stream& stream, float spread) {
    Drawn drawn = Drawn::nothing();
#pragma unroll 1
    for (int at = threadIdx.x; at < gathered(); at += THREADS) {
        const Entry entry = aside[at];
        if (boundary.keeps(key_of_entry(entry), id_of_entry(entry))) drawn.consider(entry, stream, spread);
    }
    return drawn;
}

// The same of the chunk's kept logits. A score is at most logit + spread (32 + log2 ln 2 - log2(r + 1/2)), r being the word of its noise
// (contract.cuh); logarithms are spared where that is below the best of the warp.
__device__ __noinline__ Drawn draw_chunk(const Boundary& boundary, const Stream& stream, float spread) {
    const Chunk chunk = work.chunk;
    const float above = last_value(boundary.key), equal = value_of(boundary.key);
    Drawn drawn = Drawn::nothing();
    float floor = -infinity();
    chunk.sweep_strips([&](Quad(&quads)[QUADS], int at) {
#pragma unroll 1
        for (int i = 0; i < 4; ++i) {
            const int id = chunk.id(at + i);
            float x[QUADS];
            bool keep[QUADS], any = false;
#pragma unroll
            for (int q = 0; q < QUADS; ++q) {
                x[q] = as_float(quads[q].e[0]);
                quads[q] = {{quads[q].e[1], quads[q].e[2], quads[q].e[3], quads[q].e[0]}};
                keep[q] = x[q] > above || (x[q] == equal && id + quad_offset(q) <= boundary.last_id);
                any |= keep[q];
#if LOGPROBS
                if (x[q] > -infinity()) {
                    const u64 mass = units(x[q], work.scale, work.table);
                    drawn.total += mass;
                    if (keep[q]) drawn.kept += mass;
                }
#endif
            }
            if (!any) continue;
            uint4 words[1];
            philox(words, {static_cast<u32>(id)}, stream);
            const u32 word[4] = {words[0].x, words[0].y, words[0].z, words[0].w};
#pragma unroll
            for (int q = 0; q < QUADS; ++q) {
                const float bound = fmaf(spread, 31.4722f - log2_approx(static_cast<float>(word[q]) + 0.5f), x[q]);
                if (keep[q] && bound >= floor) drawn.consider(x[q], id + quad_offset(q), word[q], spread);
            }
        }
        const int best = __reduce_max_sync(ALL, drawn.best.order);
        if (best != NOTHING_ORDER) {
            const float score = order_score(best);
            floor = score - fabsf(score) * 4.8e-7f - spread * 1e-4f;
        }
    });
    return drawn;
}

__device__ __noinline__ void write_kept(const Boundary& boundary, bool valid, Element* out, Element dropped) {
    const Chunk chunk = work.chunk;
    const float above = last_value(boundary.key), equal = value_of(boundary.key);
    chunk.sweep_quads([&](Quad& quad, int at) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float x = as_float(quad.e[i]);
            const bool keep = valid && (x > above || (x == equal && chunk.id(at + i) <= boundary.last_id));
            if (!keep) quad.e[i] = dropped;
        }
        chunk.store(out, at, quad);
    });
}

// Puts back what is kept of what is put aside, with the bits that it has in the row; `all`: the rest of it becomes `dropped`.
__device__ __forceinline__ void write_gathered(const Boundary& boundary, bool valid, bool all, Element* out, Element dropped) {
    const Chunk chunk = work.chunk;
    for (int i = threadIdx.x; i < gathered(); i += THREADS) {
        const Entry entry = aside[i];
        const bool keep = valid && boundary.keeps(key_of_entry(entry), id_of_entry(entry));
        const int at = id_of_entry(entry) - chunk.first;
        if (keep) out[at] = chunk.global[at];
        else if (all) out[at] = dropped;
    }
}
