"""Peers, loaded at run time from where the user has them. They are never part of this repository.

Each loader returns what its provider calls, or raises :class:`SkipError` with the reason why it cannot.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

FLASHSAMPLING = "NOLOGITS_FLASHSAMPLING"
"""Environment variable: the ``src`` folder of a checkout of FlashSampling's reference."""

FLASHINFER = "NOLOGITS_FLASHINFER"
"""Environment variable: a folder that holds the package ``flashinfer``, such as a site-packages or an unpacked wheel."""

VLLM_TOPK_TOPP = "NOLOGITS_VLLM_TOPK_TOPP"
"""Environment variable: the folder that holds vLLM's file ``topk_topp_triton.py``, in its sources ``vllm/v1/sample/ops``."""


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
    # It imports two packages at the top that its fused kernel does not use. FlashInfer's own loader must not find a stand-in.
    stand_ins = {"flashinfer": {}, "nvtx": {"annotate": lambda *_args, **_kwargs: lambda function: function}}
    sys.path.insert(0, folder)
    try:
        with _modules({name: members for name, members in stand_ins.items() if name not in sys.modules}):
            return importlib.import_module("fused_mm_sampling.core").fused_mm_sample_triton
    except Exception as error:  # whatever its import runs into
        raise SkipError(f"does not import from {folder}: {brief(error)}") from error
    finally:
        sys.path.remove(folder)


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


@cache
def vllm_topk_topp() -> ModuleType:
    """vLLM's ``topk_topp_triton``, that one file, without the rest of vLLM.

    What it imports from vLLM is there while it is loaded, and no longer: names of its warm-up machinery, which is not used; the
    launcher of its kernels (:func:`_vllm_launcher`); Triton; and a few helpers.

    Raises:
        SkipError: it is not named, or does not import.
    """
    folder = os.environ.get(VLLM_TOPK_TOPP)
    if not folder:
        raise SkipError(f"set {VLLM_TOPK_TOPP} to the folder that holds its topk_topp_triton.py")
    path = Path(folder) / "topk_topp_triton.py"
    if not path.is_file():
        raise SkipError(f"{VLLM_TOPK_TOPP} must be a folder that holds topk_topp_triton.py, got {folder}")
    name = "nologits_peer_vllm_topk_topp"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        with _modules(_vllm_stand_ins()):
            sys.modules[name] = module  # where Triton looks for the source of a kernel
            spec.loader.exec_module(module)
    except Exception as error:  # whatever its import runs into
        sys.modules.pop(name, None)
        raise SkipError(f"does not import from {folder}: {brief(error)}") from error
    return module


def _vllm_stand_ins() -> dict[str, dict[str, Any]]:
    import triton
    import triton.language as tl

    def unused(*_args: object, **_options: object) -> None:
        """Describes the inputs of a warm-up that does not happen here."""

    def jit(function: Any = None, **options: Any) -> Any:
        known = inspect.signature(triton.jit).parameters
        options = {key: value for key, value in options.items() if key in known}  # newer than this Triton
        return triton.jit(function, **options) if function is not None else triton.jit(**options)

    def compute_units(device: int | None = None) -> int:
        has_cuda = torch.cuda.is_available()
        return torch.cuda.get_device_properties(device or 0).multi_processor_count if has_cuda else 1

    tolerant = ModuleType("triton")
    tolerant.__dict__.update(triton.__dict__, jit=jit)
    warmup = "vllm.model_executor.warmup"
    return {
        **{package: {"__path__": []} for package in ("vllm", "vllm.model_executor", warmup, "vllm.utils")},
        f"{warmup}.jit_warmup": {"WarmupChoices": unused, "WarmupIntRange": unused, "_when": unused},
        f"{warmup}.jit_warmup_triton_helper": {
            "DispatchSpec": object,
            "TritonWarmupTensor": unused,
            "triton_kernel_dispatcher_with_warmup": _vllm_launcher,
        },
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cuda_alike=torch.cuda.is_available)},
        "vllm.triton_utils": {"tl": tl, "triton": tolerant},
        "vllm.utils.gpu_sync_debug": {"gpu_sync_allowed": contextlib.nullcontext},
        "vllm.utils.math_utils": {"next_power_of_2": triton.next_power_of_2},
        "vllm.utils.platform_utils": {"num_compute_units": compute_units},
    }


def _vllm_launcher(kernel: Any, warmup_inputs: object = None) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Stands for the decorator of vLLM's launch functions.

    Such a function returns a grid and some of the kernel's arguments. The others have the names of its own parameters but for
    case and a ``_ptr``, or are a stride of one of these (``LOGITS_STRIDE_0``).
    """

    def decorate(prepare: Callable[..., Any]) -> Callable[..., None]:
        signature = inspect.signature(prepare)

        def launch(*args: Any, **options: Any) -> None:
            bound = signature.bind(*args, **options)
            bound.apply_defaults()
            grid, given = prepare(*args, **options)
            values = {key.lower().removesuffix("_ptr"): value for key, value in (*bound.arguments.items(), *given.items())}
            rest = {name: _argument(name, values) for name in kernel.arg_names if name not in given}
            kernel[grid](**given, **rest)

        return launch

    return decorate


def _argument(name: str, values: Mapping[str, Any]) -> Any:
    key = name.lower()
    base, is_stride, dim = key.rpartition("_stride")
    if is_stride:
        return values[base.removesuffix("_ptr")].stride(int(dim.strip("_") or 0))
    return values[key.removesuffix("_ptr")]


@contextlib.contextmanager
def _modules(members: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Modules with the given members, in place of any of their names, for as long as the block runs."""
    before = {name: sys.modules[name] for name in members if name in sys.modules}
    for name, values in members.items():
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__dict__.update(values)
    try:
        yield
    finally:
        for name in members:
            sys.modules.pop(name, None)
        sys.modules.update(before)


def brief(error: BaseException) -> str:
    """An error in one line: its kind and the first line of its text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _installed(name: str) -> Path | None:
    loaded = sys.modules.get(name)
    spec = loaded.__spec__ if loaded is not None else importlib.util.find_spec(name)
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places))) if places else None
