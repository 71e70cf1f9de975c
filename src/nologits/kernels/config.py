"""Launch configurations: pure functions of architecture, dtype, V, D and the batch bin. Nothing tunes itself.

The numbers come from runs in ``docs/performance-log.md``; ``nologits tune`` measures them anew and prints a table to put
here. A configuration changes the time of a draw, never its result.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class TileConfig:
    """Shape of one program's tile (ids x rows x depth a step), its warps, and the software pipeline's depth."""

    BLOCK_V: int
    BLOCK_B: int
    BLOCK_D: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class HopperConfig:
    """Launch of the Hopper kernel.

    ``turns``: the two warpgroups of a block take turns on tiles of its ``rows`` (64 or 128) x 128 ids; otherwise they have half
    of the 128 rows of a tile of 256 ids each. ``stages`` pieces of operands are in flight, ``pair`` of them loaded together;
    ``cluster`` blocks of rows share weight tiles by multicast.
    """

    turns: bool
    rows: int
    stages: int
    pair: int
    cluster: int

    @property
    def tile(self) -> int:
        """Ids of a tile."""
        return 128 if self.turns else 256

    def fits(self, batch: int) -> bool:
        """The blocks of ``batch`` rows make up whole clusters."""
        return -(-batch // self.rows) % self.cluster == 0


class SearchConfig(NamedTuple):
    """Parts of Qrita's search that can be switched off, to see what each is worth (``nologits bench qrita --ablate``)."""

    ARITY: int = 0
    TRUNCATE: int = 1
    DUPLICATES: int = 1
    TIERED: int = 1


SHIPPED_SEARCH = SearchConfig()


@dataclass(frozen=True)
class FilterConfig:
    """Launch of the Hopper kernel of the filters: ``cluster`` blocks of ``threads`` share each row."""

    cluster: int
    threads: int = 512
    search: SearchConfig = SHIPPED_SEARCH

    def chunk(self, vocab: int) -> int:
        """Ids of a block, a multiple of the noise's 128."""
        return -(-vocab // (self.cluster * 128)) * 128


TILES: dict[tuple[str, str], dict[int, TileConfig]] = {
    ("sm90", "half"): {
        16: TileConfig(128, 16, 128, 4, 4),
        32: TileConfig(256, 32, 64, 8, 4),
        64: TileConfig(256, 64, 64, 8, 4),
        -1: TileConfig(128, 128, 64, 8, 4),
    },
    ("any", "half"): {
        16: TileConfig(128, 16, 64, 4, 4),
        32: TileConfig(128, 32, 64, 4, 3),
        -1: TileConfig(128, 64, 64, 4, 3),
    },
    ("any", "float32"): {
        16: TileConfig(128, 16, 32, 4, 3),
        -1: TileConfig(128, 32, 32, 4, 3),
    },
    # The interpreter's cost is a call's, not an element's: few, large operations.
    ("interpreter", "half"): {
        16: TileConfig(128, 16, 64, 4, 1),
        -1: TileConfig(128, 64, 64, 4, 1),
    },
    ("interpreter", "float32"): {
        16: TileConfig(128, 16, 64, 4, 1),
        -1: TileConfig(128, 64, 64, 4, 1),
    },
}
"""The portable kernels' tiles by (architecture, kind of dtype) and largest batch of the bin (-1: all others)."""

HOPPER_TURNS_64 = HopperConfig(turns=True, rows=64, stages=8, pair=2, cluster=1)
HOPPER_TURNS_128 = HopperConfig(turns=True, rows=128, stages=6, pair=2, cluster=1)
HOPPER_SHARED = HopperConfig(turns=False, rows=128, stages=4, pair=1, cluster=1)
HOPPER_SHARED_CLUSTERED = HopperConfig(turns=False, rows=128, stages=4, pair=1, cluster=2)
HOPPER_CONFIGS = (HOPPER_TURNS_64, HOPPER_TURNS_128, HOPPER_SHARED, HOPPER_SHARED_CLUSTERED)
"""What the Hopper kernel is compiled and tested for."""

FILTERED_ROWS = 512
"""Rows of one filtered draw from hidden states. Beyond, the matmul's time is its arithmetic, and more rows at once would only
leave fewer blocks a row to tell where its largest logits begin."""

SCREENED_ROWS = 64
"""Rows of a screened draw. Both parts of that many hidden states make one tile; beyond, the matmul's own time grows."""


def interpreting() -> bool:
    """Triton runs its kernels in Python, on the CPU (``TRITON_INTERPRET=1`` when the kernels were decorated)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@lru_cache(maxsize=8)
def architecture(device: torch.device) -> str:
    """``"sm90"``, ``"sm80"``, ``"hip"``, ``"interpreter"``, ...: what configurations are keyed by."""
    if device.type != "cuda":
        return "interpreter" if interpreting() else device.type
    if torch.version.hip:
        return "hip"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"


@lru_cache(maxsize=8)
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors the GPU has (132 on an H200)."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def tile_config(arch: str, dtype: torch.dtype, vocab: int, depth: int, batch: int) -> TileConfig:
    """The tile of the portable kernels for ``batch`` rows."""
    kind = "float32" if dtype == torch.float32 else "half"
    table = TILES[arch, kind] if (arch, kind) in TILES else TILES["any", kind]
    return next(config for bound, config in table.items() if batch <= bound or bound < 0)


def hopper_config(batch: int) -> HopperConfig:
    """The Hopper kernel's launch for ``batch`` rows."""
    if batch <= 64:
        return HOPPER_TURNS_64
    if batch <= 128:
        return HOPPER_TURNS_128
    return HOPPER_SHARED_CLUSTERED if HOPPER_SHARED_CLUSTERED.fits(batch) else HOPPER_SHARED


CLUSTERS_AT_ONCE = {16: 7, 8: 15, 4: 30, 2: 66, 1: 132}
"""How many clusters of so many large blocks an H200 runs at once (``cuOccupancyMaxActiveClusters``): a cluster stays in one of
the chip's parts, and those have 16 or 18 multiprocessors."""

FILTER_GATHERED = 8192
"""Logits that a block of the filters' kernel can put aside on chip."""


def filter_config(vocab: int, batch: int, processors: int) -> FilterConfig:
    """The launch of the filters' kernel: the most blocks a row with which all rows run at once, a block a multiprocessor; two
    smaller blocks on each where there are more rows than that."""
    if vocab <= FILTER_GATHERED:
        return FilterConfig(1)
    for cluster, at_once in CLUSTERS_AT_ONCE.items():
        if batch <= at_once * processors // 132 and (cluster == 1 or vocab > FILTER_GATHERED * cluster // 2):
            return FilterConfig(cluster, 1024)
    return FilterConfig(1)
