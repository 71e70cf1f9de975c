"""vLLM's offline engine at a real model's shape, and the time of its decode steps by who draws.

The plugin is switched between two generations, so one engine serves both sides. Processes, scheduling and samplers are those
that vLLM chooses by itself.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from statistics import mean, median
from typing import Any, NamedTuple

import torch

from .decoder import Shape
from .modes import Mode
from .vllm_model import LOAD_FORMAT, write_config

FLOOR, OURS, STOCK = "decoder", "nologits", "vllm"

NEW_TOKENS = 128
"""Of each request."""

_SETTLING = 8
"""Steps with every request that pass before the clock starts: the host runs ahead of the device by then."""

_FEWEST_STEPS = 32
"""That a time is the mean of."""

_PREFILL_TOKENS = 8_192
"""vLLM's budget of a step. 256 prompts that are cached but for their last block fit into one."""

_MEMORY_SHARE = 0.4
"""Of a GPU's memory: the 8B model and the cache of 256 sequences fit into that much of an H200 (141 GB)."""


class Times(NamedTuple):
    """Microseconds of one generation's steady steps.

    Attributes:
        us: from one step to the next, the mean: the time of an output token.
        middle_us: the median. Where ``us`` is far above it, some steps waited.
        longest_us: the longest.
        host_us: the median of what the worker's host spends on a step, the forward pass's launch to the sampler's. Where that
            and the scheduler's work take longer than the device, the device waits.
    """

    us: float
    middle_us: float
    longest_us: float
    host_us: float


class Decoded(NamedTuple):
    """One generation: the times of its steady steps, and over all its steps the plugin's counters and the microseconds of the
    worker's garbage collections."""

    times: Times
    counters: dict[str, Any]
    gc_us: float = 0.0


class Engine:
    """An engine with a random model.

    Args:
        shape: of the model.
        batches: how many requests decode together, of every size to come; CUDA graphs are captured for these alone.
        context: the mean number of tokens of a sequence while it decodes.
        compiled: with torch.compile, as vLLM does it. Without it the decode step is still one CUDA graph, and starts sooner.

    Attributes:
        about: what vLLM chose, in a line.

    Raises:
        RuntimeError: the plugin is not active.
    """

    def __init__(self, shape: Shape, batches: Sequence[int], context: int, compiled: bool = True) -> None:
        import vllm

        self.shape, self.prompt_tokens = shape, context - NEW_TOKENS // 2
        on_gpu = torch.cuda.is_available()
        graphs: dict[str, Any] = {"cudagraph_capture_sizes": sorted(batches)}
        if not compiled:
            graphs |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        with tempfile.TemporaryDirectory() as folder:
            write_config(shape, context + NEW_TOKENS, folder)
            self._llm = vllm.LLM(
                folder,
                load_format=LOAD_FORMAT,
                worker_extension_cls=f"{__package__}.vllm_worker.Extension",
                skip_tokenizer_init=True,
                dtype="bfloat16" if on_gpu else "float32",
                max_model_len=context + NEW_TOKENS,
                max_num_seqs=max(batches),
                max_num_batched_tokens=_PREFILL_TOKENS,
                enable_prefix_caching=True,
                gpu_memory_utilization=_MEMORY_SHARE,
                seed=0,
                **({"compilation_config": graphs} if on_gpu else {"enforce_eager": True}),
            )
        apart = vllm.envs.VLLM_ENABLE_V1_MULTIPROCESSING
        self.about = f"{self._call('bench_about')}, the engine in {'a process of its own' if apart else 'this process'}"

    def decode(self, batch: int, mode: Mode, who: str) -> Decoded:
        """Generates ``NEW_TOKENS`` for ``batch`` requests, drawn by ``who``: :data:`FLOOR`, :data:`OURS` or :data:`STOCK`.

        Raises:
            RuntimeError: there were too few steps with every request to tell their time.
        """
        told = self._generate(batch, mode, who)
        return Decoded(step_times(told["steps"], batch), told["counters"], told["gc"] * 1e6)

    def warm_up(self, batch: int, mode: Mode) -> float | None:
        """Reads the prompts into the cache, where all later generations find them, and checks the plugin's last draw.

        Returns:
            The standard deviation of the logits; ``None`` if the plugin drew nothing.

        Raises:
            RuntimeError: the tokens are not the reference's, or the hidden states no model's.
        """
        self._generate(batch, mode, OURS, keep=True)
        spread: float | None = self._call("bench_check", NEW_TOKENS - 1)
        return spread

    def close(self) -> None:
        """Lets go of the engine and of its memory."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _generate(self, batch: int, mode: Mode, who: str, keep: bool = False) -> dict[str, Any]:
        gc.collect()  # what the generation before left, whoever drew it
        self._call("bench_begin", who, keep)
        self._llm.generate(self._prompts(batch), _parameters(mode), use_tqdm=False)
        told: dict[str, Any] = self._call("bench_end")
        return told

    def _call(self, name: str, *given: Any) -> Any:
        """A method of the one worker."""
        (result,) = self._llm.collective_rpc(name, args=given)
        return result

    def _prompts(self, batch: int) -> list[Any]:
        """No two begin alike: vLLM attends once to a start that all share."""
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.shape.vocab, (batch, self.prompt_tokens), generator=generator)
        tokens[:, 0] = torch.arange(batch)
        return [{"prompt_token_ids": row} for row in tokens.tolist()]


def step_times(steps: Sequence[tuple[float, int, int, float]], batch: int) -> Times:
    """The times of the steps in which all ``batch`` requests decode, without the first few.

    Args:
        steps: of each when it began, in seconds, its requests and its tokens, and for how many seconds the host was at it.
        batch: the requests.

    Raises:
        RuntimeError: there are too few such steps.
    """
    full = [requests == tokens == batch for _, requests, tokens, _ in steps]
    pairs = [pair for pair, whole in zip(pairwise(steps), pairwise(full), strict=True) if all(whole)][_SETTLING:]
    gaps = [after[0] - before[0] for before, after in pairs]
    if len(gaps) < _FEWEST_STEPS:
        raise RuntimeError(
            f"only {len(gaps)} of {len(steps)} steps had {batch} requests that decode, {_FEWEST_STEPS} are needed"
        )
    parts = (mean(gaps), median(gaps), max(gaps), median(before[3] for before, _ in pairs))
    return Times(*(part * 1e6 for part in parts))


def _parameters(mode: Mode) -> Any:
    """No seed of a request's own: with one, vLLM does without FlashInfer's sampler."""
    from vllm import SamplingParams

    asked = {name: value for name, value in mode.request._asdict().items() if value is not None}
    return SamplingParams(temperature=mode.temperature, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, **asked)
