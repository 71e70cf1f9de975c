"""A tile of transformed logits, as the quarters that share Philox calls.

    logits = mask(softcap(scale * (hidden . weight^T + bias)) + logit_bias)          DESIGN section 3, rule 1

The vocabulary lies along M and the batch along N: small batches then waste no tensor-core rows, and an accumulator
thread holds token ids that differ in bits 3 and 6, the four of one noise group. A tile of ``BLOCK_V`` ids is handled as
four quarters ``[BLOCK_V / 4, BLOCK_B]``: quarter w holds the ids whose word is w, row r of each belongs to one group.
Splitting an accumulator so moves no data; tiles of given logits are loaded as quarters to begin with.
"""

import triton
import triton.language as tl


@triton.jit
def group_ids(v0, BLOCK_V: tl.constexpr):
    """First id of the group behind each row of a quarter: int32 ``[BLOCK_V / 4]``, ascending."""
    r = tl.arange(0, BLOCK_V // 4)
    return v0 + (r // 32) * 128 + ((r // 8) % 4) * 16 + r % 8


@triton.jit
def split_quarters(x, BLOCK_V: tl.constexpr, BLOCK_B: tl.constexpr):
    """``[BLOCK_V, BLOCK_B]`` -> quarters of words 0, 1, 2, 3 (ids +0, +8, +64, +72)."""
    x = tl.reshape(x, [BLOCK_V // 128, 2, 4, 2, 8, BLOCK_B])
    x = tl.permute(x, [0, 2, 4, 5, 1, 3])
    even, odd = tl.split(x)
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    SHAPE: tl.constexpr = [BLOCK_V // 4, BLOCK_B]
    return tl.reshape(x0, SHAPE), tl.reshape(x1, SHAPE), tl.reshape(x2, SHAPE), tl.reshape(x3, SHAPE)


@triton.jit
def project(hidden, weight, v0, b0, V_ROWS, B, D, stride_wv, stride_wd, stride_hb, stride_hd, BLOCK_V: tl.constexpr,
            BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr, USE_TMA: tl.constexpr, UPCAST: tl.constexpr,
            PRECISION: tl.constexpr):  # fmt: skip
    """fp32 ``[BLOCK_V, BLOCK_B]`` = weight[v0:] . hidden[b0:]^T; rows beyond either tensor come out as zeros."""
    acc = tl.zeros([BLOCK_V, BLOCK_B], dtype=tl.float32)
    if USE_TMA:
        for d in range(0, D, BLOCK_D):
            w = weight.load([v0, d])
            h = hidden.load([b0, d])
            if UPCAST:  # the interpreter multiplies bf16 operands wrongly
                w, h = w.to(tl.float32), h.to(tl.float32)
            acc = tl.dot(w, tl.trans(h), acc, input_precision=PRECISION)
    else:
        offs_v = (v0 + tl.arange(0, BLOCK_V)).to(tl.int64)
        offs_b = (b0 + tl.arange(0, BLOCK_B)).to(tl.int64)
        mask_v, mask_b = offs_v < V_ROWS, offs_b < B
        for d in range(0, D, BLOCK_D):
            offs_d = (d + tl.arange(0, BLOCK_D)).to(tl.int64)
            mask_d = offs_d < D
            w = tl.load(weight + offs_v[:, None] * stride_wv + offs_d[None, :] * stride_wd,
                        mask=mask_v[:, None] & mask_d[None, :], other=0.0)  # fmt: skip
            h = tl.load(hidden + offs_d[:, None] * stride_hd + offs_b[None, :] * stride_hb,
                        mask=mask_d[:, None] & mask_b[None, :], other=0.0)  # fmt: skip
            if UPCAST:
                w, h = w.to(tl.float32), h.to(tl.float32)
            acc = tl.dot(w, h, acc, input_precision=PRECISION)
    return acc


@triton.jit
def load_logits(logits_ptr, ids, rows, V, B, stride_lb, stride_lv):
    """Given logits of one quarter, fp32 ``[len(ids), len(rows)]``."""
    offsets = rows[None, :].to(tl.int64) * stride_lb + ids[:, None].to(tl.int64) * stride_lv
    mask = (ids[:, None] < V) & (rows[None, :] < B)
    return tl.load(logits_ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def tanh(x):
    decay = tl.exp(-2.0 * tl.abs(x))
    magnitude = (1.0 - decay) / (1.0 + decay)
    return tl.where(x < 0, -magnitude, magnitude)


@triton.jit
def head_transform(x, ids, bias_ptr, stride_bias, scale, softcap, V, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr,
                   HAS_SOFTCAP: tl.constexpr):  # fmt: skip
    """The model's own post-processing: + bias, * scale, soft cap."""
    if HAS_BIAS:
        x += tl.load(bias_ptr + ids.to(tl.int64) * stride_bias, mask=ids < V, other=0.0).to(tl.float32)[:, None]
    if HAS_SCALE:
        x *= scale
    if HAS_SOFTCAP:
        x = softcap * tanh(x / softcap)
    return x


@triton.jit
def request_transform(x, ids, rows, v0, V, B, logit_bias_ptr, stride_lbb, stride_lbv, bias_ids_ptr, bias_values_ptr,
                      stride_bib, stride_bik, stride_bvb, stride_bvk, num_biased, allowed_ptr, stride_ab, stride_aw,
                      HAS_LOGIT_BIAS: tl.constexpr, HAS_SPARSE_BIAS: tl.constexpr, HAS_ALLOWED: tl.constexpr,
                      BLOCK_V: tl.constexpr):  # fmt: skip
    """What the request adds: + logit bias (dense, sparse), mask to -inf; ids beyond the vocabulary are masked too."""
    rows64 = rows.to(tl.int64)
    valid = (ids[:, None] < V) & (rows[None, :] < B)
    if HAS_LOGIT_BIAS:
        offsets = rows64[None, :] * stride_lbb + ids[:, None].to(tl.int64) * stride_lbv
        x += tl.load(logit_bias_ptr + offsets, mask=valid, other=0.0).to(tl.float32)
    if HAS_SPARSE_BIAS:
        for k in range(num_biased):
            token = tl.load(bias_ids_ptr + rows64 * stride_bib + k * stride_bik, mask=rows < B, other=-1)
            # Most entries fall in other tiles: one small reduction spares the whole tile's comparison.
            if tl.max(((token >= v0) & (token < v0 + BLOCK_V)).to(tl.int32), axis=0) > 0:
                value = tl.load(bias_values_ptr + rows64 * stride_bvb + k * stride_bvk, mask=rows < B, other=0.0).to(tl.float32)
                x = tl.where(ids[:, None].to(tl.int64) == token[None, :], x + value[None, :], x)
    if HAS_ALLOWED:
        offsets = rows64[None, :] * stride_ab + (ids[:, None] >> 5) * stride_aw
        word = tl.load(allowed_ptr + offsets, mask=valid, other=0)
        valid &= ((word >> (ids[:, None] & 31)) & 1) != 0
    return tl.where(valid, x, float("-inf"))


@triton.jit
def head_quarters(x0, x1, x2, x3, groups, bias_ptr, stride_bias, scale, softcap, V, HAS_BIAS: tl.constexpr,
                  HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr):  # fmt: skip
    """:func:`head_transform` of the four quarters."""
    x0 = head_transform(x0, groups, bias_ptr, stride_bias, scale, softcap, V, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP)
    x1 = head_transform(x1, groups + 8, bias_ptr, stride_bias, scale, softcap, V, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP)
    x2 = head_transform(x2, groups + 64, bias_ptr, stride_bias, scale, softcap, V, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP)
    x3 = head_transform(x3, groups + 72, bias_ptr, stride_bias, scale, softcap, V, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP)
    return x0, x1, x2, x3


@triton.jit
def request_quarters(x0, x1, x2, x3, groups, rows, v0, V, B, logit_bias_ptr, stride_lbb, stride_lbv, bias_ids_ptr,
                     bias_values_ptr, stride_bib, stride_bik, stride_bvb, stride_bvk, num_biased, allowed_ptr, stride_ab,
                     stride_aw, HAS_LOGIT_BIAS: tl.constexpr, HAS_SPARSE_BIAS: tl.constexpr, HAS_ALLOWED: tl.constexpr,
                     BLOCK_V: tl.constexpr):  # fmt: skip
    """:func:`request_transform` of the four quarters."""
    x0 = request_transform(x0, groups, rows, v0, V, B, logit_bias_ptr, stride_lbb, stride_lbv, bias_ids_ptr,
                           bias_values_ptr, stride_bib, stride_bik, stride_bvb, stride_bvk, num_biased, allowed_ptr,
                           stride_ab, stride_aw, HAS_LOGIT_BIAS, HAS_SPARSE_BIAS, HAS_ALLOWED, BLOCK_V)  # fmt: skip
    x1 = request_transform(x1, groups + 8, rows, v0, V, B, logit_bias_ptr, stride_lbb, stride_lbv, bias_ids_ptr,
                           bias_values_ptr, stride_bib, stride_bik, stride_bvb, stride_bvk, num_biased, allowed_ptr,
                           stride_ab, stride_aw, HAS_LOGIT_BIAS, HAS_SPARSE_BIAS, HAS_ALLOWED, BLOCK_V)  # fmt: skip
    x2 = request_transform(x2, groups + 64, rows, v0, V, B, logit_bias_ptr, stride_lbb, stride_lbv, bias_ids_ptr,
                           bias_values_ptr, stride_bib, stride_bik, stride_bvb, stride_bvk, num_biased, allowed_ptr,
                           stride_ab, stride_aw, HAS_LOGIT_BIAS, HAS_SPARSE_BIAS, HAS_ALLOWED, BLOCK_V)  # fmt: skip
    x3 = request_transform(x3, groups + 72, rows, v0, V, B, logit_bias_ptr, stride_lbb, stride_lbv, bias_ids_ptr,
                           bias_values_ptr, stride_bib, stride_bik, stride_bvb, stride_bvk, num_biased, allowed_ptr,
                           stride_ab, stride_aw, HAS_LOGIT_BIAS, HAS_SPARSE_BIAS, HAS_ALLOWED, BLOCK_V)  # fmt: skip
    return x0, x1, x2, x3
