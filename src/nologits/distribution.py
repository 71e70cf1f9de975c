"""Facts about rows of materialised logits: which are invalid, their argmax, their mass, a token's log-probability."""

from __future__ import annotations

import torch
from torch import Tensor

from .params import RowParams


def invalid_rows(logits: Tensor, rows: RowParams) -> Tensor:
    """bool ``[B]``: rows with a NaN, with no logit above -inf, or with an impossible parameter."""
    # amax propagates NaN, and NaN is not above -inf.
    return ~(logits.amax(-1) > float("-inf")) | rows.impossible(logits.shape[0], logits.device)


def first_argmax(score: Tensor) -> Tensor:
    """Index of the largest entry of each row, the smallest index among equals: int64 ``[B]``."""
    index = torch.arange(score.shape[-1], device=score.device)
    return torch.where(score == score.amax(-1, keepdim=True), index, score.shape[-1] - 1).amin(-1)


def log_total(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """logsumexp(logits / T) of each row, fp32 ``[B]``; for T = 0 the largest logit."""
    divisor, greedy = divisor_of(temperature)
    peak = logits.amax(-1, keepdim=True).double()
    total = peak / divisor + _log_share(logits, divisor)
    return torch.where((peak == float("inf")) | greedy, peak, total).squeeze(-1).float()


def log_softmax_at(logits: Tensor, tokens: Tensor, temperature: float | Tensor) -> Tensor:
    """Log-probabilities of ``tokens [B, S]`` under softmax(logits / T), fp32; 0 for certain tokens (T = 0, infinite)."""
    divisor, greedy = divisor_of(temperature)
    picked = logits.gather(1, tokens)
    peak = logits.amax(-1, keepdim=True).double()
    logprob = (picked.double() - peak) / divisor - _log_share(logits, divisor)
    return torch.where((picked == float("inf")) | greedy, 0.0, logprob).float()


def divisor_of(temperature: float | Tensor) -> tuple[float | Tensor, bool | Tensor]:
    """The temperature as a divisor (1 where it is 0), and where it is 0; tensors become ``[B, 1]``."""
    if isinstance(temperature, Tensor):
        greedy = temperature[:, None] == 0
        return torch.where(greedy, 1.0, temperature[:, None].double()), greedy
    return temperature or 1.0, temperature == 0


def _log_share(logits: Tensor, divisor: float | Tensor) -> Tensor:
    """log sum exp((logits - max) / T), fp64 ``[B, 1]``."""
    shifted = (logits.double() - logits.amax(-1, keepdim=True).double()) / divisor
    return shifted.exp().sum(-1, keepdim=True).log()
