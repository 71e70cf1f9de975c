"""Hidden states and the head of a real model: what random weights cannot say about a screen's candidates."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import torch
from torch import Tensor

from .families import SMOLLM2_POSITIONS, TEXT, UnavailableError


def smollm2_states(device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """SmolLM2-135M's hidden states at the positions of :data:`nologits.testing.families.TEXT`, and its head.

    Returns:
        bf16 ``[256, 576]`` and ``[49152, 576]``, made by the model in bf16 on a CPU.

    Raises:
        UnavailableError: the weights, or the packages that read them, are not here.
    """
    path = states_file()
    if not path.is_file():
        _make(path)
    kept = torch.load(path, weights_only=True, map_location=device)
    return kept["hidden"], kept["weight"]


def states_file() -> Path:
    """Where they are kept once made (57 MB): carried there, they spare a machine the model."""
    cache = Path(os.environ.get("NOLOGITS_CACHE") or Path.home() / ".cache" / "nologits")
    return cache / f"smollm2-135m-states-{zlib.crc32(TEXT.encode()):08x}.pt"


def _make(path: Path) -> None:
    try:
        from ..demo.smollm2 import load

        model, tokenizer = load(dtype=torch.bfloat16)
    except ImportError as error:
        raise UnavailableError(f"{error}; or copy {path.name} to {path.parent}") from error
    ids = tokenizer(TEXT, return_tensors="pt").input_ids[:, :SMOLLM2_POSITIONS]
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state[0]
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}")  # it appears complete or not at all
    torch.save({"hidden": hidden.clone(), "weight": model.lm_head.weight.detach().clone()}, scratch)
    scratch.replace(path)
