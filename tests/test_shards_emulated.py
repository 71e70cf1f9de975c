"""Draws from a sharded head by the Hopper kernels, compiled for the CPU and started by the library's own launcher.

A thread is a rank. As in ``test_fused_emulated.py`` the matmul's logits are planted. Kernels that wait for other ranks run
together; messages lie in memory that all ranks reach, or are gathered.
"""

import ctypes
import functools
import platform
import runpy
import shutil
import threading
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
RANKS = runpy.run_path(str(Path(__file__).parent / "emulated" / "ranks.py"))
SOURCES = Path(nl.__file__).parent / "kernels" / "sm90"
VOCAB = 9_000
INF = float("inf")
STARTS = {2: (0, 4_500), 3: (0, 128, 5_001)}
"""First ids of ranks' shards: one that noise blocks do not begin with, one that is small."""


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    """``build(defines, name)``: the loaded library of a kernel under these macros."""
    folder = tmp_path_factory.mktemp("emulated")
    TOOLS["copy_sources"](SOURCES, folder)
    return functools.cache(lambda defines, name: TOOLS["build"](GXX, folder, defines, name))


@pytest.fixture
def draw(build, monkeypatch):
    """``draw(logits, params, ...)``: every rank's results; ``draw.how`` says how threads are shuffled, and what is broken."""
    module, sharded = TOOLS["launcher"]("categorical_sm90"), TOOLS["launcher"]("shard_sm90")
    monkeypatch.setattr(sharded, "LINKED_ROWS", 16)
    monkeypatch.setattr(sharded, "FILTERED_ROWS", 16)
    monkeypatch.setattr(sharded, "MADE_ROWS", 3)  # so that open rows take turns
    how = SimpleNamespace(seed=0, poison=0xFF, processors=5, skip=(), change=lambda name, params: None, opened=None)
    how.opened = torch.zeros(1, dtype=torch.int64)
    state = SimpleNamespace(ranks=None)

    def run_exchange(library, ranks):
        class Rank(ctypes.Structure):
            _fields_ = [(name, ctypes.c_void_p) for name in ("params", "all", "links")]

        given = (Rank * len(ranks))(*[Rank(*map(ctypes.addressof, arguments)) for arguments in ranks])
        library.launch.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_ulonglong, ctypes.c_int]
        assert library.links_bytes() == ctypes.sizeof(module.Links)
        return library.launch(given, len(ranks), how.seed, how.poison)

    def load(name, entry, threads, shared, defines, index):
        def launch(grid, arguments, device, dependent=False, together=False):
            parts = [part for part in arguments if isinstance(part, ctypes.Structure)]
            how.change(name, parts[0])
            if name in how.skip:
                return
            ranks, rank = state.ranks, state.ranks.here.rank
            if name == "choose":
                with lock:
                    library = build(defines, "choose")
                    failure = library.launch(ctypes.addressof(parts[0]), grid[0], shared, how.seed, how.poison)
            elif name == "exchange":
                with lock:
                    library = build(defines, "exchange")
                if parts[2].buffers:
                    failure = ranks.together(parts, functools.partial(run_exchange, library))
                else:
                    with lock:
                        failure = run_exchange(library, [parts])
            elif name == "finish":
                with lock:
                    library = build((*defines, ("FINISH", 1)), "tiles")

                def run(all_parts):
                    return TOOLS["launch_tiles"](library, all_parts, state.logits, grid, shared, how.seed, how.poison)

                failure = ranks.together(parts, run)
            else:
                with lock:
                    library = build((*defines,), "tiles")
                    failure = TOOLS["launch_tiles"](library, [parts], [state.logits[rank]], grid, shared, how.seed, how.poison)
            assert library.params_bytes() == ctypes.sizeof(module.Params)
            assert not failure, f"{name}: {failure.decode()}"

        return SimpleNamespace(launch=launch)

    lock = threading.Lock()
    for part in (module, sharded):
        monkeypatch.setattr(part, "load", load)
        monkeypatch.setattr(part, "multiprocessors", lambda device: how.processors)
    monkeypatch.setattr(module, "tensor_map", lambda *arguments: None)
    monkeypatch.setattr(module, "open_rows", lambda device: how.opened)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def launch(logits, params, peers=True, starts=STARTS[2], config=HOPPER_TURNS_64, processed=True, raw=False, top=0, calls=1):
        vocab, count = logits.shape[1], len(starts)
        ends = (*starts[1:], vocab)
        state.ranks = RANKS["Ranks"](count)
        extents = [module.Extent(start, end - start, vocab, count) for start, end in zip(starts, ends, strict=True)]
        # What comes before a shard is poison here: the copy engine brings zeros.
        state.logits = [
            torch.nn.functional.pad(logits[:, e.start : e.start + e.size], (e.skip, 0), value=1e30).contiguous()
            for e in extents
        ]
        words = sharded.Layout(count, vocab).words
        buffers = [torch.zeros(words, dtype=torch.int64) for _ in starts] if peers else []
        addresses = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64)

        def of_rank(rank):
            extent = extents[rank]
            weight = logits[:, extent.start : extent.start + extent.size].T.contiguous().bfloat16()
            source = HiddenSource(torch.eye(len(logits), dtype=torch.bfloat16), nl.LMHead(weight).spec)
            transport = RANKS["Transport"](state.ranks, rank, buffers, addresses)
            rows = make_rows(params, *logits.shape, logits.device)
            for _ in range(calls):
                drawn = sharded.launch_shard_draw(source, rows, processed, raw, config, extent, transport, top)
            return drawn

        return state.ranks.run(of_rank)

    launch.how = how
    return launch


def rows_of(families, vocab=VOCAB, seed=0):
    """Rows of logits that bf16 holds."""
    rows = [make_logits(family, 1, vocab, seed + index) for index, family in enumerate(families)]
    return torch.cat(rows).clamp(-200, 200).bfloat16().float()


def parts_of(drawn):
    """Every tensor of a draw."""
    tops = [part for top in (drawn.top, drawn.raw_top) if top is not None for part in top]
    return [*[part for part in drawn[:4] if part is not None], *tops]


def compare(results, logits, params, top=0):
    """Every rank has the same bits, and they are the reference's tokens; returns how many rows are left open."""
    want = nl.sample_logits(logits, params, logprobs=True, top_logprobs=top, impl="reference")
    got, left = results[0]
    opened = torch.zeros(len(logits), dtype=torch.bool) if left is None else TOOLS["launcher"]("shard_sm90").open_mask(left)
    done = ~opened
    for other, other_left in results[1:]:
        assert left is None or torch.equal(opened, TOOLS["launcher"]("shard_sm90").open_mask(other_left))
        for one, two in zip(parts_of(got), parts_of(other), strict=True):
            assert torch.equal(one[done].nan_to_num(7.0), two[done].nan_to_num(7.0))
    assert got.tokens[done, 0].tolist() == want.tokens[done].tolist()
    for name in ("logprobs", "raw_logprobs"):
        part = getattr(got, name)
        if part is not None:
            torch.testing.assert_close(part[done, 0], getattr(want, name)[done], rtol=1e-6, atol=1e-5, equal_nan=True)
    if got.log_mass is not None:
        torch.testing.assert_close(got.log_mass, want.log_mass, rtol=1e-6, atol=1e-5, equal_nan=True)
    for name in ("top", "raw_top"):
        part = getattr(got, name)
        if part is not None:
            assert part.ids[done].tolist() == getattr(want, name).ids[done].tolist()
            torch.testing.assert_close(
                part.logprobs[done], getattr(want, name).logprobs[done], rtol=1e-5, atol=1e-5, equal_nan=True
            )
    return int(opened.sum())


FAMILIES = ["peaked", "gauss", "flat", "zipf", "ties", "outlier", "coldT"]
TEMPERATURE = torch.tensor([1.0, 0.5, 1.0, 2.0, 1.0, 0.7, 1.0])
MIXED = {
    "top_k": torch.tensor([50, 0, 3, 700, 0, 1, 0]),
    "top_p": torch.tensor([1.0, 0.9, 0.5, 0.95, 1.0, 1.0, 0.3]),
    "min_p": torch.tensor([0.0, 0.0, 0.01, 0.0, 0.2, 0.0, 0.0]),
}
FILTERS = {
    "none": {},
    "k50": {"top_k": 50},
    "k5000": {"top_k": 5000},
    "p90": {"top_p": 0.9},
    "k50p95": {"top_k": 50, "top_p": 0.95},
    "minp05": {"min_p": 0.05},
    "mixed": MIXED,
}


@pytest.mark.parametrize("peers", [True, False], ids=["peers", "gathered"])
@pytest.mark.parametrize("ranks", STARTS)
@pytest.mark.parametrize("filters", FILTERS)
def test_tokens_are_the_references(draw, filters, ranks, peers):
    logits = rows_of(FAMILIES)
    params = nl.SamplingParams(temperature=TEMPERATURE, seed=torch.arange(7), **FILTERS[filters])
    left = compare(draw(logits, params, peers, STARTS[ranks], raw=True), logits, params)
    assert left <= (0 if peers else 7)


@pytest.mark.parametrize("peers", [True, False], ids=["peers", "gathered"])
@pytest.mark.parametrize("filters", [{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 300, "top_p": 0.9}], ids=str)
def test_the_likeliest_tokens_come_along(draw, filters, peers):
    logits = rows_of(["peaked", "gauss", "flat", "ties", "zipf"])
    temperature = torch.tensor([1.0, 0.5, 1.0, 0.0, 2.0])
    params = nl.SamplingParams(temperature=temperature, seed=torch.arange(5), **filters)
    for count in (1, 128):
        compare(draw(logits, params, peers, STARTS[3], raw=True, top=count), logits, params, count)


@pytest.mark.parametrize("filters", [{}, {"top_k": 50, "top_p": 0.9}, {"top_p": 0.9}], ids=str)
def test_masks_and_biases_are_of_global_ids(draw, filters):
    logits = rows_of(["gauss", "peaked", "flat"])
    generator = torch.Generator().manual_seed(5)
    allowed = torch.randint(-(2**31), 2**31, (3, -(-VOCAB // 32)), generator=generator).int()
    allowed[2] = 0
    allowed[2, 200] = 1 << 5  # the last shard's alone
    bias = torch.randn(3, VOCAB, generator=generator)
    dense = {"allowed_tokens": allowed, "logit_bias": bias}
    ids = torch.tensor([[4_999, 5_000, 8_999], [130, 127, 3], [6405, 4_992, 5_001]])
    sparse = {"logit_bias": (ids, torch.tensor([[9.0, 8.5, 9.5], [INF, 0.5, 1.0], [2.0, INF, -1.0]]))}
    for asked in (dense, sparse):
        params = nl.SamplingParams(seed=torch.arange(3), **asked, **filters)
        compare(draw(logits, params, starts=STARTS[3]), logits, params)


@pytest.mark.parametrize("config", [HOPPER_TURNS_64, HOPPER_SHARED], ids=["turns", "shared"])
@pytest.mark.parametrize("order", [1, 2])
def test_the_order_of_threads_changes_nothing(draw, order, config):
    logits = rows_of(FAMILIES)
    params = nl.SamplingParams(seed=torch.arange(7), **MIXED)
    first = draw(logits, params, raw=True, config=config)
    draw.how.seed, draw.how.poison = order, 0x00
    other = draw(logits, params, raw=True, config=config)
    for one, two in zip(parts_of(first[0][0]), parts_of(other[0][0]), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("filters", ["none", "mixed"])
def test_calls_follow_one_another(draw, filters):
    """Five calls share the ranks' memory, by turns: no rank takes an earlier call's message for this one's."""
    logits = rows_of(FAMILIES)
    params = nl.SamplingParams(temperature=TEMPERATURE, seed=torch.arange(7), **FILTERS[filters])
    compare(draw(logits, params, calls=5), logits, params)


def test_greedy_invalid_and_tied_rows(draw):
    logits = rows_of(["gauss", "peaked", "ties", "gauss", "gauss"])
    logits[0] = -INF
    logits[1, 7_000] = float("nan")
    logits[2] = 3.0  # on every shard
    logits[3, 6_000] = INF
    for filters in ({}, {"top_k": 20}):
        params = nl.SamplingParams(temperature=torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0]), seed=torch.arange(5), **filters)
        compare(draw(logits, params), logits, params)
    params = nl.SamplingParams(temperature=0.0)
    compare(draw(logits, params), logits, params)


def test_what_is_broken_is_seen(draw):
    """The controls: noise of ids that count from the shard's start, a mass that one rank keeps to itself, no last kernel."""
    logits = rows_of(FAMILIES)
    params = nl.SamplingParams(seed=torch.arange(7))

    def local_ids(name, params):
        params.first = 0

    def forgotten(name, params):
        if name == "exchange":
            params.mass_tiles = 0

    for change in (local_ids, forgotten):
        draw.how.change = change
        with pytest.raises(AssertionError):
            compare(draw(logits, params), logits, params)
    draw.how.change, draw.how.skip = (lambda name, params: None), ("finish",)
    params = nl.SamplingParams(temperature=4.0, seed=torch.arange(7), top_p=0.9)
    with pytest.raises(AssertionError):
        compare(draw(logits, params), logits, params)
