"""The tensor parallel ranks of an engine: their parts of the head, and how they come to the same decisions.

A draw from a split head is an exchange: a rank that stays away, or comes with another batch, leaves the others waiting. All
come alike, because vLLM sends each step to every rank of the group, all of them run the head and the sampler, and only then is
one rank's result taken. So every rank has the same requests in the same order, and whatever a step does follows from these:
who draws which row (:mod:`..plans`), the keys of the noise (:class:`..rows.Keys`, one a request, in the order of their coming),
and the passes over the head that log-probabilities and filters take. Within a draw, ranks branch on numbers that all have
exchanged (:mod:`nologits.sharded`). What a rank alone could see, its own part of the model, is settled by :func:`agree`.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, device

from ...head import LMHead


def device_obstacle(on: device) -> str:
    """Why a split head cannot be drawn from on a device; empty if it can."""
    if on.type == "cpu":
        return ""
    return "the head is split over tensor parallel ranks, and a sharded draw has no kernels on a GPU yet"


def agree(reason: str) -> str:
    """The first reason that a rank of the tensor parallel group has, in the order of ranks; empty if none has one.

    An exchange: every rank has to call it.
    """
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    told = [""] * group.world_size
    dist.all_gather_object(told, reason, group=group.cpu_group)
    return next(filter(None, told), "")


def is_split(lm_head: Any) -> bool:
    """Each rank has a part of the head's rows."""
    return bool(getattr(lm_head, "tp_size", 1) > 1)


def layout_obstacle(lm_head: Any, vocab_size: int) -> str:
    """Why the parts of a split head cannot be drawn from; every rank comes to the same answer.

    vLLM joins the ranks' logits in their order and cuts off what lies beyond the vocabulary. Ids follow from that alone, also
    where the padding (to a multiple of 64, at the end of the last parts) takes up more than one part.
    """
    from vllm.distributed import get_tp_group

    rows, count = len(lm_head.weight), get_tp_group().world_size
    if lm_head.tp_size != count:
        return f"the head is split over {lm_head.tp_size} ranks, and the model over {count}"
    if vocab_size <= rows * (count - 1):
        return (
            f"the head has {vocab_size} tokens in parts of {rows}, so that the last of {count} tensor parallel ranks has none"
        )
    return ""


def make_part(weight: Tensor, bias: Tensor | None, scale: float, softcap: float | None, vocab_size: int) -> LMHead:
    """The whole head of ``vocab_size`` tokens, of which this rank has ``weight`` and ``bias``."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    start = group.rank_in_group * len(weight)
    # Nothing is compared at each draw: ranks that got one step from one scheduler ask alike.
    return LMHead(weight, bias, scale, softcap, vocab_size, group=group.device_group, vocab_start=start, validate=False)
