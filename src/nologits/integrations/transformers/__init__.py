"""transformers' ``generate`` without logits.

Usage: ``model.generate(..., custom_generate=nologits.integrations.transformers.generate)``.

The loop stays transformers' own (prefill, cache, stopping, streaming). Two things in it are swapped while it runs:

* the output head's ``forward``, on the instance, keeps the hidden state of the last position and returns one column of
  zeros, so that logits ``[B, V]`` are never made, nor ``[B, L, V]`` while the prompt is read;
* the logits processors draw the token from that hidden state, and what they return answers ``argmax`` with it.

What a model does to its logits after the head (soft cap, scale) is found by trying it: once a model, known values are
sent down the forward in place of logits, and a row is compared with the model's own. What cannot be reproduced exactly
runs the stock loop, with one reason on the logger ``nologits`` (level WARNING) and in :func:`last_report`.

Differences from the stock loop, all of them rounding or ties: logits are not rounded to the model's dtype before the
draw, and top-k keeps exactly k tokens where logits tie. ``stop_strings=`` needs the tokenizer, which transformers (5.24)
takes away from any custom loop: pass ``stopping_criteria=[StopStringCriteria(tokenizer, [...])]`` instead.
"""

from __future__ import annotations

try:
    import transformers.generation  # noqa: F401
except ImportError as error:
    raise ImportError("this integration needs transformers 5 or later: pip install 'nologits[transformers]'") from error

from .heads import find_head
from .loop import GenerateOutput, Report, generate, last_report

__all__ = ["GenerateOutput", "Report", "find_head", "generate", "last_report"]
