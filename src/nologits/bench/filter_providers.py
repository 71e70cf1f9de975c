"""Who is measured in the filter suite. Some mask, some only draw: each returns what its users use, and nothing more.

Our mask and our draw have their own names; of the peers, FlashInfer draws, and the others mask or select.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import nologits as nl

from ..dispatch import hopper_obstacle
from .filter_cases import FilterInputs
from .peer_draws import flashinfer_draw, vllm_mask
from .peers import SkipError
from .suite import Call

FilterProvider = Callable[[FilterInputs, str], Call]


def amax(inputs: FilterInputs, mode: str) -> Call:
    """``torch.amax`` over the same logits: one read of them, the floor."""
    return lambda: torch.amax(inputs.logits, -1)


def nologits_mask(inputs: FilterInputs, mode: str) -> Call:
    """``filter_logits``, into a new tensor."""
    return lambda: nl.filter_logits(inputs.logits, top_k=inputs.top_k, top_p=inputs.top_p, min_p=inputs.min_p)


def nologits_draw(inputs: FilterInputs, mode: str) -> Call:
    """``sample_logits`` with the filters, every row seeded."""
    params = inputs.params
    return lambda: nl.sample_logits(inputs.logits, params)


def share_read_again(make: Callable[[], FilterInputs]) -> float | None:
    """The share of rows that the Hopper kernel reads again to find what they keep; ``None`` where it does not run."""
    inputs = make()
    logits = inputs.logits
    if hopper_obstacle(logits.device):
        return None
    from ..kernels.filters_sm90 import launch_mask  # needs cuda.bindings

    again = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    launch_mask(logits, inputs.rows, torch.empty_like(logits), float("-inf"), again=again)
    return float(again.float().mean())


def torch_sort(inputs: FilterInputs, mode: str) -> Call:
    """The mask in eager torch, as vLLM makes it without Triton: min-p by softmax, an ascending sort, top-k by the value at rank
    k, top-p by the mass below, and back to the ids' order. Min-p alone sorts nothing."""
    return lambda: _sorted_mask(inputs.logits.float(), inputs.top_k, inputs.top_p, inputs.min_p)


def torch_topk(inputs: FilterInputs, mode: str) -> Call:
    """``torch.topk``, with one k for all rows, as it has to be; with a p, the prefix of the k. It makes no mask, but the logits
    and ids of what is kept: ``[B, k]``, dropped ones at -inf."""
    width = inputs.request.top_k
    if width is None:
        raise SkipError("it needs a k")
    return lambda: _prefix_of_topk(inputs.logits, width, inputs.top_p)


def vllm_qrita(inputs: FilterInputs, mode: str) -> Call:
    """vLLM's Triton kernels. They mask in place and take fp32, so a copy (from bf16 too) is made and timed with them."""
    mask = vllm_mask(inputs.params)
    return lambda: mask(inputs.logits.to(torch.float32, copy=True))


def flashinfer(inputs: FilterInputs, mode: str) -> Call:
    """The fastest of FlashInfer's draws that apply; a k and a p for each row."""
    return flashinfer_draw(inputs.logits.float, inputs.params)


FLOOR = "amax"
FILTER_OURS = ("nologits", "nologits-draw")
"""Ours: they pass the gate before anything of their cell is timed."""

FILTER_PROVIDERS: dict[str, FilterProvider] = {
    FLOOR: amax,
    "nologits": nologits_mask,
    "nologits-draw": nologits_draw,
    "torch-sort": torch_sort,
    "torch-topk": torch_topk,
    "vllm-qrita": vllm_qrita,
    "flashinfer": flashinfer,
}


def _sorted_mask(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None) -> Tensor:
    if min_p is not None:
        share = logits.softmax(-1)
        logits = logits.masked_fill(share < min_p[:, None] * share.amax(-1, keepdim=True), float("-inf"))
    if top_k is None and top_p is None:
        return logits
    ranked, order = logits.sort(-1)
    if top_k is not None:
        smallest = ranked.gather(1, ranked.shape[1] - top_k.long()[:, None])
        ranked.masked_fill_(ranked < smallest, float("-inf"))
    if top_p is not None:
        drop = ranked.softmax(-1).cumsum(-1) <= 1 - top_p[:, None]
        drop[:, -1] = False
        ranked.masked_fill_(drop, float("-inf"))
    return torch.empty_like(ranked).scatter_(1, order, ranked)


def _prefix_of_topk(logits: Tensor, width: int, top_p: Tensor | None) -> tuple[Tensor, Tensor]:
    values, ids = torch.topk(logits, width)
    if top_p is not None:
        share = values.float().softmax(-1)
        values = values.masked_fill(share.cumsum(-1) - share >= top_p[:, None], float("-inf"))
    return values, ids
