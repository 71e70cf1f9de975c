"""The suites ``tpN``: a head in N shards, beside the shard's matmul alone, the exchange alone, and gathers of logits.

Every rank has V / N rows of the head and all hidden states. A row's time is that of the slowest rank.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import nologits as nl

from .. import sharded
from ..dispatch import hopper_obstacle
from ..testing import compare_tokens
from ..types import Impl
from .cases import CASES, Case, make_inputs, make_weight
from .modes import MODES, Mode
from .peer_draws import flashinfer_draw
from .peers import SkipError, brief, flashsampling_kernel
from .ranks import Rank, measure_together, run_ranks
from .suite import ROW_KEYS, SCHEMA, Call, Plan, Record, Row, Variant, commit, environment
from .timing import Timing, extra_bytes, measure_ceilings

FLOOR, EXCHANGE, OURS = "matmul-shard", "exchange", "nologits"
"""The first two sample nothing: the shard's matmul, and sending as many bytes as our draw does."""

TP_MODES, TP_BATCHES = ("plain", "logprobs", "k50p95"), (1, 16, 64, 256)
"""By default."""


class Inputs(NamedTuple):
    """A cell on one rank: ``whole [V, D]``, of which ``shard [V / N, D]`` are its own rows."""

    whole: Tensor
    shard: Tensor
    hidden: Tensor
    head: nl.LMHead
    params: nl.SamplingParams
    mode: Mode


def run(
    plan: Plan,
    world: int,
    record: Record,
    note: Callable[[str], None],
    begin: Callable[[str], None],
    cases: Sequence[Case] = CASES,
) -> None:
    """Measures on ``world`` processes; arguments as :func:`nologits.bench.suite.run`. ``cases`` has those that ``plan`` names.

    Raises:
        RuntimeError: a rank fails, or its tokens are not those of one process.
    """
    record |= {"schema": SCHEMA, "suite": f"tp{world}", "skipped": [], "notes": [], "rows": []}

    def hear(kind: str, message: Any) -> None:
        if kind == "environment":
            record.update(message)
        elif kind == "begin":
            begin(message)
        elif kind == "skipped":
            record["skipped"].append(message)
            note(f"{message['provider']} ({message['mode']}) skipped: {message['reason']}")
        elif kind == "note":
            record["notes"].append(message)
            note(message["note"])
        else:
            record["rows"] += message

    run_ranks(world, _work, (plan, [case for case in cases if case.name in plan.cases]), hear)


def _work(rank: Rank, plan: Plan, cases: list[Case]) -> None:
    rank.tell("environment", _environment(rank))
    skipped: list[Row] = []
    for case in cases:
        whole = make_weight(case, rank.device.type)
        for batch in plan.batches:
            for mode in plan.modes:
                rank.tell("begin", f"{case.name}, B = {batch}, {mode}")
                inputs = _inputs(rank, whole, batch, mode)
                calls, reasons, sent = _calls(rank, inputs, mode, plan.providers)
                for name, reason in reasons.items():
                    entry = {"provider": name, "mode": mode, "reason": reason}
                    if entry not in skipped:
                        skipped.append(entry)
                        rank.tell("skipped", entry)
                for name, call in calls.items():
                    if isinstance(call, Variant):
                        text = f"{name}: {call.name}"
                        rank.tell("note", {"case": case.name, "B": batch, "mode": mode, "note": text})
                timings = measure_together(calls, plan.repeats, rank)
                memory = {name: extra_bytes(call) if whole.is_cuda else None for name, call in calls.items()}
                rank.tell("rows", _rows(case, batch, mode, timings, memory, sent))


def _environment(rank: Rank) -> Row:
    if rank.device.type == "cuda":
        return environment() | {"ranks": rank.world} | measure_ceilings()._asdict()
    return {"gpu": f"{rank.world} CPU processes", "torch": torch.__version__, "commit": commit(), "ranks": rank.world}


def _inputs(rank: Rank, whole: Tensor, batch: int, mode: str) -> Inputs:
    width = -(-whole.shape[0] // rank.world)
    start = rank.number * width
    shard = whole[start : start + width]
    made = make_inputs(whole, batch, mode)
    head = nl.LMHead(shard, vocab_size=whole.shape[0], vocab_start=start, group=dist.group.WORLD, validate=False)
    return Inputs(whole, shard, made.hidden, head, made.params, MODES[mode])


def _calls(rank: Rank, inputs: Inputs, mode: str, names: Any) -> tuple[dict[str, Call], dict[str, str], int]:
    """The calls of a cell that run here; why others do not; and the bytes that our draw sends, a row and rank."""
    calls: dict[str, Call] = {}
    reasons: dict[str, str] = {}
    sent = _check(rank, inputs)
    for name in names:
        try:
            call = PROVIDERS[name](rank, inputs, sent)
            call()
        except SkipError as reason:
            reasons[name] = str(reason)
        except Exception as error:
            if name in (FLOOR, EXCHANGE, OURS):
                raise
            reasons[name] = brief(error)  # a peer that cannot be run here is not our failure
        else:
            calls[name] = call
    return calls, reasons, sent


def _check(rank: Rank, inputs: Inputs) -> int:
    """Our draw's tokens against one process's, the same on every rank; returns the bytes sent for each row."""
    counted = [0]
    gather = sharded._gather

    def count(group: Any, mine: Tensor) -> list[Tensor]:
        counted[0] += mine.numel() * mine.element_size()
        return gather(group, mine)

    sharded._gather = count
    try:
        drawn = _draw(inputs)
    finally:
        sharded._gather = gather
    if not counted[0]:  # the kernels told each other, not a gather
        traffic = _transport(rank, inputs).traffic
        counted[0] = round(traffic.bytes_per_row() * len(inputs.hidden))
    everyone = [torch.empty_like(drawn.tokens) for _ in range(rank.world)]
    dist.all_gather(everyone, drawn.tokens)
    if any(not torch.equal(other, drawn.tokens) for other in everyone):
        raise RuntimeError("the ranks drew different tokens")
    if rank.number == 0:
        compare_tokens(drawn.tokens, inputs.hidden, nl.LMHead(inputs.whole), inputs.params)
    return counted[0] // len(inputs.hidden)


def _transport(rank: Rank, inputs: Inputs) -> Any:
    from ..transport import transport_for

    return transport_for(dist.group.WORLD, rank.device, len(inputs.whole))


def _draw(inputs: Inputs) -> nl.Samples:
    impl: Impl = "torch" if hopper_obstacle(inputs.hidden.device) else "hopper"
    return inputs.head.sample(inputs.hidden, inputs.params, impl=impl, **inputs.mode.results)


# ---- who is measured: (rank, inputs, bytes sent for each row) -> call


def _matmul(rank: Rank, inputs: Inputs, sent: int) -> Call:
    return lambda: inputs.hidden @ inputs.shard.T


def _exchange(rank: Rank, inputs: Inputs, sent: int) -> Call:
    mine = torch.zeros(len(inputs.hidden), sent, dtype=torch.uint8, device=rank.device)
    everyone = torch.zeros(rank.world, *mine.shape, dtype=torch.uint8, device=rank.device)
    return lambda: dist.all_gather(list(everyone.unbind()), mine)


def _nologits(rank: Rank, inputs: Inputs, sent: int) -> Call:
    return lambda: _draw(inputs)


def _gathered(rank: Rank, inputs: Inputs) -> Callable[[], Tensor]:
    """The logits of the whole head, bf16 ``[B, V]``, on every rank; the last shard may be narrower."""
    vocab, width = len(inputs.whole), -(-len(inputs.whole) // rank.world)
    everyone = torch.empty(rank.world, len(inputs.hidden), width, dtype=inputs.hidden.dtype, device=rank.device)

    def gather() -> Tensor:
        mine = inputs.hidden @ inputs.shard.T
        if mine.shape[1] < width:
            mine = torch.nn.functional.pad(mine, (0, width - mine.shape[1]))
        dist.all_gather(list(everyone.unbind()), mine)
        return everyone.transpose(0, 1).reshape(len(mine), -1)[:, :vocab]

    return gather


def _gather_nologits(rank: Rank, inputs: Inputs, sent: int) -> Call:
    gather = _gathered(rank, inputs)
    return lambda: nl.sample_logits(gather(), inputs.params, **inputs.mode.results)


def _gather_multinomial(rank: Rank, inputs: Inputs, sent: int) -> Call:
    if inputs.mode != Mode():
        raise SkipError("it draws by temperature alone")
    gather, temperature = _gathered(rank, inputs), inputs.mode.temperature

    def draw(logits: Tensor) -> Tensor:
        return torch.softmax(logits.float() / temperature, -1).multinomial(1)

    draw = torch.compile(draw) if rank.device.type == "cuda" else draw
    return lambda: draw(gather())


def _gather_flashinfer(rank: Rank, inputs: Inputs, sent: int) -> Call:
    if not inputs.mode.filtered:
        raise SkipError("it is measured with filters")
    gather = _gathered(rank, inputs)
    return flashinfer_draw(lambda: gather().float(), inputs.params)


def _flashsampling(rank: Rank, inputs: Inputs, sent: int) -> Call:
    """The reference of the paper: its kernel writes each tile's winner to all ranks, a barrier and a reduction follow."""
    if inputs.mode != Mode():
        raise SkipError("its kernel draws by temperature alone")
    if rank.device.type != "cuda":
        raise SkipError("its kernel needs a GPU")
    kernel = flashsampling_kernel()
    info = importlib.import_module("fused_mm_sampling.tp_info").TPInfo(rank.number, rank.world)
    temperature = torch.tensor(inputs.mode.temperature, device=rank.device)
    return lambda: kernel(inputs.shard, inputs.hidden, 1, temperature, 7, tp=info)


PROVIDERS: dict[str, Callable[[Rank, Inputs, int], Call]] = {
    FLOOR: _matmul,
    EXCHANGE: _exchange,
    OURS: _nologits,
    "gather-nologits": _gather_nologits,
    "gather-multinomial": _gather_multinomial,
    "gather-flashinfer": _gather_flashinfer,
    "flashsampling": _flashsampling,
}


def _rows(case: Case, batch: int, mode: str, timings: dict[str, Timing], memory: dict[str, int | None], sent: int) -> list[Row]:
    others = [timing.us for name, timing in timings.items() if name not in (FLOOR, EXCHANGE, OURS)]
    rows = []
    for name, timing in timings.items():
        times = [round(value, 1) for value in timing[:3]]
        ratio = round(timing.us / timings[FLOOR].us, 3) if FLOOR in timings and name != EXCHANGE else None
        values = (case.name, case.vocab, case.depth, batch, name, mode, *times, ratio, memory[name])
        ours = name == OURS
        extra: Row = {
            "bytes_per_row": sent if ours or name == EXCHANGE else None,
            "speedup": round(min(others) / timing.us, 3) if ours and others else None,
            "captured": timing.captured,
        }
        rows.append(dict(zip(ROW_KEYS, values, strict=True)) | extra)
    return rows
