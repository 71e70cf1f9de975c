"""The model's output head, read where vLLM applies it: the call of its logits layer knows weight, bias, cap, scale and V.

While a :data:`Capture` is open it gets that call, and logits are made only if it wants them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...head import LMHead
from ...ops import make_source
from . import ranks

_PROBE_ROWS = 4
_PROBE_TOLERANCE = 16.0
"""In units of the dtype's epsilon, of the largest logit: what rounding may differ by."""

SCREEN = "NOLOGITS_SCREEN"
"""``int8``: heads keep a copy in 8 bits (:class:`nologits.LMHead`)."""

_logger = logging.getLogger("vllm.nologits")
_local = threading.local()
_stock_forward: Callable[..., Any] | None = None


class Call(NamedTuple):
    """A call of the logits layer: ``hidden [B, D]`` is what the head multiplies."""

    layer: Any
    lm_head: Any
    hidden: Tensor
    bias: Tensor | None

    def logits(self) -> Tensor:
        """What the call would have returned."""
        assert _stock_forward is not None
        logits: Tensor = _stock_forward(self.layer, self.lm_head, self.hidden, self.bias)
        return logits


class NoLogits:
    """Stands where logits would be. It is no tensor: code that would compute with it fails instead of going wrong."""


Capture = Callable[[Call], bool]
"""Gets each call of the logits layer, and says whether it has to make logits."""


class Recorder:
    """A capture that keeps the calls, and has logits made or not."""

    def __init__(self, make_logits: bool) -> None:
        self.make_logits = make_logits
        self.calls: list[Call] = []

    def __call__(self, call: Call) -> bool:
        self.calls.append(call)
        return self.make_logits


@contextlib.contextmanager
def capturing(capture: Capture) -> Iterator[None]:
    """Opens a capture on this thread."""
    _local.capture = capture
    try:
        yield
    finally:
        _local.capture = None


def install() -> None:
    """Hooks the logits layer, once a process."""
    global _stock_forward
    if _stock_forward is not None:
        return
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    stock = LogitsProcessor.forward

    # ``further``: vLLM 0.32's skip_gather, which 0.26 does not have.
    def forward(
        layer: Any, lm_head: Any, hidden_states: Tensor, embedding_bias: Tensor | None = None, *further: Any, **named: Any
    ) -> Any:
        capture = getattr(_local, "capture", None)
        if capture is None or any(further) or any(named.values()):
            return stock(layer, lm_head, hidden_states, embedding_bias, *further, **named)
        if capture(Call(layer, lm_head, hidden_states, embedding_bias)):
            return stock(layer, lm_head, hidden_states, embedding_bias)
        return NoLogits()

    LogitsProcessor.forward = forward
    _stock_forward = stock


class Site:
    """A model's head as :class:`nologits.LMHead`, over the model's own weights. All tensor parallel ranks make it together.

    Raises:
        ValueError: it cannot be reproduced; the message is the reason.
    """

    def __init__(self, model: Any, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        call, logits = _probe(model, hidden_size, dtype, device)
        obstacle = _obstacle(call)
        if obstacle:
            raise ValueError(obstacle)
        self._head, self._call = _make(call), call
        self.vocab_size = self._head.vocab_size
        _compare(logits, call.hidden, self._head, dtype)

    def __repr__(self) -> str:
        return repr(self._head)

    @property
    def split(self) -> bool:
        """Other ranks have parts of it: a draw is an exchange."""
        return self._head.shard is not None

    def head(self, call: Call) -> LMHead:
        """The head behind ``call``; it is read again where the model's weights were replaced."""
        if call.lm_head.weight.data_ptr() != self._head.spec.weight.data_ptr() or call.bias is not self._call.bias:
            self._head, self._call = _make(call), call
        return self._head


def _probe(model: Any, hidden_size: int, dtype: torch.dtype, device: torch.device) -> tuple[Call, Tensor]:
    """One call of the model's own ``compute_logits``, on made-up hidden states."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(_PROBE_ROWS, hidden_size, generator=generator).to(device, dtype)
    recorder = Recorder(make_logits=True)
    with torch.inference_mode(), capturing(recorder):
        logits = model.compute_logits(hidden)
    if len(recorder.calls) != 1 or not isinstance(logits, Tensor):
        raise ValueError("the model makes its logits in its own way")
    return recorder.calls[0], logits


def _obstacle(call: Call) -> str:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    layer, lm_head = call.layer, call.lm_head
    if layer.logits_as_input:
        return "the model makes its logits in its own way"
    if not isinstance(lm_head.quant_method, (UnquantizedEmbeddingMethod, UnquantizedLinearMethod)):
        return f"the head is quantised ({type(lm_head.quant_method).__name__})"
    if layer.head_dtype is not None and layer.head_dtype != call.hidden.dtype:
        return f"the head computes in {layer.head_dtype} on hidden states of {call.hidden.dtype}"
    if layer.scale <= 0:
        return f"the logits are scaled by {layer.scale}"
    return ranks.layout_obstacle(lm_head, layer.org_vocab_size) if ranks.is_split(lm_head) else ""


def _make(call: Call) -> LMHead:
    layer, scale = call.layer, float(call.layer.scale)
    # vLLM scales after the soft cap, LMHead before: s * c * tanh(x / c) = (s c) * tanh(s x / (s c)).
    softcap = None if layer.soft_cap is None else scale * float(layer.soft_cap)
    parts = (call.lm_head.weight, call.bias, scale, softcap, layer.org_vocab_size)
    return ranks.make_part(*parts) if ranks.is_split(call.lm_head) else LMHead(*parts, screen=_screen(call.lm_head.weight))


def _screen(weight: Tensor) -> Literal["int8"] | None:
    """The screen that :data:`SCREEN` asks for, where this head can have one.

    Raises:
        ValueError: it asks for something else.
    """
    wanted = os.environ.get(SCREEN, "")
    if wanted not in ("", "int8"):
        raise ValueError(f"{SCREEN} must be int8 or not set, got {wanted!r}")
    if not wanted:
        return None
    if weight.dtype == torch.float32 or weight.is_inference():
        _logger.warning("nologits: %s=int8 is not used: the head's weight is %s", SCREEN, _kind(weight))
        return None
    return "int8"


def _kind(weight: Tensor) -> str:
    return "float32" if weight.dtype == torch.float32 else "made in inference mode"


def _compare(logits: Tensor, hidden: Tensor, head: LMHead, dtype: torch.dtype) -> None:
    """The model's own logits against ours: a step that it adds after the head shows here. Waits for the device, once.

    vLLM gives every rank the logits of all; each compares those of its part.
    """
    wanted = [len(hidden), head.vocab_size]
    if list(logits.shape) != wanted:
        raise ValueError(f"the model's logits have shape {list(logits.shape)}, its head gives {wanted}")
    ours = make_source(hidden, head.spec, "torch").chunk(0, head.spec.vocab_size)
    start = 0 if head.shard is None else head.shard.start
    gap = (logits[:, start : start + ours.shape[1]].float() - ours).abs().max()
    limit = _PROBE_TOLERANCE * torch.finfo(dtype).eps * ours.abs().max()
    if not bool(gap <= limit):
        raise ValueError("the model changes its logits after the head")
