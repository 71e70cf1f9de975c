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
    batch, device = source.batch, source.device
    tokens = torch.zeros(batch, num_samples, dtype=torch.int64, device=device)
    best = torch.full((batch, num_samples), float("-inf"), device=device)
    picked, picked_raw = best.clone(), best.clone()
    mass = RunningMass(batch, device, rows.temperature32, processed)
    raw_mass = RunningMass(batch, device, 1.0, raw)
    for start, stop in vocabulary_chunks(source):
        head_logits = source.chunk(start, stop)
        logits = transform(head_logits, rows, start, stop)
        mass.update(logits)
        raw_mass.update(head_logits)
        for s in range(num_samples):
            score = scores(logits, rows, start, s)
            index = first_argmax(score)[:, None]
            value = score.gather(1, index).squeeze(1)
            better = value > best[:, s]
            best[:, s] = torch.where(better, value, best[:, s])
            tokens[:, s] = torch.where(better, index.squeeze(1) + start, tokens[:, s])
            picked[:, s] = torch.where(better, logits.gather(1, index).squeeze(1), picked[:, s])
            picked_raw[:, s] = torch.where(better, head_logits.gather(1, index).squeeze(1), picked_raw[:, s])
    drawn = Samples(
        tokens,
        mass.logprob(picked) if processed else None,
        raw_mass.logprob(picked_raw) if raw else None,
        mass.log_total() if processed else None,
    )
    return drawn.invalidate(mass.invalid(rows))


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
