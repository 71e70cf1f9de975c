"""Filtered draws and kept sets, on logits materialised for a block of rows at a time.

A filter's boundary depends on the whole row, so its logits are made in full, for as few rows at a time as keep the scratch
under ``SCRATCH_BYTES``; the kept set is found exactly (``selection.py``), and the draw sees -inf elsewhere. Who makes a
block's logits and who draws from them is the caller's choice: plain torch, or the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .distribution import invalid_rows, log_softmax_at, log_total
from .params import RowParams
from .selection import count_sorted, keep_mask, needs_mass
from .sources import LogitsSource, Source, transform
from .types import Candidates, Samples

SCRATCH_BYTES = 64 << 20
"""Bound on the temporary memory of a block of rows (one row at least)."""

_BYTES_BY_RANK, _BYTES_BY_MASS = 24, 56
"""Temporaries per logit, measured: keys, masks and sums; with masses also fp64 and int64 copies."""


class Count:
    """Rows of a head whose logits were made for a filtered draw, by eager calls of this process so far.

    Those that kernels decide to make are counted on the device: :func:`nologits.fused.made_rows`.
    """

    rows = 0


DrawKept = Callable[[Tensor, RowParams, int], Tensor]
Rank = Callable[[Tensor, RowParams, int], tuple[Tensor, Tensor]]


def count_ranked(logits: Tensor, rows: RowParams, width: int) -> tuple[Tensor, Tensor]:
    """The first ``width`` ids of each row's order, int64 ``[B, width]``, and how many of the row are kept, int64 ``[B]``."""
    order, count = count_sorted(logits, rows)
    return order[:, :width], count.masked_fill(invalid_rows(logits, rows), 0)


def scratch(rows: RowParams) -> int:
    """Bytes of temporaries per logit."""
    return _BYTES_BY_MASS if needs_mass(rows) else _BYTES_BY_RANK


def row_blocks(batch: int, vocab: int, bytes_per_logit: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows whose temporaries fit in ``SCRATCH_BYTES``."""
    height = max(1, SCRATCH_BYTES // (vocab * bytes_per_logit))
    for start in range(0, batch, height):
        yield start, min(start + height, batch)


def sample(source: Source, rows: RowParams, num_samples: int, processed: bool, raw: bool, draw: DrawKept) -> Samples:
    """Draws ``[B, S]`` tokens; ``draw(kept logits, rows, S)`` draws from a block whose dropped logits are -inf."""
    batch, vocab, device = source.batch, source.vocab, source.device
    tokens = torch.empty(batch, num_samples, dtype=torch.int64, device=device)
    logprobs, raw_logprobs = (torch.empty(batch, num_samples, device=device) if wanted else None for wanted in (processed, raw))
    log_mass = torch.empty(batch, device=device) if processed else None
    rows = rows.with_keys(batch, device)
    if not isinstance(source, LogitsSource):
        Count.rows += batch
    invalid = torch.empty(batch, dtype=torch.bool, device=device)
    for start, stop in row_blocks(batch, vocab, scratch(rows)):
        some = rows.block(start, stop)
        head_logits = source.rows(start, stop).chunk(0, vocab)
        logits = transform(head_logits, some, 0, vocab)
        kept = logits.masked_fill(~keep_mask(logits, some), float("-inf"))
        drawn = draw(kept, some, num_samples).clamp(min=0)
        tokens[start:stop] = drawn
        invalid[start:stop] = invalid_rows(logits, some)
        if logprobs is not None and log_mass is not None:
            logprobs[start:stop] = log_softmax_at(kept, drawn, some.temperature32)
            log_mass[start:stop] = log_total(logits, some.temperature32)
        if raw_logprobs is not None:
            raw_logprobs[start:stop] = log_softmax_at(head_logits, drawn, 1.0)
    return Samples(tokens, logprobs, raw_logprobs, log_mass).invalidate(invalid)


def filter_logits(logits: Tensor, source: Source, rows: RowParams, out: Tensor, mask_value: float) -> None:
    """Writes the kept logits of ``source`` to ``out``, ``mask_value`` elsewhere; an invalid row becomes all ``mask_value``."""
    for start, stop in row_blocks(source.batch, source.vocab, scratch(rows)):
        some = rows.block(start, stop)
        chunk = source.rows(start, stop).chunk(0, source.vocab)
        keep = keep_mask(chunk, some) & ~invalid_rows(chunk, some)[:, None]
        out[start:stop] = logits[start:stop].masked_fill(~keep, mask_value)


def select(source: Source, rows: RowParams, width: int, rank: Rank = count_ranked) -> Candidates:
    """The kept set of each row, sorted, in ``width`` columns (at least the largest count).

    ``rank(logits, rows, width)`` gives each row's first ``width`` ids in the contract's order, and how many are kept.
    """
    batch, vocab, device = source.batch, source.vocab, source.device
    ids = torch.empty(batch, width, dtype=torch.int64, device=device)
    values, logprobs = (torch.empty(batch, width, device=device) for _ in range(2))
    counts = torch.empty(batch, dtype=torch.int64, device=device)
    column = torch.arange(width, device=device)
    for start, stop in row_blocks(batch, vocab, scratch(rows)):
        some = rows.block(start, stop)
        logits = transform(source.rows(start, stop).chunk(0, vocab), some, 0, vocab)
        order, count = rank(logits, some, width)
        inside = column < count[:, None]
        kept = logits.gather(1, order).masked_fill(~inside, float("-inf"))
        ids[start:stop] = torch.where(inside, order, -1)
        values[start:stop], counts[start:stop] = kept, count
        every = column.expand(len(kept), width)
        logprobs[start:stop] = log_softmax_at(kept, every, some.temperature32).masked_fill(~inside, float("-inf"))
    return Candidates(ids, values, logprobs, counts)
