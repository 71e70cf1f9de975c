"""SGLang's requests in the words of :mod:`nologits.integrations.eligibility`."""

from __future__ import annotations

from typing import Any

from ..eligibility import Request


def read(request: Any, vocab_size: int) -> Request:
    """A ``Req`` as a request."""
    params = request.sampling_params
    # SGLang says "greedy" with top_k 1, and "no top-k" with 2**30.
    greedy = params.top_k <= 1
    top_k = params.top_k if params.top_k < vocab_size else 0
    bias = {int(token): float(value) for token, value in (params.logit_bias or {}).items()}
    return Request(
        temperature=0.0 if greedy else params.temperature,
        top_k=0 if greedy else top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.sampling_seed,
        logit_bias=bias or None,
        grammar=request.grammar is not None,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        min_tokens=params.min_new_tokens,
        engine_only=_engine_only(request, greedy, top_k),
    )


def _engine_only(request: Any, greedy: bool, top_k: int) -> str:
    params = request.sampling_params
    if request.return_logprob:
        return "log-probabilities"
    if request.return_sampling_mask:
        return "the sampling mask is asked for"
    if request.custom_logit_processor:
        return "custom logit processor"
    if request.beam_group is not None:
        return "beam search"
    if not greedy and params.top_p < 1 and (top_k or params.min_p > 0):
        # SGLang cuts by top-p from the whole distribution, nologits from what min-p and top-k have left: other tokens are kept.
        # Top-k and min-p keep the same tokens in either order.
        return "top-p with another filter"
    return ""
