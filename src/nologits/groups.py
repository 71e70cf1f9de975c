"""Draws from groups of a vocabulary, and their merge: FlashSampling's Group-Gumbel-Max (arXiv 2603.15854, Algorithms I.2, I.4).

A token drawn from a group and the group's log-mass L are all that the rest of the vocabulary needs of it. With fresh Gumbel
noise g_k for each group,

    group = argmax_k L_k + g_k          token = the one drawn from it

has the distribution of the whole; so has the choice between two groups, whose noise is then a logistic number. Groups' noise is
a stream of its own (``docs/noise.md``): that of the tokens has already decided who won inside.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .noise import STREAM_GROUPS, gumbel_from_bits, token_words
from .params import SamplingParams, make_rows
from .types import Samples

MAX_GROUPS = 1 << 31


def merge(
    a: Samples,
    b: Samples,
    *,
    temperature: float | Tensor | None = None,
    seed: int | Tensor | None = None,
    position: int | Tensor | None = None,
    step: int = 0,
) -> Samples:
    """One exact draw from the union of two disjoint groups of tokens, given a draw from each and their log-masses.

    The result can be merged again: any tree of merges over groups that cover the vocabulary gives the distribution of an
    unfiltered draw from it. It is not the token that one draw from all would have given: for that, see
    :class:`nologits.OnlineSampler`.

    Args:
        a, b: ``tokens`` int64 ``[B]`` (ids of the whole vocabulary), ``log_mass`` fp32 ``[B]``: results of draws with
            ``logprobs="processed"`` and without filters. A group with nothing to draw has token -1 and log-mass -inf; a NaN
            log-mass marks an invalid row, and so is the result.
        temperature: of the rows; only asked whether it is 0, where the larger log-mass wins. ``None``: it is nowhere.
        seed, position: of the merge's noise, as in :class:`nologits.SamplingParams`; ``None``: from torch's generator.
        step: which merge of this seed and position it is, in [0, 2**30): merges that share one share noise, and are not exact
            together.

    Returns:
        :class:`nologits.Samples` with ``tokens``, ``log_mass`` and, if both have them, ``logprobs``.

    Raises:
        ValueError: naming the argument, what it must be and what it was.
    """
    for name, part in (("a", a), ("b", b)):
        if part.log_mass is None:
            raise ValueError(f'{name} must have a log_mass (draw with logprobs="processed"), got None')
        if part.tokens.dim() != 1 or part.log_mass.shape != part.tokens.shape:
            raise ValueError(
                f"{name} must have tokens and log_mass [B], got {list(part.tokens.shape)} and {list(part.log_mass.shape)}"
            )
    if a.tokens.shape != b.tokens.shape:
        raise ValueError(f"b must have as many rows as a, {len(a.tokens)}, got {len(b.tokens)}")
    if a.tokens.device != b.tokens.device:
        raise ValueError(f"b must be on {a.tokens.device} (where a is), got {b.tokens.device}")
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < MAX_GROUPS // 2:
        raise ValueError(f"step must be an integer in [0, 2**30), got {step!r}")
    batch, device = len(a.tokens), a.tokens.device
    params = SamplingParams(1.0 if temperature is None else temperature, seed=seed, position=position)
    noise = group_noise(params, batch, device, 2 * step, 2)
    assert a.log_mass is not None
    assert b.log_mass is not None
    mass = torch.stack((a.log_mass, b.log_mass), dim=-1)
    score = mass + noise
    # Equal scores: the smaller id, if both are ids
    second = (score[:, 1] > score[:, 0]) | (
        (score[:, 1] == score[:, 0]) & (b.tokens >= 0) & ((b.tokens < a.tokens) | (a.tokens < 0))
    )
    total = torch.logaddexp(*mass.unbind(-1))
    if isinstance(params.temperature, Tensor) or params.temperature == 0:
        greedy = torch.as_tensor(params.temperature, device=device) == 0
        total = torch.where(greedy, mass.amax(-1), total)
    logprobs = None
    if a.logprobs is not None and b.logprobs is not None:
        chosen = torch.where(second, mass[:, 1], mass[:, 0])
        inside = torch.where(second, b.logprobs, a.logprobs)
        logprobs = torch.where(chosen == total, inside, inside + chosen - total)  # certain, or inf - inf
    merged = Samples(torch.where(second, b.tokens, a.tokens), logprobs, None, total)
    return _invalidate(merged, mass.isnan().any(-1) | (merged.tokens < 0))


def group_noise(params: SamplingParams, batch: int, device: torch.device, first: int, count: int) -> Tensor:
    """Gumbel noise of the groups ``first ..``, fp32 ``[B, count]``; 0 in greedy rows."""
    rows = make_rows(params, batch, 1 << 20, device)
    if rows.greedy:
        return torch.zeros(batch, count, device=device)
    seed, position = rows.keys(batch, device)
    noise = gumbel_from_bits(token_words(seed, position, first, first + count, stream=STREAM_GROUPS))
    return noise.masked_fill(rows.temperature[:, None] == 0, 0.0) if isinstance(rows.temperature, Tensor) else noise


def _invalidate(merged: Samples, invalid: Tensor) -> Samples:
    nan = float("nan")
    return Samples(
        merged.tokens.masked_fill(invalid, -1),
        None if merged.logprobs is None else merged.logprobs.masked_fill(invalid, nan),
        None,
        # Nothing in either group is no error yet: another may have something
        None if merged.log_mass is None else merged.log_mass.masked_fill(invalid & (merged.log_mass != float("-inf")), nan),
    )
