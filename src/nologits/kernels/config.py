"""Launch configurations: a pure function of architecture, dtype, V, D and the batch bin. Nothing tunes itself.

The numbers come from runs in ``docs/performance-log.md``.
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


def tile_config(arch: str, dtype: torch.dtype, vocab: int, depth: int, batch: int) -> TileConfig:
    """The tile of the fused kernel for ``batch`` rows."""
    if arch == "interpreter":
        # The interpreter's cost is a call's, not an element's: few, large operations.
        return TileConfig(128, 16 if batch <= 16 else 64, 64, 4, 1)
    if dtype == torch.float32:
        return TileConfig(128, 16 if batch <= 16 else 32, 32, 4, 3)
    if batch <= 16:
        return TileConfig(128, 16, 128, 4, 4) if arch == "sm90" else TileConfig(128, 16, 64, 4, 4)
    if batch <= 64:
        block_b = 32 if batch <= 32 else 64
        return TileConfig(256, block_b, 64, 8, 4) if arch == "sm90" else TileConfig(128, block_b, 64, 4, 3)
    return TileConfig(128, 128, 64, 8, 4) if arch == "sm90" else TileConfig(128, 64, 64, 4, 3)


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


def hopper_config(batch: int) -> HopperConfig:
    """The Hopper kernel's launch for ``batch`` rows."""
    if batch <= 64:
        return HopperConfig(Sharing.TURNS, stages=8, pair=2, cluster=1)
    if batch <= 128:
        return HopperConfig(Sharing.SPLIT_IDS, stages=5, pair=1, cluster=2)
    return HopperConfig(Sharing.SPLIT_ROWS, stages=4, pair=1, cluster=2 if -(-batch // 128) % 2 == 0 else 1)
