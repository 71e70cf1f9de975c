"""A decoder of a real model's shape: what a decode step costs before its head. Weights are random, which costs no time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Shape(NamedTuple):
    """A Llama-like decoder with grouped-query attention, by its configuration. ``tied``: its head is its embedding."""

    name: str
    models: str
    vocab: int
    depth: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    tied: bool = True


SHAPES = (
    Shape("qwen3-1.7b", "Qwen3-1.7B", 151_936, 2_048, 28, 16, 8, 128, 6_144),
    Shape("small", "Qwen3-8B", 151_936, 4_096, 36, 32, 8, 128, 12_288, tied=False),
)
"""Names are those of the head's case."""

WEIGHT_STD = 0.02


class Decoder:
    """One decode step for B sequences of ``context`` tokens each: from token ids to the last hidden states.

    The new token's keys and values take the place of the last ones in the cache, so a step can be repeated, and captured.

    Args:
        shape: of the model.
        batch: B.
        context: tokens in the cache, the new one included.
        device, dtype: of weights, cache and hidden states.
    """

    def __init__(self, shape: Shape, batch: int, context: int, device: torch.device, dtype: torch.dtype) -> None:
        self.shape, self.batch = shape, batch
        generator = torch.Generator(device).manual_seed(0)

        def weights(*size: int) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=device).normal_(0, WEIGHT_STD, generator=generator)

        depth, width = shape.depth, shape.heads * shape.head_dim
        both = 2 * shape.kv_heads * shape.head_dim
        self.embedding = weights(shape.vocab, depth)
        sizes = (width + both, depth), (depth, width), (2 * shape.intermediate, depth), (depth, shape.intermediate)
        self.layers = [tuple(weights(*size) for size in sizes) for _ in range(shape.layers)]
        self.cache = weights(shape.layers, 2, batch, shape.kv_heads, context, shape.head_dim)
        angles = (context - 1) / 1e6 ** (torch.arange(0, shape.head_dim, 2, device=device) / shape.head_dim)
        self.cos, self.sin = (torch.cat((part, part)).to(dtype) for part in (angles.cos(), angles.sin()))
        self.norm = torch.ones(depth, dtype=dtype, device=device)
        self.head_norm = torch.ones(shape.head_dim, dtype=dtype, device=device)

    def step(self, tokens: Tensor) -> Tensor:
        """The hidden states ``[B, D]`` behind tokens ``[B]``."""
        hidden = self.embedding[tokens]
        for layer, cache in zip(self.layers, self.cache, strict=True):
            hidden = self._layer(hidden, layer, cache)
        return self._normalised(hidden, self.norm)

    def _layer(self, hidden: Tensor, layer: tuple[Tensor, ...], cache: Tensor) -> Tensor:
        shape, (into, out, up, down) = self.shape, layer
        parts = functional.linear(self._normalised(hidden, self.norm), into).view(self.batch, -1, shape.head_dim)
        query, key, value = parts.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        query, key = (self._turned(self._normalised(part, self.head_norm)) for part in (query, key))
        cache[0, :, :, -1], cache[1, :, :, -1] = key, value
        # Of one query the groups of heads that share keys are so many queries: no mask, and the cache is read once
        groups = query.reshape(self.batch, shape.kv_heads, -1, shape.head_dim)
        mixed = functional.scaled_dot_product_attention(groups, cache[0], cache[1])
        hidden = hidden + functional.linear(mixed.reshape(self.batch, -1), out)
        gate, value = functional.linear(self._normalised(hidden, self.norm), up).chunk(2, dim=-1)
        return hidden + functional.linear(functional.silu(gate) * value, down)

    def _normalised(self, x: Tensor, scale: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), scale, 1e-6)

    def _turned(self, x: Tensor) -> Tensor:
        """Rotary position of the last token."""
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-second, first), dim=-1) * self.sin
