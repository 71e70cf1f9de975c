"""The draw's second stage: the winner among a row's tile winners, and its log-probabilities.

    key = max over tiles                    log_mass = s/T + log(sum_t mass_t exp((s_t - s)/T)),  s = winner's score

``s_t`` is the score of tile t's winner, the reference its mass was summed against. The winner's own logit is recovered
from its score by drawing its noise once more, l = s - T g, at the accuracy the score had.

Grid: (B * S). Reads ``tiles`` keys a program; writes token int64, log-probabilities fp32 ``[B, S]``, log-mass ``[B]``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..params import RowParams
from ..types import Samples
from .arguments import fast_log, noise_arguments, on_device
from .categorical import Tiles
from .primitives import LN2, LOG2E, high_word, log2_exponential, low_word, philox, row_key, unpack_key

BLOCK_T = 512
"""Tiles read at once: four warps with a 16-byte load a thread and key, two at V = 131,072."""


@triton.jit(do_not_specialize=["temperature_value"])
def _categorical_merge_kernel(
    # inputs
    key_ptr, mass_ptr, raw_picked_ptr, raw_max_ptr, raw_mass_ptr,
    temperature_ptr, seed_ptr, position_ptr, entropy_ptr,
    # outputs
    token_ptr, logprob_ptr, raw_logprob_ptr, log_mass_ptr,
    # sizes, strides, scalars
    S, num_tiles, stride_temperature, stride_seed, stride_position, temperature_value,
    # flags
    HAS_TEMPERATURE: tl.constexpr, HAS_SEED: tl.constexpr, HAS_POSITION: tl.constexpr,
    GREEDY: tl.constexpr, MASS: tl.constexpr, RAW: tl.constexpr, FAST_LOG: tl.constexpr,
    BLOCK_T: tl.constexpr,
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
        inverse = tl.where(temperature > 0, LOG2E / temperature, 0.0)
        # Masses are relative to the tile winners of sample 0, whichever sample this program draws.
        total = tl.zeros([BLOCK_T], tl.float32)
        for t in range(0, num_tiles, BLOCK_T):
            mask = t + offs_t < num_tiles
            key = tl.load(key_ptr + row * S * num_tiles + t + offs_t, mask=mask, other=0)
            tile_score, _ = unpack_key(key)
            mass = tl.load(mass_ptr + row * num_tiles + t + offs_t, mask=mask, other=0.0)
            shift = tl.where(tile_score == float("-inf"), 0.0, tile_score) - score
            total += tl.where(mass > 0, mass * tl.exp2(shift * inverse), 0.0)
        # log2 of the tempered mass relative to 2^(score / T)
        log2_total = tl.log2(tl.sum(total, axis=0))
        noise = 0.0
        if not GREEDY:
            seed, position = row_key(seed_ptr, stride_seed, position_ptr, stride_position, entropy_ptr,
                                     row + tl.zeros([1], tl.int64), row + tl.zeros([1], tl.int64) >= 0,
                                     HAS_SEED, HAS_POSITION)  # fmt: skip
            group = (token & ~72) + tl.zeros([1], tl.int64)
            counter = (tl.zeros([1], tl.int32) + sample).to(tl.uint32)
            w0, w1, w2, w3 = philox(low_word(group), low_word(position), high_word(position), counter,
                                    low_word(seed), high_word(seed))  # fmt: skip
            word = tl.where((token & 64) != 0, tl.where((token & 8) != 0, w3, w2), tl.where((token & 8) != 0, w1, w0))
            noise = tl.sum(log2_exponential(word, FAST_LOG), axis=0)
        # logprob = (l - s) / T - log(total) with l - s = T ln2 log2(E2): the temperature cancels
        logprob = (noise - log2_total) * LN2
        logprob = tl.where((temperature == 0) | infinite, 0.0, logprob)
        tl.store(logprob_ptr + pid, tl.where(valid, logprob, nan))
        if sample == 0:
            log_mass = tl.where(temperature == 0, score, score * inverse * LN2 + log2_total * LN2)
            log_mass = tl.where(infinite, float("inf"), log_mass)
            tl.store(log_mass_ptr + row, tl.where(valid, log_mass, nan))
    if RAW:
        raw_max = tl.full([BLOCK_T], float("-inf"), tl.float32)
        for t in range(0, num_tiles, BLOCK_T):
            mask = t + offs_t < num_tiles
            raw_max = tl.maximum(raw_max, tl.load(raw_max_ptr + row * num_tiles + t + offs_t, mask=mask, other=float("-inf")))
        peak = tl.max(raw_max, axis=0)
        picked = tl.zeros([BLOCK_T], tl.float32)
        total = tl.zeros([BLOCK_T], tl.float32)
        for t in range(0, num_tiles, BLOCK_T):
            mask = t + offs_t < num_tiles
            tile_max = tl.load(raw_max_ptr + row * num_tiles + t + offs_t, mask=mask, other=0.0)
            mass = tl.load(raw_mass_ptr + row * num_tiles + t + offs_t, mask=mask, other=0.0)
            total += tl.where(mass > 0, mass * tl.exp2((tile_max - peak) * LOG2E), 0.0)
            key = tl.load(key_ptr + pid * num_tiles + t + offs_t, mask=mask, other=0)
            _, tile_token = unpack_key(key)
            value = tl.load(raw_picked_ptr + pid * num_tiles + t + offs_t, mask=mask, other=0.0)
            picked += tl.where(mask & (tile_token == token), value, 0.0)
        raw = tl.sum(picked, axis=0)
        logprob = (raw - peak) - tl.log2(tl.sum(total, axis=0)) * LN2
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
            key_ptr=tiles.key, mass_ptr=tiles.mass, raw_picked_ptr=tiles.raw_picked,
            raw_max_ptr=tiles.raw_max, raw_mass_ptr=tiles.raw_mass,
            **noise_arguments(rows),
            token_ptr=tokens, logprob_ptr=logprobs, raw_logprob_ptr=raw_logprobs, log_mass_ptr=log_mass,
            S=num_samples, num_tiles=num_tiles,
            MASS=logprobs is not None, RAW=raw_logprobs is not None, FAST_LOG=fast_log(device),
            BLOCK_T=BLOCK_T, num_warps=4,
        )  # fmt: skip
    return Samples(tokens, logprobs, raw_logprobs, log_mass)
