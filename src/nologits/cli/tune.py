"""``nologits tune``: times launch configurations on this GPU and prints a table for ``kernels/config.py``.

Nothing tunes itself while serving: a configuration is a pure function of what is launched, and this is how its numbers are
found. A candidate is timed only after it has drawn the tokens of the configuration in force from operands whose products are
exact, so that no difference can be put down to rounding. In force stays what is in force, unless something is faster by more
than the noise of a measurement.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from ..bench.cases import make_inputs
from ..bench.peers import brief
from ..bench.timing import measure
from ..head import LMHead
from ..kernels import config as launches
from ..kernels.config import TILES, HopperConfig, TileConfig, architecture
from ..params import RowParams, SamplingParams, make_rows
from ..selection import MAX_VOCAB
from ..sources import HiddenSource
from .console import EXIT_FAILED, UserError, notes, output, resolve_impl

Config = TileConfig | HopperConfig
Call = Callable[[], object]
Timer = Callable[[dict[str, Call]], dict[str, float]]  # microseconds

BATCHES = (1, 16, 32, 64, 128, 256)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MARGIN = 1.01
"""In force stays what does not take more than this many times as long: less is taken for the noise of a measurement."""

MATMUL = "matmul"
_IMPLS = ("auto", "triton", "hopper")


class TuneOptions(NamedTuple):
    """The command's options, as given."""

    vocab: int
    depth: int
    batches: Sequence[str]
    dtype: str
    impl: str
    repeats: int
    show: bool
    arch: str | None


class Target(NamedTuple):
    """What is tuned, and what of the GPU configurations depend on. ``shared_bytes``: shared memory that a block may have."""

    impl: str
    arch: str
    dtype: torch.dtype
    vocab: int
    depth: int
    shared_bytes: int

    def in_force(self, batch: int) -> Config:
        """The configuration that a draw of ``batch`` rows uses today."""
        if self.impl == "hopper":
            return launches.hopper_config(batch)
        return launches.tile_config(self.arch, self.dtype, self.vocab, self.depth, batch)

    def candidates(self, batch: int) -> list[Config]:
        """What is tried for ``batch`` rows, the configuration in force first."""
        tried = hopper_candidates(batch) if self.impl == "hopper" else tile_candidates(batch, self.dtype, self.shared_bytes)
        return list(dict.fromkeys([self.in_force(batch), *tried]))


class Workload(NamedTuple):
    """What is run at one batch size: tokens of exact operands to compare, a draw and the matmul alone to time."""

    tokens: Callable[[Config], Tensor]
    draw: Callable[[Config], object]
    matmul: Call


class Trial(NamedTuple):
    """A candidate's time, or in one line why it has none; ``wrong``: it drew other tokens."""

    config: Config
    us: float | None
    problem: str = ""
    wrong: bool = False


class Result(NamedTuple):
    """One batch size: every trial, the configuration in force first, and which to use from now on."""

    batch: int
    trials: list[Trial]
    matmul_us: float
    best: Config

    @property
    def in_force(self) -> Trial:
        return self.trials[0]

    @property
    def ok(self) -> bool:
        """Something ran, and nothing drew other tokens."""
        return any(trial.us is not None for trial in self.trials) and not any(trial.wrong for trial in self.trials)


def run_tune(options: TuneOptions) -> int:
    """Measures and prints; returns the exit code, 1 if a candidate drew other tokens or none ran."""
    batches = parse_batches(options.batches)
    _check(options)
    if options.show:
        output().print("\n".join(table_in_force(options, batches)), markup=False, soft_wrap=True)
        return 0
    if options.arch is not None:
        raise UserError(f"--arch must come with --show, because what is measured is this GPU, got {options.arch!r}")
    if not torch.cuda.is_available():
        raise UserError("tune must run on a machine with a CUDA GPU, got none (tune --show needs none)")
    device = torch.device("cuda", torch.cuda.current_device())
    target = make_target(options, device)

    def time(calls: dict[str, Call]) -> dict[str, float]:
        return {name: timing.us for name, timing in measure(calls, options.repeats).items()}

    try:
        operands = make_operands(target, device)
        results = measured(target, batches, lambda batch: make_workload(target, operands, batch), time, notes())
    except torch.OutOfMemoryError:
        got = f"{target.vocab}, {target.depth} and {batches[-1]}"
        raise UserError(f"--vocab, --depth and --batch must fit the GPU's memory, got {got}") from None
    heading = f"{torch.cuda.get_device_name(device)}, V = {target.vocab}, D = {target.depth}, {options.dtype}"
    output().print("\n".join([f"# {heading}", *proposal(target, results)]), markup=False, soft_wrap=True)
    return 0 if all(result.ok for result in results) else EXIT_FAILED


def parse_batches(words: Sequence[str]) -> list[int]:
    """Batch sizes, ascending; each word may hold several with commas between them.

    Raises:
        UserError: a word that is no batch size.
    """
    parts = [part.strip() for word in words for part in word.split(",") if part.strip()]
    for part in parts:
        if not part.isdecimal() or int(part) < 1:
            raise UserError(f"--batch must be an integer of at least 1, got {part!r}")
    return sorted({int(part) for part in parts}) or list(BATCHES)


def hopper_takes(dtype: torch.dtype, depth: int) -> str:
    """Why the Hopper kernels do not take such a head; empty if they do."""
    if dtype == torch.float32:
        return "--dtype must be bfloat16 or float16 with --impl hopper, got 'float32'"
    return f"--depth must be a multiple of 8 with --impl hopper, got {depth}" if depth % 8 else ""


def tile_candidates(batch: int, dtype: torch.dtype, shared_bytes: int) -> list[TileConfig]:
    """The portable kernels' grid of tiles for ``batch`` rows, as far as their pipelines fit the shared memory.

    A tile as wide as the batch reads the weights once. Beyond 64 rows two narrower ones may share them through the L2.
    """
    size = dtype.itemsize
    # Bytes of a row and step: half of them where a wide step would leave no room for a pipeline (GPUs with 99 KB).
    widest = 256 if shared_bytes >= 1 << 17 else 128
    depths = (widest // 2 // size, widest // size)
    widths = (64, 128) if batch > 64 else (next(width for width in (16, 32, 64) if batch <= width),)
    grid = itertools.product((128, 256), widths, depths, (4, 8), (3, 4, 5))
    tiles = [TileConfig(*shape) for shape in grid]
    return [t for t in tiles if (t.BLOCK_V + t.BLOCK_B) * t.BLOCK_D * size * t.num_stages <= shared_bytes]


def hopper_candidates(batch: int) -> list[HopperConfig]:
    """The Hopper kernel's configurations that can run ``batch`` rows: a cluster of two needs its blocks of rows in pairs."""
    return [config for config in launches.HOPPER_CONFIGS if config.fits(batch)]


def measured(
    target: Target, batches: Sequence[int], workload: Callable[[int], Workload], time: Timer, console: Console
) -> list[Result]:
    """Tunes every batch size and shows each one's table as soon as it is there."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    results = []
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("tune", total=sum(len(target.candidates(batch)) + 1 for batch in batches))

        def begin(step: str) -> None:
            progress.update(task, description=step, advance=1)

        for batch in batches:
            result = tune_batch(batch, target.candidates(batch), workload(batch), time, begin)
            show(result, console)
            results.append(result)
    return results


def tune_batch(
    batch: int, candidates: Sequence[Config], workload: Workload, time: Timer, begin: Callable[[str], None]
) -> Result:
    """Checks every candidate's tokens, times those that are right, and chooses.

    Args:
        batch: rows.
        candidates: the configuration in force first.
        workload: what to run.
        time: times the draws and the matmul beside one another.
        begin: told of every step.

    Raises:
        UserError: a candidate has left the GPU unable to run anything.
    """
    expected: Tensor | None = None
    trials: dict[Config, Trial] = {}
    for config in candidates:
        begin(f"B = {batch}: {short(config)}")
        try:
            tokens = workload.tokens(config).cpu()
        except Exception as error:  # whatever a compiler or a driver raises: the others may run
            trials[config] = Trial(config, None, f"does not run: {brief(error)}")
            continue
        # Where the configuration in force does not run, on a GPU that nobody has seen, the first that does is compared with.
        expected = tokens if expected is None else expected
        different = int((tokens != expected).sum())
        problem = f"draws other tokens in {different} of {len(tokens)} rows" if different else ""
        trials[config] = Trial(config, None, problem, wrong=different > 0)
    begin(f"B = {batch}: timing")
    calls = {short(config): partial(workload.draw, config) for config, trial in trials.items() if not trial.problem}
    try:
        times = time({MATMUL: workload.matmul, **calls})
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise UserError(f"every candidate must leave the GPU working, got {brief(error)} at B = {batch}") from None
    done = [trial._replace(us=times.get(short(config))) for config, trial in trials.items()]
    return Result(batch, done, times[MATMUL], winner(done))


def winner(trials: Sequence[Trial]) -> Config:
    """The fastest candidate, or the first, which is in force, unless that takes more than :data:`MARGIN` times as long."""
    in_force = trials[0]
    timed = [(trial.us, trial.config) for trial in trials if trial.us is not None]
    if not timed:
        return in_force.config
    us, config = min(timed, key=lambda pair: pair[0])
    return config if in_force.us is None or in_force.us > MARGIN * us else in_force.config


def short(config: Config) -> str:
    """A configuration in a few words."""
    if isinstance(config, TileConfig):
        tile = f"{config.BLOCK_V}x{config.BLOCK_B}x{config.BLOCK_D}"
        return f"{tile}, {config.num_warps} warps, {config.num_stages} stages"
    name = "turns" if config.turns else "shared"
    return f"{name} {config.rows}, {config.stages} stages by {config.pair}, cluster {config.cluster}"


def code(config: Config) -> str:
    """A configuration as ``kernels/config.py`` writes it."""
    if isinstance(config, TileConfig):
        return f"TileConfig({config.BLOCK_V}, {config.BLOCK_B}, {config.BLOCK_D}, {config.num_warps}, {config.num_stages})"
    fields = ("turns", "rows", "stages", "pair", "cluster")
    return f"HopperConfig({', '.join(f'{name}={getattr(config, name)}' for name in fields)})"


def proposal(target: Target, results: Sequence[Result]) -> list[str]:
    """The lines to put into ``kernels/config.py``: a table of tiles, or for Hopper a line for each batch size."""
    if target.impl == "hopper":
        return [hopper_line(result) for result in results]
    kind = dtype_kind(target.dtype)
    best = {result.batch: result.best for result in results if isinstance(result.best, TileConfig)}
    return fragment(target.arch, kind, new_table(_tiles(target.arch, kind), best))


def new_table(in_force: dict[int, TileConfig], best: dict[int, TileConfig]) -> dict[int, TileConfig]:
    """The table with what was found: a batch size stands for all from the next smaller bound on.

    Bounds that were not measured keep their tiles. The largest batch size stands for all larger ones if it is beyond every
    bound. Neighbours with one tile become one bin.
    """
    bounds = {bound: tile for bound, tile in in_force.items() if bound > 0} | best
    last = bounds.pop(max(best)) if best and max(best) > max(in_force) else in_force[-1]
    rows = [*sorted(bounds.items()), (-1, last)]
    return {bound: tile for (bound, tile), after in itertools.zip_longest(rows, rows[1:]) if after is None or tile != after[1]}


def fragment(arch: str, kind: str, table: dict[int, TileConfig]) -> list[str]:
    """An entry of ``TILES``, as source."""
    return [f'("{arch}", "{kind}"): {{', *(f"    {bound}: {code(tile)}," for bound, tile in table.items()), "},"]


def hopper_line(result: Result) -> str:
    """The best configuration of a batch size, and whether it is the one in force."""
    us = {trial.config: trial.us for trial in result.trials}
    before, after = us[result.in_force.config], us[result.best]
    if result.best == result.in_force.config:
        verdict = "in force" if before else "in force, but it does not run"
    else:
        gain = f"{before / after - 1:.1%} faster" if before and after else "which does not run"
        verdict = f"instead of {constant(result.in_force.config)}, {gain}"
    return f"{result.batch}: {code(result.best)},  # {constant(result.best)}, {verdict}"


def dtype_kind(dtype: torch.dtype) -> str:
    """How tables are keyed: ``"half"`` or ``"float32"``."""
    return "float32" if dtype == torch.float32 else "half"


def table_in_force(options: TuneOptions, batches: Sequence[int]) -> list[str]:
    """The tables that draws use today, as source; without a GPU and ``--arch`` those of every architecture."""
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    dtype = DTYPES[options.dtype]
    kind = dtype_kind(dtype)
    arch = options.arch or (architecture(device) if has_gpu else None)
    lines: list[str] = []
    if options.impl != "hopper":
        for name in [arch] if arch else [name for name, of in TILES if of == kind and name != "interpreter"]:
            lines += [] if (name, kind) in TILES else [f'# as ("any", "{kind}"):']
            lines += fragment(name, kind, _tiles(name, kind))
    reason = hopper_takes(dtype, options.depth)
    if arch not in (None, "sm90"):
        reason = f"--arch must be sm90 with --impl hopper, got {arch!r}"
    if reason and options.impl == "hopper":
        raise UserError(reason)
    if reason or options.impl == "triton":
        return lines
    configs = [(batch, launches.hopper_config(batch)) for batch in batches]
    return [*lines, "# hopper:", *(f"{batch}: {code(config)},  # {constant(config)}" for batch, config in configs)]


def make_target(options: TuneOptions, device: torch.device) -> Target:
    """What to tune on ``device``; ``auto`` is what a draw from such a head would run on.

    Raises:
        UserError: the implementation cannot run there.
    """
    choice = resolve_impl(options.impl, device)
    dtype = DTYPES[options.dtype]
    impl, reason = choice.impl, hopper_takes(dtype, options.depth)
    if impl == "hopper" and reason:
        if options.impl == "hopper":
            raise UserError(reason)
        impl = "triton"
    if impl not in _IMPLS:
        raise UserError(f"--impl must be able to run on {device}, got {options.impl!r} ({choice.reason})")
    # Builds of torch that do not tell leave it to the launch: a tile that does not fit fails there, in a line.
    shared = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", sys.maxsize)
    return Target(impl, architecture(device), dtype, options.vocab, options.depth, shared)


def make_operands(target: Target, device: torch.device) -> tuple[Tensor, Tensor]:
    """Weights ``[V, D]`` twice: small integers, whose products are exact in any order, and normal numbers to be timed.

    Zeros or integers would draw less power than a model's weights and let the clock rise.
    """
    shape, generator = (target.vocab, target.depth), torch.Generator(device).manual_seed(0)
    exact = torch.randint(-3, 4, shape, generator=generator, device=device, dtype=torch.int8).to(target.dtype)
    weight = torch.empty(shape, dtype=target.dtype, device=device)
    return exact, weight.normal_(0, 5 / target.depth**0.5, generator=generator)


def make_workload(target: Target, operands: tuple[Tensor, Tensor], batch: int) -> Workload:
    """Inputs of ``batch`` rows, each seeded, and the calls that an implementation makes on them."""
    exact, weight = operands
    device, index = weight.device, torch.arange(batch, device=weight.device)
    generator = torch.Generator(device).manual_seed(batch)
    integers = torch.randint(-1, 2, (batch, target.depth), generator=generator, device=device).to(target.dtype)
    # The logits' deviation is sqrt(D * 4 * 2 / 3): at this temperature it is 5, and nothing wins every draw.
    temperature = torch.full((batch,), (target.depth * 8 / 3) ** 0.5 / 5, device=device)
    checked = HiddenSource(integers, LMHead(exact).spec)
    checked_rows = make_rows(SamplingParams(temperature, seed=index, position=index), batch, target.vocab, device)
    inputs = make_inputs(weight, batch, "plain")
    timed, timed_rows = HiddenSource(inputs.hidden, inputs.head.spec), make_rows(inputs.params, batch, target.vocab, device)

    return Workload(
        partial(_draw, checked, checked_rows), partial(_draw, timed, timed_rows), lambda: inputs.hidden @ inputs.weight.T
    )


def _draw(source: HiddenSource, rows: RowParams, config: Config) -> Tensor:
    """What the implementations call, imported here: each needs packages that the other does not."""
    if isinstance(config, HopperConfig):
        from ..kernels.categorical_sm90 import launch_draw

        return launch_draw(source, rows, False, False, config).tokens
    from ..kernels.categorical import launch_tiles
    from ..kernels.merge import launch_merge

    return launch_merge(launch_tiles(source, rows, 1, False, False, config), rows).tokens


def show(result: Result, console: Console) -> None:
    """A batch size's table, fastest first, and a line for each candidate without a time."""
    table = Table(title=f"B = {result.batch}", title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("candidate", header_style="dim", no_wrap=True)
    for heading in ("us", "/ in force", "/ matmul"):
        table.add_column(heading, header_style="dim", justify="right", no_wrap=True)
    table.add_column("")
    base = result.in_force.us
    timed = [(trial.us, trial.config) for trial in result.trials if trial.us is not None]
    for us, config in sorted(timed, key=lambda pair: pair[0]):
        marks = [w for w, holds in (("in force", config == result.in_force.config), ("best", config == result.best)) if holds]
        ratio = f"{us / base:.3f}" if base else "-"
        table.add_row(short(config), f"{us:.1f}", ratio, f"{us / result.matmul_us:.3f}", ", ".join(marks))
    table.add_row("matmul alone", f"{result.matmul_us:.1f}", f"{result.matmul_us / base:.3f}" if base else "-", "1.000", "")
    console.print(table)
    for trial in result.trials:
        if trial.problem:
            word = "error" if trial.wrong else "left out"
            console.print(f"{word}: {short(trial.config)} {trial.problem}", markup=False, soft_wrap=True)


def _check(options: TuneOptions) -> None:
    arch = options.arch or "any"
    for name, holds, must in (
        ("vocab", 1 <= options.vocab <= MAX_VOCAB, f"in [1, {MAX_VOCAB}]"),
        ("depth", options.depth >= 1, "at least 1"),
        ("repeats", options.repeats >= 3, "at least 3"),
        ("dtype", options.dtype in DTYPES, f"one of {', '.join(DTYPES)}"),
        ("impl", options.impl in _IMPLS, f"one of {', '.join(_IMPLS)}"),
        ("arch", re.fullmatch(r"sm\d{2,3}|hip|any", arch), "any, hip or a compute capability like sm90"),
    ):
        if not holds:
            raise UserError(f"--{name} must be {must}, got {getattr(options, name)!r}")


def _tiles(arch: str, kind: str) -> dict[int, TileConfig]:
    return TILES[arch, kind] if (arch, kind) in TILES else TILES["any", kind]


def constant(config: Config) -> str:
    """What ``kernels/config.py`` calls a Hopper configuration."""
    return next((name for name, value in vars(launches).items() if value == config), "no constant")
