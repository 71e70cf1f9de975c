"""How likely given tokens are, and how many tokens are at least as likely: what engines tell of a token beside its draw.

One pass over the head in chunks of the vocabulary. A shard of a head (:mod:`nologits.sharded`) does the same for its ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .params import RowParams
from .sources import HiddenSource, scaled_and_capped, transform
from .streaming import RunningMass, vocabulary_chunks


def score(source: HiddenSource, rows: RowParams, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The log-probability and the rank of given tokens, before filters.

    Args:
        source: the hidden states ``[B, D]`` and their head.
        rows: temperature, sparse logit bias and mask; filters are not looked at.
        tokens: int64 ``[B]``.

    Returns:
        fp32 ``[B]`` and int64 ``[B]``; a rank counts the tokens that are at least as likely, the given one included.
    """
    picked = logits_at(source, rows, tokens)
    mass, others = count_others(source, rows, tokens, picked)
    return mass.logprob(picked).squeeze(1), 1 + others


def logits_at(source: HiddenSource, rows: RowParams, tokens: Tensor, first_id: int = 0) -> Tensor:
    """fp32 ``[B, 1]``: each row's transformed logit at its token. The source's ids start at ``first_id``."""
    head, local = source.head, tokens - first_id
    logits = (source.hidden.float() * head.weight[local].float()).sum(1)
    if head.bias is not None:
        logits = logits + head.bias[local].float()
    logits = scaled_and_capped(logits, head)
    if rows.bias_ids is not None and rows.bias_values is not None:
        here = rows.bias_ids == tokens[:, None]
        logits = logits + torch.where(here, rows.bias_values, 0.0).sum(1)
    return logits[:, None]


def count_others(
    source: HiddenSource, rows: RowParams, tokens: Tensor, picked: Tensor, first_id: int = 0
) -> tuple[RunningMass, Tensor]:
    """The mass of the source's logits, and how many other tokens have a logit of at least ``picked [B, 1]``, int64 ``[B]``."""
    mass = RunningMass(source.batch, source.device, rows.temperature32, True)
    count = torch.zeros_like(tokens)
    for start, stop in vocabulary_chunks(source):
        logits = transform(source.chunk(start, stop), rows, first_id + start, first_id + stop)
        mass.update(logits)
        # The token itself is counted once, by the caller, whatever the rounding of its logit here and in the chunk.
        other = torch.arange(first_id + start, first_id + stop, device=source.device) != tokens[:, None]
        count += ((logits >= picked) & other).sum(1)
    return mass, count
