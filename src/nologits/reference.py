"""The specification: every rule of the contract in plain torch, on materialised logits. Slow on purpose; tests compare
every other implementation with it.

The product runs in fp64 and is rounded once, so the reference's logits are the exact ones; other implementations accumulate
in fp32. A token that differs must have a score within that rounding (``nologits.testing.budget``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .distribution import first_argmax, invalid_rows, log_softmax_at, log_total
from .noise import gumbel_noise
from .params import RowParams
from .selection import column, count_sorted
from .sources import Source, transform
from .types import Samples


def sample(source: Source, rows: RowParams, num_samples: int, processed: bool, raw: bool) -> Samples:
    """Draws ``[B, S]`` tokens; ``processed`` and ``raw`` ask for the log-probabilities (and log-mass) of that kind."""
    head_logits = source.chunk(0, source.vocab)
    logits = transform(head_logits, rows, 0, source.vocab)
    kept = logits
    if rows.filtered:
        order, counts = count_sorted(logits, rows)
        rank = torch.arange(source.vocab, device=source.device)
        keep = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, order, rank < counts[:, None])
        kept = logits.masked_fill(~keep, float("-inf"))
    tokens = torch.empty(source.batch, num_samples, dtype=torch.int64, device=source.device)
    for sample in range(num_samples):
        tokens[:, sample] = first_argmax(scores(kept, rows, 0, sample))
    logprobs = raw_logprobs = log_mass = None
    if processed:
        logprobs = log_softmax_at(kept, tokens, rows.temperature32)
        log_mass = log_total(logits, rows.temperature32)
    if raw:
        raw_logprobs = log_softmax_at(head_logits, tokens, 1.0)
    return Samples(tokens, logprobs, raw_logprobs, log_mass).invalidate(invalid_rows(logits, rows))


def scores(logits: Tensor, rows: RowParams, start: int, sample: int) -> Tensor:
    """The noisy scores of ids ``start ..``, fp32, shaped like ``logits``: logits + T * Gumbel noise."""
    if rows.greedy:
        return logits
    seed, position = rows.keys(logits.shape[0], logits.device)
    noise = gumbel_noise(seed, position, start, start + logits.shape[1], sample)
    return logits + column(rows.temperature32) * noise
