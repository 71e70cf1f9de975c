"""vLLM's sampling parameters in the words of :mod:`nologits.integrations.eligibility`."""

from __future__ import annotations

from typing import Any

from ..eligibility import Request

_GREEDY_BELOW = 1e-5
"""vLLM draws greedily below this temperature."""


def read(params: Any) -> Request:
    """A ``vllm.SamplingParams`` as a request."""
    temperature = float(params.temperature)
    return Request(
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
        logit_bias=params.logit_bias or None,
        allowed_tokens=params.allowed_token_ids or None,
        grammar=params.structured_outputs is not None,
        logprobs=params.logprobs,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        bad_words=bool(params.bad_words_token_ids),
        min_tokens=params.min_tokens,
        engine_only=_engine_only(params),
    )


def _engine_only(params: Any) -> str:
    if params.logprob_token_ids is not None:
        return "log-probabilities of listed tokens"
    if params.thinking_token_budget is not None:
        return "thinking token budget"
    if getattr(params, "trace_decode_token_ids", None) is not None:  # not in vLLM 0.26
        return "replay of a trace"
    return ""
