"""Where logits come from in plain torch: a head applied to hidden states, or a tensor that already holds them.

Both sources hand out fp32 chunks ``[rows, ids]`` of the head's own logits (after bias, scale and soft cap), so that the
implementations built on them are written once. :func:`transform` then applies what the request adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .head import HeadSpec
from .params import RowParams

_MM_HAS_OUT_DTYPE = "dtype" in torch.ops.aten.mm.overloads()


class Source(Protocol):
    """Anything that hands out fp32 chunks of the head's own logits."""

    @property
    def batch(self) -> int: ...

    @property
    def vocab(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def rows(self, start: int, stop: int) -> Source:
        """The source of rows ``start .. stop - 1`` alone."""

    def chunk(self, start: int, stop: int) -> Tensor:
        """fp32 ``[B, stop - start]``: the logits of ids ``start .. stop - 1``."""


@dataclass(frozen=True)
class HiddenSource:
    """Logits of ``hidden [B, D]`` under a head, computed chunk by chunk.

    ``dtype`` is the precision of the product: fp32 for the streaming path, fp64 for the reference (whose logits are then
    the exact ones, rounded once).
    """

    hidden: Tensor
    head: HeadSpec
    dtype: torch.dtype = torch.float32

    @property
    def batch(self) -> int:
        return self.hidden.shape[0]

    @property
    def vocab(self) -> int:
        return self.head.vocab_size

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    def rows(self, start: int, stop: int) -> HiddenSource:
        return HiddenSource(self.hidden[start:stop], self.head, self.dtype)

    def chunk(self, start: int, stop: int) -> Tensor:
        """fp32 ``[B, stop - start]``."""
        weight = self.head.weight[start:stop]
        logits = _product(self.hidden, weight, self.dtype)
        if self.head.bias is not None:
            logits = logits + self.head.bias[start:stop].float()
        return scaled_and_capped(logits, self.head)


def scaled_and_capped(logits: Tensor, head: HeadSpec) -> Tensor:
    """What a head does to its logits after the bias."""
    if head.scale != 1.0:
        logits = logits * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return logits


@dataclass(frozen=True)
class LogitsSource:
    """Logits that exist already: ``logits [B, V]``, any dtype and strides."""

    logits: Tensor

    @property
    def batch(self) -> int:
        return self.logits.shape[0]

    @property
    def vocab(self) -> int:
        return self.logits.shape[1]

    @property
    def device(self) -> torch.device:
        return self.logits.device

    def rows(self, start: int, stop: int) -> LogitsSource:
        return LogitsSource(self.logits[start:stop])

    def chunk(self, start: int, stop: int) -> Tensor:
        """fp32 ``[B, stop - start]``."""
        return self.logits[:, start:stop].float()


def _product(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """hidden . weight^T accumulated in ``dtype``, returned in fp32."""
    if dtype == torch.float32 and hidden.is_cuda and hidden.dtype != dtype and _MM_HAS_OUT_DTYPE:
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)  # half-precision operands, fp32 result: no upcast copy
    return (hidden.to(dtype) @ weight.to(dtype).T).float()


def transform(raw: Tensor, rows: RowParams, start: int, stop: int) -> Tensor:
    """Adds the request's logit bias and mask to a chunk of the head's logits; never writes to ``raw``.

    Args:
        raw: fp32 ``[B, stop - start]``, the logits of ids ``start .. stop - 1``.
        rows: the request.
        start, stop: the ids of the chunk.
    """
    logits = raw
    if rows.logit_bias is not None:
        logits = logits + rows.logit_bias[:, start:stop].float()
    if rows.bias_ids is not None and rows.bias_values is not None:
        inside = (rows.bias_ids >= start) & (rows.bias_ids < stop)
        column = torch.where(inside, rows.bias_ids - start, 0)
        # Entries elsewhere land on column 0 with nothing to add: -0.0 leaves every value as it is.
        logits = logits.scatter_add(1, column, torch.where(inside, rows.bias_values, -0.0))
    if rows.allowed is not None:
        ids = torch.arange(start, stop, device=raw.device)
        bit = (rows.allowed[:, ids >> 5] >> (ids & 31)) & 1
        logits = logits.masked_fill(bit == 0, float("-inf"))
    return logits
