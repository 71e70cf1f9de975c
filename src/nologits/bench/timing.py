"""GPU time of short calls: cold L2, providers interleaved, medians with their spread.

Each provider is captured in a CUDA graph (or called eagerly where it cannot be), so that what is timed is the GPU's work and
not Python. Before every repetition a buffer larger than the L2 cache is overwritten; a provider that reads the weights
pays for reading them, as in a model whose other layers have passed through the cache since.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

FLUSH_BYTES = 256 << 20
"""Several times the L2 cache of an H200 (60 MB)."""


class Timing(NamedTuple):
    """Microseconds over the repetitions of one provider."""

    us: float
    p20_us: float
    p80_us: float
    captured: bool


def measure(providers: dict[str, Callable[[], object]], repeats: int = 40) -> dict[str, Timing]:
    """Times every provider ``repeats`` times, one after the other in turn, each with a cold L2."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    runs = {name: _capture(call) for name, call in providers.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, (run, _captured) in runs.items():
            flush.zero_()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop) * 1e3)
    return {name: _summary(values, runs[name][1]) for name, values in times.items()}


def extra_bytes(call: Callable[[], object]) -> int:
    """Peak allocation of one call above what was allocated before it (results included)."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _capture(call: Callable[[], object]) -> tuple[Callable[[], object], bool]:
    for _ in range(3):  # compile, autotune, settle the allocator
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except Exception:  # whatever a peer does that cannot be captured: time it as it is
        torch.cuda.synchronize()
        return call, False
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay, True


def _summary(values: list[float], captured: bool) -> Timing:
    ranked = sorted(values)
    at = [ranked[min(int(len(ranked) * share), len(ranked) - 1)] for share in (0.5, 0.2, 0.8)]
    return Timing(at[0], at[1], at[2], captured)
