"""The noise contract, version 1: which random number belongs to which token. Frozen; pinned by known-answer tests.

A draw never depends on tile shapes, batch slots, ranks or code paths, because its noise is a pure function::

    key      = (seed low word, seed high word)
    counter  = (group, position low word, position high word, sample + 2^24 * stream)
    words    = Philox4x32-10(counter, key)          # four uint32, for four token ids
    group(v) = v with bits 3 and 6 cleared          # the smallest id of the four that share a call
    word(v)  = bit 3 of v + 2 * (bit 6 of v)

The four ids of a group differ in bits 3 and 6: with the vocabulary along M, one thread of a Hopper ``wgmma`` (and of an
Ampere ``mma.sync`` with four warps along M) holds exactly those four rows of its accumulator, so one Philox call serves
four registers of the thread that made it. ``docs/noise.md`` has the measurement behind the choice.

A word r becomes Gumbel noise through an exponential whose small end, the one that wins, is exact::

    u = (r + 0.5) / 2^32      E = -log(1 - u)      g = -log(E)

Near u = 0 a series gives E to fp32 accuracy; elsewhere 1 - u = (2^32 - 1 - r + 0.5) / 2^32 is formed from the complement
of r, so that neither end is ever 0 or 1: g is finite, -3.14 <= g <= 22.88, and does not increase with r. (FlashSampling takes
g = -log(-log u) of a 24-bit u, which ends at 16.6 and loses the tail of a flat distribution.)
"""

from __future__ import annotations

import torch
from torch import Tensor

NOISE_VERSION = 1
STREAM_TOKENS = 0
"""Stream of the per-token noise."""

STREAM_GROUPS = 1
"""Stream of the noise by which groups of tokens are merged: group k has what token id k has in the stream of tokens."""

MAX_SAMPLES = 1 << 24
WORD_BIT_LOW = 3
WORD_BIT_HIGH = 6
GROUP_BITS = (1 << WORD_BIT_LOW) | (1 << WORD_BIT_HIGH)

_MASK32 = 0xFFFFFFFF
_PHILOX_M0, _PHILOX_M1 = 0xD2511F53, 0xCD9E8D57
_PHILOX_W0, _PHILOX_W1 = 0x9E3779B9, 0xBB67AE85

SERIES_BELOW = 0x20000000
"""Words below this (u < 1/8) use the series for -log1p(-u): there 1 - u has lost bits of u, above it has not."""

SERIES = (1.0, 1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 6, 1 / 7)
"""-log1p(-u) = u * (1 + u/2 + u^2/3 + ...); seven terms leave a relative 6e-8 at u = 1/8."""


def _mulhilo(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a * b, for uint32 values held in int64 (the product wraps, its bits do not)."""
    product = a * b
    return (product >> 32) & _MASK32, product & _MASK32


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10 (Salmon et al., SC 2011), bit for bit, in int64 tensors holding uint32 values.

    Args:
        counter: four broadcastable int64 tensors with values in [0, 2^32).
        key: two broadcastable int64 tensors with values in [0, 2^32).

    Returns:
        Four int64 tensors of the broadcast shape, values in [0, 2^32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        hi0, lo0 = _mulhilo(c0, _PHILOX_M0)
        hi1, lo1 = _mulhilo(c2, _PHILOX_M1)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + _PHILOX_W0) & _MASK32, (k1 + _PHILOX_W1) & _MASK32
    return c0, c1, c2, c3


def gumbel_from_bits(words: Tensor) -> Tensor:
    """The map from 32 random bits to standard Gumbel noise.

    Args:
        words: int64 tensor of uint32 values.

    Returns:
        fp32 tensor of the same shape: finite, not increasing in ``words``.
    """
    u = (words.to(torch.float32) + 0.5) * 2.0**-32
    series = torch.full_like(u, SERIES[-1])
    for coefficient in reversed(SERIES[:-1]):
        series = series * u + coefficient
    complement = ((words ^ _MASK32).to(torch.float32) + 0.5) * 2.0**-32
    exponential = torch.where(words < SERIES_BELOW, u * series, -torch.log(complement))
    return -torch.log(exponential)


def token_words(seed: Tensor, position: Tensor, start: int, stop: int, sample: int = 0, stream: int = STREAM_TOKENS) -> Tensor:
    """The random words of the token ids ``start .. stop - 1``.

    Args:
        seed: int64 ``[B]``, the 64-bit key of each row.
        position: int64 ``[B]``.
        start: first token id.
        stop: one past the last token id.
        sample: index of the draw, in [0, 2^24).
        stream: which use of the noise, in [0, 256).

    Returns:
        int64 ``[B, stop - start]`` of uint32 values.
    """
    block = 2 << WORD_BIT_HIGH  # ids of one block: all seven bits up to the high word bit
    first = start // block
    blocks = -(-stop // block) - first
    ids = torch.arange(first * block, (first + blocks) * block, device=seed.device)
    # One counter a group: drop the ids whose word is not 0. Axes: block, bit 6, bits 5-4, bit 3, bits 2-0.
    groups = ids.view(blocks, 2, 4, 2, 8)[:, 0, :, 0, :].reshape(1, -1)
    seed, position = seed[:, None], position[:, None]
    tail = torch.full_like(position, sample + (stream << 24))
    counter = (groups, position & _MASK32, (position >> 32) & _MASK32, tail)
    words = philox4x32(counter, (seed & _MASK32, (seed >> 32) & _MASK32))
    low, high = (torch.stack([w.view(-1, blocks, 4, 8) for w in pair], dim=3) for pair in (words[:2], words[2:]))
    return torch.stack([low, high], dim=2).reshape(-1, blocks * block)[:, start - first * block : stop - first * block]


def gumbel_at(seed: Tensor, position: Tensor, ids: Tensor, sample: int = 0) -> Tensor:
    """Standard Gumbel noise of any tokens, fp32 ``[B, W]`` for ``ids`` int64 ``[B, W]``; the rest as in :func:`token_words`."""
    seed, position = seed[:, None], position[:, None]
    counter = (ids & ~GROUP_BITS, position & _MASK32, (position >> 32) & _MASK32, torch.full_like(position, sample))
    words = torch.stack(philox4x32(counter, (seed & _MASK32, (seed >> 32) & _MASK32)), dim=-1)
    word = ((ids >> WORD_BIT_LOW) & 1) + 2 * ((ids >> WORD_BIT_HIGH) & 1)
    return gumbel_from_bits(words.gather(-1, word[..., None]).squeeze(-1))


def gumbel_noise(seed: Tensor, position: Tensor, start: int, stop: int, sample: int = 0) -> Tensor:
    """Standard Gumbel noise, fp32 ``[B, stop - start]``; arguments as in :func:`token_words`."""
    return gumbel_from_bits(token_words(seed, position, start, stop, sample))
