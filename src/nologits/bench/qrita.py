"""The suite of Qrita's parts: our filter kernel beside one read of the logits, and with one part of its search switched.

The paper is arXiv 2602.01518; the switches are macros of ``kernels/sm90/search.cuh``. Cells, inputs, gate and columns are the
filter suite's. What is timed is the kernel alone, without the checks of :func:`nologits.filter_logits`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..dispatch import hopper_obstacle
from ..kernels.config import filter_config, multiprocessors
from . import filters
from .filter_cases import FilterInputs
from .filter_providers import FLOOR, FilterProvider, amax
from .gate import SetGate
from .peers import SkipError
from .suite import Call, Cell, Row, Suite
from .timing import Ceilings, Timing

DEFAULT_QRITA_FAMILIES = ("gauss", "peaked", "flat", "ties")
DEFAULT_QRITA_BATCHES = (1, 64)

SHIPPED, NO_DUPLICATES = "shipped", "no-duplicates"

SWITCHES: dict[str, dict[str, int]] = {
    "no-truncation": {"TRUNCATE": 0},
    "binary": {"ARITY": 2},
    "ternary": {"ARITY": 3},
    "quaternary": {"ARITY": 4},
    NO_DUPLICATES: {"DUPLICATES": 0},
    "untiered": {"TIERED": 0},
}
"""What each ablation changes of :class:`nologits.kernels.config.SearchConfig`. In order: nothing is put
aside while the row is read, and the first guess is a histogram of its whole range; the paper's pivot search on the survivors,
with so many parts a round, is in place of our sort; all copies of the boundary value are kept; every level of the search sweeps
the whole row.

Parts that rest on a switched one go with it: truncation on the list of survivors; the first read's verdict on a top-p, and both
filters in one search, on the sort. Min-p alone searches nothing: its times show how far equal work spreads."""


def masked(switches: Mapping[str, int], inputs: FilterInputs, mode: str) -> Callable[[], Tensor]:
    """Our kernel with some fields of its ``SearchConfig`` changed, into a new tensor.

    Raises:
        SkipError: it cannot run here.
    """
    logits = inputs.logits
    if reason := hopper_obstacle(logits.device):
        raise SkipError(reason)
    from ..kernels.filters_sm90 import launch_mask  # needs cuda.bindings

    batch, vocab = logits.shape
    rows = inputs.rows
    config = filter_config(vocab, batch, multiprocessors(logits.device))
    config = replace(config, search=config.search._replace(**switches))

    def call() -> Tensor:
        out = torch.empty_like(logits)
        launch_mask(logits, rows, out, float("-inf"), config=config)
        return out

    return call


def no_duplicates(inputs: FilterInputs, mode: str) -> Call:
    """Our kernel without the handling of duplicates, where no boundary has any.

    Raises:
        SkipError: it cannot run here, or a row has kept more than belongs to it. If something is missing instead, that is not
            the switch's doing, and the gate ends the run.
    """
    call, shipped = masked(SWITCHES[NO_DUPLICATES], inputs, mode), masked({}, inputs, mode)
    result = call()
    wrong = SetGate(inputs, mode).observe("it keeps all copies of a boundary value", result)
    if wrong and bool((result > float("-inf"))[shipped() > float("-inf")].all()):
        raise SkipError(wrong)
    return call


QRITA_PROVIDERS: dict[str, FilterProvider] = {
    FLOOR: amax,
    SHIPPED: partial(masked, {}),
    **{name: partial(masked, switches) for name, switches in SWITCHES.items()},
    NO_DUPLICATES: no_duplicates,
}


def make_qrita_rows(cell: Cell, timings: dict[str, Timing], memory: dict[str, int], ceilings: Ceilings) -> list[Row]:
    """The rows of one cell. There are no peers: ``speedup`` is the time of ``shipped`` over that of an ablation, below 1 where
    the part that it switches pays."""
    rows = filters.filter_rows(SUITE, cell, timings, memory)
    for row in rows:
        if row["provider"] in SWITCHES and SHIPPED in timings:
            row["speedup"] = round(timings[SHIPPED].us / timings[row["provider"]].us, 3)
    return rows


SUITE = Suite("qrita", QRITA_PROVIDERS, (SHIPPED, *SWITCHES), FLOOR, filters.cells, SetGate, make_qrita_rows)
