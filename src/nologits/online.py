"""A draw from a vocabulary whose logits, or whose head's rows, come one group at a time."""

from __future__ import annotations

import bisect

import torch
from torch import Tensor

from .distribution import first_argmax
from .groups import group_noise
from .head import check_hidden, make_spec
from .params import RowParams, SamplingParams, check_device, make_rows
from .reference import scores
from .sources import HiddenSource, transform
from .streaming import RunningDraw, RunningMass, vocabulary_chunks
from .types import LogprobsMode, MergeRule, Samples, logprobs_wanted


class OnlineSampler:
    """Draws from groups of logits as they come, with a state of a few numbers a row, whatever V is.

    Groups may come in any order and size; each id comes once. The whole may never be in memory: a head streamed from a disk is
    drawn from by :meth:`update_head`.

    Args:
        batch: B, rows.
        vocab_size: V, ids of the whole vocabulary.
        params: how to draw; without filters, which need whole rows.
        merge: ``"pathwise"`` (the best score of all ids: the very token of one draw from the whole) or ``"group"``
            (FlashSampling's binary rule: a group takes over by its log-mass and fresh noise; exact in distribution).
        logprobs: as for :func:`nologits.sample`; ``"raw"`` and ``True`` with ``"pathwise"`` only.
        device: where the groups will be.

    Raises:
        ValueError: naming the argument, what it must be and what it was.
    """

    def __init__(
        self,
        batch: int,
        vocab_size: int,
        params: SamplingParams | None = None,
        *,
        merge: MergeRule = "pathwise",
        logprobs: LogprobsMode = False,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, value in (("batch", batch), ("vocab_size", vocab_size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if merge not in ("pathwise", "group"):
            raise ValueError(f'merge must be "pathwise" or "group", got {merge!r}')
        processed, raw = logprobs_wanted(logprobs)
        if merge == "group" and raw:
            raise ValueError(f'logprobs must be False or "processed" with merge="group", got {logprobs!r}')
        self.batch, self.vocab_size, self.device = batch, vocab_size, torch.empty(0, device=device).device
        self._params = params or SamplingParams()
        rows = make_rows(self._params, batch, vocab_size, self.device)
        if rows.filtered:
            raise ValueError("params must have no top_k, top_p or min_p: they need whole rows")
        # Every group has the row's noise: fresh keys are drawn once, here
        self._rows = rows.with_keys(batch, self.device)._replace(entropy=None)
        self._draw: RunningDraw | _RunningGroups
        if merge == "pathwise":
            self._draw = RunningDraw(batch, self.device, self._rows, 1, processed, raw)
        else:
            self._draw = _RunningGroups(batch, self.device, self._rows, processed)
        self._seen: list[tuple[int, int]] = []  # ranges of ids, in order

    @property
    def missing(self) -> int:
        """Ids that have not come yet."""
        return self.vocab_size - sum(stop - start for start, stop in self._seen)

    def update(self, logits: Tensor, first_id: int | None = None) -> None:
        """Takes a group.

        Args:
            logits: ``[B, W]``, any floating dtype: the head's own logits of W neighbouring ids.
            first_id: the first of these ids; default: the smallest that has not come.

        Raises:
            ValueError: naming the argument, what it must be and what it was; the state stays as it was.
        """
        if logits.dim() != 2 or logits.shape[0] != self.batch or not logits.is_floating_point():
            raise ValueError(f"logits must be floating [{self.batch}, W], got {logits.dtype} {list(logits.shape)}")
        check_device("logits", logits, self.device)
        start = self._claim(first_id, logits.shape[1], "logits")
        self._draw.update(logits.detach().float(), start)

    def update_head(
        self,
        hidden: Tensor,
        weight: Tensor,
        first_id: int | None = None,
        *,
        bias: Tensor | None = None,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        """Takes a group as rows of the head; their logits are made a chunk at a time.

        Args:
            hidden: ``[B, D]``, the same at every call.
            weight: ``[W, D]``, the head's rows of W neighbouring ids.
            first_id: the first of these ids; default: the smallest that has not come.
            bias: ``[W]``, of these ids.
            scale, softcap: as for :class:`nologits.LMHead`.

        Raises:
            ValueError: naming the argument, what it must be and what it was; the state stays as it was.
        """
        head = make_spec(weight, bias, scale, softcap, None)
        check_hidden(hidden, head)
        if hidden.shape[0] != self.batch:
            raise ValueError(f"hidden must have {self.batch} rows, got {hidden.shape[0]}")
        check_device("hidden", hidden, self.device)
        start = self._claim(first_id, weight.shape[0], "weight")
        source = HiddenSource(hidden.detach(), head)
        for low, high in vocabulary_chunks(source):
            self._draw.update(source.chunk(low, high), start + low)

    def result(self, partial: bool = False) -> Samples:
        """The draw, ``[B]``.

        Args:
            partial: draw from the groups that have come, though ids are missing.

        Raises:
            RuntimeError: ids are missing, and ``partial`` does not allow it.
        """
        if self.missing and not partial:
            raise RuntimeError(
                f"{self.missing} of {self.vocab_size} ids have not come, the first {self._next()}; or pass partial=True"
            )
        return self._draw.result().squeeze()

    def _next(self) -> int:
        """The smallest id that has not come."""
        return self._seen[0][1] if self._seen and self._seen[0][0] == 0 else 0

    def _claim(self, first_id: int | None, width: int, name: str) -> int:
        """Notes that ids come; where they start."""
        start = self._next() if first_id is None else first_id
        if isinstance(start, bool) or not isinstance(start, int) or start < 0:
            raise ValueError(f"first_id must be an integer >= 0, got {first_id!r}")
        stop = start + width
        if width < 1 or stop > self.vocab_size:
            raise ValueError(
                f"{name} must be of 1 to {self.vocab_size - start} ids from {start} on (V = {self.vocab_size}), got {width}"
            )
        at = bisect.bisect(self._seen, (start, start))
        for low, high in self._seen[max(0, at - 1) : at + 1]:
            if low < stop and start < high:
                raise ValueError(
                    f"first_id must start ids that have not come, got {start} to {stop - 1}: {low} to {high - 1} have"
                )
        self._seen.insert(at, (start, stop))
        joined: list[tuple[int, int]] = []
        for low, high in self._seen:
            if joined and joined[-1][1] == low:
                joined[-1] = (joined[-1][0], high)
            else:
                joined.append((low, high))
        self._seen = joined
        return start


class _RunningGroups:
    """The binary rule: a token, the perturbed log-mass that its group had, and the masses of all."""

    def __init__(self, batch: int, device: torch.device, rows: RowParams, processed: bool) -> None:
        self.rows, self.processed, self.device = rows, processed, device
        self.tokens = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.best = torch.full((batch, 1), float("-inf"), device=device)
        self.picked = self.best.clone()
        self.mass = RunningMass(batch, device, rows.temperature32, True)
        self.groups = 0

    def update(self, head_logits: Tensor, start: int) -> None:
        """Takes the head's logits of a group, fp32 ``[B, W]``."""
        batch = len(head_logits)
        logits = transform(head_logits, self.rows, start, start + head_logits.shape[1])
        mine = RunningMass(batch, self.device, self.rows.temperature32, True)
        mine.update(logits)
        self.mass.update(logits)
        index = first_argmax(scores(logits, self.rows, start, 0))[:, None]
        params = SamplingParams(self.rows.temperature, seed=self.rows.seed, position=self.rows.position)
        score = mine.log_total()[:, None] + group_noise(params, batch, self.device, self.groups, 1)
        token = index + start
        better = (score > self.best) | ((score == self.best) & (token < self.tokens))
        self.best = torch.where(better, score, self.best)
        self.tokens = torch.where(better, token, self.tokens)
        self.picked = torch.where(better, logits.gather(1, index), self.picked)
        self.groups += 1

    def result(self) -> Samples:
        """The draw from all groups, ``[B, 1]``."""
        drawn = Samples(
            self.tokens,
            self.mass.logprob(self.picked) if self.processed else None,
            None,
            self.mass.log_total() if self.processed else None,
        )
        return drawn.invalidate(self.mass.invalid(self.rows))
