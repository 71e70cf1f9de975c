"""What the package promises beyond numbers: cold imports, import direction, operators, compilation."""

import ast
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nologits as nl
from nologits import ops
from nologits.params import make_rows

SOURCE = Path(nl.__file__).parent

BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Blocker())
import torch, nologits as nl
hidden, weight = torch.randn(3, 16), torch.randn(40, 16)
assert nl.sample(hidden, weight, top_k=5, seed=1, logprobs=True).tokens.shape == (3,)
assert not [name for name in sys.modules if name.split(".")[0] in {blocked!r}]
try:
    nl.sample(hidden, weight, impl="triton")
except ValueError as error:
    print(error)
"""


def test_it_works_with_everything_optional_missing():
    blocked = ("triton", "transformers", "typer", "rich", "scipy", "matplotlib", "numba", "vllm")
    run = subprocess.run([sys.executable, "-c", BLOCKED.format(blocked=blocked)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "Triton is not installed" in run.stdout


def test_importing_loads_nothing_optional():
    code = "import sys, nologits; print([m for m in ('triton', 'transformers', 'typer', 'rich', 'scipy') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # torch itself may import Triton where it came with it; nologits adds nothing.
    bare = subprocess.run(
        [sys.executable, "-c", code.replace(", nologits", ", torch")], capture_output=True, text=True, check=True
    )
    assert run.stdout == bare.stdout


def imports_of(path, *, top_level=False):
    """Dotted names of a file's imports, relative ones resolved under nologits; ``top_level``: those that run at import."""
    package = ["nologits", *path.relative_to(SOURCE).parts[:-1]]
    tree = ast.parse(path.read_text())
    for node in tree.body if top_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield prefix
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


def test_the_import_reader_sees_every_form():
    """The control of the test below."""
    names = set(imports_of(SOURCE / "fused.py"))
    assert {"torch", "nologits.filtered", "nologits.kernels.categorical.launch_tiles", "nologits.params.RowParams"} <= names
    assert "nologits.fused" in set(imports_of(SOURCE / "ops.py"))
    assert "nologits.fused" not in set(imports_of(SOURCE / "ops.py", top_level=True))
    assert "nologits.params.RowParams" in set(imports_of(SOURCE / "ops.py", top_level=True))


KERNELS = (
    "nologits.kernels",
    "nologits.fused",
    "nologits.hopper",
    "nologits.screened",
    "nologits.linked",
    "nologits.transport",
)


def test_imports_go_one_way():
    outer = {"testing", "bench", "cli", "demo", "integrations"}
    for path in SOURCE.rglob("*.py"):
        part = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        names = set(imports_of(path))
        if part not in outer:
            assert not {n for n in names for o in outer if n.startswith(f"nologits.{o}")}, path
        if part in ("reference", "selection", "sources", "noise", "params", "distribution", "streaming", "filtered"):
            assert not {n for n in names if n.startswith(("triton", "cuda", *KERNELS))}, path
        if part not in ("kernels", *outer):
            # Triton and CUDA are reached through ops -> fused, hopper -> kernels, or sharded -> linked -> kernels, and only
            # inside functions of ops and sharded.
            assert not {n for n in names if n.startswith(("triton", "cuda"))}, path
            if part not in ("fused", "hopper", "screened", "linked", "transport"):
                assert not {n for n in imports_of(path, top_level=True) if n.startswith(KERNELS)}, path
        if part == "kernels":
            inner = {"nologits.kernels", "nologits.params", "nologits.sources", "nologits.types"}
            assert not {n for n in names if n.startswith("nologits") and not n.startswith(tuple(inner))}, path


REQUESTS = {
    "scalars": lambda device: nl.SamplingParams(temperature=0.7, top_k=5, seed=3),
    "tensors": lambda device: nl.SamplingParams(
        temperature=torch.tensor([0.0, 1.0, 2.0], device=device), top_p=torch.tensor([0.5, 1.0, 0.9], device=device),
        seed=torch.arange(3, device=device), position=torch.arange(3, device=device),
        logit_bias=(torch.tensor([[1, -1]] * 3, device=device), torch.ones(3, 2, device=device)),
        allowed_tokens=torch.full((3, 2), -2, dtype=torch.int32, device=device),
    ),
    "plain": lambda device: nl.SamplingParams(seed=9, logit_bias=torch.ones(40, device=device)),
}  # fmt: skip


@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("flags", [(1, False, True), (2, True, True)])
def test_operators_pass_opcheck(device, impl, request_name, flags):
    """Schema, fake, aliasing, mutation and tracing with dynamic shapes, by torch's own checks."""
    generator = torch.Generator().manual_seed(0)
    logits, weight, hidden = (torch.randn(*s, generator=generator).to(device) for s in ((3, 40), (40, 16), (3, 16)))
    rows = make_rows(REQUESTS[request_name](device), 3, 40, logits.device)
    flat = [*ops._flatten(rows), *flags, impl]
    # Every row is seeded, so repeated calls agree, as opcheck wants.
    torch.library.opcheck(torch.ops.nologits.sample_logits.default, (logits, *flat))
    torch.library.opcheck(torch.ops.nologits.sample_hidden.default, (hidden, weight, None, 1.0, None, 40, *flat))
    if flags == (2, True, True):
        bias = torch.randn(40, generator=generator).to(device)
        torch.library.opcheck(torch.ops.nologits.sample_hidden.default, (hidden, weight, bias, 0.5, 20.0, 37, *flat))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_whole_requests_compile(device, impl, backend):
    """One graph, no break, whatever a request holds; the drawn tokens are the eager ones."""
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    weight, hidden = torch.randn(200, 32, generator=generator).to(device), torch.randn(3, 32, generator=generator).to(device)
    head = nl.LMHead(weight, softcap=20.0)
    for make in REQUESTS.values():
        params = make(device)
        if params.allowed_tokens is not None or params.logit_bias is not None:
            params = dataclasses.replace(params, allowed_tokens=None, logit_bias=torch.ones(200, device=device))
        step = torch.compile(
            lambda x, p=params: head.sample(x * 2, p, logprobs=True, impl=impl, num_samples=2), fullgraph=True, backend=backend
        )
        drawn, eager = step(hidden), head.sample(hidden * 2, params, logprobs=True, impl=impl, num_samples=2)
        for got, want in zip(drawn, eager, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_compiled_draws_are_the_eager_ones():
    weight, hidden, seed = torch.randn(200, 32), torch.randn(4, 32), torch.arange(4)
    head = nl.LMHead(weight)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x, keys, temperature):
        params = nl.SamplingParams(temperature=temperature, seed=keys, top_k=20, top_p=0.9)
        return head.sample(x * 2, params, logprobs=True, top_logprobs=3), nl.sample_logits(x @ weight.T, seed=keys).tokens

    drawn, from_logits = step(hidden, seed, torch.ones(4))
    params = nl.SamplingParams(temperature=torch.ones(4), seed=seed, top_k=20, top_p=0.9)
    eager = head.sample(hidden * 2, params, logprobs=True, top_logprobs=3)
    assert torch.equal(drawn.tokens, eager.tokens)
    assert torch.equal(drawn.logprobs, eager.logprobs)
    assert torch.equal(drawn.top.ids, eager.top.ids)
    assert torch.equal(from_logits, nl.sample_logits(hidden @ weight.T, seed=seed).tokens)
    assert len({tuple(step(hidden, torch.full((4,), -1), torch.full((4,), 5.0))[0].tokens.tolist()) for _ in range(5)}) > 1


def peak_of(call):
    """Peak of live CPU allocations, by the profiler's record."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    live = peak = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


@pytest.mark.parametrize(("logprobs", "top"), [(False, 0), (True, 0), (True, 20)])
def test_streaming_keeps_its_scratch_bounded(logprobs, top):
    """Far under B x V, and not growing with it; the reference, which makes the logits, is the control."""
    hidden, weight = torch.randn(64, 8), torch.randn(100_000, 8)
    logits = 64 * 100_000 * 4
    asked = {"seed": 1, "logprobs": logprobs, "top_logprobs": top, "impl": "torch"}
    peak, half = (peak_of(lambda weight=part: nl.sample(hidden, weight, **asked)) for part in (weight, weight[:50_000]))
    assert 0 < peak < 0.5 * logits
    assert peak < 1.1 * half
    assert peak_of(lambda: nl.sample(hidden[:8], weight[:10_000], seed=1, impl="reference")) > 8 * 10_000 * 4


def test_filters_keep_their_scratch_bounded():
    """Blocks of rows: a batch of many rows takes no more than the scratch of one block."""
    from nologits.filtered import SCRATCH_BYTES

    hidden, weight = torch.randn(96, 8), torch.randn(20_000, 8)
    peak = peak_of(lambda: nl.sample(hidden, weight, seed=1, top_p=0.9, logprobs=True, impl="torch"))
    assert 0 < peak < 1.5 * SCRATCH_BYTES
    assert 1.5 * SCRATCH_BYTES < 96 * 20_000 * 56
