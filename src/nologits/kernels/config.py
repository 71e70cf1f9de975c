"""Launch configurations: a pure function of architecture, dtype, V, D and the batch bin. Nothing tunes itself.

The numbers come from runs in ``docs/performance-log.md``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
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


@dataclass(frozen=True)
class HopperConfig:
    """Launch of the Hopper kernel.

    ``turns``: the two warpgroups of a block take turns on 64 rows; otherwise they share tiles of 128. ``tile``: ids a tile.
    ``stages`` pieces of operands are in flight, ``pair`` of them loaded together. ``cluster``: blocks of rows that share
    weight tiles by multicast.
    """

    turns: bool
    tile: int
    stages: int
    pair: int
    cluster: int


def hopper_config(batch: int, masses: bool) -> HopperConfig:
    """The Hopper kernel's launch for ``batch`` rows; ``masses``: with log-probabilities."""
    if batch <= 16 and not masses:
        # More and smaller tiles spread evenly over the blocks. Masses are kept a tile: those of 256 ids stay under 1%.
        return HopperConfig(turns=True, tile=128, stages=8, pair=2, cluster=1)
    if batch <= 64:
        return HopperConfig(turns=True, tile=256, stages=4, pair=2, cluster=1)
    if batch <= 128:
        return HopperConfig(turns=True, tile=256, stages=4, pair=1, cluster=2)
    return HopperConfig(turns=False, tile=256, stages=4, pair=1, cluster=2 if -(-batch // 128) % 2 == 0 else 1)
