"""The Triton implementation: a tile kernel under the matmul, and small kernels after it. Nothing waits for the host.

A filtered draw from hidden states takes five: a pilot and the thresholds it gives (``kernels/threshold.py``); the tile kernel,
which gathers each row's logits from there on; the merge of its winners, the draws of rows without filters; and the choice
among the candidates (``kernels/choose.py``). Rows whose candidates do not certify what they keep are made whole, a block of
them at a time, by two kernels that return at once where no row is open. Filters on given logits take whole rows, in torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import filtered
from .kernels import threshold
from .kernels.arguments import filter_columns
from .kernels.categorical import Gathered, launch_tiles
from .kernels.choose import launch_choose
from .kernels.config import TileConfig, architecture, tile_config
from .kernels.logits import launch_logits
from .kernels.merge import launch_merge
from .kernels.threshold import launch_thresholds
from .kernels.whole import launch_whole_rows
from .params import RowParams
from .sources import HiddenSource, LogitsSource
from .types import Samples

_WHOLE_BYTES = 16
"""Of a logit of an open row: its entry, and its mass."""


def sample(source: HiddenSource | LogitsSource, rows: RowParams, num_samples: int, processed: bool, raw: bool) -> Samples:
    """Draws ``[B, S]`` tokens; arguments and results as :func:`nologits.reference.sample`."""
    if rows.filtered and isinstance(source, HiddenSource):
        return _sample_filtered(source, rows, num_samples, processed, raw)
    if rows.filtered:
        return filtered.sample(source, rows, num_samples, processed, raw, _draw_kept)
    tiles = launch_tiles(source, rows, num_samples, processed, raw, config_for(source))
    return refuse_impossible(launch_merge(tiles, rows), rows)


def _sample_filtered(source: HiddenSource, rows: RowParams, num_samples: int, processed: bool, raw: bool) -> Samples:
    batch, vocab, device, config = source.batch, source.vocab, source.device, config_for(source)
    capacity = min(vocab, threshold.CAPACITY)
    filters = filter_columns(rows, device)
    weighs = filters["HAS_TOP_P"] and vocab > capacity
    counts, open_rows, num_open = torch.zeros(2 * batch + 1, dtype=torch.int32, device=device).split((batch, batch, 1))
    gathered = Gathered(
        launch_thresholds(source, rows, filters, config),
        counts,
        torch.empty(batch, capacity, dtype=torch.int64, device=device),
        torch.empty(batch, capacity, device=device) if raw else None,
        torch.empty(batch, -(-vocab // config.BLOCK_V), dtype=torch.float64, device=device) if weighs else None,
    )
    tiles = launch_tiles(source, rows, 1 if rows.all_filtered else num_samples, processed, raw, config, gathered)
    drawn = launch_merge(tiles, rows)
    if rows.all_filtered and num_samples > 1:
        drawn = _repeated(drawn, num_samples)
    ever_open = made_rows(device) if _can_count(device) else None
    launch_choose(drawn, gathered, tiles, rows, filters, vocab, open_rows, num_open, ever_open)
    if vocab > capacity:
        slots = max(1, min(batch, filtered.SCRATCH_BYTES // (vocab * (_WHOLE_BYTES + 4 * raw))))
        whole = gathered._replace(
            entries=torch.empty(slots, vocab, dtype=torch.int64, device=device),
            raw=torch.empty(slots, vocab, device=device) if raw else None,
        )
        open_source = HiddenSource(source.hidden.index_select(0, open_rows), source.head, source.dtype)
        for first in range(0, batch, slots):
            launch_whole_rows(open_source, rows, open_rows, num_open, first, whole.entries, whole.raw, config)
            launch_choose(drawn, whole, tiles, rows, filters, vocab, open_rows, num_open, None, first)
    return refuse_impossible(drawn, rows)


def _repeated(drawn: Samples, num_samples: int) -> Samples:
    """One draw a row as ``num_samples`` equal ones, to be written over."""
    return drawn._replace(
        tokens=drawn.tokens.repeat(1, num_samples),
        logprobs=None if drawn.logprobs is None else drawn.logprobs.repeat(1, num_samples),
        raw_logprobs=None if drawn.raw_logprobs is None else drawn.raw_logprobs.repeat(1, num_samples),
    )


_made_rows: dict[torch.device, Tensor] = {}


def made_rows(device: torch.device) -> Tensor:
    """int64 ``[1]``: rows of heads whose logits were made for filtered draws there, of all calls so far: their candidates did
    not settle what they keep. Counted from the first call that is not captured into a graph.
    """
    if device not in _made_rows:
        _made_rows[device] = torch.zeros(1, dtype=torch.int64, device=device)
    return _made_rows[device]


def _can_count(device: torch.device) -> bool:
    return device in _made_rows or device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def refuse_impossible(drawn: Samples, rows: RowParams) -> Samples:
    """The draws with rows invalid whose filters are impossible: greedy rows come with filters that do not matter otherwise."""
    if any(isinstance(value, Tensor) for value in (rows.top_k, rows.top_p, rows.min_p)):
        return drawn.invalidate(rows.impossible(len(drawn.tokens), drawn.tokens.device))
    return drawn


def config_for(source: HiddenSource | LogitsSource) -> TileConfig:
    """The tile used for ``source``, a pure function of what it is and where it lies."""
    dtype, depth = (source.hidden.dtype, source.hidden.shape[1]) if isinstance(source, HiddenSource) else (torch.float32, 0)
    return tile_config(architecture(source.device), dtype, source.vocab, depth, source.batch)


@dataclass(frozen=True)
class KernelSource:
    """A head's logits, materialised by the kernel that shares its tiles with the fused draw."""

    source: HiddenSource

    @property
    def batch(self) -> int:
        return self.source.batch

    @property
    def vocab(self) -> int:
        return self.source.vocab

    @property
    def device(self) -> torch.device:
        return self.source.device

    def rows(self, start: int, stop: int) -> KernelSource:
        return KernelSource(self.source.rows(start, stop))

    def chunk(self, start: int, stop: int) -> Tensor:
        logits = launch_logits(self.source, config_for(self.source))
        return logits[:, start:stop]


def _draw_kept(kept: Tensor, rows: RowParams, num_samples: int) -> Tensor:
    source = LogitsSource(kept)
    tiles = launch_tiles(source, rows.bare(), num_samples, False, False, config_for(source))
    return launch_merge(tiles, rows.bare()).tokens
