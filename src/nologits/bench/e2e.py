"""The suite ``e2e``: a whole decode step, from a token to the next one, with one sampler or another behind the decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import nologits as nl

from .. import screened
from ..dispatch import hopper_obstacle
from ..params import make_rows as make_rows_of
from ..sources import HiddenSource
from ..testing import compare_tokens
from .cases import make_params
from .decoder import SHAPES, Decoder, Shape
from .modes import Mode, Request
from .peer_draws import draw_as_vllm, flashinfer_draw, vllm_mask
from .peers import SkipError, flashinfer_sampling
from .suite import Call, Cell, Plan, Row, Suite, Variant, place_rows
from .timing import Ceilings, Timing

CONTEXT = 512
"""Tokens of each sequence in the cache."""

E2E_MODES = {
    "t06": Mode(temperature=0.6),
    "t06k20p95": Mode(Request(top_k=20, top_p=0.95), temperature=0.6),
}
"""Temperature 0.6 alone, and with Qwen3's own filters."""

DEFAULT_E2E_BATCHES = (1, 8, 32, 64, 128, 256)
FLOOR, OURS, SCREENED = "decoder", "nologits", "nologits-screened"


class Inputs(NamedTuple):
    """A step's parts: ``tokens [B]`` go in, and the next take their place; ``hidden [B, D]`` is what the decoder leaves."""

    decoder: Decoder
    tokens: Tensor
    hidden: Tensor
    head: nl.LMHead
    params: nl.SamplingParams
    temperature: float

    def logits(self) -> Tensor:
        """What samplers of logits are given: fp32 ``[B, V]``, over the temperature."""
        return (self.hidden @ self.head.spec.weight.T).float() / self.temperature


def make_inputs(shape: Shape, batch: int, mode: str, device: str = "cuda", context: int = CONTEXT) -> Inputs:
    """A decoder with its head (tied to the embedding, as in the small models), and seeded rows."""
    on = torch.device(device)
    decoder = Decoder(shape, batch, context, on, torch.bfloat16)
    tokens = torch.arange(batch, device=on)
    # Logits of a trained model's spread: standard deviation 5
    weight = decoder.embedding * (5 / (shape.depth**0.5 * decoder.embedding[0].float().std().item()))
    hidden = torch.zeros(batch, shape.depth, dtype=weight.dtype, device=on)
    params = make_params(batch, E2E_MODES[mode], on)
    return Inputs(decoder, tokens, hidden, nl.LMHead(weight), params, E2E_MODES[mode].temperature)


def step(inputs: Inputs, sampler: Call | None) -> Tensor:
    """Tokens in, tokens out."""
    inputs.hidden.copy_(inputs.decoder.step(inputs.tokens))
    if sampler is not None:
        drawn = sampler()
        assert isinstance(drawn, Tensor)
        inputs.tokens.copy_(drawn.view(-1))
    return inputs.tokens


# ---- samplers: what draws from the hidden states of a step


def _nologits(inputs: Inputs, mode: str) -> Call:
    return lambda: inputs.head.sample(inputs.hidden, inputs.params).tokens


def _screened(inputs: Inputs, mode: str) -> Call:
    head = nl.LMHead(inputs.head.spec.weight, screen="int8")
    source = HiddenSource(inputs.hidden, head.spec)
    rows = make_rows_of(inputs.params, source.batch, source.vocab, source.device)
    reason = hopper_obstacle(source.device) or screened.obstacle(source, head.spec.screen, rows, 1, False, False, 0)
    if reason:
        raise SkipError(reason)
    return lambda: head.sample(inputs.hidden, inputs.params, impl="hopper").tokens


def _multinomial(inputs: Inputs, mode: str) -> Call:
    if E2E_MODES[mode].filtered:
        raise SkipError("it has no filters")
    torch.compiler.reset()  # one shape a cell: they would add up to the limit of recompilations
    draw = torch.compile(lambda logits: torch.softmax(logits, -1).multinomial(1), dynamic=False)
    return lambda: draw(inputs.logits())


def _flashinfer(inputs: Inputs, mode: str) -> Call:
    if E2E_MODES[mode].filtered:
        return flashinfer_draw(inputs.logits, inputs.params)
    sample, seeds = flashinfer_sampling().sampling_from_logits, torch.arange(len(inputs.hidden), device=inputs.hidden.device)
    return lambda: sample(inputs.logits(), seed=seeds, offset=seeds)


def _vllm(inputs: Inputs, mode: str) -> Call:
    if not E2E_MODES[mode].filtered:
        raise SkipError("it is measured with filters")
    mask = vllm_mask(inputs.params)
    return lambda: draw_as_vllm(mask(inputs.logits()))


SAMPLERS: dict[str, Callable[[Inputs, str], Call] | None] = {
    FLOOR: None, OURS: _nologits, SCREENED: _screened,
    "multinomial-compiled": _multinomial, "flashinfer": _flashinfer, "vllm-qrita": _vllm,
}  # fmt: skip


def _provider(name: str) -> Callable[[Inputs, str], Call]:
    make = SAMPLERS[name]

    def provider(inputs: Inputs, mode: str) -> Call:
        sampler = None if make is None else make(inputs, mode)
        call = partial(step, inputs, sampler)
        return Variant(sampler.name, call) if isinstance(sampler, Variant) else call

    return provider


class StepGate:
    """Our tokens of a step against the reference's, drawn from the hidden states of that step."""

    def __init__(self, inputs: Inputs, mode: str) -> None:
        self._inputs, self._mode = inputs, mode

    def check(self, name: str, tokens: Tensor) -> None:
        inputs = self._inputs
        try:
            compare_tokens(tokens, inputs.hidden, inputs.head, inputs.params)
        except AssertionError as error:
            raise RuntimeError(f"{name} ({self._mode}): nothing is measured ({error})") from error

    def observe(self, name: str, tokens: Tensor) -> None:
        """Peers draw with noise of their own."""


def cells(plan: Plan, skip: Callable[[Row], None]) -> Iterator[Cell]:
    """The cells of a plan."""
    for shape in (shape for shape in SHAPES if shape.name in plan.cases):
        for batch in plan.batches:
            for mode in plan.modes:
                yield Cell(shape.name, shape.vocab, shape.depth, batch, mode, partial(make_inputs, shape, batch, mode))


def make_rows(cell: Cell, timings: dict[str, Timing], memory: dict[str, int], ceilings: Ceilings) -> list[Row]:
    """The rows of one cell: times are those of a whole step."""
    return [
        row | {"ratio_to_decoder": ratio, "speedup": speedup, "captured": timings[row["provider"]].captured}
        for row, ratio, speedup in place_rows(SUITE, cell, timings, memory)
    ]


SUITE = Suite("e2e", {name: _provider(name) for name in SAMPLERS}, (OURS, SCREENED), FLOOR, cells, StepGate, make_rows)
