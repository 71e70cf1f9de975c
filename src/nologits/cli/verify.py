"""``nologits verify``: draws on this machine against the distributions they should have, and proof that errors would show.

Small vocabularies are tested by chi-squared. The tail test is for noise with too few bits: one logit of 0 and 129,279 of
-18 give the many a share of 0.0019650 together, of which a 24-bit uniform loses nine tenths, though no small-vocabulary
test can tell. The negative controls are wrong on purpose and must be rejected: a test that passes everything proves nothing.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from ..head import LMHead
from ..params import SamplingParams
from ..types import Impl
from .console import EXIT_FAILED, UserError, device_name, notes, output, resolve_device, resolve_impl

ALPHA = 1e-4
"""A check fails below this p-value. With six checks, right draws fail once in some 1,700 runs with new seeds."""

_VOCAB = 512
_DRAWS = 100_000
_TEMPERATURE = 1.3
_TOP_K, _TOP_P, _MIN_P = 40, 0.9, 0.02
_DROPPED_TILE = (128, 256)

_TAIL_VOCAB = 129_280
_TAIL_LOGIT = -18.0
_TAIL_SECONDS = 20.0
_TAIL_DRAWS = 1_000_000

_BATCH_ELEMENTS = 1 << 22


class Row(NamedTuple):
    """One line of the report, and what its plot shows."""

    name: str
    draws: int
    statistic: str
    p_value: float
    ok: bool
    control: bool
    observed: Tensor
    expected: Tensor


class Sampler(NamedTuple):
    """Draws from one-dimensional hidden states, whose head's weight column is the logits wanted."""

    impl: Impl
    device: torch.device
    seed: int

    def draw(self, logits: Tensor, first: int, draws: int, **parameters: Any) -> Iterator[Tensor]:
        """Tokens of the positions ``first .. first + draws - 1``, int64 on the CPU, a batch at a time."""
        head = LMHead(logits[:, None].to(self.device))
        step = max(1, _BATCH_ELEMENTS // len(logits))
        for start in range(first, first + draws, step):
            size = min(step, first + draws - start)
            position = torch.arange(start, start + size, device=self.device)
            params = SamplingParams(seed=self.seed, position=position, **parameters)
            hidden = torch.ones(size, 1, device=self.device)
            yield head.sample(hidden, params, impl=self.impl).tokens.cpu()


def run_verify(draws: int | None, impl: str, device: str, seed: int, plot: str | None) -> int:
    """Runs the checks and the negative controls and prints the table; returns the exit code, 1 if anything fails."""
    if draws is not None and draws < 1000:
        raise UserError(f"--draws must be at least 1000, got {draws}")
    where = resolve_device(device)
    choice = resolve_impl(impl, where)
    SamplingParams(seed=seed)
    if plot is not None:
        _check_plot(plot)
    try:
        import scipy  # noqa: F401
    except ImportError:
        raise UserError("the tests need scipy: pip install 'nologits[demo]'") from None

    sampler = Sampler(choice.impl, where, seed)  # type: ignore[arg-type]
    rows = []
    progress = notes()
    with progress.status("starting") as status:
        for name, check in _checks(sampler, draws):
            status.update(f"drawing: {name}")
            rows.append(check())
    _show(rows, sampler)
    if plot is not None:
        _save_plot(rows, plot)
        progress.print(f"wrote {plot}", soft_wrap=True, markup=False)
    return 0 if all(row.ok for row in rows) else EXIT_FAILED


def _checks(sampler: Sampler, draws: int | None) -> Iterator[tuple[str, Callable[[], Row]]]:
    count = draws or _DRAWS
    logits = 2 * torch.randn(_VOCAB, generator=torch.Generator().manual_seed(1))
    plain = probabilities(logits)
    hot = probabilities(logits, temperature=_TEMPERATURE)
    mask = torch.full((_VOCAB // 32,), -1, dtype=torch.int32, device=sampler.device)
    mask[_DROPPED_TILE[0] // 32 : _DROPPED_TILE[1] // 32] = 0
    cases: list[tuple[str, dict[str, Any], Tensor, bool]] = [
        ("plain", {}, plain, False),
        (f"temperature {_TEMPERATURE}", {"temperature": _TEMPERATURE}, hot, False),
        (f"top-k {_TOP_K}", {"top_k": _TOP_K}, probabilities(logits, top_k=_TOP_K), False),
        (f"top-p {_TOP_P}", {"top_p": _TOP_P}, probabilities(logits, top_p=_TOP_P), False),
        (f"min-p {_MIN_P}", {"min_p": _MIN_P}, probabilities(logits, min_p=_MIN_P), False),
        ("T = 1.05 drawn as T = 1", {"temperature": 1.05}, plain, True),
        ("a tile of 128 ids dropped", {"allowed_tokens": mask}, plain, True),
    ]
    # A stretch of positions of its own for every check: their noise shares nothing.
    for index, (name, parameters, expected, control) in enumerate(cases):

        def check(
            name: str = name,
            parameters: dict[str, Any] = parameters,
            expected: Tensor = expected,
            control: bool = control,
            first: int = index << 40,
        ) -> Row:
            return _chi_squared(name, sampler.draw(logits, first, count, **parameters), expected, control)

        yield name, check
    yield "tail", lambda: _tail(sampler, len(cases) << 40, draws)
    yield "24-bit noise", lambda: _coarse_tail(sampler.seed)


def probabilities(logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """The textbook's answer in fp64, written apart from the library: softmax, min-p, top-k, top-p, renormalise."""
    share = (logits.double() / temperature).softmax(-1)
    share = torch.where(share >= min_p * share.max(), share, 0.0)
    ranked, order = share.sort(descending=True, stable=True)
    if top_k:
        ranked[top_k:] = 0
    ranked = ranked / ranked.sum()
    ranked = torch.where(ranked.cumsum(-1) - ranked < top_p, ranked, 0.0)
    return torch.zeros_like(share).scatter(0, order, ranked / ranked.sum())


def _chi_squared(name: str, batches: Iterator[Tensor], expected: Tensor, control: bool) -> Row:
    from ..testing import chi_squared, count_tokens

    counts = torch.zeros(_VOCAB, dtype=torch.int64)
    for tokens in batches:
        if bool((tokens < 0).any()):
            return Row(name, len(tokens), "invalid rows", 0.0, False, control, counts, expected * len(tokens))
        counts += count_tokens(tokens, _VOCAB)
    result = chi_squared(counts, expected)
    ok = (result.p_value < ALPHA) if control else (result.p_value >= ALPHA)
    statistic = f"χ²({result.cells - 1}) = {result.statistic:.1f}"
    return Row(name, result.draws, statistic, result.p_value, ok, control, counts, expected * result.draws)


def tail_probability() -> float:
    """Share of all ids but the first: (V - 1) e^-18 / (1 + (V - 1) e^-18) = 0.0019650."""
    mass = (_TAIL_VOCAB - 1) * math.exp(_TAIL_LOGIT)
    return mass / (1 + mass)


def _tail(sampler: Sampler, first: int, draws: int | None) -> Row:
    logits = torch.full((_TAIL_VOCAB,), _TAIL_LOGIT)
    logits[0] = 0
    limit, step, done, hits = draws or _TAIL_DRAWS, 32, 0, 0
    started = time.perf_counter()
    while done < limit:
        size = min(step, limit - done)
        hits += sum(int((tokens != 0).sum()) for tokens in sampler.draw(logits, first + done, size))
        done += size
        elapsed = time.perf_counter() - started
        if draws is None and elapsed > _TAIL_SECONDS:
            break
        # About half a second a step: the clock is seen often and the launches are few.
        step = max(32, min(1 << 16, int(0.5 * done / elapsed)))
    return _tail_row("tail of 129,279 rare ids", hits, done, control=False)


def _coarse_tail(seed: int) -> Row:
    """What noise from a 24-bit uniform would give, simulated without drawing each of its 129,280 numbers.

    The largest of n such uniforms is distributed as floor(2^24 U^(1/n)) / 2^24 with U uniform in [0, 1).
    """
    generator = torch.Generator().manual_seed(seed % 2**63)
    draws = _TAIL_DRAWS
    uniform = torch.rand(2, draws, dtype=torch.float64, generator=generator)
    uniform[1] = uniform[1].pow(1 / (_TAIL_VOCAB - 1))
    noise = -torch.log(-torch.log((uniform * 2**24).floor() / 2**24))
    return _tail_row("a 24-bit uniform as noise", int((noise[1] + _TAIL_LOGIT > noise[0]).sum()), draws, control=True)


def _tail_row(name: str, hits: int, draws: int, control: bool) -> Row:
    from ..testing import tail_share

    share = tail_probability()
    result = tail_share(hits, draws, share)
    ok = (result.p_value < ALPHA) if control else (result.p_value >= ALPHA)
    statistic = f"z = {result.statistic:+.2f}"
    counts = torch.tensor([draws - hits, hits])
    return Row(name, draws, statistic, result.p_value, ok, control, counts, torch.tensor([1 - share, share]) * draws)


def tail_power(draws: int) -> float:
    """Probability that ``draws`` draws expose a 24-bit uniform, whose tail has a share of 0.00016 instead."""
    from scipy.stats import binom, binomtest

    share, critical = tail_probability(), -1
    while binomtest(critical + 1, draws, share).pvalue < ALPHA and (critical + 1) < draws * share:
        critical += 1
    return float(binom.cdf(critical, draws, 0.00016))


def _show(rows: list[Row], sampler: Sampler) -> None:
    console = output()
    console.print(f"impl [bold]{sampler.impl}[/bold] on {sampler.device} ({device_name(sampler.device)})", soft_wrap=True)
    console.print(f"seed {sampler.seed}; a check fails at p < {ALPHA:g}")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("check", header_style="dim")
    for heading in ("draws", "statistic", "p"):
        table.add_column(heading, justify="right", header_style="dim", no_wrap=True)
    table.add_column("verdict", header_style="dim", no_wrap=True)
    for control in (False, True):
        if control:
            table.add_section()
            table.add_row("[dim]must be rejected:[/dim]")
        for row in rows:
            if row.control == control:
                words = ("rejected", "NOT REJECTED") if control else ("pass", "FAIL")
                verdict = f"[green]{words[0]}[/green]" if row.ok else f"[bold red]{words[1]}[/bold red]"
                table.add_row(row.name, f"{row.draws:,}", row.statistic, _p_value(row.p_value), verdict)
    console.print(table)
    tail = next(row for row in rows if len(row.observed) == 2 and not row.control)
    power = tail_power(tail.draws)
    console.print(
        f"[dim]Tail: {int(tail.observed[1]):,} of {tail.draws:,} draws, expected {float(tail.expected[1]):,.1f}. "
        f"This many draws would expose a 24-bit uniform with probability {_share(power)}.[/dim]"
    )
    if any(row.control and not row.ok for row in rows):
        console.print("[bold red]A control was not rejected: these checks are too weak to pass.[/bold red] Take more --draws.")


def _p_value(p: float) -> str:
    return f"{p:.3f}" if p >= 0.001 else ("< 1e-300" if p < 1e-300 else f"{p:.0e}")


def _p_equals(row: Row) -> str:
    text = _p_value(row.p_value)
    return f"p {text}" if text.startswith("<") else f"p = {text}"


def _share(power: float) -> str:
    return "above 0.999" if power > 0.999 else f"{power:.2f}"


def _check_plot(plot: str) -> None:
    path = Path(plot)
    if path.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise UserError(f"--plot must end in .png, .pdf or .svg, got {plot!r}")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK) or path.is_dir():
        raise UserError(f"--plot must be a file in a folder that exists and can be written to, got {plot!r}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install 'nologits[demo]'") from None


def _save_plot(rows: list[Row], plot: str) -> None:
    """Observed against expected counts: a panel for each chi-squared check, and one for the tail."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [row for row in rows if len(row.observed) > 2]
    tails = [row for row in rows if len(row.observed) == 2]
    figure, axes = pyplot.subplots(2, 4, figsize=(15, 7), layout="constrained")
    for axis, row in zip(axes.flat, panels, strict=False):
        _plot_counts(axis, row)
    _plot_tails(axes.flat[len(panels)], tails)
    figure.suptitle("Drawn tokens against the distribution they should have", fontsize=14)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    try:
        figure.savefig(plot, dpi=120)
    except OSError as error:
        raise UserError(f"--plot must be a file that can be written, got {plot!r} ({error.strerror})") from None
    finally:
        pyplot.close(figure)


def _plot_counts(axis: Any, row: Row) -> None:
    order = row.expected.argsort(descending=True, stable=True)
    expected, observed = row.expected[order], row.observed[order]
    kept = int((expected > 0).sum())
    rank = torch.arange(1, len(expected) + 1)
    spread = 3 * expected[:kept].sqrt()
    low = (expected[:kept] - spread).clamp(min=0.5)
    axis.fill_between(
        rank[:kept], low, expected[:kept] + spread, color="#9ecae1", alpha=0.6, lw=0, label="± 3 standard deviations"
    )
    axis.plot(rank[:kept], expected[:kept], color="#08519c", lw=1.2, label="expected")
    # Where nothing was drawn a logarithmic axis has no place: on its lower edge, so that a missing tile is seen.
    floor = max(0.6, 0.25 * float(expected[:kept].min()))
    seen = observed.double().clamp(min=floor)[:kept]
    axis.plot(rank[:kept], seen, ".", color="#d94801", ms=3, clip_on=False, zorder=3, label="observed")
    axis.set(xscale="log", yscale="log", xlabel="token, by expected count", ylabel="draws", ylim=(floor, None), xlim=(0.9, 600))
    _title(axis, row)


def _plot_tails(axis: Any, rows: list[Row]) -> None:
    names = ["this library" if not row.control else "24-bit noise" for row in rows]
    shares = [float(row.observed[1]) / row.draws for row in rows]
    errors = [3 * math.sqrt(share / row.draws) for share, row in zip(shares, rows, strict=True)]
    axis.errorbar(names, shares, yerr=errors, fmt="o", color="#d94801", capsize=5)
    axis.axhline(tail_probability(), color="#08519c", lw=1.2)
    axis.set(xlim=(-0.5, len(rows) - 0.5), ylim=(0, None), ylabel="share of the tail")
    axis.set_title(f"tail of 129,279 rare ids, share {tail_probability():.4%}\n{_p_equals(rows[0])}", fontsize=10)


def _title(axis: Any, row: Row) -> None:
    prefix = "control: " if row.control else ""
    axis.set_title(f"{prefix}{row.name}\n{_p_equals(row)}", fontsize=10, color="#a50f15" if row.control else "black")
