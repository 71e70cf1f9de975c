"""Model Runner V2: ``sample`` makes the logits and samples from them, so one hook does it all.

A batch whose rows are all taken makes no logits. If some are not, vLLM samples all rows, and the rows that are taken then get
their own tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

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
        stock_add(self, req_idx, *given)

    GPUModelRunner.sample, Sampler.add_request = sample, add_request
    GPUModelRunner._nologits_hooked = True


class _Due:
    """A runner with its session, and the rows of the requests in its slots."""

    def __init__(self, runner: Any, session: Session) -> None:
        self.runner, self.session = runner, session
        self._slots: dict[int, tuple[Any, Entry]] = {}

    def sample(self, hidden_states: Tensor, batch: Any, grammar_output: Any, stock: Callable[[], Any]) -> Any:
        """The step's draw: ours, vLLM's (``stock``), or both."""
        session, count = self.session, batch.num_reqs
        if session.site is None:
            session.refused(count)
            return stock()
        try:
            plan = session.plan([self._entry(slot) for slot in batch.idx_mapping_np.tolist()])
        except Exception:
            COUNTERS.failed(count)
            return stock()
        if plan.batch is None:
            output = stock()
        elif plan.whole:
            try:
                drawn = session.draw(
                    self._whole_step(plan, hidden_states, batch), grammar_by_row(grammar_output, batch.req_ids)
                )
                output = self._output(drawn.tokens, logprobs_of(drawn), batch)
            except Exception as error:
                session.draw_failed(error, count)
                return stock()
        else:
            recorder = Recorder(make_logits=True)
            with capturing(recorder):
                output = stock()
            try:
                step = Step(plan, _only(recorder.calls, count), self._positions(batch))
                output = _merged(output, plan, session.draw(step, grammar_by_row(grammar_output, batch.req_ids)))
            except Exception as error:
                session.draw_failed(error, len(plan.taken), plan.reasons)
                return output
        COUNTERS.planned(len(plan.taken), plan.reasons)
        return output

    def _entry(self, slot: int) -> Entry:
        params = self.runner.sampler._nologits_params[slot]
        known = self._slots.get(slot)
        if known is None or known[0] is not params:
            known = self._slots[slot] = (params, self.session.entry(params))
        return known[1]

    def _whole_step(self, plan: Plan, hidden_states: Tensor, batch: Any) -> Step:
        recorder = Recorder(make_logits=False)
        with capturing(recorder):
            made = self.runner.model.compute_logits(hidden_states[batch.logits_indices])
        if not isinstance(made, NoLogits):
            raise RuntimeError("the model made logits in spite of the capture")
        return Step(plan, _only(recorder.calls, batch.num_reqs), self._positions(batch))

    def _positions(self, batch: Any) -> Any:
        """Tokens that each row has generated: what it has after this step's forward pass, without the prompt."""
        lengths = batch.seq_lens_cpu_upper_bound[: batch.num_reqs].numpy()
        return (lengths - self.runner.req_states.prompt_len.np[batch.idx_mapping_np]).clip(min=0)

    def _output(self, tokens: Tensor, logprobs: Logprobs | None, batch: Any) -> tuple[Any, Tensor, Tensor]:
        from vllm.v1.outputs import LogprobsTensors
        from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
        from vllm.v1.worker.gpu.sample.output import SamplerOutput

        num_sampled, num_rejected = get_num_sampled_and_rejected(
            batch.seq_lens.new_ones(batch.num_reqs),
            batch.seq_lens,
            batch.cu_num_logits,
            batch.idx_mapping,
            self.runner.req_states.prefill_len.gpu,
        )
        output = SamplerOutput(
            sampled_token_ids=tokens.to(torch.int64)[:, None],
            logprobs_tensors=None if logprobs is None else LogprobsTensors(*logprobs),
            num_nans=None,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )
        return output, num_sampled, num_rejected


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
