"""The draw, fused with the matmul that makes the logits (FlashSampling, stage 1).

    score[b, v] = logits[b, v] + T[b] * g[b, v]          token[b] = argmax_v score, ties to the smaller id

One program computes a tile of BLOCK_V ids for BLOCK_B rows, adds the noise while the logits sit in registers, and
stores one packed (score, id) a row. The argmax over the vocabulary is the argmax of the tiles' winners, so a second
kernel (``merge.py``) only compares B * V / BLOCK_V keys; a grid-wide reduction in this kernel would have to wait for its
slowest program. The logits never leave the chip.

With log-probabilities a tile also stores its winner's logit and the sum of exp((l - that logit) / T). The winner is a safe
reference, because the noise lies in [-3.2, 22.9]: no logit is above it by more than 26.1 T, and no term exceeds e^26.1.

With filters it also appends the logits from a row's threshold on to the row's list of candidates (``threshold.py``), by an
atomic counter, so in any order; ``choose.py`` finds among them what is kept. For a top-p it leaves the mass of all others.

Grid: (vocabulary tiles * batch blocks), batch blocks fastest, so that programs sharing a weight tile run together.
Outputs: key int64, and optionally the winners' logits and raw logits fp32 (``[B, S, tiles]``), masses and the raw maximum and
mass fp32 (``[B, tiles]``).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..params import RowParams
from ..sources import HiddenSource, LogitsSource
from .arguments import noise_arguments, on_device, operands, request_arguments
from .config import TileConfig
from .primitives import LN2, LOG2E, high_word, log2_exponential, low_word, pack_entry, pack_key, philox, row_key, unpack_key
from .tile import group_ids, head_quarters, load_logits, project, request_quarters, split_quarters


@triton.jit
def _best_of_group(s0, s1, s2, s3, groups):
    """Packed winner among the four scores of each group."""
    best = tl.maximum(tl.maximum(s0, s1, propagate_nan=tl.PropagateNan.ALL),
                      tl.maximum(s2, s3, propagate_nan=tl.PropagateNan.ALL),
                      propagate_nan=tl.PropagateNan.ALL)  # fmt: skip
    offset = tl.where(s2 == best, 64, 72)
    offset = tl.where(s1 == best, 8, offset)
    offset = tl.where(s0 == best, 0, offset)
    return pack_key(best, groups[:, None] + offset)


@triton.jit
def _picked(x0, x1, x2, x3, groups, token):
    """The value of each row's ``token`` in the four quarters (summed: every other entry counts as zero)."""
    difference = token[None, :].to(tl.int32) - groups[:, None]
    x = tl.where(difference == 0, x0, 0.0)
    x = tl.where(difference == 8, x1, x)
    x = tl.where(difference == 64, x2, x)
    x = tl.where(difference == 72, x3, x)
    return tl.sum(x, axis=0)


@triton.jit
def _mass(x0, x1, x2, x3, reference, inverse):
    """Sum over the tile of 2^((x - reference) * inverse); -inf contributes nothing, also when the reference is -inf."""
    reference = tl.where(reference == float("-inf"), 0.0, reference)[None, :]
    total = tl.exp2((x0 - reference) * inverse) + tl.exp2((x1 - reference) * inverse)
    total += tl.exp2((x2 - reference) * inverse) + tl.exp2((x3 - reference) * inverse)
    return tl.sum(total, axis=0)


@triton.jit
def _gather(x, raw, threshold, ids, rows, gathered_ptr, entry_ptr, raw_entry_ptr, capacity, RAW: tl.constexpr):
    """Appends the logits that reach their row's threshold to its list. Few do: most threads run through predicated off."""
    hit = x >= threshold
    row = rows[None, :] + tl.zeros_like(ids)[:, None]
    at = tl.atomic_add(gathered_ptr + row, tl.full(row.shape, 1, tl.int32), mask=hit, sem="relaxed")
    hit &= at < capacity
    to = row.to(tl.int64) * capacity + at
    tl.store(entry_ptr + to, pack_entry(x, ids[:, None]), mask=hit)
    if RAW:
        tl.store(raw_entry_ptr + to, raw, mask=hit)


@triton.jit
def _below(x, threshold, octaves):
    """The mass of the logits below the threshold, that of the threshold being 1; 0 for others."""
    return tl.where(x < threshold, tl.exp2(tl.minimum(x - threshold, 0.0) * octaves), 0.0)


@triton.jit(do_not_specialize=["temperature_value", "num_biased", "scale", "softcap"])
def _categorical_tile_kernel(
    # inputs: the head's operands, or the logits in place of the weight
    hidden, weight, bias_ptr, logit_bias_ptr, bias_ids_ptr, bias_values_ptr, allowed_ptr,
    temperature_ptr, seed_ptr, position_ptr, entropy_ptr,
    # outputs, and candidates
    key_ptr, picked_ptr, mass_ptr, raw_picked_ptr, raw_max_ptr, raw_mass_ptr,
    threshold_ptr, gathered_ptr, entry_ptr, raw_entry_ptr, rest_ptr, capacity,
    # sizes
    B, V, V_ROWS, D, S, num_tiles, num_batch_blocks, num_biased,
    # strides
    stride_wv, stride_wd, stride_hb, stride_hd, stride_bias, stride_lbb, stride_lbv, stride_bib, stride_bik,
    stride_bvb, stride_bvk, stride_ab, stride_aw, stride_temperature, stride_seed, stride_position,
    # scalars
    scale, softcap, temperature_value,
    # flags
    FROM_LOGITS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_LOGIT_BIAS: tl.constexpr, HAS_SPARSE_BIAS: tl.constexpr, HAS_ALLOWED: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr, HAS_SEED: tl.constexpr, HAS_POSITION: tl.constexpr,
    HAS_ENTROPY: tl.constexpr, GREEDY: tl.constexpr, MASS: tl.constexpr, RAW: tl.constexpr,
    GATHER: tl.constexpr, REST: tl.constexpr,
    USE_TMA: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, FAST_LOG: tl.constexpr,
    # tile
    BLOCK_V: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # Coordinates
    pid = tl.program_id(0)
    tile = pid // num_batch_blocks
    v0 = tile * BLOCK_V
    b0 = (pid % num_batch_blocks) * BLOCK_B
    groups = group_ids(v0, BLOCK_V)
    rows = b0 + tl.arange(0, BLOCK_B)
    mask_b = rows < B
    rows64 = rows.to(tl.int64)

    # Logits tile
    if FROM_LOGITS:
        x0 = load_logits(weight, groups, rows, V, B, stride_wv, stride_wd)
        x1 = load_logits(weight, groups + 8, rows, V, B, stride_wv, stride_wd)
        x2 = load_logits(weight, groups + 64, rows, V, B, stride_wv, stride_wd)
        x3 = load_logits(weight, groups + 72, rows, V, B, stride_wv, stride_wd)
    else:
        acc = project(hidden, weight, v0, b0, V_ROWS, B, D, stride_wv, stride_wd, stride_hb, stride_hd,
                      BLOCK_V, BLOCK_B, BLOCK_D, USE_TMA, UPCAST, PRECISION)  # fmt: skip
        x0, x1, x2, x3 = split_quarters(acc, BLOCK_V, BLOCK_B)

    # Transform
    x0, x1, x2, x3 = head_quarters(x0, x1, x2, x3, groups, bias_ptr, stride_bias, scale, softcap, V, HAS_BIAS, HAS_SCALE,
                                   HAS_SOFTCAP)  # fmt: skip
    r0, r1, r2, r3 = x0, x1, x2, x3
    if RAW:
        r0 = tl.where((groups < V)[:, None], x0, float("-inf"))
        r1 = tl.where((groups + 8 < V)[:, None], x1, float("-inf"))
        r2 = tl.where((groups + 64 < V)[:, None], x2, float("-inf"))
        r3 = tl.where((groups + 72 < V)[:, None], x3, float("-inf"))
        raw_max = tl.max(tl.maximum(tl.maximum(r0, r1), tl.maximum(r2, r3)), axis=0)
        raw_mass = _mass(r0, r1, r2, r3, raw_max, LOG2E)
        tl.store(raw_max_ptr + rows64 * num_tiles + tile, raw_max, mask=mask_b)
        tl.store(raw_mass_ptr + rows64 * num_tiles + tile, raw_mass, mask=mask_b)
    x0, x1, x2, x3 = request_quarters(x0, x1, x2, x3, groups, rows, v0, V, B, logit_bias_ptr, stride_lbb, stride_lbv,
                                      bias_ids_ptr, bias_values_ptr, stride_bib, stride_bik, stride_bvb, stride_bvk,
                                      num_biased, allowed_ptr, stride_ab, stride_aw, HAS_LOGIT_BIAS, HAS_SPARSE_BIAS,
                                      HAS_ALLOWED, BLOCK_V)  # fmt: skip

    # Noise parameters of each row
    if HAS_TEMPERATURE:
        temperature = tl.load(temperature_ptr + rows64 * stride_temperature, mask=mask_b, other=0.0)
    else:
        temperature = tl.zeros([BLOCK_B], tl.float32) + temperature_value

    # Candidates
    if GATHER:
        threshold = tl.load(threshold_ptr + rows64, mask=mask_b, other=float("inf"))[None, :]
        _gather(x0, r0, threshold, groups, rows, gathered_ptr, entry_ptr, raw_entry_ptr, capacity, RAW)
        _gather(x1, r1, threshold, groups + 8, rows, gathered_ptr, entry_ptr, raw_entry_ptr, capacity, RAW)
        _gather(x2, r2, threshold, groups + 64, rows, gathered_ptr, entry_ptr, raw_entry_ptr, capacity, RAW)
        _gather(x3, r3, threshold, groups + 72, rows, gathered_ptr, entry_ptr, raw_entry_ptr, capacity, RAW)
        if REST:
            positive = tl.where(temperature > 0, temperature, 1.0)
            octaves = tl.minimum(tl.div_rn(tl.full([BLOCK_B], LOG2E, tl.float32), positive), 3.0e38)[None, :]
            rest = _below(x0, threshold, octaves) + _below(x1, threshold, octaves)
            rest += _below(x2, threshold, octaves) + _below(x3, threshold, octaves)
            # In fp64, so that what roundings make of the sum does not grow with the tile.
            tl.store(rest_ptr + rows64 * num_tiles + tile, tl.sum(rest.to(tl.float64), axis=0), mask=mask_b)

    # Noise
    if not GREEDY:
        seed, position = row_key(seed_ptr, stride_seed, position_ptr, stride_position, entropy_ptr, rows, mask_b,
                                 HAS_SEED, HAS_POSITION, HAS_ENTROPY)  # fmt: skip
        k0, k1 = low_word(seed)[None, :], high_word(seed)[None, :]
        c1, c2 = low_word(position)[None, :], high_word(position)[None, :]
        # Adding "is NaN" (0, or the row is invalid anyway) ties the counters to the accumulator's layout: without it the
        # compiler makes the noise in a layout of its own and moves all of it through shared memory.
        c0 = groups.to(tl.uint32)[:, None] + (x0 != x0).to(tl.uint32)
        spread = (temperature * LN2)[None, :]

    for s in range(S):
        # Noise and scores
        if GREEDY:
            key = _best_of_group(x0, x1, x2, x3, groups)
        else:
            w0, w1, w2, w3 = philox(c0, c1, c2, (tl.zeros_like(rows) + s).to(tl.uint32)[None, :], k0, k1)
            s0 = x0 - spread * log2_exponential(w0, FAST_LOG)
            s1 = x1 - spread * log2_exponential(w1, FAST_LOG)
            s2 = x2 - spread * log2_exponential(w2, FAST_LOG)
            s3 = x3 - spread * log2_exponential(w3, FAST_LOG)
            key = _best_of_group(s0, s1, s2, s3, groups)

        # Reduce and store
        key = tl.max(key, axis=0)
        at = (rows64 * S + s) * num_tiles + tile
        tl.store(key_ptr + at, key, mask=mask_b)
        if MASS or RAW:
            _, token = unpack_key(key)
            if MASS:
                winner = _picked(x0, x1, x2, x3, groups, token)
                tl.store(picked_ptr + at, winner, mask=mask_b)
                if s == 0:
                    # T = 0 has no tempered mass; any finite value will do, the merge does not read it.
                    inverse = tl.where(temperature > 0, tl.minimum(LOG2E / temperature, 3.0e38), 1.0)[None, :]
                    tl.store(mass_ptr + rows64 * num_tiles + tile, _mass(x0, x1, x2, x3, winner, inverse), mask=mask_b)
            if RAW:
                tl.store(raw_picked_ptr + at, _picked(r0, r1, r2, r3, groups, token), mask=mask_b)


class Gathered(NamedTuple):
    """The candidates of a filtered draw: what the tile kernel appends to, and what it is told.

    Attributes:
        thresholds: fp32 ``[B]``: a row's candidates are its logits from there on.
        counts: int32 ``[B]``, zero at first: how many there are, also beyond the room for them.
        entries: int64 ``[B, capacity]``, candidates in any order (:func:`nologits.kernels.primitives.pack_entry`).
        raw: fp32 ``[B, capacity]``, the head's own logits of those tokens, or ``None``.
        rest: fp64 ``[B, tiles]``, the mass of each tile's other logits in units of the threshold's, or ``None``.
    """

    thresholds: Tensor
    counts: Tensor
    entries: Tensor
    raw: Tensor | None
    rest: Tensor | None


class Tiles(NamedTuple):
    """What the tile kernel leaves for the merge: winners, and what log-probabilities need."""

    key: Tensor
    picked: Tensor | None
    mass: Tensor | None
    raw_picked: Tensor | None
    raw_max: Tensor | None
    raw_mass: Tensor | None


def launch_tiles(
    source: HiddenSource | LogitsSource,
    rows: RowParams,
    num_samples: int,
    mass: bool,
    raw: bool,
    config: TileConfig,
    gathered: Gathered | None = None,
) -> Tiles:
    """Runs the tile kernel over ``source`` and returns what its programs left: one winner a row, sample and tile.

    With ``gathered`` candidates are put there on the way. If the host knows that every row is filtered, there is no noise, and
    the winners are the largest logits: those rows are drawn from candidates, with their own noise.
    """
    batch, vocab, device = source.batch, source.vocab, source.device
    num_tiles = triton.cdiv(vocab, config.BLOCK_V)
    num_batch_blocks = triton.cdiv(batch, config.BLOCK_B)
    empty = partial(torch.empty, device=device)
    tiles = Tiles(
        key=empty(batch, num_samples, num_tiles, dtype=torch.int64),
        picked=empty(batch, num_samples, num_tiles, dtype=torch.float32) if mass else None,
        mass=empty(batch, num_tiles, dtype=torch.float32) if mass else None,
        raw_picked=empty(batch, num_samples, num_tiles, dtype=torch.float32) if raw else None,
        raw_max=empty(batch, num_tiles, dtype=torch.float32) if raw else None,
        raw_mass=empty(batch, num_tiles, dtype=torch.float32) if raw else None,
    )
    arguments = operands(source, config) | request_arguments(rows) | noise_arguments(rows)
    if gathered is not None and rows.all_filtered:
        arguments["GREEDY"] = True
    with on_device(device):
        _categorical_tile_kernel[(num_tiles * num_batch_blocks,)](
            **arguments,
            **_gather_arguments(gathered),
            key_ptr=tiles.key, picked_ptr=tiles.picked, mass_ptr=tiles.mass, raw_picked_ptr=tiles.raw_picked,
            raw_max_ptr=tiles.raw_max, raw_mass_ptr=tiles.raw_mass,
            B=batch, V=vocab, S=num_samples, num_tiles=num_tiles, num_batch_blocks=num_batch_blocks,
            MASS=mass, RAW=raw,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return tiles


def _gather_arguments(gathered: Gathered | None) -> dict[str, Any]:
    if gathered is None:
        names = ("threshold_ptr", "gathered_ptr", "entry_ptr", "raw_entry_ptr", "rest_ptr")
        return dict.fromkeys(names) | {"capacity": 0, "GATHER": False, "REST": False}
    return {
        "threshold_ptr": gathered.thresholds, "gathered_ptr": gathered.counts, "entry_ptr": gathered.entries,
        "raw_entry_ptr": gathered.raw, "rest_ptr": gathered.rest, "capacity": gathered.entries.shape[1],
        "GATHER": True, "REST": gathered.rest is not None,
    }  # fmt: skip
