"""vLLM's offline engine at a real model's shape, and the time of its decode steps by who draws.

The engine runs in this process, where the plugin is switched between two generations: one engine serves both sides.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import nologits as nl

from ..testing import compare_tokens
from .decoder import Shape
from .modes import Mode
from .vllm_model import load_format, write_config

NEW_TOKENS = 128
"""Of each request."""

_SETTLING = 8
"""Steps before the clock starts: the prompts' own, and those until the host runs ahead of the device."""

_PREFILL_TOKENS = 8_192
"""vLLM's budget of a step. 256 prompts that are cached but for their last block fit into one."""

_MEMORY_SHARE = 0.4
"""Of a GPU's memory: the 8B model and the cache of 256 sequences fit into that much of an H200 (141 GB)."""

FLOOR, OURS, STOCK = "decoder", "nologits", "vllm"


class Decoded(NamedTuple):
    """One generation: microseconds per output token of its steady steps, and the plugin's counters over all its steps."""

    us: float
    counters: dict[str, Any]


class Drawn(NamedTuple):
    """A draw of the plugin as it happened."""

    head: nl.LMHead
    hidden: Tensor
    params: nl.SamplingParams
    tokens: Tensor


class Engine:
    """An engine with a random model.

    Args:
        shape: of the model.
        batches: how many requests decode together, of every size to come; CUDA graphs are captured for these alone.
        context: the mean number of tokens of a sequence while it decodes.
        compiled: with torch.compile, as vLLM does it. Without it the decode step is still one CUDA graph, and starts sooner.

    Raises:
        RuntimeError: the plugin is not active.
    """

    def __init__(self, shape: Shape, batches: list[int], context: int, compiled: bool = True) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the plugin is switched in this process
        import vllm

        from ..integrations.vllm import register, status

        register()  # as vLLM does where nologits is installed; this may be a tree that is not
        self.shape, self.prompt_tokens = shape, context - NEW_TOKENS // 2
        on_gpu = torch.cuda.is_available()
        graphs: dict[str, Any] = {"cudagraph_capture_sizes": sorted(batches)}
        if not compiled:
            graphs |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        with tempfile.TemporaryDirectory() as folder:
            write_config(shape, context + NEW_TOKENS, folder)
            self._llm = vllm.LLM(
                folder,
                load_format=load_format(),
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
        if not status().active:
            raise RuntimeError(f"the plugin must be active, got: {status().reason}")
        (self._runner,) = self._llm.collective_rpc(_runner_of)

    def about(self) -> str:
        """What vLLM chose, in a line."""
        config = self._runner.vllm_config
        runner = "V2" if config.use_v2_model_runner else "V1"
        graphs = getattr(config.compilation_config.cudagraph_mode, "name", "none")
        scheduling = "asynchronous" if config.scheduler_config.async_scheduling else "synchronous"
        return (
            f"Model Runner {runner}, {_filters(self._runner.sampler)} filters, {scheduling} scheduling, "
            f"compilation {config.compilation_config.mode.name}, CUDA graphs {graphs}"
        )

    def decode(self, batch: int, mode: Mode, who: str) -> Decoded:
        """Generates ``NEW_TOKENS`` for ``batch`` requests, drawn by ``who``: one of :data:`DRAWERS`.

        Raises:
            RuntimeError: the requests did not decode in step, so that a step's time is no token's.
        """
        from ..integrations.vllm import counters, reset_counters

        stamps: list[float] = []
        reset_counters()
        with DRAWERS[who](), _stamped(self._llm.llm_engine, stamps):
            outputs = self._llm.generate(self._prompts(batch), _parameters(mode), use_tqdm=False)
        lengths = {len(one.token_ids) for output in outputs for one in output.outputs}
        # Up to two steps more where vLLM schedules ahead.
        if lengths != {NEW_TOKENS} or len(stamps) > NEW_TOKENS + 2:
            raise RuntimeError(f"{batch} requests took {len(stamps)} steps for {sorted(lengths)} tokens each")
        steady = stamps[_SETTLING:]
        return Decoded((steady[-1] - steady[0]) / (len(steady) - 1) * 1e6, counters())

    def warm_up(self, batch: int, mode: Mode) -> Drawn | None:
        """Reads the prompts into the cache, where all later generations find them, and returns the last draw of the plugin."""
        kept: list[Drawn] = []
        with _drawing(_keeping(kept)):
            self._llm.generate(self._prompts(batch), _parameters(mode), use_tqdm=False)
        return kept[-1] if kept else None

    def close(self) -> None:
        """Lets go of the engine and of its memory."""
        import gc

        self._llm.llm_engine.engine_core.shutdown()
        del self._llm, self._runner
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _prompts(self, batch: int) -> list[Any]:
        """No two begin alike: vLLM attends once to a start that all share."""
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.shape.vocab, (batch, self.prompt_tokens), generator=generator)
        tokens[:, 0] = torch.arange(batch)
        return [{"prompt_token_ids": row} for row in tokens.tolist()]


def check(drawn: Drawn) -> float:
    """The standard deviation of the logits behind a generation's last draw, whose tokens are the reference's.

    Raises:
        RuntimeError: they are not, or the noise is not that of the last position, or the hidden states are no model's: not
            finite, or the same for every request.
    """
    hidden, spec = drawn.hidden.float(), drawn.head.spec
    if not bool(hidden.isfinite().all()) or (len(hidden) > 1 and bool((hidden == hidden[:1]).all())):
        raise RuntimeError("nothing is measured: hidden states are not finite, or all the same")
    if not bool((torch.as_tensor(drawn.params.position) == NEW_TOKENS - 1).all()):
        raise RuntimeError("nothing is measured: the last token was not drawn at its position")
    try:
        compare_tokens(drawn.tokens, drawn.hidden, drawn.head, drawn.params)
    except AssertionError as error:
        raise RuntimeError(f"nothing is measured ({error})") from error
    return float((hidden[:8] @ spec.weight[: spec.vocab_size].float().T).std())


# ---- who draws


def _drawing(draw: Callable[..., Any]) -> AbstractContextManager[Any]:
    """While it is open the plugin draws with ``draw``."""
    from ..integrations.vllm import session

    return mock.patch.object(session, "draw", draw)


def _headless() -> AbstractContextManager[Any]:
    """Every token is 0, and no head is read: the floor."""
    from ..integrations import drawing

    def draw(head: Any, hidden: Tensor, *rest: Any) -> Any:
        return drawing.Drawn(hidden.new_zeros(len(hidden), dtype=torch.int64))

    return _drawing(draw)


def _keeping(kept: list[Drawn]) -> Callable[..., Any]:
    """The plugin's draw, whose last call is left in ``kept``."""
    from ..integrations import drawing

    def draw(head: Any, hidden: Tensor, batch: Any, positions: Any, grammar: Any, logprobs_mode: str) -> Any:
        drawn = drawing.draw(head, hidden, batch, positions, grammar, logprobs_mode)
        kept[:] = [Drawn(head, hidden.clone(), batch.params(positions, grammar), drawn.tokens)]
        return drawn

    return draw


def _stock() -> AbstractContextManager[Any]:
    from ..integrations.vllm import paused

    return paused()


DRAWERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {FLOOR: _headless, OURS: nullcontext, STOCK: _stock}
"""Who draws: nobody, the plugin, or vLLM as if the plugin were not there."""


# ---- vLLM's parts


def _parameters(mode: Mode) -> Any:
    """No seed of a request's own: with one, vLLM does without FlashInfer's sampler."""
    from vllm import SamplingParams

    asked = {name: value for name, value in mode.request._asdict().items() if value is not None}
    return SamplingParams(temperature=mode.temperature, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, **asked)


@contextlib.contextmanager
def _stamped(engine: Any, stamps: list[float]) -> Iterator[None]:
    """Appends the time at which each step ends."""
    step = engine.step

    def stamped() -> Any:
        outputs = step()
        stamps.append(time.perf_counter())
        return outputs

    engine.step = stamped
    try:
        yield
    finally:
        del engine.step  # the method is the class's


def _runner_of(worker: Any) -> Any:
    return worker.model_runner


def _filters(sampler: Any) -> str:
    """Whose top-k and top-p vLLM runs where both are on and nothing forbids it."""
    on_v1 = getattr(getattr(sampler, "topk_topp_sampler", None), "forward", None)
    by_flashinfer = getattr(sampler, "use_flashinfer", getattr(on_v1, "__name__", "") == "forward_cuda")
    return "FlashInfer's" if by_flashinfer else "vLLM's own"
