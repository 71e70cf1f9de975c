"""Filtered draws and kept sets from the best few hundred tokens of each row: the default on a CPU. No logits of size B x V.

One pass over the vocabulary keeps a row's best tokens and its mass. Filters keep prefixes of the order, so what they keep lies
among those tokens if a certificate says so: top-k asks for no more of them, or min-p drops the last, or they reach the share p
of the whole mass beyond the rounding of masses to units (:mod:`nologits.selection`). Rows without one (wide nuclei, rows that
no filter cuts) are drawn from whole rows instead, as in :mod:`nologits.filtered`. Which way a row goes decides how long it
takes, never its token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from . import filtered
from .distribution import log_softmax_at
from .noise import gumbel_at
from .params import RowParams
from .selection import MASS_BITS, column, fixed_mass, needs_mass, order_words, token_of, value_of
from .sources import Source, transform
from .streaming import RunningMass, vocabulary_chunks
from .types import Candidates, Samples

WIDTH, MAX_WIDTH = 256, 1024
"""Candidates of a row: at least this many, and as many as the largest top-k asks for, within bounds."""


class Best(NamedTuple):
    """What one pass over the vocabulary leaves of each row.

    Attributes:
        words: int64 ``[B, W]``, the best tokens in order (:func:`nologits.selection.order_words`).
        mass: of the transformed logits at the row's temperature.
        head: fp32 ``[B, W]``, the head's own logits of those tokens, and their mass at 1; or ``None``.
    """

    words: Tensor
    mass: RunningMass
    head: tuple[Tensor, RunningMass] | None


def sample(source: Source, rows: RowParams, num_samples: int, processed: bool, raw: bool, whole: filtered.DrawKept) -> Samples:
    """Draws ``[B, S]`` tokens, arguments and results as :func:`nologits.reference.sample`; ``whole`` draws from whole rows.

    The host reads which rows have a certificate: not for GPUs.
    """
    rows = rows.with_keys(source.batch, source.device)
    best = collect(source, rows, min(source.vocab, width_for(rows)), processed or needs_mass(rows), raw)
    return settle_draws(best, rows, source.vocab, num_samples, processed, source.rows, whole)


def settle_draws(
    best: Best,
    rows: RowParams,
    vocab: int,
    num_samples: int,
    processed: bool,
    whole: Callable[[int, int], Source],
    draw: filtered.DrawKept,
) -> Samples:
    """The draws, given each row's best tokens; ``whole(start, stop)`` makes uncertain rows, and ``draw`` draws from those."""
    counts, certain = count_kept(best, rows, vocab)
    invalid, raw = best.mass.invalid(rows), best.head is not None
    drawn = draw_kept(best, counts, rows, num_samples, processed).invalidate(invalid)
    for start, stop in runs(~(certain | invalid)):
        some = filtered.sample(whole(start, stop), rows.block(start, stop), num_samples, processed, raw, draw)
        for target, made in zip(drawn[:4], some[:4], strict=True):
            if isinstance(target, Tensor) and isinstance(made, Tensor):
                target[start:stop] = made
    return drawn


def collect(source: Source, rows: RowParams, width: int, masses: bool, raw: bool, first_id: int = 0) -> Best:
    """The pass over the vocabulary; ``masses`` says whether masses are wanted, ``raw`` whether the head's own logits are.

    The source's ids start at ``first_id``, if it is a shard's.
    """
    batch, device = source.batch, source.device
    mass, raw_mass = RunningMass(batch, device, rows.temperature32, masses), RunningMass(batch, device, 1.0, raw)
    words = torch.empty(batch, 0, dtype=torch.int64, device=device)
    raw_logits = torch.empty(batch, 0, device=device)
    for start, stop in vocabulary_chunks(source):
        head_logits = source.chunk(start, stop)
        logits = transform(head_logits, rows, first_id + start, first_id + stop)
        mass.update(logits)
        both = torch.cat((words, order_words(logits, first_id + start)), dim=1)
        words, index = both.topk(min(width, both.shape[1]), dim=-1)
        if raw:
            raw_mass.update(head_logits)
            raw_logits = torch.cat((raw_logits, head_logits), dim=1).gather(1, index)
    return Best(words, mass, (raw_logits, raw_mass) if raw else None)


def count_kept(best: Best, rows: RowParams, vocab: int) -> tuple[Tensor, Tensor]:
    """How many of each row's candidates are kept, int64 ``[B]``, and whether it is certain that they are all that is kept."""
    logits = value_of(best.words)
    width = logits.shape[1]
    share, mass = fixed_mass(logits, rows.temperature32)
    count = ((logits > float("-inf")) & (share >= column(rows.min_p))).sum(-1)
    complete = (count < width) | (width == vocab)  # beyond the last that is kept there are only less likely ones
    top_k = torch.as_tensor(rows.top_k, device=logits.device)
    limited = (top_k > 0) & (top_k <= count)
    count, complete = torch.where(limited, top_k, count), complete | limited

    # Masses before and up to each token, and of all that top-p sees: exact where that is known, else to within a doubt.
    through = mass.cumsum(-1)
    known = through.gather(1, (count - 1).clamp(min=0)[:, None])
    total = torch.where(complete[:, None], known.double(), best.mass.total[:, None] * 2.0**MASS_BITS)
    doubt = torch.where(complete[:, None], 0.0, vocab / 2 + total * 2.0**-36)
    target = column(rows.top_p) * total
    before = (through - mass).double()
    reached = torch.minimum((before < target).sum(-1).clamp(min=1), count)
    top_p = torch.as_tensor(rows.top_p, device=logits.device)
    plain = torch.as_tensor(rows.min_p, device=logits.device) == 0
    clear = ((before - target).abs() > doubt).all(-1) & (through[:, -1].double() > (target + doubt)[:, 0])
    certain = complete | (clear & plain & (top_p < 1.0))
    greedy = torch.as_tensor(rows.temperature32, device=logits.device) == 0
    return torch.where(greedy, 1, torch.where(top_p < 1.0, reached, count)), certain | greedy


def draw_kept(best: Best, counts: Tensor, rows: RowParams, num_samples: int, processed: bool) -> Samples:
    """Draws from the first ``counts`` candidates of each row."""
    ids, logits = token_of(best.words), value_of(best.words)
    inside = torch.arange(logits.shape[1], device=logits.device) < counts[:, None]
    kept = logits.masked_fill(~inside, float("-inf"))
    seed, position = rows.keys(len(logits), logits.device)
    places = []
    for number in range(num_samples):
        score = kept + column(rows.temperature32) * gumbel_at(seed, position, ids, number)
        first = (score == score.amax(-1, keepdim=True)) & inside
        places.append(torch.where(first, ids, ids.amax() + 1).argmin(-1))  # of equal scores the smallest id
    place = torch.stack(places, dim=1)
    return Samples(
        ids.gather(1, place),
        log_softmax_at(kept, place, rows.temperature32) if processed else None,
        best.head[1].logprob(best.head[0].gather(1, place)) if best.head else None,
        best.mass.log_total() if processed else None,
    )


def select(source: Source, rows: RowParams, width: int) -> Candidates:
    """The kept set of each row, sorted; arguments and results as :func:`nologits.filtered.select`. Not for GPUs, as above."""
    best = collect(source, rows, min(source.vocab, width_for(rows)), needs_mass(rows), False)
    return settle_sets(best, rows, source.vocab, width, source.rows)


def settle_sets(best: Best, rows: RowParams, vocab: int, width: int, whole: Callable[[int, int], Source]) -> Candidates:
    """The kept sets in ``width`` columns, given each row's best tokens; ``whole(start, stop)`` makes uncertain rows."""
    batch, device = best.words.shape[0], best.words.device
    counts, certain = count_kept(best, rows, vocab)
    invalid = best.mass.invalid(rows)
    counts = counts.masked_fill(invalid, 0)
    columns = torch.arange(min(width, best.words.shape[1]), device=device)
    inside = columns < counts[:, None]
    kept = value_of(best.words)[:, : len(columns)].masked_fill(~inside, float("-inf"))
    logprobs = log_softmax_at(kept, columns.expand(batch, -1), rows.temperature32).masked_fill(~inside, float("-inf"))
    ids = token_of(best.words)[:, : len(columns)].masked_fill(~inside, -1)
    beyond = (0, width - len(columns))
    sets = Candidates(
        torch.nn.functional.pad(ids, beyond, value=-1),
        torch.nn.functional.pad(kept, beyond, value=float("-inf")),
        torch.nn.functional.pad(logprobs, beyond, value=float("-inf")),
        counts,
    )
    greedy = torch.as_tensor(rows.temperature32, device=device) == 0  # their first token is certain, their set is not
    for start, stop in runs(~invalid & (~certain | greedy)):
        some = filtered.select(whole(start, stop), rows.block(start, stop), width)
        for target, made in zip(sets, some, strict=True):
            target[start:stop] = made
    return sets


def width_for(rows: RowParams) -> int:
    """How many candidates a row of this request has."""
    largest = int(rows.top_k.max()) if isinstance(rows.top_k, Tensor) else rows.top_k
    return min(max(WIDTH, largest), MAX_WIDTH)


def runs(marked: Tensor) -> list[tuple[int, int]]:
    """Ranges of neighbouring rows that are marked."""
    flags = [0, *marked.int().tolist(), 0]
    edges = [index for index in range(len(flags) - 1) if flags[index] != flags[index + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))
