"""The filtered draw from hidden states, its three kernels compiled for the CPU and started by the library's own launcher.

The matmul is not emulated (``emulated/pipeline.h`` puts its logits into the accumulators); what is made of it is: transforms,
masses, noise, thresholds, candidates, the choice among them, and the sweeps that settle open rows.
"""

import ctypes
import functools
import platform
import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import nologits as nl
from nologits.kernels.config import HOPPER_SHARED, HOPPER_TURNS_64
from nologits.params import make_rows
from nologits.sources import HiddenSource
from nologits.testing import make_logits

GXX = shutil.which("g++")
pytestmark = pytest.mark.skipif(GXX is None or platform.machine() != "x86_64", reason="needs g++ and an x86-64 processor")

TOOLS = runpy.run_path(str(Path(__file__).parent / "emulated" / "build.py"))
SOURCES = Path(nl.__file__).parent / "kernels" / "sm90"
VOCAB = 9_000
INF = float("inf")


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    """``build(defines, name)``: the loaded library of a kernel under these macros."""
    folder = tmp_path_factory.mktemp("emulated")
    TOOLS["copy_sources"](SOURCES, folder)
    return functools.cache(lambda defines, name: TOOLS["build"](GXX, folder, defines, name))


@pytest.fixture
def draw(build, monkeypatch):
    """``draw(logits, params, ...)``: a launch on planted rows of logits; ``draw.how`` says how threads are shuffled."""
    module = TOOLS["launcher"]("categorical_sm90")
    how = SimpleNamespace(seed=0, poison=0xFF, processors=5, skip=(), logits=None, opened=torch.zeros(1, dtype=torch.int64))

    def load(name, entry, threads, shared, defines, index):
        def launch(grid, arguments, device, dependent=False, together=False):
            params = next(part for part in arguments if isinstance(part, module.Params))
            if name in how.skip:
                return
            if name == "choose":
                library = build(defines, "choose")
                library.launch.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_ulonglong, ctypes.c_int]
                failure = library.launch(ctypes.addressof(params), grid[0], shared, how.seed, how.poison)
            else:
                library = build((*defines, ("FINISH", 1)) if name == "finish" else (*defines,), "tiles")
                failure = TOOLS["launch_tiles"](library, [arguments], [how.logits], grid, shared, how.seed, how.poison)
            assert library.params_bytes() == ctypes.sizeof(params)
            assert not failure, f"{name}: {failure.decode()}"

        return SimpleNamespace(launch=launch)

    monkeypatch.setattr(module, "load", load)
    monkeypatch.setattr(module, "tensor_map", lambda *arguments: None)
    monkeypatch.setattr(module, "multiprocessors", lambda device: how.processors)
    monkeypatch.setattr(module, "open_rows", lambda device: how.opened)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def launch(logits, params, config=HOPPER_TURNS_64, processed=True, raw=False, top=0):
        how.logits = logits.contiguous()
        head = nl.LMHead(logits.T.contiguous().bfloat16()).spec
        source = HiddenSource(torch.eye(len(logits), dtype=torch.bfloat16), head)
        return module.launch_draw(source, make_rows(params, *logits.shape, logits.device), processed, raw, config, top)

    def select(logits, params, width, config=HOPPER_TURNS_64):
        how.logits = logits.contiguous()
        head = nl.LMHead(logits.T.contiguous().bfloat16()).spec
        source = HiddenSource(torch.eye(len(logits), dtype=torch.bfloat16), head)
        rows = make_rows(params, *logits.shape, logits.device, noise=False)
        return TOOLS["kept_sets"]()(*module.launch_select(source, rows, config, width), rows)

    launch.how, launch.select = how, select
    return launch


def rows_of(families, vocab=VOCAB, seed=0):
    """Rows of logits that bf16 holds: an identity times them is they."""
    rows = [make_logits(family, 1, vocab, seed + index) for index, family in enumerate(families)]
    return torch.cat(rows).clamp(-200, 200).bfloat16().float()


def compare(got, logits, params, top=0, rtol=3e-7):
    """Tokens, log-probabilities and the likeliest tokens are the reference's."""
    want = nl.sample_logits(logits, params, logprobs=True, top_logprobs=top, impl="reference")
    assert got.tokens[:, 0].tolist() == want.tokens.tolist()
    for name in ("logprobs", "raw_logprobs"):
        part = getattr(got, name)
        if part is not None:
            torch.testing.assert_close(part[:, 0], getattr(want, name), rtol=rtol, atol=1e-5, equal_nan=True)
    if got.log_mass is not None:
        torch.testing.assert_close(got.log_mass, want.log_mass, rtol=1e-6, atol=1e-5, equal_nan=True)
    for name in ("top", "raw_top"):
        part = getattr(got, name)
        if part is not None:
            assert part.ids.tolist() == getattr(want, name).ids.tolist()
            torch.testing.assert_close(part.logprobs, getattr(want, name).logprobs, rtol=1e-5, atol=1e-5, equal_nan=True)


FAMILIES = ["peaked", "gauss", "flat", "zipf", "ties", "outlier", "coldT"]
MIXED = {
    "top_k": torch.tensor([50, 0, 3, 700, 0, 1, 0]),
    "top_p": torch.tensor([1.0, 0.9, 0.5, 0.95, 1.0, 1.0, 0.3]),
    "min_p": torch.tensor([0.0, 0.0, 0.01, 0.0, 0.2, 0.0, 0.0]),
}
FILTERS = {
    "k50": {"top_k": 50},
    "k2000": {"top_k": 2000},
    "p90": {"top_p": 0.9},
    "k50p95": {"top_k": 50, "top_p": 0.95},
    "k3000p9": {"top_k": 3000, "top_p": 0.9},
    "minp05": {"min_p": 0.05},
    "minp1e-6": {"min_p": 1e-6},
    "mixed": MIXED,
}


@pytest.mark.parametrize("config", [HOPPER_TURNS_64, HOPPER_SHARED], ids=["turns", "shared"])
@pytest.mark.parametrize("filters", FILTERS)
def test_tokens_are_the_references(draw, filters, config):
    """Seven families at once, of which some stay open, and an unfiltered row where they are mixed."""
    logits = rows_of(FAMILIES)
    temperature = torch.tensor([1.0, 0.5, 1.0, 2.0, 1.0, 0.7, 1.0])
    params = nl.SamplingParams(temperature=temperature, seed=torch.arange(7), **FILTERS[filters])
    for processed, raw in ((False, False), (True, True)):
        compare(draw(logits, params, config, processed, raw), logits, params)


def test_what_is_open_is_settled_by_the_last_kernel(draw):
    """Flat rows with wide nuclei and rows of ties are left open, peaked ones are not. The control: without the last kernel."""
    logits = rows_of(["flat", "ties", "peaked", "gauss"])
    params = nl.SamplingParams(temperature=torch.tensor([1.0, 4.0, 0.5, 0.3]), top_p=0.9, seed=torch.arange(4))
    draw.how.opened.zero_()
    compare(draw(logits, params), logits, params)
    assert draw.how.opened.item() == 2
    draw.how.skip = ("finish",)
    with pytest.raises(AssertionError):
        compare(draw(logits, params), logits, params)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_of_threads_changes_nothing(draw, seed):
    logits = rows_of(FAMILIES)
    params = nl.SamplingParams(seed=torch.arange(7), **MIXED)
    first = draw(logits, params, raw=True)
    draw.how.seed, draw.how.poison = seed, 0x00
    other = draw(logits, params, raw=True)
    for one, two in zip(first[:4], other[:4], strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("processors", [1, 2, 9, 40])
def test_a_threshold_decides_nothing(draw, processors):
    """Fewer blocks make a smaller pilot, so other thresholds and other rows that stay open."""
    logits = rows_of(["gauss", "peaked", "zipf", "flat"])
    params = nl.SamplingParams(
        top_k=torch.tensor([100, 40, 0, 0]), top_p=torch.tensor([1.0, 0.9, 0.6, 0.2]), seed=torch.arange(4)
    )
    draw.how.processors = processors
    compare(draw(logits, params), logits, params)


@pytest.mark.parametrize("config", [HOPPER_TURNS_64, HOPPER_SHARED], ids=["turns", "shared"])
@pytest.mark.parametrize("filters", [{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 300, "top_p": 0.9}], ids=str)
def test_the_likeliest_tokens_come_along(draw, filters, config):
    """Of filtered and unfiltered rows, also of those that stay open, and of ties that there is no room for."""
    logits = rows_of(["peaked", "gauss", "flat", "ties", "zipf"])
    temperature = torch.tensor([1.0, 0.5, 1.0, 1.0, 2.0])
    params = nl.SamplingParams(temperature=temperature, seed=torch.arange(5), **filters)
    for count in (1, 20, 128):
        compare(draw(logits, params, config, True, True, count), logits, params, count)


def test_masks_and_biases(draw):
    logits = rows_of(["gauss", "peaked", "flat"])
    generator = torch.Generator().manual_seed(5)
    allowed = torch.randint(-(2**31), 2**31, (3, -(-VOCAB // 32)), generator=generator).int()
    allowed[2] = 0
    allowed[2, 7] = 1 << 5
    bias = torch.randn(VOCAB, generator=generator)
    params = nl.SamplingParams(
        top_k=50, top_p=0.9, seed=torch.arange(3), allowed_tokens=allowed, logit_bias=bias.expand(3, -1).contiguous()
    )
    compare(draw(logits, params), logits, params)
    params = nl.SamplingParams(top_p=0.9, seed=torch.arange(3), allowed_tokens=allowed)
    compare(draw(logits, params), logits, params)


@pytest.mark.parametrize(
    "filters", [{"top_k": 1}, {"top_k": 50}, {"top_k": 128, "top_p": 0.9}, {"top_k": 60, "min_p": 0.02}], ids=str
)
def test_small_kept_sets_come_from_the_draws_pass(draw, filters):
    logits = rows_of([*FAMILIES, "gauss", "gauss"])
    logits[7, :] = -INF
    logits[8, 100:] = -INF  # fewer tokens than are asked for
    tempered = torch.tensor([1.0, 0.5, 4.0, 2.0, 1.0, 0.7, 1.0, 1.0, 1.0])
    for temperature in (tempered, torch.zeros(9)):
        params = nl.SamplingParams(temperature=temperature, **filters)
        got = draw.select(logits, params, filters["top_k"])
        want = nl.select(logits, temperature=temperature, **filters, impl="reference")
        assert got.counts.tolist() == want.counts.tolist()
        assert torch.equal(got.ids, want.ids)
        assert torch.equal(got.logits, want.logits)
        torch.testing.assert_close(got.logprobs, want.logprobs, rtol=1e-5, atol=1e-5)
