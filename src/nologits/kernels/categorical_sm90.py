"""Launches the Hopper kernels of the draw (``sm90/categorical.cu``, ``sm90/merge.cu``); what they compute is written there."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..params import RowParams
from ..sources import HiddenSource
from ..types import Samples
from .arguments import on_device, stride_of, temperature_arguments
from .config import HopperConfig, multiprocessors
from .nvrtc import Kernel, load, tensor_map

TILE_D = 64
"""Depth of one piece of operands: 128 bytes, the width of the copy engine's swizzle."""

_TILE_THREADS, _MERGE_THREADS = 384, 128
_MASS_IDS = 256
_FLOAT_TYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}

_POINTERS = (
    "bias", "logit_bias", "bias_ids", "bias_values", "allowed", "temperature", "seed", "position", "entropy",
    "winners", "masses", "raw_masses", "tokens", "logprobs", "raw_logprobs", "log_masses",
)  # fmt: skip
_STRIDES = (
    "stride_logit_bias", "stride_bias_ids", "stride_bias_values", "stride_allowed", "stride_temperature", "stride_seed",
    "stride_position",
)  # fmt: skip
_SIZES = ("B", "V", "D", "tiles", "mass_tiles", "slots", "box_rows", "num_biased")
_SCALARS = ("temperature_value", "scale", "softcap")


class Params(ctypes.Structure):
    """``Params`` of ``sm90/contract.cuh``, field by field."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in _POINTERS]
        + [(name, ctypes.c_int64) for name in _STRIDES]
        + [(name, ctypes.c_int32) for name in _SIZES]
        + [(name, ctypes.c_float) for name in _SCALARS]
    )


def shared_bytes(config: HopperConfig) -> int:
    """Dynamic shared memory of one block: stages, noise codes, barriers."""
    stage = (config.tile + config.rows) * TILE_D * 2
    # A byte a logit: of one tile, or of the two that warpgroups hold who take turns.
    codes = config.tile * config.rows * (2 if config.turns else 1)
    return config.stages * (stage + 16) + codes + 16


def grid(config: HopperConfig, batch: int, vocab: int, masses: bool, processors: int) -> tuple[int, int]:
    """Blocks of rows, and how many blocks share the tiles of each (the slots of a row)."""
    row_blocks = -(-batch // config.rows)
    # Masses are kept for 256 ids: a block then has tiles that make those up.
    shares = -(-vocab // (_MASS_IDS if masses else config.tile))
    return row_blocks, max(1, min(shares, processors // row_blocks))


def tile_kernel(source: HiddenSource, rows: RowParams, mass: bool, raw: bool, config: HopperConfig) -> Kernel:
    """The tile kernel for these features, compiled on first use."""
    head = source.head
    defines = (
        ("OPERAND", '"bf16"' if source.hidden.dtype == torch.bfloat16 else '"f16"'),
        ("TURNS", int(config.turns)), ("ROWS", config.rows), ("STAGES", config.stages), ("PAIR", config.pair),
        ("CLUSTER", config.cluster),
        ("GREEDY", int(rows.greedy)), ("MASS", int(mass)), ("RAW", int(raw)),
        ("BIAS", _float_type(head.bias)), ("HEAD_SCALE", int(head.scale != 1.0)), ("SOFTCAP", int(head.softcap is not None)),
        ("LOGIT_BIAS", _float_type(rows.logit_bias)),
        ("SPARSE_BIAS", int(rows.num_biased > 0)), ("ALLOWED", int(rows.allowed is not None)),
    )  # fmt: skip
    return load("categorical", "categorical_tiles", _TILE_THREADS, shared_bytes(config), defines, _index(source.device))


def merge_kernel(device: torch.device, greedy: bool, mass: bool, raw: bool) -> Kernel:
    """The merge kernel for these features."""
    defines = (("GREEDY", int(greedy)), ("MASS", int(mass)), ("RAW", int(raw)))
    return load("merge", "categorical_merge", _MERGE_THREADS, 0, defines, _index(device))


def launch_draw(source: HiddenSource, rows: RowParams, mass: bool, raw: bool, config: HopperConfig) -> Samples:
    """One draw a row; ``[B, 1]`` results. Operands must fit the copy engine (:func:`nologits.hopper.obstacle`)."""
    hidden, head, device = source.hidden, source.head, source.device
    batch, depth, vocab = *hidden.shape, head.vocab_size
    row_blocks, slots = grid(config, batch, vocab, mass or raw, multiprocessors(device))
    mass_tiles = -(-vocab // _MASS_IDS)
    box_rows = min(config.rows, -(-batch // 8) * 8)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    winners = empty(batch, slots, 2)
    masses = empty(batch, mass_tiles, 2) if mass else None
    raw_masses = empty(batch, mass_tiles, 2) if raw else None
    out = Samples(
        empty(batch, 1, dtype=torch.int64), empty(batch, 1) if mass else None, empty(batch, 1) if raw else None,
        empty(batch) if mass else None,
    )  # fmt: skip
    temperature = temperature_arguments(rows)
    tensors: dict[str, Tensor | None] = {
        "bias": head.bias, "logit_bias": rows.logit_bias, "bias_ids": rows.bias_ids, "bias_values": rows.bias_values,
        "allowed": rows.allowed, "temperature": temperature["temperature_ptr"],
        "seed": rows.seed, "position": rows.position, "entropy": rows.entropy,
        "winners": winners, "masses": masses, "raw_masses": raw_masses,
        "tokens": out.tokens, "logprobs": out.logprobs, "raw_logprobs": out.raw_logprobs, "log_masses": out.log_mass,
    }  # fmt: skip
    params = Params(
        **{name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None},
        stride_logit_bias=stride_of(rows.logit_bias, 0), stride_bias_ids=stride_of(rows.bias_ids, 0),
        stride_bias_values=stride_of(rows.bias_values, 0), stride_allowed=stride_of(rows.allowed, 0),
        stride_temperature=temperature["stride_temperature"], stride_seed=stride_of(rows.seed, 0),
        stride_position=stride_of(rows.position, 0),
        B=batch, V=vocab, D=depth, tiles=-(-vocab // config.tile), mass_tiles=mass_tiles, slots=slots, box_rows=box_rows,
        num_biased=rows.num_biased, temperature_value=temperature["temperature_value"],
        scale=head.scale, softcap=head.softcap or 1.0,
    )  # fmt: skip
    with on_device(device):
        maps = [tensor_map(head.weight, config.tile // config.cluster, TILE_D), tensor_map(hidden, box_rows, TILE_D)]
        tile_kernel(source, rows, mass, raw, config).launch((row_blocks, slots), [*maps, params], device)
        merge_kernel(device, rows.greedy, mass, raw).launch((batch, 1), [params], device, dependent=True)
    return out


def _float_type(tensor: Tensor | None) -> int:
    return 0 if tensor is None else _FLOAT_TYPES[tensor.dtype]


def _index(device: torch.device) -> int:
    return device.index if device.index is not None else torch.cuda.current_device()
