"""What the public functions return, and the words that choose what they do."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Impl = Literal["auto", "reference", "torch", "triton", "hopper"]
LogprobsMode = Literal[False, "processed", "raw", True]
MergeRule = Literal["pathwise", "group"]

IMPLS: tuple[str, ...] = ("auto", "reference", "torch", "triton", "hopper")


def logprobs_wanted(mode: object) -> tuple[bool, bool]:
    """Which log-probabilities a mode asks for: (processed, raw).

    Raises:
        ValueError: it is none.
    """
    wanted = {False: (False, False), True: (True, True), "processed": (True, False), "raw": (False, True)}
    if not isinstance(mode, (bool, str)) or mode not in wanted:
        raise ValueError(f'logprobs must be False, "processed", "raw" or True, got {mode!r}')
    return wanted[mode]


class Samples(NamedTuple):
    """Drawn tokens, one row of the batch per row (``S`` draws per row when ``num_samples != 1``).

    Attributes:
        tokens: int64 ``[B]`` or ``[B, S]``; ``-1`` where the row is invalid (a NaN logit, no logit above -inf, or an
            impossible parameter).
        logprobs: fp32, shaped like ``tokens``: natural log-probability of the drawn token under the distribution that
            was sampled, after temperature and every filter. ``0`` for a greedy row, NaN for an invalid one.
            ``None`` unless ``logprobs`` is ``"processed"`` or ``True``.
        raw_logprobs: fp32, shaped like ``tokens``: log-probability of the drawn token under softmax of the head's own
            logits (temperature 1, no logit bias, mask or filter). ``None`` unless ``logprobs`` is ``"raw"`` or ``True``.
        log_mass: fp32 ``[B]``: logsumexp of the tempered logits before any filter, the group log-mass of FlashSampling
            (section on grouped sampling). For a greedy row its limit, the largest logit. Comes with ``logprobs``.
        top: the ``top_logprobs`` most likely tokens of the distribution that was sampled. ``None`` unless they were asked
            for, and ``logprobs`` is ``"processed"`` or ``True``.
        raw_top: the same of softmax of the head's own logits. ``None`` unless ``logprobs`` is ``"raw"`` or ``True``.
    """

    tokens: Tensor
    logprobs: Tensor | None = None
    raw_logprobs: Tensor | None = None
    log_mass: Tensor | None = None
    top: TopTokens | None = None
    raw_top: TopTokens | None = None

    def invalidate(self, rows: Tensor) -> Samples:
        """The same draws (``[B, S]``) with the marked rows (bool ``[B]``) invalid: token -1, NaN elsewhere."""
        column, nan = rows[:, None], float("nan")
        return Samples(
            self.tokens.masked_fill(column, -1),
            None if self.logprobs is None else self.logprobs.masked_fill(column, nan),
            None if self.raw_logprobs is None else self.raw_logprobs.masked_fill(column, nan),
            None if self.log_mass is None else self.log_mass.masked_fill(rows, nan),
        )

    def squeeze(self) -> Samples:
        """The same draws, one a row (``[B, 1]``), without the last dimension: ``[B]``."""
        return self._replace(
            tokens=self.tokens.squeeze(1),
            logprobs=None if self.logprobs is None else self.logprobs.squeeze(1),
            raw_logprobs=None if self.raw_logprobs is None else self.raw_logprobs.squeeze(1),
        )


class TopTokens(NamedTuple):
    """The most likely tokens of every row, in the order of the contract: logit descending, id ascending.

    Attributes:
        ids: int64 ``[B, N]``; ``-1`` beyond what the row keeps, and in an invalid row.
        logprobs: fp32 ``[B, N]``; ``-inf`` beyond what the row keeps, NaN in an invalid row. A greedy row's first token has 0,
            the others ``-inf``.
    """

    ids: Tensor
    logprobs: Tensor

    def invalidate(self, rows: Tensor) -> TopTokens:
        """The same with the marked rows (bool ``[B]``) invalid."""
        column = rows[:, None]
        return TopTokens(self.ids.masked_fill(column, -1), self.logprobs.masked_fill(column, float("nan")))


class Candidates(NamedTuple):
    """The kept set of every row, in the order of the contract: logit descending, id ascending.

    Attributes:
        ids: int64 ``[B, K]``; ``-1`` beyond a row's count.
        logits: fp32 ``[B, K]``, the transformed logits before the temperature; ``-inf`` beyond a row's count.
        logprobs: fp32 ``[B, K]`` under the tempered distribution renormalised over the kept set; ``-inf`` beyond.
        counts: int64 ``[B]``: how many tokens the row keeps; ``0`` where the row is invalid.
    """

    ids: Tensor
    logits: Tensor
    logprobs: Tensor
    counts: Tensor

    def to_csr(self) -> KeptRows:
        """The same without padding. Its size depends on the counts, so the host waits for them."""
        inside = torch.arange(self.ids.shape[1], device=self.ids.device) < self.counts[:, None]
        offsets = torch.zeros(len(self.counts) + 1, dtype=torch.int64, device=self.counts.device)
        torch.cumsum(self.counts, 0, out=offsets[1:])
        return KeptRows(offsets, self.ids[inside], self.logits[inside], self.logprobs[inside])


class KeptRows(NamedTuple):
    """Kept sets one after the other (compressed sparse rows): row b has entries ``offsets[b] .. offsets[b + 1] - 1``.

    Attributes:
        offsets: int64 ``[B + 1]``.
        ids: int64 ``[N]``, each row's in the order of the contract.
        logits: fp32 ``[N]``.
        logprobs: fp32 ``[N]``.
    """

    offsets: Tensor
    ids: Tensor
    logits: Tensor
    logprobs: Tensor


class Screen(NamedTuple):
    """The 8-bit copy of a head (:mod:`nologits.screen`, whose names these are).

    Attributes:
        weight: int8 ``[V, D]``; the pitch is a multiple of 16 bytes.
        scales: ``s``, fp32 ``[V + 256]``; beyond V all are 0.
        errors: ``E``, likewise.
        lengths: ``N``, likewise.
    """

    weight: Tensor
    scales: Tensor
    errors: Tensor
    lengths: Tensor


class ScreenedRows(NamedTuple):
    """Hidden states of 8 bits (:mod:`nologits.screen`).

    Attributes:
        parts: ``q1`` of all rows, then ``q2``: int8 ``[2 B, D]``. Of at most 32 rows 8 of the first, their 8 of the second,
            and so on, ``[16 ceil(B / 8), D]``: :func:`nologits.screen.part_rows`.
        scales: ``a``, ``a / 254``, ``A`` and ``R``: fp32 ``[B, 4]``.
        words: int32, 0: what the kernels of a draw tell each other (:meth:`word_counts`).
    """

    parts: Tensor
    scales: Tensor
    words: Tensor

    @staticmethod
    def packed(batch: int) -> bool:
        """Both parts of so many rows share an operand of the tensor cores (``kernels/sm90/tile.cuh``)."""
        return batch <= 32

    @staticmethod
    def num_parts(batch: int) -> int:
        """The rows of ``parts``."""
        return 16 * -(-batch // 8) if ScreenedRows.packed(batch) else 2 * batch

    @staticmethod
    def word_counts(batch: int) -> dict[str, int]:
        """What ``words`` are, in order (``Params`` of ``kernels/sm90/params.cuh``): the first are of 64 bits."""
        return {
            "exact_winners": 2 * batch, "gathered": batch, "floors": batch, "rescored": batch, "told": -(-batch // 8),
            "left": batch + 1,
        }  # fmt: skip
