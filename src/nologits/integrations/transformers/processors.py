"""What the logits processors of a call do, as sampling parameters; those that are not known exactly are refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import generation

from .capture import UnsupportedError


class Mask(NamedTuple):
    """Tokens that a processor forbids, or the only ones it allows, at sequences of some lengths."""

    ids: Tensor
    only: bool
    active: Callable[[int], bool]


class Plan(NamedTuple):
    """What a list of processors does, in the order of the contract: masks, temperature, filters."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    masks: tuple[Mask, ...]
    vocab: int
    device: torch.device
    packed: dict[tuple[bool, ...], Tensor | None]

    def allowed(self, length: int) -> Tensor | None:
        """The bitmask ``[1, ceil(V / 32)]`` for sequences of ``length`` tokens so far."""
        key = tuple(mask.active(length) for mask in self.masks)
        if key not in self.packed:
            active = [mask for mask, on in zip(self.masks, key, strict=True) if on]
            self.packed[key] = _pack(active, self.vocab, self.device) if active else None
        return self.packed[key]


def _pack(masks: Iterable[Mask], vocab: int, device: torch.device) -> Tensor:
    ids = torch.arange(-(-vocab // 32) * 32, device=device)
    allowed = torch.ones_like(ids, dtype=torch.bool)
    for mask in masks:
        listed = torch.isin(ids, mask.ids.to(device))
        allowed = listed if mask.only else allowed & ~listed
    bits = allowed.view(1, -1, 32).long() << torch.arange(32, device=device)
    return bits.sum(-1).to(torch.int32)  # bit 31 wraps to the sign


def make_plan(processors: Iterable[Any], vocab: int, device: torch.device) -> Plan:
    """Reads the processors that transformers prepared. Only exact classes count: a subclass may do anything."""
    found: dict[str, Any] = {}
    masks: list[Mask] = []
    for processor in processors:
        mask = _mask_of(processor)
        if mask is not None:
            if found:
                raise UnsupportedError(f"{type(processor).__name__} comes after {next(reversed(found))}")
            masks.append(mask)
            continue
        step = _warper_of(processor)
        if step is None:
            continue
        name, value = step
        # min-p and top-k cut the same order of tokens, so either may come first. Top-p renormalises over what they left.
        if name in found or (name == "temperature" and found) or "top-p" in found:
            raise UnsupportedError(
                f"{name} comes after {next(reversed(found))}, which differs from the order min-p, top-k, top-p"
            )
        found[name] = value
    return Plan(
        found.get("temperature", 1.0),
        found.get("top-k"),
        found.get("top-p"),
        found.get("min-p"),
        tuple(masks),
        vocab,
        device,
        {},
    )


def _warper_of(processor: Any) -> tuple[str, float] | None:
    """A warper's name and value; ``None`` if it changes nothing."""
    kind = type(processor)
    if kind is generation.LogitNormalization:
        return None
    if kind is generation.TemperatureLogitsWarper:
        return "temperature", processor.temperature
    names = {generation.TopKLogitsWarper: "top_k", generation.TopPLogitsWarper: "top_p", generation.MinPLogitsWarper: "min_p"}
    if kind not in names:
        raise UnsupportedError(f"{kind.__name__} reads or changes logits in its own way")
    attribute = names[kind]
    name, value = attribute.replace("_", "-"), getattr(processor, attribute)
    if processor.filter_value != -math.inf:
        raise UnsupportedError(f"{name} lowers logits to {processor.filter_value} instead of dropping them")
    if kind is not generation.TopKLogitsWarper and processor.min_tokens_to_keep > 1:  # top-k has it in its k
        raise UnsupportedError(f"{name} has to keep at least {processor.min_tokens_to_keep} tokens")
    neutral = {"top_p": 1.0, "min_p": 0.0}.get(attribute)
    return None if value == neutral else (name, value)


def _mask_of(processor: Any) -> Mask | None:
    kind = type(processor)
    if kind is generation.SuppressTokensLogitsProcessor:
        return Mask(processor.suppress_tokens, False, lambda length: True)
    if kind is generation.SuppressTokensAtBeginLogitsProcessor:
        return Mask(processor.begin_suppress_tokens, False, lambda length: length == processor.begin_index)
    if kind is generation.MinLengthLogitsProcessor:
        return Mask(processor.eos_token_id, False, lambda length: length < processor.min_length)
    if kind is generation.MinNewTokensLengthLogitsProcessor:
        return Mask(
            processor.eos_token_id, False, lambda length: length - processor.prompt_length_to_skip < processor.min_new_tokens
        )
    # With several ids it would make them equally likely, which is more than a mask.
    if kind is generation.ForcedEOSTokenLogitsProcessor and processor.eos_token_id.numel() == 1:
        return Mask(processor.eos_token_id, True, lambda length: length == processor.max_length - 1)
    return None
