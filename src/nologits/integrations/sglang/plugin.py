"""Start-up: the switch, the version gate, the hooks, and one log line that says what came of it."""

from __future__ import annotations

import logging
import os
from typing import Any, NamedTuple

from ..eligibility import Counters

SWITCH = "NOLOGITS_SGLANG"
"""``1`` switches the plugin on; ``force`` also lifts the version gate."""

READ = "0.5.23"
"""The SGLang release whose source the hooks were written against. They have run in its engine on a CPU, and on no GPU."""

EXPERIMENTAL = f"it is experimental: {SWITCH}=1 switches it on"

COUNTERS = Counters("SGLang")

_logger = logging.getLogger("sglang.nologits")


class Status(NamedTuple):
    """Whether the hooks are registered.

    Attributes:
        active: they are; what can be drawn is decided with the model, and logged then.
        reason: why not; empty if they are.
    """

    active: bool
    reason: str


_status = Status(False, "SGLang has not loaded the plugin")


def register() -> None:
    """What SGLang calls in each of its processes. Whatever goes wrong here costs one log line, never SGLang's start."""
    global _status
    if _status.active:
        return
    try:
        _status = _install()
    except Exception as error:
        _status = Status(False, f"of {type(error).__name__}: {error}")
    # SGLang loads plugins before it sets logging up; of what is said by then, Python prints warnings alone.
    level = logging.INFO if logging.getLogger().handlers else logging.WARNING
    if _status.active:
        _logger.log(level, "nologits: active (experimental, SGLang %s)", READ)
    else:
        _logger.log(level, "nologits: inactive because %s", _status.reason)


def status() -> Status:
    """Whether the plugin's hooks are registered in this process, and why not."""
    return _status


def counters() -> dict[str, Any]:
    """What the plugin did in this process: ``steps`` of the engine; ``taken``, rows drawn from hidden states;
    ``fallbacks``, rows that SGLang drew, by reason; ``errors``, steps that failed here and were done by SGLang.

    A server has its scheduler in a process of its own: there, ``internal_states`` of ``GET /server_info`` holds them.
    """
    return COUNTERS.snapshot()


def reset_counters() -> None:
    """Sets the counters of this process to zero."""
    COUNTERS.reset()


def _install() -> Status:
    choice = os.environ.get(SWITCH, "")
    if choice == "0":
        return Status(False, f"{SWITCH}=0")
    if choice not in ("1", "force"):
        return Status(False, EXPERIMENTAL)
    from sglang.version import __version__ as version

    if choice != "force" and version != READ:
        return Status(False, f"SGLang {version} is not the release it was written for, {READ} ({SWITCH}=force tries it)")
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from . import heads, runner

    around, after = HookType.AROUND, HookType.AFTER
    HookRegistry.register(heads.TARGET, heads.get_logits, around)
    HookRegistry.register(runner.BATCH_TARGET, runner.keep_requests, after)
    HookRegistry.register(runner.SAMPLE_TARGET, runner.sample, around)
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.get_internal_state", _tell_counters, after)
    return Status(True, "")


def _tell_counters(result: Any, *arguments: Any, **keywords: Any) -> None:
    """Puts the counters into a scheduler's answer about itself."""
    try:
        result.internal_state["nologits"] = counters()
    except Exception:
        _logger.debug("nologits: no place for the counters", exc_info=True)
