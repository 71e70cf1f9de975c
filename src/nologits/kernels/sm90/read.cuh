// The first sweep of a row, often the only one: statistics, the largest logits put aside, and for a top-p the mass and a histogram of
// the others.
#pragma once
#include "guess.cuh"

// How far 2^y in fp32 may be off, relative: 2^-22 of the instruction, three roundings of y, |y| 2^-24 ln 2 each, and sums of four terms.
__device__ __forceinline__ float exponent_error(float y) { return fmaf(fabsf(y), 1.3e-7f, 5.0e-7f); }

// The chunk is put aside as it is (whole), or what the guess says. `weigh`: the others' masses are wanted, with that error and the whole
// units that exact masses are rounded to. `out`, if there is one, becomes `dropped`.
template <bool weigh>
__device__ __noinline__ Statistics read_chunk(bool whole, Element* out, Element dropped, Rest& rest) {
    const Chunk chunk = work.chunk;
    const float slope = LOG2E / work.request.temperature;
    Statistics mine = Statistics::nothing();
    const Bins bins(work.guess.others);
    const float top = work.guess.top, anchor = work.guess.anchor;
    const Quad blank = {{dropped, dropped, dropped, dropped}};
    float peak = -infinity(), lowest = infinity(), below_error = 0.0f;
    double below = 0.0;
    chunk.sweep([&](const float(&x)[4], int at) {
        const float largest = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])), least = fminf(fminf(x[0], x[1]), fminf(x[2], x[3]));
        peak = fmaxf(peak, largest);
        mine.broken += (x[0] != x[0]) | (x[1] != x[1]) | (x[2] != x[2]) | (x[3] != x[3]);
        if (least > -infinity()) {
            mine.count += 4;
            lowest = fminf(lowest, least);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (!(x[i] > -infinity())) continue;
                mine.count += 1;
                lowest = fminf(lowest, x[i]);
            }
        }
        if (out) chunk.store(out, at, blank);
        if (weigh) {
            float down = 0.0f;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float y = fmaxf((x[i] - anchor) * slope, -200.0f), share = exp2_approx(y);
                const u32 bin = bins.bin_of(x[i]);
                if (x[i] < top) {
                    down += share;
                    below_error = fmaf(share, exponent_error(y), below_error);
                }
                if (bins.holds(x[i])) atomicAdd(&work.histogram[bin], 1);
            }
            below += down;
        }
        if (whole) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (at + i < chunk.count) aside[at + i] = make_entry(key_of(x[i]), chunk.id(at + i));
        } else if (largest >= top) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (!(x[i] >= top)) continue;
                const u32 place = atomicAdd(&work.gathered, 1);
                mine.gathered += 1;
                if (place < GATHERED) aside[place] = make_entry(key_of(x[i]), chunk.id(at + i));
                else mine.lost = 1;
            }
        }
    });
    if (whole && threadIdx.x == 0) mine.gathered = work.gathered = chunk.count;
    mine.peak = key_of(peak);
    mine.lowest = key_of(lowest);
    if (weigh) rest = {__double2ull_rn(below * 0x1p40), __double2ull_ru(below_error * 1.01 * 0x1p40 + chunk.terms() * 0.5)};
    return mine;
}
