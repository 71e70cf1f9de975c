"""The public functions: check, normalise, choose an implementation, run it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import ops
from .dispatch import resolve
from .head import HeadSpec, LMHead, check_hidden, check_matrix, make_spec
from .params import LogitBias, RowParams, SamplingParams, check_device, check_num_samples, make_rows
from .selection import MAX_VOCAB
from .sources import HiddenSource, LogitsSource
from .tops import MAX_TOP
from .types import Candidates, Impl, LogprobsMode, Samples, TopTokens, logprobs_wanted

if TYPE_CHECKING:
    from .sharded import Shard


def sample(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    seed: int | Tensor | None = None,
    position: int | Tensor | None = None,
    logit_bias: LogitBias | None = None,
    allowed_tokens: Tensor | None = None,
    num_samples: int = 1,
    logprobs: LogprobsMode = False,
    top_logprobs: int = 0,
    impl: Impl = "auto",
    check: bool = False,
) -> Samples:
    """Draws tokens from softmax of an LM head's logits without making the logits (FlashSampling, Algorithm 1).

    Equal to softmax(logits / T) restricted by min-p, then top-k, then top-p, and a draw from it. Nothing synchronises with
    the host, inputs are not written to, and gradients are not tracked.

    Args:
        hidden: ``[B, D]``, the dtype and device of ``weight``.
        weight, bias, scale, softcap, vocab_size: the head, as in :class:`nologits.LMHead`.
        temperature, top_k, top_p, min_p, seed, position, logit_bias, allowed_tokens: as in
            :class:`nologits.SamplingParams`; scalars or ``[B]`` tensors.
        num_samples: independent draws a row; other than 1 gives results ``[B, S]``.
        logprobs: ``False``, ``"processed"`` (``logprobs`` and ``log_mass``), ``"raw"`` (``raw_logprobs``) or ``True`` (all).
        top_logprobs: how many of a row's most likely tokens come with ``logprobs``, at most 128: ``top`` of the distribution
            that is sampled, ``raw_top`` of the head's own. They take another pass over the head, but not under ``hopper``.
        impl: ``"auto"``, or a name, which runs or raises.
        check: raise if a row is invalid instead of returning token -1; synchronises with the host.

    Returns:
        :class:`nologits.Samples`.

    Raises:
        ValueError: naming the argument, what it must be and what it was.
    """
    head = make_spec(weight, bias, scale, softcap, vocab_size)
    params = SamplingParams(temperature, top_k, top_p, min_p, seed, position, logit_bias, allowed_tokens)
    return sample_head(
        hidden, head, params, num_samples=num_samples, logprobs=logprobs, top_logprobs=top_logprobs, impl=impl, check=check
    )


def sample_head(
    hidden: Tensor,
    head: HeadSpec,
    params: SamplingParams,
    *,
    num_samples: int,
    logprobs: LogprobsMode,
    top_logprobs: int,
    impl: Impl,
    check: bool,
    shard: Shard | None = None,
    validate: bool = True,
) -> Samples:
    """The draw behind :func:`sample` and :meth:`nologits.LMHead.sample`."""
    check_hidden(hidden, head)
    check_num_samples(num_samples)
    processed, raw = _logprobs(logprobs, top_logprobs)
    _check_params(params)
    if shard is not None:
        return _finish(
            _sample_shard(hidden, shard, params, num_samples, processed, raw, top_logprobs, impl, validate), num_samples, check
        )
    name = resolve(impl, hidden.device)
    if impl == "auto":
        head = _chosen(head, hidden.shape[0])
    rows = make_rows(params, hidden.shape[0], head.vocab_size, hidden.device)
    if hidden.shape[0] == 0 or num_samples == 0:
        drawn = _empty(hidden, num_samples, processed, raw)
    else:
        drawn = ops.run_hidden(hidden.detach(), head, rows, num_samples, processed, raw, name, top_logprobs)
    drawn = _finish(drawn, num_samples, check)
    if not top_logprobs or drawn.top is not None or drawn.raw_top is not None:
        return drawn
    source = ops.make_source(hidden.detach(), head, name)
    return _with_top(drawn, lambda some: ops.run_top(source, some, top_logprobs, name), rows, processed, raw)


def sample_rows(hidden: Tensor, head: HeadSpec, rows: RowParams, processed: bool, impl: str) -> Samples:
    """One draw a row, as :func:`sample_head`, for engines that draw from the same rows at step after step: ``rows`` were made
    for this head's vocabulary, and ``impl`` is resolved.

    Raises:
        ValueError: ``hidden`` does not fit the head or the rows.
    """
    check_hidden(hidden, head)
    if rows.seed is None or rows.seed.shape[0] != hidden.shape[0]:
        raise ValueError(f"rows must have a seed for each of {hidden.shape[0]} hidden states")
    head = _chosen(head, hidden.shape[0])
    return ops.run_hidden(hidden.detach(), head, rows, 1, processed, False, impl).squeeze()


def _chosen(head: HeadSpec, batch: int) -> HeadSpec:
    """The head as ``impl="auto"`` draws from it: its screen only where that is faster."""
    return head if head.screen is None or head.screen.pays(batch) else head._replace(screen=None)


def _sample_shard(
    hidden: Tensor,
    shard: Shard,
    params: SamplingParams,
    num_samples: int,
    processed: bool,
    raw: bool,
    top_logprobs: int,
    impl: Impl,
    validate: bool,
) -> Samples:
    from . import sharded  # torch.distributed is not everywhere

    rows = make_rows(params, hidden.shape[0], shard.vocab_size, hidden.device)
    name = _check_ranks(shard, hidden, rows, (num_samples, processed, raw, top_logprobs), impl, validate)
    if hidden.shape[0] == 0 or num_samples == 0:
        drawn = _empty(hidden, num_samples, processed, raw)
    else:
        drawn = sharded.sample(shard, hidden.detach(), rows, num_samples, processed, raw, name, top_logprobs)
    if not top_logprobs or drawn.top is not None or drawn.raw_top is not None:
        return drawn
    return _with_top(drawn, lambda some: sharded.top_tokens(shard, hidden.detach(), some, top_logprobs), rows, processed, raw)


def _check_ranks(shard: Shard, hidden: Tensor, rows: RowParams, asked: tuple[object, ...], impl: Impl, validate: bool) -> str:
    """The implementation of a draw from a shard. Whether all ranks ask alike, if they are to ``validate`` that.

    The host waits for that, so a draw that is captured into a graph goes without. ``"auto"`` is ``"torch"``: the exchange of
    the Hopper kernels has not yet run between two GPUs.
    """
    if impl not in ("auto", "torch", "hopper"):
        raise ValueError(f'impl must be "auto", "torch" or "hopper" for a shard of a head, got {impl!r}')
    name = resolve(impl, hidden.device) if impl == "hopper" else "torch"
    if not validate or (hidden.is_cuda and torch.cuda.is_current_stream_capturing()):
        return name
    from . import sharded

    request = tuple(
        (name, list(value.shape) if isinstance(value, Tensor) else value)
        for name, value in rows._asdict().items()
        if value is not None
    )
    sharded.check_agreement(shard, hidden, (*asked, *request))
    return name


def sample_logits(
    logits: Tensor,
    params: SamplingParams | None = None,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    seed: int | Tensor | None = None,
    position: int | Tensor | None = None,
    logit_bias: LogitBias | None = None,
    allowed_tokens: Tensor | None = None,
    num_samples: int = 1,
    logprobs: LogprobsMode = False,
    top_logprobs: int = 0,
    impl: Impl = "auto",
    check: bool = False,
) -> Samples:
    """Draws tokens from logits that exist already, with the semantics and the noise of :func:`sample`.

    Args:
        logits: ``[B, V]`` fp32, fp16 or bf16, any strides; read as they are, not written to.
        params: all parameters in one record, instead of the keywords.
        temperature, top_k, top_p, min_p, seed, position, logit_bias, allowed_tokens, num_samples, logprobs, top_logprobs,
            impl, check: as for :func:`sample`.

    Returns:
        :class:`nologits.Samples`.

    Raises:
        ValueError: naming the argument, what it must be and what it was.
    """
    _check_logits(logits)
    check_num_samples(num_samples)
    processed, raw = _logprobs(logprobs, top_logprobs)
    if params is None:
        params = SamplingParams(temperature, top_k, top_p, min_p, seed, position, logit_bias, allowed_tokens)
    _check_params(params)
    name = resolve(impl, logits.device)
    rows = make_rows(params, logits.shape[0], logits.shape[1], logits.device)
    if logits.shape[0] == 0 or num_samples == 0:
        drawn = _empty(logits, num_samples, processed, raw)
    else:
        drawn = ops.run_logits(logits.detach(), rows, num_samples, processed, raw, name)
    drawn = _finish(drawn, num_samples, check)
    if not top_logprobs:
        return drawn
    source = LogitsSource(logits.detach())
    return _with_top(drawn, lambda some: ops.run_top(source, some, top_logprobs, name), rows, processed, raw)


def filter_logits(
    logits: Tensor,
    *,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    temperature: float | Tensor = 1.0,
    out: Tensor | None = None,
    mask_value: float = -math.inf,
    impl: Impl = "auto",
) -> Tensor:
    """The logits that the filters keep, ``mask_value`` elsewhere; exact sets, ties to the smaller id (contract, rules 2 and 3).

    Args:
        logits: ``[B, V]`` fp32, fp16 or bf16, any strides.
        top_k, top_p, min_p: as for :func:`sample`.
        temperature: the temperature that top-p and min-p see; the kept logits are returned as they were.
        out: where to write, shaped and typed like ``logits``; ``logits`` itself filters in place. Default: a new tensor.
        mask_value: what dropped logits become.
        impl: as for :func:`sample`.

    Returns:
        ``out``. A row with a NaN, without a logit above -inf, or with an impossible parameter comes out all ``mask_value``.

    Raises:
        ValueError: naming the argument, what it must be and what it was.
    """
    _check_logits(logits)
    if isinstance(mask_value, bool) or not isinstance(mask_value, (int, float)):
        raise ValueError(f"mask_value must be a number, got {mask_value!r}")
    name = resolve(impl, logits.device)
    params = SamplingParams(temperature, top_k, top_p, min_p)
    rows = make_rows(params, logits.shape[0], logits.shape[1], logits.device, noise=False)
    if out is None:
        out = torch.empty_like(logits)
    elif out.shape != logits.shape or out.dtype != logits.dtype:
        raise ValueError(f"out must be {logits.dtype} {list(logits.shape)}, got {out.dtype} {list(out.shape)}")
    check_device("out", out, logits.device)
    if len(logits):
        ops.run_filter(logits.detach(), rows, out, float(mask_value), name)
    return out


def select(
    logits: Tensor | tuple[Tensor, LMHead],
    *,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_bias: LogitBias | None = None,
    allowed_tokens: Tensor | None = None,
    impl: Impl = "auto",
) -> Candidates:
    """The kept set of each row, sorted by (logit descending, id ascending).

    Args:
        logits: ``[B, V]``, or ``(hidden, head)`` for the logits of a head.
        top_k, top_p, min_p, temperature, logit_bias, allowed_tokens, impl: as for :func:`sample`.

    Returns:
        :class:`nologits.Candidates` with ``K`` columns: ``min(top_k, V)`` for a scalar top-k, else ``V`` (the host does not
        read how many are kept).

    Raises:
        ValueError: naming the argument, what it must be and what it was.
    """
    params = SamplingParams(temperature, top_k, top_p, min_p, None, None, logit_bias, allowed_tokens)
    if isinstance(logits, tuple):
        hidden, head = logits
        if not isinstance(head, LMHead):
            raise ValueError(f"head must be a nologits.LMHead, got {type(head).__name__}")
        check_hidden(hidden, head.spec)
        if head.shard is not None:
            return _select_shard(hidden, head, params, impl)
        name = resolve(impl, hidden.device)
        source: HiddenSource | LogitsSource = ops.make_source(hidden.detach(), head.spec, name)
    else:
        _check_logits(logits)
        name = resolve(impl, logits.device)
        source = LogitsSource(logits.detach())
    rows = make_rows(params, source.batch, source.vocab, source.device, noise=False)
    return ops.run_select(source, rows, _width(rows, source.vocab), name)


def _select_shard(hidden: Tensor, head: LMHead, params: SamplingParams, impl: Impl) -> Candidates:
    from . import sharded

    assert head.shard is not None
    rows = make_rows(params, hidden.shape[0], head.shard.vocab_size, hidden.device, noise=False)
    _check_ranks(head.shard, hidden, rows, ("select",), impl, head.validate)
    return sharded.select(head.shard, hidden.detach(), rows, _width(rows, head.shard.vocab_size))


def _width(rows: RowParams, vocab: int) -> int:
    """Columns of a kept set: the host does not read how many a row keeps."""
    return min(rows.top_k, vocab) if isinstance(rows.top_k, int) and rows.top_k > 0 else vocab


def _check_params(params: object) -> None:
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params must be a nologits.SamplingParams, got {type(params).__name__}")


def _check_logits(logits: object) -> None:
    check_matrix("logits", logits, "[B, V]")
    assert isinstance(logits, Tensor)
    if logits.shape[1] > MAX_VOCAB:
        raise ValueError(f"logits must have at most {MAX_VOCAB} columns, got {logits.shape[1]}")


def _logprobs(mode: object, top: object) -> tuple[bool, bool]:
    """Which log-probabilities a mode asks for: (processed, raw). ``top`` tokens need one."""
    if isinstance(top, bool) or not isinstance(top, int) or not 0 <= top <= MAX_TOP:
        raise ValueError(f"top_logprobs must be an integer in [0, {MAX_TOP}], got {top!r}")
    if top and mode is False:
        raise ValueError(f'logprobs must be "processed", "raw" or True with top_logprobs={top}, got False')
    return logprobs_wanted(mode)


def _with_top(drawn: Samples, top_of: Callable[[RowParams], TopTokens], rows: RowParams, processed: bool, raw: bool) -> Samples:
    """The draws with the most likely tokens of each row. A row that is invalid under its parameters has none of the head's own
    either."""
    top = top_of(rows) if processed else None
    raw_top = top_of(rows.bare()._replace(temperature=1.0)) if raw else None
    if raw_top is not None and drawn.tokens.numel():
        raw_top = raw_top.invalidate(drawn.tokens.reshape(len(drawn.tokens), -1)[:, 0] < 0)
    return drawn._replace(top=top, raw_top=raw_top)


def _empty(like: Tensor, num_samples: int, processed: bool, raw: bool) -> Samples:
    shape = (like.shape[0], num_samples)
    return Samples(
        torch.empty(shape, dtype=torch.int64, device=like.device),
        torch.empty(shape, device=like.device) if processed else None,
        torch.empty(shape, device=like.device) if raw else None,
        torch.empty(shape[:1], device=like.device) if processed else None,
    )


def _finish(samples: Samples, num_samples: int, check: bool) -> Samples:
    if check:
        rows = (samples.tokens < 0).any(-1).nonzero().flatten().tolist()
        if rows:
            raise ValueError(
                "hidden and params must give every row a finite logit and possible parameters, "
                f"got {len(rows)} invalid rows, the first {rows[0]}"
            )
    if num_samples != 1:
        return samples
    return samples.squeeze()
