"""The head's logits written out, for kept sets and lists, which come from blocks of whole rows.

    out[b, v] = softcap(scale * (hidden . weight^T + bias))

The same tile code as the fused draw, in the same order of operations: a row's logits have the same bits whichever kernel
makes them, so filtered and unfiltered draws of a row agree wherever the filter keeps the winner.
Grid: as the fused kernel. Output: fp32 ``[B, V]``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..sources import HiddenSource
from .arguments import on_device, operands
from .config import TileConfig
from .tile import group_ids, head_quarters, project, split_quarters


@triton.jit
def _store_quarter(x, ids, rows, out_ptr, V, B):
    offsets = rows[None, :].to(tl.int64) * V + ids[:, None]
    tl.store(out_ptr + offsets, x, mask=(ids[:, None] < V) & (rows[None, :] < B))


@triton.jit(do_not_specialize=["scale", "softcap"])
def _logits_kernel(
    # inputs, output
    hidden, weight, bias_ptr, out_ptr,
    # sizes and strides
    B, V, V_ROWS, D, num_batch_blocks, stride_wv, stride_wd, stride_hb, stride_hd, stride_bias,
    # scalars and flags
    scale, softcap, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    FROM_LOGITS: tl.constexpr, USE_TMA: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, FAST_LOG: tl.constexpr,
    # tile
    BLOCK_V: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    v0 = (pid // num_batch_blocks) * BLOCK_V
    b0 = (pid % num_batch_blocks) * BLOCK_B
    groups = group_ids(v0, BLOCK_V)
    rows = b0 + tl.arange(0, BLOCK_B)
    acc = project(hidden, weight, v0, b0, V_ROWS, B, D, stride_wv, stride_wd, stride_hb, stride_hd,
                  BLOCK_V, BLOCK_B, BLOCK_D, USE_TMA, UPCAST, PRECISION)  # fmt: skip
    x0, x1, x2, x3 = split_quarters(acc, BLOCK_V, BLOCK_B)
    x0, x1, x2, x3 = head_quarters(x0, x1, x2, x3, groups, bias_ptr, stride_bias, scale, softcap, V, HAS_BIAS, HAS_SCALE,
                                   HAS_SOFTCAP)  # fmt: skip
    _store_quarter(x0, groups, rows, out_ptr, V, B)
    _store_quarter(x1, groups + 8, rows, out_ptr, V, B)
    _store_quarter(x2, groups + 64, rows, out_ptr, V, B)
    _store_quarter(x3, groups + 72, rows, out_ptr, V, B)


def launch_logits(source: HiddenSource, config: TileConfig) -> Tensor:
    """The head's own logits of every row of ``source``, fp32 ``[B, V]``."""
    batch, vocab = source.batch, source.vocab
    out = torch.empty(batch, vocab, dtype=torch.float32, device=source.device)
    num_batch_blocks = triton.cdiv(batch, config.BLOCK_B)
    grid = (triton.cdiv(vocab, config.BLOCK_V) * num_batch_blocks,)
    with on_device(source.device):
        _logits_kernel[grid](
            **operands(source, config), out_ptr=out, B=batch, V=vocab, num_batch_blocks=num_batch_blocks,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return out
