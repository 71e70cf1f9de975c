"""What every suite shares: the plan, the loop over cells with its gate and its clock, and the record.

The record is one JSON object, schema 1: ``suite``, what ran where (:func:`environment`), the ceilings of this GPU, what was
skipped and noted, and one row for each measurement, whose keys begin with :data:`ROW_KEYS`. A run that fails says so under
``error``, beside the rows that it had measured.
"""

from __future__ import annotations

import datetime
import os
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from .peers import SkipError, brief
from .timing import Ceilings, Timing, extra_bytes, measure, measure_ceilings

Row = dict[str, Any]
Record = dict[str, Any]
Call = Callable[[], object]

SCHEMA = 1
ROW_KEYS = ("case", "V", "D", "B", "provider", "mode", "us", "p20_us", "p80_us", "ratio_to_matmul", "extra_bytes")
"""Every row of every suite begins with these keys, in this order."""


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


class Cell(NamedTuple):
    """A row's place, D = 0 where there is no head, and what makes its inputs."""

    case: str
    vocab: int
    depth: int
    batch: int
    mode: str
    make: Callable[[], Any]

    def __str__(self) -> str:
        return f"{self.case}, B = {self.batch}, {self.mode}"


class Gate(Protocol):
    """The correctness of one cell's results."""

    def check(self, name: str, result: Any) -> str | None:
        """What is to be noted about one of ours. Raises RuntimeError if it is wrong."""

    def observe(self, name: str, result: Any) -> str | None:
        """What is to be noted about a peer's, which may be wrong."""


@dataclass(frozen=True)
class Variant:
    """A call chosen among several that do the same, and its name, which the record notes."""

    name: str
    call: Call

    def __call__(self) -> object:
        return self.call()


@dataclass(frozen=True)
class Suite:
    """What a suite adds to the loop.

    Attributes:
        name: of the suite.
        providers: who is measured: ``(inputs, mode) -> call``, which may raise :class:`SkipError`.
        ours: those that must pass the gate before anything of their cell is timed.
        floor: the provider whose time is the unit of the ratio; it is not a sampler.
        cells: the cells of a plan, in order. What it skips it hands over, as an entry of the record.
        gate: ``(inputs, mode) -> Gate``.
        make_rows: ``(cell, timings, extra bytes, ceilings) -> rows``.
    """

    name: str
    providers: Mapping[str, Callable[[Any, str], Call]]
    ours: Collection[str]
    floor: str
    cells: Callable[[Plan, Callable[[Row], None]], Iterator[Cell]]
    gate: Callable[[Any, str], Gate]
    make_rows: Callable[[Cell, dict[str, Timing], dict[str, int], Ceilings], list[Row]]


def run(suite: Suite, plan: Plan, record: Record, note: Callable[[str], None], begin: Callable[[str], None]) -> None:
    """Measures.

    Args:
        suite: which.
        plan: what to measure.
        record: filled as it is measured: whoever passes it has what there is when this raises.
        note: receives a line for everything skipped, once each, and for what a gate notes.
        begin: told of each cell before it is measured.

    Raises:
        RuntimeError: an implementation fails the correctness gate.
    """
    record |= {"schema": SCHEMA, "suite": suite.name} | environment()
    ceilings = measure_ceilings()
    record |= ceilings._asdict() | {"skipped": [], "notes": [], "rows": []}

    def skip(entry: Row) -> None:
        if entry not in record["skipped"]:
            record["skipped"].append(entry)
            what = f"{entry['provider']} ({entry['mode']})" if "provider" in entry else entry["case"]
            note(f"{what} skipped: {entry['reason']}")

    for cell in suite.cells(plan, skip):
        begin(str(cell))
        inputs = cell.make()
        calls, reasons, notes = prepare(suite, inputs, cell.mode, plan.providers)
        for name, reason in reasons.items():
            skip({"provider": name, "mode": cell.mode, "reason": reason})
        for text in notes:
            record["notes"].append({"case": cell.case, "B": cell.batch, "mode": cell.mode, "note": text})
            note(text)
        timings = measure(calls, plan.repeats)
        memory = {name: extra_bytes(call) for name, call in calls.items()}
        record["rows"] += suite.make_rows(cell, timings, memory, ceilings)
        del cell, inputs, calls  # the next case's are made before this loop would let go of them


def prepare(suite: Suite, inputs: Any, mode: str, names: Sequence[str]) -> tuple[dict[str, Call], dict[str, str], list[str]]:
    """The calls of a cell that run here, each called once and ours past the gate; why the others do not run; what to note.

    Raises:
        RuntimeError: an implementation fails the correctness gate.
    """
    calls: dict[str, Call] = {}
    reasons: dict[str, str] = {}
    notes: list[str] = []
    gate: Gate | None = None
    for name in names:
        try:
            call = suite.providers[name](inputs, mode)
        except SkipError as reason:
            reasons[name] = str(reason)
            continue
        if name != suite.floor:
            gate = gate or suite.gate(inputs, mode)
            if name in suite.ours:
                noted = gate.check(name, call())
            else:
                try:
                    noted = gate.observe(name, call())
                except Exception as error:  # a peer that cannot be compiled or run here is not our failure
                    reasons[name] = brief(error)
                    continue
            notes += [noted] if noted else []
            notes += [f"{name}: {call.name}"] if isinstance(call, Variant) else []
        calls[name] = call
    return calls, reasons, notes


def place_rows(
    suite: Suite, cell: Cell, timings: dict[str, Timing], memory: dict[str, int]
) -> Iterator[tuple[Row, float | None, float | None]]:
    """A row of each provider with :data:`ROW_KEYS`, its ratio to the floor and its speed-up.

    The ratio is null where the floor was not measured, the speed-up (of ours, against the fastest other provider) where there
    is no other. ``ratio_to_matmul`` is for the suite to fill.
    """
    base = timings[suite.floor].us if suite.floor in timings else None
    others = [timing.us for name, timing in timings.items() if name not in suite.ours and name != suite.floor]
    for name, timing in timings.items():
        times = (round(timing.us, 1), round(timing.p20_us, 1), round(timing.p80_us, 1))
        values = (*cell[:4], name, cell.mode, *times, None, memory[name])
        speedup = round(min(others) / timing.us, 3) if name in suite.ours and others else None
        yield (
            dict(zip(ROW_KEYS, values, strict=True)),
            None if base is None else round(timing.us / base, 3),
            speedup,
        )


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
