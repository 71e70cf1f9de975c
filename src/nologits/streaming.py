"""The draw in plain torch, vocabulary chunk by vocabulary chunk: the default without a GPU. Nothing of size B x V is made.

A row's state is O(1): the best score so far and its id, the largest logit and the running mass, the winner's logits. Chunks
come in ascending id order and only a strictly larger score replaces the best, so ties stay with the smaller id (contract,
rule 3). The running mass is the online softmax's (FlashSampling's log-mass L_k, over the chunks as groups).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from . import filtered
from .distribution import divisor_of, first_argmax
from .params import RowParams
from .reference import scores
from .sources import HiddenSource, LogitsSource, Source, transform
from .types import Samples

_CHUNK_ELEMENTS = 1 << 15
"""Scores in flight. Their noise takes about 60 bytes each while it is made, in int64 words: 2 MB."""

_CHUNK_WEIGHTS = 1 << 22
"""Half-precision weight elements upcast at once: 16 MB."""


def sample(source: Source, rows: RowParams, num_samples: int, processed: bool, raw: bool) -> Samples:
    """Draws ``[B, S]`` tokens; arguments and results as :func:`nologits.reference.sample`."""
    if rows.filtered and source.device.type == "cpu":
        from .candidates import sample as draw_candidates  # which streams with what is below

        return draw_candidates(source, rows, num_samples, processed, raw, draw_kept)
    if rows.filtered:
        return filtered.sample(source, rows, num_samples, processed, raw, draw_kept)
    return _stream(source, rows, num_samples, processed, raw)


def _stream(source: Source, rows: RowParams, num_samples: int, processed: bool, raw: bool) -> Samples:
    running = RunningDraw(source.batch, source.device, rows, num_samples, processed, raw)
    for start, stop in vocabulary_chunks(source):
        running.update(source.chunk(start, stop), start)
    return running.result()


class RunningDraw:
    """A draw from a vocabulary that comes in chunks, in any order: each row's best token so far, and its masses."""

    def __init__(
        self,
        batch: int,
        device: torch.device,
        rows: RowParams,
        num_samples: int = 1,
        processed: bool = False,
        raw: bool = False,
    ) -> None:
        self.rows, self.processed, self.raw = rows, processed, raw
        self.tokens = torch.zeros(batch, num_samples, dtype=torch.int64, device=device)
        self.best = torch.full((batch, num_samples), float("-inf"), device=device)
        self.picked, self.picked_raw = self.best.clone(), self.best.clone()
        self.mass = RunningMass(batch, device, rows.temperature32, processed)
        self.raw_mass = RunningMass(batch, device, 1.0, raw)

    def update(self, head_logits: Tensor, start: int) -> None:
        """Takes the head's logits of the ids from ``start`` on, fp32 ``[B, W]``."""
        logits = transform(head_logits, self.rows, start, start + head_logits.shape[1])
        self.mass.update(logits)
        self.raw_mass.update(head_logits)
        for s in range(self.tokens.shape[1]):
            score = scores(logits, self.rows, start, s)
            index = first_argmax(score)[:, None]
            value, token = score.gather(1, index).squeeze(1), index.squeeze(1) + start
            tied = (value == self.best[:, s]) & (token < self.tokens[:, s])
            better = (value > self.best[:, s]) | tied
            self.best[:, s] = torch.where(better, value, self.best[:, s])
            self.tokens[:, s] = torch.where(better, token, self.tokens[:, s])
            self.picked[:, s] = torch.where(better, logits.gather(1, index).squeeze(1), self.picked[:, s])
            self.picked_raw[:, s] = torch.where(better, head_logits.gather(1, index).squeeze(1), self.picked_raw[:, s])

    def result(self) -> Samples:
        """The draw from all that has come, ``[B, S]``."""
        drawn = Samples(
            self.tokens,
            self.mass.logprob(self.picked) if self.processed else None,
            self.raw_mass.logprob(self.picked_raw) if self.raw else None,
            self.mass.log_total() if self.processed else None,
        )
        return drawn.invalidate(self.mass.invalid(self.rows))


class RunningMass:
    """The largest logit of each row (NaN if one is NaN) and, if ``sums``, the mass sum exp((l - peak) / T) of the chunks."""

    def __init__(self, batch: int, device: torch.device, temperature: float | Tensor, sums: bool) -> None:
        self.peak = torch.full((batch,), float("-inf"), device=device)
        self.total = torch.zeros(batch, dtype=torch.float64, device=device)
        self.divisor, self.greedy = divisor_of(temperature)
        self.sums = sums

    def update(self, logits: Tensor) -> None:
        peak = torch.maximum(self.peak, logits.amax(-1))
        if self.sums:
            # exp(-inf - -inf) would be NaN where a row has no finite logit yet.
            reference = peak.double().clamp(min=torch.finfo(torch.float32).min)[:, None]
            moved = (self.peak.double()[:, None] - reference) / self.divisor
            shares = ((logits.double() - reference) / self.divisor).exp()
            self.total = torch.where(self.total > 0, self.total * moved.exp().squeeze(1), 0.0) + shares.sum(-1)
        self.peak = peak

    def join(self, other: RunningMass) -> None:
        """Adds what another has seen, of other ids."""
        peak = torch.maximum(self.peak, other.peak)
        reference = peak.double().clamp(min=torch.finfo(torch.float32).min)[:, None]
        total = torch.zeros_like(self.total)
        for part in (self, other):
            moved = ((part.peak.double()[:, None] - reference) / self.divisor).exp().squeeze(1)
            total += torch.where(part.total > 0, part.total * moved, 0.0)
        self.peak, self.total = peak, total

    def invalid(self, rows: RowParams) -> Tensor:
        """bool ``[B]``: rows with a NaN, with no logit above -inf, or with an impossible parameter."""
        return ~(self.peak > float("-inf")) | rows.impossible(len(self.peak), self.peak.device)

    def logprob(self, picked: Tensor) -> Tensor:
        """Log-probabilities of tokens with logits ``picked [B, S]``, fp32; 0 for certain ones (T = 0, infinite)."""
        logprob = (picked.double() - self.peak.double()[:, None]) / self.divisor - self.total.log()[:, None]
        return torch.where((picked == float("inf")) | self.greedy, 0.0, logprob).float()

    def log_total(self) -> Tensor:
        """logsumexp(l / T), fp32 ``[B]``; for T = 0 the largest logit."""
        peak = self.peak.double()[:, None]
        total = peak / self.divisor + self.total.log()[:, None]
        return torch.where((peak == float("inf")) | self.greedy, peak, total).squeeze(1).float()


def vocabulary_chunks(source: Source) -> Iterator[tuple[int, int]]:
    """Vocabulary ranges, multiples of the noise's blocks of 128 ids, sized by the memory a chunk takes."""
    width = _CHUNK_ELEMENTS // max(source.batch, 1)
    if isinstance(source, HiddenSource) and source.hidden.dtype != torch.float32:
        width = min(width, _CHUNK_WEIGHTS // source.hidden.shape[1])
    width = max(width // 128, 1) * 128
    for start in range(0, source.vocab, width):
        yield start, min(start + width, source.vocab)


def draw_kept(kept: Tensor, rows: RowParams, num_samples: int) -> Tensor:
    """Draws ``[B, S]`` tokens from logits whose dropped entries are -inf."""
    return _stream(LogitsSource(kept), rows.bare(), num_samples, False, False).tokens
