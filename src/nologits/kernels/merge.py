"""The draw's second stage: the winner among a row's tile winners, and its log-probabilities.

    key = max over tiles        log_mass = l / T + log(sum_t mass_t exp((l_t - l) / T))        logprob = l / T - log_mass

``l`` is the winner's logit and ``l_t`` that of tile t's winner, the reference its mass was summed against. Tiles leave their
winners' logits beside their scores: recovering them as score - T g would lose them at high and at low temperatures.

Grid: (B * S). Reads ``tiles`` keys a program; writes token int64, log-probabilities fp32 ``[B, S]``, log-mass ``[B]``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..params import RowParams
from ..types import Samples
from .arguments import on_device, temperature_arguments
from .categorical import Tiles
from .primitives import LN2, LOG2E, unpack_key

BLOCK_T = 512
"""Tiles read at once: four warps with a 16-byte load a thread and key, two at V = 131,072."""


@triton.jit
def _at_winner(value_ptr, key_ptr, pid, token, num_tiles, BLOCK_T: tl.constexpr):
    """What the tile that holds ``token`` left in ``value_ptr``."""
    picked = tl.zeros([BLOCK_T], tl.float32)
    for t in range(0, num_tiles, BLOCK_T):
        offs_t = t + tl.arange(0, BLOCK_T)
        mask = offs_t < num_tiles
        _, tile_token = unpack_key(tl.load(key_ptr + pid * num_tiles + offs_t, mask=mask, other=0))
        value = tl.load(value_ptr + pid * num_tiles + offs_t, mask=mask, other=0.0)
        picked += tl.where(mask & (tile_token == token), value, 0.0)
    return tl.sum(picked, axis=0)


@triton.jit
def raw_log_total(raw_max_ptr, raw_mass_ptr, row, num_tiles, BLOCK_T: tl.constexpr):
    """A row's largest logit of the head, and the logarithm of the mass relative to it."""
    raw_max = tl.full([BLOCK_T], float("-inf"), tl.float32)
    for t in range(0, num_tiles, BLOCK_T):
        offs_t = t + tl.arange(0, BLOCK_T)
        mask = offs_t < num_tiles
        raw_max = tl.maximum(raw_max, tl.load(raw_max_ptr + row * num_tiles + offs_t, mask=mask, other=float("-inf")))
    peak = tl.max(raw_max, axis=0)
    total = tl.zeros([BLOCK_T], tl.float32)
    for t in range(0, num_tiles, BLOCK_T):
        offs_t = t + tl.arange(0, BLOCK_T)
        mask = offs_t < num_tiles
        tile_max = tl.load(raw_max_ptr + row * num_tiles + offs_t, mask=mask, other=0.0)
        mass = tl.load(raw_mass_ptr + row * num_tiles + offs_t, mask=mask, other=0.0)
        total += tl.where(mass > 0, mass * tl.exp2((tile_max - peak) * LOG2E), 0.0)
    return peak, tl.log2(tl.sum(total, axis=0)) * LN2


@triton.jit(do_not_specialize=["temperature_value"])
def _categorical_merge_kernel(
    # inputs
    key_ptr, picked_ptr, mass_ptr, raw_picked_ptr, raw_max_ptr, raw_mass_ptr, temperature_ptr,
    # outputs
    token_ptr, logprob_ptr, raw_logprob_ptr, log_mass_ptr,
    # sizes, strides, scalars
    S, num_tiles, stride_temperature, temperature_value,
    # flags
    HAS_TEMPERATURE: tl.constexpr, MASS: tl.constexpr, RAW: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    # Coordinates
    pid = tl.program_id(0).to(tl.int64)
    row, sample = pid // S, (pid % S).to(tl.int32)
    if HAS_TEMPERATURE:
        temperature = tl.load(temperature_ptr + row * stride_temperature)
    else:
        temperature = temperature_value
    offs_t = tl.arange(0, BLOCK_T)

    # Winner
    best = tl.full([BLOCK_T], -9223372036854775808, tl.int64)
    for t in range(0, num_tiles, BLOCK_T):
        mask = t + offs_t < num_tiles
        key = tl.load(key_ptr + pid * num_tiles + t + offs_t, mask=mask, other=-9223372036854775808)
        best = tl.maximum(best, key)
    score, token = unpack_key(tl.max(best, axis=0))
    # A NaN score fails the first comparison, an impossible temperature the others.
    valid = (score > float("-inf")) & (temperature >= 0) & (temperature < float("inf"))
    infinite = score == float("inf")
    tl.store(token_ptr + pid, tl.where(valid, token, -1))

    # Log-probabilities
    nan = float("nan")
    if MASS:
        inverse = tl.where(temperature > 0, tl.minimum(LOG2E / temperature, 3.0e38), 0.0)
        winner = _at_winner(picked_ptr, key_ptr, pid, token, num_tiles, BLOCK_T)
        # Masses are relative to the tile winners of sample 0, whichever sample this program draws.
        total = tl.zeros([BLOCK_T], tl.float32)
        for t in range(0, num_tiles, BLOCK_T):
            mask = t + offs_t < num_tiles
            reference = tl.load(picked_ptr + row * S * num_tiles + t + offs_t, mask=mask, other=0.0)
            mass = tl.load(mass_ptr + row * num_tiles + t + offs_t, mask=mask, other=0.0)
            total += tl.where(mass > 0, mass * tl.exp2((reference - winner) * inverse), 0.0)
        log_total = tl.log2(tl.sum(total, axis=0)) * LN2
        logprob = tl.where((temperature == 0) | infinite, 0.0, -log_total)
        tl.store(logprob_ptr + pid, tl.where(valid, logprob, nan))
        if sample == 0:
            log_mass = tl.where(temperature == 0, winner, winner / temperature + log_total)
            log_mass = tl.where(infinite, float("inf"), log_mass)
            tl.store(log_mass_ptr + row, tl.where(valid, log_mass, nan))
    if RAW:
        peak, log_total = raw_log_total(raw_max_ptr, raw_mass_ptr, row, num_tiles, BLOCK_T)
        raw = _at_winner(raw_picked_ptr, key_ptr, pid, token, num_tiles, BLOCK_T)
        logprob = (raw - peak) - log_total
        logprob = tl.where(raw == float("inf"), 0.0, logprob)
        tl.store(raw_logprob_ptr + pid, tl.where(valid, logprob, nan))


def launch_merge(tiles: Tiles, rows: RowParams) -> Samples:
    """Runs the merge kernel over what the tile kernel left; ``[B, S]`` results."""
    batch, num_samples, num_tiles = tiles.key.shape
    device = tiles.key.device
    shape = (batch, num_samples)
    tokens = torch.empty(shape, dtype=torch.int64, device=device)
    logprobs = torch.empty(shape, device=device) if tiles.mass is not None else None
    log_mass = torch.empty(batch, device=device) if tiles.mass is not None else None
    raw_logprobs = torch.empty(shape, device=device) if tiles.raw_mass is not None else None
    with on_device(device):
        _categorical_merge_kernel[(batch * num_samples,)](
            key_ptr=tiles.key, picked_ptr=tiles.picked, mass_ptr=tiles.mass, raw_picked_ptr=tiles.raw_picked,
            raw_max_ptr=tiles.raw_max, raw_mass_ptr=tiles.raw_mass,
            **temperature_arguments(rows),
            token_ptr=tokens, logprob_ptr=logprobs, raw_logprob_ptr=raw_logprobs, log_mass_ptr=log_mass,
            S=num_samples, num_tiles=num_tiles,
            MASS=logprobs is not None, RAW=raw_logprobs is not None,
            BLOCK_T=BLOCK_T, num_warps=4,
        )  # fmt: skip
    return Samples(tokens, logprobs, raw_logprobs, log_mass)
