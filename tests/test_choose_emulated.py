"""The kernel that chooses among candidates, compiled for the CPU: the reference's tokens, nothing settled in doubt.

What the tile kernel leaves is made here by its rules (``sm90/truncate.cuh``): all logits from a threshold on, in any order, and
the masses. ``emulated/device.h`` runs the kernel.
"""

import ctypes
import functools
import math
import platform
import random
import runpy
import shutil
from pathlib import Path

import pytest
import torch

import nologits as nl
from nologits.params import make_rows
from nologits.selection import fixed_mass
from nologits.testing import make_logits

GXX = shutil.which("g++")
pytestmark = pytest.mark.skipif(GXX is None or platform.machine() != "x86_64", reason="needs g++ and an x86-64 processor")

TOOLS = runpy.run_path(str(Path(__file__).parent / "emulated" / "build.py"))
SOURCES = Path(nl.__file__).parent / "kernels" / "sm90"
VOCAB, SLOTS, MASS_IDS = 20_000, 5, 256
INF, LOWEST, LOG2E = float("inf"), -3.4028234e38, 1.4426950408889634
SETTLED, BY_COUNT, BY_MASS, WEIGHING, DRAWING = 0, 1, 2, 4, 6
"""``Mode`` of ``sm90/params.cuh``."""


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    """``build(defines)``: the loaded library of the kernel under these macros."""
    folder = tmp_path_factory.mktemp("emulated")
    TOOLS["copy_sources"](SOURCES, folder)
    return functools.cache(lambda defines: TOOLS["build"](GXX, folder, defines, "choose"))


def order_of(logit):
    """A logit's place among all, unsigned: 0 is less than any."""
    bits = torch.tensor(logit, dtype=torch.float32).add(0.0).view(torch.int32).item()
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) & 0xFFFFFFFF ^ 0x80000000


def signed(word, bits):
    return word - 2**bits if word >= 2 ** (bits - 1) else word


def masses_of(logits, temperature):
    """(reference, sum in powers of 2) of every 256 ids, and no more than fp32 of it."""
    tiles = torch.nn.functional.pad(logits, (0, -logits.shape[1] % MASS_IDS), value=-INF).unflatten(1, (-1, MASS_IDS))
    peak = tiles.amax(-1).clamp(min=-3e38)
    sums = torch.where(tiles > -INF, ((tiles - peak[..., None]).double() / temperature[:, None, None]).exp(), 0.0).sum(-1)
    return torch.stack((peak, sums.float()), dim=-1).contiguous()


def gather(module, logits, rows, wanted, shuffle):
    """What the tile kernel leaves of rows whose thresholds are their ``wanted``-th largest logits."""
    batch, vocab = logits.shape
    temperature = torch.as_tensor(rows.temperature32).expand(batch).float()
    left = {
        "entries": torch.zeros(batch, module.CAPACITY, dtype=torch.int64), "gathered": torch.zeros(batch, dtype=torch.int32),
        "peaks": torch.zeros(batch, dtype=torch.int32), "slot_thresholds": torch.zeros(batch, SLOTS),
        "rests": torch.zeros(batch, SLOTS, dtype=torch.float64),
    }  # fmt: skip
    for row, values in enumerate(logits):
        threshold = LOWEST if wanted >= vocab else max(values.sort(descending=True).values[wanted - 1].item(), LOWEST)
        ids = (~(values < threshold)).nonzero().flatten().tolist()
        shuffle.shuffle(ids)
        words = [order_of(values[i].item()) << 32 | (~i & 0xFFFFFFFF) for i in ids[: module.CAPACITY]]
        left["entries"][row, : len(words)] = torch.tensor([signed(word, 64) for word in words], dtype=torch.int64)
        left["gathered"][row] = len(ids)
        left["peaks"][row] = signed(order_of(values.max().item()), 32)
        left["slot_thresholds"][row] = threshold
        inverse = (torch.tensor(LOG2E, dtype=torch.float32) / temperature[row]).item() if temperature[row] > 0 else 1.0
        octaves = (values[(values < threshold) & (values > -INF)].double() - threshold) * inverse
        left["rests"][row, shuffle.randrange(SLOTS)] = octaves.exp2().sum()
    return left


def choose(build, logits, params, wanted, top=0, seed=0, change=lambda left: None):
    """What the kernel makes of rows of which about ``wanted`` candidates were gathered. ``change`` spoils what it is given."""
    module = TOOLS["launcher"]("categorical_sm90")
    batch, vocab = logits.shape
    rows = make_rows(params, batch, vocab, logits.device)
    temperature = torch.as_tensor(rows.temperature32).expand(batch).contiguous().float()
    left = gather(module, logits, rows, wanted, random.Random(seed))
    change(left)
    winners = torch.zeros(batch, SLOTS, 2)
    winners.view(torch.int32)[:, :, 1] = -1
    if not rows.filtered:
        drawn = nl.sample_logits(logits, params, impl="reference").tokens
        winners[:, 1, 0] = logits.gather(1, drawn[:, None])[:, 0]
        winners.view(torch.int32)[:, 1, 1] = drawn.int()
    shapes = {"logprobs": (batch,), "raw_logprobs": (batch,), "log_masses": (batch,)}
    shapes |= {"top_logprobs": (batch, top), "raw_top_logprobs": (batch, top)}
    made = {name: torch.zeros(shape) for name, shape in shapes.items()}
    shapes = {"tokens": (batch,), "top_ids": (batch, top), "raw_top_ids": (batch, top), "open": (batch, module._OPEN_WORDS)}
    made |= {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()}
    given = left | {
        "temperature": temperature, "seed": rows.seed, "position": rows.position, "winners": winners,
        "masses": masses_of(logits, torch.where(temperature > 0, temperature, 1.0)),
        "raw_masses": masses_of(logits, torch.ones(batch)),
        "tops": torch.zeros(batch, top, dtype=torch.int64), "progress": torch.zeros(2, dtype=torch.int32),
    }  # fmt: skip
    numbers = {"num_top": top, "stride_temperature": 1, "stride_seed": rows.seed.stride(0)}
    for name in ("top_k", "top_p", "min_p"):
        value = getattr(rows, name)
        if isinstance(value, torch.Tensor):
            given[name] = value
            numbers |= {f"stride_{name}": value.stride(0), f"{name}_wide": int(value.element_size() == 8)}
        else:
            numbers[f"{name}_value"] = value
    tensors = {name: tensor for name, tensor in (given | made).items() if tensor is not None and tensor.numel()}
    kernel_params = module.Params(
        **{name: tensor.data_ptr() for name, tensor in tensors.items()}, **numbers,
        B=batch, V=vocab, mass_tiles=-(-vocab // MASS_IDS), slots=SLOTS,
    )  # fmt: skip
    library = build((("BLOCKS", 1), ("TOP", int(top > 0)), ("MASS", 1), ("RAW", 1)))
    assert library.params_bytes() == ctypes.sizeof(module.Params)
    failure = library.launch(ctypes.addressof(kernel_params), batch, 2 * 8 * module.CAPACITY, seed, 0xFF)
    assert not failure, failure.decode()
    made["mode"] = (made["open"][:, 0] & 0xFFFFFFFF).tolist()
    assert given["progress"].tolist() == [sum(mode != SETTLED for mode in made["mode"]), 0]
    return made


def count_right(got, want, row):
    """1 if a settled row has the reference's token and log-probabilities."""
    same = got["tokens"][row] == want.tokens[row]
    close = all(
        torch.allclose(got[name][row], part[row], rtol=3e-7, atol=1e-5)
        for name, part in (("logprobs", want.logprobs), ("raw_logprobs", want.raw_logprobs), ("log_masses", want.log_mass))
    )
    return int(same and close)


FILTERS = {
    "k50": {"top_k": 50},
    "k1": {"top_k": 1},
    "k300": {"top_k": 300},
    "p90": {"top_p": 0.9},
    "p0": {"top_p": 0.0},
    "p99": {"top_p": 0.99},
    "k50p95": {"top_k": 50, "top_p": 0.95},
    "minp05": {"min_p": 0.05},
    "minp all": {"min_p": 1e-7},
    "minp p": {"min_p": 0.01, "top_p": 0.8},
    "all": {"min_p": 0.001, "top_k": 60, "top_p": 0.7},
}


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("family", ["peaked", "gauss", "flat", "ties", "masked", "outlier"])
def test_settled_rows_have_the_references_token(build, family, filters):
    logits = make_logits(family, 3, VOCAB)
    temperature = torch.tensor([1.0, 0.3, 3.0])
    params = nl.SamplingParams(temperature=temperature, seed=torch.arange(3), **FILTERS[filters])
    want = nl.sample_logits(logits, params, logprobs=True, impl="reference")
    for seed, wanted in enumerate((5, 60, 900, 3500)):
        got = choose(build, logits, params, wanted, seed=seed)
        for row, mode in enumerate(got["mode"]):
            assert mode != SETTLED or count_right(got, want, row)
            k = FILTERS[filters].get("top_k", VOCAB)
            if family in ("peaked", "gauss", "flat", "outlier"):  # without ties: as many candidates as are wanted
                assert mode == SETTLED or k > wanted


def test_what_is_not_certain_stays_open(build):
    """A row is open for what it lacks: candidates, room for them, or the mass of the others."""
    logits = make_logits("gauss", 2, VOCAB)
    seeds = {"seed": torch.arange(2)}
    ask = lambda wanted, **filters: choose(build, logits, nl.SamplingParams(**filters, **seeds), wanted)["mode"]  # noqa: E731
    assert ask(49, top_k=50) == [BY_COUNT] * 2
    assert ask(50, top_k=50) == [SETTLED] * 2
    assert ask(5000, top_k=50) == [BY_COUNT] * 2  # more than there is room for
    assert ask(60, top_p=0.9) == [BY_MASS] * 2
    assert ask(60, min_p=1e-3) == [DRAWING] * 2
    assert ask(60, min_p=0.9, top_p=0.99) == [SETTLED] * 2


def test_a_boundary_in_doubt_is_weighed(build):
    """At p = prefix / total, and so close to it that the mass of the others, which is known to 1e-6, does not tell."""
    logits = make_logits("peaked", 1, VOCAB)
    mass = fixed_mass(logits, 1.0)[1].sort(descending=True).values.double()[0]
    prefix = mass.cumsum(0)
    for count in (3, 20, 80):
        share = (prefix[count] / prefix[-1]).item()
        modes = []
        for p in (share, math.nextafter(share, 1), math.nextafter(share, 0), share + 1e-11, share + 1e-3):
            params = nl.SamplingParams(top_p=torch.tensor([p], dtype=torch.float64), seed=torch.tensor([1]))
            got = choose(build, logits, params, 600)
            modes += got["mode"]
            if got["mode"] == [SETTLED]:
                assert count_right(got, nl.sample_logits(logits, params, logprobs=True, impl="reference"), 0)
        assert modes[:4] == [WEIGHING] * 4
    # The control: one who knows the others' mass to the last bit would not need to be in doubt, one who forgets it is wrong
    params = nl.SamplingParams(top_p=0.6, seed=torch.arange(40))
    rows = make_logits("gauss", 1, VOCAB).expand(40, -1).contiguous()
    want = nl.sample_logits(rows, params, logprobs=True, impl="reference")
    right = choose(build, rows, params, 3500)
    wrong = choose(build, rows, params, 3500, change=lambda left: left["rests"].zero_())
    assert right["mode"] == wrong["mode"] == [SETTLED] * 40
    assert sum(count_right(right, want, row) for row in range(40)) == 40
    assert sum(count_right(wrong, want, row) for row in range(40)) < 40


def test_blocks_that_would_not_wait_change_nothing(build):
    """A block that did not hear of the threshold gathers all of its logits: they are candidates only where all blocks' are."""
    logits = make_logits("gauss", 2, VOCAB)
    for filters in ({"top_k": 50}, {"min_p": 0.05}, {"top_p": 0.5}):
        params = nl.SamplingParams(temperature=0.4, seed=torch.arange(2), **filters)
        want = nl.sample_logits(logits, params, logprobs=True, impl="reference")

        def spread(left):
            left["slot_thresholds"][:, 2] -= 0.5  # the lower ones' rests are another's

        got = choose(build, logits, params, 700, change=spread)
        assert got["mode"] == ([BY_MASS] * 2 if "top_p" in filters else [SETTLED] * 2)
        assert all(mode != SETTLED or count_right(got, want, row) for row, mode in enumerate(got["mode"]))


@pytest.mark.parametrize("filters", [{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize("family", ["peaked", "gauss", "ties", "masked"])
def test_the_likeliest_tokens(build, family, filters):
    temperature = torch.tensor([1.0, 0.7, 0.0, 2.0])
    params = nl.SamplingParams(temperature=temperature, seed=torch.arange(4), **filters)
    for wanted, vocab in ((40, VOCAB), (700, VOCAB), (3000, VOCAB), (3000, 3000)):
        logits = make_logits(family, 4, vocab)
        want = nl.sample_logits(logits, params, logprobs=True, top_logprobs=20, impl="reference")
        got = choose(build, logits, params, wanted, top=20)
        for row, mode in enumerate(got["mode"]):
            if mode != SETTLED or (filters and temperature[row] == 0):
                continue
            for name, part in (("top", want.top), ("raw_top", want.raw_top)):
                assert got[f"{name}_ids"][row].tolist() == part.ids[row].tolist()
                torch.testing.assert_close(got[f"{name}_logprobs"][row], part.logprobs[row], rtol=1e-5, atol=1e-5)


def test_invalid_rows(build):
    logits = make_logits("peaked", 3, VOCAB)
    logits[0] = -INF
    logits[1, 5] = math.nan
    params = nl.SamplingParams(top_k=torch.tensor([5, 5, -2]), seed=torch.arange(3))

    def told(left):
        left["peaks"][1] = signed(0x7FFFFFFF ^ 0x80000000, 32)  # as a NaN is told

    got = choose(build, logits.nan_to_num(nan=0.0, neginf=-INF), params, 60, top=5, change=told)
    assert got["tokens"].tolist() == [-1] * 3
    assert bool(got["logprobs"].isnan().all())
    assert bool(got["top_logprobs"].isnan().all())
    assert got["mode"] == [SETTLED] * 3
