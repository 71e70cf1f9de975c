"""Model Runner V1: logits are made at the end of ``execute_model``, and sampled in ``sample_tokens``.

A batch whose rows are all taken makes no logits. If some are not, logits are made and vLLM samples all rows, since its logits
processors know rows by their place in the batch; the rows that are taken then get their own tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..plans import Entry, Plan
from .heads import Call, NoLogits, capturing
from .plugin import COUNTERS, is_paused
from .session import Logprobs, Session, Step, grammar_by_row, logprobs_of, merge, session_of

_BUILT_IN = ("MinPLogitsProcessor", "LogitBiasLogitsProcessor", "MinTokensLogitsProcessor")


def install() -> None:
    """Hooks the runner's class, once a process.

    Raises:
        AttributeError: a method that is needed is not there.
    """
    from vllm.v1.worker import gpu_model_runner as module

    runner = module.GPUModelRunner
    if getattr(runner, "_nologits_hooked", False):
        return
    execute, sample, step = runner.execute_model, runner._sample, runner.sample_tokens
    apply_grammar = module.apply_grammar_bitmask

    @functools.wraps(execute)
    def execute_model(self: Any, scheduler_output: Any, *arguments: Any, **keywords: Any) -> Any:
        due = _due(self)
        due.begin(scheduler_output)
        if is_paused() or due.session.site is None:
            return execute(self, scheduler_output, *arguments, **keywords)
        with capturing(functools.partial(due.open, self)):
            return execute(self, scheduler_output, *arguments, **keywords)

    @functools.wraps(step)
    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        _due(self).grammar = grammar_output
        return step(self, grammar_output)

    @functools.wraps(sample)
    def _sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        due = _due(self)

        def stock(made: Any) -> Any:
            return sample(self, made, spec_decode_metadata)

        def remake(call: Call) -> Tensor:
            made = call.logits()
            if due.grammar is not None:
                apply_grammar(due.scheduled, due.grammar, self.input_batch, made)
            return made

        return due.sample(self, logits, stock, remake)

    def apply_grammar_bitmask(scheduler_output: Any, grammar_output: Any, input_batch: Any, logits: Any) -> None:
        if not isinstance(logits, NoLogits):
            apply_grammar(scheduler_output, grammar_output, input_batch, logits)

    runner.execute_model, runner._sample, runner.sample_tokens = execute_model, _sample, sample_tokens
    module.apply_grammar_bitmask = apply_grammar_bitmask
    runner._nologits_hooked = True


class _Due:
    """A runner's session, and what a step leaves between its forward pass and its draw."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.scheduled: Any = None
        self.grammar: Any = None
        self.step: Step | None = None
        self._ids: list[str] = []
        self._plan: Plan | None = None

    def begin(self, scheduled: Any) -> None:
        """Before the forward pass of a step; also of one that is not ours."""
        self.scheduled, self.grammar, self.step = scheduled, None, None
        if scheduled.scheduled_new_reqs:  # one of them may have the name of one that is known
            self._plan = None

    def open(self, runner: Any, call: Call) -> bool:
        """Plans the step at the call of the logits layer. Returns whether logits are to be made."""
        batch = runner.input_batch
        try:
            requests = runner.requests
            # No request is looked up while the batch has the same ones in the same order.
            plan = None if batch.req_ids != self._ids else self._plan
            if plan is None:
                plan = self.session.plan([self._entry(requests[req_id]) for req_id in batch.req_ids])
                self._ids, self._plan = list(batch.req_ids), plan
            if self.step is not None or len(call.hidden) != batch.num_reqs:
                raise RuntimeError(f"{len(call.hidden)} hidden states for {batch.num_reqs} requests, or more than one call")
        except Exception:
            self.step = None
            COUNTERS.failed(batch.num_reqs)
            return True
        count = batch.num_reqs
        generated = batch.num_tokens_no_spec[:count] - batch.num_prompt_tokens[:count]
        self.step = Step(plan, call, generated)
        return not plan.whole

    def _entry(self, request: Any) -> Entry:
        """The row of a request, worked out once: it stays on the request's own record, and goes with it."""
        known = getattr(request, "_nologits", None)
        if known is None or known[0] is not request.sampling_params:
            known = request._nologits = (request.sampling_params, self.session.entry(request.sampling_params))
        entry: Entry = known[1]
        return entry

    def sample(self, runner: Any, logits: Any, stock: Callable[[Any], Any], remake: Callable[[Call], Tensor]) -> Any:
        """The step's draw: ours, vLLM's (``stock``), or both."""
        step, self.step = self.step, None
        if step is None:
            if self.session.site is None and not is_paused():
                self.session.refused(runner.input_batch.num_reqs)
            return stock(logits)
        output = None if isinstance(logits, NoLogits) else stock(logits)
        if step.plan.batch is None:
            COUNTERS.planned(len(step.plan.taken), step.plan.reasons)
            return output
        try:
            drawn = self.session.draw(step, grammar_by_row(self.grammar, runner.input_batch.req_ids))
            output = _output(drawn.tokens, logprobs_of(drawn)) if output is None else _merged(output, step.plan, drawn)
        except Exception as error:
            self.session.draw_failed(error, len(step.plan.taken), step.plan.reasons)
            return stock(remake(step.call)) if output is None else output
        COUNTERS.planned(len(step.plan.taken), step.plan.reasons)
        return output


def _due(runner: Any) -> _Due:
    due: _Due | None = vars(runner).get("_nologits")
    if due is None:
        due = runner._nologits = _Due(session_of(runner, _obstacle))
    return due


def _obstacle(runner: Any) -> str:
    from vllm.v1.sample.sampler import Sampler

    if type(runner.sampler) is not Sampler:
        return f"a sampler of its own ({type(runner.sampler).__name__})"
    others = [type(one).__name__ for one in runner.input_batch.logitsprocs.all if type(one).__name__ not in _BUILT_IN]
    return f"custom logits processors ({', '.join(others)})" if others else ""


def _output(tokens: Tensor, logprobs: Logprobs | None) -> Any:
    from vllm.v1.outputs import LogprobsTensors, SamplerOutput

    return SamplerOutput(
        sampled_token_ids=tokens.to(torch.int32)[:, None],
        logprobs_tensors=None if logprobs is None else LogprobsTensors(*logprobs),
    )


def _merged(output: Any, plan: Plan, drawn: Any) -> Any:
    """vLLM's output with our rows in it."""
    if plan.places is None:
        return _output(drawn.tokens, logprobs_of(drawn))
    tokens = output.sampled_token_ids
    stock = None if output.logprobs_tensors is None else Logprobs(*output.logprobs_tensors[:3])
    merged = merge(stock, drawn, plan.places, len(tokens))
    tokens = tokens.index_copy(0, plan.places, drawn.tokens.to(tokens.dtype)[:, None])
    return _output(tokens[:, 0], merged)
