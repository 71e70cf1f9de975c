"""Launch configurations: pure functions of architecture, dtype, V, D and the batch bin. Nothing tunes itself.

The numbers come from runs in ``docs/performance-log.md``; ``nologits tune`` measures them anew and prints a table to put
here. A configuration changes the time of a draw, never its result.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import torch


@dataclass(frozen=True)
class TileConfig:
    """Shape of one program's tile (ids x rows x depth a step), its warps, and the software pipeline's depth."""

    BLOCK_V: int
    BLOCK_B: int
    BLOCK_D: int
    num_warps: int
    num_stages: int


class Sharing(IntEnum):
    """How the two warpgroups of a Hopper block share its work."""

    TURNS = 0
    """Tiles of 64 rows x 128 ids in turns: one draws while the other multiplies."""
    SPLIT_IDS = 1
    """The two halves of the ids of a 64 x 256 tile."""
    SPLIT_ROWS = 2
    """The two halves of the rows of a 128 x 256 tile: weights are read once for 128 rows."""


@dataclass(frozen=True)
class HopperConfig:
    """Launch of the Hopper kernel.

    ``stages`` pieces of operands are in flight, ``pair`` of them loaded together; ``cluster`` blocks of rows share weight
    tiles by multicast.
    """

    sharing: Sharing
    stages: int
    pair: int
    cluster: int

    @property
    def tile(self) -> int:
        """Ids of a tile."""
        return 128 if self.sharing == Sharing.TURNS else 256

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return 128 if self.sharing == Sharing.SPLIT_ROWS else 64


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

HOPPER_TURNS = HopperConfig(Sharing.TURNS, stages=8, pair=2, cluster=1)
HOPPER_TURNS_CLUSTERED = HopperConfig(Sharing.TURNS, stages=8, pair=1, cluster=2)
HOPPER_SPLIT_IDS = HopperConfig(Sharing.SPLIT_IDS, stages=5, pair=1, cluster=2)
HOPPER_SPLIT_ROWS = HopperConfig(Sharing.SPLIT_ROWS, stages=4, pair=1, cluster=1)
HOPPER_SPLIT_ROWS_CLUSTERED = HopperConfig(Sharing.SPLIT_ROWS, stages=4, pair=1, cluster=2)
HOPPER_CONFIGS = (HOPPER_TURNS, HOPPER_TURNS_CLUSTERED, HOPPER_SPLIT_IDS, HOPPER_SPLIT_ROWS, HOPPER_SPLIT_ROWS_CLUSTERED)


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


def hopper_config(vocab: int, batch: int, masses: bool, processors: int) -> HopperConfig:
    """The Hopper kernel's launch for ``batch`` rows; ``masses``: with log-probabilities."""
    if batch <= 64:
        return HOPPER_TURNS
    if batch <= 128:
        # Two clustered blocks of 64 rows or one of 128 rows: whichever leaves fewer blocks idle in the last round of tiles.
        tiles = -(-vocab // 256)
        if _rounds(tiles, processors // 2) < 2 * _rounds(tiles, processors):
            # Turns hide the exponentials of the masses; without those, wider tiles win.
            return HOPPER_TURNS_CLUSTERED if masses else HOPPER_SPLIT_IDS
        return HOPPER_SPLIT_ROWS
    return HOPPER_SPLIT_ROWS if -(-batch // 128) % 2 else HOPPER_SPLIT_ROWS_CLUSTERED


def _rounds(tiles: int, blocks: int) -> int:
    return -(-tiles // blocks)
