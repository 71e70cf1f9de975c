"""What ``generate`` was asked for, as far as a custom loop has to find out: its arguments, its seeds, what it cannot take."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GENERATION_MODES_MAPPING, GenerationMixin
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from ...params import UNSEEDED, SamplingParams
from .capture import UnsupportedError

_FRAMES = 16


def arguments_of_generate(model: Any) -> dict[str, Any]:
    """Arguments of the running ``model.generate`` call that it does not hand on to a custom loop (transformers 5.24).

    Without them a streamer would wait for ever, and a refused assisted or beam search could not be run as asked.
    """
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    for _ in range(_FRAMES):
        if frame is None:
            break
        if frame.f_code is code and frame.f_locals.get("self") is model:
            names = ("streamer", "assistant_model", "inputs_tensor", "synced_gpus")
            return {name: frame.f_locals[name] for name in names if frame.f_locals.get(name) is not None}
        frame = frame.f_back
    return {}


def is_synced(model: Any) -> bool:
    """Whether every process has to run as many forwards as the longest (sharded weights), as ``generate`` decides it."""
    sharded = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return bool(sharded and distributed and torch.distributed.get_world_size() > 1)


def check_request(model: Any, config: Any, assistant: Any, model_kwargs: dict[str, Any]) -> None:
    mode = config.get_generation_mode(assistant)
    if mode not in (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH):
        raise UnsupportedError(f"{mode.value.replace('_', ' ')} reads whole rows of logits")
    if type(model)._sample is not GenerationMixin._sample:
        raise UnsupportedError(f"{type(model).__name__} has a sampling loop of its own")
    if config.return_dict_in_generate and (config.output_scores or config.output_logits):
        raise UnsupportedError("output_scores or output_logits asks for whole rows of logits")
    compiled = getattr(model, "_compiled_call_impl", None) is not None
    compiled = compiled or hasattr(vars(model).get("forward"), "_torchdynamo_orig_callable")
    # A compiled forward would bake the swapped head in, and meet it again in calls that are not ours.
    if compiled or model._valid_auto_compile_criteria(model_kwargs, config):
        raise UnsupportedError("the model's forward is compiled (for a static cache, disable_compile=True avoids it)")


def run_stock(model: Any, input_ids: Tensor, arguments: dict[str, Any], model_kwargs: dict[str, Any]) -> Any:
    """The loop that ``generate`` would have run without ``custom_generate``."""
    mode = arguments["generation_config"].get_generation_mode(arguments.get("assistant_model"))
    name = GENERATION_MODES_MAPPING[mode]
    method = getattr(model, name, None)
    if method is None:  # it lives in a repository of its own, which transformers downloads
        raise ValueError(f"custom_generate must be {name!r} for {mode.value.replace('_', ' ')}, got nologits' generate")
    known = inspect.signature(method).parameters
    return method(input_ids, **{key: value for key, value in arguments.items() if key in known}, **model_kwargs)


def row_seeds(seed: int | Sequence[int] | Tensor | None, batch: int, copies: int) -> Tensor | None:
    """int64 ``[B]`` seeds of the returned sequences; ``B`` is a multiple of ``copies``, the sequences of one prompt."""
    if seed is None:
        return None
    prompts = batch // copies
    if isinstance(seed, Tensor):
        if seed.dtype not in (torch.int32, torch.int64) or seed.dim() > 1:
            raise ValueError(f"seed must be an int64 tensor of shape [{prompts}], got {seed.dtype} {list(seed.shape)}")
        seeds = seed.to(torch.int64).reshape(-1)
        given = prompts if seed.dim() == 0 else seeds.shape[0]
        seeds = seeds.expand(given)
    else:
        words = list(seed) if isinstance(seed, Sequence) else [seed] * prompts
        for word in words:
            SamplingParams(seed=word)  # the type and the range
        given = len(words)
        seeds = torch.tensor([word - 2**64 if word >= 2**63 else word for word in words], dtype=torch.int64)
    if given == batch and copies > 1:
        return seeds
    if given != prompts:
        either = f"{prompts}" if copies == 1 else f"{prompts} (one a prompt) or {batch} (one a sequence)"
        raise ValueError(f"seed must have {either} entries, got {given}")
    first = seeds.repeat_interleave(copies)
    shifted = first + torch.arange(copies, device=seeds.device).repeat(prompts)
    # -1 means no seed: it stays, and counting on from below it steps over it.
    shifted = torch.where((first < UNSEEDED) & (shifted >= UNSEEDED), shifted + 1, shifted)
    return torch.where(first == UNSEEDED, first, shifted)
