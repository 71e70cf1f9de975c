"""Start-up: the switches, the version gate, the hooks, and one log line that says what came of it."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from ...live_screen import refresh_all
from ..eligibility import Counters

SWITCH = "NOLOGITS_VLLM"
"""``0`` switches the plugin off; ``force`` lifts the version gate."""

TESTED = ((0, 26), (0, 32))
"""The vLLM releases whose engines the tests were run with, on a CPU, both model runners; ``docs/vllm.md`` says how."""

COUNTERS = Counters("vLLM")

_logger = logging.getLogger("vllm.nologits")  # below vLLM's logger, whose handler prints it as vLLM's own lines


class Status(NamedTuple):
    """Whether the hooks are in place.

    Attributes:
        active: they are.
        reason: why not; empty if they are.
        runners: the model runners that have a hook: "V1", "V2".
    """

    active: bool
    reason: str
    runners: tuple[str, ...] = ()


_status = Status(False, "vLLM has not loaded the plugin")
_paused = False


def register() -> None:
    """What vLLM calls in each of its processes. Whatever goes wrong here costs one log line, never vLLM's start."""
    global _status
    if _status.active:
        return
    try:
        _status = _install()
    except Exception as error:
        _status = Status(False, f"of {type(error).__name__}: {error}")
    # vLLM 0.32 loads plugins before it sets logging up; of what is said by then, Python prints warnings alone.
    level = logging.INFO if logging.getLogger("vllm").handlers else logging.WARNING
    if _status.active:
        _logger.log(level, "nologits: active (Model Runner %s)", ", ".join(_status.runners))
    else:
        _logger.log(level, "nologits: inactive because %s", _status.reason)


def status() -> Status:
    """Whether the plugin's hooks are in place in this process, and why not."""
    return _status


def counters() -> dict[str, Any]:
    """What the plugin did in this process: ``steps`` of the engine; ``taken``, rows drawn from hidden states;
    ``fallbacks``, rows that vLLM drew, by reason; ``errors``, steps that failed here and were done by vLLM.

    In an engine with processes of its own: ``llm.collective_rpc("nologits_counters")``, one result a worker.
    """
    return COUNTERS.snapshot()


def reset_counters() -> None:
    """Sets the counters of this process to zero."""
    COUNTERS.reset()


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """While it is open vLLM draws every row of this process, as it would without the plugin, and nothing is counted.

    For measuring both in one engine.
    """
    global _paused
    before, _paused = _paused, True
    try:
        yield
    finally:
        _paused = before


def is_paused() -> bool:
    """Whether :func:`paused` is open."""
    return _paused


def _install() -> Status:
    choice = os.environ.get(SWITCH, "1")
    if choice == "0":
        return Status(False, f"{SWITCH}=0")
    import vllm

    version = tuple(int(part) for part in vllm.__version_tuple__[:2])
    if choice != "force" and version not in TESTED:
        tested = ", ".join(".".join(map(str, release)) for release in TESTED)
        return Status(False, f"vLLM {vllm.__version__} is none of the tested releases, {tested} ({SWITCH}=force tries it)")
    from . import heads

    heads.install()
    runners = []
    for name in ("V1", "V2"):
        # V2 imports Triton kernels, which are not everywhere.
        try:
            module = importlib.import_module(f".runner_{name.lower()}", __package__)
            module.install()
        except Exception as error:
            _logger.debug("nologits: no hook for Model Runner %s: %s: %s", name, type(error).__name__, error)
        else:
            runners.append(name)
    if not runners:
        return Status(False, "neither model runner could be hooked")
    _offer_to_workers()
    return Status(True, "", tuple(runners))


def _offer_to_workers() -> None:
    """Lets ``llm.collective_rpc("nologits_counters")`` and ``"nologits_status"`` read them in worker processes, and
    ``"nologits_refresh"`` renew the screens of heads after new weights."""
    from vllm.v1.worker.worker_base import WorkerBase

    def nologits_counters(worker: Any) -> dict[str, Any]:
        return counters()

    def nologits_status(worker: Any) -> tuple[Any, ...]:
        return tuple(status())

    def nologits_refresh(worker: Any) -> None:
        refresh_all()

    WorkerBase.nologits_counters, WorkerBase.nologits_status = nologits_counters, nologits_status
    WorkerBase.nologits_refresh = nologits_refresh
