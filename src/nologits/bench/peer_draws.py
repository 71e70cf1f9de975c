"""What vLLM and FlashInfer do to logits that are there when each row has filters of its own, for both suites."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import nologits as nl

from .modes import Request
from .peers import SkipError, brief, flashinfer_sampling, vllm_topk_topp
from .suite import Call, Variant
from .timing import measure

_TRIALS = 9
"""Repetitions by which the fastest of several calls is chosen; it is then measured like the others."""


def vllm_mask(params: nl.SamplingParams) -> Callable[[Tensor], Tensor]:
    """vLLM's Triton kernels, which mask fp32 logits in place.

    The buffers that they keep for further calls, up to a row for each multiprocessor, do not show as extra memory.

    Raises:
        SkipError: they are not there, or lack the filter.
    """
    if params.min_p is not None:
        raise SkipError("its kernels have no min-p")
    apply = vllm_topk_topp().apply_top_k_top_p_triton
    return lambda logits: apply(logits, params.top_k, params.top_p)


def draw_as_vllm(logits: Tensor) -> Tensor:
    """What vLLM draws of masked logits: of the shares over exponential noise the largest."""
    shares = logits.softmax(-1, dtype=torch.float32)
    return shares.div_(torch.empty_like(shares).exponential_()).argmax(-1)


def flashinfer_draw(make_logits: Callable[[], Tensor], params: nl.SamplingParams) -> Variant:
    """The fastest of FlashInfer's draws that apply, from logits or after its own or torch's softmax; a k and a p for each row.

    Its order "joint" is left out: it keeps another set, what top-k and top-p keep of the whole row each.

    Args:
        make_logits: gives the fp32 logits ``[B, V]``; part of every call, also of those the fastest is chosen from.
        params: filters, and a seed for each row, as tensors.

    Raises:
        SkipError: it is not there, or none of its calls runs.
    """
    sampling = flashinfer_sampling()
    filters = {name: value for name in Request._fields if (value := getattr(params, name)) is not None}
    assert isinstance(params.seed, Tensor)
    seed = params.seed.view(torch.int64)
    noise = {"seed": seed, "offset": seed}
    name = "_".join([*filters, "sampling_from_probs"])
    from_probs = partial(getattr(sampling, name), **filters, **noise)
    calls: dict[str, Call] = {
        f"torch.softmax, {name}": lambda: from_probs(torch.softmax(make_logits(), -1)),
        f"softmax, {name}": lambda: from_probs(sampling.softmax(make_logits())),
    }
    if "top_k" in filters:
        both = {"top_p": torch.ones(len(seed), device=seed.device)} | filters  # with a p of 1 it is top-k alone
        from_logits = partial(sampling.top_k_top_p_sampling_from_logits, **both, **noise)
        calls["top_k_top_p_sampling_from_logits"] = lambda: from_logits(make_logits())
    return fastest(calls)


def fastest(calls: dict[str, Call]) -> Variant:
    """Of the calls that run here, the fastest.

    Raises:
        SkipError: none runs.
    """
    running: dict[str, Call] = {}
    reason = "it has no call for these filters"
    for name, call in calls.items():
        try:
            call()
        except Exception as error:  # whatever its compilation or its checks run into
            reason = brief(error)
        else:
            running[name] = call
    if not running:
        raise SkipError(reason)
    times = measure(running, _TRIALS) if len(running) > 1 else {}
    name = min(running, key=lambda name: times[name].us if times else 0.0)
    return Variant(name, running[name])
