"""Launches the Hopper kernel of the filters (``sm90/filters.cu``); what it computes is written there."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..params import RowParams
from ..types import Samples
from .arguments import filter_arguments, on_device, stride_of, temperature_arguments
from .config import FILTER_GATHERED, FilterConfig, filter_config, multiprocessors
from .nvrtc import Kernel, load

_GATHERED_BYTES = 8 * FILTER_GATHERED
_ELEMENTS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}

_POINTERS = (
    "logits", "temperature", "top_k", "top_p", "min_p", "seed", "position", "entropy",
    "out", "tokens", "logprobs", "log_masses", "again",
)  # fmt: skip
_STRIDES = tuple(f"stride_{name}" for name in ("logits", "out", "temperature", "top_k", "top_p", "min_p", "seed", "position"))


class Params(ctypes.Structure):
    """``Params`` of ``sm90/filters.cu``, field by field."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in _POINTERS]
        + [(name, ctypes.c_int64) for name in (*_STRIDES, "top_k_value")]
        + [(name, ctypes.c_double) for name in ("top_p_value", "min_p_value")]
        + [(name, ctypes.c_int32) for name in ("V", "chunk", "apart", "top_k_wide", "top_p_wide", "min_p_wide")]
        + [(name, ctypes.c_float) for name in ("temperature_value", "mask_value")]
    )


def launch_mask(
    logits: Tensor,
    rows: RowParams,
    out: Tensor,
    mask_value: float,
    *,
    config: FilterConfig | None = None,
    again: Tensor | None = None,
) -> None:
    """Writes the kept logits to ``out`` (which may be ``logits``), ``mask_value`` elsewhere and in all of an invalid row.

    ``config`` is the launch; default: :func:`filter_config`'s. ``again``, ``[B]`` int32, becomes 1 for rows that had to be
    read again to find what they keep.
    """
    _launch(logits, rows, {"MASK": 1}, {"out": out, "again": again}, mask_value, config)


def launch_filtered_draw(logits: Tensor, rows: RowParams, logprobs: bool) -> Samples:
    """One draw a row from what the filters keep; ``[B, 1]`` results."""
    batch, device = len(logits), logits.device
    drawn = Samples(
        torch.empty(batch, 1, dtype=torch.int64, device=device),
        torch.empty(batch, 1, device=device) if logprobs else None,
        log_mass=torch.empty(batch, device=device) if logprobs else None,
    )
    results = {"tokens": drawn.tokens, "logprobs": drawn.logprobs, "log_masses": drawn.log_mass}
    _launch(logits, rows, {"DRAW": 1, "LOGPROBS": int(logprobs)}, results, 0.0)
    return drawn


def filter_kernel(logits: Tensor, config: FilterConfig, outputs: dict[str, int]) -> Kernel:
    """The kernel for these outputs, compiled on first use."""
    features = {"MASK": 0, "DRAW": 0, "LOGPROBS": 0} | outputs
    defines = (
        ("CLUSTER", config.cluster), ("THREADS", config.threads), ("ELEMENT", _ELEMENTS[logits.dtype]),
        *features.items(), *config.search._asdict().items(),
    )  # fmt: skip
    index = logits.device.index if logits.device.index is not None else torch.cuda.current_device()
    return load("filters", "filter_rows", config.threads, _GATHERED_BYTES, defines, index)


def _launch(
    logits: Tensor,
    rows: RowParams,
    outputs: dict[str, int],
    results: dict[str, Tensor | None],
    mask_value: float,
    config: FilterConfig | None = None,
) -> None:
    batch, vocab = logits.shape
    config = config or filter_config(vocab, batch, multiprocessors(logits.device))
    temperature = temperature_arguments(rows)
    tensors, numbers = filter_arguments(rows)
    given: dict[str, Tensor | None] = {
        "logits": logits, "temperature": temperature["temperature_ptr"],
        "seed": rows.seed, "position": rows.position, "entropy": rows.entropy, **tensors, **results,
    }  # fmt: skip
    params = Params(
        **{name: tensor.data_ptr() for name, tensor in given.items() if tensor is not None},
        **numbers, stride_logits=logits.stride(0), stride_out=stride_of(results.get("out"), 0),
        stride_temperature=temperature["stride_temperature"], stride_seed=stride_of(rows.seed, 0),
        stride_position=stride_of(rows.position, 0),
        V=vocab, chunk=config.chunk(vocab), apart=_apart(logits, results.get("out")),
        temperature_value=temperature["temperature_value"], mask_value=mask_value,
    )  # fmt: skip
    with on_device(logits.device):
        filter_kernel(logits, config, outputs).launch((batch * config.cluster, 1), [params], logits.device)


def _apart(logits: Tensor, out: Tensor | None) -> int:
    """1 if the two surely share no memory."""
    return int(out is None or logits.untyped_storage().data_ptr() != out.untyped_storage().data_ptr())
