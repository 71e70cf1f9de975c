"""Several processes that measure together: one a GPU over NCCL, or on the CPU over gloo where there are too few GPUs."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from .peers import brief
from .suite import Call
from .timing import FLUSH_BYTES, Timing, capture, summary, time_once

_PATIENCE = 600.0
"""Seconds without a word from any rank: longer than the slowest cell and its compilation."""


class Rank(NamedTuple):
    """A process among several."""

    number: int
    world: int
    device: torch.device
    tell: Callable[[str, Any], None]
    """Sends the parent a kind of message and what belongs to it; does nothing on ranks other than 0."""


def run_ranks(world: int, work: Callable[..., None], arguments: tuple[Any, ...], hear: Callable[[str, Any], None]) -> None:
    """Runs ``work(rank, *arguments)`` on ``world`` processes; ``hear(kind, message)`` gets what rank 0 tells.

    Raises:
        RuntimeError: a rank failed, with its traceback; or none said anything for ten minutes.
    """
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= world
    context = mp.get_context("spawn")
    messages = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        processes = [
            context.Process(target=_work, args=(number, world, on_gpu, store, work, arguments, messages), daemon=True)
            for number in range(world)
        ]
        for process in processes:
            process.start()
        try:
            _listen(world, messages, hear)
        finally:
            for process in processes:
                process.join(5)
                process.kill()


def _listen(world: int, messages: Any, hear: Callable[[str, Any], None]) -> None:
    done = 0
    while done < world:
        try:
            kind, message = messages.get(timeout=_PATIENCE)
        except Exception:
            raise RuntimeError(f"no rank said anything for {_PATIENCE:.0f} s") from None
        if kind == "failed":
            raise RuntimeError(message)
        if kind == "done":
            done += 1
        else:
            hear(kind, message)


def _work(
    number: int, world: int, on_gpu: bool, store: str, work: Callable[..., None], arguments: tuple[Any, ...], messages: Any
) -> None:
    device = torch.device("cuda", number) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)

    def tell(kind: str, message: Any) -> None:
        if number == 0:
            messages.put((kind, message))

    try:
        dist.init_process_group("nccl" if on_gpu else "gloo", init_method=store, rank=number, world_size=world)
        work(Rank(number, world, device, tell), *arguments)
    except BaseException as error:
        messages.put(("failed", f"rank {number}: {brief(error)}\n{traceback.format_exc()}"))
    else:
        messages.put(("done", None))
    messages.close()
    messages.join_thread()


def measure_together(calls: dict[str, Call], repeats: int, rank: Rank) -> dict[str, Timing]:
    """Times every call on all ranks at once, with a cold L2; a repetition takes as long as on the slowest rank."""
    on_gpu = rank.device.type == "cuda"
    runs = {name: capture(call) if on_gpu else (call, False) for name, call in calls.items()}
    flush = torch.empty(FLUSH_BYTES if on_gpu else 1, dtype=torch.int8, device=rank.device)
    start_line = torch.zeros(1, device=rank.device)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, (run, _captured) in runs.items():
            flush.zero_()
            dist.all_reduce(start_line)  # all start when the last has come
            times[name].append(time_once(run) if on_gpu else _time(run))
    slowest = torch.tensor(list(times.values()), device=rank.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return {name: summary(values, runs[name][1]) for name, values in zip(times, slowest.tolist(), strict=True)}


def _time(run: Call) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6
