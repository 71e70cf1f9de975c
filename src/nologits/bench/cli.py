"""The command line of the benchmark: a table on the terminal, JSON in a file and on the last line of stdout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from ..cli.console import UserError, notes
from .cases import BATCHES, CASES, MODES
from .providers import PROVIDERS
from .suite import run


def bench(
    case: Annotated[list[str] | None, typer.Option(help="LM head to measure; repeat for several.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Batch size; repeat for several.")] = None,
    mode: Annotated[list[str] | None, typer.Option(help="plain, logprobs or greedy; repeat for several.")] = None,
    provider: Annotated[list[str] | None, typer.Option(help="Who is measured; repeat for several.")] = None,
    repeats: Annotated[int, typer.Option(help="Repetitions of each cell.", min=3)] = 40,
    output: Annotated[Path | None, typer.Option(help="Where to write the JSON.")] = None,
) -> None:
    """Time the fused draw beside the LM-head matmul alone and other samplers (needs a CUDA GPU)."""
    cases = _known("case", case or ["small", "large"], [c.name for c in CASES])
    modes = _known("mode", mode or ["plain"], MODES)
    providers = _known("provider", provider or list(PROVIDERS), list(PROVIDERS))
    batches = batch or list(BATCHES)
    if min(batches) < 1:
        raise typer.BadParameter(f"must be at least 1, got {min(batches)}", param_hint="--batch")
    if not torch.cuda.is_available():
        raise UserError("bench must run on a machine with a CUDA GPU, got none")
    console = notes()
    record = run(cases, batches, modes, providers, repeats, console.print)
    console.print(table(record))
    print(json.dumps(record))  # first, so that a path that cannot be written loses no measurement
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(record, indent=1) + "\n")


def _known(name: str, values: list[str], known: Sequence[str]) -> list[str]:
    for value in values:
        if value not in known:
            raise typer.BadParameter(f"must be one of {', '.join(known)}, got {value}", param_hint=f"--{name}")
    return values


def table(record: dict[str, Any]) -> Table:
    """The record as a table: time, spread, ratio to the matmul, extra memory."""
    title = f"{record['gpu']}, torch {record['torch']}, triton {record['triton']}, {record['commit']}"
    out = Table(title=title)
    for name in ("case", "B", "mode", "provider", "us", "p20-p80", "x matmul", "extra MB"):
        out.add_column(name, justify="left" if name in ("case", "mode", "provider") else "right")
    for row in record["rows"]:
        spread = f"{row['p20_us']:.0f}-{row['p80_us']:.0f}"
        cells = (row["case"], str(row["B"]), row["mode"], row["provider"], f"{row['us']:.1f}", spread)
        out.add_row(*cells, f"{row['ratio_to_matmul']:.3f}", f"{row['extra_bytes'] / 1e6:.2f}")
    return out
