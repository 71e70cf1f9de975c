"""The most likely tokens of every row, beside a draw: ids and log-probabilities in the contract's order.

Rows without filters are streamed over the vocabulary: a row's state is its best ``count`` tokens and its mass. On a CPU, what
filters keep is settled among a row's best tokens (:mod:`nologits.candidates`). Elsewhere, and for rows that are not settled,
whole rows are made, a block of them at a time, as in :mod:`nologits.filtered`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import candidates, filtered
from .distribution import divisor_of, invalid_rows, log_softmax_at
from .params import RowParams
from .selection import NO_WORD, keep_mask, needs_mass, order_words, token_of, value_of
from .sources import HiddenSource, LogitsSource, Source, transform
from .streaming import RunningMass, vocabulary_chunks
from .types import TopTokens

MAX_TOP = 128
"""Tokens a row."""


def top_tokens(source: Source, rows: RowParams, count: int) -> TopTokens:
    """The first ``count`` tokens of each row's kept set, ``[B, count]``; -1 and -inf beyond it, -1 and NaN in invalid rows."""
    chunked = isinstance(source, (HiddenSource, LogitsSource))
    if chunked and not rows.filtered:
        return _streamed(source, rows, count)
    if chunked and source.device.type == "cpu":
        return _settled(source, rows, count)
    return _of_whole_rows(source, rows, count)


def _of_whole_rows(source: Source, rows: RowParams, count: int) -> TopTokens:
    ids = torch.empty(source.batch, count, dtype=torch.int64, device=source.device)
    logprobs = torch.empty(source.batch, count, device=source.device)
    for start, stop in filtered.row_blocks(source.batch, source.vocab, filtered.scratch(rows)):
        some = rows.block(start, stop)
        logits = transform(source.rows(start, stop).chunk(0, source.vocab), some, 0, source.vocab)
        kept = logits.masked_fill(~keep_mask(logits, some), float("-inf"))
        words = order_words(kept, 0).topk(min(count, source.vocab), dim=-1).values
        found = log_softmax_at(kept, token_of(words), some.temperature32)
        ids[start:stop], logprobs[start:stop] = finish(words, found, invalid_rows(logits, some), some, count)
    return TopTokens(ids, logprobs)


def _settled(source: Source, rows: RowParams, count: int) -> TopTokens:
    best = candidates.collect(source, rows, min(source.vocab, width_for(rows, count)), needs_mass(rows), False)
    return settle(best, rows, source.vocab, count, source.rows)


def width_for(rows: RowParams, count: int) -> int:
    """How many of a row's best tokens are looked at for its ``count`` most likely ones under filters."""
    return max(count, candidates.width_for(rows))


def settle(best: candidates.Best, rows: RowParams, vocab: int, count: int, whole: Callable[[int, int], Source]) -> TopTokens:
    """The first ``count`` tokens of what filters keep of each row's best; ``whole(start, stop)`` makes uncertain rows."""
    batch, device = best.words.shape[0], best.words.device
    counts, certain = candidates.count_kept(best, rows, vocab)
    inside = torch.arange(best.words.shape[1], device=device) < counts[:, None]
    kept = value_of(best.words).masked_fill(~inside, float("-inf"))
    first = torch.arange(min(count, kept.shape[1]), device=device).expand(batch, -1)
    logprobs = log_softmax_at(kept, first, rows.temperature32).masked_fill(~inside[:, : first.shape[1]], float("-inf"))
    words = best.words[:, : first.shape[1]].masked_fill(~inside[:, : first.shape[1]], NO_WORD)
    invalid = best.mass.invalid(rows)
    top = finish(words, logprobs, invalid, rows, count)
    greedy = torch.as_tensor(rows.temperature32, device=device) == 0  # settled, but for their list
    for start, stop in candidates.runs(~invalid & (~certain | greedy)):
        some = _of_whole_rows(whole(start, stop), rows.block(start, stop), count)
        top.ids[start:stop], top.logprobs[start:stop] = some
    return top


def _streamed(source: Source, rows: RowParams, count: int) -> TopTokens:
    batch, device = source.batch, source.device
    mass = RunningMass(batch, device, rows.temperature32, True)
    words = torch.empty(batch, 0, dtype=torch.int64, device=device)
    for start, stop in vocabulary_chunks(source):
        logits = transform(source.chunk(start, stop), rows, start, stop)
        mass.update(logits)
        best = torch.cat((words, order_words(logits, start)), dim=1)
        words = best.topk(min(count, best.shape[1]), dim=-1).values
    return finish(words, mass.logprob(value_of(words)), mass.invalid(rows), rows, count)


def finish(words: Tensor, logprobs: Tensor, invalid: Tensor, rows: RowParams, count: int) -> TopTokens:
    """``count`` columns of the tokens behind sorted words. At T = 0 the first has all the probability."""
    batch, missing = words.shape[0], count - words.shape[1]
    first = torch.arange(words.shape[1], device=words.device) == 0
    _, greedy = divisor_of(rows.temperature32)
    logprobs = logprobs.masked_fill(~first & greedy, float("-inf"))
    outside = ~(value_of(words) > float("-inf"))
    ids = token_of(words).masked_fill(outside, -1)
    logprobs = logprobs.masked_fill(outside, float("-inf"))
    ids = torch.cat((ids, ids.new_full((batch, missing), -1)), dim=1)
    logprobs = torch.cat((logprobs, logprobs.new_full((batch, missing), float("-inf"))), dim=1)
    return TopTokens(ids, logprobs).invalidate(invalid)
