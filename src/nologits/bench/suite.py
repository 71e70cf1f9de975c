"""Runs the head suite: correctness gate, then every cell with its providers interleaved.

The record is one JSON object, schema 1: ``suite``, what ran where (:func:`environment`), the ceilings of this GPU, and one row
for each measurement, whose keys begin with :data:`ROW_KEYS`. Other suites keep to it.
"""

from __future__ import annotations

import datetime
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .cases import CASES, Case, Inputs, make_inputs, make_weight, operations, traffic_bytes
from .gate import Gate
from .peers import SkipError, brief
from .providers import MATMUL, OURS, PROVIDERS, Call
from .timing import Ceilings, Timing, extra_bytes, measure, measure_ceilings

Row = dict[str, Any]

SCHEMA = 1
ROW_KEYS = ("case", "V", "D", "B", "provider", "mode", "us", "p20_us", "p80_us", "ratio_to_matmul", "extra_bytes")
"""Every row of every suite begins with these keys, in this order."""

EXTRA_KEYS = ("gbps", "tflops", "bandwidth_share", "speedup", "captured")
"""Of the head suite: the bytes that any sampler must read over the time; the matmul's operations over the time; the former as a
share of the measured read bandwidth; for our rows, the time of the fastest other sampler over ours; timed as a CUDA graph."""


class Plan(NamedTuple):
    """What to measure, by name."""

    cases: Sequence[str]
    batches: Sequence[int]
    modes: Sequence[str]
    providers: Sequence[str]
    repeats: int = 40

    @property
    def cells(self) -> int:
        """How many cells there are."""
        return len(self.cases) * len(self.batches) * len(self.modes)


def run(plan: Plan, note: Callable[[str], None], begin: Callable[[str], None]) -> dict[str, Any]:
    """Measures and returns the suite's record.

    Args:
        plan: what to measure.
        note: receives a line for everything skipped, once each, and for tokens that differ within rounding.
        begin: told of each cell before it is measured.

    Raises:
        RuntimeError: an implementation fails the correctness gate.
    """
    header = environment()
    ceilings = measure_ceilings()
    skipped: list[Row] = []
    rows: list[Row] = []
    for case in (c for c in CASES if c.name in plan.cases):
        weight = make_weight(case)
        for batch in plan.batches:
            for mode in plan.modes:
                begin(f"{case.name}, B = {batch}, {mode}")
                inputs = make_inputs(weight, batch, mode)
                calls, reasons = prepare(inputs, mode, plan.providers, note)
                for name, reason in reasons.items():
                    entry = {"provider": name, "mode": mode, "reason": reason}
                    if entry not in skipped:
                        skipped.append(entry)
                        note(f"{name} ({mode}) skipped: {reason}")
                timings = measure(calls, plan.repeats)
                memory = {name: extra_bytes(call) for name, call in calls.items()}
                rows += make_rows(case, batch, mode, timings, memory, ceilings)
                del inputs, calls
        del weight
        torch.cuda.empty_cache()
    return {"schema": SCHEMA, "suite": "head"} | header | ceilings._asdict() | {"skipped": skipped, "rows": rows}


def prepare(
    inputs: Inputs, mode: str, names: Sequence[str], note: Callable[[str], None]
) -> tuple[dict[str, Call], dict[str, str]]:
    """The calls of a cell that run here, each called once and ours past the gate, and why the others do not.

    Raises:
        RuntimeError: an implementation fails the correctness gate.
    """
    calls: dict[str, Call] = {}
    reasons: dict[str, str] = {}
    gate: Gate | None = None
    for name in names:
        try:
            call = PROVIDERS[name](inputs, mode)
        except SkipError as reason:
            reasons[name] = str(reason)
            continue
        if name in OURS:
            gate = gate or Gate(inputs, mode)
            differ = gate.check(name, call())
            if differ:
                note(f"{name}: {differ} of {len(inputs.hidden)} tokens differ from the reference's, within rounding")
        elif name != MATMUL:
            try:
                call()
            except Exception as error:  # a peer that cannot be compiled or run here is not our failure
                reasons[name] = brief(error)
                continue
        calls[name] = call
    return calls, reasons


def make_rows(
    case: Case, batch: int, mode: str, timings: dict[str, Timing], memory: dict[str, int], ceilings: Ceilings
) -> list[Row]:
    """The rows of one cell. A ratio whose other side was not measured is null."""
    base = timings[MATMUL].us if MATMUL in timings else None
    others = [timing.us for name, timing in timings.items() if name not in OURS and name != MATMUL]
    read, work = traffic_bytes(case.vocab, case.depth, batch), operations(case.vocab, case.depth, batch)
    rows = []
    for name, timing in timings.items():
        speedup = min(others) / timing.us if name in OURS and others else None
        values = (
            *(case.name, case.vocab, case.depth, batch, name, mode),
            *(round(timing.us, 1), round(timing.p20_us, 1), round(timing.p80_us, 1)),
            None if base is None else round(timing.us / base, 3),
            memory[name],
            *(round(read / timing.us / 1e3, 1), round(work / timing.us / 1e6, 1)),
            round(read / timing.us / 1e3 / ceilings.read_gbps, 3),
            None if speedup is None else round(speedup, 3),
            timing.captured,
        )
        rows.append(dict(zip((*ROW_KEYS, *EXTRA_KEYS), values, strict=True)))
    return rows


def environment() -> dict[str, str]:
    """GPU, versions, commit and date of a run."""
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }


def commit() -> str:
    """The commit that this code is at, ``-dirty`` with changes; NOLOGITS_COMMIT says it for a tree without its history."""
    named = os.environ.get("NOLOGITS_COMMIT")
    if named:
        return named
    # Installed below somebody's repository, this file would not be one of its files.
    if _output("git", "ls-files", Path(__file__).name) == "unknown":
        return "unknown"
    return _output("git", "describe", "--always", "--dirty", "--exclude=*")


def _output(*command: str) -> str:
    """The first line that a program prints, run where this file is; ``unknown`` if it does not."""
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return lines[0].strip() if lines else "unknown"
