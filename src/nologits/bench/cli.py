"""The command line of the benchmark: tables on the terminal, JSON, CSV and plots in files, JSON on the last line of stdout."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..cli.console import UserError, notes
from ..testing.families import FAMILIES
from . import e2e as e2e_suite
from . import filters as filter_suite
from . import head as head_suite
from . import qrita as qrita_suite
from . import tp as tp_suite
from . import vllm_suite
from .cases import ALIASES, ALL_BATCHES, CASES, DEFAULT_BATCHES, DEFAULT_CASES
from .decoder import SHAPES
from .filter_cases import ALL_FILTER_BATCHES, DEFAULT_FILTER_BATCHES
from .filter_providers import FILTER_PROVIDERS, FLOOR
from .modes import FILTER_MODES, MODES, SCREENED
from .peers import brief
from .providers import PROVIDERS
from .qrita import DEFAULT_QRITA_BATCHES, DEFAULT_QRITA_FAMILIES, QRITA_PROVIDERS, SHIPPED
from .report import load, tables, write_csv
from .suite import Plan, Record, Suite, run

_PIPED_COLUMNS = 120

bench = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


def _listed(about: str, default: Sequence[object]) -> Any:
    """The option of a list of names or numbers."""
    return typer.Option(help=f"{about}, or all. Default: {','.join(map(str, default))}.")


_EVERY = ("all",)
FilterModes = Annotated[list[str] | None, _listed(", ".join(FILTER_MODES), _EVERY)]
Repeats = Annotated[int, typer.Option("--repeats", help="Repetitions of each cell.", min=3)]
Output = Annotated[Path | None, typer.Option("--output", metavar="FILE", help="Where to write the JSON.")]
Csv = Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Where to write the rows as CSV.")]
Providers = Annotated[list[str] | None, typer.Option("--provider", help="Who is measured. Default: all.")]
Plots = Annotated[Path | None, typer.Option("--plots", metavar="FOLDER", help="Where to write PNG plots (needs matplotlib).")]


@bench.callback(invoke_without_command=True)
def measure(
    context: typer.Context,
    case: Annotated[list[str] | None, _listed("LM heads, by case or model", DEFAULT_CASES)] = None,
    batch: Annotated[list[str] | None, _listed("Batch sizes", DEFAULT_BATCHES)] = None,
    mode: Annotated[list[str] | None, _listed(", ".join(MODES), ("plain",))] = None,
    provider: Providers = None,
    tp: Annotated[
        int, typer.Option("--tp", metavar="N", help="Time a head in N shards, on N GPUs (on N processes without them).", min=1)
    ] = 1,
    repeats: Repeats = 40,
    output: Output = None,
    csv: Csv = None,
    plots: Plots = None,
) -> None:
    """Time the fused draw beside the LM-head matmul alone and other samplers (needs a CUDA GPU).

    Options that name several things take a list with commas, or are repeated.
    In a mode fallbackN, N percent of the rows are so flat that fused filters need more sweeps of the head.
    In mode screened our head keeps a copy in 8 bits, which is read in its place.
    With --tp N the head lies in N shards, on a GPU each, or on CPU processes where there are too few.
    """
    if context.invoked_subcommand is not None:
        return
    sharded = tp > 1
    known = tuple(tp_suite.PROVIDERS if sharded else PROVIDERS)
    plan = Plan(
        _chosen("case", case, DEFAULT_CASES, [c.name for c in CASES], ALIASES),
        _batches(batch, ALL_BATCHES, tp_suite.TP_BATCHES if sharded else DEFAULT_BATCHES),
        _chosen(
            "mode", mode, tp_suite.TP_MODES if sharded else ("plain",), [m for m in MODES if not sharded or m not in SCREENED]
        ),
        _chosen("provider", provider, known, known),
        repeats,
    )
    if sharded:
        _measure(partial(tp_suite.run, plan, tp), plan, output, csv, plots)
    else:
        _measure_suite(head_suite.SUITE, plan, output, csv, plots)


@bench.command()
def filters(
    family: Annotated[list[str] | None, _listed("Families of logits, by name", _EVERY)] = None,
    batch: Annotated[list[str] | None, _listed("Batch sizes", DEFAULT_FILTER_BATCHES)] = None,
    mode: FilterModes = None,
    provider: Providers = None,
    repeats: Repeats = 40,
    output: Output = None,
    csv: Csv = None,
    plots: Plots = None,
) -> None:
    """Time top-k, top-p and min-p on logits that are there beside one read of them and other samplers (needs a CUDA GPU).

    Options that name several things take a list with commas, or are repeated.
    """
    providers = _chosen("provider", provider, _EVERY, tuple(FILTER_PROVIDERS))
    plan = _filter_plan(family, batch, mode, providers, repeats, _EVERY, DEFAULT_FILTER_BATCHES)
    _measure_suite(filter_suite.SUITE, plan, output, csv, plots)


@bench.command()
def qrita(
    family: Annotated[list[str] | None, _listed("Families of logits, by name", DEFAULT_QRITA_FAMILIES)] = None,
    batch: Annotated[list[str] | None, _listed("Batch sizes", DEFAULT_QRITA_BATCHES)] = None,
    mode: FilterModes = None,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Also with each part of Qrita switched; speed-ups are over the shipped kernel.")
    ] = False,
    repeats: Repeats = 40,
    output: Output = None,
    csv: Csv = None,
    plots: Plots = None,
) -> None:
    """Time our filter kernel beside one read of the logits, and with --ablate the parts of its search (needs a Hopper GPU).

    Options that name several things take a list with commas, or are repeated.
    """
    providers = list(QRITA_PROVIDERS) if ablate else [FLOOR, SHIPPED]
    plan = _filter_plan(family, batch, mode, providers, repeats, DEFAULT_QRITA_FAMILIES, DEFAULT_QRITA_BATCHES)
    _measure_suite(qrita_suite.SUITE, plan, output, csv, plots)


@bench.command()
def e2e(
    case: Annotated[list[str] | None, _listed("Models, by the case of their head or by name", _EVERY)] = None,
    batch: Annotated[list[str] | None, _listed("Batch sizes", e2e_suite.DEFAULT_E2E_BATCHES)] = None,
    mode: Annotated[list[str] | None, _listed(", ".join(e2e_suite.E2E_MODES), _EVERY)] = None,
    provider: Providers = None,
    repeats: Repeats = 40,
    output: Output = None,
    csv: Csv = None,
    plots: Plots = None,
) -> None:
    """Time a whole decode step at a real model's shape, with one sampler or another behind it (needs a CUDA GPU).

    Weights are random, which changes no time. Options that name several things take a list with commas, or are repeated.
    """
    plan = _decode_plan(case, batch, mode, _chosen("provider", provider, _EVERY, tuple(e2e_suite.SAMPLERS)), repeats)
    _measure_suite(e2e_suite.SUITE, plan, output, csv, plots)


@bench.command()
def vllm(
    case: Annotated[list[str] | None, _listed("Models, by the case of their head or by name", _EVERY)] = None,
    batch: Annotated[list[str] | None, _listed("Requests at a time", e2e_suite.DEFAULT_E2E_BATCHES)] = None,
    mode: Annotated[list[str] | None, _listed(", ".join(e2e_suite.E2E_MODES), _EVERY)] = None,
    provider: Providers = None,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="With torch.compile, as vLLM does; CUDA graphs are on either way.")
    ] = True,
    repeats: Annotated[int, typer.Option("--repeats", help="Generations of each cell.", min=3)] = 10,
    output: Output = None,
    csv: Csv = None,
    plots: Plots = None,
) -> None:
    """Time an output token in vLLM itself, with the plugin and without it, in one engine in turn (needs vLLM).

    Weights are random, with logits of a trained model's spread. Options that name several things take a list with commas, or
    are repeated.
    """
    if importlib.util.find_spec("vllm") is None:
        raise UserError("bench vllm must run in an environment with vLLM, got none")
    plan = _decode_plan(case, batch, mode, _chosen("provider", provider, _EVERY, vllm_suite.PROVIDERS), repeats)
    _measure(partial(vllm_suite.run, plan, compiled), plan, output, csv, plots)


@bench.command()
def plot(
    record: Annotated[Path, typer.Argument(metavar="RECORD", help="The JSON of an earlier run.")],
    plots: Plots = None,
    csv: Csv = None,
    read_gbps: Annotated[
        float | None, typer.Option(help="Memory ceiling of the roofline, GB/s. Default: the record's.", min=1)
    ] = None,
    matmul_tflops: Annotated[
        float | None, typer.Option(help="cuBLAS's best rate, TFLOP/s. Default: the record's.", min=1)
    ] = None,
) -> None:
    """Show an earlier run again, as tables and plots (no GPU needed)."""
    loaded = load(record)
    if plots is not None:
        _require_matplotlib()
    _wide(notes()).print(tables(loaded))
    if csv is not None:
        write_csv(loaded, csv)
    if plots is not None:
        for path in _plot(loaded, plots, read_gbps, matmul_tflops):
            typer.echo(path)


def _decode_plan(
    case: Sequence[str] | None,
    batch: Sequence[str] | None,
    mode: Sequence[str] | None,
    providers: Sequence[str],
    repeats: int,
) -> Plan:
    """The plan of a suite of decode steps."""
    names = [shape.name for shape in SHAPES]
    aliases = {name: case for name, case in ALIASES.items() if case in names}
    return Plan(
        _chosen("case", case, _EVERY, names, aliases),
        _batches(batch, e2e_suite.DEFAULT_E2E_BATCHES, e2e_suite.DEFAULT_E2E_BATCHES),
        _chosen("mode", mode, _EVERY, tuple(e2e_suite.E2E_MODES)),
        providers,
        repeats,
    )


def _filter_plan(
    family: Sequence[str] | None,
    batch: Sequence[str] | None,
    mode: Sequence[str] | None,
    providers: Sequence[str],
    repeats: int,
    families: Sequence[str],
    batches: Sequence[int],
) -> Plan:
    """The plan of a suite of filters; the last two are its defaults."""
    return Plan(
        _chosen("family", family, families, tuple(FAMILIES)),
        _batches(batch, ALL_FILTER_BATCHES, batches),
        _chosen("mode", mode, _EVERY, tuple(FILTER_MODES)),
        providers,
        repeats,
    )


Runner = Callable[[Record, Callable[[str], None], Callable[[str], None]], None]
"""Fills a record; gets a line for everything skipped or noted, and is told of each cell before it is measured."""


def _measure_suite(suite: Suite, plan: Plan, output: Path | None, csv: Path | None, plots: Path | None) -> None:
    if not torch.cuda.is_available():
        raise UserError("bench must run on a machine with a CUDA GPU, got none")
    _measure(partial(run, suite, plan), plan, output, csv, plots)


def _measure(runner: Runner, plan: Plan, output: Path | None, csv: Path | None, plots: Path | None) -> None:
    """Measures and writes what was measured, all of it or what there was when it failed."""
    if plots is not None:
        _require_matplotlib()
    console = _wide(notes())
    record: Record = {}
    try:
        _run(runner, plan, record, console)
    except BaseException as error:  # an interrupt too: the rows have cost minutes of a GPU
        record["error"] = brief(error)
        raise
    finally:
        _write(record, console, output, csv, plots)


def _write(record: Record, console: Console, output: Path | None, csv: Path | None, plots: Path | None) -> None:
    has_rows = bool(record.get("rows"))
    if has_rows:
        console.print(tables(record))
    print(json.dumps(record), flush=True)  # first, so that a path that cannot be written loses no measurement
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(record, indent=1) + "\n")
    if csv is not None and has_rows:
        write_csv(record, csv)
    if plots is not None and has_rows:
        _plot(record, plots, None, None)


def _run(runner: Runner, plan: Plan, record: Record, console: Console) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("ceilings", total=plan.cells)
        started = 0

        def begin(cell: str) -> None:
            nonlocal started
            progress.update(task, description=cell, completed=started)
            started += 1
            if not console.is_terminal:  # the bar is drawn on terminals only
                console.print(cell)

        runner(record, lambda line: console.print(f"  {line}"), begin)


def _plot(record: dict[str, Any], folder: Path, read_gbps: float | None, matmul_tflops: float | None) -> list[Path]:
    from .plots import write_plots

    return write_plots(record, folder, read_gbps, matmul_tflops)


def _require_matplotlib() -> None:
    """Before anything is measured, so that no run is lost to a missing package."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plots needs matplotlib: pip install 'nologits[bench]'")


def _wide(console: Console) -> Console:
    """A console whose tables do not fold at 80 columns where nobody's terminal has 80."""
    if not console.is_terminal:
        console.width = _PIPED_COLUMNS
    return console


def _split(values: Sequence[str] | None) -> list[str]:
    return [word.strip() for value in values or () for word in value.split(",") if word.strip()]


def _chosen(
    name: str,
    values: Sequence[str] | None,
    default: Sequence[str],
    known: Sequence[str],
    aliases: Mapping[str, str] | None = None,
) -> list[str]:
    words = _split(values) or list(default)
    if "all" in words:
        return list(known)
    for word in words:
        if word not in known and word not in (aliases or {}):
            names = ", ".join([*known, *(aliases or {}), "all"])
            raise UserError(f"--{name} must be one of {names}, got {word!r}")
    return list(dict.fromkeys((aliases or {}).get(word, word) for word in words))


def _batches(values: Sequence[str] | None, every: Sequence[int], default: Sequence[int]) -> list[int]:
    words = _split(values)
    if "all" in words:
        return list(every)
    for word in words:
        if not word.isdecimal() or int(word) < 1:
            raise UserError(f"--batch must be an integer of at least 1, or all, got {word!r}")
    return sorted({int(word) for word in words}) or list(default)
