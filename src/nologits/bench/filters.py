"""The filter suite: top-k, top-p and min-p on logits that are already there, beside one read of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from ..testing.families import UnavailableError
from .filter_cases import logits_bytes, make_family, make_filter_inputs
from .filter_providers import FILTER_OURS, FILTER_PROVIDERS, FLOOR, share_read_again
from .gate import SetGate
from .suite import Cell, Plan, Row, Suite, place_rows
from .timing import Ceilings, Timing

FILTER_KEYS = ("ratio_to_amax", "gbps", "speedup", "captured", "read_again")
"""The time over that of ``amax``; the bytes of the logits over the time; for our rows, the time of the fastest peer, whatever
it returns, over ours; timed as a CUDA graph; for our rows, the share of those whose boundary one read did not settle.
``ratio_to_matmul`` is null: there is no matmul."""


def cells(plan: Plan, skip: Callable[[Row], None]) -> Iterator[Cell]:
    """The cells of a plan; the logits of a family and batch size are made once."""
    for family in plan.cases:
        for batch in plan.batches:
            try:
                logits = make_family(family, batch)
            except UnavailableError as reason:
                skip({"case": family, "reason": str(reason)})
                break
            for mode in plan.modes:
                yield Cell(family, logits.shape[1], 0, batch, mode, partial(make_filter_inputs, logits, mode))
            del logits
            torch.cuda.empty_cache()


def filter_rows(
    suite: Suite, cell: Cell, timings: dict[str, Timing], memory: dict[str, int], read_again: float | None = None
) -> list[Row]:
    """The rows of one cell of a suite of filters, with :data:`FILTER_KEYS`."""
    read = logits_bytes(cell.case, cell.vocab, cell.batch)
    rows = []
    for row, ratio, speedup in place_rows(suite, cell, timings, memory):
        timing = timings[row["provider"]]
        again = read_again if row["provider"] in suite.ours else None
        extra = (ratio, round(read / timing.us / 1e3, 1), speedup, timing.captured, again)
        rows.append(row | dict(zip(FILTER_KEYS, extra, strict=True)))
    return rows


def make_rows(cell: Cell, timings: dict[str, Timing], memory: dict[str, int], ceilings: Ceilings) -> list[Row]:
    """The rows of one cell of this suite."""
    return filter_rows(SUITE, cell, timings, memory, share_read_again(cell.make) if set(FILTER_OURS) & set(timings) else None)


SUITE = Suite("filters", FILTER_PROVIDERS, FILTER_OURS, FLOOR, cells, SetGate, make_rows)
