"""The correctness gates: nothing of a cell is timed before its results have been compared with the right ones."""

from __future__ import annotations

from dataclasses import fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import nologits as nl

from ..params import make_rows
from ..reference import scores
from ..testing import compare_tokens
from ..testing.kept_sets import KeptSets, kept_sets
from .cases import Inputs
from .filter_cases import FilterInputs
from .modes import MODES

LOGPROB_TOLERANCE = 0.01
"""Natural-log units. fp32 sums of 8,192 terms are off by up to 0.006 at these heads' spread; a lost term of a sum is not."""


class HeadGate:
    """Compares implementations with the reference, which draws once a cell, however many are measured.

    Args:
        inputs: the cell's.
        mode: its mode; log-probabilities are compared too where it asks for them.
    """

    def __init__(self, inputs: Inputs, mode: str) -> None:
        self._inputs, self._mode = inputs, mode

    @cached_property
    def _exact(self) -> nl.Samples:
        inputs = self._inputs
        return inputs.head.sample(inputs.hidden, inputs.params, impl="reference", **MODES[self._mode].results)

    def check(self, name: str, drawn: object) -> str | None:
        """Notes how many tokens differ from the reference's, each within the rounding of the logits.

        Args:
            name: who drew them, for the message.
            drawn: its :class:`nologits.Samples`.

        Raises:
            RuntimeError: a token or log-probability that rounding does not explain: the times would be those of a wrong
                sampler.
        """
        if not isinstance(drawn, nl.Samples) or drawn.tokens.shape != self._exact.tokens.shape:
            raise RuntimeError(f"{name} must return one token a row: nothing is measured")
        different = drawn.tokens != self._exact.tokens
        rows = different.nonzero().flatten()
        if len(rows):
            inputs = self._inputs
            try:
                compare_tokens(drawn.tokens[rows], inputs.hidden[rows], inputs.head, _params_of(inputs.params, rows))
            except AssertionError as error:
                count = f"{len(rows)} of {len(different)} tokens differ from the reference's"
                raise RuntimeError(f"{name} ({self._mode}): {count}: nothing is measured ({error})") from error
        if self._exact.logprobs is not None:
            self._check_logprobs(name, "a log-probability", drawn.logprobs, self._exact.logprobs, ~different)
        if self._exact.top is not None:
            self._check_top(name, drawn.top, self._exact.top)
        count = f"{name}: {len(rows)} of {len(different)} tokens differ from the reference's, within rounding"
        return count if len(rows) else None

    def observe(self, name: str, drawn: object) -> None:
        """Peers draw with noise of their own: one draw a row says nothing about them."""

    def _check_logprobs(self, name: str, what: str, got: Tensor | None, want: Tensor, where: Tensor) -> None:
        if got is None or got.shape != want.shape:
            raise RuntimeError(f"{name} must return log-probabilities {list(want.shape)}: nothing is measured")
        off = float((got - want)[where].abs().max()) if bool(where.any()) else 0.0
        if not off <= LOGPROB_TOLERANCE:  # NaN fails too
            raise RuntimeError(f"{name}: {what} is off by {off:.3g}: nothing is measured")

    def _check_top(self, name: str, got: nl.TopTokens | None, want: nl.TopTokens) -> None:
        """Rounding may swap neighbours: a token's id is compared where no other token has nearly its probability."""
        if got is None or got.ids.shape != want.ids.shape:
            raise RuntimeError(f"{name} must return top log-probabilities {list(want.ids.shape)}: nothing is measured")
        self._check_logprobs(name, "a top log-probability", got.logprobs, want.logprobs, want.ids >= 0)
        apart = want.logprobs.diff(dim=-1) < -2 * LOGPROB_TOLERANCE  # from the next; the last one's is not known
        lone = apart & torch.nn.functional.pad(apart[:, :-1], (1, 0), value=True)
        wrong = int((lone & (got.ids != want.ids)[:, :-1]).sum())
        if wrong:
            raise RuntimeError(f"{name}: {wrong} of the top tokens are wrong: nothing is measured")


CHECKED_ROWS = 8
"""Rows of a batch whose sets are compared: its first, its last and others between them."""

_NOISE_SLACK, _SCORE_SLACK = 1e-5, 2.0**-20
"""How far two right scores may lie apart: the noise's logarithms, and a few units in the last place of an fp32 score."""


class SetGate:
    """Compares kept sets with those of a float64 sort, for up to :data:`CHECKED_ROWS` rows of a cell.

    Rows that rounding decides are left out, and counted.

    Args:
        inputs: the cell's.
        mode: its mode, for messages.
    """

    def __init__(self, inputs: FilterInputs, mode: str) -> None:
        self._inputs, self._mode = inputs, mode
        batch = len(inputs.logits)
        picked = torch.linspace(0, batch - 1, min(batch, CHECKED_ROWS), dtype=torch.float64).round().long()
        self._rows = picked.to(inputs.logits.device)
        self._logits = inputs.logits[self._rows]

    @cached_property
    def _right(self) -> KeptSets:
        return kept_sets(self._logits, **self._inputs.request._asdict())

    def check(self, name: str, result: object) -> str | None:
        """Notes how many rows could not be compared.

        Args:
            name: whose result it is.
            result: the filtered logits ``[B, V]``, or :class:`nologits.Samples` of the filtered rows.

        Raises:
            RuntimeError: a set, a kept logit or a token is wrong.
        """
        if isinstance(result, nl.Samples):
            wrong, what = self._wrong_draws(result.tokens), "a wrong token"
        elif isinstance(result, Tensor) and result.shape == self._inputs.logits.shape:
            right = self._logits.masked_fill(~self._right.keep, float("-inf"))
            wrong, what = (result[self._rows] != right).any(-1), "a wrong set"
        else:
            raise RuntimeError(f"{name} must return filtered logits or samples: nothing is measured")
        bad, compared = self._count(wrong)
        if bad:
            raise RuntimeError(f"{name} ({self._mode}): {what} in {bad} of {compared} rows: nothing is measured")
        left_out = len(self._rows) - compared
        return f"{name}: {left_out} of {len(self._rows)} rows not compared, rounding decides them" if left_out else None

    def observe(self, name: str, result: object) -> str | None:
        """Notes in how many rows a peer's set is wrong; of a peer that only draws, its tokens.

        Args:
            name: whose result it is.
            result: filtered logits ``[B, V]``, ``(logits, ids)`` of what is kept, or tokens ``[B]`` or ``[B, 1]``.
        """
        right = self._right.keep
        what = "wrong set"
        if isinstance(result, tuple):
            values, ids = (part[self._rows] for part in result)
            wrong = (torch.zeros_like(right).scatter_(1, ids, values > float("-inf")) != right).any(-1)
        elif isinstance(result, Tensor) and result.is_floating_point():
            wrong = ((result[self._rows] > float("-inf")) != right).any(-1)
        elif isinstance(result, Tensor):
            wrong = ~right.gather(1, result.view(-1, 1)[self._rows].long()).squeeze(1)
            what = "token outside the set"
        else:
            raise RuntimeError(f"{name} must return logits, a pair or tokens, got {type(result).__name__}")
        bad, compared = self._count(wrong)
        return f"{name}: {what} in {bad} of {compared} rows" if bad else None

    def _count(self, wrong: Tensor) -> tuple[int, int]:
        return int((wrong & self._right.clear).sum()), int(self._right.clear.sum())

    def _wrong_draws(self, tokens: Tensor) -> Tensor:
        """bool, one a checked row: not what the noise draws from the right set, by more than rounding."""
        inputs, rows = self._inputs, self._rows
        got = tokens[rows][:, None]
        kept = self._logits.float().masked_fill(~self._right.keep, float("-inf"))
        score = scores(kept, make_rows(_params_of(inputs.params, rows), len(rows), kept.shape[1], kept.device), 0, 0)
        best = score.amax(-1, keepdim=True)
        # Outside the set the score is -inf.
        near = best - score.gather(1, got.clamp(min=0)) <= _NOISE_SLACK + _SCORE_SLACK * best.abs()
        return ~((got >= 0) & near).squeeze(1)


def _params_of(params: nl.SamplingParams, rows: Tensor) -> nl.SamplingParams:
    """The parameters of some rows, int64 ``[N]``."""

    def part(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        # Not every device indexes uint64.
        return value.view(torch.int64)[rows].view(torch.uint64) if value.dtype == torch.uint64 else value[rows]

    return nl.SamplingParams(**{field.name: part(getattr(params, field.name)) for field in fields(params)})
