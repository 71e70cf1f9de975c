"""The contract's arithmetic inside kernels: Philox, Gumbel noise, the order of (score, id), row parameters.

Written once here, so that every kernel draws the same noise and breaks ties the same way. ``noise.py`` is the
specification; tests compare the two bit by bit (Philox) and to rounding (logarithms).

Logarithms are in base 2 throughout, because that is what the hardware computes. With E2 = E / ln 2,

    T * g = -T ln 2 * log2(E2) - T ln(ln 2)

and the last term is one constant a row: it is left out of the scores while they are compared.
"""

import triton
import triton.language as tl

LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_LN2: tl.constexpr = tl.constexpr(-0.36651292058166435)

SERIES_BELOW: tl.constexpr = tl.constexpr(0x20000000)
NAN_ORDER: tl.constexpr = tl.constexpr(0x7FFFFFFF)

ID_BITS: tl.constexpr = tl.constexpr(22)
LAST_ID: tl.constexpr = tl.constexpr((1 << 22) - 1)
LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10 on uint32 values; a 64-bit product compiles to one wide multiply, cheaper than low and high apart."""
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = p1.to(tl.uint32)
        c3 = p0.to(tl.uint32)
        k0 = k0 + tl.full([], 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full([], 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def log2(x, FAST: tl.constexpr):
    """log2 for normal x > 0. FAST: the hardware's approximation (2^-22), a third of the libdevice call's instructions."""
    if FAST:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.log2(x)


@triton.jit
def log2_exponential(words, FAST: tl.constexpr):
    """log2(E / ln 2) of the exponential that a random word stands for: minus the Gumbel noise in units of ln 2."""
    # One conversion serves both branches: below, u itself; above, 1 - u from the complement of the word.
    small = words < SERIES_BELOW
    u = (tl.where(small, words, words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    # 1/ln 2 * (1, 1/2, ..., 1/7): the series of -log1p(-u) / (u ln 2)
    series = u * 0.20609929155556614 + 0.24044917348149393
    series = series * u + 0.28853900817779266
    series = series * u + 0.36067376022224085
    series = series * u + 0.4808983469629878
    series = series * u + 0.7213475204444817
    series = (series * u + 1.4426950408889634) * u
    return log2(tl.where(small, series, -log2(u, FAST)), FAST)


@triton.jit
def order_of(x):
    """int32 with the order of the fp32 ``x``; NaN above everything."""
    # + 0.0 turns -0.0 into 0.0: the two are equal, so the smaller id has to decide.
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x != x, NAN_ORDER, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def value_of(order):
    """The fp32 behind :func:`order_of`; a NaN is NaN again."""
    order = order.to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def pack_key(score, token):
    """One int64 whose order is the contract's: score descending is larger, then id ascending; NaN above everything."""
    return (order_of(score).to(tl.int64) << 32) | (0xFFFFFFFF - token.to(tl.int64))


@triton.jit
def unpack_key(key):
    """Score and id of a packed key; the score of a NaN key is NaN again."""
    return value_of(key >> 32), 0xFFFFFFFF - (key & 0xFFFFFFFF)


@triton.jit
def pack_entry(x, token):
    """As :func:`pack_key`, in 54 bits and above 0, so that differences of two never overflow; 0 is no entry."""
    return ((order_of(x).to(tl.int64) + 0x80000000) << ID_BITS) | (token.to(tl.int64) ^ LAST_ID)


@triton.jit
def logit_of(entry):
    """The logit of an entry; NaN of 0, which is none."""
    return value_of((entry >> ID_BITS) - 0x80000000)


@triton.jit
def token_of(entry):
    """The id of an entry."""
    return ((entry & LAST_ID) ^ LAST_ID).to(tl.int32)


@triton.jit
def row_key(seed_ptr, stride_seed, position_ptr, stride_position, entropy_ptr, rows, mask, HAS_SEED: tl.constexpr,
            HAS_POSITION: tl.constexpr, HAS_ENTROPY: tl.constexpr):  # fmt: skip
    """The 64-bit Philox key and position of each row; unseeded rows (seed -1) take the call's entropy and their slot."""
    if HAS_SEED:
        seed = tl.load(seed_ptr + rows.to(tl.int64) * stride_seed, mask=mask, other=0)
        if HAS_POSITION:
            position = tl.load(position_ptr + rows.to(tl.int64) * stride_position, mask=mask, other=0)
        else:
            position = tl.zeros_like(seed)
        if HAS_ENTROPY:
            fresh = seed == -1
            seed = tl.where(fresh, tl.load(entropy_ptr), seed)
            position = tl.where(fresh, rows.to(tl.int64), position)
    else:
        seed = tl.load(entropy_ptr) + tl.zeros_like(rows).to(tl.int64)
        position = rows.to(tl.int64)
    return seed, position


@triton.jit
def low_word(x):
    return (x & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def high_word(x):
    return ((x >> 32) & 0xFFFFFFFF).to(tl.uint32)
