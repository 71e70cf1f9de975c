"""Kept sets by sorting in float64: an oracle written from the contract (rules 2 and 3), not from the library's code.

It shares nothing with ``selection.py``: masses are float64 numbers, not integers, and are added up in sorted order. Where two
right answers could differ by rounding alone it says so instead of guessing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MARGIN = 1e-9
"""A boundary closer than this is undecided. The contract rounds masses to 2^-40 of the largest; V = 2^18 of these roundings add
up like a random walk to 2e-10, and what float64 loses is less."""


class KeptSets(NamedTuple):
    """The kept set of each row.

    Attributes:
        keep: bool ``[B, V]``.
        clear: bool ``[B]``: no boundary of the row is within :data:`MARGIN`, so every exact filter keeps just this set.
    """

    keep: Tensor
    clear: Tensor


def kept_sets(
    logits: Tensor,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    temperature: float = 1.0,
) -> KeptSets:
    """What min-p, then top-k, then top-p keep; among equal logits the lowest ids.

    Args:
        logits: ``[B, V]`` of any floating dtype, without NaN or +inf, each row with a finite logit.
        top_k: the number kept, exactly; at least 1.
        top_p: the shortest prefix of what top-k left whose share of its mass reaches p, at least one token.
        min_p: keep what is at least this likely, relative to the likeliest.
        temperature: above 0.

    Returns:
        :class:`KeptSets` on the device of ``logits``.
    """
    ranked, order = torch.sort(logits.detach().double(), dim=-1, descending=True, stable=True)
    mass = ((ranked - ranked[:, :1]) / temperature).exp()
    inside = ranked > float("-inf")
    clear = torch.ones(len(ranked), dtype=torch.bool, device=ranked.device)
    if min_p is not None:
        clear &= ~(inside & ((mass - min_p).abs() < MARGIN)).any(-1)
        inside &= mass >= min_p
    if top_k is not None:
        inside[:, top_k:] = False
    if top_p is not None and top_p < 1:
        share = (mass * inside).cumsum(-1)
        share /= share[:, -1:].clone()
        clear &= ~((share - top_p).abs() < MARGIN).any(-1)
        before = share.roll(1, -1)
        before[:, 0] = -1.0  # the first is kept whatever p is
        inside &= before < top_p
    return KeptSets(torch.zeros_like(inside).scatter_(1, order, inside), clear)
