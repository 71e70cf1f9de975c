"""The screened draw in plain torch: which tokens the bounds of :mod:`nologits.screen` leave, and the best of those.

It reads an 8-bit copy and the hidden states' 8-bit parts as the kernels do, on any device and with whatever was put into them,
so that tests can spoil them; and it counts the candidates. Bounds are taken over a vocabulary that is gone through twice,
where the kernels meet most tokens before they know the best lower bound: they gather more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..distribution import first_argmax, invalid_rows
from ..head import HeadSpec, LMHead
from ..params import RowParams, SamplingParams, make_rows
from ..reference import scores
from ..screen import make_screen, part_rows, screen_rows
from ..sources import HiddenSource, scaled_and_capped, transform
from ..types import Screen, ScreenedRows

_TANH = 4e-6
"""Of the soft cap, by which its ends are moved: the hyperbolic tangent is monotone up to that."""
_CHUNK = 1 << 14


class ScreenedDraw(NamedTuple):
    """Draws, and how many tokens of each row were scored for them.

    Attributes:
        tokens: int64 ``[B]``; -1 where the row is invalid.
        candidates: int64 ``[B]``: tokens whose upper bound reaches the best lower bound. All of V where the hidden states are
            not finite: those rows are the full path's.
    """

    tokens: Tensor
    candidates: Tensor


def screened_draw(
    hidden: Tensor,
    head: LMHead | HeadSpec,
    params: SamplingParams,
    screen: Screen | None = None,
    states: ScreenedRows | None = None,
) -> ScreenedDraw:
    """One draw a row by a screen.

    Args:
        hidden: ``[B, D]``.
        head: the head; its scale must be above 0.
        params: a request without filters.
        screen: an 8-bit copy of the head; default: one made now.
        states: the 8-bit parts of ``hidden``; default: made now.

    Raises:
        ValueError: the request or the head is none that a screen serves.
    """
    spec = head.spec if isinstance(head, LMHead) else head
    vocab = spec.vocab_size
    rows = make_rows(params, hidden.shape[0], vocab, hidden.device)
    if rows.filtered or spec.scale <= 0:
        raise ValueError("params must have no filters, and the head a scale above 0")
    screen = make_screen(spec.weight[:vocab]) if screen is None else screen
    states = screen_rows(hidden) if states is None else states
    floor = torch.full((hidden.shape[0],), -torch.inf, device=hidden.device)
    uppers = torch.empty(hidden.shape[0], vocab, device=hidden.device)
    exact = torch.empty_like(uppers)
    for start in range(0, vocab, _CHUNK):
        part = slice(start, min(vocab, start + _CHUNK))
        lower, upper = _ends(screen, states, part)
        uppers[:, part] = _score(upper, spec, rows, part, 1.0).nan_to_num(torch.inf, torch.inf, -torch.inf)
        lowers = _score(lower, spec, rows, part, -1.0).nan_to_num(-torch.inf, torch.inf, -torch.inf)
        floor = floor.maximum(lowers.amax(1))
        logits = HiddenSource(hidden, spec, torch.float64).chunk(part.start, part.stop)
        exact[:, part] = scores(transform(logits, rows, part.start, part.stop), rows, part.start, 0)
    candidates = (uppers >= floor[:, None]) & (uppers > -torch.inf)
    kept = exact.masked_fill(~candidates, -torch.inf)
    tokens = first_argmax(kept).masked_fill(invalid_rows(kept, rows), -1)
    return ScreenedDraw(tokens, candidates.sum(1))


def _ends(screen: Screen, states: ScreenedRows, part: slice) -> tuple[Tensor, Tensor]:
    """fp32 ``[B, ids]`` twice: what no product with the head's rows lies below, and above."""
    codes, batch = screen.weight[part].double(), len(states.scales)
    first, second = (states.parts[at].double() for at in part_rows(batch, states.scales.device))
    row, rest, of_error, of_length = states.scales.double()[:, :, None].unbind(1)
    middle = (row * (first @ codes.T) + rest * (second @ codes.T)) * screen.scales[part].double()
    bound = of_error * screen.errors[part].double() + of_length * screen.lengths[part].double()
    unknown = ~(bound.isfinite() & middle.isfinite())
    lower, upper = (middle - bound).float(), (middle + bound).float()
    return lower.masked_fill(unknown, -torch.inf), upper.masked_fill(unknown, torch.inf)


def _score(ends: Tensor, spec: HeadSpec, rows: RowParams, part: slice, sign: float) -> Tensor:
    """The scores of ``ends``, by the operations of the reference, each of which is monotone."""
    logits = ends if spec.bias is None else ends + spec.bias[part].float()
    logits = scaled_and_capped(logits, spec) + sign * _TANH * (spec.softcap or 0.0)
    return scores(transform(logits, rows, part.start, part.stop), rows, part.start, 0)
