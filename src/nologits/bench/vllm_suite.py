"""The suite ``vllm``: the time of an output token in vLLM itself, with the plugin and without it, in one engine in turn.

Beside the suite ``e2e``, whose decode loop has no engine around it: here the host schedules, prepares and reads results, and
a step can wait for it. The unit is the same engine without head and sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import permutations
from statistics import median

import torch

from .decoder import SHAPES, Shape
from .e2e import CONTEXT, E2E_MODES
from .suite import ROW_KEYS, SCHEMA, Plan, Record, Row, commit, environment
from .timing import Timing, summary
from .vllm_engine import FLOOR, NEW_TOKENS, OURS, STOCK, Decoded, Engine

SUITE = "vllm"
PROVIDERS = (FLOOR, OURS, STOCK)


def run(
    plan: Plan,
    compiled: bool,
    record: Record,
    note: Callable[[str], None],
    begin: Callable[[str], None],
    shapes: Sequence[Shape] = SHAPES,
    context: int = CONTEXT,
) -> None:
    """Measures.

    Args:
        plan: what to measure, by name.
        compiled: as :class:`Engine` takes it.
        record, note, begin: as for :func:`nologits.bench.suite.run`.
        shapes: the models that ``plan.cases`` names.
        context: as :class:`Engine` takes it.

    Raises:
        RuntimeError: the plugin is not active or draws wrong tokens, or the time of a step cannot be told.
    """
    import vllm

    record |= {"schema": SCHEMA, "suite": SUITE} | _environment() | {"vllm": vllm.__version__}
    record |= {"skipped": [], "notes": [], "rows": []}
    for shape in (shape for shape in shapes if shape.name in plan.cases):
        begin(f"{shape.name}: vLLM starts")
        engine = Engine(shape, list(plan.batches), context, compiled)
        tell = partial(_tell, record, note, shape.name)
        tell(engine.about)
        for batch in plan.batches:
            for mode in plan.modes:
                begin(f"{shape.name}, B = {batch}, {mode}")
                spread = engine.warm_up(batch, E2E_MODES[mode])
                what = "the plugin drew nothing" if spread is None else f"logits have a standard deviation of {spread:.1f}"
                tell(f"B = {batch}, {mode}: {what}")
                record["rows"] += make_rows(shape, batch, mode, measure(engine, batch, mode, plan))
        engine.close()


def _environment() -> Row:
    if torch.cuda.is_available():
        return dict(environment())
    return {"gpu": "CPU", "torch": torch.__version__, "commit": commit()}


def _tell(record: Record, note: Callable[[str], None], case: str, text: str) -> None:
    record["notes"].append({"case": case, "note": text})
    note(text)


def measure(engine: Engine, batch: int, mode: str, plan: Plan) -> dict[str, list[Decoded]]:
    """``plan.repeats`` generations of each provider, in turn; one more of each goes before, in which kernels are compiled.

    Each turn has another order: none comes always after the same one.
    """
    out: dict[str, list[Decoded]] = {name: [] for name in plan.providers}
    orders = list(permutations(out))
    for repeat in range(plan.repeats + 1):
        for name in orders[repeat % len(orders)]:
            done = engine.decode(batch, E2E_MODES[mode], name)
            if repeat:
                out[name].append(done)
    return out


def make_rows(shape: Shape, batch: int, mode: str, measured: dict[str, list[Decoded]]) -> list[Row]:
    """The rows of one cell: medians over generations, and who drew.

    ``taken_share`` is the share of the cell's rows that did without logits, ``fallbacks`` says why others did not;
    ``middle_us``, ``longest_us`` and ``host_us`` are those of :class:`Times`, ``gc_us`` that of the generation with the most.
    """
    timings = {name: summary([one.times.us for one in generations], True) for name, generations in measured.items()}
    return [_row(shape, batch, mode, name, timings, generations) for name, generations in measured.items()]


def _row(shape: Shape, batch: int, mode: str, name: str, timings: dict[str, Timing], generations: Sequence[Decoded]) -> Row:
    times = [round(value, 1) for value in timings[name][:3]]
    values = (shape.name, shape.vocab, shape.depth, batch, name, mode, *times, None, None)
    ratio = timings[name].us / timings[FLOOR].us if FLOOR in timings else None
    speedup = timings[STOCK].us / timings[name].us if name == OURS and STOCK in timings else None
    counters = [one.counters for one in generations]
    taken = sum(one["taken"] for one in counters) / (batch * NEW_TOKENS * len(counters))
    reasons = sorted({reason for one in counters for reason in one["fallbacks"]})
    return dict(zip(ROW_KEYS, values, strict=True)) | {
        "ratio_to_decoder": None if ratio is None else round(ratio, 3),
        "speedup": None if speedup is None else round(speedup, 3),
        "middle_us": round(median(one.times.middle_us for one in generations), 1),
        "longest_us": round(max(one.times.longest_us for one in generations), 1),
        "host_us": round(median(one.times.host_us for one in generations), 1),
        "gc_us": round(max(one.gc_us for one in generations), 1),
        "taken_share": round(taken, 4),
        "fallbacks": "; ".join(reasons),
        "errors": sum(one["errors"] for one in counters),
    }
