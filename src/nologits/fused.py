"""The Triton implementation: tile kernel and merge kernel; blocks of rows where filters need whole rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import filtered
from .kernels.categorical import launch_tiles
from .kernels.config import TileConfig, architecture, tile_config
from .kernels.logits import launch_logits
from .kernels.merge import launch_merge
from .params import RowParams
from .sources import HiddenSource, LogitsSource
from .types import Samples


def sample(source: HiddenSource | LogitsSource, rows: RowParams, num_samples: int, processed: bool, raw: bool) -> Samples:
    """Draws ``[B, S]`` tokens; arguments and results as :func:`nologits.reference.sample`."""
    if rows.filtered:
        return filtered.sample(
            KernelSource(source) if isinstance(source, HiddenSource) else source, rows, num_samples, processed, raw, _draw_kept
        )
    tiles = launch_tiles(source, rows, num_samples, processed, raw, config_for(source))
    return refuse_impossible(launch_merge(tiles, rows), rows)


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
