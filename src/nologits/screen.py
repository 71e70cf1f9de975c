"""A head of 8 bits that says which tokens can still win a draw, and the proof that it never passes one over.

Let ``w`` be a token's weights and ``h`` a row's hidden state, exact real numbers. The head keeps ``w = s q + e`` with ``q``
in int8 and ``s = max|w| / 127``; a draw makes ``h = a (q1 + q2 / 254) + r`` with ``q1, q2`` in int8 and ``a = max|h| / 127``.
Then

    h . w  =  s a (q1 + q2 / 254) . q  +  h . e  +  r . (s q)

The first term is made of whole numbers below 2^31 (D up to 2^16): the tensor cores make it without error. By Cauchy and
Schwarz, and as ``|s q| <= |w| + |e|``, the others are at most ``|h| |e| + |r| (|w| + |e|)``. Two more things are not exact.
Three roundings to fp32 make the first term of its whole numbers, each of at most 2^-24 of a part that is no longer than ``|h|
(|w| + |e|)`` and some: 2^-20 of that covers them. The winner's score is made by a dot product in fp32 (``sm90/rescore.cu``),
which sums at most D / 32 + 9 products a lane, and five more times over lanes: off by at most ``(D / 32 + 16) 2^-24 |h| |w|``.
So with

    E = |e|     N = |w| + |e|     A = |h|     R = |r| + (2^-20 + (D / 32 + 16) 2^-24) |h|

each rounded up, the product that decides lies within ``A E + R N`` of the middle. What is made of it afterwards (bias, scale
> 0, soft cap, logit bias, noise) is monotone, and so is its rounding; the approximation of tanh is so up to 4e-6, which its
ends are moved by. A token whose upper score lies below another's lower score cannot win; all others are scored with their
real weights. What is not finite in ``h`` or ``w`` has infinite lengths.

Only the upper ends have to be right. A lower end that is too high would pass over tokens, but then the winner's own score does
not reach it: ``rescore.cu`` looks, and such a row takes the full path. So does one of whose candidates a score lies above its
upper end, as happens when the copy is not of these weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .types import Screen, ScreenedRows

PADDED = 256
"""Ids a tile may read beyond the last."""

_UP = 1.0 + 2.0**-20
_CHUNK_BYTES = 256 << 20


def part_rows(batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where the first and the second parts of ``batch`` rows lie among :class:`ScreenedRows`'s."""
    row = torch.arange(batch, device=device)
    return (row + row // 8 * 8, row + row // 8 * 8 + 8) if ScreenedRows.packed(batch) else (row, row + batch)


def make_screen(weight: Tensor) -> Screen:
    """The screen of a head's ``weight [V, D]``, a few hundred megabytes of temporary memory at a time."""
    vocab, depth = weight.shape
    pitch = -(-depth // 16) * 16
    codes = torch.zeros(vocab, pitch, dtype=torch.int8, device=weight.device)[:, :depth]
    scales, errors, lengths = (torch.zeros(vocab + PADDED, device=weight.device) for _ in range(3))
    screen = Screen(codes, scales, errors, lengths)
    refresh(screen, weight)
    return screen


def refresh(screen: Screen, weight: Tensor) -> None:
    """Makes the screen anew in place, for ``weight`` that has changed."""
    vocab, depth = weight.shape
    step = max(1, _CHUNK_BYTES // (8 * depth))
    for start in range(0, vocab, step):
        part = slice(start, min(vocab, start + step))
        rows = weight[part].float()
        scale = rows.abs().amax(1) / 127
        codes = (rows / scale.clamp(min=1e-38)[:, None]).round().clamp(-127, 127).nan_to_num(0.0)
        error = torch.linalg.vector_norm(rows.double() - scale.double()[:, None] * codes, dim=1)
        length = torch.linalg.vector_norm(rows.double(), dim=1) + error
        screen.weight[part] = codes.to(torch.int8)
        finite = length.isfinite()
        screen.scales[part] = torch.where(finite, scale, 0.0)
        screen.errors[part] = torch.where(finite, _rounded_up(error), torch.inf)
        screen.lengths[part] = torch.where(finite, _rounded_up(length), torch.inf)


def screen_rows(hidden: Tensor) -> ScreenedRows:
    """The 8-bit parts of ``hidden [B, D]``."""
    rows = hidden.float()
    scale = rows.abs().amax(1, keepdim=True) / 127
    inverse = 1 / scale.clamp(min=1e-38)
    first = (rows * inverse).round().clamp(-127, 127).nan_to_num(0.0)
    rest = rows - scale * first
    second = (rest * inverse * 254).round().clamp(-127, 127).nan_to_num(0.0)
    left = rows.double() - scale.double() * first - (scale / 254).double() * second
    of_error = torch.linalg.vector_norm(rows.double(), dim=1)
    rounding = 2.0**-20 + (rows.shape[1] / 32 + 16) * 2.0**-24
    of_length = torch.linalg.vector_norm(left, dim=1) + rounding * of_error
    scales = torch.stack((scale[:, 0], scale[:, 0] / 254, _rounded_up(of_error), _rounded_up(of_length)), 1)
    batch = len(hidden)
    words = torch.zeros(sum(ScreenedRows.word_counts(batch).values()), dtype=torch.int32, device=hidden.device)
    parts = torch.zeros(ScreenedRows.num_parts(batch), rows.shape[1], dtype=torch.int8, device=hidden.device)
    for index, part in zip(part_rows(batch, hidden.device), (first, second), strict=True):
        parts[index] = part.to(torch.int8)
    return ScreenedRows(parts, scales.contiguous(), words)


def _rounded_up(lengths: Tensor) -> Tensor:
    return (lengths * _UP).float()
