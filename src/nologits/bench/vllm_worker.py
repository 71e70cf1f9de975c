"""What the suite ``vllm`` does inside vLLM's worker, often a process of its own: it sets who draws, and times the steps.

vLLM imports this module when it makes a worker, by the name that its option ``worker_extension_cls`` gets, and adds the
methods of :class:`Extension` to it. Whoever has the engine calls them with ``collective_rpc``.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import nologits as nl

from ..integrations import drawing
from ..integrations.vllm import counters, paused, register, reset_counters, session, status
from ..testing import compare_tokens
from .vllm_engine import FLOOR, OURS, STOCK
from .vllm_model import offer_random_weights

register()  # as vLLM does where nologits is installed; this may be a tree that is not
offer_random_weights()


Step = tuple[float, int, int, float]
"""When a step began, in seconds, its requests and its tokens, and for how many seconds the host was at it."""


class Drawn(NamedTuple):
    """A draw of the plugin as it happened."""

    head: nl.LMHead
    hidden: Tensor
    params: nl.SamplingParams
    tokens: Tensor


class Extension:
    """Methods of a worker. Their results are plain: they may go to another process."""

    model_runner: Any

    def bench_about(self) -> str:
        """What vLLM chose, in a line.

        Raises:
            RuntimeError: the plugin is not active.
        """
        if not status().active:
            raise RuntimeError(f"the plugin must be active, got: {status().reason}")
        config = self.model_runner.vllm_config
        runner = "V2" if config.use_v2_model_runner else "V1"
        graphs = getattr(config.compilation_config.cudagraph_mode, "name", "none")
        scheduling = "asynchronous" if config.scheduler_config.async_scheduling else "synchronous"
        return (
            f"Model Runner {runner}, {_filters(self.model_runner.sampler)} filters, {scheduling} scheduling, "
            f"compilation {config.compilation_config.mode.name}, CUDA graphs {graphs}"
        )

    def bench_begin(self, who: str, keep: bool) -> None:
        """Until ``bench_end`` ``who`` of :data:`DRAWERS` draws, each step leaves its time, and the last draw if asked to."""
        self._bench = ExitStack()
        self._bench_steps: list[Step] = []
        self._bench_kept: list[Drawn] = []
        self._bench_pauses: list[float] = []
        self._bench.enter_context(DRAWERS[who]())
        if keep:
            self._bench.enter_context(_drawing(_keeping(self._bench_kept)))
        self._bench.enter_context(_stamped(self.model_runner, self._bench_steps))
        reset_counters()
        gc.collect()  # what the generation before left, whoever drew it
        self._bench.enter_context(_collections(self._bench_pauses))

    def bench_end(self) -> dict[str, Any]:
        """``steps``: each a :data:`Step`; ``gc``: the seconds of Python's garbage collections; ``counters``: the plugin's."""
        self._bench.close()
        return {"steps": self._bench_steps, "gc": sum(self._bench_pauses), "counters": counters()}

    def bench_check(self, position: int) -> float | None:
        """The standard deviation of the logits behind the draw that stayed, checked; ``None`` if the plugin drew nothing."""
        return check(self._bench_kept.pop(), position) if self._bench_kept else None


def check(drawn: Drawn, position: int) -> float:
    """The standard deviation of the logits behind a draw whose tokens are the reference's.

    Raises:
        RuntimeError: they are not, or a row is not at ``position``, or the hidden states are no model's: not finite, or the
            same for every request.
    """
    hidden, spec = drawn.hidden.float(), drawn.head.spec
    if not bool(hidden.isfinite().all()) or (len(hidden) > 1 and bool((hidden == hidden[:1]).all())):
        raise RuntimeError("nothing is measured: hidden states are not finite, or all the same")
    if not bool((torch.as_tensor(drawn.params.position) == position).all()):
        raise RuntimeError(f"nothing is measured: a token was not drawn at its position, {position}")
    try:
        compare_tokens(drawn.tokens, drawn.hidden, drawn.head, drawn.params)
    except AssertionError as error:
        raise RuntimeError(f"nothing is measured ({error})") from error
    return float((hidden[:8] @ spec.weight[: spec.vocab_size].float().T).std())


# ---- who draws


def _drawing(draw: Callable[..., Any]) -> AbstractContextManager[Any]:
    """While it is open the plugin draws with ``draw``."""
    return mock.patch.object(session, "draw", draw)


def _headless() -> AbstractContextManager[Any]:
    """Every token is 0, and no head is read: the floor."""

    def draw(head: Any, hidden: Tensor, *rest: Any) -> drawing.Drawn:
        return drawing.Drawn(hidden.new_zeros(len(hidden), dtype=torch.int64))

    return _drawing(draw)


def _keeping(kept: list[Drawn]) -> Callable[..., Any]:
    """The plugin's draw, whose last call is left in ``kept``."""

    def draw(head: Any, hidden: Tensor, batch: Any, positions: Any, grammar: Any, logprobs_mode: str) -> drawing.Drawn:
        drawn = drawing.draw(head, hidden, batch, positions, grammar, logprobs_mode)
        kept[:] = [Drawn(head, hidden.clone(), batch.params(positions, grammar), drawn.tokens)]
        return drawn

    return draw


DRAWERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {FLOOR: _headless, OURS: nullcontext, STOCK: paused}
"""Nobody, the plugin, or vLLM as if the plugin were not there."""


# ---- vLLM's parts


@contextlib.contextmanager
def _stamped(runner: Any, steps: list[Step]) -> Iterator[None]:
    """Notes each step: its forward pass, and the sampling that vLLM asks for afterwards."""
    execute, sample = runner.execute_model, runner.sample_tokens

    def executed(scheduled: Any, *rest: Any, **named: Any) -> Any:
        begin, tokens = time.perf_counter(), scheduled.num_scheduled_tokens
        done = execute(scheduled, *rest, **named)
        steps.append((begin, len(tokens), scheduled.total_num_scheduled_tokens, time.perf_counter() - begin))
        return done

    def sampled(*given: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        done = sample(*given, **named)
        if steps:
            start, requests, tokens, seconds = steps[-1]
            steps[-1] = (start, requests, tokens, seconds + time.perf_counter() - begin)
        return done

    runner.execute_model, runner.sample_tokens = executed, sampled
    try:
        yield
    finally:
        del runner.execute_model, runner.sample_tokens  # the methods are the class's


@contextlib.contextmanager
def _collections(pauses: list[float]) -> Iterator[None]:
    """Notes how many seconds each of this process's garbage collections takes."""
    begun = [0.0]

    def noted(phase: str, about: dict[str, int]) -> None:
        if phase == "start":
            begun[0] = time.perf_counter()
        else:
            pauses.append(time.perf_counter() - begun[0])

    gc.callbacks.append(noted)
    try:
        yield
    finally:
        gc.callbacks.remove(noted)


def _filters(sampler: Any) -> str:
    """Whose top-k and top-p vLLM runs where both are on and nothing forbids it."""
    on_v1 = getattr(getattr(sampler, "topk_topp_sampler", None), "forward", None)
    by_flashinfer = getattr(sampler, "use_flashinfer", getattr(on_v1, "__name__", "") == "forward_cuda")
    return "FlashInfer's" if by_flashinfer else "vLLM's own"
