"""The screen of a head, kept to the present values of the head's weight.

A tensor counts the operations that write to it, to its base and to its views (``Tensor._version``), and the host reads that
without waiting for the device. A screen that was made at another count is stale: it is made anew, in place and on the device,
before it is used, and not used where that cannot be. What the counter does not see is on :meth:`LiveScreen.refresh`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from . import screen
from .types import Screen

MAX_DEPTH = 1 << 16
"""D up to which products of int8 stay below 2^31."""

LEAST_WEIGHTS, LEAST_DEPTH = 1 << 27, (1024, 2560)
"""Of a head whose screened draws are faster than the full ones: its size, and its depth for up to 32 rows and for more. A small
head is read in no more time than the steps around that take, and a token of few weights in no more than its noise."""

_keys = itertools.count(1)
_alive: WeakValueDictionary[int, LiveScreen] = WeakValueDictionary()


class LiveScreen:
    """The 8-bit copy of ``weight [V, D]``, made on first use.

    Attributes:
        key: its number in this process; compiled graphs name it by that.
    """

    def __init__(self, weight: Tensor) -> None:
        self.key = next(_keys)
        self._weight = weight
        self._copy: Screen | None = None
        self._version = -1
        _alive[self.key] = self

    @property
    def stale(self) -> bool:
        """The copy is not made yet, or the weight has been written to since."""
        return self._copy is None or self._weight._version != self._version

    def pays(self, batch: int) -> bool:
        """A draw of ``batch`` rows is faster with it than without, as measured on an H200 (``docs/performance-log.md``)."""
        vocab, depth = self._weight.shape
        return vocab * depth >= LEAST_WEIGHTS and depth >= LEAST_DEPTH[batch > 32]

    @property
    def obstacle(self) -> str:
        """Why :meth:`fresh` has nothing to give; empty if it has."""
        if self.stale and _capturing(self._weight.device):
            return "the screen is stale, and a graph that is being captured cannot refresh it"
        return ""

    def fresh(self) -> Screen:
        """The copy of the weight's present values. Nothing waits for the device."""
        if self._copy is None:
            version = self._weight._version
            with _normal_tensors():
                self._copy = screen.make_screen(self._weight)
            self._version = version
        elif self.stale:
            self.refresh()
        return self._copy

    def refresh(self) -> None:
        """Makes the copy, if there is one, anew in the same memory: graphs that hold it see the new one.

        Needed before a captured graph is replayed, which asks nobody, and after what the counter does not see: writes through
        ``.data``, collectives of ``torch.distributed`` into the weight, kernels outside torch.

        Raises:
            RuntimeError: a graph is being captured on this stream.
        """
        if _capturing(self._weight.device):
            raise RuntimeError("refresh must be called outside of a graph's capture: every replay would repeat it")
        if self._copy is None:
            return
        version = self._weight._version
        with _normal_tensors():
            screen.refresh(self._copy, self._weight)
        self._version = version

    def is_of(self, weight: Tensor) -> bool:
        """``weight`` is this screen's, or has it as its first rows."""
        own = self._weight
        return (
            (weight.data_ptr(), weight.dtype, weight.device, weight.stride())
            == (own.data_ptr(), own.dtype, own.device, own.stride())
            and weight.shape[1] == own.shape[1]
            and weight.shape[0] >= own.shape[0]
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy has a weight, a count of its writes and a key of its own.
        return (LiveScreen, (self._weight,))


def find(key: int, weight: Tensor) -> LiveScreen | None:
    """The screen with that key, if it is still there and that of ``weight``."""
    found = _alive.get(key)
    return found if found is not None and found.is_of(weight) else None


def refresh_all() -> None:
    """Refreshes the screens of all heads of this process, on whose weights something may have written unseen."""
    for live in list(_alive.values()):
        live.refresh()


@contextlib.contextmanager
def _normal_tensors() -> Iterator[None]:
    """Whatever mode the caller is in: tensors made in inference mode could not be written to outside of it."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
