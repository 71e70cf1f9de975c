"""A random model of a real one's shape for vLLM: a ``config.json``, and a loader that makes its weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from .decoder import WEIGHT_STD, Shape

LOGITS_STD = 5.0
"""A trained model's, as in the suite ``e2e``. The weights of vLLM's own load format ``dummy`` lie within 1e-3, the norms' too:
logits are then all but equal, and a top-p nucleus is most of the vocabulary, which no model has."""

LOAD_FORMAT = "nologits-random"
"""Of vLLM, once :func:`offer_random_weights` was called."""


def write_config(shape: Shape, positions: int, folder: str) -> None:
    """Writes the ``config.json`` of a Qwen3 of this shape."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab,
        "hidden_size": shape.depth,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }
    Path(folder, "config.json").write_text(json.dumps(config))


def offer_random_weights() -> None:
    """Adds :data:`LOAD_FORMAT` to vLLM: :func:`fill` before weights are arranged for kernels, in copies even."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class RandomLoader(BaseModelLoader):  # type: ignore[misc]  # vLLM is not there when types are checked
        def download_model(self, model_config: Any) -> None:
            """There is nothing to download."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            fill(model)

    register_model_loader(LOAD_FORMAT)(RandomLoader)


@torch.no_grad()
def fill(model: Any) -> None:
    """Random weights as those of ``Decoder``: matrices of standard deviation ``WEIGHT_STD``, norms of ones.

    The last norm is such that logits have :data:`LOGITS_STD`: a tied head cannot be scaled without the embedding.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for parameter in model.parameters():
        if parameter.ndim > 1:
            generator = generators.setdefault(parameter.device, torch.Generator(parameter.device).manual_seed(0))
            parameter.normal_(0, WEIGHT_STD, generator=generator)
        else:
            parameter.fill_(1.0)
    last = model.model.norm.weight
    last.fill_(LOGITS_STD / (math.sqrt(len(last)) * WEIGHT_STD))
