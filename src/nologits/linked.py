"""Draws from a sharded head by the Hopper kernels, over what links its ranks (:mod:`nologits.transport`).

Rows that candidates do not settle are settled on the device where ranks write to each other's memory. Where they gather, the
host waits to hear of such rows, and their logits are gathered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from . import candidates, fused
from .hopper import config_for, joined
from .kernels.arguments import tma_fits
from .kernels.categorical_sm90 import Extent
from .kernels.config import FILTERED_ROWS
from .kernels.shard_sm90 import LINKED_ROWS, Transport, launch_shard_draw, open_mask
from .params import RowParams
from .sources import HiddenSource
from .types import Samples

Settle = Callable[[int, int], Samples]
"""Draws the rows from one on to before another in another way."""


def obstacle(hidden: Tensor, rows: RowParams, num_samples: int, raw: bool) -> str:
    """Why the kernels cannot make this draw; empty if they can. It depends on nothing in which ranks may differ."""
    if hidden.dtype not in (torch.bfloat16, torch.float16):
        return f"wgmma multiplies bf16 and fp16, not {hidden.dtype}"
    if hidden.shape[1] % 8:
        return "bulk copies need rows of a multiple of 16 bytes"
    if rows.logit_bias is not None and rows.logit_bias.dtype == torch.float64:
        return "the kernels read biases in fp32, bf16 and fp16"
    if num_samples != 1:
        return "it makes one draw a row"
    if raw and (rows.logit_bias is not None or rows.bias_ids is not None):
        return "raw log-probabilities under a logit bias need the logit before the bias"
    return ""


def sample(
    source: HiddenSource,
    extent: Extent,
    transport: Transport,
    rows: RowParams,
    processed: bool,
    raw: bool,
    num_top: int,
    settle: Settle,
) -> Samples:
    """Draws ``[B, 1]`` tokens, the same on every rank; arguments and results as :func:`nologits.hopper.sample`.

    ``source`` is this rank's shard. ``settle`` draws rows that the exchange leaves open, of which every rank has the same.

    Raises:
        RuntimeError: a draw with filters is captured into a graph, and ranks gather what they send.
    """
    source, rows = _dense(source, rows)
    gathers = rows.filtered or num_top > 0
    if gathers and not transport.peer_buffers() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a captured draw with filters from a sharded head must have GPUs that can address each other")
    most = FILTERED_ROWS if gathers else LINKED_ROWS
    if source.batch > most:
        rows = rows.with_keys(source.batch, source.device)
    parts = []
    for start in range(0, source.batch, most):
        stop = min(source.batch, start + most)
        some, asked = (source, rows) if source.batch <= most else (source.rows(start, stop), rows.block(start, stop))
        drawn, left = launch_shard_draw(some, asked, processed, raw, config_for(some), extent, transport, num_top)
        if left is not None:
            _settle_open(drawn, open_mask(left), functools.partial(_settle_from, settle, start))
        parts.append(drawn if gathers else fused.refuse_impossible(drawn, asked))
    return parts[0] if len(parts) == 1 else joined(parts)


def _settle_from(settle: Settle, row: int, start: int, stop: int) -> Samples:
    return settle(row + start, row + stop)


def _settle_open(drawn: Samples, opened: Tensor, settle: Settle) -> None:
    """Waits for the device."""
    for start, stop in candidates.runs(opened):
        for target, made in zip(drawn[:4], settle(start, stop)[:4], strict=True):
            if isinstance(target, Tensor) and isinstance(made, Tensor):
                target[start:stop] = made


def _dense(source: HiddenSource, rows: RowParams) -> tuple[HiddenSource, RowParams]:
    """What the kernels can address: copies, where ranks could differ in whether it is so."""
    head = source.head
    if not tma_fits(head.weight):
        head = head._replace(weight=head.weight.contiguous())
    if head.bias is not None and head.bias.stride(0) != 1:
        head = head._replace(bias=head.bias.contiguous())
    hidden = source.hidden if tma_fits(source.hidden) else source.hidden.contiguous()
    changed = {
        name: value.contiguous()
        for name in ("logit_bias", "bias_ids", "bias_values", "allowed")
        if (value := getattr(rows, name)) is not None and value.shape[-1] > 1 and value.stride(-1) != 1
    }
    return HiddenSource(hidden, head, source.dtype), rows._replace(**changed)
