"""Which implementation runs, and why."""

from __future__ import annotations

import importlib.util
import os
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
        return Choice("triton", f"Triton on {device.type}")
    if impl == "triton" and obstacle:
        raise ValueError(f"impl='triton' must have inputs that Triton can run on, got {device} ({obstacle})")
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
