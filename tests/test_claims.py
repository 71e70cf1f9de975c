"""What the package promises beyond numbers: cold imports, import direction, operators, compilation."""

import ast
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


def imports_of(path):
    """(module, at top level) of every import in a file, relative ones resolved to dotted names under nologits."""
    package = ["nologits", *path.relative_to(SOURCE).parts[:-1]]
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield prefix
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


def test_imports_go_one_way():
    outer = {"testing", "bench", "cli", "demo", "integrations"}
    for path in SOURCE.rglob("*.py"):
        part = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        names = set(imports_of(path))
        if part not in outer:
            assert not {n for n in names for o in outer if n.startswith(f"nologits.{o}")}, path
        if part in ("reference", "selection", "sources", "noise", "params", "distribution", "streaming", "filtered"):
            assert not {n for n in names if n.startswith(("triton", "nologits.kernels", "nologits.fused"))}, path
        if part == "kernels":
            inner = {"nologits.kernels", "nologits.params", "nologits.sources", "nologits.types"}
            assert not {n for n in names if n.startswith("nologits") and not n.startswith(tuple(inner))}, path


@pytest.mark.parametrize("flags", [(1, False, False), (2, True, True)])
def test_operators_pass_opcheck(flags):
    logits, weight = torch.randn(3, 40), torch.randn(40, 16)
    rows = make_rows(nl.SamplingParams(temperature=torch.ones(3), top_k=5, seed=3), 3, 40, logits.device)
    flat = [*ops._flatten(rows), *flags, "torch"]
    # The entropy makes no difference to seeded rows, so repeated calls agree, as opcheck wants.
    torch.library.opcheck(torch.ops.nologits.sample_logits.default, (logits, *flat))
    torch.library.opcheck(torch.ops.nologits.sample_hidden.default, (torch.randn(3, 16), weight, None, 1.0, None, 40, *flat))


def test_compiled_draws_are_the_eager_ones():
    weight, hidden, seed = torch.randn(200, 32), torch.randn(4, 32), torch.arange(4)
    head = nl.LMHead(weight)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x, keys, temperature):
        params = nl.SamplingParams(temperature=temperature, seed=keys, top_k=20, top_p=0.9)
        return head.sample(x * 2, params, logprobs=True), nl.sample_logits(x @ weight.T, seed=keys).tokens

    drawn, from_logits = step(hidden, seed, torch.ones(4))
    eager = head.sample(hidden * 2, nl.SamplingParams(temperature=torch.ones(4), seed=seed, top_k=20, top_p=0.9), logprobs=True)
    assert torch.equal(drawn.tokens, eager.tokens)
    assert torch.equal(drawn.logprobs, eager.logprobs)
    assert torch.equal(from_logits, nl.sample_logits(hidden @ weight.T, seed=seed).tokens)
    assert len({tuple(step(hidden, torch.full((4,), -1), torch.full((4,), 5.0))[0].tokens.tolist()) for _ in range(5)}) > 1


def test_streaming_keeps_its_scratch_bounded():
    """Peak of live CPU allocations of one draw, by the profiler's record: far under B x V."""
    batch, vocab = 64, 100_000
    hidden, weight = torch.randn(batch, 8), torch.randn(vocab, 8)
    nl.sample(hidden, weight, seed=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        nl.sample(hidden, weight, seed=1)
    live = peak = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert 0 < peak < 0.3 * batch * vocab * 4
