"""The head suite: from hidden states to a token, beside the LM head's matmul alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from ..testing import UnavailableError
from .cases import CASES, make_inputs, make_weight, operations, traffic_bytes
from .gate import HeadGate
from .modes import MODES
from .providers import HOPPER, MATMUL, OURS, PROVIDERS, count_candidates, count_left_rows, count_open_rows
from .suite import Cell, Plan, Row, Suite, place_rows
from .timing import Ceilings, Timing

CANDIDATES = ("candidates_median", "candidates_p99", "candidates_max")
EXTRA_KEYS = ("gbps", "tflops", "bandwidth_share", "speedup", "captured", "fallback_rows", *CANDIDATES)
"""The bytes that any sampler must read over the time; the matmul's operations over the time; the former as a share of the
measured read bandwidth; for our rows, the time of the fastest other sampler over ours; timed as a CUDA graph; for the Hopper
kernels in modes with filters, the rows of a draw that took further sweeps over the head, and with a screen those that took the
full path, and how many tokens a row's bounds leave (:func:`nologits.testing.screened_draw`)."""


def cells(plan: Plan, skip: Callable[[Row], None]) -> Iterator[Cell]:
    """The cells of a plan; a case's weights are made once."""
    for case in (c for c in CASES if c.name in plan.cases):
        try:
            weight = make_weight(case)
        except UnavailableError as reason:
            skip({"case": case.name, "reason": str(reason)})
            continue
        for batch in plan.batches:
            for mode in plan.modes:
                yield Cell(case.name, case.vocab, case.depth, batch, mode, partial(make_inputs, weight, batch, mode, case.real))
        del weight
        torch.cuda.empty_cache()


def make_rows(cell: Cell, timings: dict[str, Timing], memory: dict[str, int], ceilings: Ceilings) -> list[Row]:
    """The rows of one cell. A ratio whose other side was not measured is null."""
    read, work = (count(cell.vocab, cell.depth, cell.batch) for count in (traffic_bytes, operations))
    mode, fallback_rows = MODES[cell.mode], None
    candidates: tuple[int | None, ...] = (None,) * len(CANDIDATES)
    if HOPPER in timings and mode.filtered:
        fallback_rows = count_open_rows(cell.make)
    elif HOPPER in timings and mode.screen is not None:
        fallback_rows, candidates = count_left_rows(cell.make), count_candidates(cell.make)
    rows = []
    for row, ratio, speedup in place_rows(SUITE, cell, timings, memory):
        timing = timings[row["provider"]]
        rates = (read / timing.us / 1e3, work / timing.us / 1e6)
        share = round(rates[0] / ceilings.read_gbps, 3)
        counts = (fallback_rows, *candidates) if row["provider"] == HOPPER else (None,) * (1 + len(CANDIDATES))
        extra = (round(rates[0], 1), round(rates[1], 1), share, speedup, timing.captured, *counts)
        rows.append(row | {"ratio_to_matmul": ratio} | dict(zip(EXTRA_KEYS, extra, strict=True)))
    return rows


SUITE = Suite("head", PROVIDERS, tuple(OURS), MATMUL, cells, HeadGate, make_rows)
