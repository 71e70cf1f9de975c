"""The source of the filters' kernel, compiled for the CPU: the sort's sets and the streaming draw's tokens.

``emulated/device.h`` runs it, the library's own launcher starts it. What neither can show: how memory orders, what happens at
the same time, and the chip's approximate instructions beyond the error that is allowed to them (``emulated/intrinsics.h``).
"""

import ctypes
import functools
import platform
import random
import re
import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import nologits as nl
from nologits.kernels.config import FilterConfig, SearchConfig
from nologits.params import make_rows
from nologits.reference import scores
from nologits.testing import FAMILIES, make_logits

GXX = shutil.which("g++")
pytestmark = pytest.mark.skipif(GXX is None or platform.machine() != "x86_64", reason="needs g++ and an x86-64 processor")

HERE = Path(__file__).parent / "emulated"
SOURCES = Path(nl.__file__).parent / "kernels" / "sm90"
TOOLS = runpy.run_path(str(HERE / "build.py"))


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    """``build(defines)``: the loaded library of the kernel under these macros."""
    folder = tmp_path_factory.mktemp("emulated")
    TOOLS["copy_sources"](SOURCES, folder)
    return functools.cache(lambda defines: TOOLS["build"](GXX, folder, defines))


@pytest.fixture
def kernel(build, monkeypatch):
    """The launcher with the emulation for a GPU; what is set on it (``config``, ``seed``, ``poison``) is how it launches."""
    module = TOOLS["launcher"]()
    how = SimpleNamespace(config=FilterConfig(8), seed=0, poison=0xFF, gathered=8192)

    def load(name, entry, threads, shared, defines, index):
        assert (name, entry, threads) == ("filters", "filter_rows", dict(defines)["THREADS"])
        library, cluster = build((*defines, ("GATHERED", how.gathered))), dict(defines)["CLUSTER"]
        assert library.params_bytes() == ctypes.sizeof(module.Params)

        def launch(grid, arguments, device):
            (params,) = arguments
            assert (grid[0] % cluster, grid[1]) == (0, 1)
            failure = library.launch(ctypes.addressof(params), grid[0] // cluster, shared, how.seed, how.poison)
            assert not failure, failure.decode()

        return SimpleNamespace(launch=launch)

    monkeypatch.setattr(module, "load", load)
    monkeypatch.setattr(module, "filter_config", lambda *shape: how.config)
    monkeypatch.setattr(module, "multiprocessors", lambda device: 16)  # a few rows prefetch others
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    how.mask, how.draw = module.launch_mask, module.launch_filtered_draw
    return how


def bits(tensor):
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


INF, NAN = float("inf"), float("nan")
F32, BF16, F16 = (torch.float32, torch.bfloat16, torch.float16)
MADE = [name for name in FAMILIES if name != "smollm2"]
FILTERS = [  # top-k, top-p, min-p
    (50, 1.0, 0.0), (0, 0.9, 0.0), (50, 0.95, 0.0), (0, 1.0, 0.05), (50, 0.9, 0.02),
    (400, 1.0, 0.0), (1, 1.0, 0.0), (0, 0.0, 0.0), (0, 1e-8, 0.0), (0, 0.9999999, 0.0),
]  # fmt: skip
REQUESTS = [(*filters, temperature) for temperature in (0.01, 1.0, 5.0) for filters in FILTERS]


def request_of(requests, wide=True):
    """(top-k, top-p, min-p, temperature) of each row."""
    share, count = (torch.float64, torch.int64) if wide else (torch.float32, torch.int32)
    dtypes = {"top_k": count, "top_p": share, "min_p": share, "temperature": torch.float32}
    return {
        key: torch.tensor(column, dtype=dtypes[key]) for key, column in zip(dtypes, zip(*requests, strict=True), strict=True)
    }


def rows_of(family, batch, vocab, dtype, seed=0):
    """What would become +inf becomes the type's largest number."""
    return make_logits(family, batch, vocab, seed).to(dtype).nan_to_num(posinf=torch.finfo(dtype).max, neginf=-INF)


def mixed(count, vocab, dtype, seed=0):
    """Rows of all families in turn."""
    each = -(-count // len(MADE))
    return torch.stack([rows_of(name, each, vocab, dtype, seed) for name in MADE], dim=1).flatten(0, 1)[:count]


def check_sets(kernel, logits, request, about="", out=None, mask_value=-INF):
    want = nl.filter_logits(logits, impl="torch", mask_value=mask_value, **request)
    out = torch.full_like(logits, 5.0) if out is None else out
    kernel.mask(logits, make_rows(nl.SamplingParams(**request), *logits.shape, logits.device, noise=False), out, mask_value)
    wrong = (bits(out) != bits(want)).any(-1).nonzero().flatten().tolist()
    asked = [{key: value[row].item() if hasattr(value, "dim") else value for key, value in request.items()} for row in wrong]
    assert not wrong, f"{about}: other sets for {list(zip(wrong, asked, strict=True))}"
    return out


def check_draws(kernel, logits, request, mode):
    """Tokens, unless the best scores are too close, and numbers."""
    params = nl.SamplingParams(**request)
    torch.manual_seed(5)
    want = nl.sample_logits(logits, params, logprobs=mode, impl="torch")
    torch.manual_seed(5)
    rows = make_rows(params, *logits.shape, logits.device)
    got = kernel.draw(logits, rows, bool(mode))
    tokens = got.tokens[:, 0]
    differ = tokens != want.tokens
    if differ.any():
        score = scores(logits.float(), rows, 0, 0)
        best, other = (score.gather(1, ids.clamp(min=0)[:, None])[:, 0] for ids in (want.tokens, tokens))
        size = torch.maximum(best.abs(), torch.as_tensor(rows.temperature32))
        assert ((best - other).abs() <= 1e-5 * size)[differ].all(), (best[differ], other[differ])
    assert differ.sum() <= 1
    for a, b in ((got.logprobs, want.logprobs), (got.log_mass, want.log_mass)) if mode else ():
        torch.testing.assert_close(a.flatten()[~differ], b[~differ], rtol=1e-6, atol=1e-5, equal_nan=True)


SHAPES = [  # V, blocks a row, their threads, logits that a block can put aside, dtype
    (33, 1, 512, 8192, F32), (1_000, 8, 512, 8192, BF16), (5_000, 1, 512, 8192, F16), (5_000, 2, 1024, 1024, F32),
    (20_000, 8, 512, 8192, F32), (20_000, 4, 1024, 512, F16), (20_000, 2, 512, 8192, BF16), (20_000, 1, 512, 1024, F32),
]  # fmt: skip


@pytest.mark.parametrize(("vocab", "cluster", "threads", "gathered", "dtype"), SHAPES, ids=str)
def test_sets_of_every_family(vocab, cluster, threads, gathered, dtype, kernel):
    """Rows that are put aside as they are, and rows of which a sample says what to put aside."""
    kernel.config, kernel.gathered = FilterConfig(cluster, threads), gathered
    for family in MADE:
        requests = REQUESTS if vocab < 5_000 else random.Random(family).sample(REQUESTS, 12)
        check_sets(kernel, rows_of(family, len(requests), vocab, dtype), request_of(requests), f"{family} {vocab} {dtype}")


@pytest.mark.parametrize(("cluster", "dtype"), [(1, F32), (8, F32), (16, BF16), (16, F16)], ids=str)
def test_sets_of_a_large_vocabulary(cluster, dtype, kernel):
    kernel.config = FilterConfig(cluster)
    check_sets(kernel, mixed(10, 151_936, dtype), request_of([*REQUESTS[10:15], REQUESTS[15], REQUESTS[1], *REQUESTS[19:22]]))


SEARCHES = [SearchConfig(TRUNCATE=0), SearchConfig(TIERED=0), SearchConfig(ARITY=2), SearchConfig(ARITY=4)]


@pytest.mark.parametrize("search", SEARCHES, ids=str)
def test_sets_of_every_search(search, kernel):
    kernel.config = FilterConfig(2, search=search)
    for vocab in (4_999, 20_001):
        check_sets(kernel, mixed(30, vocab, F32), request_of(REQUESTS), str(search))


def test_copies_that_are_all_kept_are_seen(kernel):
    """The control: without the rule for copies of the boundary value the comparison fails."""
    kernel.config = FilterConfig(2, search=SearchConfig(DUPLICATES=0))
    with pytest.raises(AssertionError, match=r"^ties: other sets"):
        check_sets(kernel, rows_of("ties", 30, 5_000, F32), request_of(REQUESTS), "ties")


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("cluster", [2, 8])
def test_sets_do_not_depend_on_the_order_of_threads(cluster, seed, kernel):
    """Nor on what lay in shared memory: numbers, not NaNs."""
    kernel.config, kernel.seed, kernel.poison = FilterConfig(cluster), seed, 0x46
    check_sets(kernel, mixed(30, 5_000, F32, seed), request_of(random.Random(seed).sample(REQUESTS, 30)), str(seed))


@pytest.mark.parametrize("seeds", ["given", "some", "none"])
@pytest.mark.parametrize("mode", [False, "processed"])
@pytest.mark.parametrize(("vocab", "cluster", "dtype"), [(33, 1, BF16), (5_000, 1, BF16), (20_001, 2, F32)], ids=str)
def test_draws(vocab, cluster, dtype, mode, seeds, kernel):
    kernel.config, slots = FilterConfig(cluster), torch.arange(30)
    seed = {"given": slots * 2**40, "some": slots % 3 - 1, "none": None}[seeds]
    request = request_of(random.Random(seeds).sample(REQUESTS, 30), wide=seeds != "some")
    request["temperature"][::7] = 0
    request |= {} if seed is None else {"seed": seed, "position": slots + 2**33}
    check_draws(kernel, mixed(30, vocab, dtype), request, mode)


@pytest.mark.parametrize("mode", [False, "processed"])
def test_draws_of_large_clusters_and_scalars(mode, kernel):
    kernel.config = FilterConfig(8)
    check_draws(kernel, mixed(30, 20_000, F16), request_of(REQUESTS) | {"seed": torch.arange(30)}, mode)
    check_draws(kernel, mixed(9, 1_000, F16), {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "temperature": 0.7, "seed": 7}, mode)


@pytest.mark.parametrize(("dtype", "vocab", "cluster"), [(BF16, 1_000, 1), (F32, 5_001, 2)], ids=str)
def test_rows_without_a_token(dtype, vocab, cluster, kernel):
    kernel.config = FilterConfig(cluster)
    logits, request = mixed(28, vocab, dtype), request_of([(50, 0.9, 0.02, 1.0)] * 28) | {"seed": torch.arange(28)}
    impossible = {"temperature": (NAN, -1.0, INF), "top_k": (-2,), "top_p": (NAN, 1.5, -0.5), "min_p": (NAN, 1.5)}
    for i, (key, value) in enumerate((key, value) for key, values in impossible.items() for value in values):
        request[key][2 * i + 1] = value
    logits[19, 0] = logits[21, vocab // 2] = logits[23, -1] = NAN
    logits[25], logits[27] = -INF, NAN
    for mode in (False, "processed"):
        check_draws(kernel, logits, request, mode)
    del request["seed"]
    out = check_sets(kernel, logits, request, mask_value=-1e4)
    assert torch.equal(out[1::2], torch.full_like(out[1::2], -1e4))


def test_infinite_logits_win(kernel):
    logits = mixed(9, 5_000, F32)
    logits[:, [4_998, 77]] = INF
    kernel.config = FilterConfig(2)
    for filters in ((1, 1.0, 0.0), (0, 0.4, 0.0), (2, 1.0, 0.0), (0, 1.0, 0.5), (40, 0.9, 0.0)):
        check_sets(kernel, logits, request_of([(*filters, 1.0)] * 9))
        check_draws(kernel, logits, request_of([(*filters, 1.0)] * 9) | {"seed": torch.arange(9)}, "processed")


@pytest.mark.parametrize(("dtype", "vocab", "cluster"), [(F32, 999, 1), (BF16, 2_001, 2), (F16, 4_100, 1)], ids=str)
def test_rows_are_read_and_written_where_they_lie(dtype, vocab, cluster, kernel):
    """Any pitch and offset, the output a part of something larger or the input itself; nothing else changes."""
    kernel.config, rows, aligned = FilterConfig(cluster), mixed(9, vocab, dtype), -(-vocab // 64) * 64 + 64
    request = {"top_k": 300, "top_p": 0.9, "temperature": 2.0}
    for offset, pitch in ((8, aligned), (0, vocab), (3, aligned + 1)):
        whole = torch.full((18, pitch), 100.0, dtype=dtype)
        part = whole[::2, offset : offset + vocab]
        part.copy_(rows)
        given, other = whole.clone(), torch.full_like(whole, 5.0)
        check_sets(kernel, part, request, out=other[::2, offset : offset + vocab], mask_value=-1e4)
        assert torch.equal(whole, given)
        check_sets(kernel, part, request, out=part, mask_value=-1e4)
        for target, filling in ((whole, 100.0), (other, 5.0)):
            target[::2, offset : offset + vocab] = filling
            assert (target == filling).all()


@pytest.mark.parametrize(
    ("request_", "kept"), [({"top_k": 1, "top_p": 0.5}, 1), ({"top_p": 0.5}, 1), ({"top_p": 0.51}, 2)], ids=str
)
def test_two_copies(request_, kept, kernel):
    """Where top-k has left one of two equal logits, top-p has nothing to add."""
    kernel.config = FilterConfig(1)
    assert (check_sets(kernel, torch.zeros(1, 2), request_) > -INF).sum() == kept


@pytest.mark.parametrize(("dtype", "cluster"), [(F32, 1), (BF16, 2), (F32, 8)], ids=str)
def test_copies_of_the_boundary_stay_by_id(dtype, cluster, kernel):
    """Copies over all blocks, fewer and more than a list holds, cut by k, by p, and by p after k."""
    kernel.config, cases = FilterConfig(cluster), []
    for copies in (2, 512, 513, 600, 2_500):
        cases += [(copies, above, above + k, 1.0, 0.0) for above in (0, 10) for k in (1, copies // 2, copies)]
        cases += [(copies, 0, k, p, min_p) for k in (0, copies // 2) for p in (0.3, 0.5) for min_p in (0.0, 1.0)]
    logits = torch.randn(len(cases), 5_000, generator=torch.Generator().manual_seed(2)).round() - 60
    for row, (copies, above, *_) in enumerate(cases):
        logits[row, torch.arange(copies) * (5_000 // copies) + row % 2], logits[row, torch.arange(above) * 400 + 2] = 1.0, 2.0
    check_sets(kernel, logits.to(dtype), request_of([(*case[2:], 1.0) for case in cases]), "copies")


def test_the_launcher_has_the_kernels_parameters(kernel):
    body = re.search(r"struct Params \{(.*?)\n\};", (SOURCES / "filters.cu").read_text(), re.S).group(1)
    kinds = {"i64": ctypes.c_int64, "double": ctypes.c_double, "int": ctypes.c_int32, "float": ctypes.c_float}
    fields = re.findall(r"^ +(?:const )?(\w+\*?) ([\w, ]+);", body, re.M)
    want = [(name, kinds.get(kind, ctypes.c_void_p)) for kind, names in fields for name in names.split(", ")]
    assert list(TOOLS["launcher"]().Params._fields_) == want


@pytest.mark.parametrize("tail", [1e-5, 2.4e-9, 2.6e-9, 3.5e-9, 4e-9, 1e-12])
def test_a_tail_of_rounded_units_is_cut_where_p_says(tail, kernel):
    """A peak, and copies of a logit so far below that each has a few units of mass, or half a one rounded up, or none."""
    kernel.config = FilterConfig(1)
    logits = torch.tensor([-20.0, -27.5, -28.0, -28.35, -28.4, -28.45, -29.0])[:, None].repeat(1, 5_000)
    logits[:, 1_700] = 0.0
    check_sets(kernel, logits, {"top_p": 1 - tail})
