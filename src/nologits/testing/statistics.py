"""Tests of drawn tokens against the distribution they should have: chi-squared with a pooled tail, and a tail's share.

Both are needed. Chi-squared sees a wrong temperature, filter or tile, but is blind to a tail whose cells are all too rare to
count; noise with too few bits loses just that tail, and shows in the share that all rare tokens have together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MIN_EXPECTED = 8.0
"""Expected draws a cell needs for its own term; below about 5 the chi-squared law is a poor approximation."""


class FitResult(NamedTuple):
    """One test of ``draws`` tokens.

    Attributes:
        statistic: chi-squared, or the z score of a share.
        p_value: probability of a deviation at least as large if the draws are right; 0 if an impossible token was drawn.
        draws: how many tokens were tested.
        cells: how many cells the statistic adds up (2 for a share).
        pooled: how many token ids share the cell of the tail.
    """

    statistic: float
    p_value: float
    draws: int
    cells: int
    pooled: int


def count_tokens(tokens: Tensor, vocab: int) -> Tensor:
    """How often each id was drawn: int64 ``[V]`` on the CPU.

    Args:
        tokens: int64, any shape and device.
        vocab: V.

    Raises:
        ValueError: a token is not an id, so no count could hold it (an invalid row's -1 for example).
    """
    flat = tokens.detach().flatten().cpu()
    outside = flat[(flat < 0) | (flat >= vocab)]
    if outside.numel():
        raise ValueError(f"tokens must be in [0, {vocab}), got {int(outside[0])}")
    return torch.bincount(flat, minlength=vocab)


def chi_squared(
    counts: Tensor | Sequence[int], probabilities: Tensor | Sequence[float], *, min_expected: float = MIN_EXPECTED
) -> FitResult:
    """Pearson's goodness of fit; the ids too rare for a cell of their own are pooled into one.

    Args:
        counts: draws of each id, ``[V]``.
        probabilities: what they should be, ``[V]``; scaled to sum to 1. An id with probability 0 must never be drawn.
        min_expected: expected draws below which an id goes to the pooled cell.

    Raises:
        ValueError: shapes differ, or there is nothing to test.
    """
    from scipy.stats import chi2

    observed = torch.as_tensor(counts).detach().cpu().double()
    share = torch.as_tensor(probabilities).detach().cpu().double()
    if observed.shape != share.shape or observed.dim() != 1:
        raise ValueError(f"probabilities must have shape {list(observed.shape)} (that of counts), got {list(share.shape)}")
    draws = int(observed.sum())
    if draws == 0:
        raise ValueError("counts must hold at least one draw, got 0")
    expected = share / share.sum() * draws
    impossible = bool((observed[expected == 0] > 0).any())
    alone = expected >= min_expected
    rare = ~alone & (expected > 0)
    cells = [(observed[alone], expected[alone])]
    pooled = int(rare.sum())
    if pooled:
        tail = (observed[rare].sum()[None], expected[rare].sum()[None])
        if tail[1] < min_expected and alone.any():
            # A tail too rare even as a whole joins the rarest cell: dropping it would let its tokens be drawn unseen.
            seen, want = cells[0]
            order = want.argsort(descending=True)
            cells = [(seen[order[:-1]], want[order[:-1]])]
            tail = (tail[0] + seen[order[-1]], tail[1] + want[order[-1]])
        cells.append(tail)
    seen, want = (torch.cat(part) for part in zip(*cells, strict=True))
    statistic = float(((seen - want) ** 2 / want).sum())
    degrees = len(seen) - 1
    p_value = float(chi2.sf(statistic, degrees)) if degrees else 1.0
    if impossible:
        statistic, p_value = math.inf, 0.0
    return FitResult(statistic, p_value, draws, len(seen), pooled)


def tail_share(hits: int, draws: int, share: float) -> FitResult:
    """Two-sided test of how often the tail was drawn.

    The statistic is the z score; the p-value is the exact binomial one, because a tail's expected count may be small.

    Args:
        hits: draws that fell into the tail.
        draws: all draws.
        share: the tail's probability, in (0, 1).

    Raises:
        ValueError: the counts are impossible or the share is not inside (0, 1).
    """
    from scipy.stats import binomtest

    if not 0 <= hits <= draws or draws == 0:
        raise ValueError(f"hits must be in [0, {draws}] and draws at least 1, got {hits}")
    if not 0 < share < 1:
        raise ValueError(f"share must be inside (0, 1), got {share}")
    z = (hits - draws * share) / math.sqrt(draws * share * (1 - share))
    return FitResult(z, float(binomtest(hits, draws, share).pvalue), draws, 2, 0)
