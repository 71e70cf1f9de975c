"""Peers, loaded at run time from where the user has them. They are never part of this repository.

Each loader returns what its provider calls, or raises :class:`SkipError` with the reason why it cannot.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

FLASHSAMPLING = "NOLOGITS_FLASHSAMPLING"
"""Environment variable: the ``src`` folder of a checkout of FlashSampling's reference."""

FLASHINFER = "NOLOGITS_FLASHINFER"
"""Environment variable: a folder that holds the package ``flashinfer``, such as a site-packages or an unpacked wheel."""


class SkipError(Exception):
    """A provider that cannot run here, or has no such mode; the text is the reason."""


@cache
def flashsampling_kernel() -> Any:
    """The function ``fused_mm_sample_triton`` of the paper's reference.

    Raises:
        SkipError: it is not named, or does not import.
    """
    folder = os.environ.get(FLASHSAMPLING)
    if not folder:
        raise SkipError(f"set {FLASHSAMPLING} to the src folder of its checkout")
    # It imports two packages at the top that its fused kernel does not use.
    stand_ins = {"flashinfer": {}, "nvtx": {"annotate": lambda *_args, **_kwargs: lambda function: function}}
    added = []
    for name, members in stand_ins.items():
        if name not in sys.modules:
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__dict__.update(members)
            added.append(name)
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("fused_mm_sampling.core").fused_mm_sample_triton
    except Exception as error:  # whatever its import runs into
        raise SkipError(f"does not import from {folder}: {brief(error)}") from error
    finally:
        sys.path.remove(folder)
        for name in added:  # or FlashInfer's own loader would take the stand-in for the package
            del sys.modules[name]


@cache
def flashinfer_sampling() -> ModuleType:
    """FlashInfer's module ``sampling``, from the named folder or else from the installed package.

    The package's own import wants bindings of NCCL, CUTLASS and cuDNN that sampling does not use, so ``flashinfer.sampling``
    is imported below an empty parent package that only has a path. At its first call FlashInfer compiles its kernels, with
    nvcc and ninja, unless they come compiled.

    Raises:
        SkipError: it is not there, or does not import.
    """
    folder = os.environ.get(FLASHINFER)
    package = Path(folder) / "flashinfer" if folder else _installed("flashinfer")
    if package is None:
        raise SkipError(f"install flashinfer-python, or set {FLASHINFER} to a folder that holds it")
    if not (package / "sampling.py").is_file():
        raise SkipError(f"{FLASHINFER} must be a folder that holds flashinfer/sampling.py, got {folder}")
    if folder and folder not in sys.path:
        # What it needs may lie beside it. Last, so that nothing there replaces the torch that runs.
        sys.path.append(folder)
    if "flashinfer" not in sys.modules:
        parent = ModuleType("flashinfer")
        parent.__path__ = [str(package)]
        parent.__spec__ = importlib.machinery.ModuleSpec("flashinfer", None, is_package=True)
        sys.modules["flashinfer"] = parent
    try:
        return importlib.import_module("flashinfer.sampling")
    except Exception as error:  # whatever its import runs into
        del sys.modules["flashinfer"]
        raise SkipError(f"does not import from {package.parent}: {brief(error)}") from error


def brief(error: BaseException) -> str:
    """An error in one line: its kind and the first line of its text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _installed(name: str) -> Path | None:
    loaded = sys.modules.get(name)
    spec = loaded.__spec__ if loaded is not None else importlib.util.find_spec(name)
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places))) if places else None
