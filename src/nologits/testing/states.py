"""Hidden states and the head of a real model: what random weights cannot say about a screen's candidates."""

from __future__ import annotations

import torch
from torch import Tensor

from .families import keep, kept_file, load_reader


def smollm2_states(device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """SmolLM2-135M's hidden states at the positions of :data:`nologits.testing.families.TEXT`, and its head.

    They are kept once made (57 MB, ``smollm2-135m-states-*.pt`` in ``$NOLOGITS_CACHE``): carried there, they spare a machine
    the model.

    Returns:
        bf16 ``[256, 576]`` and ``[49152, 576]``, made by the model in bf16 on a CPU.

    Raises:
        UnavailableError: the weights, or the packages that read them, are not here.
    """
    path = kept_file("states")
    if not path.is_file():
        model, ids = load_reader(path, dtype=torch.bfloat16)
        with torch.no_grad():
            hidden = model.model(ids).last_hidden_state[0]
        keep({"hidden": hidden.clone(), "weight": model.lm_head.weight.detach().clone()}, path)
    kept = torch.load(path, weights_only=True, map_location=device)
    return kept["hidden"], kept["weight"]
