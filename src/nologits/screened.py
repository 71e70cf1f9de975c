"""The screened draw: a head of 8 bits tells which tokens can still win, and only those are scored with their real weights.

Its tokens are the full path's: :mod:`nologits.screen` has the proof, ``kernels/screen_sm90.py`` the kernels. Where
:func:`obstacle` names a reason, a draw takes the full path; so do single rows of a screened draw, on the device, whose
candidates find no room or whose hidden states are not finite.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from .kernels.arguments import addressable
from .kernels.config import SCREENED_ROWS, HopperConfig
from .live_screen import MAX_DEPTH, LiveScreen
from .params import RowParams
from .sources import HiddenSource
from .types import Samples

_counters: list[Tensor] = []


def obstacle(
    source: HiddenSource, screen: LiveScreen | None, rows: RowParams, num_samples: int, processed: bool, raw: bool, num_top: int
) -> str:
    """Why the full path computes this draw, of those that the Hopper kernels can (:func:`nologits.hopper.obstacle`); empty if
    the screened one does.
    """
    if screen is None:
        return "the head has no screen"
    if rows.filtered:
        return "filters need the logits that they keep"
    if processed or raw or num_top:
        return "log-probabilities need the mass of all logits"
    if num_samples != 1:
        return "it makes one draw a row"
    if source.batch > SCREENED_ROWS:
        return f"it was measured for up to {SCREENED_ROWS} rows"
    if source.head.scale <= 0:
        return "bounds of logits are not those of logits times a scale <= 0"
    if source.hidden.shape[1] > MAX_DEPTH:
        return f"sums of more than {MAX_DEPTH} products of 8 bits may leave int32"
    return screen.obstacle


def sample(source: HiddenSource, screen: LiveScreen, rows: RowParams, config: HopperConfig) -> Samples:
    """One draw a row, ``[B, 1]`` tokens; ``config`` launches the full path of rows that are left to it.

    Nothing may be in the way (:func:`obstacle`); the ``screen`` is refreshed first if it is stale.
    """
    from .kernels.screen_sm90 import launch_rows, launch_screened  # needs cuda.bindings, which an obstacle's name does not

    copy = screen.fresh()
    source = addressable(source)
    drawn, left = launch_screened(source, copy, launch_rows(source.hidden), rows, config)
    for counter in _counters:
        if counter.device == left.device:
            counter += left[:1]
    return drawn


@contextlib.contextmanager
def counting_left(device: torch.device) -> Iterator[Tensor]:
    """While it is open, screened draws add up on the device how many of their rows took the full path: int64 ``[1]``.

    A kernel more for each draw, which is why it is not always done.
    """
    counter = torch.zeros(1, dtype=torch.int64, device=device)
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters[:] = [other for other in _counters if other is not counter]
