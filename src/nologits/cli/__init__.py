"""The ``nologits`` command: generate text, look at the installation, verify the draws, run benchmarks."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Args:
        arguments: the words after ``nologits``; default: those of this process.
    """
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(f"error: the command line needs {' and '.join(missing)}: pip install 'nologits[cli]'\n")
        return 2
    from .app import run

    return run(sys.argv[1:] if arguments is None else list(arguments))
