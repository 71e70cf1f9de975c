"""What the filter suite measures: families of logits, filters, batch sizes, and the inputs made for them.

The families are :mod:`nologits.testing.families`, so what is timed is what is tested.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import nologits as nl

from ..params import RowParams, make_rows
from ..testing.families import FAMILIES, make_logits
from .modes import FILTER_MODES, Request

ALL_FILTER_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
DEFAULT_FILTER_BATCHES = (1, 8, 64, 256)


class FilterInputs(NamedTuple):
    """One cell's tensors. The filters are one number a row, as an engine passes them, and the same tensors for everybody.

    Attributes:
        logits: ``[B, V]``.
        request: the filters as numbers; p is what its fp32 tensor holds.
        top_k: int32 ``[B]``, or ``None`` where it is off.
        top_p, min_p: fp32 ``[B]``, likewise.
        seed: uint64 ``[B]``: every row has one, so torch's generator is left alone.
        position: int64 ``[B]``.
    """

    logits: Tensor
    request: Request
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    seed: Tensor
    position: Tensor

    @property
    def params(self) -> nl.SamplingParams:
        """The filters and the noise of every row."""
        return nl.SamplingParams(top_k=self.top_k, top_p=self.top_p, min_p=self.min_p, seed=self.seed, position=self.position)

    @property
    def rows(self) -> RowParams:
        """The filters of every row, as the kernels take them."""
        params = nl.SamplingParams(top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)
        return make_rows(params, self.logits.shape[0], self.logits.shape[1], self.logits.device, noise=False)


def make_family(name: str, batch: int, device: str = "cuda") -> Tensor:
    """The logits of a family at its own V."""
    return make_logits(name, batch, device=device)


def make_filter_inputs(logits: Tensor, mode: str) -> FilterInputs:
    """The inputs of one cell."""
    batch, device = len(logits), logits.device
    request = FILTER_MODES[mode]
    tensors = request.tensors(batch, device)
    held: dict[str, Any] = {name: float(tensor[0]) for name in ("top_p", "min_p") if (tensor := tensors[name]) is not None}
    rows = torch.arange(batch, device=device)
    return FilterInputs(logits, request._replace(**held), **tensors, seed=rows.view(torch.uint64), position=rows)


def logits_bytes(family: str, vocab: int, batch: int) -> int:
    """What any filter has to read: the logits, once."""
    return batch * vocab * FAMILIES[family].dtype.itemsize
