"""What is measured: LM heads of real models by V and D, batch sizes, and the inputs made for them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import nologits as nl


class Case(NamedTuple):
    """An LM head by its shape."""

    name: str
    vocab: int
    depth: int
    model: str


CASES = (
    Case("small", 151_936, 4_096, "Qwen3-8B"),
    Case("large", 128_256, 8_192, "Llama-3-70B"),
    Case("qwen3-1.7b", 151_936, 2_048, "Qwen3-1.7B"),
    Case("gpt-oss-120b", 201_088, 2_880, "gpt-oss-120b"),
)

MODES = ("plain", "logprobs", "greedy")
BATCHES = (1, 16, 64, 128, 256)


class Inputs(NamedTuple):
    """One cell's tensors: bf16, with logits of about the spread a trained model has (standard deviation 5)."""

    hidden: Tensor
    weight: Tensor
    head: nl.LMHead
    params: nl.SamplingParams


def make_weight(case: Case, device: str = "cuda") -> Tensor:
    """Random weights of a case, bf16 ``[V, D]``."""
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.empty(case.vocab, case.depth, dtype=torch.bfloat16, device=device)
    return weight.normal_(0, 5 / case.depth**0.5, generator=generator)


def make_inputs(weight: Tensor, batch: int, mode: str) -> Inputs:
    """Hidden states and per-row parameters for one cell: every row seeded, as an engine passes them."""
    generator = torch.Generator(weight.device).manual_seed(batch)
    hidden = torch.empty(batch, weight.shape[1], dtype=weight.dtype, device=weight.device)
    hidden.normal_(generator=generator)
    rows = torch.arange(batch, device=weight.device)
    temperature = 0.0 if mode == "greedy" else torch.ones(batch, device=weight.device)
    return Inputs(hidden, weight, nl.LMHead(weight), nl.SamplingParams(temperature=temperature, seed=rows, position=rows))
