"""The correctness gate: nothing of a cell is timed before its draws have been compared with the reference's."""

from __future__ import annotations

from torch import Tensor

import nologits as nl

from ..testing import compare_tokens
from ..types import LogprobsMode
from .cases import Inputs, make_params

LOGPROB_TOLERANCE = 0.01
"""Natural-log units. fp32 sums of 8,192 terms are off by up to 0.006 at these heads' spread; a lost term of a sum is not."""


class Gate:
    """Compares implementations with the reference, which draws once a cell, however many are measured.

    Args:
        inputs: the cell's.
        mode: its mode; with ``logprobs``, log-probabilities are compared too.
    """

    def __init__(self, inputs: Inputs, mode: str) -> None:
        self._inputs, self._mode = inputs, mode
        self._exact = inputs.head.sample(inputs.hidden, inputs.params, impl="reference", logprobs=self._logprobs)

    @property
    def _logprobs(self) -> LogprobsMode:
        return "processed" if self._mode == "logprobs" else False

    def check(self, name: str, drawn: object) -> int:
        """How many tokens differ from the reference's, each within the rounding of the logits.

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
            try:
                compare_tokens(drawn.tokens[rows], self._inputs.hidden[rows], self._inputs.head, make_params(rows, self._mode))
            except AssertionError as error:
                count = f"{len(rows)} of {len(different)} tokens differ from the reference's"
                raise RuntimeError(f"{name} ({self._mode}): {count}: nothing is measured ({error})") from error
        if self._mode == "logprobs":
            self._check_logprobs(name, drawn, ~different)
        return len(rows)

    def _check_logprobs(self, name: str, drawn: nl.Samples, same: Tensor) -> None:
        got, want = drawn.logprobs, self._exact.logprobs
        if got is None or want is None:
            raise RuntimeError(f"{name} must return log-probabilities: nothing is measured")
        off = float((got - want)[same].abs().max()) if bool(same.any()) else 0.0
        if not off <= LOGPROB_TOLERANCE:  # NaN fails too
            raise RuntimeError(f"{name}: a log-probability is off by {off:.3g}: nothing is measured")
