"""Figures of a record, one PNG for each case and mode: time against B, its ratio to the floor's (the matmul alone, or one read
of the logits), and for a head the roofline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from ..testing.families import FAMILIES
from .cases import operations, traffic_bytes
from .filter_cases import logits_bytes
from .modes import FALLBACKS
from .report import groups, stem, subject, title
from .suite import Row

Line = list[Row]

# Okabe and Ito's palette, and where it ends Tol's, told apart with any colour vision; markers repeat the distinction for print.
HEAD_STYLES = {
    "nologits-hopper": ("#D55E00", "o"),
    "nologits-triton": ("#E69F00", "s"),
    "matmul": ("#000000", "x"),
    "multinomial": ("#56B4E9", "v"),
    "multinomial-compiled": ("#0072B2", "^"),
    "flashinfer-gumbel": ("#009E73", "D"),
    "flashinfer-topk-topp": ("#882255", "P"),
    "flashsampling": ("#CC79A7", "*"),
    "matmul-nologits": ("#332288", "p"),
    "matmul-vllm-qrita": ("#999933", "<"),
    "matmul-flashinfer": ("#661100", ">"),
}
FILTER_STYLES = {
    "nologits": ("#D55E00", "o"),
    "nologits-draw": ("#E69F00", "s"),
    "amax": ("#000000", "x"),
    "torch-sort": ("#56B4E9", "v"),
    "torch-topk": ("#0072B2", "^"),
    "vllm-qrita": ("#CC79A7", "*"),
    "flashinfer": ("#882255", "P"),
}
TP_STYLES = {
    "nologits": ("#D55E00", "o"),
    "matmul-shard": ("#000000", "x"),
    "exchange": ("#999999", "+"),
    "gather-nologits": ("#332288", "p"),
    "gather-multinomial": ("#56B4E9", "v"),
    "gather-flashinfer": ("#661100", ">"),
    "flashsampling": ("#CC79A7", "*"),
}
E2E_STYLES = {
    "decoder": ("#000000", "x"),
    **{name: FILTER_STYLES[name] for name in ("nologits", "vllm-qrita", "flashinfer")},
    "nologits-screened": ("#009E73", "D"),
    "multinomial-compiled": HEAD_STYLES["multinomial-compiled"],
}
VLLM_STYLES = {"decoder": E2E_STYLES["decoder"], "nologits": E2E_STYLES["nologits"], "vllm": ("#0072B2", "^")}
STYLES = HEAD_STYLES | FILTER_STYLES | TP_STYLES | E2E_STYLES | VLLM_STYLES
FLOORS = {
    "matmul": "ratio_to_matmul",
    "amax": "ratio_to_amax",
    "matmul-shard": "ratio_to_matmul",
    "decoder": "ratio_to_decoder",
}
"""The providers that sample nothing, and where a row has its ratio to them."""

_UNKNOWN = ("#888888", ".")
_TIMES = tuple(value * 10**power for power in range(7) for value in (1, 1.5, 2, 3, 4, 5, 7))
_MAX_TICKS = 16
"""More labels than this run into each other."""

_RATIOS = (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 5, 7, 10, 15, 20, 30, 50, 70, 100, 200, 500, 1000)
_MODES = {
    "plain": "draw",
    "logprobs": "draw and its log-probability",
    "greedy": "argmax",
    "k50": "top-k 50",
    "p90": "top-p 0.9",
    "k50p95": "top-k 50, then top-p 0.95",
    "minp05": "min-p 0.05",
    "p95": "top-p 0.95",
    "top_logprobs20": "draw and the 20 likeliest tokens",
    "screened": "draw with an 8-bit copy of the head",
    "t06": "temperature 0.6",
    "t06k20p95": "temperature 0.6, top-k 20, top-p 0.95",
    **{name: f"top-p 0.9, {mode.flat_share:.0%} of the rows flat" for name, mode in FALLBACKS.items()},
}


def write_plots(
    record: dict[str, Any], folder: Path, read_gbps: float | None = None, matmul_tflops: float | None = None
) -> list[Path]:
    """Writes the figures.

    Args:
        record: of any suite.
        folder: where to; made if it is not there.
        read_gbps: memory ceiling of the roofline, GB/s; default: the record's, and none where it has none.
        matmul_tflops: compute ceiling, cuBLAS's best measured rate in TFLOP/s; likewise.

    Returns:
        The files, ``<suite>-<case>-<mode>.png``.
    """
    read = read_gbps or record.get("read_gbps")
    peak = matmul_tflops or record.get("matmul_tflops")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for (case, mode), rows in groups(record["rows"]):
        path = folder / f"{record['suite']}-{case}-{mode}.png"
        _figure(record, rows, read, peak).savefig(path, dpi=130)
        paths.append(path)
    return paths


def lines(rows: list[Row]) -> dict[str, Line]:
    """Each provider's rows by batch size. Of several configurations at one batch size, the fastest."""
    out: dict[str, dict[int, Row]] = {}
    for row in sorted(rows, key=lambda row: row["us"]):
        out.setdefault(row["provider"], {}).setdefault(row["B"], row)
    order = [*STYLES, *sorted(set(out) - set(STYLES))]
    return {name: [out[name][batch] for batch in sorted(out[name])] for name in order if name in out}


def _figure(record: dict[str, Any], rows: list[Row], read: float | None, peak: float | None) -> Figure:
    first = rows[0]
    has_head, ranks, suite = first["D"] > 0, record.get("ranks"), stem(record)
    floor = {"tp": "matmul-shard", "e2e": "decoder", "vllm": "decoder"}.get(suite, "matmul" if has_head else "amax")
    roofline = floor == "matmul"  # of the others none reads the head, or only the head
    figure = Figure(figsize=(16 if roofline else 11, 6), layout="constrained")
    axes = figure.subplots(1, 3 if roofline else 2)
    _plot_time(axes[0], rows, *((read, peak) if roofline or not has_head else (None, None)))
    _plot_ratio(axes[1], rows, floor)
    if roofline:
        _plot_roofline(axes[2], rows, read, peak)
    what = _MODES.get(first["mode"], first["mode"])
    shards = f" in {ranks} shards" if ranks else ""
    about = f"From hidden states to a token ({what}), LM head of {subject(first)}{shards}, bf16"
    if suite in ("e2e", "vllm"):
        where = "in vLLM, at" if suite == "vllm" else "at"
        about = f"A decode step ({what}) {where} the shape of {subject(first)}, bf16"
    how = "slowest rank" if ranks else "mean of a generation's steps" if suite == "vllm" else "cold L2"
    figure.suptitle(
        f"{about if has_head else f'Filters ({what}) on {subject(first)}'}\n{title(record)}; {how}, median, band p20-p80",
        fontsize=12,
    )
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 5), frameon=False)
    return figure


def _floor(row: Row, read: float, peak: float) -> float:
    """The least time that the ceilings allow, us."""
    if row["D"] == 0:
        return logits_bytes(row["case"], row["V"], row["B"]) / read / 1e3
    shape = (row["V"], row["D"], row["B"])
    return max(traffic_bytes(*shape) / read / 1e3, operations(*shape) / peak / 1e6)


def _plot_time(axis: Axes, rows: list[Row], read: float | None, peak: float | None) -> None:
    for name, line in lines(rows).items():
        colour, marker = STYLES.get(name, _UNKNOWN)
        batches = [row["B"] for row in line]
        axis.plot(batches, [row["us"] for row in line], color=colour, marker=marker, label=name, **_emphasis(name))
        axis.fill_between(batches, [r["p20_us"] for r in line], [r["p80_us"] for r in line], color=colour, alpha=0.2, lw=0)
    by_batch = {row["B"]: row for row in rows}
    batches = sorted(by_batch)
    has_head = rows[0]["D"] > 0
    if read and peak and (has_head or rows[0]["case"] in FAMILIES):
        what = "one read of the head, or its matmul" if has_head else "one read of the logits"
        floor = [_floor(by_batch[batch], read, peak) for batch in batches]
        axis.plot(batches, floor, color="#888888", ls="--", label=f"floor: {what}")
    axis.set_yscale("log")
    if not has_head:  # a few rows are read in a fraction of a kernel's start: the floor would flatten the lines
        axis.set_ylim(bottom=0.6 * min(row["p20_us"] for row in rows))
    _batch_axis(axis, batches)
    _ticks(axis, _TIMES, "{:,.0f}")
    axis.set_ylabel("time, us")
    axis.set_title("Time")


def _plot_ratio(axis: Axes, rows: list[Row], floor: str) -> None:
    for name, line in lines(rows).items():
        points = [(row["B"], row[FLOORS[floor]]) for row in line if row.get(FLOORS[floor]) is not None]
        colour, marker = STYLES.get(name, _UNKNOWN)
        if points and name != floor:
            axis.plot(*zip(*points, strict=True), color=colour, marker=marker, **_emphasis(name))
    axis.axhline(1, color="black", lw=1.2)
    # Logarithmic, so that the slowest peer does not flatten what happens near 1.
    axis.set_yscale("log")
    _ticks(axis, _RATIOS, "{:g}")
    _batch_axis(axis, sorted({row["B"] for row in rows}))
    what, short = {
        "matmul": ("the LM-head matmul alone", "the matmul alone"),
        "matmul-shard": ("the shard's matmul alone", "the shard's matmul"),
        "amax": ("torch.amax", "one read"),
        "decoder": ("the decoder without head and sampler", "the decoder alone"),
    }[floor]
    axis.set_ylabel(f"time / time of {what}")
    axis.set_title(f"Ratio to {short} (lower is better)")


def _plot_roofline(axis: Axes, rows: list[Row], read: float | None, peak: float | None) -> None:
    vocab, depth = rows[0]["V"], rows[0]["D"]
    intensity = {b: operations(vocab, depth, b) / traffic_bytes(vocab, depth, b) for b in {row["B"] for row in rows}}
    for name, line in lines(rows).items():
        colour, marker = STYLES.get(name, _UNKNOWN)
        rate = [operations(vocab, depth, row["B"]) / row["us"] / 1e6 for row in line]
        axis.plot([intensity[row["B"]] for row in line], rate, color=colour, marker=marker, **_emphasis(name))
    low, high = min(intensity.values()) / 1.5, max(intensity.values()) * 1.7
    if read and peak:
        ridge = peak * 1e3 / read
        ends = sorted({low, min(max(ridge, low), high), high})
        axis.plot(ends, [min(read * x / 1e3, peak) for x in ends], color="black", lw=1.2)
    if read:
        if not peak:
            axis.plot([low, high], [read * low / 1e3, read * high / 1e3], color="black", lw=1.2)
        # Above the roof, clear of the lines that hug it.
        axis.annotate(f"measured read bandwidth, {read / 1e3:.2f} TB/s", (low * 1.5, read * low * 1.5 / 1e3), rotation=45,
                      rotation_mode="anchor", transform_rotates_text=True, xytext=(-9, 11), textcoords="offset points",
                      fontsize=9)  # fmt: skip
    if peak:
        if not read:
            axis.plot([low, high], [peak, peak], color="black", lw=1.2)
        axis.annotate(f"cuBLAS's best measured rate, {peak:,.0f} TFLOP/s", (high, peak), ha="right", va="bottom",
                      xytext=(-4, 3), textcoords="offset points", fontsize=9)  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlim(low, high)
    if peak:
        axis.set_ylim(top=peak * 2)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_xlabel("arithmetic intensity, FLOP per byte (about B)")
    axis.set_ylabel("achieved, TFLOP/s")
    axis.grid(True, which="major", color="#dddddd", lw=0.6)
    axis.set_title("Roofline")


def _ticks(axis: Axes, steps: Sequence[float], form: str) -> None:
    """Labels at the steps given: values lie within a decade or two, where powers of ten leave an axis all but bare."""
    low, high = axis.get_ylim()
    shown = [step for step in steps if low <= step <= high]
    if len(shown) > _MAX_TICKS:
        shown = [step for step in shown if f"{step:.1e}"[:3] in ("1.0", "2.0", "5.0")]
    axis.set_yticks(shown)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: form.format(value)))
    axis.yaxis.set_minor_locator(NullLocator())


def _batch_axis(axis: Axes, batches: list[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(batches, [str(batch) for batch in batches])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("batch size B")
    axis.grid(True, which="major", color="#dddddd", lw=0.6)


def _emphasis(name: str) -> dict[str, Any]:
    """Our lines are thicker and on top; what samples nothing is dashed."""
    if name.startswith("nologits"):
        return {"lw": 2.2, "markersize": 6, "zorder": 5}
    return {"lw": 1.3, "markersize": 6, "zorder": 3, "ls": ":" if name in FLOORS else "-"}
