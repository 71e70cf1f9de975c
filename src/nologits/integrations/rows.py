"""From an engine's requests to the tensors of a draw. What a request fixes is worked out once, on the host."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..dispatch import resolve
from ..params import RowParams, SamplingParams, make_rows
from .eligibility import Request

_WORD = 2**64


@dataclass(frozen=True, eq=False)
class Row:
    """A request, ready to become a row of a batch.

    Attributes:
        request: what it asks for.
        key: the 64-bit seed of its noise: its own, or one drawn for it by :class:`Keys`.
        allowed: int32 ``[ceil(V / 32)]`` bitmask on the host, if it may only draw some tokens.
    """

    request: Request
    key: int
    allowed: Any = None


class Keys:
    """Noise keys for requests without a seed: a sequence fixed by the engine's seed and the replica, one key a request."""

    def __init__(self, seed: int, replica: int = 0) -> None:
        self._source = random.Random(f"nologits {seed} {replica}")

    def next(self) -> int:
        return self._source.randrange(_WORD - 1)


def make_row(request: Request, vocab_size: int, keys: Keys) -> Row:
    """Works out what stays the same at every step of ``request``."""
    key = keys.next() if request.seed is None else request.seed % _WORD
    allowed = None
    if request.allowed_tokens is not None:
        ids = np.asarray(request.allowed_tokens, dtype=np.int64)
        words = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
        np.bitwise_or.at(words, ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))
        allowed = words.view(np.int32)
    return Row(request, key, allowed)


class Positions:
    """The positions of a batch's rows on a device. Where all are one more than at the step before, the device adds it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: Any = None
        self._tensor = torch.empty(0, dtype=torch.int64)

    def at(self, positions: Any) -> Tensor:
        """int64 ``[B]`` on the device, of integers ``[B]`` on the host. No tensor that it gave is written to later."""
        positions = np.array(positions, dtype=np.int64)
        if self._known is None or not np.array_equal(positions, self._known):
            goes_on = self._known is not None and np.array_equal(positions, self._known + 1)
            self._tensor = self._tensor + 1 if goes_on else to_device(positions, self._device)
            self._known = positions
        return self._tensor


class Batch:
    """The rows of a batch as tensors on a device; only positions and grammars change from step to step.

    ``impl`` is the implementation that draws them.
    """

    def __init__(self, rows: Sequence[Row], vocab_size: int, device: torch.device) -> None:
        self.rows = tuple(rows)
        self.vocab_size, self.device, self.impl = vocab_size, device, resolve("auto", device)
        self._positions = Positions(device)
        self._drawn: RowParams | None = None
        self._told: dict[bool, RowParams] = {}
        self._words = -(-vocab_size // 32)
        requests = [row.request for row in rows]
        greedy = [request.temperature == 0 for request in requests]
        self.greedy = to_device(np.array(greedy), device)
        self.num_top = max((request.logprobs for request in requests if request.logprobs is not None), default=None)
        # A greedy row's filters keep its token whatever they are; off, they cost nothing.
        filters = [Request() if off else request for off, request in zip(greedy, requests, strict=True)]
        self.temperature = self._column([request.temperature for request in requests], np.float32)
        self.top_k = self._column([min(max(request.top_k, 0), vocab_size) for request in filters], np.int32)
        # fp64, as a Python number is read: a request's kept set is the same alone and in any batch.
        self.top_p = self._column([request.top_p for request in filters], np.float64)
        self.min_p = self._column([request.min_p for request in filters], np.float64)
        self.seed = to_device(np.array([row.key for row in rows], dtype=np.uint64), device)
        self.bias = self._bias([request.logit_bias or {} for request in requests])
        self._allowed = self._masks()
        self._on_device = None if self._allowed is None else to_device(self._allowed, device)

    def params(self, positions: Any, grammar: dict[int, Any] | None = None) -> SamplingParams:
        """The parameters of a step.

        Args:
            positions: int64 numpy ``[B]``: tokens generated so far by each row.
            grammar: int32 numpy bitmasks by row.
        """
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            position=self._positions.at(positions),
            logit_bias=self.bias,
            allowed_tokens=self.allowed(grammar),
        )

    def drawn(self, positions: Any, grammar: dict[int, Any] | None = None) -> RowParams:
        """What ``make_rows`` makes of :meth:`params`: checked once, for all further steps."""
        if self._drawn is None:
            self._drawn = self._made(self.params(positions), noise=True)
        rows = self._drawn._replace(position=self._positions.at(positions))
        return rows._replace(allowed=self.allowed(grammar)) if grammar else rows

    def told(self, processed: bool, grammar: dict[int, Any] | None = None) -> RowParams:
        """The distribution whose log-probabilities are told: the ``processed`` one, of greedy rows at temperature 1 as engines
        do, or the model's own after the grammar."""
        if processed not in self._told:
            self._told[processed] = self._made(self._told_params() if processed else SamplingParams(), noise=False)
        rows = self._told[processed]
        if not grammar:
            return rows
        return rows._replace(allowed=self.allowed(grammar) if processed else self.grammar_only(grammar))

    def _told_params(self) -> SamplingParams:
        temperature: Any = self.temperature
        if isinstance(temperature, Tensor):
            temperature = torch.where(temperature == 0, 1.0, temperature)
        elif temperature == 0:
            temperature = 1.0
        return SamplingParams(
            temperature, self.top_k, self.top_p, self.min_p, logit_bias=self.bias, allowed_tokens=self._on_device
        )

    def _made(self, params: SamplingParams, noise: bool) -> RowParams:
        return make_rows(params, len(self.rows), self.vocab_size, self.device, noise)

    def allowed(self, grammar: dict[int, Any] | None) -> Tensor | None:
        """The bitmask ``[B, ceil(V / 32)]`` of a step; ``None`` if every row may draw every token."""
        if not grammar:
            return self._on_device
        return to_device(self._with_grammar(self._allowed, grammar), self.device)

    def grammar_only(self, grammar: dict[int, Any] | None) -> Tensor | None:
        """The bitmask of the grammars alone."""
        return to_device(self._with_grammar(None, grammar), self.device) if grammar else None

    def _with_grammar(self, base: Any, grammar: dict[int, Any]) -> Any:
        masks = np.full((len(self.rows), self._words), -1, dtype=np.int32) if base is None else base.copy()
        for row, words in grammar.items():
            # A grammar that knows fewer tokens allows none of the others.
            known = min(self._words, len(words))
            masks[row, :known] &= words[:known]
            masks[row, known:] = 0
        return masks

    def _masks(self) -> Any:
        if all(row.allowed is None for row in self.rows):
            return None
        everything = np.full(self._words, -1, dtype=np.int32)
        return np.stack([everything if row.allowed is None else row.allowed for row in self.rows])

    def _column(self, values: list[Any], dtype: Any) -> Any:
        """A number if all rows share it, else a tensor ``[B]``."""
        if len(set(values)) == 1:
            return values[0]
        return to_device(np.array(values, dtype=dtype), self.device)

    def _bias(self, biases: list[Any]) -> tuple[Tensor, Tensor] | None:
        width = max(len(bias) for bias in biases)
        if not width:
            return None
        ids = np.full((len(biases), width), -1, dtype=np.int64)
        values = np.zeros((len(biases), width), dtype=np.float32)
        for row, bias in enumerate(biases):
            ids[row, : len(bias)] = list(bias.keys())
            values[row, : len(bias)] = list(bias.values())
        return to_device(ids, self.device), to_device(values, self.device)


def to_device(array: Any, device: torch.device) -> Tensor:
    """A host array on ``device``; the host does not wait for the copy."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
