"""What is measured: LM heads of real models by V and D, batch sizes, and the inputs made for them.

V is the number of rows of the model's head as published (``vocab_size`` of its configuration, padding included), D its
hidden size. Heads of one shape are one case; the other models' names are aliases of it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

import nologits as nl

from ..testing import smollm2_states
from .modes import FLAT_TEMPERATURE, MODES, Mode


class Case(NamedTuple):
    """An LM head by its shape, and the models that have it; ``real``: with a model's weights and hidden states."""

    name: str
    vocab: int
    depth: int
    models: str
    real: bool = False


CASES = (
    Case("small", 151_936, 4_096, "Qwen3-8B"),
    Case("large", 128_256, 8_192, "Llama-3-70B"),
    Case("llama-3-8b", 128_256, 4_096, "Llama-3-8B"),
    Case("qwen3-0.6b", 151_936, 1_024, "Qwen3-0.6B"),
    Case("qwen3-1.7b", 151_936, 2_048, "Qwen3-1.7B"),
    Case("qwen3-4b", 151_936, 2_560, "Qwen3-4B"),
    Case("qwen3-14b", 151_936, 5_120, "Qwen3-14B, Qwen3-32B"),
    # The multimodal sizes, 4B and up, have 64 more rows, for images.
    Case("gemma-3-270m", 262_144, 640, "Gemma-3-270M"),
    Case("gemma-3-1b", 262_144, 1_152, "Gemma-3-1B"),
    Case("gemma-3-4b", 262_208, 2_560, "Gemma-3-4B"),
    Case("gemma-3-12b", 262_208, 3_840, "Gemma-3-12B"),
    Case("gemma-3-27b", 262_208, 5_376, "Gemma-3-27B"),
    Case("gpt-oss-120b", 201_088, 2_880, "gpt-oss-20b, gpt-oss-120b"),
    Case("deepseek-v3", 129_280, 7_168, "DeepSeek-V3"),
    Case("kimi-k2", 163_840, 7_168, "Kimi-K2"),
    Case("smollm2", 49_152, 576, "SmolLM2-135M", real=True),
)

ALIASES = {"qwen3-8b": "small", "llama-3-70b": "large", "qwen3-32b": "qwen3-14b", "gpt-oss-20b": "gpt-oss-120b"}
"""Other names of cases."""

ALL_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
DEFAULT_CASES = ("small", "large")
DEFAULT_BATCHES = (1, 16, 64, 128, 256)


class Inputs(NamedTuple):
    """One cell's tensors: bf16, random ones with logits of about the spread a trained model has (standard deviation 5)."""

    hidden: Tensor
    weight: Tensor
    head: nl.LMHead
    params: nl.SamplingParams


def make_weight(case: Case, device: str = "cuda") -> Tensor:
    """Weights of a case, bf16 ``[V, D]``: random ones, or the model's.

    Raises:
        UnavailableError: the model is not here.
    """
    if case.real:
        return smollm2_states(device)[1]
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.empty(case.vocab, case.depth, dtype=torch.bfloat16, device=device)
    return weight.normal_(0, 5 / case.depth**0.5, generator=generator)


def make_inputs(weight: Tensor, batch: int, mode: str, real: bool = False) -> Inputs:
    """Hidden states and per-row parameters for one cell: every row seeded, as an engine passes them.

    The hidden states are random ones, or the ``real`` ones of a text, which come again in a batch of more.
    """
    if real:
        states = smollm2_states(weight.device)[0]
        order = torch.randperm(len(states), generator=torch.Generator().manual_seed(batch))
        hidden = states[order[torch.arange(batch) % len(states)].to(weight.device)]
    else:
        generator = torch.Generator(weight.device).manual_seed(batch)
        hidden = torch.empty(batch, weight.shape[1], dtype=weight.dtype, device=weight.device)
        hidden.normal_(generator=generator)
    head = nl.LMHead(weight, screen=MODES[mode].screen)
    return Inputs(hidden, weight, head, make_params(batch, MODES[mode], weight.device))


def make_params(batch: int, mode: Mode, device: torch.device) -> nl.SamplingParams:
    """The parameters of a cell's rows. Flat ones are spread evenly over the batch."""
    rows = torch.arange(batch, device=device)
    flat = math.ceil(mode.flat_share * batch)
    temperatures = torch.full((batch,), mode.temperature, device=device)
    temperatures[rows * flat % batch < flat] = FLAT_TEMPERATURE
    # As uint64 every seed is one: no row can ask for fresh noise, so torch's generator is left alone, which saves its kernels.
    noise = {"seed": rows.view(torch.uint64), "position": rows}
    return nl.SamplingParams(temperatures if mode.temperature else 0.0, **mode.request.tensors(batch, device), **noise)


def traffic_bytes(vocab: int, depth: int, batch: int) -> int:
    """What any sampler has to read: the head and the hidden states, once, in bf16."""
    return 2 * depth * (vocab + batch)


def operations(vocab: int, depth: int, batch: int) -> int:
    """Floating-point operations of the LM head's matmul."""
    return 2 * vocab * depth * batch
