"""Tokens of another implementation against the reference's, with every difference explained by rounding or refused.

Implementations share the noise, so they draw the same token unless their logits, rounded differently, put another token
first. The reference's logits are exact (an fp64 product, rounded once), so a token ``t`` is accepted in place of the
reference's only if rounding alone could have made it win:

* *the scores*: no token that is certainly kept has a reference score above that of ``t`` by more than the two tokens' budgets;
* *the filters*: ``t`` may be kept. A boundary moves with the logits: shares by a factor exp(2 b / T) for the largest logit
  budget b of the row, which is tried on top-p and min-p in both directions, and the boundary's logit by the budget itself. Ids
  tied with the boundary count as undecided, so a test of ties uses logits that are exact (small integers) and plain equality.

Budget of a score: ``4 * 2^-24 * sqrt(D) * |scale| * sum_d |h_d w_vd|`` for the fp32 accumulation (its errors are independent,
so they add up like a random walk), a few units in the last place of the logit and of the score, and 4e-6 * T for the
noise's logarithms.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..distribution import first_argmax, invalid_rows
from ..head import HeadSpec, LMHead
from ..params import UNSEEDED, RowParams, SamplingParams, make_rows
from ..reference import scores
from ..selection import column, count_sorted
from ..sources import HiddenSource, transform

_ACCUMULATION = 4.0
_ULPS = 4.0
_NOISE = 4e-6
"""Error of the noise: fp32 logarithms of two libraries differ by a few units of 2^-22 at its largest value, 22.9."""


class TokenComparison(NamedTuple):
    """How a set of draws agrees with the reference.

    Attributes:
        draws: tokens compared.
        mismatches: tokens that differ from the reference's, all explained by rounding.
        worst_gap: largest lead, in score, of the reference's token over a token that differs; 0 without mismatches.
        budget: smallest rounding allowance (of two scores together) among the mismatches; without any, among all draws.
    """

    draws: int
    mismatches: int
    worst_gap: float
    budget: float


def compare_tokens(tokens: Tensor, hidden: Tensor, head: LMHead | HeadSpec, params: SamplingParams) -> TokenComparison:
    """Compares drawn tokens with the reference's and accepts only the differences that rounding explains.

    Args:
        tokens: int64 ``[B]`` or ``[B, S]``, drawn by any implementation from the same inputs.
        hidden: ``[B, D]``.
        head: the head.
        params: the parameters they were drawn with; a seed is needed unless every row is greedy.

    Raises:
        AssertionError: a token that rounding does not explain; the message has its place, scores and budget.
        ValueError: the draws are not reproducible (no seed), or shapes do not fit.
    """
    spec = head.spec if isinstance(head, LMHead) else head
    rows = make_rows(params, hidden.shape[0], spec.vocab_size, hidden.device)
    _check_reproducible(rows)
    drawn = tokens[:, None] if tokens.dim() == 1 else tokens
    if drawn.dim() != 2 or drawn.shape[0] != hidden.shape[0]:
        raise ValueError(f"tokens must have shape [{hidden.shape[0]}] or [{hidden.shape[0]}, S], got {list(tokens.shape)}")
    logits = transform(HiddenSource(hidden, spec, torch.float64).chunk(0, spec.vocab_size), rows, 0, spec.vocab_size)
    invalid = invalid_rows(logits, rows)
    logit_budget = _logit_budget(hidden, spec, logits)
    kept, certain, possible = _kept_sets(logits, logit_budget, rows)

    gaps: list[float] = []
    allowances: list[float] = []
    usual = math.inf
    for sample in range(drawn.shape[1]):
        score = scores(logits, rows, 0, sample)
        expected = first_argmax(score.masked_fill(~kept, -math.inf)).masked_fill(invalid, -1)
        got = drawn[:, sample].to(expected.device)
        budget = logit_budget + _ULPS * 2.0**-24 * score.abs() + _NOISE * column(rows.temperature32)
        at = budget.gather(1, expected.clamp(min=0)[:, None]).squeeze(1)
        for row in (got != expected).nonzero().flatten().tolist():
            token, wanted = int(got[row]), int(expected[row])
            where = f"row {row}, sample {sample}: token {token}, the reference draws {wanted}"
            if invalid[row] or not 0 <= token < spec.vocab_size:
                raise AssertionError(where)
            # By how much rounding would have had to move the scores for no certain token to beat this one.
            slack = budget[row] + budget[row, token]
            lead = float((score[row] - score[row, token] - slack).masked_fill(~certain[row], -math.inf).max())
            gap = float(score[row, wanted] - score[row, token])
            allowed = float(slack[wanted])
            if not possible[row, token]:
                raise AssertionError(f"{where}: the filters drop it (logit {float(logits[row, token]):.9g})")
            if not lead <= 0:  # NaN fails too
                raise AssertionError(f"{where}: its score is {gap:.3g} lower, rounding explains {allowed:.3g}")
            gaps.append(gap)
            allowances.append(allowed)
        usual = min([usual, *(2 * at[~invalid]).tolist()])
    return TokenComparison(drawn.numel(), len(gaps), max(gaps, default=0.0), min(allowances, default=usual))


def _check_reproducible(rows: RowParams) -> None:
    if rows.greedy:
        return
    if rows.seed is None or bool((rows.seed == UNSEEDED).any()):
        raise ValueError("params must have a seed for every row, got unseeded rows")


def _logit_budget(hidden: Tensor, head: HeadSpec, logits: Tensor) -> Tensor:
    """fp32 ``[B, V]``: how far another fp32-accumulated logit may be from the reference's."""
    terms = hidden.double().abs() @ head.weight[: head.vocab_size].double().abs().T
    depth = math.sqrt(hidden.shape[1])
    budget = _ACCUMULATION * 2.0**-24 * depth * abs(head.scale) * terms
    size = logits.double().abs() + (head.softcap or 0.0)
    # An infinite logit is exact; so is a masked one.
    return (budget + _ULPS * 2.0**-24 * size).nan_to_num(0.0, 0.0, 0.0).float()


def _kept_sets(logits: Tensor, budget: Tensor, rows: RowParams) -> tuple[Tensor, Tensor, Tensor]:
    """bool ``[B, V]`` three times: kept by the reference, kept whatever the rounding, kept under some rounding."""
    finite = logits > -math.inf
    if not rows.filtered:
        return finite, finite, finite
    temperature = column(rows.temperature32)
    widest = budget.amax(-1, keepdim=True)
    # Rows at T = 0 have no filter to speak of: the first token always stays.
    ratio = torch.where(torch.as_tensor(temperature > 0), (2 * widest / temperature).exp(), 1.0).squeeze(1).double()
    kept, _ = _keep(logits, rows)
    _, tight = _keep(logits, _perturbed(rows, 1 / ratio))
    _, loose = _keep(logits, _perturbed(rows, ratio))
    certain = kept & (logits > tight + budget + widest)
    return kept, certain, finite & (logits >= loose - budget - widest)


def _keep(logits: Tensor, rows: RowParams) -> tuple[Tensor, Tensor]:
    """The reference's kept set, and its smallest logit ``[B, 1]``."""
    order, counts = count_sorted(logits, rows)
    rank = torch.arange(logits.shape[1], device=logits.device)
    keep = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, order, rank < counts[:, None])
    return keep, logits.gather(1, order.gather(1, (counts - 1).clamp(min=0)[:, None]))


def _perturbed(rows: RowParams, ratio: Tensor) -> RowParams:
    """The filters with top-p scaled by ``ratio`` and min-p by its inverse: above 1 looser, below 1 tighter. Off stays off."""
    top_p = torch.as_tensor(rows.top_p, dtype=torch.float64, device=ratio.device)
    min_p = torch.as_tensor(rows.min_p, dtype=torch.float64, device=ratio.device)
    return rows._replace(top_p=torch.where(top_p < 1, (top_p * ratio).clamp(max=1), 1.0), min_p=(min_p / ratio).clamp(max=1))
