// The contract's arithmetic on this chip: Philox, Gumbel noise, bounds on it, the order of (score, id).
//
// noise.py is the specification, primitives.py its Triton twin; tests hold the three together. Logarithms are in base 2:
// with E2 = E / ln 2, T * g = -T ln 2 * log2(E2) - T ln(ln 2), and the last term, one constant a row, is left out of scores.
#pragma once
#include "ptx.cuh"

constexpr float LN2 = 0.6931471805599453f;
constexpr float LOG2E = 1.4426950408889634f;
constexpr int NAN_ORDER = 0x7FFFFFFF;
constexpr int NOTHING_ORDER = static_cast<int>(0x80000000);
constexpr u32 NO_TOKEN = 0xFFFFFFFF;
constexpr u32 ALL = 0xFFFFFFFF;  // lanes of a warp

__device__ __forceinline__ float infinity() { return __int_as_float(0x7F800000); }
__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7FFFFFFF); }

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float max_or_nan(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

// ---- noise

// A row's random stream. Philox4x32-10 takes the counter (group, position low, position high, 0) and the key (seed low, seed
// high); of its first two rounds only a part depends on the group, and the rest is kept here.
struct Stream {
    u32 key_low, key_high;
    u32 into_0, into_2, word_3;  // into the words after round 2: xored into words 0 and 2, and word 3 itself
};

constexpr u32 MULTIPLIER_0 = 0xD2511F53, MULTIPLIER_1 = 0xCD9E8D57;
constexpr u32 WEYL_0 = 0x9E3779B9, WEYL_1 = 0xBB67AE85;

__device__ __forceinline__ Stream make_stream(i64 seed, i64 position) {
    const u32 key_low = static_cast<u32>(seed), key_high = static_cast<u32>(seed >> 32);
    const u64 first = static_cast<u64>(static_cast<u32>(position >> 32)) * MULTIPLIER_1;
    const u64 second = static_cast<u64>(static_cast<u32>(first >> 32) ^ static_cast<u32>(position) ^ key_low) * MULTIPLIER_0;
    return {key_low, key_high, static_cast<u32>(first) ^ (key_low + WEYL_0),
            static_cast<u32>(second >> 32) ^ (key_high + WEYL_1), static_cast<u32>(second)};
}

// The words of the four ids group, group + 8, group + 64, group + 72, for `count` groups of one row (sample 0, stream 0).
template <int count>
__device__ __forceinline__ void philox(uint4 (&words)[count], const u32 (&groups)[count], const Stream& stream) {
    u32 k0 = stream.key_low + 2 * WEYL_0, k1 = stream.key_high + 2 * WEYL_1;
#pragma unroll
    for (int i = 0; i < count; ++i) {
        const u64 first = static_cast<u64>(groups[i]) * MULTIPLIER_0;
        const u64 second = static_cast<u64>(static_cast<u32>(first >> 32) ^ stream.key_high) * MULTIPLIER_1;
        words[i] = make_uint4(static_cast<u32>(second >> 32) ^ stream.into_0, static_cast<u32>(second),
                              static_cast<u32>(first) ^ stream.into_2, stream.word_3);
    }
#pragma unroll
    for (int round = 2; round < 10; ++round) {
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const u64 p0 = static_cast<u64>(words[i].x) * MULTIPLIER_0, p1 = static_cast<u64>(words[i].z) * MULTIPLIER_1;
            words[i] = make_uint4(static_cast<u32>(p1 >> 32) ^ words[i].y ^ k0, static_cast<u32>(p1),
                                  static_cast<u32>(p0 >> 32) ^ words[i].w ^ k1, static_cast<u32>(p0));
        }
        k0 += WEYL_0;
        k1 += WEYL_1;
    }
}

// log2(E / ln 2) of the exponential that a word stands for: minus the Gumbel noise in units of ln 2.
__device__ __forceinline__ float log2_exponential(u32 word) {
    bool small = word < 0x20000000u;
    float u = (__uint2float_rn(small ? word : ~word) + 0.5f) * 2.3283064365386963e-10f;
    // 1/ln 2 * (1, 1/2, ..., 1/7): the series of -log1p(-u) / (u ln 2)
    float series = __fmaf_rn(u, 0.20609929155556614f, 0.24044917348149393f);
    series = __fmaf_rn(series, u, 0.28853900817779266f);
    series = __fmaf_rn(series, u, 0.36067376022224085f);
    series = __fmaf_rn(series, u, 0.4808983469629878f);
    series = __fmaf_rn(series, u, 0.7213475204444817f);
    series = __fmaf_rn(series, u, 1.4426950408889634f) * u;
    return log2_approx(small ? series : -log2_approx(u));
}

// ---- bounds on the noise, one byte a token
//
// E >= u, and u = (r + 1/2) / 2^32, so -log2(E2) <= 32 + log2(ln 2) - log2(r + 1/2). A code c in 0..127 bounds the last
// term by quarters: log2(r + 1/2) >= c / 4 - 1 (c counts the exponent and two mantissa bits of r; r = 0 has c = 0).
// Byte 0x80 | c, put over the upper mantissa of 0x3F000000, is the float 1 + c / 128 = v, and then
//
//     T ln 2 * -log2(E2)  <=  spread * (BOUND_OFFSET - 32 v)          spread = T ln 2
//
// The top code also stands for all larger r: bounds of small noise are loose, those of noise that wins are not.
constexpr float BOUND_OFFSET = 65.0f - 0.5287663729448977f + 0.001f;  // and room for rounding

// Codes of four words; byte w belongs to word w.
__device__ __forceinline__ u32 noise_codes(uint4 words) {
    auto code = [](u32 word) -> u32 {
        int quarters = __float_as_int(__uint2float_rz(word)) >> 21;  // 508 + 4 log2(r), piecewise linear, rounded down
        return __viaddmin_s32_relu(quarters, -504, 127);
    };
    u32 low = __byte_perm(code(words.x), code(words.y), 0x0040);
    u32 high = __byte_perm(code(words.z), code(words.w), 0x0040);
    return __byte_perm(low, high, 0x5410) | 0x80808080u;
}

// v of word w
__device__ __forceinline__ float noise_code(u32 codes, int w) {
    return __uint_as_float(__byte_perm(codes, 0x3F000000u, 0x7044 | (w << 8)));
}

// ---- the order of candidates: score descending, then id ascending; NaN above everything

__device__ __forceinline__ int score_order(float score) {
    if (score != score) return NAN_ORDER;
    int bits = __float_as_int(score + 0.0f);  // -0.0 and 0.0 are equal scores
    return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}

__device__ __forceinline__ float order_score(int order) {
    return __int_as_float(order ^ ((order >> 31) & 0x7FFFFFFF));
}

struct Candidate {
    int order;    // of the score
    u32 token;    // NO_TOKEN: none yet
    float logit;  // the transformed logit, before temperature and noise
};

__device__ __forceinline__ void keep_better(Candidate& best, const Candidate& other) {
    if (other.order > best.order || (other.order == best.order && other.token < best.token)) best = other;
}

__device__ __forceinline__ Candidate shuffle_xor(const Candidate& mine, int lanes) {
    return {__shfl_xor_sync(ALL, mine.order, lanes), __shfl_xor_sync(ALL, mine.token, lanes),
            __shfl_xor_sync(ALL, mine.logit, lanes)};
}

// ---- rows

// Finite and not negative; other rows have no token.
__device__ __forceinline__ bool possible(float temperature) { return temperature >= 0.0f && temperature < infinity(); }

__device__ __forceinline__ float row_spread(float temperature) { return possible(temperature) ? temperature * LN2 : 0.0f; }

// 1 / T in base 2, finite for every T; T = 0 has no tempered mass and any number will do.
__device__ __forceinline__ float row_inverse(float temperature) {
    return temperature > 0.0f ? fminf(LOG2E / temperature, 3.0e38f) : 1.0f;
}

__device__ __forceinline__ float score(float logit, float spread, u32 word) {
    return __fmaf_rn(-spread, log2_exponential(word), logit);
}
