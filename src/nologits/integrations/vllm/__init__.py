"""vLLM without logits: a plugin that vLLM loads by itself once nologits is installed beside it (``docs/vllm.md``).

Nothing here imports vLLM before vLLM has asked for it.
"""

from .plugin import counters, paused, register, reset_counters, status

__all__ = ["counters", "paused", "register", "reset_counters", "status"]
