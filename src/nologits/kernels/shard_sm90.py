"""Launches the Hopper kernels of a shard's draw: the tiles of its own ids, then one exchange with the other ranks.

``sm90/exchange.cu`` is the exchange: after it each rank has of a row a slot a rank, where one GPU has a slot a block, and goes
on like one GPU. Messages go over NVLink, where ranks can write to each other's memory, or by a collective.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..params import RowParams
from ..sources import HiddenSource
from ..types import Samples
from .arguments import on_device
from .categorical_sm90 import (
    CAPACITY,
    DrawLaunch,
    Extent,
    Links,
    Params,
    choose_kernel,
    empty_samples,
    has_top_p,
    made_width,
)
from .config import FILTERED_ROWS, HopperConfig, multiprocessors
from .nvrtc import Kernel, load

MOST_RANKS = 32
LINKED_ROWS = 4096
"""Rows of one exchange over NVLink."""
MADE_ROWS = 16
"""Open rows whose logits all ranks have at once; more take turns, each a matmul of the shard."""

_THREADS = 128
_WORDS, _PLAIN_WORDS = 7, 3  # of a message; of rows without filters
_HEADS_AT = 128
_RECORD_WORDS = 2 * _WORDS  # each half of a word has the call's number beside it


class Layout(NamedTuple):
    """Where things lie in a rank's buffer, in words of 64 bits (``Links`` of ``sm90/exchange.cuh``)."""

    ranks: int
    vocab: int

    @property
    def lists_at(self) -> int:
        """Candidates, after the messages."""
        return _HEADS_AT + 2 * self.ranks * LINKED_ROWS * _RECORD_WORDS

    @property
    def made_at(self) -> int:
        """Logits of open rows, after the candidates."""
        return self.lists_at + 2 * self.ranks * FILTERED_ROWS * (CAPACITY // self.ranks)

    @property
    def words(self) -> int:
        """All of it."""
        return self.made_at + MADE_ROWS * made_width(self.vocab) // 2


class Traffic(NamedTuple):
    """What a rank told each other rank in a draw: ``words`` of 64 bits a row, and of each row's ``lists`` up to ``room``."""

    words: int
    lists: Tensor | None
    room: int

    def bytes_per_row(self) -> float:
        """On average. Waits for the device."""
        listed = 0.0 if self.lists is None else float(self.lists.clamp(max=self.room).double().mean())
        return 8 * (self.words + listed)


class Transport(Protocol):
    """How the ranks' messages reach one another.

    Attributes:
        rank: this one.
        traffic: of the last draw; ``None`` before the first.
    """

    rank: int
    traffic: Traffic | None

    def peer_buffers(self) -> int:
        """Address of the addresses of the ranks' buffers (:class:`Layout`); 0 if messages go by :meth:`gather`."""

    def own_buffer(self) -> int:
        """Address of this rank's buffer; 0 without."""

    def gather(self, sent: Tensor) -> Tensor:
        """``[ranks, ...]``: what every rank has ``sent``, in the order of ranks."""


def launch_shard_draw(
    source: HiddenSource,
    rows: RowParams,
    mass: bool,
    raw: bool,
    config: HopperConfig,
    extent: Extent,
    transport: Transport,
    num_top: int = 0,
) -> tuple[Samples, Tensor | None]:
    """One draw a row from all shards, the same on every rank; as :func:`nologits.kernels.categorical_sm90.launch_draw`.

    ``source`` is this rank's part. Without peers' buffers rows may be left open, the same on every rank: :func:`open_mask` of
    the second result says which.
    """
    device, batch = source.device, source.batch
    gathers = rows.filtered or num_top > 0
    out = empty_samples(batch, mass, raw, num_top, device)
    launch = DrawLaunch(source, rows, out, extent, config, gathers)
    merged, scratch = _merged(launch, transport)
    launch.start_tiles()
    links = _links(transport, extent)
    with on_device(device):
        kernel = exchange_kernel(device, rows.greedy, mass, raw, gathers)
        grid = (min(batch, multiprocessors(device)), 1)
        spoken = _WORDS if gathers else _PLAIN_WORDS
        if links.buffers:
            transport.traffic = Traffic(2 * spoken, launch.scratch["gathered"] if gathers else None, extent.room)
            kernel.launch(grid, [launch.params, merged, links], device, dependent=True)
        else:
            sent = torch.empty(batch, _WORDS + (extent.room if gathers else 0), dtype=torch.int64, device=device)
            transport.traffic = Traffic(sent.shape[1], None, 0)
            links.sent = sent.data_ptr()
            kernel.launch(grid, [launch.params, merged, links], device, dependent=True)
            got = transport.gather(sent)
            links.sent, links.got = None, got.data_ptr()
            kernel.launch(grid, [launch.params, merged, links], device)
        if not gathers:
            return out, None
        choose_kernel(device, batch, mass, raw, num_top > 0, True).launch((batch, 1), [merged], device, dependent=True)
        if not links.buffers:
            return out, scratch["open"]
        launch.start_finish(merged, links)
    return out, None


def exchange_kernel(device: torch.device, greedy: bool, mass: bool, raw: bool, gathers: bool) -> Kernel:
    """The exchange for these features, compiled on first use."""
    defines = (("SHARD", 1), ("FILTER", int(gathers)), ("GREEDY", int(greedy)), ("MASS", int(mass)), ("RAW", int(raw)))
    index = device.index if device.index is not None else torch.cuda.current_device()
    return load("exchange", "exchange_rows", _THREADS, 0, defines, index)


def _merged(launch: DrawLaunch, transport: Transport) -> tuple[Params, dict[str, Tensor | None]]:
    """The arguments of what comes after the exchange: a slot a rank, and scratch of its own."""
    ranks, batch, device = launch.extent.ranks, launch.source.batch, launch.source.device
    scratch = launch.make_scratch(ranks, ranks)
    if launch.gathers and has_top_p(launch.rows):
        scratch["doubts"] = torch.empty(batch, ranks, dtype=torch.float64, device=device)
    merged = Params.from_buffer_copy(launch.params)
    for name, tensor in scratch.items():
        setattr(merged, name, None if tensor is None else tensor.data_ptr())
    merged.slots = merged.mass_tiles = ranks
    if own := transport.own_buffer():
        merged.made, merged.made_rows = own + 8 * Layout(ranks, launch.extent.vocab).made_at, MADE_ROWS
    return merged, scratch


def _links(transport: Transport, extent: Extent) -> Links:
    layout = Layout(extent.ranks, extent.vocab)
    return Links(
        buffers=transport.peer_buffers() or None, heads_at=_HEADS_AT, lists_at=layout.lists_at, made_at=layout.made_at,
        rank=transport.rank, rows=LINKED_ROWS, list_rows=FILTERED_ROWS,
    )  # fmt: skip


def open_mask(left: Tensor) -> Tensor:
    """bool ``[B]``: the rows whose candidates did not settle what they keep."""
    return (left[:, 0] & 0xFFFFFFFF) != 0
