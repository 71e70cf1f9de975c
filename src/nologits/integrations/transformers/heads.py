"""A model's output head, and what the model does to its logits after it: found by trying it."""

from __future__ import annotations

import inspect
import itertools
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ...head import LMHead
from ...sources import HiddenSource
from .capture import Capture, UnsupportedError

_SOFTCAP_NAMES = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_SCALE_NAMES = ("logit_scale", "logits_scaling", "lm_head_multiplier")
_PROBE_RANGE = 64.0  # beyond every soft cap in use (30 and 50), so that a missed one shows in the first digit
_CHECK_COLUMNS = 1 << 14


class Transform(NamedTuple):
    """logits = softcap(scale * head(hidden))."""

    scale: float
    softcap: float | None


_VERDICTS: WeakKeyDictionary[Any, dict[object, Transform | str]] = WeakKeyDictionary()
_SCREENED: WeakKeyDictionary[Any, LMHead] = WeakKeyDictionary()


def find_head(model: Any, screen: Literal["int8"] | None = None) -> LMHead:
    """The model's output head with everything the model does to its logits, checked against the model's own.

    The check is one forward of four tokens, done once a model (again if its dtype, device or config changes). The head
    shares the model's weights. With a ``screen``, as :class:`nologits.LMHead` takes it, one head is kept for the model.

    Raises:
        ValueError: the head cannot be reproduced; the message has the reason.
    """
    try:
        return head_of(model, screen)
    except UnsupportedError as refusal:
        raise ValueError(f"model must be one whose logits can be reproduced, got {type(model).__name__}: {refusal}") from None


def head_of(model: Any, screen: Literal["int8"] | None = None) -> LMHead:
    """The checked head; raises :class:`UnsupportedError` with the reason."""
    if model.config.is_encoder_decoder:
        raise UnsupportedError("the model is an encoder-decoder")
    head = model.get_output_embeddings()
    _check_module(head)
    candidates = _candidates(model)
    verdicts = _VERDICTS.setdefault(model, {})
    weight = head.weight
    # Nothing of the weights' values: what follows the head does not depend on them.
    key = (weight.dtype, weight.device, tuple(weight.shape), head.bias is None, tuple(candidates))
    if key not in verdicts:
        verdicts[key] = _try_out(model, head, candidates)
    verdict = verdicts[key]
    if isinstance(verdict, str):
        raise UnsupportedError(verdict)
    return LMHead(weight, head.bias, *verdict) if screen is None else _screened(model, head, verdict, screen)


def _screened(model: Any, head: nn.Linear, transform: Transform, screen: Literal["int8"]) -> LMHead:
    """The model's head with a screen; its copy is made once, and again where the weights were replaced."""
    kept, bias = _SCREENED.get(model), head.bias
    if kept is not None:
        spec = kept.spec
        addresses = [None if part is None else part.data_ptr() for part in (spec.weight, spec.bias, head.weight, bias)]
        same = spec.weight.shape == head.weight.shape and spec.weight.dtype == head.weight.dtype
        if same and addresses[:2] == addresses[2:] and (spec.scale, spec.softcap) == transform:
            return kept
    _SCREENED[model] = made = LMHead(head.weight, bias, *transform, screen=screen)
    return made


def _check_module(head: Any) -> None:
    if type(head) is not nn.Linear:  # a subclass may be quantised, adapted or parametrised
        raise UnsupportedError(f"the output head is a {type(head).__name__}, not a plain Linear")
    for tensor in (head.weight, head.bias):
        if tensor is not None and type(tensor) not in (nn.Parameter, Tensor):
            raise UnsupportedError(f"the output head's weights are a {type(tensor).__name__}")
    if "forward" in vars(head) or head._compiled_call_impl is not None:
        raise UnsupportedError("the output head's forward is replaced (by a hook, or a generate call that is still running)")
    if head._forward_hooks or head._forward_pre_hooks:
        raise UnsupportedError("the output head has forward hooks, which would not see its logits")
    if head.weight.device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"the output head is on {head.weight.device.type}, where the draw has not been tried")
    try:
        LMHead(head.weight, head.bias)
    except ValueError as error:  # a dtype or shape (sharded weights are empty) that cannot be sampled from
        raise UnsupportedError(f"of the output head, {error}") from None


def _candidates(model: Any) -> list[Transform]:
    """What may follow the head, by the names that models use for it; the probe decides which does."""
    configs = (model.config.get_text_config(), model.config)

    def values(names: tuple[str, ...]) -> list[float]:
        found = [getattr(config, name, None) for config in configs for name in names]
        return [float(v) for v in found if isinstance(v, (int, float)) and not isinstance(v, bool) and v > 0]

    scales = [s for value in values(_SCALE_NAMES) for s in (value, 1 / value)]
    pairs = itertools.product([*scales, 1.0], [*values(_SOFTCAP_NAMES), None])
    return list(dict.fromkeys(Transform(*pair) for pair in pairs))


class _Probe(Capture):
    """Row 0 gets the head's own logits, row 1 known values: the model's output shows what it does to each."""

    calls = 0

    def _keep(self, hidden: Tensor) -> Tensor:
        if hidden.dim() != 3 or hidden.shape[0] != 2:
            raise UnsupportedError(f"the output head gets hidden states of shape {list(hidden.shape)}, not [B, L, D]")
        self.calls += 1
        self._hidden = hidden[:1, -1].to(self._head.weight.dtype, copy=True)
        logits = nn.Linear.forward(self._head, hidden[:1])
        return torch.cat([logits, _probe_values(logits).expand_as(logits)])


def _probe_values(like: Tensor) -> Tensor:
    values = torch.linspace(-_PROBE_RANGE, _PROBE_RANGE, like.shape[-1], device=like.device)
    return values.to(like.dtype)


def _try_out(model: Any, head: nn.Linear, candidates: list[Transform]) -> Transform | str:
    """One short forward: which candidate explains what the model makes of known values and of a row of its own."""
    probe = _Probe(head)
    probe.acquire()
    ids = torch.arange(1, 5, device=model.device) % head.weight.shape[0]
    cached = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    try:
        with torch.no_grad():
            logits = model(input_ids=ids.expand(2, -1), return_dict=True, **cached).logits
    except UnsupportedError:
        raise
    except Exception as failure:  # whatever a model wants besides token ids
        raise UnsupportedError(f"the model could not be tried on four tokens ({type(failure).__name__}: {failure})") from None
    finally:
        probe.release()
    vocab = head.weight.shape[0]
    if probe.calls != 1 or logits.dim() != 3 or logits.shape[-1] != vocab:
        return f"the model makes logits {list(logits.shape)} with {probe.calls} calls of its output head of {vocab} rows"

    eps = torch.finfo(head.weight.dtype).eps
    sent = _probe_values(logits.to(head.weight.dtype)).float()
    got = logits[1, -1].float()
    errors = {}
    for transform in candidates:
        expected = sent * transform.scale
        if transform.softcap is not None:
            expected = transform.softcap * torch.tanh(expected / transform.softcap)
        error = (got - expected).abs()
        if bool((error <= eps * (1 + 4 * expected.abs())).all()):
            errors[transform] = float(error.sum())
    if not errors:
        tried = "; ".join(f"scale {t.scale:g}, soft cap {t.softcap}" for t in candidates)
        return f"the model changes its logits after the head in a way that is not known here (tried: {tried})"
    best = min(errors, key=errors.__getitem__)
    return best if _same_row(probe.take(), head, best, logits[0, -1]) else "the head's logits differ from the model's own"


def _same_row(hidden: Tensor, head: nn.Linear, transform: Transform, own: Tensor) -> bool:
    """Whether the logits drawn from are the model's, within the rounding of its dtype; by columns, as ``V`` may be large."""
    spec = LMHead(head.weight, head.bias, *transform).spec
    # On a GPU fp32 products may run in TF32, 10 bits.
    eps = torch.finfo(hidden.dtype).eps if not hidden.is_cuda else max(torch.finfo(hidden.dtype).eps, 2.0**-10)
    for start in range(0, spec.vocab_size, _CHECK_COLUMNS):
        stop = min(start + _CHECK_COLUMNS, spec.vocab_size)
        ours = HiddenSource(hidden, spec).chunk(start, stop)[0]
        size = torch.mv(spec.weight[start:stop].float().abs(), hidden[0].float().abs())
        if spec.bias is not None:
            size = size + spec.bias[start:stop].float().abs()
        if not bool(((ours - own[start:stop].float()).abs() <= 16 * eps * size * abs(spec.scale)).all()):
            return False
    return True
