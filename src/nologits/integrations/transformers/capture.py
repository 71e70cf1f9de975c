"""The output head's ``forward`` while it is swapped: it keeps what it is given, and makes no logits."""

from __future__ import annotations

import threading

from torch import Tensor, nn


class UnsupportedError(Exception):
    """The stock loop has to run; the message is the reason, to stand after a colon."""


class Capture:
    """The head's ``forward`` while it is swapped: keeps the last position's input, makes no logits."""

    def __init__(self, head: nn.Linear) -> None:
        self._head = head
        self._thread = threading.get_ident()
        self._swapped = self._forward
        self._hidden: Tensor | None = None

    def acquire(self) -> None:
        # setdefault: of two threads that start at once, one gets it.
        if vars(self._head).setdefault("forward", self._swapped) is not self._swapped:
            raise UnsupportedError(
                "the output head's forward is replaced (by a hook, or a generate call that is still running)"
            )

    def release(self) -> None:
        del self._head.forward

    def take(self) -> Tensor:
        """The hidden states ``[B, D]`` of the latest forward; each is taken once."""
        hidden, self._hidden = self._hidden, None
        if hidden is None:
            raise RuntimeError("the model's forward did not call its output head")
        return hidden

    def _forward(self, hidden: Tensor) -> Tensor:
        if threading.get_ident() != self._thread:  # someone else's forward of the same model wants its logits
            return nn.Linear.forward(self._head, hidden)
        return self._keep(hidden)

    def _keep(self, hidden: Tensor) -> Tensor:
        # A copy: a view would keep the states of the whole prompt alive. Autocast may have left another dtype.
        self._hidden = hidden[:, -1].to(self._head.weight.dtype, copy=True)
        return hidden.new_zeros((*hidden.shape[:-1], 1))
