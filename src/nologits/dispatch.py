"""Which implementation runs, and why."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from functools import lru_cache
from typing import NamedTuple

import torch

from .types import IMPLS


def _find_triton() -> bool:
    """Triton can be imported (found without importing it)."""
    try:
        return importlib.util.find_spec("triton") is not None
    except (ImportError, ValueError):  # a blocked or half-removed package
        return False


_TRITON_FOUND = _find_triton()

CUDA_BINDINGS = ((12, 9), (14, 0))
"""Versions of ``cuda.bindings`` from .. below: the oldest with this interface, and the next that may change it."""


@lru_cache(maxsize=1)
def _bindings_obstacle() -> str:
    """What is missing for kernels in CUDA C++; empty if nothing is."""
    try:
        version = importlib.metadata.version("cuda-bindings")
    except importlib.metadata.PackageNotFoundError:
        return "the package cuda-bindings is not installed"
    oldest, below = CUDA_BINDINGS
    if not oldest <= tuple(int(part) for part in version.split(".")[:2]) < below:
        return f"cuda-bindings must be {oldest[0]}.{oldest[1]} or later and below {below[0]}, got {version}"
    return ""


class Choice(NamedTuple):
    """The implementation that runs and the reason in a few words (shown by ``nologits doctor``)."""

    impl: str
    reason: str


def choose(impl: str, device: torch.device) -> Choice:
    """Resolves ``impl`` for inputs on ``device``. A named implementation runs or raises; only ``"auto"`` chooses.

    Raises:
        ValueError: ``impl`` is unknown, or cannot run there.
    """
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {', '.join(IMPLS)}, got {impl!r}")
    obstacle = triton_obstacle(device)
    if impl == "auto":
        if obstacle or device.type == "cpu":
            return Choice("torch", obstacle or "the interpreter is for tests; torch is faster on a CPU")
        if reason := hopper_obstacle(device):
            return Choice("triton", f"not hopper: {reason}")
        return Choice("hopper", "a Hopper GPU, and what its kernels need")
    if impl == "triton" and obstacle:
        raise ValueError(f"impl='triton' must have inputs that Triton can run on, got {device} ({obstacle})")
    if impl == "hopper" and (obstacle := obstacle or hopper_obstacle(device)):
        raise ValueError(f"impl='hopper' must have inputs on a Hopper GPU, got {device} ({obstacle})")
    return Choice(impl, "named by the caller")


def resolve(impl: str, device: torch.device) -> str:
    """The name that :func:`choose` resolves to; a constant to a compiler that traces through the caller."""
    return choose(impl, device).impl


# What torch.compiler.assume_constant_result sets; calling it would import all of torch._dynamo here.
resolve._dynamo_marked_constant = True  # type: ignore[attr-defined]


def triton_obstacle(device: torch.device) -> str:
    """Why the Triton kernels cannot run on ``device``; empty if they can."""
    if not _TRITON_FOUND:
        return "Triton is not installed"
    if device.type == "cpu":
        return "" if os.environ.get("TRITON_INTERPRET") == "1" else "a CPU needs TRITON_INTERPRET=1"
    if device.type != "cuda":
        return f"the kernels have not been tried on {device.type}"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return "the kernels need compute capability 8.0 or later"
    return ""


def hopper_obstacle(device: torch.device) -> str:
    """Why the Hopper kernels cannot run on ``device``; empty if they can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"the kernels are for NVIDIA GPUs, not {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"the kernels need compute capability 9.0, not {capability[0]}.{capability[1]}"
    return _bindings_obstacle()
