// A tile of logits in a warpgroup's registers: its shape, where each logit lies, the rows it belongs to, and what the head and
// the request make of it (DESIGN: semantics, rule 1).
#pragma once
#include "params.cuh"
#include "request.cuh"

// What the launcher defines; the values here let the file compile by itself.
#ifndef TURNS
#define TURNS 1        // the warpgroups take turns; 0: they share tiles
#define ROWS 64        // of a block; 64 or 128, and 128 without turns
#define STAGES 8       // pieces of operands in flight
#define PAIR 2         // pieces loaded together: neighbouring 128 bytes of the same weight rows suit DRAM
#define CLUSTER 1      // row blocks that share weight tiles
#define GREEDY 0       // no noise
#define MASS 0         // masses of the tempered logits
#define RAW 0          // masses of the head's own logits
#define BIAS 0         // type of the head's bias: 0 none, 1 fp32, 2 bf16, 3 fp16
#define HEAD_SCALE 0
#define SOFTCAP 0
#define LOGIT_BIAS 0   // type of the dense logit bias
#define SPARSE_BIAS 0
#define ALLOWED 0
#define FILTER 0       // some rows have filters: their candidates are gathered
#define REST 0         // and some need the mass of all the others
#endif
#ifndef SCREEN
#define SCREEN 0       // the head and the hidden states are 8-bit: logits are intervals (screen.cu)
#endif
#ifndef PACKED
#define PACKED 0       // and up to 32 rows with both their parts take the place of 64: 8 of one part, then their 8 of the other
#endif

constexpr int TILE_V = TURNS ? 128 : 256;
constexpr int PITCH_BYTES = 128;             // of a row of a piece of operands: the width of the swizzle
constexpr int TILE_D = PITCH_BYTES / (SCREEN ? 1 : 2);
constexpr int SETS = TURNS ? ROWS / 64 : 1;  // of 64 rows, that a warpgroup has in each tile
constexpr int CONSUMER_THREADS = 256;
constexpr int PARTS_OF_ROW = SCREEN && !PACKED ? 2 : 1;  // hidden states of 8 bits come in two, each an operand of its own
constexpr int HALVES = PACKED ? 1 : 2;  // rows of a thread; packed, its second is the first's other part
constexpr int WEIGHT_BYTES = TILE_V * PITCH_BYTES;
constexpr int STAGE_BYTES = WEIGHT_BYTES + PARTS_OF_ROW * ROWS * PITCH_BYTES;
constexpr int IDS = TILE_V / 2;     // logits of a thread in a set
constexpr int SLOTS = TILE_V / 8;   // their noise groups: half of them for each of its two rows
constexpr int STAGED = SLOTS / 4;   // float4s that fit where the codes of a thread's set were
constexpr int WARP_CODES = SETS * SLOTS * 32;
constexpr int CODE_BYTES = 8 * WARP_CODES * 4;
// Masses are kept for 256 ids, so warpgroups that take turns need neighbouring tiles then; otherwise any will do, and a
// block's tiles lie apart.
constexpr bool NEIGHBOURS = TURNS && (MASS || RAW);
// Bounds exceed the scores of winners by up to 0.25 + 0.09 (quantisation) + 0.02 (E against u), in units of the spread.
constexpr float FIRST_ROUND = 0.36f;
constexpr float LOWEST = LOWEST_LOGIT;  // the floor of a row without a score: -inf never wins

// ---- where things lie in a thread's accumulators: chunk c of 8 ids holds [row][id] in registers 4c .. 4c + 3

__device__ __forceinline__ constexpr int register_of(int group, int word, int half) {
    const int chunk = (group >> 3) * 16 + ((group >> 1) & 3) * 2 + (word & 1) + 8 * (word >> 1);
    return 4 * chunk + 2 * half + (group & 1);
}

// First id of a group, relative to the tile and this lane's first id.
__device__ __forceinline__ int group_offset(int group) { return (group >> 3) * 128 + ((group >> 1) & 3) * 16 + (group & 1); }

__device__ __forceinline__ constexpr int word_offset(int word) { return (word & 1) * 8 + (word >> 1) * 64; }

// Register of the i-th id of a row, and the id's distance from this lane's first.
__device__ __forceinline__ constexpr int register_at(int i, int half) { return 4 * (i >> 1) + 2 * half + (i & 1); }

__device__ __forceinline__ constexpr int offset_at(int i) { return 8 * (i >> 1) + (i & 1); }

template <int type>  // 2: bf16, 3: fp16
__device__ __forceinline__ float float_of(unsigned short bits) {
    if constexpr (type == 2) return __uint_as_float(static_cast<u32>(bits) << 16);
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
    return y;
}

template <int type>  // and 1: fp32
__device__ __forceinline__ float load_float(const void* pointer, i64 index) {
    if constexpr (type == 1) return static_cast<const float*>(pointer)[index];
    else return float_of<type>(static_cast<const unsigned short*>(pointer)[index]);
}

__device__ __forceinline__ float tanh_of(float x) {
    const float decay = exp2_approx(fabsf(x) * (-2.0f * LOG2E));
    return copysignf(__fdividef(1.0f - decay, 1.0f + decay), x);
}

// What a consumer thread keeps of one of its two rows while it walks over the vocabulary.
struct Row {
    int row;
    bool valid;
    bool warp_valid;  // some row of the warp's set is; other warps only take part in the multiplication
    bool drawn, warp_drawn;  // here: filtered rows are drawn later, from what they keep
    bool gathered;           // its candidates are
    Stream stream;
    float spread;   // T ln 2
    float inverse;  // 1 / (T ln 2)
    float floor;    // a bound below this cannot win
    Candidate best;
#if SCREEN
    float first, second;         // what its bytes count for
    float of_error, of_length;   // and an id's two lengths, in the bound
#endif
#if FILTER
    float peak;
    bool weighs;
    double rest;  // if it `weighs`: the mass below the threshold
#endif
};

// Combines what the four lanes of a row have; all of them get the result.
template <typename T, typename Combine>
__device__ __forceinline__ T over_row(T mine, Combine combine) {
    mine = combine(mine, __shfl_xor_sync(ALL, mine, 1));
    return combine(mine, __shfl_xor_sync(ALL, mine, 2));
}

// The best score of a row turns into the floor of its bounds: logit - 32 spread v < floor cannot reach that score, with
// room for the rounding of both sides.
__device__ __forceinline__ float floor_of(int order, float spread) {
    if (order == NAN_ORDER) return infinity();
    const float score = order == NOTHING_ORDER ? LOWEST : order_score(order);
    if (score == infinity()) return score;
#if GREEDY
    return fmaxf(score, LOWEST);
#else
    return fmaxf(score - spread * BOUND_OFFSET - (fabsf(score) + 128.0f * spread) * 4.8e-7f, LOWEST);
#endif
}

__device__ __forceinline__ Row make_row(const Params& p, int warp_row, int offset) {
    const int row = warp_row + offset;
    const bool valid = row < p.B;
    const int at = valid ? row : 0;
    const float temperature = row_temperature(p, at);
    bool drawn = valid, warp_drawn = warp_row < p.B, gathered = false;
#if FILTER
    const Filters filters(request_of(p, at), vocab_of(p));
    drawn &= !filters.any();
    warp_drawn = __any_sync(ALL, drawn);
    gathered = valid && (filters.any() || p.num_top > 0);
#endif
    return {row, valid, warp_row < p.B, drawn, warp_drawn, gathered, row_stream(p, at), row_spread(temperature), row_inverse(temperature), LOWEST,
            {NOTHING_ORDER, NO_TOKEN, 0.0f},
#if SCREEN
            p.row_scales[at].x, p.row_scales[at].y, p.row_scales[at].z, p.row_scales[at].w,
#endif
#if FILTER
            -infinity(), valid && filters.mass_of_all(), 0.0
#endif
    };
}

// ---- the logits of a tile

// Work on a tile goes in pieces of 32 ids, each behind a branch on whether the vocabulary reaches it: otherwise the compiler
// would keep all pieces in flight together, and run out of registers.
constexpr int PIECE = 8;  // of a lane's ids of a row

__device__ __forceinline__ int ids_left(const Params& p, int end, int piece) { return p.V - (end - TILE_V) - 4 * piece; }

__device__ __forceinline__ bool has_id(const Params& p, int id) { return id < p.V && (!SHARD || id >= p.skip); }

// Ids that are not there become -inf.
__device__ __forceinline__ void mask_outside(float (&x)[IDS], const Params& p, int v0, int end) {
    if (end <= p.V && (!SHARD || end - TILE_V >= p.skip)) return;
#pragma unroll
    for (int i = 0; i < IDS / 2; ++i)
        if (!has_id(p, v0 + offset_at(i))) x[register_at(i, 0)] = x[register_at(i, 1)] = -infinity();
}

// The head's own post-processing.
__device__ __forceinline__ void head_transform(float (&x)[IDS], const Params& p, int v0, int end) {
#if BIAS || HEAD_SCALE || SOFTCAP
#pragma unroll
    for (int piece = 0; piece < IDS / 2; piece += PIECE) {
        if (ids_left(p, end, piece) <= 0) continue;
#pragma unroll
        for (int i = piece; i < piece + PIECE; ++i) {
#if BIAS
            const int id = v0 + offset_at(i);
            const float bias = has_id(p, id) ? load_float<BIAS>(p.bias, id) : 0.0f;
#endif
#pragma unroll
            for (int h = 0; h < HALVES; ++h) {
                float& logit = x[register_at(i, h)];
#if BIAS
                logit += bias;
#endif
#if HEAD_SCALE
                logit = __fmul_rn(logit, p.scale);  // not to be joined with an addition here and not there
#endif
#if SOFTCAP
                logit = __fmul_rn(p.softcap, tanh_of(__fdividef(logit, p.softcap)));
#endif
            }
        }
    }
#endif
    mask_outside(x, p, v0, end);
}

// What the request adds: + logit bias (dense, sparse), mask to -inf.
__device__ __forceinline__ void request_transform(float (&x)[IDS], const Params& p, const Row (&rows)[2], int v0, int end) {
#if LOGIT_BIAS
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
        const i64 base = (rows[h].valid ? rows[h].row : 0) * p.stride_logit_bias + v0;
#pragma unroll
        for (int piece = 0; piece < IDS / 2; piece += PIECE) {
            const int left = ids_left(p, end, piece);
            if (left >= 32) {
#pragma unroll
                for (int i = piece; i < piece + PIECE; ++i) x[register_at(i, h)] += load_float<LOGIT_BIAS>(p.logit_bias, base + offset_at(i));
            } else if (left > 0) {
#pragma unroll
                for (int i = piece; i < piece + PIECE; ++i)
                    if (v0 + offset_at(i) < p.V) x[register_at(i, h)] += load_float<LOGIT_BIAS>(p.logit_bias, base + offset_at(i));
            }
        }
    }
#endif
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
        if (!rows[h].valid) continue;
        [[maybe_unused]] const i64 row = rows[h].row;
#if SPARSE_BIAS
        for (int k = 0; k < p.num_biased; ++k) {
            // Lane q of a row holds the ids that are 2q or 2q + 1 modulo 8; v0 is its first.
            const i64 at = p.bias_ids[row * p.stride_bias_ids + k] - first_id(p) - v0;
            if (at < 0 || at >= TILE_V || (at & 7) > 1) continue;
            const float value = p.bias_values[row * p.stride_bias_values + k];
#pragma unroll
            for (int i = 0; i < IDS / 2; ++i)
                if (offset_at(i) == at) x[register_at(i, h)] += value;
        }
#endif
#if ALLOWED
        const int shift = (threadIdx.x & 3) * 2;
#pragma unroll
        for (int w = 0; w < TILE_V / 32; ++w) {
            const int word = (v0 >> 5) + w;
            const u32 bits = word * 32 < p.V ? p.allowed[row * p.stride_allowed + word] >> shift : 0;
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (!(bits >> offset_at(i) & 1)) x[register_at(8 * w + i, h)] = -infinity();
        }
#endif
    }
#if SHARD && (LOGIT_BIAS || SPARSE_BIAS)
    mask_outside(x, p, v0, end);  // where a bias of other shards' ids may have been added
#endif
}
