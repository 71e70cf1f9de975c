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

READ_BYTES = 2 << 30
"""As much as the larger heads: a kernel's start and end weigh no more than in their cells."""


class Timing(NamedTuple):
    """Microseconds over the repetitions of one provider."""

    us: float
    p20_us: float
    p80_us: float
    captured: bool


class Ceilings(NamedTuple):
    """What this GPU reaches: reading memory, in GB/s, and cuBLAS's best bf16 matmul, in TFLOP/s."""

    read_gbps: float
    matmul_tflops: float


def measure(providers: dict[str, Callable[[], object]], repeats: int = 40) -> dict[str, Timing]:
    """Times every provider ``repeats`` times, one after the other in turn, each with a cold L2."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    runs = {name: capture(call) for name, call in providers.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, (run, _captured) in runs.items():
            flush.zero_()
            times[name].append(time_once(run))
    return {name: summary(values, runs[name][1]) for name, values in times.items()}


def time_once(run: Callable[[], object]) -> float:
    """GPU time of one call, us."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop) * 1e3)


def measure_ceilings(repeats: int = 20) -> Ceilings:
    """Both ceilings, by the same clock as the cells.

    Bandwidth is the best of two reductions, cuBLAS's product with one vector and a copy (which counts its bytes twice): no
    one kernel is the fastest reader on every GPU. The matmul is 8,192 cubed on random numbers, because zeros draw less power
    and let the clock rise.
    """
    data = torch.empty(READ_BYTES // 2, dtype=torch.bfloat16, device="cuda").normal_()
    side = 8_192
    words, matrix, target = data.view(torch.int32), data.view(-1, side), torch.empty_like(data)
    reads: dict[str, Callable[[], object]] = {
        "sum": lambda: data.sum(dtype=torch.float32),
        "max": lambda: words.amax(),
        "vector": lambda: matrix @ matrix[0],
        "copy": lambda: target.copy_(data),
    }
    times = measure(reads, repeats)
    bandwidth = max(READ_BYTES * (2 if name == "copy" else 1) / timing.us for name, timing in times.items()) / 1e3
    square = matrix[:side]
    product = measure({"matmul": lambda: square @ square}, repeats)["matmul"]
    return Ceilings(round(bandwidth, 1), round(2 * side**3 / product.us / 1e6, 1))


def extra_bytes(call: Callable[[], object]) -> int:
    """Peak allocation of one call above what was allocated before it (results included)."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def summary(values: list[float], captured: bool) -> Timing:
    """Median, 20th and 80th percentile."""
    ranked = sorted(values)
    at = [ranked[min(int(len(ranked) * share), len(ranked) - 1)] for share in (0.5, 0.2, 0.8)]
    return Timing(at[0], at[1], at[2], captured)


def capture(call: Callable[[], object]) -> tuple[Callable[[], object], bool]:
    """The call as a CUDA graph, and whether it could be captured; if not, the call itself."""
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
