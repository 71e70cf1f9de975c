"""Launches the Hopper kernels of a screened draw: ``sm90/screen_rows.cu``, ``screen.cu``, ``rescore.cu``.

The proof that they pass over no token is :mod:`nologits.screen`'s.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..params import RowParams
from ..sources import HiddenSource
from ..types import Samples, ScreenedRows
from .arguments import on_device
from .categorical_sm90 import CAPACITY, DrawLaunch, empty_samples, head_features, merge_kernel, whole
from .config import HopperConfig
from .nvrtc import Kernel, load, tensor_map

if TYPE_CHECKING:
    from ..types import Screen

SCREEN_CONFIG = HopperConfig(turns=True, rows=64, stages=6, pair=2, cluster=1)
_TILE_BYTES = 128  # of a row of a piece of operands
_THREADS, _RESCORE_THREADS, _ROW_THREADS = 384, 256, 256


def shared_bytes(config: HopperConfig) -> int:
    """Dynamic shared memory of one block: stages with both parts of the rows, noise codes, barriers."""
    stage = (config.tile + 2 * config.rows) * _TILE_BYTES
    return config.stages * (stage + 16) + 2 * config.tile * config.rows + 16


def launch_screened(
    source: HiddenSource, screen: Screen, states: ScreenedRows, rows: RowParams, config: HopperConfig
) -> tuple[Samples, Tensor]:
    """One draw a row, ``[B, 1]`` tokens; and int32 ``[1 + B]``: how many rows took the full path, launched by ``config``, and
    which.

    ``states`` are the hidden states of ``source``.
    """
    device, batch = source.device, source.batch
    out = empty_samples(batch, False, False, 0, device)
    launch = DrawLaunch(source, rows, out, whole(source.vocab), SCREEN_CONFIG, False)
    zeros = torch.zeros(3 * batch + 1, dtype=torch.int32, device=device)
    gathered, floors, left = zeros.split([batch, batch, batch + 1])
    entries = torch.empty(batch, CAPACITY, dtype=torch.int64, device=device)
    params = launch.params
    for name, tensor in (
        ("gathered", gathered), ("floors", floors), ("left", left), ("entries", entries), ("row_scales", states.scales),
        ("id_scales", screen.scales), ("id_errors", screen.errors), ("id_lengths", screen.lengths),
    ):  # fmt: skip
        setattr(params, name, tensor.data_ptr())
    tile, weight, hidden = SCREEN_CONFIG.tile, source.head.weight, source.hidden
    with on_device(device):
        maps = [tensor_map(screen.weight, tile, _TILE_BYTES), tensor_map(states.parts, params.box_rows, _TILE_BYTES)]
        screen_kernel(source, rows).launch(launch.grid, [*maps, params], device, dependent=True)
        operands = [ctypes.c_void_p(hidden.data_ptr()), ctypes.c_int64(hidden.stride(0))]
        operands += [ctypes.c_void_p(weight.data_ptr()), ctypes.c_int64(weight.stride(0))]
        rescore_kernel(source, rows).launch((batch, 1), [params, *operands], device, dependent=True)
        full = DrawLaunch(source, rows, out, whole(source.vocab), config, False)
        full.params.left = left.data_ptr()
        full.start_tiles(left=True)
        merge_kernel(device, rows.greedy, False, False, left=True).launch((batch, 1), [full.params], device, dependent=True)
    return out, left


def launch_rows(hidden: Tensor) -> ScreenedRows:
    """The 8-bit parts of ``hidden [B, D]``, whose rows are dense, as :func:`nologits.screen.screen_rows` makes them."""
    batch, depth, device = *hidden.shape, hidden.device
    pitch = -(-depth // 16) * 16  # that the copy engine can address
    parts = torch.empty(2 * batch, pitch, dtype=torch.int8, device=device)[:, :depth]
    scales = torch.empty(batch, 4, device=device)
    operand = (("OPERAND", '"bf16"' if hidden.dtype == torch.bfloat16 else '"f16"'),)
    kernel = load("screen_rows", "screen_rows", _ROW_THREADS, 0, operand, _index(device))
    with on_device(device):
        kernel.launch(
            (batch, 1),
            [
                ctypes.c_void_p(hidden.data_ptr()), ctypes.c_int64(hidden.stride(0)), ctypes.c_int32(batch),
                ctypes.c_int32(depth), ctypes.c_void_p(parts.data_ptr()), ctypes.c_int64(pitch),
                ctypes.c_void_p(scales.data_ptr()),
            ],
            device,
        )  # fmt: skip
    return ScreenedRows(parts, scales)


def screen_kernel(source: HiddenSource, rows: RowParams) -> Kernel:
    """The screen for these features, compiled on first use."""
    config = SCREEN_CONFIG
    defines = (
        ("TURNS", 1), ("ROWS", config.rows), ("STAGES", config.stages), ("PAIR", config.pair), ("CLUSTER", 1),
        ("GREEDY", int(rows.greedy)), ("FILTER", 0), ("REST", 0), ("SHARD", 0), ("SCREEN", 1),
        *head_features(source, rows, False, False),
    )  # fmt: skip
    return load("screen", "screen_tiles", _THREADS, shared_bytes(config), defines, _index(source.device))


def rescore_kernel(source: HiddenSource, rows: RowParams) -> Kernel:
    """The last step for these features, compiled on first use."""
    config = SCREEN_CONFIG
    defines = (
        ("ROWS", config.rows), ("STAGES", config.stages), ("PAIR", config.pair), ("CLUSTER", 1), ("GREEDY", int(rows.greedy)),
        ("FILTER", 0), ("REST", 0), ("SHARD", 0), *head_features(source, rows, False, False),
    )  # fmt: skip
    return load("rescore", "rescore_tokens", _RESCORE_THREADS, 0, defines, _index(source.device))


def _index(device: torch.device) -> int:
    return device.index if device.index is not None else torch.cuda.current_device()
