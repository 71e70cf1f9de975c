"""The model runner: its forward pass leaves :class:`LateLogits`, and ``sample`` draws from their hidden states.

A batch whose rows are all taken makes no logits. If some are not, logits are made, outside the decode graph, and SGLang
samples all rows, since its sampler knows rows by their place in the batch; the rows that are taken then get their own tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..rows import Keys
from .heads import LateLogits, refusal
from .plugin import COUNTERS
from .session import Session, refused

BATCH_TARGET = "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new"
SAMPLE_TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.sample"

_logger = logging.getLogger("sglang.nologits")


class _RefusedError(Exception):
    """A batch that SGLang has to draw, for the reason in the message."""


def keep_requests(forward_batch: Any, cls: Any, batch: Any, *arguments: Any, **keywords: Any) -> None:
    """The hook after ``ForwardBatch.init_new``: the batch's requests, which ``sample`` reads, come with the scheduler's batch.

    The scheduler may change its list while the forward pass runs, so this is a copy.
    """
    try:
        forward_batch._nologits_requests = tuple(batch.reqs)
    except Exception:
        _logger.debug("nologits: a batch without requests", exc_info=True)


def sample(stock: Callable[..., Any], runner: Any, logits_output: Any, forward_batch: Any) -> Any:
    """The hook around ``ModelRunner.sample``: the step's draw is ours, SGLang's (``stock``), or both."""
    late = logits_output.next_token_logits
    if not isinstance(late, LateLogits):
        _count_tensor(runner, forward_batch)
        return stock(runner, logits_output, forward_batch)

    def engine() -> Any:
        logits_output.next_token_logits = late.logits()
        return stock(runner, logits_output, forward_batch)

    try:
        session, plan, positions = _open(runner, late, forward_batch)
    except _RefusedError as reason:
        refused(len(late), str(reason))
        return engine()
    except Exception:
        COUNTERS.failed(len(late))
        return engine()
    tokens = None
    if plan.batch is not None:
        try:
            tokens = session.draw(plan, late, positions, _grammar_mask(forward_batch.sampling_info, late))
        except _RefusedError as reason:
            refused(len(late), str(reason))
            return engine()
        except Exception:
            COUNTERS.failed(len(plan.taken), plan.reasons)
            return engine()
    if tokens is not None and plan.whole:
        # What SGLang's own does besides drawing, as far as it applies here.
        logits_output.auxiliary_device_output = None
        COUNTERS.planned(len(plan.taken), plan.reasons)
        return tokens
    drawn = engine()
    COUNTERS.planned(len(plan.taken), plan.reasons)
    return drawn if tokens is None else drawn.index_copy(0, plan.places, tokens.to(drawn.dtype))


def _open(runner: Any, late: LateLogits, forward_batch: Any) -> Any:
    """The session of the runner, who draws the rows of this step, and their positions."""
    session = vars(runner).get("_nologits")
    if session is None:
        session = runner._nologits = _session(runner, late)
    if session.reason:
        raise _RefusedError(session.reason)
    if late.made:
        raise _RefusedError("the model looks at its logits")
    observer, info = runner.sampling_observer, forward_batch.sampling_info
    if observer is not None and observer.is_active(info):
        raise _RefusedError("a sampling observer")
    requests = getattr(forward_batch, "_nologits_requests", None)
    if requests is None:
        raise _RefusedError("no requests known")
    lengths = forward_batch.seq_lens_cpu
    if lengths is None:
        raise _RefusedError("lengths are on the device alone")
    if not len(requests) == len(late) == len(lengths):
        raise _RefusedError("more rows than requests")
    plan = session.plan([session.entry(request) for request in requests])
    # What a row has after this step's forward pass, without its prompt. A prompt that goes on in the next chunk is below 0; its
    # draw is dropped.
    prompts = np.array([len(request.origin_input_ids) for request in requests], dtype=np.int64)
    return session, plan, (lengths.numpy().astype(np.int64) - prompts).clip(min=0)


def _grammar_mask(info: Any, late: LateLogits) -> Tensor | None:
    """The bitmask ``[B, ceil(V / 32)]`` of the batch's grammars on the device, made by SGLang's own code."""
    if not info.grammars or all(grammar is None for grammar in info.grammars):
        return None
    info.update_regex_vocab_mask()
    made, info.grammar_mask = info.grammar_mask, None
    mask = None if made is None else made.vocab_mask
    words = -(-late.site.vocab_size // 32)
    if not isinstance(mask, Tensor) or mask.dtype != torch.int32 or mask.ndim != 2:
        raise _RefusedError("a grammar backend without bitmasks")
    if mask.shape[0] != len(late) or mask.shape[1] < words:
        raise _RefusedError("a grammar bitmask of another size")
    return mask[:, :words]


def _session(runner: Any, late: LateLogits) -> Session:
    """The session of a runner at its first step. If its obstacles cannot be read, nothing is taken."""
    try:
        reason, keys = _obstacle(runner), _keys()
    except Exception as error:
        reason, keys = f"of {type(error).__name__}: {error}", Keys(0)
    return Session(late.site.vocab_size, late.device, keys, reason)


def _keys() -> Keys:
    from sglang.srt.runtime_context import get_device, get_parallel

    return Keys(get_device().random_seed or 0, getattr(get_parallel(), "dp_rank", 0) or 0)


def _obstacle(runner: Any) -> str:
    from sglang.srt.layers.sampler import Sampler

    if runner.is_draft_worker:
        return "a draft model"
    if type(runner.sampler) is not Sampler:
        return f"a sampler of its own ({type(runner.sampler).__name__})"
    if runner.watermark_state is not None:
        return "watermarking"
    if runner.ngram_embedding_manager.enabled:
        return "n-gram embeddings"
    return ""


def _count_tensor(runner: Any, forward_batch: Any) -> None:
    """Counts a batch whose logits were made in the forward pass."""
    try:
        refused(len(forward_batch.sampling_info), refusal() or "logits made in the forward pass")
    except Exception:
        _logger.debug("nologits: a batch that cannot be counted", exc_info=True)
