"""From which logit on a row's logits are candidates of its filters, before the row is known (Qrita's truncation).

A pilot multiplies a few tiles, spread over the vocabulary, and leaves the largest logit of each group of four ids. Of n such
groups out of V / 4, about n (1 - (1 - w / V)^4) hold one of a row's w largest logits; the pilot's logit of that rank is the
threshold of a row that wants w candidates. A min-p also has a bound: no logit below ln(min-p) T under the pilot's largest is
kept. A threshold decides how much there is to choose from. What is kept is settled later, with a certificate (``choose.py``).

Grid: of the pilot (pilot tiles * batch blocks), output fp32 ``[B, groups]``; of the thresholds (B), output fp32 ``[B]``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..params import RowParams
from ..sources import HiddenSource
from .arguments import on_device, operands, request_arguments, temperature_arguments
from .config import TileConfig
from .primitives import LOWEST, order_of, value_of
from .tile import group_ids, head_quarters, project, request_quarters, split_quarters

CAPACITY = 4096
"""Candidates of a row that there is room for. Rows of so many ids are candidates whole, and need no pilot."""

WANTED = 1024
"""Candidates of a row, more if its top-k is large: nuclei of text have tens of tokens, and 18% more or less are no matter."""

ROOM = 2800
"""The most that a threshold aims at: a larger top-k, or a min-p, which may keep any number."""

PILOT_IDS = 4096
"""Ids of the pilot: at V = 131,072 the 32nd of its 1,024 groups is the threshold, to within 18% of the candidates wanted."""

PILOT_SHARE = 8
"""And at most one id in so many: the pilot reads its part of the weight again."""


@triton.jit(do_not_specialize=["num_biased", "scale", "softcap"])
def _pilot_kernel(
    # inputs, output
    hidden, weight, bias_ptr, logit_bias_ptr, bias_ids_ptr, bias_values_ptr, allowed_ptr, peak_ptr,
    # sizes
    B, V, V_ROWS, D, num_tiles, num_pilot, num_batch_blocks, num_biased,
    # strides
    stride_wv, stride_wd, stride_hb, stride_hd, stride_bias, stride_lbb, stride_lbv, stride_bib, stride_bik, stride_bvb,
    stride_bvk, stride_ab, stride_aw,
    # scalars and flags
    scale, softcap, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_LOGIT_BIAS: tl.constexpr, HAS_SPARSE_BIAS: tl.constexpr, HAS_ALLOWED: tl.constexpr,
    FROM_LOGITS: tl.constexpr, USE_TMA: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, FAST_LOG: tl.constexpr,
    # tile
    BLOCK_V: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    number = pid // num_batch_blocks
    v0 = (number * num_tiles // num_pilot) * BLOCK_V
    b0 = (pid % num_batch_blocks) * BLOCK_B
    groups = group_ids(v0, BLOCK_V)
    rows = b0 + tl.arange(0, BLOCK_B)
    acc = project(hidden, weight, v0, b0, V_ROWS, B, D, stride_wv, stride_wd, stride_hb, stride_hd,
                  BLOCK_V, BLOCK_B, BLOCK_D, USE_TMA, UPCAST, PRECISION)  # fmt: skip
    x0, x1, x2, x3 = split_quarters(acc, BLOCK_V, BLOCK_B)
    x0, x1, x2, x3 = head_quarters(x0, x1, x2, x3, groups, bias_ptr, stride_bias, scale, softcap, V, HAS_BIAS, HAS_SCALE,
                                   HAS_SOFTCAP)  # fmt: skip
    x0, x1, x2, x3 = request_quarters(x0, x1, x2, x3, groups, rows, v0, V, B, logit_bias_ptr, stride_lbb, stride_lbv,
                                      bias_ids_ptr, bias_values_ptr, stride_bib, stride_bik, stride_bvb, stride_bvk,
                                      num_biased, allowed_ptr, stride_ab, stride_aw, HAS_LOGIT_BIAS, HAS_SPARSE_BIAS,
                                      HAS_ALLOWED, BLOCK_V)  # fmt: skip
    peak = tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))
    row = rows[None, :].to(tl.int64) * num_pilot + number
    place = tl.arange(0, BLOCK_V // 4)[:, None]
    tl.store(peak_ptr + row * (BLOCK_V // 4) + place, peak, mask=rows[None, :] < B)


@triton.jit(do_not_specialize=["temperature_value"])
def _threshold_kernel(
    # inputs, output
    peak_ptr, top_k_ptr, top_p_ptr, min_p_ptr, temperature_ptr, threshold_ptr,
    # sizes, strides, scalars
    V, num_groups, wanted, room, stride_top_k, stride_top_p, stride_min_p, stride_temperature, temperature_value,
    # flags
    HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, HAS_MIN_P: tl.constexpr, HAS_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if HAS_TEMPERATURE:
        temperature = tl.load(temperature_ptr + row * stride_temperature)
    else:
        temperature = temperature_value
    offs = tl.arange(0, BLOCK)
    peaks = tl.load(peak_ptr + row * num_groups + offs, mask=offs < num_groups, other=float("-inf"))
    orders = order_of(peaks).to(tl.int64)

    # What the row's filters want
    share = tl.minimum(wanted, room) * 1.0 / V
    filtered = False
    if HAS_TOP_P:
        filtered |= tl.load(top_p_ptr + row * stride_top_p) < 1.0
    if HAS_MIN_P:
        min_p = tl.load(min_p_ptr + row * stride_min_p).to(tl.float32)
        filtered |= min_p > 0.0
        share = tl.where(min_p > 0.0, room * 1.0 / V, share)
    if HAS_TOP_K:
        top_k = tl.load(top_k_ptr + row * stride_top_k).to(tl.int64)
        by_rank = (top_k > 0) & (top_k < V)
        filtered |= by_rank
        most = tl.minimum(tl.maximum(tl.minimum(2 * top_k, room), wanted), room)
        share = tl.where(by_rank, most.to(tl.float32) / V, share)

    # The pilot's logit of that rank, rounded down
    others = (1.0 - share) * (1.0 - share)
    rank = tl.maximum((num_groups * (1.0 - others * others)).to(tl.int32), 1)
    low = tl.min(orders, axis=0)
    high = tl.max(orders, axis=0) + 1
    while high - low > 4096:
        middle = (low + high) >> 1
        enough = tl.sum((orders >= middle).to(tl.int32), axis=0) >= rank
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    threshold = value_of(low)
    if HAS_MIN_P:
        peak = value_of(tl.max(orders, axis=0))
        reach = temperature * tl.log(tl.maximum(min_p, 1e-38))
        bound = peak + reach - (tl.abs(peak) + tl.abs(reach)) * 1e-5
        threshold = tl.where((min_p > 1e-37) & (bound > threshold), bound, threshold)
    # The comparisons fail for NaN: from the lowest logit on, then.
    threshold = tl.where(threshold > LOWEST, threshold, LOWEST)
    tl.store(threshold_ptr + row, tl.where(filtered & (temperature > 0), threshold, float("inf")))


def launch_thresholds(source: HiddenSource, rows: RowParams, filters: dict[str, Any], config: TileConfig) -> Tensor:
    """Each row's threshold, fp32 ``[B]``; +inf for rows that have no filter, or are greedy.

    ``filters`` are those of ``rows``, as :func:`nologits.kernels.arguments.filter_columns` has them.
    """
    batch, vocab, device = source.batch, source.vocab, source.device
    if vocab <= CAPACITY:
        return torch.full((batch,), LOWEST.value, device=device)
    num_tiles, num_batch_blocks = triton.cdiv(vocab, config.BLOCK_V), triton.cdiv(batch, config.BLOCK_B)
    num_pilot = max(1, min(PILOT_IDS, vocab // PILOT_SHARE) // config.BLOCK_V)
    num_groups = num_pilot * config.BLOCK_V // 4
    peaks = torch.empty(batch, num_groups, device=device)
    thresholds = torch.empty(batch, device=device)
    with on_device(device):
        _pilot_kernel[(num_pilot * num_batch_blocks,)](
            **operands(source, config), **request_arguments(rows), peak_ptr=peaks,
            B=batch, V=vocab, num_tiles=num_tiles, num_pilot=num_pilot, num_batch_blocks=num_batch_blocks,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
        _threshold_kernel[(batch,)](
            **filters, **temperature_arguments(rows), peak_ptr=peaks, threshold_ptr=thresholds,
            V=vocab, num_groups=num_groups, wanted=WANTED, room=ROOM,
            BLOCK=triton.next_power_of_2(num_groups), num_warps=1,
        )  # fmt: skip
    return thresholds
