"""One session a model runner: its requests' rows, who draws them at a step, and the draw."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch
from torch import Tensor

from ..eligibility import obstacle
from ..plans import Entry, Plan, Planner
from ..rows import Keys, make_row
from . import requests
from .heads import LateLogits
from .plugin import COUNTERS

_logger = logging.getLogger("sglang.nologits")


class Session:
    """A model runner's draws.

    Args:
        vocab_size: V of its head.
        device: where it draws.
        keys: noise keys for requests without a seed.
        reason: why nothing of it can be taken; empty if something can.
    """

    def __init__(self, vocab_size: int, device: torch.device, keys: Keys, reason: str) -> None:
        self.vocab_size, self.device, self.reason = vocab_size, device, reason
        self._keys = keys
        self._planner = Planner(device)
        if reason:
            _logger.warning("nologits: inactive because %s", reason)

    def entry(self, request: Any) -> Entry:
        """A request's row, or the reason why SGLang draws it; worked out once, it stays on the request and goes with it."""
        known = vars(request).get("_nologits")
        if known is None or known[0] is not request.sampling_params:
            asked = requests.read(request, self.vocab_size)
            made: Entry = obstacle(asked, self.vocab_size) or make_row(asked, self.vocab_size, self._keys)
            known = request._nologits = (request.sampling_params, made)
        entry: Entry = known[1]
        return entry

    def plan(self, entries: list[Entry]) -> Plan:
        """Who draws the rows of this step."""
        return self._planner.plan(entries, self.vocab_size)

    def draw(self, plan: Plan, late: LateLogits, positions: Any, mask: Tensor | None) -> Tensor:
        """Draws the rows that are taken.

        Args:
            plan: of this step.
            late: the hidden states of the whole batch.
            positions: int64 numpy ``[B]``: tokens that each row of the whole batch has generated so far.
            mask: int32 ``[B, ceil(V / 32)]`` on the device: the grammars' allowed tokens.

        Returns:
            int64 ``[N]``, always ids of the vocabulary.
        """
        assert plan.batch is not None
        head = late.site.head()
        hidden = late.hidden
        if plan.places is not None:
            hidden, positions = hidden.index_select(0, plan.places), positions[plan.taken]
            mask = None if mask is None else mask.index_select(0, plan.places)
        params = plan.batch.params(positions)
        if mask is not None:
            # No parameter of SGLang's lists allowed tokens, so there is no other mask.
            params = dataclasses.replace(params, allowed_tokens=mask)
        # The dtype that SGLang multiplies in. A row without a finite logit has no token: it gets an id that exists.
        return head.sample(hidden.to(head.spec.weight.dtype), params).tokens.clamp(min=0)


def refused(rows: int, reason: str) -> None:
    """Counts a step of which nothing can be taken."""
    COUNTERS.planned(0, {reason: rows}, "batches")
