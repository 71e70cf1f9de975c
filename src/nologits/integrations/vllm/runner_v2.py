"""Model Runner V2: ``sample`` makes the logits and samples from them, so one hook does it all.

A batch whose rows are all taken makes no logits. If some are not, vLLM samples all rows, and the rows that are taken then get
their own tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..plans import Entry, Plan
from .heads import Call, NoLogits, Recorder, capturing
from .plugin import COUNTERS, is_paused
from .session import Logprobs, Session, Step, grammar_by_row, logprobs_of, merge, session_of

_BUILT_IN = ("LogitBiasState", "PenaltiesState", "BadWordsState")


def install() -> None:
    """Hooks the runner's and the sampler's class, once a process.

    Raises:
        ImportError: the runner cannot be imported, as without Triton.
        AttributeError: a method that is needed is not there.
    """
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    if getattr(GPUModelRunner, "_nologits_hooked", False):
        return
    stock_sample, stock_add = GPUModelRunner.sample, Sampler.add_request

    @functools.wraps(stock_sample)
    def sample(self: Any, hidden_states: Tensor, input_batch: Any, grammar_output: Any) -> Any:
        stock = functools.partial(stock_sample, self, hidden_states, input_batch, grammar_output)
        if is_paused():
            return stock()
        return _due(self).sample(hidden_states, input_batch, grammar_output, stock)

    # vLLM 0.26 passes the prompt's length between the two.
    @functools.wraps(stock_add)
    def add_request(self: Any, req_idx: int, *given: Any) -> None:
        vars(self).setdefault("_nologits_params", {})[req_idx] = given[-1]
        self._nologits_added = _added(self) + 1
        stock_add(self, req_idx, *given)

    GPUModelRunner.sample, Sampler.add_request = sample, add_request
    GPUModelRunner._nologits_hooked = True


def _added(sampler: Any) -> int:
    """How many requests were given to the sampler so far."""
    count: int = vars(sampler).get("_nologits_added", 0)
    return count


class _Steady(NamedTuple):
    """What stays from step to step while the same requests are in the same slots: none was ``added`` since.

    ``slots`` and ``prompts`` are numpy ``[B]``: each row's slot, and the length of its prompt. ``one`` and ``none`` are ``[B]``
    on the device: the tokens that a row gets and loses at a step where no prompt is read.
    """

    added: int
    slots: Any
    prompts: Any
    plan: Plan
    one: Tensor
    none: Tensor


class _Due:
    """A runner with its session, and the rows of the requests in its slots."""

    def __init__(self, runner: Any, session: Session) -> None:
        self.runner, self.session = runner, session
        self._slots: dict[int, tuple[Any, Entry]] = {}
        self._steady: _Steady | None = None

    def sample(self, hidden_states: Tensor, batch: Any, grammar_output: Any, stock: Callable[[], Any]) -> Any:
        """The step's draw: ours, vLLM's (``stock``), or both."""
        session, count = self.session, batch.num_reqs
        if session.site is None:
            session.refused(count)
            return stock()
        try:
            steady = self._plan(batch)
        except Exception:
            COUNTERS.failed(count)
            return stock()
        plan = steady.plan
        if plan.batch is None:
            output = stock()
        elif plan.whole:
            try:
                step = self._whole_step(steady, hidden_states, batch)
                drawn = session.draw(step, grammar_by_row(grammar_output, batch.req_ids))
                output = self._output(drawn.tokens, logprobs_of(drawn), batch, steady)
            except Exception as error:
                session.draw_failed(error, count)
                return stock()
        else:
            recorder = Recorder(make_logits=True)
            with capturing(recorder):
                output = stock()
            try:
                step = Step(plan, _only(recorder.calls, count), _positions(batch, steady))
                output = _merged(output, plan, session.draw(step, grammar_by_row(grammar_output, batch.req_ids)))
            except Exception as error:
                session.draw_failed(error, len(plan.taken), plan.reasons)
                return output
        COUNTERS.planned(len(plan.taken), plan.reasons)
        return output

    def _plan(self, batch: Any) -> _Steady:
        """Who draws the rows of this step: as at the last one, if that had the same requests in the same order.

        Nothing is looked up by row then: a slot has the request that was last added to it.
        """
        added, slots, steady = _added(self.runner.sampler), batch.idx_mapping_np, self._steady
        if steady is None or steady.added != added or not np.array_equal(steady.slots, slots):
            plan = self.session.plan([self._entry(slot) for slot in slots.tolist()])
            one = batch.seq_lens.new_ones(batch.num_reqs)
            prompts = self.runner.req_states.prompt_len.np[slots]
            steady = self._steady = _Steady(added, slots.copy(), prompts, plan, one, torch.zeros_like(one))
        return steady

    def _entry(self, slot: int) -> Entry:
        params = self.runner.sampler._nologits_params[slot]
        known = self._slots.get(slot)
        if known is None or known[0] is not params:
            known = self._slots[slot] = (params, self.session.entry(params))
        return known[1]

    def _whole_step(self, steady: _Steady, hidden_states: Tensor, batch: Any) -> Step:
        recorder = Recorder(make_logits=False)
        with capturing(recorder):
            made = self.runner.model.compute_logits(self._last_states(hidden_states, batch))
        if not isinstance(made, NoLogits):
            raise RuntimeError("the model made logits in spite of the capture")
        return Step(steady.plan, _only(recorder.calls, batch.num_reqs), _positions(batch, steady))

    def _last_states(self, hidden_states: Tensor, batch: Any) -> Tensor:
        """The hidden state of each row's last token. Where each row has one token they are there already, in order."""
        if batch.num_tokens == batch.num_reqs and getattr(self.runner, "pcp_manager", None) is None:
            return hidden_states[: batch.num_reqs]
        states: Tensor = hidden_states[batch.logits_indices]
        return states

    def _output(self, tokens: Tensor, logprobs: Logprobs | None, batch: Any, steady: _Steady) -> tuple[Any, Tensor, Tensor]:
        from vllm.v1.outputs import LogprobsTensors
        from vllm.v1.worker.gpu.sample.output import SamplerOutput

        # A row whose prompt goes on in the next chunk gets no token.
        reading = batch.is_prefilling_np[: batch.num_reqs].any()
        num_sampled, num_rejected = self._counts(batch) if reading else (steady.one, steady.none)
        output = SamplerOutput(
            sampled_token_ids=tokens.to(torch.int64)[:, None],
            logprobs_tensors=None if logprobs is None else LogprobsTensors(*logprobs),
            num_nans=None,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )
        return output, num_sampled, num_rejected

    def _counts(self, batch: Any) -> tuple[Tensor, Tensor]:
        """The tokens that each row gets and loses, by vLLM's kernel."""
        from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected

        counts: tuple[Tensor, Tensor] = get_num_sampled_and_rejected(
            batch.seq_lens.new_ones(batch.num_reqs),
            batch.seq_lens,
            batch.cu_num_logits,
            batch.idx_mapping,
            self.runner.req_states.prefill_len.gpu,
        )
        return counts


def _positions(batch: Any, steady: _Steady) -> Any:
    """Tokens that each row has generated: what it has after this step's forward pass, without the prompt."""
    return (batch.seq_lens_cpu_upper_bound[: batch.num_reqs].numpy() - steady.prompts).clip(min=0)


def _only(calls: list[Call], count: int) -> Call:
    if len(calls) != 1 or len(calls[0].hidden) != count:
        raise RuntimeError(f"{len(calls)} calls of the logits layer for {count} requests")
    return calls[0]


def _due(runner: Any) -> _Due:
    due: _Due | None = vars(runner).get("_nologits")
    if due is None:
        due = runner._nologits = _Due(runner, session_of(runner, _obstacle))
    return due


def _obstacle(runner: Any) -> str:
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    sampler = runner.sampler
    if type(sampler) is not Sampler:
        return f"a sampler of its own ({type(sampler).__name__})"
    # vLLM 0.26 has none of these three.
    if getattr(runner, "batch_sharder", None) is not None:
        return "sampling is split over ranks"
    if getattr(sampler, "return_sampling_mask", False):
        return "the sampling mask is asked for"
    processors = getattr(sampler, "logits_processors", ())
    others = [type(one).__name__ for one in processors if type(one).__name__ not in _BUILT_IN]
    return f"custom logits processors ({', '.join(others)})" if others else ""


def _merged(output: Any, plan: Plan, drawn: Any) -> Any:
    """vLLM's output with our rows in it."""
    from vllm.v1.outputs import LogprobsTensors

    assert plan.places is not None
    sampled, num_sampled, num_rejected = output
    stock = None if sampled.logprobs_tensors is None else Logprobs(*sampled.logprobs_tensors[:3])
    merged = merge(stock, drawn, plan.places, len(sampled.sampled_token_ids))
    sampled.logprobs_tensors = None if merged is None else LogprobsTensors(*merged)
    tokens = sampled.sampled_token_ids
    sampled.sampled_token_ids = tokens.index_copy(0, plan.places, drawn.tokens.to(tokens.dtype)[:, None])
    return sampled, num_sampled, num_rejected
