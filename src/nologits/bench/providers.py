"""Who is measured. A provider turns a cell's inputs into a call to time, or says in one line why it cannot.

Peers are never part of this repository: they load at run time from where the user has them, named by an environment
variable, and are skipped with a reason where they are missing.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from .cases import Inputs

Call = Callable[[], object]


class SkipError(Exception):
    """A provider that cannot run here, or has no such mode; the text is the reason."""


def nologits_triton(inputs: Inputs, mode: str) -> Call:
    logprobs = "processed" if mode == "logprobs" else False
    return lambda: inputs.head.sample(inputs.hidden, inputs.params, impl="triton", logprobs=logprobs)  # type: ignore[arg-type]


def matmul(inputs: Inputs, mode: str) -> Call:
    """The LM head's matmul alone, bf16 logits written: what every fused sampler is measured against."""
    return lambda: inputs.hidden @ inputs.weight.T


def multinomial(inputs: Inputs, mode: str) -> Call:
    def call() -> object:
        logits = (inputs.hidden @ inputs.weight.T).float()
        if mode == "greedy":
            return logits.argmax(-1)
        probabilities = torch.softmax(logits, -1)
        token = torch.multinomial(probabilities, 1)
        return probabilities.gather(1, token).log() if mode == "logprobs" else token

    return call


def flashsampling(inputs: Inputs, mode: str) -> Call:
    """The paper's reference kernel; NOLOGITS_FLASHSAMPLING names its checkout's ``src`` folder."""
    if mode == "logprobs":
        raise SkipError("its kernel has no log-probabilities")
    kernel = _flashsampling()
    temperature = torch.tensor(1.0, device=inputs.hidden.device)
    return lambda: kernel(inputs.weight, inputs.hidden, 1, temperature, 7, greedy_sampling=mode == "greedy")


PROVIDERS: dict[str, Callable[[Inputs, str], Call]] = {
    "matmul": matmul,
    "nologits-triton": nologits_triton,
    "multinomial": multinomial,
    "flashsampling": flashsampling,
}


@cache
def _flashsampling() -> Callable[..., Any]:
    folder = os.environ.get("NOLOGITS_FLASHSAMPLING")
    if not folder:
        raise SkipError("set NOLOGITS_FLASHSAMPLING to the src folder of its checkout")
    # It imports two packages at the top that its fused kernel does not use.
    for name, members in (("flashinfer", {}), ("nvtx", {"annotate": lambda *_args, **_kwargs: lambda function: function})):
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            module = types.ModuleType(name)
            module.__dict__.update(members)
            sys.modules[name] = module
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("fused_mm_sampling.core").fused_mm_sample_triton  # type: ignore[no-any-return]
    except Exception as error:
        raise SkipError(f"does not import from {folder}: {error}") from error
    finally:
        sys.path.remove(folder)
