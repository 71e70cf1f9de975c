"""What stands in for the logits processors: it draws each row's next token from the captured hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import generation

from ...head import LMHead
from ...params import SamplingParams
from ...types import LogprobsMode
from .capture import Capture
from .processors import Plan

if TYPE_CHECKING:
    from ...types import Impl


class Watch(generation.StoppingCriteriaList):  # type: ignore[misc]
    """Stopping criteria that remember which rows have ended, as the loop does."""

    done: Tensor | None = None

    @property
    def pads(self) -> bool:
        """Whether the loop pads rows that have ended; without an end token it writes on until all have."""
        return any(hasattr(criterion, "eos_token_id") for criterion in self)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        done = super().__call__(input_ids, scores, **kwargs)
        self.done = done if self.done is None else self.done | done
        return done


class Drawn:
    """Takes the place of processed scores in the loop: their argmax is the token that was drawn."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return args[0].tokens if function is torch.argmax else NotImplemented


class Draw:
    """Stands in for the logits processors: draws each row's next token from the captured hidden states."""

    def __init__(
        self,
        head: LMHead,
        capture: Capture,
        plan: Plan,
        watch: Watch,
        seeds: Tensor | None,
        prompt: int,
        logprobs: LogprobsMode,
        impl: Impl,
    ) -> None:
        self.steps = 0
        self.logprobs: list[Tensor] = []
        self.raw_logprobs: list[Tensor] = []
        self._head, self._capture, self._plan, self._watch = head, capture, plan, watch
        self._seeds = None if seeds is None else seeds.to(head.spec.weight.device)
        self._prompt, self._mode, self._impl = prompt, logprobs, impl

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Drawn:
        plan, length = self._plan, input_ids.shape[1]
        params = SamplingParams(
            plan.temperature,
            plan.top_k,
            plan.top_p,
            plan.min_p,
            seed=self._seeds,
            position=None if self._seeds is None else length - self._prompt,
            allowed_tokens=plan.allowed(length),
        )
        # check: an invalid row has token -1, which the embedding would meet as an index error. On a GPU looking would stall it.
        on_host = self._head.spec.weight.device.type == "cpu"
        drawn = self._head.sample(self._capture.take(), params, logprobs=self._mode, impl=self._impl, check=on_host)
        self.steps += 1
        for values, kept in ((drawn.logprobs, self.logprobs), (drawn.raw_logprobs, self.raw_logprobs)):
            if values is not None:
                done = self._watch.done
                kept.append(values if done is None or not self._watch.pads else values.masked_fill(done.to(values.device), 0.0))
        return Drawn(drawn.tokens.to(input_ids.device))


def columns(steps: list[Tensor]) -> Tensor | None:
    return torch.stack(steps, dim=1) if steps else None
