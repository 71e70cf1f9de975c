"""Which requests an engine's plugin can take, why not the others, and counts of both. No engine is imported here.

A plugin fills a :class:`Request` from its engine's own record, asks :func:`obstacle`, and tells :class:`Counters` what happened
to the row at each step.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..params import UNSEEDED
from ..tops import MAX_TOP

ALL_TOKENS = -1
"""In ``Request.logprobs``: the log-probabilities of the whole vocabulary."""

LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
"""Of the model's own distribution (after a grammar's mask), or of the one that is sampled."""

_MAX_TEMPERATURE = 1e30
"""Well below where the noise times the temperature leaves fp32."""

_MAX_SEED = 2**64 + UNSEEDED  # as an unsigned word; -1 itself means unseeded


@dataclass(frozen=True)
class Request:
    """What a request asks of the sampler, in words that engines share.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 or -1 is off. top_p: 1 is off. min_p: 0 is off.
        seed: of this request; ``None`` if it has none.
        logit_bias: token id to what is added to its logit.
        allowed_tokens: the only ids that may be drawn; ``None`` for all.
        grammar: a bitmask of allowed tokens comes with every step.
        logprobs: how many of the most likely tokens come with their log-probabilities; 0 is the drawn token alone,
            :data:`ALL_TOKENS` every one, ``None`` nothing.
        presence_penalty, frequency_penalty, repetition_penalty: neutral at 0, 0 and 1.
        bad_words: sequences that must not be completed.
        min_tokens: the request must not stop before as many tokens.
        engine_only: a feature of the engine that works on logits, by its name; empty if there is none.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_tokens: Sequence[int] | None = None
    grammar: bool = False
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bad_words: bool = False
    min_tokens: int = 0
    engine_only: str = ""


def obstacle(request: Request, vocab_size: int, logprobs_mode: str = "raw_logprobs") -> str:
    """Why a request has to be drawn by the engine, in a few words that serve as a counter's name; empty if it can be taken."""
    if request.engine_only:
        return request.engine_only
    if request.presence_penalty or request.frequency_penalty or request.repetition_penalty != 1.0:
        return "penalties"
    if request.bad_words:
        return "bad words"
    if request.min_tokens > 0:
        return "min_tokens"
    if not request.temperature <= _MAX_TEMPERATURE:
        return "a temperature above 1e30"
    if request.seed is not None and not (-(2**63) <= request.seed < _MAX_SEED and request.seed != UNSEEDED):
        return "a seed of more than 64 bits"
    ids = [*(request.logit_bias or ()), *(request.allowed_tokens or ())]
    if any(not 0 <= token < vocab_size for token in ids):
        return "a token id outside the vocabulary"
    return _logprobs_obstacle(request, logprobs_mode)


def _logprobs_obstacle(request: Request, mode: str) -> str:
    if request.logprobs is None:
        return ""
    if mode not in LOGPROBS_MODES:
        return f"logprobs mode {mode}"
    if not 0 <= request.logprobs <= MAX_TOP:
        return f"more than {MAX_TOP} log-probabilities"
    return ""


Reasons = Iterable[str] | Mapping[str, int]
"""Why an engine draws rows: a reason for each, or how many rows have which."""


class Counters:
    """Rows by what became of them, summed over steps. Any thread may read while another counts.

    ``engine`` is whose rows they are; its name, in small letters, is the parent of the logger that hears what is new.
    """

    def __init__(self, engine: str = "engine") -> None:
        self._engine, self._logger = engine, logging.getLogger(f"{engine.lower()}.nologits")
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Starts again from zero."""
        with self._lock:
            self._steps, self._taken, self._errors = 0, 0, 0
            self._fallbacks: Counter[str] = Counter()

    def step(self, taken: int, reasons: Reasons) -> list[str]:
        """Counts one step: ``taken`` rows, and the others by their reasons. Returns the reasons that are new."""
        counted = +Counter(reasons) if reasons else Counter()
        with self._lock:
            self._steps += 1
            self._taken += taken
            new = [reason for reason in counted if reason not in self._fallbacks]
            self._fallbacks.update(counted)
            return new

    def error(self) -> None:
        """Counts a step that failed here and was done by the engine."""
        with self._lock:
            self._errors += 1

    def planned(self, taken: int, reasons: Reasons, what: str = "requests") -> None:
        """Counts a step that went as planned, as :meth:`step`, and logs the reasons that are new."""
        for reason in self.step(taken, reasons):
            self._logger.info("nologits: %s draws %s with: %s", self._engine, what, reason)

    def failed(self, rows: int, reasons: Reasons = ()) -> None:
        """Counts and logs a step whose ``rows`` failed here; to be called while its exception is handled."""
        self.error()
        self.step(0, Counter({"error in nologits": rows}) + Counter(reasons))
        self._logger.exception("nologits: a step failed and is done by %s", self._engine)

    def snapshot(self) -> dict[str, Any]:
        """``steps``; ``taken``, rows drawn from hidden states; ``fallbacks``, rows by reason; ``errors``, steps redone."""
        with self._lock:
            return {"steps": self._steps, "taken": self._taken, "fallbacks": dict(self._fallbacks), "errors": self._errors}
