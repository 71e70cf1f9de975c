// A block's chunk of a row of logits: brought on chip once, then swept as often as needed.
#pragma once
#include "cluster.cuh"

#ifndef ELEMENT
#define ELEMENT 1   // type of the logits: 1 fp32, 2 bf16, 3 fp16
#define RESIDENT 1  // chunks fit in shared memory; 0: every sweep reads them from memory again
#endif

#if ELEMENT == 1
typedef float Element;
#else
typedef unsigned short Element;
#endif

constexpr int PIECE = 4 * THREADS;  // ids of one step of a sweep, four a thread; a bulk copy brings one piece
constexpr int MAX_PIECES = 128;
#ifndef UNDERWAY
#define UNDERWAY (RESIDENT ? 1 : 4)  // pieces that a sweep asks for together
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

// Past the L1 cache, where a sweep would only displace itself.
__device__ __forceinline__ Quad load_cached(const Element* source) {
    Quad quad;
#if ELEMENT == 1
    *reinterpret_cast<uint4*>(&quad) = __ldcg(reinterpret_cast<const uint4*>(source));
#else
    *reinterpret_cast<uint2*>(&quad) = __ldcg(reinterpret_cast<const uint2*>(source));
#endif
    return quad;
}

// Written once and not read again: the cache keeps the rows that are yet to come.
__device__ __forceinline__ void store_streaming(Element* target, const Quad& quad) {
#if ELEMENT == 1
    __stcs(reinterpret_cast<uint4*>(target), *reinterpret_cast<const uint4*>(&quad));
#else
    __stcs(reinterpret_cast<uint2*>(target), *reinterpret_cast<const uint2*>(&quad));
#endif
}

struct Chunk {
    const Element* global;  // of its first id
    Element* shared;        // whole pieces, -inf beyond the chunk; only if resident
    u64* barriers;          // one a piece
    int first;              // id
    int count;              // ids, maybe none
    bool aligned;           // to 16 bytes in memory

    __device__ __forceinline__ int steps() const { return (count + PIECE - 1) / PIECE; }

    __device__ __forceinline__ float load_one(int at) const {
#if RESIDENT
        return as_float(shared[at]);
#else
        return at < count ? as_float(__ldcg(global + at)) : -infinity();
#endif
    }

    // Four neighbouring logits.
    __device__ __forceinline__ Quad load(int at) const {
#if RESIDENT
        return *reinterpret_cast<const Quad*>(shared + at);
#else
        if (aligned && at + 4 <= count) return load_cached(global + at);
        Quad quad;
#pragma unroll
        for (int i = 0; i < 4; ++i) quad.e[i] = at + i < count ? __ldcg(global + at + i) : as_element(-infinity());
        return quad;
#endif
    }

    // Calls step(x, at) for all quads, every thread as often as the others.
    template <typename Step>
    __device__ __forceinline__ void sweep(Step step) const {
        sweep_pieces(steps(), [](int) {}, step);
    }

    // The first sweeps, piece by piece as they arrive, of the first `pieces` of them.
    template <typename Step>
    __device__ __forceinline__ void sweep_arriving(int pieces, Step step) const {
        auto arrived = [&](int piece) {
#if RESIDENT
            if (aligned) barrier_wait(shared_address(barriers + piece), 0);
#endif
        };
        sweep_pieces(min(pieces, steps()), arrived, step);
    }

    // Starts bringing it on chip. Threads need a barrier before `sweep_arriving`.
    __device__ __forceinline__ void fetch() {
#if RESIDENT
        constexpr int ALIGNED = 16 / sizeof(Element);
        const int copied = aligned ? count / ALIGNED * ALIGNED : 0;
        if (aligned && threadIdx.x < 32) {
            for (int s = threadIdx.x; s < steps(); s += 32) barrier_init(shared_address(barriers + s), 1);
            barrier_init_fence();
            for (int s = threadIdx.x; s < steps(); s += 32) {
                const int at = s * PIECE, bytes = max(0, min(copied - at, PIECE)) * static_cast<int>(sizeof(Element));
                barrier_expect_bytes(shared_address(barriers + s), bytes);
                if (bytes) copy_bytes_once(shared_address(shared + at), global + at, shared_address(barriers + s), bytes);
            }
        }
        for (int at = copied + threadIdx.x; at < steps() * PIECE; at += THREADS) shared[at] = at < count ? global[at] : as_element(-infinity());
#endif
    }

  private:
    template <typename Before, typename Step>
    __device__ __forceinline__ void sweep_pieces(int pieces, Before before, Step step) const {
#pragma unroll 1
        for (int piece = 0; piece < pieces; piece += UNDERWAY) {
            Quad quads[UNDERWAY];
#pragma unroll
            for (int u = 0; u < UNDERWAY; ++u) {
                before(piece + u);
                quads[u] = load((piece + u) * PIECE + 4 * threadIdx.x);
            }
#pragma unroll
            for (int u = 0; u < UNDERWAY; ++u) {
                if (UNDERWAY > 1 && piece + u >= pieces) break;
                float x[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) x[i] = as_float(quads[u].e[i]);
                step(x, (piece + u) * PIECE + 4 * static_cast<int>(threadIdx.x));
            }
        }
    }
};

// Brings bytes of another row into the L2 cache, for the blocks that will want them next.
__device__ __forceinline__ void prefetch_chunk(const Element* global, int count) {
    constexpr int ALIGNED = 16 / sizeof(Element);
    if ((reinterpret_cast<u64>(global) & 15) == 0 && count >= ALIGNED) prefetch_bytes(global, count / ALIGNED * 16);
}
