"""What is asked of every row, by name: the filters of both suites, and the modes of the head suite."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..types import LogprobsMode


class Request(NamedTuple):
    """The filters of every row; ``None`` is off."""

    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def tensors(self, batch: int, device: torch.device) -> dict[str, Tensor | None]:
        """One number a row, as an engine passes them: int32 and fp32 ``[B]``, or ``None`` where a filter is off."""

        def filled(value: float | None, dtype: torch.dtype) -> Tensor | None:
            return None if value is None else torch.full((batch,), value, dtype=dtype, device=device)

        shares = {name: filled(getattr(self, name), torch.float32) for name in ("top_p", "min_p")}
        return {"top_k": filled(self.top_k, torch.int32), **shares}


class Mode(NamedTuple):
    """What the rows of a cell of the head suite ask for. They are always seeded.

    Attributes:
        request: their filters.
        temperature: 0 is greedy.
        flat_share: the share of rows at :data:`FLAT_TEMPERATURE` instead, rounded up to whole rows.
        logprobs, top_logprobs: as :meth:`nologits.LMHead.sample` takes them.
        screen: as :class:`nologits.LMHead` takes it.
    """

    request: Request = Request()
    temperature: float = 1.0
    flat_share: float = 0.0
    logprobs: LogprobsMode = False
    top_logprobs: int = 0
    screen: Literal["int8"] | None = None

    @property
    def filtered(self) -> bool:
        """A filter is on."""
        return self.request != Request()

    @property
    def results(self) -> dict[str, Any]:
        """What a draw returns beside the token."""
        return {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs}


FLAT_TEMPERATURE = 20.0
"""Makes a row nearly flat: its nucleus is most of V, far more than there is room for candidates."""

FILTER_MODES = {
    "k50": Request(top_k=50),
    "p90": Request(top_p=0.9),
    "k50p95": Request(top_k=50, top_p=0.95),
    "minp05": Request(min_p=0.05),
}
"""The filter suite's. All at temperature 1."""

UNFILTERED = {"plain": Mode(), "logprobs": Mode(logprobs="processed"), "greedy": Mode(temperature=0.0)}
"""A draw at temperature 1, the same with each token's log-probability, and the largest logit."""

FILTERED = {name: Mode(request) for name, request in (FILTER_MODES | {"p95": Request(top_p=0.95)}).items()}
"""Draws at temperature 1 with filters."""

FALLBACKS = {
    f"fallback{percent}": Mode(Request(top_p=0.9), temperature=0.5, flat_share=percent / 100) for percent in (0, 1, 100)
}
"""So many percent of the rows, if any then at least one, are too flat for the fused filters' candidates; others are peaked."""

SCREENED = {"screened": Mode(screen="int8")}
"""The plain draw of a head with an 8-bit copy."""

MODES = UNFILTERED | FILTERED | {"top_logprobs20": Mode(logprobs="processed", top_logprobs=20)} | FALLBACKS | SCREENED
"""The head suite's."""
