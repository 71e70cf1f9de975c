"""Who draws the rows of an engine's batch at a step: those that can be taken, and the engine the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .rows import Batch, Row, to_device

Entry = Row | str
"""A request that is taken, or the reason why not."""


class Plan(NamedTuple):
    """Who draws the rows of a batch.

    Attributes:
        taken: numpy ``[N]``: the rows drawn from hidden states, ascending.
        places: the same on the device; ``None`` if it is every row.
        batch: their parameters; ``None`` if there are none.
        reasons: how many rows the engine draws for which reason.
    """

    taken: Any
    places: Tensor | None
    batch: Batch | None
    reasons: Mapping[str, int]

    @property
    def whole(self) -> bool:
        return self.batch is not None and self.places is None


class Planner:
    """The plans of a runner's steps. The tensors of an unchanged batch are kept from the step before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._entries: list[Entry] = []
        self._plan: Plan | None = None

    def plan(self, entries: list[Entry], vocab_size: int) -> Plan:
        """As :func:`make_plan`."""
        if self._plan is None or entries != self._entries:
            self._plan = make_plan(entries, vocab_size, self._device)
            self._entries = entries
        return self._plan


def make_plan(entries: list[Entry], vocab_size: int, device: torch.device) -> Plan:
    """The plan of a batch, an entry a row; ``vocab_size`` is the head's."""
    rows = [entry for entry in entries if isinstance(entry, Row)]
    taken = np.array([place for place, entry in enumerate(entries) if isinstance(entry, Row)], dtype=np.int64)
    whole = len(rows) == len(entries)
    return Plan(
        taken,
        None if whole or not rows else to_device(taken, device),
        Batch(rows, vocab_size, device) if rows else None,
        Counter(entry for entry in entries if isinstance(entry, str)),
    )
