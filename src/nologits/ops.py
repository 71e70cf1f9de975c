"""The draw as ``torch.library`` operators, so that compiled graphs carry it whole.

``nologits::sample_hidden`` and ``nologits::sample_logits`` take the records of the eager path flattened to tensors and numbers,
and return ``(tokens, logprobs, raw_logprobs, log_mass)`` with an empty tensor in place of what was not asked for.
``nologits::sample_screened`` is the former for a head with a screen, which it takes by its key in this process. Eager calls
skip the operators (their dispatch costs more than a launch); ``torch.compile`` traces through them and their fakes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import candidates, filtered, live_screen
from .head import HeadSpec
from .params import RowParams
from .sources import HiddenSource, LogitsSource, Source
from .tops import top_tokens
from .types import Candidates, Samples, TopTokens

_FILTERS = (
    "Tensor? temperature, float temperature_value, Tensor? top_k, int top_k_value, Tensor? top_p, float top_p_value, "
    "Tensor? min_p, float min_p_value"
)
_REQUEST = (
    f"{_FILTERS}, Tensor? seed, Tensor? position, Tensor? entropy, Tensor? logit_bias, Tensor? bias_ids, Tensor? bias_values, "
    "Tensor? allowed"
)
_ROWS = f"{_REQUEST}, int num_samples, bool processed, bool raw, str impl"
_RESULTS = "(Tensor tokens, Tensor logprobs, Tensor raw_logprobs, Tensor log_mass)"
_HEAD = "Tensor hidden, Tensor weight, Tensor? bias, float scale, float? softcap, int vocab_size"

_library = torch.library.Library("nologits", "DEF")
_library.define(f"sample_hidden({_HEAD}, {_ROWS}) -> {_RESULTS}", tags=torch.Tag.nondeterministic_seeded)
# Whether a screen is stale is asked at each call: no compiler may put the call into a CUDA graph of its own making.
_UNSAFE = [torch.Tag.cudagraph_unsafe] if hasattr(torch.Tag, "cudagraph_unsafe") else []
_library.define(
    f"sample_screened(int screen, {_HEAD}, {_ROWS}) -> {_RESULTS}", tags=(torch.Tag.nondeterministic_seeded, *_UNSAFE)
)
_library.define(f"sample_logits(Tensor logits, {_ROWS}) -> {_RESULTS}", tags=torch.Tag.nondeterministic_seeded)

_library.define(f"top_hidden({_HEAD}, {_REQUEST}, int count, str impl) -> (Tensor ids, Tensor logprobs)")
_library.define(f"top_logits(Tensor logits, {_REQUEST}, int count, str impl) -> (Tensor ids, Tensor logprobs)")
_library.define(f"filter_logits(Tensor logits, {_FILTERS}, Tensor(a!) out, float mask_value, str impl) -> ()")

Results = tuple[Tensor, Tensor, Tensor, Tensor]


def implementation(impl: str) -> Callable[..., Samples]:
    """The function behind a resolved implementation's name; Triton and CUDA are imported here and nowhere else."""
    if impl == "triton":
        from . import fused

        return fused.sample
    if impl == "hopper":
        from . import hopper

        return hopper.sample
    from . import reference, streaming

    return {"reference": reference.sample, "torch": streaming.sample}[impl]


def make_source(hidden: Tensor, head: HeadSpec, impl: str) -> HiddenSource:
    return HiddenSource(hidden, head, torch.float64 if impl == "reference" else torch.float32)


def row_source(source: HiddenSource | LogitsSource, impl: str) -> Source:
    """Where whole rows of logits come from under ``impl``."""
    if impl in ("triton", "hopper") and isinstance(source, HiddenSource):
        from .fused import KernelSource

        return KernelSource(source)
    return source


def run_hidden(
    hidden: Tensor, head: HeadSpec, rows: RowParams, num_samples: int, processed: bool, raw: bool, impl: str, num_top: int = 0
) -> Samples:
    """A draw from hidden states, by the operator where a graph is being traced.

    The ``num_top`` likeliest tokens come with it where ``impl`` has them from the same pass; else :func:`run_top` is asked.
    """
    if torch.compiler.is_compiling():
        flat = (hidden, *_flatten_head(head), *_flatten(rows), num_samples, processed, raw, impl)
        if head.screen is None or impl != "hopper":
            return _as_samples(torch.ops.nologits.sample_hidden(*flat), processed, raw)
        return _as_samples(torch.ops.nologits.sample_screened(head.screen.key, *flat), processed, raw)
    source = make_source(hidden, head, impl)
    if impl == "hopper" and num_top:
        from . import hopper

        return hopper.sample(source, rows, num_samples, processed, raw, num_top)
    return implementation(impl)(source, rows, num_samples, processed, raw)


def run_logits(logits: Tensor, rows: RowParams, num_samples: int, processed: bool, raw: bool, impl: str) -> Samples:
    """A draw from given logits, by the operator where a graph is being traced."""
    if torch.compiler.is_compiling():
        return _as_samples(
            torch.ops.nologits.sample_logits(logits, *_flatten(rows), num_samples, processed, raw, impl), processed, raw
        )
    return implementation(impl)(LogitsSource(logits), rows, num_samples, processed, raw)


def run_top(source: HiddenSource | LogitsSource, rows: RowParams, count: int, impl: str) -> TopTokens:
    """The most likely tokens of each row, by the operator where a graph is being traced."""
    if not torch.compiler.is_compiling():
        return top_tokens(row_source(source, impl), rows, count)
    flat = _flatten(rows._replace(seed=None, position=None, entropy=None))
    if isinstance(source, HiddenSource):
        return TopTokens(*torch.ops.nologits.top_hidden(source.hidden, *_flatten_head(source.head), *flat, count, impl))
    return TopTokens(*torch.ops.nologits.top_logits(source.logits, *flat, count, impl))


def run_filter(logits: Tensor, rows: RowParams, out: Tensor, mask_value: float, impl: str) -> None:
    """The kept logits, by the operator where a graph is being traced."""
    if torch.compiler.is_compiling():
        torch.ops.nologits.filter_logits(logits, *_flatten(rows)[:8], out, mask_value, impl)
        return
    if impl == "hopper":
        from . import hopper

        hopper.filter_logits(logits, rows, out, mask_value)
    else:
        filtered.filter_logits(logits, LogitsSource(logits), rows, out, mask_value)


def run_select(source: HiddenSource | LogitsSource, rows: RowParams, width: int, impl: str) -> Candidates:
    """The kept sets. Not an operator: a graph that is being traced takes in the torch code."""
    if impl == "hopper" and not torch.compiler.is_compiling():
        from . import hopper

        return hopper.select(source, rows, width)
    if impl == "torch" and source.device.type == "cpu" and rows.filtered and not torch.compiler.is_compiling():
        return candidates.select(source, rows, width)
    return filtered.select(row_source(source, impl), rows, width)


def _filter_logits(logits: Tensor, *rest: object) -> None:
    *flat, out, mask_value, impl = rest
    run_filter(logits, _unflatten([*flat, *[None] * 7]), out, mask_value, impl)  # type: ignore[arg-type]


def _sample_hidden(hidden: Tensor, *rest: object) -> Results:
    return _sample_head(0, hidden, *rest)  # type: ignore[arg-type]


def _sample_head(
    screen: int,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
    vocab_size: int,
    *rest: object,
) -> Results:
    *flat, num_samples, processed, raw, impl = rest
    head = HeadSpec(weight, bias, scale, softcap, vocab_size, live_screen.find(screen, weight))
    return _as_results(run_hidden(hidden, head, _unflatten(flat), num_samples, processed, raw, impl))  # type: ignore[arg-type]


def _sample_logits(logits: Tensor, *rest: object) -> Results:
    *flat, num_samples, processed, raw, impl = rest
    return _as_results(run_logits(logits, _unflatten(flat), num_samples, processed, raw, impl))  # type: ignore[arg-type]


def _top_hidden(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float, softcap: float | None, vocab_size: int, *rest: object
) -> tuple[Tensor, Tensor]:
    *flat, count, impl = rest
    source = make_source(hidden, HeadSpec(weight, bias, scale, softcap, vocab_size), impl)  # type: ignore[arg-type]
    return tuple(run_top(source, _unflatten(flat), count, impl))  # type: ignore[arg-type, return-value]


def _top_logits(logits: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    *flat, count, impl = rest
    return tuple(run_top(LogitsSource(logits), _unflatten(flat), count, impl))  # type: ignore[arg-type, return-value]


def _fake_top(rows: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    shape = (rows.shape[0], rest[-2])
    return rows.new_empty(shape, dtype=torch.int64), rows.new_empty(shape, dtype=torch.float32)  # type: ignore[arg-type]


def _fake_hidden(hidden: Tensor, *rest: object) -> Results:
    return _fake(hidden, *rest[-4:-1])  # type: ignore[arg-type]


def _fake_screened(screen: int, hidden: Tensor, *rest: object) -> Results:
    return _fake_hidden(hidden, *rest)


def _fake_logits(logits: Tensor, *rest: object) -> Results:
    return _fake(logits, *rest[-4:-1])  # type: ignore[arg-type]


def _fake(rows: Tensor, num_samples: int, processed: bool, raw: bool) -> Results:
    batch = rows.shape[0]
    return (
        rows.new_empty((batch, num_samples), dtype=torch.int64),
        rows.new_empty((batch, num_samples) if processed else (0,), dtype=torch.float32),
        rows.new_empty((batch, num_samples) if raw else (0,), dtype=torch.float32),
        rows.new_empty((batch,) if processed else (0,), dtype=torch.float32),
    )


for _name, _function, _shape in (
    ("sample_hidden", _sample_hidden, _fake_hidden),
    ("sample_screened", _sample_head, _fake_screened),
    ("sample_logits", _sample_logits, _fake_logits),
    ("top_hidden", _top_hidden, _fake_top),
    ("top_logits", _top_logits, _fake_top),
):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nologits::{_name}", _shape, lib=_library)


_library.impl("filter_logits", _filter_logits, "CompositeExplicitAutograd")
torch.library.register_fake("nologits::filter_logits", lambda *arguments: None, lib=_library)


def _flatten_head(head: HeadSpec) -> tuple[object, ...]:
    """A head as the operators take it, without its screen."""
    return head[:5]


def _flatten(rows: RowParams) -> list[object]:
    """Rows as the operators take them: a number that may be a tensor becomes (tensor or None, number)."""
    flat: list[object] = []
    for name, value in rows._asdict().items():
        if name in ("temperature", "top_k", "top_p", "min_p"):
            flat += [value, 0 if name == "top_k" else 0.0] if isinstance(value, Tensor) else [None, value]
        else:
            flat.append(value)
    return flat


def _unflatten(flat: list[object]) -> RowParams:
    pairs = [tensor if tensor is not None else number for tensor, number in zip(flat[0:8:2], flat[1:8:2], strict=True)]
    return RowParams(*pairs, *flat[8:])  # type: ignore[arg-type]


def _as_results(samples: Samples) -> Results:
    # A fresh empty tensor each: an operator's results may not alias one another.
    parts = (samples.tokens.new_empty(0, dtype=torch.float32) if part is None else part for part in samples[1:4])
    return (samples.tokens, *parts)  # type: ignore[return-value]


def _as_samples(results: Results, processed: bool, raw: bool) -> Samples:
    tokens, logprobs, raw_logprobs, log_mass = results
    return Samples(tokens, logprobs if processed else None, raw_logprobs if raw else None, log_mass if processed else None)
