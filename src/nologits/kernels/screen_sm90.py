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

_MOST_PARTS, _RESCORE_BLOCKS = 8, 256
"""Blocks that share a row's candidates, and of all rows: about two a multiprocessor."""

_CONFIG = HopperConfig(turns=True, rows=64, stages=5, pair=1, cluster=1)
_PACKED_CONFIG = HopperConfig(turns=True, rows=64, stages=8, pair=2, cluster=1)
_TILE_BYTES = 128  # of a row of a piece of operands
_THREADS, _RESCORE_THREADS, _ROW_THREADS = 384, 256, 512


class Operands(ctypes.Structure):
    """``Operands`` of ``sm90/rescore.cu``; strides in elements."""

    _fields_ = (
        ("hidden", ctypes.c_void_p), ("stride_hidden", ctypes.c_int64),
        ("weight", ctypes.c_void_p), ("stride_weight", ctypes.c_int64),
    )  # fmt: skip


def config_for(batch: int) -> HopperConfig:
    """The screen's configuration for ``batch`` rows."""
    return _PACKED_CONFIG if ScreenedRows.packed(batch) else _CONFIG


def shared_bytes(config: HopperConfig) -> int:
    """Dynamic shared memory of one block: stages with both parts of the rows, noise codes, room beside them, barriers."""
    stage = (config.tile + (1 if config is _PACKED_CONFIG else 2) * config.rows) * _TILE_BYTES
    codes = 2 * config.tile * config.rows
    return config.stages * (stage + 16) + codes + codes // 2 + 16


def launch_screened(
    source: HiddenSource, screen: Screen, states: ScreenedRows, rows: RowParams, config: HopperConfig
) -> tuple[Samples, Tensor]:
    """One draw a row, ``[B, 1]`` tokens; and int32 ``[1 + B]``: how many rows took the full path, launched by ``config``, and
    which.

    ``states`` are the hidden states of ``source``.
    """
    device, batch = source.device, source.batch
    out = empty_samples(batch, False, False, 0, device)
    screen_config = config_for(batch)
    launch = DrawLaunch(source, rows, out, whole(source.vocab), screen_config, False)
    counts = ScreenedRows.word_counts(batch)
    words = dict(zip(counts, states.words.split(list(counts.values())), strict=True))
    tensors = {
        **words, "entries": torch.empty(batch, CAPACITY, dtype=torch.int64, device=device), "row_scales": states.scales,
        "id_scales": screen.scales, "id_errors": screen.errors, "id_lengths": screen.lengths,
    }  # fmt: skip
    params, left = launch.params, words["left"]
    for name, tensor in tensors.items():
        setattr(params, name, tensor.data_ptr())
    tile, weight, hidden = screen_config.tile, source.head.weight, source.hidden
    params.box_rows = _box_rows(batch)
    parts = max(1, min(_MOST_PARTS, _RESCORE_BLOCKS // batch))
    with on_device(device):
        maps = [tensor_map(screen.weight, tile, _TILE_BYTES), tensor_map(states.parts, params.box_rows, _TILE_BYTES)]
        screen_kernel(source, rows).launch(launch.grid, [*maps, params], device, dependent=True)
        operands = Operands(hidden.data_ptr(), hidden.stride(0), weight.data_ptr(), weight.stride(0))
        rescore_kernel(source, rows).launch((batch, parts), [params, operands], device, dependent=True)
        full = DrawLaunch(source, rows, out, whole(source.vocab), config, False)
        full.params.left = left.data_ptr()
        full.start_tiles(left=True)
        merge_kernel(device, rows.greedy, False, False, left=True).launch((batch, 1), [full.params], device, dependent=True)
    return out, left


def _box_rows(batch: int) -> int:
    """Rows of bytes that are loaded together."""
    return -(-batch // 8) * (16 if ScreenedRows.packed(batch) else 8)


def launch_rows(hidden: Tensor) -> ScreenedRows:
    """The 8-bit parts of ``hidden [B, D]``, whose rows are dense, as :func:`nologits.screen.screen_rows` makes them."""
    batch, depth, device = *hidden.shape, hidden.device
    pitch = -(-depth // 16) * 16  # that the copy engine can address
    parts = torch.empty(ScreenedRows.num_parts(batch), pitch, dtype=torch.int8, device=device)[:, :depth]
    scales = torch.empty(batch, 4, device=device)
    words = torch.empty(sum(ScreenedRows.word_counts(batch).values()), dtype=torch.int32, device=device)
    operand = (("OPERAND", '"bf16"' if hidden.dtype == torch.bfloat16 else '"f16"'),)
    kernel = load("screen_rows", "screen_rows", _ROW_THREADS, 0, operand, _index(device))
    with on_device(device):
        kernel.launch(
            (batch, 1),
            [
                ctypes.c_void_p(hidden.data_ptr()), ctypes.c_int64(hidden.stride(0)), ctypes.c_int32(batch),
                ctypes.c_int32(depth), ctypes.c_void_p(parts.data_ptr()), ctypes.c_int64(pitch),
                ctypes.c_void_p(scales.data_ptr()), ctypes.c_void_p(words.data_ptr()), ctypes.c_int32(words.numel()),
                ctypes.c_bool(ScreenedRows.packed(batch)),
            ],
            device,
        )  # fmt: skip
    return ScreenedRows(parts, scales, words)


def screen_kernel(source: HiddenSource, rows: RowParams) -> Kernel:
    """The screen for these features, compiled on first use."""
    config = config_for(source.batch)
    defines = (
        ("TURNS", 1), ("ROWS", config.rows), ("STAGES", config.stages), ("PAIR", config.pair), ("CLUSTER", 1),
        ("GREEDY", int(rows.greedy)), ("FILTER", 0), ("REST", 0), ("SHARD", 0), ("SCREEN", 1),
        ("PACKED", int(config is _PACKED_CONFIG)),
        *head_features(source, rows, False, False),
    )  # fmt: skip
    return load("screen", "screen_tiles", _THREADS, shared_bytes(config), defines, _index(source.device))


def rescore_kernel(source: HiddenSource, rows: RowParams) -> Kernel:
    """The last step for these features, compiled on first use."""
    config = _CONFIG
    defines = (
        ("ROWS", config.rows), ("STAGES", config.stages), ("PAIR", config.pair), ("CLUSTER", 1), ("GREEDY", int(rows.greedy)),
        ("FILTER", 0), ("REST", 0), ("SHARD", 0), *head_features(source, rows, False, False),
    )  # fmt: skip
    return load("rescore", "rescore_tokens", _RESCORE_THREADS, 0, defines, _index(source.device))


def _index(device: torch.device) -> int:
    return device.index if device.index is not None else torch.cuda.current_device()
