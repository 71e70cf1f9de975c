"""What the filters keep of a row, found among entries (logit, id), and the draw from it.

Filters keep a prefix of the contract's order, so a kept set is the smallest entry in it. Min-p's is that of the kept shares;
top-k's and top-p's is the largest entry from which on the entries' number, or their mass in whole units of 2^-40 of the row's
largest, reaches a target. Sums of whole numbers and maxima do not depend on the order of entries, which is any.

The entries are a row's candidates, all its logits from a threshold on (``threshold.py``), or the whole row. Candidates
settle what is kept if there was room for them and

    min-p      its bound lies above the threshold
    top-k      there are at least k
    top-p      (of all the row) their mass reaches the share p of it, and the boundary lies beyond the doubt about the mass of
               the others

Other rows are left open. The whole rows of those are made, and settled by the same kernel.

Grid: a row (of whole rows: a slot) each. Writes tokens int64 and log-probabilities fp32 ``[B, S]`` of filtered rows over those
that the merge left there; ids of open rows int32 ``[B]``, and their number.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..params import RowParams
from ..types import Samples
from .arguments import fast_log, noise_arguments, on_device
from .categorical import Gathered, Tiles
from .merge import raw_log_total
from .primitives import (
    LN2,
    LOWEST,
    high_word,
    log2_exponential,
    logit_of,
    low_word,
    pack_key,
    philox,
    row_key,
    token_of,
    unpack_key,
)

ARITY: tl.constexpr = tl.constexpr(8)
"""Pivots of a pass: three bits of an entry's 54, where sums for 16 would double the registers."""

BLOCK_CANDIDATES, WARPS_CANDIDATES = 1024, 8
BLOCK_WHOLE, WARPS_WHOLE = 2048, 16
BLOCK_T = 512

UNIT: tl.constexpr = tl.constexpr(2.0**40)
TO_WHOLE: tl.constexpr = tl.constexpr(2.0**52)
"""Added and subtracted, rounds a smaller fp64 to a whole number as IEEE does."""

ULP: tl.constexpr = tl.constexpr(2.0**-24)
REST_ERROR: tl.constexpr = tl.constexpr(8.0)
"""Of a rest, in ULP: 4 of the exponential, 3 of the sum of four terms; further sums are in fp64."""

REST_ERROR_BY_OCTAVE: tl.constexpr = tl.constexpr(3.0)
"""Of its terms, for each octave below the threshold: four roundings (the difference, 1 / ln 2 and its quotient by the
temperature, the product), times ln 2."""


@triton.jit
def _entries_at(entry_ptr, start, n, BLOCK: tl.constexpr):
    offs = start + tl.arange(0, BLOCK)
    return tl.load(entry_ptr + offs, mask=offs < n, other=0)


@triton.jit
def _weights_at(unit_ptr, start, n, BLOCK: tl.constexpr, BY_MASS: tl.constexpr):
    """The units of some entries; or 1 for each."""
    offs = start + tl.arange(0, BLOCK)
    if BY_MASS:
        return tl.load(unit_ptr + offs, mask=offs < n, other=0)
    else:
        return tl.full([BLOCK], 1, tl.int64)


@triton.jit
def _last_reaching(entry_ptr, unit_ptr, n, low, high, target, BLOCK: tl.constexpr, BY_MASS: tl.constexpr):
    """The largest entry in ``low .. high`` from which on the weights reach ``target``; from ``low`` on they do."""
    high += 1
    while high - low > 1:
        step = (high - low + (ARITY - 1)) // ARITY
        pivots = low + step * tl.arange(0, ARITY)
        total = tl.zeros([ARITY], tl.int64)
        for start in range(0, n, BLOCK):
            entry = _entries_at(entry_ptr, start, n, BLOCK)
            weight = _weights_at(unit_ptr, start, n, BLOCK, BY_MASS)
            total += tl.sum(tl.where(entry[:, None] >= pivots[None, :], weight[:, None], 0), axis=0)
        reaching = tl.maximum(tl.sum((total.to(tl.float64) >= target).to(tl.int64), axis=0), 1)
        high = tl.minimum(high, low + step * reaching)
        low += step * (reaching - 1)
    return low


@triton.jit
def _mass_from(entry_ptr, unit_ptr, n, first, BLOCK: tl.constexpr):
    """The units of the entries from ``first`` on."""
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, n, BLOCK):
        entry = _entries_at(entry_ptr, start, n, BLOCK)
        total += tl.where(entry >= first, _weights_at(unit_ptr, start, n, BLOCK, True), 0)
    return tl.sum(total, axis=0)


@triton.jit
def _rest_of(rest_ptr, num_tiles, BLOCK_T: tl.constexpr):
    """The mass below the threshold, that of the threshold being 1."""
    total = tl.zeros([BLOCK_T], tl.float64)
    for t in range(0, num_tiles, BLOCK_T):
        offs = t + tl.arange(0, BLOCK_T)
        total += tl.load(rest_ptr + offs, mask=offs < num_tiles, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _shares(x, peak, temperature):
    """exp((x - peak) / T) in fp64; 1 for the peak, also where it is infinite."""
    share = tl.exp((x.to(tl.float64) - peak.to(tl.float64)) / temperature)
    return tl.where(x == peak, 1.0, tl.where(x > float("-inf"), share, 0.0))


@triton.jit
def _draw(entry_ptr, n, last, seed, position, sample, temperature, BLOCK: tl.constexpr, FAST_LOG: tl.constexpr):
    """The token with the best score among the entries down to ``last``: those of the unfiltered draw (``categorical.py``)."""
    spread = temperature * LN2
    best = tl.full([BLOCK], -9223372036854775808, tl.int64)
    for start in range(0, n, BLOCK):
        entry = _entries_at(entry_ptr, start, n, BLOCK)
        token = token_of(entry)
        group = (token & ~72).to(tl.uint32)
        zero = tl.zeros_like(group)
        w0, w1, w2, w3 = philox(group, low_word(position) + zero, high_word(position) + zero,
                                (tl.zeros_like(token) + sample).to(tl.uint32), low_word(seed) + zero,
                                high_word(seed) + zero)  # fmt: skip
        low_bit, high_bit = (token & 8) != 0, (token & 64) != 0
        word = tl.where(high_bit, tl.where(low_bit, w3, w2), tl.where(low_bit, w1, w0))
        score = logit_of(entry) - spread * log2_exponential(word, FAST_LOG)
        best = tl.maximum(best, tl.where(entry >= last, pack_key(score, token), -9223372036854775808))
    _, token = unpack_key(tl.max(best, axis=0))
    return token


@triton.jit
def _picked(token, entry_ptr, value_ptr, n, BLOCK: tl.constexpr, RAW: tl.constexpr):
    """The logit of ``token``, or the head's own, which ``value_ptr`` has."""
    picked = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        entry = _entries_at(entry_ptr, start, n, BLOCK)
        x = logit_of(entry)
        if RAW:
            offs = start + tl.arange(0, BLOCK)
            x = tl.load(value_ptr + offs, mask=offs < n, other=0.0)
        picked += tl.where((entry > 0) & (token_of(entry) == token), x, 0.0)
    return tl.sum(picked, axis=0)


@triton.jit(do_not_specialize=["temperature_value", "first"])
def _choose_kernel(
    # inputs
    entry_ptr, raw_entry_ptr, threshold_ptr, gathered_ptr, rest_ptr, raw_max_ptr, raw_mass_ptr,
    top_k_ptr, top_p_ptr, min_p_ptr, temperature_ptr, seed_ptr, position_ptr, entropy_ptr,
    # outputs
    unit_ptr, token_ptr, logprob_ptr, raw_logprob_ptr, open_ptr, num_open_ptr, ever_open_ptr,
    # sizes
    V, S, num_tiles, capacity, first,
    # strides
    stride_top_k, stride_top_p, stride_min_p, stride_temperature, stride_seed, stride_position,
    # scalars
    temperature_value,
    # flags
    WHOLE: tl.constexpr, REST: tl.constexpr, HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, HAS_MIN_P: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr, HAS_SEED: tl.constexpr, HAS_POSITION: tl.constexpr, HAS_ENTROPY: tl.constexpr,
    GREEDY: tl.constexpr, MASS: tl.constexpr, RAW: tl.constexpr, FAST_LOG: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    # The row, and its filters
    slot = tl.program_id(0).to(tl.int64)
    if WHOLE:
        if slot >= tl.load(num_open_ptr) - first:
            return
        row = tl.load(open_ptr + first + slot).to(tl.int64)
        threshold = tl.full([], LOWEST, tl.float32)
        gathered = V
    else:
        row = slot
        threshold = tl.load(threshold_ptr + row)
        gathered = tl.load(gathered_ptr + row)
    n = tl.minimum(gathered, capacity)
    if HAS_TEMPERATURE:
        temperature = tl.load(temperature_ptr + row * stride_temperature)
    else:
        temperature = temperature_value
    top_k = tl.full([], 0, tl.int64)
    top_p = tl.full([], 1.0, tl.float64)
    min_p = tl.full([], 0.0, tl.float64)
    if HAS_TOP_K:
        top_k = tl.load(top_k_ptr + row * stride_top_k).to(tl.int64)
        top_k = tl.where((top_k > 0) & (top_k < V), top_k, 0)
    if HAS_TOP_P:
        top_p = tl.load(top_p_ptr + row * stride_top_p).to(tl.float64)
    if HAS_MIN_P:
        min_p = tl.load(min_p_ptr + row * stride_min_p).to(tl.float64)
    filtered = (temperature > 0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))
    if not (filtered & (tl.load(token_ptr + row * S) >= 0)):  # drawn already, or invalid
        return
    entry_ptr += slot * capacity
    unit_ptr += slot * capacity
    if RAW:
        raw_entry_ptr += slot * capacity

    # Shares, and what min-p keeps
    top = tl.full([], 0, tl.int64)
    for start in range(0, n, BLOCK):
        top = tl.maximum(top, tl.max(_entries_at(entry_ptr, start, n, BLOCK), axis=0))
    peak = logit_of(top)
    wide = temperature + tl.full([], 0.0, tl.float64)
    count = tl.full([], 0, tl.int64)
    mass = tl.full([], 0, tl.int64)
    last = top
    for start in range(0, n, BLOCK):
        entry = _entries_at(entry_ptr, start, n, BLOCK)
        logit = logit_of(entry)
        share = _shares(logit, peak, wide)
        kept = (logit > float("-inf")) & (share >= min_p)
        units = tl.where(kept, (share * UNIT + TO_WHOLE) - TO_WHOLE, 0.0).to(tl.int64)
        offs = start + tl.arange(0, BLOCK)
        tl.store(unit_ptr + offs, units, mask=offs < n)
        count += tl.sum(kept.to(tl.int64), axis=0)
        mass += tl.sum(units, axis=0)
        last = tl.minimum(last, tl.min(tl.where(kept, entry, top), axis=0))
    tl.debug_barrier()
    # All that min-p keeps is among the entries: they are all there are, or it drops the threshold itself.
    at_threshold = _shares(threshold, peak, wide)
    settled = (threshold == LOWEST) | (at_threshold * 1.000000001 < min_p)
    room = (gathered <= capacity) & (gathered > 0)

    if HAS_TOP_K:
        settled |= (top_k > 0) & (top_k <= count)
        if (top_k > 0) & (top_k < count):
            last = _last_reaching(entry_ptr, unit_ptr, n, last, top, top_k.to(tl.float64), BLOCK, False)
            mass = _mass_from(entry_ptr, unit_ptr, n, last, BLOCK)
    if HAS_TOP_P:
        if room & (top_p < 1.0):
            total = mass.to(tl.float64)
            doubt = tl.full([], 0.0, tl.float64)
            if REST:
                if (not settled) & (min_p == 0.0) & (top_k == 0):
                    rest = _rest_of(rest_ptr + row * num_tiles, num_tiles, BLOCK_T)
                    # Terms that make up a sum lie at most log2(number / sum) octaves below the threshold, on average (Jensen).
                    octaves = tl.log2(tl.maximum(V / tl.maximum(rest, 1e-300), 1.0))
                    scale = at_threshold * UNIT
                    wrong = rest * (REST_ERROR + REST_ERROR_BY_OCTAVE * octaves) * ULP * scale
                    total += rest * scale
                    doubt = top_p * (wrong + 0.5 * V) + total * 2.0**-44
            target = tl.maximum(top_p * total, 0.5) + doubt
            reached = settled | ((doubt > 0.0) & (mass.to(tl.float64) >= target))
            if reached:
                last = _last_reaching(entry_ptr, unit_ptr, n, last, top, target, BLOCK, True)
                mass = _mass_from(entry_ptr, unit_ptr, n, last, BLOCK)
                before = _mass_from(entry_ptr, unit_ptr, n, last + 1, BLOCK).to(tl.float64)
                settled |= (before == 0.0) | (before < target - 2 * doubt)

    if settled & room:
        # Draws
        seed, position = row_key(seed_ptr, stride_seed, position_ptr, stride_position, entropy_ptr, row, True,
                                 HAS_SEED, HAS_POSITION, HAS_ENTROPY)  # fmt: skip
        if RAW:
            raw_peak, raw_total = raw_log_total(raw_max_ptr, raw_mass_ptr, row, num_tiles, BLOCK_T)
        for s in range(S):
            drawn = _draw(entry_ptr, n, last, seed, position, s, temperature, BLOCK, FAST_LOG)
            tl.store(token_ptr + row * S + s, drawn)
            if MASS:
                x = _picked(drawn, entry_ptr, raw_entry_ptr, n, BLOCK, False)
                logprob = (x.to(tl.float64) - peak.to(tl.float64)) / wide - tl.log(mass.to(tl.float64) / UNIT)
                tl.store(logprob_ptr + row * S + s, tl.where(x == float("inf"), 0.0, logprob).to(tl.float32))
            if RAW:
                raw = _picked(drawn, entry_ptr, raw_entry_ptr, n, BLOCK, True)
                logprob = tl.where(raw == float("inf"), 0.0, (raw - raw_peak) - raw_total)
                tl.store(raw_logprob_ptr + row * S + s, logprob)
    else:
        tl.store(open_ptr + tl.atomic_add(num_open_ptr, 1), row.to(tl.int32))
        if ever_open_ptr is not None:
            tl.atomic_add(ever_open_ptr, 1)


def launch_choose(
    drawn: Samples, gathered: Gathered, tiles: Tiles, rows: RowParams, filters: dict[str, Any], vocab: int, open_rows: Tensor,
    num_open: Tensor, ever_open: Tensor | None, first: int | None = None,
) -> None:  # fmt: skip
    """Draws the filtered rows of ``drawn`` from candidates, in place, and notes the open ones.

    With ``first`` the entries are whole rows instead, of the open rows from that number on.

    Args:
        drawn: the draws without filters; rows that are invalid stay so.
        gathered: the entries.
        tiles: what the tile kernel left, for raw log-probabilities.
        rows: the request; filters as :func:`nologits.kernels.arguments.filter_columns` has them.
        filters: those.
        vocab: V.
        open_rows: int32 ``[B]``, to which ids of open rows are written.
        num_open: int32 ``[1]``, how many there are.
        ever_open: int64 ``[1]``, a counter of the same that no call sets to zero; or ``None``.
        first: where the whole rows begin among the open ones.
    """
    slots, capacity = gathered.entries.shape
    num_tiles = tiles.key.shape[2]
    whole = first is not None
    device = drawn.tokens.device
    with on_device(device):
        _choose_kernel[(slots,)](
            entry_ptr=gathered.entries, raw_entry_ptr=gathered.raw, threshold_ptr=gathered.thresholds,
            gathered_ptr=gathered.counts, rest_ptr=gathered.rest, raw_max_ptr=tiles.raw_max, raw_mass_ptr=tiles.raw_mass,
            **filters, **noise_arguments(rows),
            unit_ptr=torch.empty_like(gathered.entries), token_ptr=drawn.tokens, logprob_ptr=drawn.logprobs,
            raw_logprob_ptr=drawn.raw_logprobs, open_ptr=open_rows, num_open_ptr=num_open, ever_open_ptr=ever_open,
            V=vocab, S=drawn.tokens.shape[1], num_tiles=num_tiles, capacity=capacity, first=first or 0,
            WHOLE=whole, REST=gathered.rest is not None and not whole,
            MASS=drawn.logprobs is not None, RAW=drawn.raw_logprobs is not None, FAST_LOG=fast_log(device),
            BLOCK=BLOCK_WHOLE if whole else BLOCK_CANDIDATES, BLOCK_T=BLOCK_T,
            num_warps=WARPS_WHOLE if whole else WARPS_CANDIDATES,
        )  # fmt: skip
