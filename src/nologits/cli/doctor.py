"""``nologits doctor``: what is installed, what would run on each device, how and why, and two seconds of self-test."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import platform
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from .. import __version__
from ..dispatch import choose, hopper_obstacle, triton_obstacle
from ..head import LMHead
from ..noise import NOISE_VERSION, philox4x32
from ..params import SamplingParams, make_rows
from ..sources import HiddenSource
from ..types import IMPLS
from .console import EXIT_FAILED, device_name, output

_PACKAGES = ("torch", "triton", "cuda-bindings", "transformers", "vllm")

# Random123's known answers for Philox4x32-10 (kat_vectors): counter, key, result.
_PHILOX_ANSWERS = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


class Outcome(NamedTuple):
    """One line of the self-test."""

    name: str
    device: str
    ok: bool
    detail: str


def run_doctor(as_json: bool) -> int:
    """Prints the report; returns the exit code, 1 if the self-test fails."""
    devices = [_describe(device) for device in _devices()]
    outcomes = self_test()
    ok = all(outcome.ok for outcome in outcomes)
    versions = {"nologits": __version__, "python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}
    versions["torch"] = str(torch.__version__)  # with the build, which the package's metadata may lack
    if as_json:
        report = {
            "ok": ok,
            "noise_contract": NOISE_VERSION,
            "versions": versions,
            "devices": devices,
            "self_test": [outcome._asdict() for outcome in outcomes],
        }
        output().print(json.dumps(report, indent=2), markup=False, soft_wrap=True)
    else:
        _show(versions, devices, outcomes)
    return 0 if ok else EXIT_FAILED


def self_test() -> list[Outcome]:
    """Known answers, token equality with the reference, and a small statistical test, on every device."""
    outcomes = [_philox(device) for device in _devices()]
    for device in _devices():
        outcomes += [_equality(impl, device) for impl in _available(device) if impl != "reference"]
        outcomes.append(_statistics(device))
    return outcomes


def _philox(device: torch.device) -> Outcome:
    wrong = 0
    for counter, key, answer in _PHILOX_ANSWERS:
        words = philox4x32(
            tuple(torch.tensor([word], device=device) for word in counter),  # type: ignore[arg-type]
            tuple(torch.tensor([word], device=device) for word in key),  # type: ignore[arg-type]
        )
        wrong += [int(word) for word in words] != list(answer)
    return Outcome("Philox4x32-10", str(device), not wrong, f"{len(_PHILOX_ANSWERS) - wrong} of 3 known answers")


def _equality(impl: str, device: torch.device) -> Outcome:
    """The same tokens as the reference. Integer operands: their products are exact, so no difference is forgiven."""
    name, (hidden, head) = f"{impl} = reference", _operands(impl, device)
    differ = total = 0
    for filters in ({}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.02}):
        params = SamplingParams(temperature=5.0, seed=1, position=2, **filters)
        num_samples = 2
        if impl == "hopper" and not filters:
            num_samples = 1
            if reason := _handed_over(hidden, head, params):
                return Outcome(name, str(device), False, f"its kernels did not run: {reason}")
        drawn = head.sample(hidden, params, num_samples=num_samples, impl=impl).tokens  # type: ignore[arg-type]
        expected = head.sample(hidden, params, num_samples=num_samples, impl="reference").tokens
        differ += int((drawn != expected).sum())
        total += drawn.numel()
    return Outcome(name, str(device), differ == 0, f"{total - differ} of {total} tokens equal")


def _operands(impl: str, device: torch.device) -> tuple[Tensor, LMHead]:
    """Hidden states and a head, bf16 for the Hopper kernels, which hand fp32 over to the portable ones."""
    dtype = torch.bfloat16 if impl == "hopper" else torch.float32
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-3, 4, (333, 48), generator=generator).to(device, dtype)
    hidden = torch.randint(-1, 2, (8, 48), generator=generator).to(device, dtype)
    return hidden, LMHead(weight)


def _handed_over(hidden: Tensor, head: LMHead, params: SamplingParams) -> str:
    """Why the Hopper kernels would leave one draw a row to the portable ones; empty if they draw."""
    from ..hopper import obstacle

    rows = make_rows(params, len(hidden), head.spec.vocab_size, hidden.device)
    return obstacle(HiddenSource(hidden, head.spec), rows, 1, False)


def _statistics(device: torch.device) -> Outcome:
    draws = 20_000
    name = f"{choose('auto', device).impl} chi-squared"
    try:
        import scipy  # noqa: F401

        from ..testing import chi_squared, count_tokens
    except ImportError:
        return Outcome(name, str(device), True, "skipped, needs scipy")
    logits = torch.linspace(0, 5, 64)
    head = LMHead(logits[:, None].to(device))
    params = SamplingParams(seed=0, position=torch.arange(draws, device=device))
    tokens = head.sample(torch.ones(draws, 1, device=device), params).tokens
    result = chi_squared(count_tokens(tokens, 64), logits.double().softmax(-1))
    return Outcome(name, str(device), result.p_value > 1e-4, f"p = {result.p_value:.3g} over {draws:,} draws")


def _devices() -> list[torch.device]:
    cuda = [torch.device("cuda", index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return [torch.device("cpu"), *cuda]


def _available(device: torch.device) -> list[str]:
    names = []
    for impl in IMPLS:
        try:
            choose(impl, device)
        except ValueError:
            continue
        if impl != "auto":
            names.append(impl)
    return names


def _describe(device: torch.device) -> dict[str, Any]:
    choice = choose("auto", device)
    obstacle = triton_obstacle(device)
    available = _available(device)
    return {
        "device": str(device),
        "name": device_name(device),
        "impl": choice.impl,
        "reason": f"no triton: {obstacle}" if obstacle else choice.reason,
        "available": available,
        "obstacles": {"triton": obstacle, "hopper": hopper_obstacle(device) or obstacle},
        "launches": launches_in_force(device, available) if device.type == "cuda" else [],
    }


def launches_in_force(device: torch.device, available: list[str]) -> list[dict[str, Any]]:
    """How the benchmark's heads are drawn from in bf16, by batch size: the configuration of each kernel that can run."""
    from ..bench.cases import CASES, DEFAULT_CASES
    from ..kernels.config import architecture, hopper_config, tile_config
    from .tune import BATCHES, short

    rows = []
    for case, batch in itertools.product([case for case in CASES if case.name in DEFAULT_CASES], BATCHES):
        row: dict[str, Any] = {"head": case.name, "V": case.vocab, "D": case.depth, "B": batch}
        if "triton" in available:
            row["triton"] = short(tile_config(architecture(device), torch.bfloat16, case.vocab, case.depth, batch))
        if "hopper" in available:
            row["hopper"] = short(hopper_config(batch))
        rows.append(row)
    return rows


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _show(versions: dict[str, str | None], devices: list[dict[str, Any]], outcomes: list[Outcome]) -> None:
    console = output()
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column()
    for name, version in versions.items():
        facts.add_row(name, version or "[dim]not installed[/dim]")
    facts.add_row("noise", f"contract version {NOISE_VERSION}")
    console.print(facts)

    where = _table("What runs where")
    for heading in ("device", "impl", "because", "also available"):
        where.add_column(heading, header_style="dim", no_wrap=heading in ("device", "impl"))
    for device in devices:
        others = [name for name in device["available"] if name != device["impl"]]
        where.add_row(f"{device['device']}", f"[bold]{device['impl']}[/bold]", device["reason"], ", ".join(others))
    console.print()
    console.print(where)
    for device in devices:
        console.print(f"[dim]{device['device']}: {device['name']}[/dim]")
        hopper = device["obstacles"]["hopper"]
        if device["impl"] != "hopper" and hopper not in device["reason"]:
            console.print(f"[dim]{device['device']}: not hopper: {hopper}[/dim]")
    for device in devices:
        if device["launches"]:
            console.print()
            console.print(_launch_table(device))

    tests = _table("Self-test")
    tests.add_column("", no_wrap=True)
    for heading in ("check", "device", "result"):
        tests.add_column(heading, header_style="dim")
    for outcome in outcomes:
        mark = "[green]ok[/green]" if outcome.ok else "[bold red]FAIL[/bold red]"
        tests.add_row(mark, outcome.name, outcome.device, outcome.detail)
    console.print()
    console.print(tests)


def _launch_table(device: dict[str, Any]) -> Table:
    """A line for each head and stretch of batch sizes with the same configurations."""
    impls = [impl for impl in ("triton", "hopper") if impl in device["launches"][0]]
    table = _table(f"Launch configurations on {device['device']}: bf16")
    for heading in ("head", "B <=", *impls):
        table.add_column(heading, header_style="dim", justify="right" if heading == "B <=" else "left")
    same = itertools.groupby(device["launches"], key=lambda row: [row["head"], *(row[impl] for impl in impls)])
    for (head, *configs), rows in same:
        table.add_row(head, str(list(rows)[-1]["B"]), *configs)
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
