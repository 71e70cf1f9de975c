"""What the commands share: where they write, how they fail, and how names on the command line become devices and seeds."""

from __future__ import annotations

import torch
from rich.console import Console

from ..dispatch import Choice, choose

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

_OPTIONS = (
    "temperature", "top_k", "top_p", "min_p", "seed", "impl", "num_samples", "position"
)  # fmt: skip


class UserError(Exception):
    """Something the user can mend, in one line: which argument, what it must be, what it was."""


def output() -> Console:
    """Standard output, made at the call so that a redirection is seen."""
    return Console(highlight=False)


def notes() -> Console:
    """Standard error: everything around a result that is itself on standard output."""
    return Console(stderr=True, highlight=False)


def one_line(error: BaseException) -> str:
    """The first line of an error's message, with the library's argument names as options of the command line."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    first, _, rest = text.partition(" ")
    if first in _OPTIONS:
        return f"--{first.replace('_', '-')} {rest}"
    return text


def resolve_device(name: str) -> torch.device:
    """``auto`` is the first CUDA device where there is one, else the CPU.

    Raises:
        UserError: there is no such device here.
    """
    has_cuda = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda", 0) if has_cuda else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UserError(f"--device must be auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda":
        if not has_cuda:
            raise UserError(f"--device must exist, got {name!r} (torch {torch.__version__} sees no CUDA device)")
        if (device.index or 0) >= torch.cuda.device_count():
            raise UserError(f"--device must be below cuda:{torch.cuda.device_count()}, got {name!r}")
        return torch.device("cuda", device.index or 0)
    return torch.device("cpu")


def resolve_impl(impl: str, device: torch.device) -> Choice:
    """The implementation that runs on ``device``.

    Raises:
        UserError: it is unknown or cannot run there.
    """
    try:
        return choose(impl, device)
    except ValueError as error:
        raise UserError(
            one_line(error).replace("impl='triton'", "--impl triton").replace("impl='hopper'", "--impl hopper")
        ) from None


def device_name(device: torch.device) -> str:
    """What a device is called by its maker."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
    return f"{torch.get_num_threads()} threads"


def megabytes(size: float) -> str:
    """Bytes for people: 0.20 MB, 13.4 MB, 1.2 GB."""
    if size >= 1e9:
        return f"{size / 1e9:.1f} GB"
    return f"{size / 1e6:.2f} MB" if size < 1e7 else f"{size / 1e6:.1f} MB"
