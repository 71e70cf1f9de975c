"""SGLang without logits, experimental: a plugin that SGLang loads by itself, and that ``NOLOGITS_SGLANG=1`` switches on
(``docs/sglang.md``).

Nothing here imports SGLang before SGLang has asked for it.
"""

from .plugin import counters, register, reset_counters, status

__all__ = ["counters", "register", "reset_counters", "status"]
