"""From the library's records to kernel arguments: pointers, strides, and the flags that compile features in or out."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from ..params import RowParams
from ..sources import HiddenSource, LogitsSource
from .config import TileConfig, interpreting


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on torch's current device; make it the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def operands(source: HiddenSource | LogitsSource, config: TileConfig) -> dict[str, Any]:
    """What the logits tile is made from: the head's operands, or given logits in the weight's place."""
    device = source.device
    arguments: dict[str, Any] = {
        "hidden": None, "weight": None, "bias_ptr": None, "V_ROWS": source.vocab, "D": 1,
        "stride_wv": 0, "stride_wd": 0, "stride_hb": 0, "stride_hd": 0, "stride_bias": 0, "scale": 1.0, "softcap": 1.0,
        "FROM_LOGITS": False, "HAS_BIAS": False, "HAS_SCALE": False, "HAS_SOFTCAP": False, "USE_TMA": False,
        "UPCAST": interpreting(), "PRECISION": "ieee", "FAST_LOG": fast_log(device),
        "BLOCK_V": config.BLOCK_V, "BLOCK_B": config.BLOCK_B, "BLOCK_D": config.BLOCK_D,
    }  # fmt: skip
    if isinstance(source, LogitsSource):
        logits = source.logits
        return arguments | {
            "weight": logits, "stride_wv": logits.stride(0), "stride_wd": logits.stride(1), "FROM_LOGITS": True,
        }  # fmt: skip
    head, hidden, weight = source.head, source.hidden, source.head.weight
    tma = has_tma(device) and tma_fits(hidden) and tma_fits(weight)
    if tma:
        from triton.tools.tensor_descriptor import TensorDescriptor

        hidden = TensorDescriptor.from_tensor(hidden, [config.BLOCK_B, config.BLOCK_D])
        weight = TensorDescriptor.from_tensor(weight, [config.BLOCK_V, config.BLOCK_D])
    return arguments | {
        "hidden": hidden, "weight": weight, "bias_ptr": head.bias, "V_ROWS": head.weight.shape[0], "D": source.hidden.shape[1],
        "stride_wv": head.weight.stride(0), "stride_wd": head.weight.stride(1),
        "stride_hb": source.hidden.stride(0), "stride_hd": source.hidden.stride(1),
        "stride_bias": head.bias.stride(0) if head.bias is not None else 0,
        "scale": head.scale, "softcap": head.softcap or 1.0, "USE_TMA": tma,
        "HAS_BIAS": head.bias is not None, "HAS_SCALE": head.scale != 1.0, "HAS_SOFTCAP": head.softcap is not None,
    }  # fmt: skip


def request_arguments(rows: RowParams) -> dict[str, Any]:
    """Logit bias and mask."""
    return {
        "logit_bias_ptr": rows.logit_bias, "bias_ids_ptr": rows.bias_ids, "bias_values_ptr": rows.bias_values,
        "allowed_ptr": rows.allowed, "num_biased": rows.num_biased,
        "stride_lbb": stride_of(rows.logit_bias, 0), "stride_lbv": stride_of(rows.logit_bias, 1),
        "stride_bib": stride_of(rows.bias_ids, 0), "stride_bik": stride_of(rows.bias_ids, 1),
        "stride_bvb": stride_of(rows.bias_values, 0), "stride_bvk": stride_of(rows.bias_values, 1),
        "stride_ab": stride_of(rows.allowed, 0), "stride_aw": stride_of(rows.allowed, 1),
        "HAS_LOGIT_BIAS": rows.logit_bias is not None, "HAS_SPARSE_BIAS": rows.num_biased > 0,
        "HAS_ALLOWED": rows.allowed is not None,
    }  # fmt: skip


def temperature_arguments(rows: RowParams) -> dict[str, Any]:
    """The temperature, a scalar or one a row."""
    per_row = isinstance(rows.temperature, Tensor)
    return {
        "temperature_ptr": rows.temperature if per_row else None, "temperature_value": 1.0 if per_row else rows.temperature,
        "stride_temperature": stride_of(rows.temperature, 0), "HAS_TEMPERATURE": per_row,
    }  # fmt: skip


def filter_arguments(rows: RowParams) -> tuple[dict[str, Tensor], dict[str, int | float]]:
    """The filters as the Hopper kernels take them: the tensors of those with one number a row, and the numbers beside them."""
    asked = {name: getattr(rows, name) for name in ("top_k", "top_p", "min_p")}
    tensors = {name: value for name, value in asked.items() if isinstance(value, Tensor)}
    numbers: dict[str, int | float] = {f"{name}_value": value for name, value in asked.items() if name not in tensors}
    for name, tensor in tensors.items():
        numbers |= {f"stride_{name}": tensor.stride(0), f"{name}_wide": int(tensor.element_size() == 8)}
    return tensors, numbers


def filter_columns(rows: RowParams, device: torch.device) -> dict[str, Any]:
    """The filters as the portable kernels take them: a tensor each, for Triton would round a number to fp32.

    A number is written on the device by a kernel that has it as an argument: nothing waits for the host.
    """
    arguments: dict[str, Any] = {}
    for name, off, dtype in (("top_k", 0, torch.int64), ("top_p", 1.0, torch.float64), ("min_p", 0.0, torch.float64)):
        value = getattr(rows, name)
        stride = stride_of(value, 0)
        if not isinstance(value, Tensor):
            value = None if value == off else torch.full((1,), value, dtype=dtype, device=device)
        arguments |= {f"{name}_ptr": value, f"stride_{name}": stride, f"HAS_{name.upper()}": value is not None}
    return arguments


def noise_arguments(rows: RowParams) -> dict[str, Any]:
    """Temperature and what keys the noise."""
    return temperature_arguments(rows) | {
        "seed_ptr": rows.seed, "position_ptr": rows.position, "entropy_ptr": rows.entropy,
        "stride_seed": stride_of(rows.seed, 0), "stride_position": stride_of(rows.position, 0),
        "HAS_SEED": rows.seed is not None, "HAS_POSITION": rows.position is not None,
        "HAS_ENTROPY": rows.entropy is not None, "GREEDY": rows.greedy,
    }  # fmt: skip


def fast_log(device: torch.device) -> bool:
    """The base-2 logarithm instruction of NVIDIA GPUs may be used."""
    return device.type == "cuda" and torch.version.hip is None and not interpreting()


def has_tma(device: torch.device) -> bool:
    """Tensor descriptors become bulk copies there (Hopper and later)."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


def tma_fits(tensor: Tensor) -> bool:
    """A tensor descriptor can describe it: dense rows, base and row pitch multiples of 16 bytes."""
    pitch = tensor.stride(0) * tensor.element_size()
    return tensor.stride(1) == 1 and pitch % 16 == 0 and pitch > 0 and tensor.data_ptr() % 16 == 0


def addressable(source: HiddenSource) -> HiddenSource:
    """With hidden states that the copy engine can address, copied if need be."""
    return source if tma_fits(source.hidden) else HiddenSource(source.hidden.contiguous(), source.head, source.dtype)


def stride_of(value: object, dim: int) -> int:
    """A tensor's stride; 0 for what is no tensor."""
    return value.stride(dim) if isinstance(value, Tensor) else 0
