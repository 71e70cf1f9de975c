"""The Hopper implementation: CUDA C++ kernels around wgmma and the bulk copy engine, where those can describe the operands.

A draw goes to the fused kernels if :func:`obstacle` names nothing, one with filters from given logits to the kernel that
filters rows of logits (:func:`filter_obstacle`). The former read the head's screen instead where it has one that serves
(:mod:`nologits.screened`). The rest of the contract (several draws a row, unfiltered draws from given logits, fp32 heads,
operands that bulk copies cannot address) is computed by the portable kernels of :mod:`nologits.fused`, which draw the same
tokens from the same noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import filtered, fused, screened
from .distribution import log_softmax_at
from .kernels.arguments import addressable, tma_fits
from .kernels.categorical_sm90 import launch_draw, launch_select
from .kernels.config import FILTERED_ROWS, HopperConfig, hopper_config
from .kernels.filters_sm90 import launch_filtered_draw, launch_mask
from .params import RowParams
from .selection import order_words, token_of, value_of
from .sources import HiddenSource, LogitsSource, Source, transform
from .tops import MAX_TOP
from .types import Candidates, Samples, TopTokens


def sample(
    source: HiddenSource | LogitsSource, rows: RowParams, num_samples: int, processed: bool, raw: bool, num_top: int = 0
) -> Samples:
    """Draws ``[B, S]`` tokens; arguments and results as :func:`nologits.reference.sample`.

    The ``num_top`` likeliest tokens come with the draw where they come from the same pass, else not at all.
    """
    if not obstacle(source, rows, num_samples, raw):
        assert isinstance(source, HiddenSource)
        screen = source.head.screen
        if screen is not None and not screened.obstacle(source, screen, rows, num_samples, processed, raw, num_top):
            return fused.refuse_impossible(screened.sample(source, screen, rows, config_for(source)), rows)
        # Raw lists have tokens that a mask hides, which are no candidates
        return _sample_fused(source, rows, processed, raw, 0 if raw and rows.allowed is not None else num_top)
    if rows.filtered and isinstance(source, LogitsSource) and not filter_obstacle(source, num_samples):
        return _sample_filtered(source, rows, processed, raw)
    return fused.sample(source, rows, num_samples, processed, raw)


def filter_logits(logits: Tensor, rows: RowParams, out: Tensor, mask_value: float) -> None:
    """Writes the kept logits to ``out``, ``mask_value`` elsewhere; an invalid row becomes all ``mask_value``."""
    source = LogitsSource(logits)
    if filter_obstacle(source, 1) or (out.shape[1] > 1 and out.stride(1) != 1):
        filtered.filter_logits(logits, source, rows, out, mask_value)
    else:
        launch_mask(logits, rows, out, mask_value)


def select(source: HiddenSource | LogitsSource, rows: RowParams, width: int) -> Candidates:
    """The kept set of each row, sorted, in ``width`` columns.

    Small sets of a head come from the draw's own pass. Others are filtered by the kernel that reads logits, and ordered by
    torch.
    """
    if isinstance(source, HiddenSource) and 0 < width <= MAX_TOP and not obstacle(source, rows, 1, False):
        return _select_fused(source, rows, width)
    made: Source = fused.KernelSource(source) if isinstance(source, HiddenSource) else source
    return filtered.select(made, rows, width, _rank_kept)


def config_for(source: HiddenSource) -> HopperConfig:
    """The launch used for ``source``, a pure function of what it is."""
    return hopper_config(source.batch)


def obstacle(source: HiddenSource | LogitsSource, rows: RowParams, num_samples: int, raw: bool) -> str:
    """Why the portable kernels compute this draw; empty if the Hopper kernels do."""
    if isinstance(source, LogitsSource):
        return "the logits are given: there is no matmul"
    if source.hidden.dtype not in (torch.bfloat16, torch.float16):
        return f"wgmma multiplies bf16 and fp16, not {source.hidden.dtype}"
    if not tma_fits(source.head.weight) or source.hidden.shape[1] % 8:
        return "bulk copies need a weight with dense rows whose pitch is a multiple of 16 bytes"
    if any(bias is not None and bias.dtype == torch.float64 for bias in (source.head.bias, rows.logit_bias)):
        return "the kernels read biases in fp32, bf16 and fp16"
    parts = (source.head.bias, rows.logit_bias, rows.bias_ids, rows.bias_values, rows.allowed)
    if any(part is not None and part.shape[-1] > 1 and part.stride(-1) != 1 for part in parts):
        return "the kernels read biases and masks whose rows are dense"
    if num_samples != 1:
        return "it makes one draw a row"
    if raw and (rows.logit_bias is not None or rows.bias_ids is not None):
        return "raw log-probabilities under a logit bias need the logit before the bias"
    return ""


def filter_obstacle(source: HiddenSource | LogitsSource, num_samples: int) -> str:
    """Why the portable path filters these rows; empty if the Hopper kernel does."""
    if num_samples != 1:
        return "it makes one draw a row"
    if isinstance(source, LogitsSource) and source.vocab > 1 and source.logits.stride(1) != 1:
        return "the kernel reads logits whose rows are dense"
    return ""


def _sample_fused(source: HiddenSource, rows: RowParams, processed: bool, raw: bool, num_top: int) -> Samples:
    """One draw a row under the matmul."""
    source = addressable(source)
    if not rows.filtered and not num_top:
        return fused.refuse_impossible(launch_draw(source, rows, processed, raw, config_for(source)), rows)
    if source.batch <= FILTERED_ROWS:
        return launch_draw(source, rows, processed, raw, config_for(source), num_top)
    rows = rows.with_keys(source.batch, source.device)
    parts = []
    for start in range(0, source.batch, FILTERED_ROWS):
        some = source.rows(start, min(source.batch, start + FILTERED_ROWS))
        parts.append(launch_draw(some, rows.block(start, start + some.batch), processed, raw, config_for(some), num_top))
    return joined(parts)


def joined(parts: list[Samples]) -> Samples:
    """The draws of blocks of rows, as one."""

    def join(pieces: Sequence[Any]) -> Any:
        if isinstance(pieces[0], TopTokens):
            return TopTokens(*map(torch.cat, zip(*pieces, strict=True)))
        return None if pieces[0] is None else torch.cat(list(pieces))

    return Samples(*map(join, zip(*parts, strict=True)))


def _select_fused(source: HiddenSource, rows: RowParams, width: int) -> Candidates:
    """No kept set is larger than ``width``: that is the ``top_k`` of all rows, or the vocabulary."""
    source, parts = addressable(source), []
    for start in range(0, source.batch, FILTERED_ROWS):
        stop = min(source.batch, start + FILTERED_ROWS)
        some = source.rows(start, stop)
        asked = rows.block(start, stop)
        parts.append(kept_sets(*launch_select(some, asked, config_for(some), width), asked))
    return parts[0] if len(parts) == 1 else Candidates(*map(torch.cat, zip(*parts, strict=True)))


def kept_sets(ids: Tensor, entries: Tensor, rows: RowParams) -> Candidates:
    """The sets that :func:`nologits.kernels.categorical_sm90.launch_select` found."""
    kept = ids >= 0
    logits = value_of(entries ^ torch.iinfo(torch.int64).min).masked_fill(~kept, float("-inf"))
    columns = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    logprobs = log_softmax_at(logits, columns, rows.temperature32).masked_fill(~kept, float("-inf"))
    return Candidates(ids, logits, logprobs, kept.sum(-1))


def _sample_filtered(source: LogitsSource, rows: RowParams, processed: bool, raw: bool) -> Samples:
    """One draw a row, from logits that are there; with a logit bias or a mask, for a block of rows at a time."""
    if rows.plain_logits:
        drawn = launch_filtered_draw(source.logits, rows, processed)
        return drawn._replace(raw_logprobs=_raw_logprobs(source.logits, drawn.tokens)) if raw else drawn
    rows = rows.with_keys(source.batch, source.device)
    parts = []
    for start, stop in filtered.row_blocks(source.batch, source.vocab, 8):
        some = rows.block(start, stop)
        head_logits = source.rows(start, stop).chunk(0, source.vocab)
        drawn = launch_filtered_draw(transform(head_logits, some, 0, source.vocab), some, processed)
        parts.append(drawn._replace(raw_logprobs=_raw_logprobs(head_logits, drawn.tokens)) if raw else drawn)
    return joined(parts)


def _rank_kept(logits: Tensor, rows: RowParams, width: int) -> tuple[Tensor, Tensor]:
    """As :func:`nologits.filtered.count_ranked`."""
    vocab = logits.shape[1]
    kept = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    launch_mask(logits if logits.stride(1) == 1 or vocab == 1 else logits.contiguous(), rows, kept, float("-inf"))
    count = (kept > float("-inf")).sum(-1)
    if width == vocab:
        return kept.sort(dim=-1, descending=True, stable=True).indices, count
    return token_of(order_words(kept.float(), 0).topk(width, dim=-1).values), count  # topk promises nothing about ties


def _raw_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Under softmax of the head's own logits, a block of rows at a time; NaN where there is no token."""
    blocks = filtered.row_blocks(logits.shape[0], logits.shape[1], 24)
    parts = [log_softmax_at(logits[start:stop].float(), tokens[start:stop].clamp(min=0), 1.0) for start, stop in blocks]
    return torch.cat(parts).masked_fill(tokens < 0, float("nan"))
