"""The contract's kept sets (min-p, then top-k, then top-p), exact and independent of the order of summation.

Tokens are ordered by (logit descending, id ascending), so every filter keeps a prefix and the kept set is one number a row.
Masses that decide a boundary are integers: exp((l - max) / T), computed in fp64 and rounded to units of 2^-40 of the row's
largest term. Integer sums are the same in any order, on any device and for any tiling (contract, rule 5).

Two ways to the same set: :func:`count_sorted` sorts (the specification); :func:`keep_mask` bisects the 32 bits of the order
as Qrita bisects pivots, then settles duplicates of the boundary value by id. It never sorts, and no cap can cut it short:
after 32 halvings one value is left. Neither reads anything back to the host.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .params import RowParams

MASS_BITS = 40
"""One unit of mass is 2^-40 of the largest term of the row; sums stay below 2^62 for V up to 2^22."""

MAX_VOCAB = 1 << 22

_REVERSED = 0xFFFFFFFF
NO_WORD = -(2**63)
"""Below every word of :func:`order_words`; its logit is not a number."""


def fixed_mass(logits: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """Mass of every token relative to the row's largest, exact in its last unit.

    Args:
        logits: fp32 ``[B, V]``, NaN-free rows where the result matters.
        temperature: scalar or ``[B]`` fp32; at 0 all mass sits on the largest logit.

    Returns:
        ``(share, mass)``: exp((l - max) / T) in fp64, and the same in units of 2^-40 as int64, both ``[B, V]``.
    """
    peak = logits.amax(dim=-1, keepdim=True)
    scale = temperature[:, None].double() if isinstance(temperature, Tensor) else temperature
    # Equal to the peak means share 1, also where the difference is inf - inf or the temperature 0.
    share = torch.where(logits == peak, 1.0, ((logits.double() - peak.double()) / scale).exp())
    share = share.masked_fill(logits == float("-inf"), 0.0).nan_to_num(0.0)
    return share, (share * 2.0**MASS_BITS).round().to(torch.int64)


def order_keys(logits: Tensor) -> Tensor:
    """int32 keys with the order of the fp32 ``logits`` (-0.0 equal to 0.0)."""
    bits = (logits + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def order_words(logits: Tensor, first_id: int) -> Tensor:
    """int64 words with the contract's order of tokens, the largest first: the logit's key above the id, reversed.

    ``logits`` is fp32 ``[B, W]`` of the ids from ``first_id`` on.
    """
    ids = torch.arange(first_id, first_id + logits.shape[1], device=logits.device)
    return (order_keys(logits).long() << 32) + (_REVERSED - ids)


def token_of(words: Tensor) -> Tensor:
    """The ids of :func:`order_words`."""
    return _REVERSED - (words & _REVERSED)


def value_of(words: Tensor) -> Tensor:
    """The fp32 logits of :func:`order_words`."""
    keys = (words >> 32).to(torch.int32)
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).view(torch.float32)


def count_sorted(logits: Tensor, rows: RowParams) -> tuple[Tensor, Tensor]:
    """The specification: a stable sort, integer prefix sums, and the three rules read off them.

    Args:
        logits: fp32 ``[B, V]``, transformed.

    Returns:
        ``(order, counts)``: ids in the contract's order, int64 ``[B, V]``, and how many of them are kept, int64 ``[B]``.
    """
    ranked, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    share, mass = fixed_mass(ranked, rows.temperature32)
    kept = (ranked > float("-inf")) & (share >= column(rows.min_p))
    count = _at_most(kept.sum(-1), rows.top_k)
    prefix = mass.cumsum(-1)
    left = torch.where(count > 0, prefix.gather(-1, (count - 1).clamp(min=0)[:, None]).squeeze(-1), 0)
    # A token is needed while the tokens before it have not reached p; one is kept in any case.
    needed = (prefix - mass).double() < column(rows.top_p * left.double())
    reached = torch.minimum(count, needed.sum(-1).clamp(min=1))
    return order, _where_on(rows.top_p, reached, count)


def keep_mask(logits: Tensor, rows: RowParams) -> Tensor:
    """The same set without sorting, as a bool mask ``[B, V]``; arguments as :func:`count_sorted`."""
    keys = order_keys(logits)
    keep = logits > float("-inf")
    by_mass = needs_mass(rows)
    if by_mass:
        share, mass = fixed_mass(logits, rows.temperature32)
        keep &= share >= column(rows.min_p)
        del share
    if isinstance(rows.top_k, Tensor) or rows.top_k > 0:
        target = _at_most(keep.sum(-1), rows.top_k)
        pivot = _bisect(lambda key: (keep & (keys >= key)).sum(-1), target)
        over, equal = keep & (keys > pivot), keep & (keys == pivot)
        keep = over | (equal & (equal.cumsum(-1) <= column(target - over.sum(-1))))
    if by_mass:
        mass = mass.masked_fill(~keep, 0)
        target_mass = rows.top_p * mass.sum(-1).double()
        pivot = _bisect(lambda key: mass.masked_fill(keys < key, 0).sum(-1), target_mass)
        over, equal = keep & (keys > pivot), keep & (keys == pivot)
        before = mass.masked_fill(~over, 0).sum(-1, keepdim=True)
        each = mass.masked_fill(~equal, 0).amax(-1, keepdim=True)
        # Of the copies of the boundary value, a copy is needed while those before it have not reached p.
        index = equal.cumsum(-1) - 1
        needed = (before + index * each).double() < column(target_mass)
        needed |= (index == 0) & ~over.any(-1, keepdim=True)
        keep = _where_on(rows.top_p, over | (equal & needed), keep)
    return keep


def needs_mass(rows: RowParams) -> bool:
    """Some row may have a filter that is about probabilities, not ranks."""
    return isinstance(rows.top_p, Tensor) or isinstance(rows.min_p, Tensor) or rows.top_p < 1.0 or rows.min_p > 0.0


def _bisect(total_from: Callable[[Tensor], Tensor], target: Tensor) -> Tensor:
    """Largest int32 key a row, ``[B, 1]``, from which on ``total_from`` reaches ``target`` (at least half a unit)."""
    target = target.double().clamp(min=0.5)
    low = torch.full_like(target, -(2**31), dtype=torch.int64)
    high = torch.full_like(target, 2**31, dtype=torch.int64)
    for _ in range(32):
        middle = (low + high) >> 1
        enough = total_from(middle.to(torch.int32)[:, None]).double() >= target
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return low.to(torch.int32)[:, None]


def column(value: float | Tensor) -> float | Tensor:
    """A per-row value ready to meet ``[B, V]``."""
    return value[:, None] if isinstance(value, Tensor) else value


def _at_most(count: Tensor, top_k: int | Tensor) -> Tensor:
    if isinstance(top_k, Tensor):
        return torch.minimum(count, torch.where(top_k > 0, top_k, MAX_VOCAB))
    return count.clamp(max=top_k) if top_k > 0 else count


def _where_on(top_p: float | Tensor, filtered: Tensor, unfiltered: Tensor) -> Tensor:
    """``filtered`` for the rows with a top-p below 1."""
    if not isinstance(top_p, Tensor):
        return filtered if top_p < 1.0 else unfiltered
    on = top_p < 1.0
    return torch.where(on if filtered.dim() == 1 else on[:, None], filtered, unfiltered)
