"""Who is measured in the head suite. A provider turns inputs into a call to time, or says in one line why it cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .cases import Inputs
from .peers import SkipError, flashinfer_sampling, flashsampling_kernel
from .suite import Call

Provider = Callable[[Inputs, str], Call]

TOP_K, TOP_P = 50, 0.95
"""The truncation of ``flashinfer-topk-topp``."""


def nologits(impl: str) -> Provider:
    """One implementation of this library, every row seeded."""

    def provider(inputs: Inputs, mode: str) -> Call:
        logprobs = "processed" if mode == "logprobs" else False
        options: dict[str, Any] = {"impl": impl, "logprobs": logprobs}

        def call() -> object:
            return inputs.head.sample(inputs.hidden, inputs.params, **options)

        try:
            call()
        except ValueError as error:  # how a named implementation says that it does not exist, or cannot run there
            raise SkipError(str(error)) from error
        return call

    return provider


def matmul(inputs: Inputs, mode: str) -> Call:
    """The LM head's matmul alone, bf16 logits written: what every fused sampler is measured against."""
    return lambda: inputs.hidden @ inputs.weight.T


def multinomial(inputs: Inputs, mode: str) -> Call:
    """The textbook in eager torch: matmul, softmax, ``torch.multinomial`` (greedy: argmax)."""
    return lambda: _textbook(inputs.hidden, inputs.weight, mode)


def multinomial_compiled(inputs: Inputs, mode: str) -> Call:
    """The textbook through ``torch.compile``; its default mode keeps cuBLAS's matmul and fuses what follows."""
    torch.compiler.reset()  # one shape a cell: they would add up to the limit of recompilations
    compiled = torch.compile(_textbook, dynamic=False)
    return lambda: compiled(inputs.hidden, inputs.weight, mode)


def flashinfer_gumbel(inputs: Inputs, mode: str) -> Call:
    """Matmul, then FlashInfer's ``sampling_from_logits``: Gumbel-max on the logits, each row with its seed."""
    _plain_only(mode)
    sample = flashinfer_sampling().sampling_from_logits
    seeds = torch.arange(len(inputs.hidden), device=inputs.hidden.device)
    return lambda: sample(inputs.hidden @ inputs.weight.T, seed=seeds, offset=seeds)


def flashinfer_topk_topp(inputs: Inputs, mode: str) -> Call:
    """Matmul, then FlashInfer's ``top_k_top_p_sampling_from_logits`` with a k of 50 and a p of 0.95 for each row.

    It does more than the others, which draw from all tokens: it is what an engine runs when its requests truncate, and an upper
    bracket here. Per-row tensors, as engines pass them, keep it off its path for one k for all rows.
    """
    _plain_only(mode)
    sample = flashinfer_sampling().top_k_top_p_sampling_from_logits
    batch, device = len(inputs.hidden), inputs.hidden.device
    top_k = torch.full((batch,), TOP_K, dtype=torch.int32, device=device)
    top_p = torch.full((batch,), TOP_P, device=device)
    seeds = torch.arange(batch, device=device)
    return lambda: sample((inputs.hidden @ inputs.weight.T).float(), top_k, top_p, seed=seeds, offset=seeds)


def flashsampling(inputs: Inputs, mode: str) -> Call:
    """The paper's reference kernel, with one seed and one temperature for the batch (it has no others)."""
    if mode == "logprobs":
        raise SkipError("its kernel has no log-probabilities")
    kernel = flashsampling_kernel()
    temperature = torch.tensor(1.0, device=inputs.hidden.device)
    return lambda: kernel(inputs.weight, inputs.hidden, 1, temperature, 7, greedy_sampling=mode == "greedy")


MATMUL = "matmul"
OURS = {"nologits-hopper": "hopper", "nologits-triton": "triton"}
"""Providers that are implementations of this library: they pass the gate before anything of their cell is timed."""

PROVIDERS: dict[str, Provider] = {
    MATMUL: matmul,
    **{name: nologits(impl) for name, impl in OURS.items()},
    "multinomial": multinomial,
    "multinomial-compiled": multinomial_compiled,
    "flashinfer-gumbel": flashinfer_gumbel,
    "flashinfer-topk-topp": flashinfer_topk_topp,
    "flashsampling": flashsampling,
}


def _textbook(hidden: Tensor, weight: Tensor, mode: str) -> Tensor | tuple[Tensor, Tensor]:
    logits = (hidden @ weight.T).float()
    if mode == "greedy":
        return logits.argmax(-1)
    probabilities = torch.softmax(logits, -1)
    token = torch.multinomial(probabilities, 1)
    return (token, probabilities.gather(1, token).log()) if mode == "logprobs" else token


def _plain_only(mode: str) -> None:
    if mode != "plain":
        raise SkipError("measured in mode plain only")
