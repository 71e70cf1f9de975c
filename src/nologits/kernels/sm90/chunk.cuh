// A block's chunk of a row of logits in memory, and how it is swept.
#pragma once
#include "cluster.cuh"

#ifndef ELEMENT
#define ELEMENT 1  // type of the logits: 1 fp32, 2 bf16, 3 fp16
#endif

#if ELEMENT == 1
typedef float Element;
#else
typedef unsigned short Element;
#endif

__device__ __forceinline__ float as_float(Element bits) {
#if ELEMENT == 1
    return bits;
#elif ELEMENT == 2
    return __uint_as_float(static_cast<u32>(bits) << 16);
#else
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
    return y;
#endif
}

__device__ __forceinline__ Element as_element(float x) {
#if ELEMENT == 1
    return x;
#else
    Element y;
#if ELEMENT == 2
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
#endif
    return y;
#endif
}

struct alignas(4 * sizeof(Element)) Quad {
    Element e[4];
};

#if ELEMENT == 1
typedef uint4 QuadBits;
#else
typedef uint2 QuadBits;
#endif

// Past the L1 cache, where a sweep would only displace itself.
__device__ __forceinline__ Quad load_cached(const Element* source) {
    Quad quad;
    *reinterpret_cast<QuadBits*>(&quad) = __ldcg(reinterpret_cast<const QuadBits*>(source));
    return quad;
}

// Written once and not read again: the cache keeps logits that are yet to be read.
__device__ __forceinline__ void store_streaming(Element* target, const Quad& quad) {
    __stcs(reinterpret_cast<QuadBits*>(target), *reinterpret_cast<const QuadBits*>(&quad));
}

// A thread's share of one step of a sweep: four quads, the ids of four groups whose noise comes together (contract.cuh).
constexpr int QUADS = 4, STRIP = 32 * 4 * QUADS, STEP = WARPS * STRIP;  // ids of a warp's step, of a block's
__device__ __forceinline__ int quad_offset(int quad) { return (quad & 1) * 8 + (quad >> 1) * 64; }
__device__ __forceinline__ int lane_offset(int lane) { return (lane & 1) * 4 + (lane >> 1 & 3) * 16 + (lane >> 3) * 128; }

struct Chunk {
    const Element* global;  // of its first id
    int first;              // id
    int count;              // ids, maybe none
    bool aligned;           // to a quad, in memory

    __device__ __forceinline__ int id(int at) const { return first + at; }
    __device__ __forceinline__ int terms() const { return (count + STEP - 1) / STEP * 4 * QUADS; }  // logits of a thread

    // Has its first bytes on their way into the cache.
    __device__ __forceinline__ void prefetch(int bytes) const {
        bytes = min(bytes, count * static_cast<int>(sizeof(Element))) & ~15;
        if ((reinterpret_cast<u64>(global) & 15) == 0 && bytes > 0) prefetch_bytes(global, bytes);
    }

    // Four neighbouring logits, -inf beyond the chunk.
    __device__ __forceinline__ Quad load(int at) const {
        if (aligned && at + 4 <= count) return load_cached(global + at);
        Quad quad;
#pragma unroll
        for (int i = 0; i < 4; ++i) quad.e[i] = at + i < count ? __ldcg(global + at + i) : as_element(-infinity());
        return quad;
    }

    __device__ __forceinline__ void store(Element* chunk_of_out, int at, const Quad& quad) const {
        Element* const target = chunk_of_out + at;
        if ((reinterpret_cast<u64>(target) & (sizeof(Quad) - 1)) == 0 && at + 4 <= count) {
            store_streaming(target, quad);
        } else {
            for (int i = 0; i < 4 && at + i < count; ++i) target[i] = quad.e[i];
        }
    }

    // Calls step(quads, at) for all quads, four at a time: quad q starts at at + quad_offset(q). The lanes of a warp come together,
    // warps come as often as they have strips.
    template <typename Step>
    __device__ __forceinline__ void sweep_strips(Step step) const {
#pragma unroll 1
        for (int strip = STRIP * (threadIdx.x >> 5); strip < count; strip += STEP) {
            const int at = strip + lane_offset(threadIdx.x & 31);
            Quad quads[QUADS];
            if (aligned && strip + STRIP <= count) {
#pragma unroll
                for (int q = 0; q < QUADS; ++q) quads[q] = load_cached(global + at + quad_offset(q));
            } else {
#pragma unroll 1
                for (int q = 0; q < QUADS; ++q) {
#pragma unroll
                    for (int r = 0; r + 1 < QUADS; ++r) quads[r] = quads[r + 1];
                    quads[QUADS - 1] = load(at + quad_offset(q));
                }
            }
            step(quads, at);
        }
    }

    // Calls step(quad, at) for all quads. The step is there once, and its quads move up: code that is read for the first time costs
    // more than it takes to move them.
    template <typename Step>
    __device__ __forceinline__ void sweep_quads(Step step) const {
        sweep_strips([&](Quad(&quads)[QUADS], int at) {
#pragma unroll 1
            for (int q = 0; q < QUADS; ++q) {
                step(quads[0], at + quad_offset(q));
#pragma unroll
                for (int r = 0; r + 1 < QUADS; ++r) quads[r] = quads[r + 1];
            }
        });
    }

    // Calls step(x, at) for all quads, as numbers.
    template <typename Step>
    __device__ __forceinline__ void sweep(Step step) const {
        sweep_quads([&](const Quad& quad, int at) {
            float x[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) x[i] = as_float(quad.e[i]);
            step(x, at);
        });
    }
};
