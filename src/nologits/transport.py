"""How the GPUs of a sharded head reach one another: each writes into the others' memory, or all gather what each sends.

The first is torch's symmetric memory, over NVLink, without multicast. ``NOLOGITS_TRANSPORT`` names one, ``peers`` or
``collective``; default: peers where all ranks are Hopper GPUs of one machine that can address each other.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .dispatch import hopper_obstacle
from .kernels.shard_sm90 import MOST_RANKS, Layout, Traffic, Transport

_VARIABLE = "NOLOGITS_TRANSPORT"
_CHOICES = ("auto", "peers", "collective")


class Collective:
    """Messages go by one all-gather of the process group."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.traffic: Traffic | None = None

    def peer_buffers(self) -> int:
        """There are none."""
        return 0

    def own_buffer(self) -> int:
        """There is none."""
        return 0

    def gather(self, sent: Tensor) -> Tensor:
        """``[ranks, ...]``, in the order of ranks."""
        ranks = dist.get_world_size(self.group)
        got = torch.empty((ranks * sent.shape[0], *sent.shape[1:]), dtype=sent.dtype, device=sent.device)
        dist.all_gather_into_tensor(got, sent, group=self.group)
        return got.view(ranks, *sent.shape)


class Peers:
    """Messages go straight into buffers that all ranks can write to. All make it together; for one stream at a time."""

    def __init__(self, group: Any, device: torch.device, vocab: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        group = group if group is not None else dist.group.WORLD
        words = Layout(dist.get_world_size(group), vocab).words
        self.buffer = symmetric.empty(words, dtype=torch.int64, device=device)
        self.handle = symmetric.rendezvous(self.buffer, group)
        self.rank: int = self.handle.rank
        self.traffic: Traffic | None = None
        # A rank may write to the others only once all are empty
        self.buffer.zero_()
        torch.cuda.synchronize(device)
        dist.barrier(group)

    def peer_buffers(self) -> int:
        """Address of the ranks' addresses."""
        return int(self.handle.buffer_ptrs_dev)

    def own_buffer(self) -> int:
        """Address of this rank's."""
        return self.buffer.data_ptr()

    def gather(self, sent: Tensor) -> Tensor:
        """Not needed."""
        raise NotImplementedError("ranks that write to each other's memory gather nothing")


_made: dict[tuple[Any, torch.device, int], Transport | None] = {}


def transport_for(group: Any, device: torch.device, vocab: int) -> Transport | None:
    """The ranks' transport for heads of ``vocab`` ids; ``None`` if some rank cannot run the Hopper kernels.

    Every rank gets one of the same kind. The first call is an exchange of all ranks, and not for a stream that is captured.

    Raises:
        ValueError: ``NOLOGITS_TRANSPORT`` is not one of the choices, or names what cannot be had.
    """
    key = (group, device, vocab)
    if key not in _made:
        _made[key] = _make(group, device, vocab)
    return _made[key]


def _make(group: Any, device: torch.device, vocab: int) -> Transport | None:
    wanted = os.environ.get(_VARIABLE, "auto")
    if wanted not in _CHOICES:
        raise ValueError(f"{_VARIABLE} must be one of {', '.join(_CHOICES)}, got {wanted!r}")
    hosts = _everyone(group, (hopper_obstacle(device), socket.gethostname(), wanted))
    if any(obstacle for obstacle, _, _ in hosts) or len(hosts) > MOST_RANKS:
        return None
    if len({choice for _, _, choice in hosts}) > 1:
        raise ValueError(f"{_VARIABLE} must be the same on every rank, got {[choice for _, _, choice in hosts]}")
    if wanted == "collective" or (wanted == "auto" and len({host for _, host, _ in hosts}) > 1):
        return Collective(group)
    peers, failure = None, ""
    try:
        peers = Peers(group, device, vocab)
    except (RuntimeError, ImportError, AttributeError) as error:  # no such memory in this torch, or none between these GPUs
        failure = str(error)
    failures = [text for text in _everyone(group, failure) if text]
    if not failures:
        return peers
    if wanted == "peers":
        raise ValueError(f"{_VARIABLE}=peers must have GPUs that can address each other, got: {failures[0]}")
    return Collective(group)


def _everyone(group: Any, mine: object) -> list[Any]:
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, mine, group=group)
    return told
