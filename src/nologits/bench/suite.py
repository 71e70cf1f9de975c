"""Runs the head suite: correctness gate, then every cell with its providers interleaved."""

from __future__ import annotations

import datetime
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from .cases import CASES, Inputs, make_inputs, make_weight
from .providers import PROVIDERS, SkipError
from .timing import extra_bytes, measure

Row = dict[str, Any]


def run(
    cases: Sequence[str],
    batches: Sequence[int],
    modes: Sequence[str],
    providers: Sequence[str],
    repeats: int,
    note: Callable[[str], None],
) -> dict[str, Any]:
    """Measures and returns the suite's record (schema 1); ``note`` receives a line for everything skipped."""
    rows: list[Row] = []
    for case in (c for c in CASES if c.name in cases):
        weight = make_weight(case)
        for batch in batches:
            for mode in modes:
                inputs = make_inputs(weight, batch, mode)
                note(f"{case.name}  B={batch}  {mode}")
                check(inputs, mode)
                for cell in _cell(inputs, mode, providers, repeats, note):
                    rows.append({"case": case.name, "V": case.vocab, "D": case.depth, "B": batch} | cell)
        del weight, inputs
        torch.cuda.empty_cache()
    return {"schema": 1, "suite": "head"} | environment() | {"rows": rows}


def check(inputs: Inputs, mode: str) -> None:
    """The correctness gate: tokens equal to the reference's, but for scores within rounding of each other.

    Raises:
        RuntimeError: the numbers would be those of a wrong sampler.
    """
    fast = inputs.head.sample(inputs.hidden, inputs.params, impl="triton").tokens
    exact = inputs.head.sample(inputs.hidden, inputs.params, impl="reference").tokens
    wrong = int((fast != exact).sum())
    # Two scores closer than the rounding of a bf16 product: about one draw in ten thousand.
    if wrong > 1 + len(fast) // 100:
        raise RuntimeError(f"{wrong} of {len(fast)} tokens differ from the reference ({mode}): nothing is measured")


def environment() -> dict[str, str]:
    """GPU, versions, commit and date of a run."""
    import triton

    here = Path(__file__).parent
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit.stdout.strip() or "unknown",
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }


def _cell(inputs: Inputs, mode: str, names: Sequence[str], repeats: int, note: Callable[[str], None]) -> Iterator[Row]:
    calls = {}
    for name in names:
        try:
            calls[name] = PROVIDERS[name](inputs, mode)
        except SkipError as reason:
            note(f"  {name} skipped: {reason}")
    timings = measure(calls, repeats)
    base = timings["matmul"].us if "matmul" in timings else float("nan")
    for name, timing in timings.items():
        yield {
            "provider": name,
            "mode": mode,
            "us": round(timing.us, 1),
            "p20_us": round(timing.p20_us, 1),
            "p80_us": round(timing.p80_us, 1),
            "ratio_to_matmul": round(timing.us / base, 3),
            "extra_bytes": extra_bytes(calls[name]),
        }
