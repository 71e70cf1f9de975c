"""A step's draw for an engine: tokens, and the log-probabilities in the form that engines pass on."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import likelihood
from ..api import sample_rows
from ..head import LMHead
from ..ops import make_source, run_top
from ..params import RowParams
from ..types import Samples, TopTokens
from .rows import Batch


class Drawn(NamedTuple):
    """A step's result.

    Attributes:
        tokens: int64 ``[B]``, always ids of the vocabulary.
        ids: int64 ``[B, 1 + N]``: the drawn token, then the ``N`` most likely ones. Where the row keeps fewer, others follow.
        logprobs: fp32 ``[B, 1 + N]`` of ``ids``; -inf for tokens that the row does not keep.
        ranks: int64 ``[B]``: how many tokens are at least as likely as the drawn one, itself included.
    """

    tokens: Tensor
    ids: Tensor | None = None
    logprobs: Tensor | None = None
    ranks: Tensor | None = None


def draw(
    head: LMHead, hidden: Tensor, batch: Batch, positions: Any, grammar: dict[int, Any] | None, logprobs_mode: str
) -> Drawn:
    """Draws a token a row of ``hidden [B, D]``.

    Args:
        head, hidden: as for :meth:`nologits.LMHead.sample`.
        batch: the rows.
        positions, grammar: of this step, as for :meth:`Batch.params`.
        logprobs_mode: one of ``eligibility.LOGPROBS_MODES``; they are made if a row of ``batch`` asks for them.
    """
    processed = logprobs_mode == "processed_logprobs"
    wanted = batch.num_top is not None
    out = _sample(head, hidden, batch, positions, grammar, wanted and processed)
    # A row without a finite logit has no token. Engines index with it, so it gets an id that exists, as from their own argmax.
    tokens = out.tokens.clamp(min=0)
    if not wanted:
        return Drawn(tokens)
    rows = batch.told(processed, grammar)
    logprob, ranks = _score(head, hidden, rows, tokens)
    if processed and out.logprobs is not None and rows.filtered:
        # Under filters the drawn token's share is that of the kept set. A greedy row has no filters.
        logprob = torch.where(batch.greedy, logprob, out.logprobs)
    ids, logprobs = tokens[:, None], logprob[:, None]
    if batch.num_top:
        top = _top(head, hidden, rows, batch)
        ids = torch.cat((ids, _with_others(tokens, top.ids, batch.vocab_size)), dim=1)
        logprobs = torch.cat((logprobs, top.logprobs), dim=1)
    return Drawn(tokens, ids, logprobs, ranks)


def _sample(
    head: LMHead, hidden: Tensor, batch: Batch, positions: Any, grammar: dict[int, Any] | None, logprobs: bool
) -> Samples:
    """As :meth:`nologits.LMHead.sample`, whose checks of parameters are done once a batch."""
    if head.shard is not None:
        return head.sample(hidden, batch.params(positions, grammar), logprobs="processed" if logprobs else False)
    if head.vocab_size != batch.vocab_size:
        raise ValueError(f"batch must be of the head's {head.vocab_size} tokens, got {batch.vocab_size}")
    return sample_rows(hidden, head.spec, batch.drawn(positions, grammar), logprobs, batch.impl)


def _with_others(tokens: Tensor, top: Tensor, vocab_size: int) -> Tensor:
    """``top [B, N]`` with ids that are not there yet instead of its -1: engines make a dictionary of a row."""
    first = torch.arange(min(2 * top.shape[1] + 1, vocab_size), device=top.device)
    listed = torch.cat((tokens[:, None], top), dim=1)
    used = (first[None, :, None] == listed[:, None, :]).any(-1)
    others = used.to(torch.int8).argsort(dim=1, stable=True)[:, : top.shape[1]]
    missing = top < 0
    place = (missing.cumsum(1) - 1).clamp(min=0)
    return torch.where(missing, others.gather(1, place), top)


def _score(head: LMHead, hidden: Tensor, rows: RowParams, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability and rank of each row's token, as :func:`nologits.likelihood.score`."""
    if head.shard is None:
        return likelihood.score(make_source(hidden, head.spec, "torch"), rows, tokens)
    from .. import sharded  # torch.distributed is not everywhere

    return sharded.score(head.shard, hidden, rows, tokens)


def _top(head: LMHead, hidden: Tensor, rows: RowParams, batch: Batch) -> TopTokens:
    assert batch.num_top is not None
    if head.shard is None:
        return run_top(make_source(hidden, head.spec, batch.impl), rows, batch.num_top, batch.impl)
    from .. import sharded

    return sharded.top_tokens(head.shard, hidden, rows, batch.num_top)
