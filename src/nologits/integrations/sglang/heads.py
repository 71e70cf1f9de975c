"""The model's output head, read where SGLang applies it, and what stands in the place of its logits.

``LogitsProcessor._get_logits`` runs inside the captured decode graph, long before it is known which requests a replay will
serve. So where a head can be reproduced it returns :class:`LateLogits` for every batch: the hidden states, with all that is
needed to make logits of them later. ``ModelRunner.sample`` then draws from the hidden states, or has the logits made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...head import LMHead
from ...ops import make_source
from . import config

TARGET = "sglang.srt.layers.logits_processor.LogitsProcessor._get_logits"

_MODES = ("DECODE", "EXTEND", "MIXED")
"""The forward modes that end in ``ModelRunner.sample`` with a row a request."""

_PROBE_ROWS = 4
_PROBE_TOLERANCE = 16.0
"""In units of the dtype's epsilon, of the largest logit: what rounding may differ by."""

_UNQUANTISED = ("UnquantizedEmbeddingMethod", "UnquantizedLinearMethod")

_logger = logging.getLogger("sglang.nologits")

Stock = Callable[..., Tensor]

_refusal = ""


def refusal() -> str:
    """Why SGLang applies this process's head itself; empty if it does not, or has not yet been asked."""
    return _refusal


class Site:
    """A model's head as :class:`nologits.LMHead`, over the model's own weights.

    Args:
        stock: SGLang's ``_get_logits``.
        layer: the ``LogitsProcessor``.
        lm_head: its head.

    Raises:
        ValueError: it cannot be reproduced; the message is the reason.
    """

    def __init__(self, stock: Stock, layer: Any, lm_head: Any) -> None:
        obstacle = config.obstacle() or _obstacle(layer, lm_head)
        if obstacle:
            raise ValueError(obstacle)
        self._layer, self.lm_head = layer, lm_head
        self._head = self._make()
        self.vocab_size = self._head.spec.vocab_size

    def __repr__(self) -> str:
        return repr(self._head)

    def head(self) -> LMHead:
        """The head; it is read again where the model's weights were replaced."""
        if self.lm_head.weight.data_ptr() != self._head.spec.weight.data_ptr():
            self._head = self._make()
        return self._head

    def check(self, logits: Callable[[Tensor], Tensor]) -> None:
        """Compares SGLang's ``logits`` of made-up hidden states with this head's. Waits for the device, once.

        Raises:
            ValueError: they differ by more than rounding.
        """
        weight = self._head.spec.weight
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(_PROBE_ROWS, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
        theirs = logits(hidden).float()
        ours = make_source(hidden, self._head.spec, "torch").chunk(0, self.vocab_size)
        if theirs.shape != ours.shape:
            raise ValueError(f"the model's logits have shape {list(theirs.shape)}, its head gives {list(ours.shape)}")
        limit = _PROBE_TOLERANCE * torch.finfo(weight.dtype).eps * ours.abs().max()
        if not bool((theirs - ours).abs().max() <= limit):
            raise ValueError("the logits layer does more than its head says")

    def _make(self) -> LMHead:
        layer, weight = self._layer, self.lm_head.weight
        scale = 1.0 if layer.logit_scale is None else float(layer.logit_scale)
        # SGLang reads a cap of 0 as none, and leaves a bias of the head out.
        return LMHead(weight, None, scale, layer.final_logit_softcapping or None, min(layer.vocab_size, weight.shape[0]))


class LateLogits:
    """Stands where logits ``[B, V]`` would be, and becomes them as soon as anything but its rows is asked for.

    It is no tensor. Its rows can be cut without making logits, as graph runners and SGLang's batches do; any other use makes
    them by SGLang's own code, so what is not hooked gets what it always got.

    Attributes:
        hidden: ``[B, D]``, what the head multiplies.
        site: the head.
    """

    def __init__(self, hidden: Tensor, site: Site, make: Callable[[Tensor], Tensor], made: Tensor | None = None) -> None:
        self.hidden, self.site = hidden, site
        self._make, self._made = make, made

    @property
    def made(self) -> bool:
        """Somebody has asked for the logits, and may have changed them."""
        return self._made is not None

    def logits(self) -> Tensor:
        """The logits, fp32 ``[B, V]``, made once."""
        if self._made is None:
            self._made = self._make(self.hidden)
        return self._made

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.hidden.shape[0], self.site.vocab_size))

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    def __len__(self) -> int:
        return self.hidden.shape[0]

    def __getitem__(self, rows: Any) -> Any:
        if not isinstance(rows, (slice, list, Tensor)) or (isinstance(rows, Tensor) and rows.ndim != 1):
            return self.logits()[rows]
        return LateLogits(self.hidden[rows], self.site, self._make, None if self._made is None else self._made[rows])

    def __setitem__(self, place: Any, value: Any) -> None:
        self.logits()[place] = value

    def __getattr__(self, name: str) -> Any:
        # Copying and pickling ask for such names before there is anything to make.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.logits(), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        return function(*_materialised(arguments), **_materialised(keywords or {}))


def _materialised(value: Any) -> Any:
    if isinstance(value, LateLogits):
        return value.logits()
    if isinstance(value, (list, tuple)):
        return type(value)(_materialised(one) for one in value)
    if isinstance(value, dict):
        return {name: _materialised(one) for name, one in value.items()}
    return value


def get_logits(
    stock: Stock,
    layer: Any,
    hidden_states: Tensor,
    lm_head: Any,
    logits_metadata: Any,
    embedding_bias: Tensor | None = None,
    use_logits_buffer: bool = True,
) -> Any:
    """The hook around ``LogitsProcessor._get_logits``."""
    if embedding_bias is None and _sampled(logits_metadata):
        try:
            site = _site(stock, layer, lm_head, logits_metadata)
        except Exception:
            _logger.exception("nologits: the head could not be read")
            site = None
        if site is not None:

            def make(hidden: Tensor) -> Tensor:
                return stock(layer, hidden, lm_head, logits_metadata, None, use_logits_buffer)

            return LateLogits(hidden_states, site, make)
    return stock(layer, hidden_states, lm_head, logits_metadata, embedding_bias, use_logits_buffer)


def _sampled(metadata: Any) -> bool:
    """Logits for ``ModelRunner.sample``, and for nothing else."""
    return metadata.forward_mode.name in _MODES and not metadata.extend_return_logprob and not metadata.is_prefill_only


def _site(stock: Stock, layer: Any, lm_head: Any, metadata: Any) -> Site | None:
    """The head's site; ``None`` if SGLang has to apply it. Decided, and logged, at the first call that can wait."""
    global _refusal
    known: tuple[Any, Site | None] | None = vars(layer).get("_nologits")
    if known is not None and known[0] is lm_head:
        return known[1]
    if lm_head.weight.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    try:
        site = Site(stock, layer, lm_head)
        # The shared buffer may hold logits that somebody still reads.
        site.check(lambda hidden: stock(layer, hidden, lm_head, metadata, None, False))
    except Exception as error:
        _refusal = str(error) if isinstance(error, ValueError) else f"of {type(error).__name__}: {error}"
        _logger.warning("nologits: inactive because %s", _refusal)
        vars(layer)["_nologits"] = (lm_head, None)
        return None
    _logger.info("nologits: draws from hidden states with %r", site)
    vars(layer)["_nologits"] = (lm_head, site)
    return site


def _obstacle(layer: Any, lm_head: Any) -> str:
    from sglang.srt.layers.logits_processor import LogitsProcessor

    if type(layer) is not LogitsProcessor:
        return f"a logits layer of its own ({type(layer).__name__})"
    if layer.do_tensor_parallel_all_gather or layer.use_tp_lm_head_all_to_all or layer.use_attn_tp_group:
        return "the head is split over tensor parallel ranks"
    if layer.return_full_logits or layer.rl_on_policy_target is not None:
        return "all logits are asked for" if layer.return_full_logits else "RL on-policy mode"
    if hasattr(lm_head, "set_lora"):
        return "LoRA"
    method = getattr(lm_head, "quant_method", None)
    if not hasattr(lm_head, "weight") or (method is not None and type(method).__name__ not in _UNQUANTISED):
        return f"the head is quantised ({type(method).__name__})"
    if getattr(lm_head, "use_intel_amx_backend", False):
        return "the head is packed for AMX"
    if layer.logit_scale is not None and layer.logit_scale <= 0:
        return f"the logits are scaled by {layer.logit_scale}"
    return ""
