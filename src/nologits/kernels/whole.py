"""Whole rows of logits, for those whose candidates did not settle what they keep (``choose.py``).

The same tile code as the fused draw, in the same order of operations: a row's logits have the same bits whichever kernel
makes them. Which rows are open, only the device knows: programs beyond their number return at once.

Grid: (vocabulary tiles * blocks of slots). Outputs: entries int64 ``[slots, V]``, and the head's own logits fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..params import RowParams
from ..sources import HiddenSource
from .arguments import on_device, operands, request_arguments
from .config import TileConfig
from .primitives import pack_entry
from .tile import group_ids, head_quarters, project, request_quarters, split_quarters


@triton.jit
def _store_entries(x, raw, ids, slots, rows, V, B, entry_ptr, raw_entry_ptr, RAW: tl.constexpr):
    to = slots[None, :].to(tl.int64) * V + ids[:, None]
    mask = (ids[:, None] < V) & (rows[None, :] < B)
    tl.store(entry_ptr + to, pack_entry(x, ids[:, None]), mask=mask)
    if RAW:
        tl.store(raw_entry_ptr + to, raw, mask=mask)


@triton.jit(do_not_specialize=["num_biased", "scale", "softcap", "first"])
def _whole_rows_kernel(
    # inputs, outputs
    hidden, weight, bias_ptr, logit_bias_ptr, bias_ids_ptr, bias_values_ptr, allowed_ptr, open_ptr, num_open_ptr,
    entry_ptr, raw_entry_ptr,
    # sizes
    B, V, V_ROWS, D, SLOTS, first, num_slot_blocks, num_biased,
    # strides
    stride_wv, stride_wd, stride_hb, stride_hd, stride_bias, stride_lbb, stride_lbv, stride_bib, stride_bik, stride_bvb,
    stride_bvk, stride_ab, stride_aw,
    # scalars and flags
    scale, softcap, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_LOGIT_BIAS: tl.constexpr, HAS_SPARSE_BIAS: tl.constexpr, HAS_ALLOWED: tl.constexpr, RAW: tl.constexpr,
    FROM_LOGITS: tl.constexpr, USE_TMA: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, FAST_LOG: tl.constexpr,
    # tile
    BLOCK_V: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    v0 = (pid // num_slot_blocks) * BLOCK_V
    b0 = (pid % num_slot_blocks) * BLOCK_B
    num_open = tl.load(num_open_ptr) - first
    if b0 >= num_open:
        return
    groups = group_ids(v0, BLOCK_V)
    slots = b0 + tl.arange(0, BLOCK_B)
    rows = tl.load(open_ptr + first + slots, mask=(slots < SLOTS) & (slots < num_open), other=B)
    acc = project(hidden, weight, v0, b0, V_ROWS, SLOTS, D, stride_wv, stride_wd, stride_hb, stride_hd,
                  BLOCK_V, BLOCK_B, BLOCK_D, USE_TMA, UPCAST, PRECISION)  # fmt: skip
    x0, x1, x2, x3 = split_quarters(acc, BLOCK_V, BLOCK_B)
    x0, x1, x2, x3 = head_quarters(x0, x1, x2, x3, groups, bias_ptr, stride_bias, scale, softcap, V, HAS_BIAS, HAS_SCALE,
                                   HAS_SOFTCAP)  # fmt: skip
    r0, r1, r2, r3 = x0, x1, x2, x3
    x0, x1, x2, x3 = request_quarters(x0, x1, x2, x3, groups, rows, v0, V, B, logit_bias_ptr, stride_lbb, stride_lbv,
                                      bias_ids_ptr, bias_values_ptr, stride_bib, stride_bik, stride_bvb, stride_bvk,
                                      num_biased, allowed_ptr, stride_ab, stride_aw, HAS_LOGIT_BIAS, HAS_SPARSE_BIAS,
                                      HAS_ALLOWED, BLOCK_V)  # fmt: skip
    _store_entries(x0, r0, groups, slots, rows, V, B, entry_ptr, raw_entry_ptr, RAW)
    _store_entries(x1, r1, groups + 8, slots, rows, V, B, entry_ptr, raw_entry_ptr, RAW)
    _store_entries(x2, r2, groups + 64, slots, rows, V, B, entry_ptr, raw_entry_ptr, RAW)
    _store_entries(x3, r3, groups + 72, slots, rows, V, B, entry_ptr, raw_entry_ptr, RAW)


def launch_whole_rows(
    source: HiddenSource, rows: RowParams, open_rows: Tensor, num_open: Tensor, first: int, entries: Tensor, raw: Tensor | None,
    config: TileConfig,
) -> None:  # fmt: skip
    """Makes the logits of the open rows ``first ..``, as many as ``entries`` has room for.

    Args:
        source: the head, and the hidden states of ``open_rows``.
        rows: the request, of all rows.
        open_rows: int32 ``[B]``; the first ``num_open`` (int32 ``[1]``) are ids of open rows, the others any ids of rows.
        num_open: how many rows are open.
        first: the first to be made.
        entries: int64 ``[slots, V]``, written for the open rows among them.
        raw: fp32 ``[slots, V]``, the head's own logits, or ``None``.
        config: the tile.
    """
    slots, vocab = entries.shape
    some = source.rows(first, first + slots)
    num_slot_blocks = triton.cdiv(some.batch, config.BLOCK_B)
    grid = (triton.cdiv(vocab, config.BLOCK_V) * num_slot_blocks,)
    with on_device(source.device):
        _whole_rows_kernel[grid](
            **operands(some, config), **request_arguments(rows),
            open_ptr=open_rows, num_open_ptr=num_open, entry_ptr=entries, raw_entry_ptr=raw,
            B=len(open_rows), V=vocab, SLOTS=some.batch, first=first, num_slot_blocks=num_slot_blocks, RAW=raw is not None,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
