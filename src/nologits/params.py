"""Sampling parameters: the public record, its validation, and the per-row form that every implementation reads.

Scalars are checked here, on the host. Tensors are never read by the host (that would synchronise): a row with an impossible
value becomes an invalid row on the device. Only tensors that already live on the CPU have their ids checked.
"""

from __future__ import annotations

import ctypes
import math
import sys
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .noise import MAX_SAMPLES

LogitBias = Tensor | tuple[Tensor, Tensor]
UNSEEDED = -1
"""In a seed tensor: this row has no seed and draws fresh noise from torch's generator."""

_MAX_TEMPERATURE = torch.finfo(torch.float32).max / 128
"""Noise reaches 22.9, and the bounds that kernels put on it 45: from about 7e36 on, T times those would leave fp32."""
_INTEGER_DTYPES = (torch.int32, torch.int64)
_FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class SamplingParams:
    """How to draw. Every value is a Python scalar or a 1-D tensor with one entry a row, on the device of the input.

    Attributes:
        temperature: at least 0; 0 is greedy (the largest logit, smallest id among equals). Read as fp32.
        top_k: keep the k largest. Off: ``None``, 0, -1, or k at least V.
        top_p: keep the shortest prefix whose mass reaches p, at least one token. In [0, 1]; off: ``None`` or 1.
        min_p: keep tokens with p_i >= min_p * p_max. In [0, 1]; off: ``None`` or 0.
        seed: 64-bit key of the row's noise. ``None``, or ``-1`` in an int64 tensor: fresh noise from torch's generator. A
            uint64 tensor has a seed for every row; the generator is left alone then, which spares two small kernels.
        position: index of the draw within its sequence (int64); with a seed, the draw depends on nothing else.
        logit_bias: added to the logits after the soft cap: dense ``[V]`` or ``[B, V]``, or sparse ``(ids, values)``, both
            ``[B, K]`` (or ``[K]`` for all rows), ids padded with -1, repeated ids added up.
        allowed_tokens: int32 bitmask ``[B, ceil(V / 32)]`` (or one row for all): bit v % 32 of word v // 32 allows token v.
    """

    temperature: float | Tensor = 1.0
    top_k: int | Tensor | None = None
    top_p: float | Tensor | None = None
    min_p: float | Tensor | None = None
    seed: int | Tensor | None = None
    position: int | Tensor | None = None
    logit_bias: LogitBias | None = field(default=None, repr=False)
    allowed_tokens: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, sys.float_info.max, "a finite number >= 0")
        if not isinstance(self.temperature, Tensor) and self.temperature > _MAX_TEMPERATURE:
            raise ValueError(f"temperature must be at most {_MAX_TEMPERATURE:.4g}, got {self.temperature}")
        _check_number("top_p", self.top_p, 0.0, 1.0, "a number in [0, 1]", optional=True)
        _check_number("min_p", self.min_p, 0.0, 1.0, "a number in [0, 1]", optional=True)
        _check_integer("top_k", self.top_k, -1, 2**31 - 1, "an integer >= -1", optional=True)
        _check_integer("seed", self.seed, -(2**63), 2**64 - 2, "an integer of 64 bits", optional=True)
        _check_integer("position", self.position, 0, 2**63 - 1, "an integer in [0, 2**63)", optional=True)


class RowParams(NamedTuple):
    """Sampling parameters of ``B`` rows, normalised: scalars stay Python numbers, tensors are ``[B]`` (maybe stride 0).

    ``top_k`` 0, ``top_p`` 1.0 and ``min_p`` 0.0 are off. ``seed`` ``None``: every row is unseeded. ``entropy`` is one
    int64 from torch's generator, the key of the unseeded rows, whose position is their slot in the batch; ``None`` where no
    row can be unseeded.
    """

    temperature: float | Tensor
    top_k: int | Tensor
    top_p: float | Tensor
    min_p: float | Tensor
    seed: Tensor | None
    position: Tensor | None
    entropy: Tensor | None
    logit_bias: Tensor | None
    bias_ids: Tensor | None
    bias_values: Tensor | None
    allowed: Tensor | None

    @property
    def greedy(self) -> bool:
        """Every row is known, on the host, to be greedy."""
        return not isinstance(self.temperature, Tensor) and self.temperature == 0

    @property
    def temperature32(self) -> float | Tensor:
        """The temperature as kernels see it: a scalar acts exactly as the fp32 tensor holding it would."""
        value = self.temperature
        return value if isinstance(value, Tensor) else ctypes.c_float(value).value

    @property
    def num_biased(self) -> int:
        """Entries a row of the sparse logit bias."""
        return 0 if self.bias_ids is None else self.bias_ids.shape[1]

    @property
    def filtered(self) -> bool:
        """Some row may have a filter that matters (tensors count: the host does not read them)."""
        off = ((self.top_k, 0), (self.top_p, 1.0), (self.min_p, 0.0))
        return not self.greedy and any(isinstance(value, Tensor) or value != neutral for value, neutral in off)

    @property
    def all_filtered(self) -> bool:
        """Every row is known, on the host, to have a filter and a temperature above 0: they are numbers."""
        temperature = self.temperature32
        if isinstance(temperature, Tensor) or temperature == 0:
            return False
        off = ((self.top_k, 0), (self.top_p, 1.0), (self.min_p, 0.0))
        return any(not isinstance(value, Tensor) and value != neutral for value, neutral in off)

    @property
    def plain_logits(self) -> bool:
        """The request adds nothing to the logits and masks none of them."""
        return self.logit_bias is None and self.bias_ids is None and self.allowed is None

    def block(self, start: int, stop: int) -> RowParams:
        """The parameters of rows ``start .. stop - 1``; unseeded rows must already have keys (:func:`with_keys`)."""
        parts = {
            name: value[start:stop] for name, value in self._asdict().items() if isinstance(value, Tensor) and name != "entropy"
        }
        return self._replace(**parts)

    def bare(self) -> RowParams:
        """The same noise and temperature, without filters, bias or mask: for logits that have had theirs."""
        return self._replace(top_k=0, top_p=1.0, min_p=0.0, logit_bias=None, bias_ids=None, bias_values=None, allowed=None)

    def keys(self, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The noise key and position of each row, int64 ``[B]``: unseeded rows take the entropy and their slot."""
        slots = torch.arange(batch, device=device)
        if self.seed is None:
            return torch.zeros_like(slots) if self.entropy is None else self.entropy.expand(batch), slots
        position = torch.zeros_like(slots) if self.position is None else self.position
        if self.entropy is None:
            return self.seed, position
        fresh = self.seed == UNSEEDED
        return torch.where(fresh, self.entropy, self.seed), torch.where(fresh, slots, position)

    def with_keys(self, batch: int, device: torch.device) -> RowParams:
        """The same draws with every row seeded, so that blocks of rows can be drawn apart."""
        seed, position = self.keys(batch, device)
        return self._replace(seed=seed, position=position)

    def impossible(self, batch: int, device: torch.device) -> Tensor:
        """bool ``[B]``: rows with a parameter outside its range. Scalars were checked on the host."""
        bad = torch.zeros(batch, dtype=torch.bool, device=device)
        if isinstance(self.temperature, Tensor):
            bad = bad | ~((self.temperature >= 0) & (self.temperature < math.inf))
        if isinstance(self.top_k, Tensor):
            bad = bad | (self.top_k < -1)
        for share in (self.top_p, self.min_p):
            if isinstance(share, Tensor):
                bad = bad | ~((share >= 0) & (share <= 1))
        return bad


def make_rows(params: SamplingParams, batch: int, vocab: int, device: torch.device, noise: bool = True) -> RowParams:
    """Checks shapes, dtypes and devices of ``params`` against ``B``, ``V`` and the device, and normalises them.

    Without ``noise`` nothing will be drawn, and torch's generator is left alone.

    Raises:
        ValueError: naming the argument, what it must be and what it was.
    """
    temperature = _row_tensor("temperature", params.temperature, batch, device, _FLOAT_DTYPES, torch.float32)
    # These stay as they are where kernels read them so: a conversion is a kernel of its own.
    top_k = _row_tensor("top_k", params.top_k, batch, device, _INTEGER_DTYPES)
    top_p = _row_tensor("top_p", params.top_p, batch, device, _FLOAT_DTYPES, _wide_float(params.top_p))
    min_p = _row_tensor("min_p", params.min_p, batch, device, _FLOAT_DTYPES, _wide_float(params.min_p))
    seed = _row_tensor("seed", params.seed, batch, device, (*_INTEGER_DTYPES, torch.uint64), torch.int64)
    position = _row_tensor("position", params.position, batch, device, _INTEGER_DTYPES, torch.int64)
    dense, ids, values = _logit_bias(params.logit_bias, batch, vocab, device)
    rows = RowParams(
        temperature=1.0 if temperature is None else temperature,
        top_k=top_k if isinstance(top_k, Tensor) or (top_k is not None and 0 < top_k < vocab) else 0,  # type: ignore[arg-type]
        top_p=1.0 if top_p is None else top_p,
        min_p=0.0 if min_p is None else min_p,
        seed=_filled(seed, batch, device),
        position=_filled(position, batch, device),
        entropy=None,
        logit_bias=dense,
        bias_ids=ids,
        bias_values=values,
        allowed=_allowed(params.allowed_tokens, batch, vocab, device),
    )
    if not noise or rows.greedy or _all_seeded(params.seed):
        return rows
    # Fresh noise costs one draw of torch's generator, also beside seeded rows: the host cannot see which are unseeded.
    return rows._replace(entropy=torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device))


def _all_seeded(seed: int | Tensor | None) -> bool:
    """No row can be unseeded, as the host knows from the type alone."""
    return seed.dtype == torch.uint64 if isinstance(seed, Tensor) else seed is not None and seed != UNSEEDED


def check_num_samples(num_samples: int) -> None:
    _check_integer("num_samples", num_samples, 0, MAX_SAMPLES - 1, "an integer in [0, 2**24)")


def _check_number(name: str, value: object, low: float, high: float, must: str, optional: bool = False) -> None:
    if isinstance(value, Tensor) or (optional and value is None):
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be {must} or a 1-D tensor, got {value!r}")
    if not low <= value <= high:  # NaN fails too
        raise ValueError(f"{name} must be {must}, got {value}")


def _check_integer(name: str, value: object, low: int, high: int, must: str, optional: bool = False) -> None:
    if optional and (value is None or isinstance(value, Tensor)):
        return
    if isinstance(value, Tensor):
        raise ValueError(f"{name} must be {must}, got a Tensor")
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be {must}, got {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be {must}, got {value}")


def _row_tensor(
    name: str,
    value: float | int | Tensor | None,
    batch: int,
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    dtype: torch.dtype | None = None,
) -> float | int | Tensor | None:
    if not isinstance(value, Tensor):
        return value
    if value.dim() != 1 or value.shape[0] != batch:
        raise ValueError(f"{name} must be a scalar or a tensor of shape [{batch}], got shape {list(value.shape)}")
    if value.dtype not in dtypes:
        raise ValueError(f"{name} must have a dtype of {_names(dtypes)}, got {value.dtype}")
    check_device(name, value, device)
    if dtype is None:
        return value
    return value.view(dtype) if value.dtype == torch.uint64 else value.to(dtype)


def _wide_float(value: object) -> torch.dtype:
    return torch.float64 if isinstance(value, Tensor) and value.dtype == torch.float64 else torch.float32


def _filled(value: float | Tensor | None, batch: int, device: torch.device) -> Tensor | None:
    """An int64 row tensor for a scalar of 64 bits (read as two's complement)."""
    if value is None or isinstance(value, Tensor):
        return value
    word = int(value)
    return torch.full((1,), word - 2**64 if word >= 2**63 else word, dtype=torch.int64, device=device).expand(batch)


def _logit_bias(
    bias: LogitBias | None, batch: int, vocab: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if bias is None:
        return None, None, None
    if isinstance(bias, Tensor):
        if tuple(bias.shape) not in ((vocab,), (batch, vocab)):
            raise ValueError(f"logit_bias must have shape [{vocab}] or [{batch}, {vocab}], got {list(bias.shape)}")
        if bias.dtype not in _FLOAT_DTYPES:
            raise ValueError(f"logit_bias must have a floating dtype, got {bias.dtype}")
        check_device("logit_bias", bias, device)
        return bias.expand(batch, vocab), None, None
    if not (isinstance(bias, tuple) and len(bias) == 2 and all(isinstance(part, Tensor) for part in bias)):
        raise ValueError(f"logit_bias must be a tensor or a pair (ids, values) of tensors, got {type(bias).__name__}")
    ids, values = bias
    if ids.shape != values.shape or ids.dim() not in (1, 2) or (ids.dim() == 2 and ids.shape[0] not in (1, batch)):
        raise ValueError(
            f"logit_bias must be (ids, values) of one shape [{batch}, K] or [K], got {list(ids.shape)} and {list(values.shape)}"
        )
    if ids.dtype not in _INTEGER_DTYPES:
        raise ValueError(f"logit_bias ids must be int32 or int64, got {ids.dtype}")
    if values.dtype not in _FLOAT_DTYPES:
        raise ValueError(f"logit_bias values must have a floating dtype, got {values.dtype}")
    check_device("logit_bias ids", ids, device)
    check_device("logit_bias values", values, device)
    if ids.device.type == "cpu" and ids.numel() and not torch.compiler.is_compiling():
        wrong = ids[(ids < -1) | (ids >= vocab)]
        if wrong.numel():
            raise ValueError(f"logit_bias ids must be in [0, {vocab}) or -1 for padding, got {int(wrong[0])}")
    shape = (batch, ids.shape[-1])
    return None, ids.expand(shape).to(torch.int64), values.expand(shape).to(torch.float32)


def _allowed(mask: Tensor | None, batch: int, vocab: int, device: torch.device) -> Tensor | None:
    if mask is None:
        return None
    words = -(-vocab // 32)
    if not isinstance(mask, Tensor) or mask.dtype != torch.int32:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"allowed_tokens must be an int32 bitmask, got {got}")
    if mask.dim() == 1:
        mask = mask[None]
    # Engines allocate the mask for the padded vocabulary: further words are ignored, as are the bits beyond V.
    if mask.dim() != 2 or mask.shape[0] not in (1, batch) or mask.shape[1] < words:
        raise ValueError(f"allowed_tokens must have shape [{batch}, {words}] (V = {vocab}), got {list(mask.shape)}")
    check_device("allowed_tokens", mask, device)
    return mask[:, :words].expand(batch, words)


def check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)
