"""A step's draw for an engine: tokens, and the log-probabilities in the form that engines pass on."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import likelihood
from ..dispatch import resolve
from ..head import LMHead
from ..ops import make_source, run_top
from ..params import RowParams, SamplingParams, make_rows
from ..types import TopTokens
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
    params = batch.params(positions, grammar)
    processed = logprobs_mode == "processed_logprobs"
    wanted = batch.num_top is not None
    out = head.sample(hidden, params, logprobs="processed" if wanted and processed else False)
    # A row without a finite logit has no token. Engines index with it, so it gets an id that exists, as from their own argmax.
    tokens = out.tokens.clamp(min=0)
    if not wanted:
        return Drawn(tokens)
    rows = _scored_rows(batch, params, grammar, processed, hidden)
    logprob, ranks = _score(head, hidden, rows, tokens)
    if processed and out.logprobs is not None and rows.filtered:
        # Under filters the drawn token's share is that of the kept set. A greedy row has no filters.
        logprob = torch.where(batch.greedy, logprob, out.logprobs)
    ids, logprobs = tokens[:, None], logprob[:, None]
    if batch.num_top:
        top = _top(head, hidden, rows, batch.num_top)
        ids = torch.cat((ids, _with_others(tokens, top.ids, batch.vocab_size)), dim=1)
        logprobs = torch.cat((logprobs, top.logprobs), dim=1)
    return Drawn(tokens, ids, logprobs, ranks)


def _with_others(tokens: Tensor, top: Tensor, vocab_size: int) -> Tensor:
    """``top [B, N]`` with ids that are not there yet instead of its -1: engines make a dictionary of a row."""
    first = torch.arange(min(2 * top.shape[1] + 1, vocab_size), device=top.device)
    listed = torch.cat((tokens[:, None], top), dim=1)
    used = (first[None, :, None] == listed[:, None, :]).any(-1)
    others = used.to(torch.int8).argsort(dim=1, stable=True)[:, : top.shape[1]]
    missing = top < 0
    place = (missing.cumsum(1) - 1).clamp(min=0)
    return torch.where(missing, others.gather(1, place), top)


def _scored_rows(
    batch: Batch, params: SamplingParams, grammar: dict[int, Any] | None, processed: bool, hidden: Tensor
) -> RowParams:
    """The distribution whose log-probabilities are told: engines tell a greedy row's at temperature 1."""
    if processed:
        temperature: Any = batch.temperature
        if isinstance(temperature, Tensor):
            temperature = torch.where(temperature == 0, 1.0, temperature)
        elif temperature == 0:
            temperature = 1.0
        told = SamplingParams(
            temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            logit_bias=params.logit_bias,
            allowed_tokens=params.allowed_tokens,
        )
    else:
        told = SamplingParams(allowed_tokens=batch.grammar_only(grammar))
    return make_rows(told, hidden.shape[0], batch.vocab_size, hidden.device, noise=False)


def _score(head: LMHead, hidden: Tensor, rows: RowParams, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability and rank of each row's token, as :func:`nologits.likelihood.score`."""
    if head.shard is None:
        return likelihood.score(make_source(hidden, head.spec, "torch"), rows, tokens)
    from .. import sharded  # torch.distributed is not everywhere

    return sharded.score(head.shard, hidden, rows, tokens)


def _top(head: LMHead, hidden: Tensor, rows: RowParams, count: int) -> TopTokens:
    if head.shard is None:
        impl = resolve("auto", hidden.device)
        return run_top(make_source(hidden, head.spec, impl), rows, count, impl)
    from .. import sharded

    return sharded.top_tokens(head.shard, hidden, rows, count)
