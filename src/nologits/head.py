"""The model's side of a draw: the LM head's weight and what the model does to its logits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from .dispatch import hopper_obstacle
from .live_screen import MAX_DEPTH, LiveScreen
from .params import SamplingParams, check_device
from .selection import MAX_VOCAB
from .types import Candidates, LogprobsMode, MergeRule, Samples

if TYPE_CHECKING:
    from .sharded import Shard
    from .types import Impl

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class HeadSpec(NamedTuple):
    """A checked head: ``softcap(scale * (hidden . weight^T + bias))`` over the first ``vocab_size`` rows of ``weight``."""

    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None
    vocab_size: int
    screen: LiveScreen | None = None
    """The 8-bit copy of ``weight``, which draws may use that it does not change."""


class LMHead:
    """An LM head, built once a model and sampled from every step.

    Without a ``screen`` nothing is copied or cached: an in-place update of ``weight`` or ``bias`` takes effect at the next
    draw, also inside a captured CUDA graph. With one it takes effect at the next call of :meth:`sample`, which sees from the
    weight's version counter that there was one; after what that counter does not see, and before a captured graph is replayed,
    :meth:`refresh` has to be called.

    Args:
        weight: ``[V', D]``, fp32, fp16 or bf16, any strides; rows at or beyond ``vocab_size`` are padding.
        bias: ``[V]`` or ``[V']``, added to the logits.
        scale: factor on the logits after the bias (Granite: ``1 / logits_scaling``; Cohere: ``logit_scale``).
        softcap: ``c`` of ``c * tanh(x / c)``, after the scale (Gemma 2); ``None``: no cap.
        vocab_size: ``V``, the number of real tokens; default all rows of ``weight``.
        group: a ``torch.distributed`` process group whose ranks hold a shard of the head each; ``weight`` and ``bias`` are this
            rank's, ``vocab_size`` is that of all and has to be given. Every rank draws with the same arguments, and gets the
            same results. Runs under ``impl="torch"``, which ``"auto"`` is here, and ``"hopper"``.
        vocab_start: with ``group``, the id of this shard's first row. Rows at or beyond ``vocab_size`` are padding.
        merge: with ``group``, how the ranks' draws become one: ``"pathwise"`` (the very token of one process) or ``"group"``
            (FlashSampling's rule, by log-masses and fresh noise; exact in distribution, without filters).
        validate: with ``group``, compare the ranks' shapes, dtypes and parameters at each draw (one small exchange; the host
            waits for it), so that a rank that differs is an error on all.
        screen: ``"int8"`` keeps a copy of ``weight`` in 8 bits, half its memory again, for draws that can be settled by
            reading that and the weights of the few tokens that can still win: the same tokens, from half the bytes. On a
            Hopper GPU, for fp16 and bf16 weights, up to 64 rows without filters and log-probabilities; all other draws are
            what they are without, and on other devices no copy is made. ``docs/screen.md`` has the proof and the limits.

    Raises:
        ValueError: naming the argument, what it must be and what it was.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        scale: float = 1.0,
        softcap: float | None = None,
        vocab_size: int | None = None,
        group: Any = None,
        vocab_start: int | None = None,
        merge: MergeRule = "pathwise",
        validate: bool = True,
        screen: Literal["int8"] | None = None,
    ) -> None:
        self.shard: Shard | None = None
        self.validate = validate
        if group is None:
            if vocab_start is not None:
                raise ValueError(f"vocab_start must come with a group, got {vocab_start} without")
            if merge != "pathwise":
                raise ValueError(f"merge must come with a group, got {merge!r} without")
            self.spec = _with_screen(make_spec(weight, bias, scale, softcap, vocab_size), screen)
            return
        if screen is not None:
            raise ValueError(f"screen must be None with a group: shards have none yet, got {screen!r}")
        if merge not in ("pathwise", "group"):
            raise ValueError(f'merge must be "pathwise" or "group", got {merge!r}')
        self.shard = _make_shard(weight, bias, scale, softcap, vocab_size, group, vocab_start)._replace(merge=merge)
        self.spec = self.shard.head

    def sample(
        self,
        hidden: Tensor,
        params: SamplingParams | None = None,
        *,
        num_samples: int = 1,
        logprobs: LogprobsMode = False,
        top_logprobs: int = 0,
        impl: Impl = "auto",
        check: bool = False,
    ) -> Samples:
        """Draws tokens from the hidden states ``[B, D]``; see :func:`nologits.sample`."""
        from . import api

        return api.sample_head(
            hidden, self.spec, params or SamplingParams(),
            num_samples=num_samples, logprobs=logprobs, top_logprobs=top_logprobs, impl=impl, check=check,
            shard=self.shard, validate=self.validate,
        )  # fmt: skip

    def select(self, hidden: Tensor, **parameters: Any) -> Candidates:
        """The kept set of each row; see :func:`nologits.select`."""
        from . import api

        return api.select((hidden, self), **parameters)

    def refresh(self) -> None:
        """Makes the ``screen`` anew from the present weights, in the same memory and on the device; without one does nothing.

        Draws of :meth:`sample` do so themselves where they see that the weight was written to. It has to be called

        * before a captured CUDA graph with such draws is replayed, after any update of the weight: a replay looks at nothing;
        * before any draw, after an update that torch does not count: a write through ``weight.data``, a collective of
          ``torch.distributed`` into the weight (a broadcast of new weights), a kernel outside torch.

        Raises:
            RuntimeError: a graph is being captured.
        """
        if self.spec.screen is not None:
            self.spec.screen.refresh()

    @property
    def vocab_size(self) -> int:
        """V, the number of real tokens; of all shards together if this is one."""
        return self.spec.vocab_size if self.shard is None else self.shard.vocab_size

    def __repr__(self) -> str:
        w = self.spec
        extra = "".join(
            f", {name}={value}"
            for name, value, neutral in (("scale", w.scale, 1.0), ("softcap", w.softcap, None))
            if value != neutral
        )
        bias = ", bias" if w.bias is not None else ""
        shard = "" if self.shard is None else f", ids {self.shard.start} to {self.shard.start + w.vocab_size - 1}"
        screen = "" if w.screen is None else ", int8 screen"
        parts = f"{w.weight.dtype}, {w.weight.device}{bias}{extra}{shard}{screen}"
        return f"LMHead(V={self.vocab_size}, D={w.weight.shape[1]}, {parts})"


def _make_shard(
    weight: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
    vocab_size: int | None,
    group: Any,
    start: int | None,
) -> Shard:
    from .sharded import Shard

    for name, value in (("vocab_size", vocab_size), ("vocab_start", start)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} must be an integer >= 0 for a shard of a head, got {value!r}")
    assert vocab_size is not None
    assert start is not None
    if not 1 <= vocab_size <= MAX_VOCAB:
        raise ValueError(f"vocab_size must be in [1, {MAX_VOCAB}], got {vocab_size}")
    if start >= vocab_size:
        raise ValueError(f"vocab_start must be below vocab_size, {vocab_size}, got {start}")
    check_matrix("weight", weight, "[V, D]")
    spec = make_spec(weight, bias, scale, softcap, min(weight.shape[0], vocab_size - start))
    return Shard(spec, group, start, vocab_size)


def make_spec(weight: Tensor, bias: Tensor | None, scale: float, softcap: float | None, vocab_size: int | None) -> HeadSpec:
    """Checks the parts of a head; errors as :class:`LMHead`."""
    check_matrix("weight", weight, "[V, D]")
    rows = weight.shape[0]
    vocab = rows if vocab_size is None else vocab_size
    if isinstance(vocab, bool) or not isinstance(vocab, int) or not 1 <= vocab <= rows:
        raise ValueError(f"vocab_size must be an integer in [1, {rows}] (the rows of weight), got {vocab!r}")
    if vocab > MAX_VOCAB:
        raise ValueError(f"vocab_size must be at most {MAX_VOCAB}, got {vocab}")
    if bias is not None:
        if not isinstance(bias, Tensor) or bias.dim() != 1 or bias.shape[0] not in (vocab, rows):
            got = list(bias.shape) if isinstance(bias, Tensor) else type(bias).__name__
            raise ValueError(f"bias must have shape [{vocab}], got {got}")
        if bias.dtype not in DTYPES:
            raise ValueError(f"bias must be float32, float16 or bfloat16, got {bias.dtype}")
        check_device("bias", bias, weight.device)
        bias = bias.detach()
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number, got {scale!r}")
    if softcap is not None and (not isinstance(softcap, (int, float)) or not 0 < softcap < math.inf):
        raise ValueError(f"softcap must be None or a finite number > 0, got {softcap!r}")
    return HeadSpec(weight.detach(), bias, float(scale), None if softcap is None else float(softcap), vocab)


def _with_screen(spec: HeadSpec, screen: object) -> HeadSpec:
    """The head with the ``screen`` asked for. Its copy is made at once where draws will use it."""
    if screen is None:
        return spec
    weight = spec.weight
    if not isinstance(screen, str) or screen != "int8":
        raise ValueError(f'screen must be None or "int8", got {screen!r}')
    if weight.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"screen must be None unless the weight is float16 or bfloat16, got {screen!r} for {weight.dtype}")
    if weight.is_inference():
        raise ValueError(
            "screen must be None for a weight made under torch.inference_mode, whose updates are not counted, got 'int8'"
        )
    live = LiveScreen(weight[: spec.vocab_size])
    if not hopper_obstacle(weight.device) and spec.scale > 0 and weight.shape[1] <= MAX_DEPTH and live.pays(1):
        live.fresh()
    return spec._replace(screen=live)


def check_matrix(name: str, value: object, shape: str) -> None:
    """``value`` is a 2-D tensor of a supported dtype, with columns."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(value).__name__}")
    if value.dtype not in DTYPES:
        hint = "" if value.dtype.is_floating_point else " (dequantise it first)"
        raise ValueError(f"{name} must be float32, float16 or bfloat16, got {value.dtype}{hint}")
    if value.dim() != 2 or value.shape[1] < 1:
        raise ValueError(f"{name} must have shape {shape}, got {list(value.shape)}")


def check_hidden(hidden: Tensor, head: HeadSpec) -> None:
    """``hidden`` fits the head; errors name the argument."""
    check_matrix("hidden", hidden, "[B, D]")
    depth = head.weight.shape[1]
    if hidden.shape[1] != depth:
        raise ValueError(f"hidden must have shape [B, {depth}] (the D of weight), got {list(hidden.shape)}")
    if hidden.dtype != head.weight.dtype:
        raise ValueError(f"hidden must have the dtype of weight, {head.weight.dtype}, got {hidden.dtype}")
    check_device("hidden", hidden, head.weight.device)
