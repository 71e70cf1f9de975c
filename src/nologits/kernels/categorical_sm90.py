"""Launches the Hopper kernels of the draw; what they compute is written in their sources.

Without filters those are ``sm90/categorical.cu`` and ``sm90/merge.cu``. With filters the first gathers candidates,
``sm90/choose.cu`` finds among them what is kept, and ``sm90/finish.cu`` returns at once unless rows are left open.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..params import RowParams
from ..sources import HiddenSource
from ..types import Samples, TopTokens
from .arguments import filter_arguments, on_device, stride_of, temperature_arguments
from .config import HopperConfig, multiprocessors
from .nvrtc import Defines, Kernel, load, tensor_map

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
_FILTER_POINTERS = (
    "top_k", "top_p", "min_p", "entries", "gathered", "peaks", "pilot", "thresholds", "open", "progress", "open_rows", "rests",
    "slot_thresholds", "tops", "made", "top_ids", "top_logprobs", "raw_top_ids", "raw_top_logprobs",
)  # fmt: skip
_SCREEN_POINTERS = (
    "id_scales", "id_errors", "id_lengths", "row_scales", "exact_winners", "floors", "told", "rescored", "left",
)  # fmt: skip
_FILTER_INTEGERS = ("stride_top_k", "stride_top_p", "stride_min_p", "top_k_value")

CAPACITY = 4096
"""Candidates of a row that there is room for."""

_OPEN_WORDS = 8
_CHOOSE_BYTES = 2 * 8 * CAPACITY
_CHOOSE_THREADS = 512
_FINISH_CONFIG = HopperConfig(turns=True, rows=64, stages=4, pair=2, cluster=1)
_FINISH_BLOCKS = 255  # that have room for their winners beside an open row's list
_FINISH_BYTES = 4 * (128 + 64) * 128 + (112 << 10)
_PIECES = 2


class Params(ctypes.Structure):
    """``Params`` of ``sm90/contract.cuh``, field by field."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in _POINTERS]
        + [(name, ctypes.c_int64) for name in _STRIDES]
        + [(name, ctypes.c_int32) for name in _SIZES]
        + [(name, ctypes.c_float) for name in _SCALARS]
        + [(name, ctypes.c_void_p) for name in _FILTER_POINTERS]
        + [(name, ctypes.c_int64) for name in _FILTER_INTEGERS]
        + [(name, ctypes.c_double) for name in ("top_p_value", "min_p_value")]
        + [(name, ctypes.c_int32) for name in ("top_k_wide", "top_p_wide", "min_p_wide", "num_top", "made_rows")]
        + [(name, ctypes.c_int32) for name in ("first", "skip", "vocab", "room", "ranks")]
        + [(name, ctypes.c_void_p) for name in ("doubts", *_SCREEN_POINTERS)]
    )


class Links(ctypes.Structure):
    """``Links`` of ``sm90/exchange.cuh``, field by field; all 0 where no ranks are linked."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("buffers", "sent", "got")]
        + [(name, ctypes.c_int64) for name in ("heads_at", "lists_at", "made_at")]
        + [(name, ctypes.c_int32) for name in ("rank", "rows", "list_rows")]
    )


class Extent(NamedTuple):
    """Which of a vocabulary's ids a head has: all of them, or as one of ``ranks`` shards the ``size`` from ``start`` on."""

    start: int
    size: int
    vocab: int
    ranks: int = 1

    @property
    def first(self) -> int:
        """Where the kernels count from: noise is made for 128 ids at a time."""
        return self.start - self.skip

    @property
    def skip(self) -> int:
        """Ids from there to the first that the head has."""
        return self.start % 128

    @property
    def end(self) -> int:
        """Ids from there to its end."""
        return self.skip + self.size

    @property
    def room(self) -> int:
        """Candidates that it may have."""
        return CAPACITY // self.ranks


def whole(vocab: int) -> Extent:
    """The extent of a head that is no shard."""
    return Extent(0, vocab, vocab)


def shared_bytes(config: HopperConfig, gathers: bool = False) -> int:
    """Dynamic shared memory of one block: stages, noise codes, barriers; thresholds."""
    stage = (config.tile + config.rows) * TILE_D * 2
    # A byte a logit: of one tile, or of the two that warpgroups hold who take turns.
    codes = config.tile * config.rows * (2 if config.turns else 1)
    return config.stages * (stage + 16) + codes + 16 + (4 * config.rows if gathers else 0)


def grid(config: HopperConfig, batch: int, vocab: int, masses: bool, processors: int) -> tuple[int, int]:
    """Blocks of rows, and how many blocks share the tiles of each (the slots of a row)."""
    row_blocks = -(-batch // config.rows)
    # Masses are kept for 256 ids: a block then has tiles that make those up.
    shares = -(-vocab // (_MASS_IDS if masses else config.tile))
    return row_blocks, max(1, min(shares, processors // row_blocks))


def tile_kernel(
    source: HiddenSource,
    rows: RowParams,
    mass: bool,
    raw: bool,
    config: HopperConfig,
    gathers: bool = False,
    shard: bool = False,
    left: bool = False,
) -> Kernel:
    """The tile kernel for these features, compiled on first use.

    It ``gathers`` candidates; the head is a ``shard``; it does nothing unless a screen has ``left`` rows.
    """
    defines = (
        ("TURNS", int(config.turns)), ("ROWS", config.rows), ("STAGES", config.stages), ("PAIR", config.pair),
        ("CLUSTER", config.cluster), ("GREEDY", int(rows.greedy)),
        ("FILTER", int(gathers)), ("REST", int(gathers and has_top_p(rows))), ("SHARD", int(shard)), ("LEFT", int(left)),
        *head_features(source, rows, mass, raw),
    )  # fmt: skip
    return load(
        "categorical", "categorical_tiles", _TILE_THREADS, shared_bytes(config, gathers), defines, _index(source.device)
    )


def finish_kernel(source: HiddenSource, rows: RowParams, mass: bool, raw: bool, shard: bool = False) -> Kernel:
    """The kernel that settles open rows."""
    defines = (("REST", 0), ("SHARD", int(shard)), *head_features(source, rows, mass, raw))
    return load("finish", "finish_rows", _TILE_THREADS, _FINISH_BYTES, defines, _index(source.device))


def choose_kernel(device: torch.device, batch: int, mass: bool, raw: bool, top: bool, shard: bool = False) -> Kernel:
    """The kernel that draws from candidates: two blocks share a multiprocessor where there are more rows than those."""
    blocks = 1 if batch <= multiprocessors(device) else 2
    defines = (("BLOCKS", blocks), ("TOP", int(top)), ("MASS", int(mass)), ("RAW", int(raw)), ("SHARD", int(shard)))
    return load("choose", "choose_tokens", _CHOOSE_THREADS, _CHOOSE_BYTES, defines, _index(device))


def merge_kernel(device: torch.device, greedy: bool, mass: bool, raw: bool, left: bool = False) -> Kernel:
    """The merge kernel for these features."""
    defines = (("GREEDY", int(greedy)), ("MASS", int(mass)), ("RAW", int(raw)), ("LEFT", int(left)))
    return load("merge", "categorical_merge", _MERGE_THREADS, 0, defines, _index(device))


_counters: dict[int, Tensor] = {}


def open_rows(device: torch.device) -> Tensor:
    """int64 ``[1]``: rows so far, of all calls on that GPU, whose candidates did not settle what they keep.

    They were settled all the same, by further sweeps (``sm90/finish.cu``). Counted from the first call that is not captured
    into a graph.
    """
    index = _index(device)
    if index not in _counters:
        _counters[index] = torch.zeros(1, dtype=torch.int64, device=torch.device("cuda", index))
    return _counters[index]


def launch_draw(
    source: HiddenSource, rows: RowParams, mass: bool, raw: bool, config: HopperConfig, num_top: int = 0
) -> Samples:
    """One draw a row; ``[B, 1]`` results, and the ``num_top`` likeliest tokens of what ``mass`` and ``raw`` ask for.

    Operands must fit the copy engine (:func:`nologits.hopper.obstacle`).
    """
    device, batch, vocab = source.device, source.batch, source.vocab
    gathers = rows.filtered or num_top > 0
    out = empty_samples(batch, mass, raw, num_top, device)
    launch = DrawLaunch(source, rows, out, whole(vocab), config, gathers)
    launch.start_tiles()
    with on_device(device):
        if not gathers:
            merge_kernel(device, rows.greedy, mass, raw).launch((batch, 1), [launch.params], device, dependent=True)
            return out
        choose_kernel(device, batch, mass, raw, num_top > 0).launch((batch, 1), [launch.params], device, dependent=True)
        launch.start_finish(launch.params, Links())
    return out


def launch_select(source: HiddenSource, rows: RowParams, config: HopperConfig, width: int) -> tuple[Tensor, Tensor]:
    """The first ``width`` ids that the filters keep of each row, and ``-1`` beyond; and the entries of the ``width`` likeliest.

    Both int64 ``[B, width]``; operands as for a draw. It is the list that a draw makes on the way. An entry is a token's word
    (:func:`nologits.selection.order_words`) with its first bit turned.
    """
    device, batch = source.device, source.batch
    out = empty_samples(batch, True, False, width, device)
    launch = DrawLaunch(source, rows, out, whole(source.vocab), config, True)
    launch.start_tiles()
    with on_device(device):
        choose_kernel(device, batch, True, False, True).launch((batch, 1), [launch.params], device, dependent=True)
        launch.start_finish(launch.params, Links())
    tops = launch.scratch["tops"]
    assert out.top is not None
    assert tops is not None
    return out.top.ids, tops


def empty_samples(batch: int, mass: bool, raw: bool, num_top: int, device: torch.device) -> Samples:
    """Results of one draw a row, to be written."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def tops(wanted: bool) -> TopTokens | None:
        return TopTokens(empty(batch, num_top, dtype=torch.int64), empty(batch, num_top)) if num_top and wanted else None

    return Samples(
        empty(batch, 1, dtype=torch.int64), empty(batch, 1) if mass else None, empty(batch, 1) if raw else None,
        empty(batch) if mass else None, tops(mass), tops(raw),
    )  # fmt: skip


class DrawLaunch:
    """The arguments of one draw's kernels, and the launches that all draws have: of the tiles, and of what settles open rows.

    ``params`` are the tile kernel's; ``scratch`` is what it leaves.
    """

    def __init__(
        self, source: HiddenSource, rows: RowParams, out: Samples, extent: Extent, config: HopperConfig, gathers: bool
    ) -> None:
        self.source, self.rows, self.extent, self.config, self.gathers = source, rows, extent, config, gathers
        self.mass, self.raw = out.logprobs is not None, out.raw_logprobs is not None
        self.num_top = next((top.ids.shape[1] for top in (out.top, out.raw_top) if top is not None), 0)
        self.processors = multiprocessors(source.device)
        self.grid = grid(config, source.batch, extent.end, self.mass or self.raw, self.processors)
        self.scratch = self.make_scratch(self.grid[1], -(-extent.end // _MASS_IDS))
        self.params = self._make_params(out)

    def make_scratch(self, slots: int, mass_tiles: int) -> dict[str, Tensor | None]:
        """What the kernels tell each other of ``slots`` parts of a row."""
        batch, device = self.source.batch, self.source.device
        masses = {
            name: torch.empty(batch, mass_tiles, 2, device=device) if wanted else None
            for name, wanted in (("masses", self.mass), ("raw_masses", self.raw))
        }
        scratch: dict[str, Tensor | None] = {"winners": torch.empty(batch, slots, 2, device=device), **masses}
        if self.gathers:
            scratch |= _filter_scratch(batch, slots, self.num_top, has_top_p(self.rows), device)
            if self.extent.ranks == 1:  # those of shards are all ranks' (shard_sm90.py)
                scratch["made"] = torch.empty(made_rows(batch), made_width(self.extent.vocab), device=device)
        return scratch

    def _make_params(self, out: Samples) -> Params:
        source, rows, extent, head = self.source, self.rows, self.extent, self.source.head
        temperature = temperature_arguments(rows)
        tensors: dict[str, Tensor | None] = {
            "bias": head.bias, "logit_bias": rows.logit_bias, "bias_ids": rows.bias_ids, "bias_values": rows.bias_values,
            "allowed": rows.allowed, "temperature": temperature["temperature_ptr"],
            "seed": rows.seed, "position": rows.position, "entropy": rows.entropy,
            "tokens": out.tokens, "logprobs": out.logprobs, "raw_logprobs": out.raw_logprobs, "log_masses": out.log_mass,
            **self.scratch,
        }  # fmt: skip
        numbers: dict[str, int | float] = {}
        if self.gathers:
            filters, numbers = filter_arguments(rows)
            tensors |= filters
            numbers |= {"num_top": self.num_top, "made_rows": made_rows(source.batch)}
            for name, top in (("top", out.top), ("raw_top", out.raw_top)):
                if top is not None:
                    tensors |= {f"{name}_ids": top.ids, f"{name}_logprobs": top.logprobs}
        params = Params(
            **{name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None}, **numbers,
            stride_logit_bias=stride_of(rows.logit_bias, 0), stride_bias_ids=stride_of(rows.bias_ids, 0),
            stride_bias_values=stride_of(rows.bias_values, 0), stride_allowed=stride_of(rows.allowed, 0),
            stride_temperature=temperature["stride_temperature"], stride_seed=stride_of(rows.seed, 0),
            stride_position=stride_of(rows.position, 0),
            B=source.batch, V=extent.end, D=source.hidden.shape[1], tiles=-(-extent.end // self.config.tile),
            mass_tiles=-(-extent.end // _MASS_IDS), slots=self.grid[1], box_rows=self._box_rows(self.config),
            num_biased=rows.num_biased, temperature_value=temperature["temperature_value"],
            scale=head.scale, softcap=head.softcap or 1.0,
            first=extent.first, skip=extent.skip, vocab=extent.vocab, room=extent.room, ranks=extent.ranks,
        )  # fmt: skip
        # Where the kernels count from `first`, so do the pointers
        if head.bias is not None:
            params.bias -= extent.skip * head.bias.element_size()
        if rows.logit_bias is not None:
            params.logit_bias += extent.first * rows.logit_bias.element_size()
        if rows.allowed is not None:
            params.allowed += extent.first // 32 * 4
        return params

    def _box_rows(self, config: HopperConfig) -> int:
        return min(config.rows, -(-self.source.batch // 8) * 8)

    def _maps(self, config: HopperConfig) -> list[Any]:
        weight, hidden = self.source.head.weight, self.source.hidden
        return [tensor_map(weight, config.tile // config.cluster, TILE_D), tensor_map(hidden, self._box_rows(config), TILE_D)]

    def start_tiles(self, left: bool = False) -> None:
        """The matmul, and what is made of its tiles; unless no row is ``left`` for that."""
        device, shard = self.source.device, self.extent.ranks > 1
        with on_device(device):
            kernel = tile_kernel(self.source, self.rows, self.mass, self.raw, self.config, self.gathers, shard, left)
            kernel.launch(self.grid, [*self._maps(self.config), self.params], device, dependent=left)

    def start_finish(self, params: Params, links: Links) -> None:
        """What settles the rows that are open then; ``params`` are the kernel's that left them."""
        device, shard = self.source.device, self.extent.ranks > 1
        finish = Params.from_buffer_copy(params)
        finish.tiles, finish.box_rows = -(-self.extent.end // _FINISH_CONFIG.tile), self._box_rows(_FINISH_CONFIG)
        blocks = min(self.processors, _FINISH_BLOCKS)
        with on_device(device):
            finish_kernel(self.source, self.rows, self.mass, self.raw, shard).launch(
                (1, blocks), [*self._maps(_FINISH_CONFIG), finish, links], device, together=True
            )


def _filter_scratch(batch: int, slots: int, num_top: int, top_p: bool, device: torch.device) -> dict[str, Tensor | None]:
    """What the kernels tell each other."""
    sizes = {"gathered": batch, "peaks": batch, "thresholds": batch, "progress": 2, "pilot": batch * slots * _PIECES}
    zeros = torch.zeros(sum(sizes.values()), dtype=torch.int32, device=device).split(list(sizes.values()))
    return {
        **dict(zip(sizes, zeros, strict=True)),
        "rests": torch.empty(batch, slots, dtype=torch.float64, device=device) if top_p else None,
        "entries": torch.empty(batch, CAPACITY, dtype=torch.int64, device=device),
        "slot_thresholds": torch.empty(batch, slots, device=device),
        "tops": torch.empty(batch, num_top, dtype=torch.int64, device=device) if num_top else None,
        "open": torch.empty(batch, _OPEN_WORDS, dtype=torch.int64, device=device),
        "open_rows": open_rows(device) if _index(device) in _counters or not torch.cuda.is_current_stream_capturing() else None,
    }


def made_rows(batch: int) -> int:
    """Open rows of a group whose logits are kept for further sweeps."""
    return max(1, batch // 64)


def made_width(vocab: int) -> int:
    """Logits that one of them takes."""
    return -(-vocab // _FINISH_CONFIG.tile) * _FINISH_CONFIG.tile


def has_top_p(rows: RowParams) -> bool:
    return isinstance(rows.top_p, Tensor) or rows.top_p < 1.0


def head_features(source: HiddenSource, rows: RowParams, mass: bool, raw: bool) -> Defines:
    """The macros that all kernels share which make logits."""
    head = source.head
    return (
        ("OPERAND", '"bf16"' if source.hidden.dtype == torch.bfloat16 else '"f16"'), ("MASS", int(mass)), ("RAW", int(raw)),
        ("BIAS", _float_type(head.bias)), ("HEAD_SCALE", int(head.scale != 1.0)), ("SOFTCAP", int(head.softcap is not None)),
        ("LOGIT_BIAS", _float_type(rows.logit_bias)),
        ("SPARSE_BIAS", int(rows.num_biased > 0)), ("ALLOWED", int(rows.allowed is not None)),
    )  # fmt: skip


def _float_type(tensor: Tensor | None) -> int:
    return 0 if tensor is None else _FLOAT_TYPES[tensor.dtype]


def _index(device: torch.device) -> int:
    return device.index if device.index is not None else torch.cuda.current_device()
