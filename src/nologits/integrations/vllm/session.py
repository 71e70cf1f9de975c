"""What both model runners share: one session a runner, with its head, its requests' rows and the draw of a step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..drawing import Drawn, draw
from ..eligibility import Reasons, obstacle
from ..plans import Entry, Plan, Planner
from ..rows import Keys, make_row
from . import ranks, requests
from .heads import Call, Site
from .plugin import COUNTERS

_logger = logging.getLogger("vllm.nologits")


class Step(NamedTuple):
    """A step between the forward pass and the draw. ``positions``: numpy ``[B]``, tokens each row has generated so far."""

    plan: Plan
    call: Call
    positions: Any


class Session:
    """A model runner's draws.

    Args:
        runner: the model runner.
        obstacle: why nothing of it can be taken, as far as its own module knows; empty if something can.
    """

    def __init__(self, runner: Any, obstacle: str) -> None:
        self.device: torch.device = runner.device
        self.logprobs_mode: str = runner.model_config.logprobs_mode
        config = runner.vllm_config
        self._keys = Keys(config.model_config.seed or 0, config.parallel_config.data_parallel_rank)
        self._planner = Planner(self.device)
        self.site: Site | None = None
        self.reason = obstacle or _reason(lambda: _config_obstacle(config, self.device))
        # Ranks that share a model take its requests together or not at all.
        agree = ranks.agree if config.parallel_config.tensor_parallel_size > 1 else str
        self.reason = agree(self.reason)
        if not self.reason:
            # All ranks are here now, as they have to be where the model makes its logits.
            self.reason = agree(_reason(lambda: self._find_site(runner)))
        if self.reason:
            self.site = None
            _logger.warning("nologits: inactive because %s", self.reason)
        else:
            _logger.info("nologits: draws from hidden states with %r", self.site)

    def _find_site(self, runner: Any) -> str:
        config = runner.model_config
        self.site = Site(runner.get_model(), config.get_hidden_size(), runner.dtype, self.device)
        return ""

    def entry(self, params: Any) -> Entry:
        """A request's row, or the reason why vLLM draws it."""
        if self.site is None:
            return self.reason
        request = requests.read(params)
        reason = obstacle(request, self.site.vocab_size, self.logprobs_mode)
        return reason or make_row(request, self.site.vocab_size, self._keys)

    def plan(self, entries: list[Entry]) -> Plan:
        """Who draws the rows of this step."""
        assert self.site is not None
        return self._planner.plan(entries, self.site.vocab_size)

    def refused(self, rows: int) -> None:
        """Counts a step of which nothing can be taken."""
        COUNTERS.step(0, {self.reason: rows})

    def draw_failed(self, error: Exception, rows: int, reasons: Reasons = ()) -> None:
        """As :meth:`Counters.failed`, for a draw that raised ``error``.

        Raises:
            Exception: ``error`` itself, where ranks share the head and it may be this rank's alone. The others then wait in an
                exchange, and vLLM's way of doing the step is another one: it could hang, or mix up the two. What the library
                refuses (ValueError), it refuses on every rank.
        """
        if self.site is not None and self.site.split and not isinstance(error, ValueError):
            raise error
        COUNTERS.failed(rows, reasons)

    def draw(self, step: Step, grammar: dict[int, Any] | None) -> Drawn:
        """Draws the rows that are taken. ``grammar``: bitmasks by row of the whole batch."""
        plan, hidden = step.plan, step.call.hidden
        assert self.site is not None
        assert plan.batch is not None
        positions = np.asarray(step.positions)
        if plan.places is not None:
            hidden, positions = hidden.index_select(0, plan.places), positions[plan.taken]
            if grammar:
                grammar = {place: grammar[row] for place, row in enumerate(plan.taken.tolist()) if row in grammar}
        return draw(self.site.head(step.call), hidden, plan.batch, positions, grammar, self.logprobs_mode)


def session_of(runner: Any, obstacle: Callable[[Any], str]) -> Session:
    """The session of a runner at its first step. ``obstacle`` is its module's own; if that fails nothing is taken."""
    return Session(runner, _reason(lambda: obstacle(runner)))


def _reason(question: Callable[[], str]) -> str:
    """Why something cannot be taken, which may also be that it cannot be found out; empty if it can."""
    try:
        return question()
    except ValueError as refusal:
        return str(refusal)
    except Exception as error:
        return f"of {type(error).__name__}: {error}"


def grammar_by_row(grammar_output: Any, req_ids: Sequence[str]) -> dict[int, Any]:
    """The scheduler's bitmasks by row of the batch: they come in an order of their own, one a request."""
    if grammar_output is None:
        return {}
    rows = {req_id: row for row, req_id in enumerate(req_ids)}
    masks = zip(grammar_output.structured_output_request_ids, grammar_output.grammar_bitmask, strict=True)
    return {rows[req_id]: mask for req_id, mask in masks if req_id in rows}


class Logprobs(NamedTuple):
    """``ids`` int32 and ``logprobs`` fp32 ``[B, W]``, ``ranks`` int64 ``[B]``."""

    ids: Tensor
    logprobs: Tensor
    ranks: Tensor


def logprobs_of(drawn: Drawn) -> Logprobs | None:
    """A draw's log-probabilities as vLLM passes them on."""
    if drawn.ids is None:
        return None
    assert drawn.logprobs is not None
    assert drawn.ranks is not None
    return Logprobs(drawn.ids.to(torch.int32), drawn.logprobs, drawn.ranks)


def merge(stock: Logprobs | None, drawn: Drawn, index: Tensor, batch: int) -> Logprobs | None:
    """vLLM's log-probabilities with ours in the rows ``index``; each request reads as many columns as it asked for."""
    ours = logprobs_of(drawn)
    if ours is None:
        return stock
    if stock is None:
        stock = Logprobs(ours.ids.new_zeros(batch, 1), ours.logprobs.new_zeros(batch, 1), ours.ranks.new_zeros(batch))
    missing = max(ours.ids.shape[1] - stock.ids.shape[1], 0)
    ids = torch.nn.functional.pad(stock.ids, (0, missing))
    logprobs = torch.nn.functional.pad(stock.logprobs, (0, missing), value=float("-inf"))
    ids[index, : ours.ids.shape[1]] = ours.ids.to(ids.dtype)
    logprobs[index, : ours.ids.shape[1]] = ours.logprobs
    return Logprobs(ids, logprobs, stock.ranks.index_copy(0, index, ours.ranks.to(stock.ranks.dtype)))


def _config_obstacle(config: Any, device: torch.device) -> str:
    import vllm.envs as envs

    parallel = config.parallel_config
    if parallel.tensor_parallel_size > 1 and (reason := ranks.device_obstacle(device)):
        return reason
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism"
    if config.speculative_config is not None:
        return "speculative decoding"
    if config.lora_config is not None:
        return "LoRA"
    if config.model_config.runner_type != "generate":
        return "the model does not generate"
    if getattr(config, "watermark_config", None) is not None:
        return "watermarking"
    if envs.VLLM_COMPUTE_NANS_IN_LOGITS:
        return "VLLM_COMPUTE_NANS_IN_LOGITS looks at logits"
    return ""
