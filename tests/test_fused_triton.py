"""Filters under the matmul on the portable path: candidates certify what they keep, other rows are made whole, and no result
tells which it was.

Room, pilot and vocabulary are small here, in proportion. Logits are planted, row by row, so they are the reference's to the
bit: tokens have to be equal, and a log-probability tells if one token too many or too few is kept.
"""

import os
import random

import pytest
import torch

import nologits as nl
from nologits import filtered
from nologits.testing import FAMILIES, make_logits

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HAS_TRITON = DEVICE.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton needs a GPU or TRITON_INTERPRET=1")

INF, NAN = float("inf"), float("nan")
VOCAB, ROOM = 2_000, 256
MADE = [name for name in FAMILIES if name != "smollm2"]
MODES = [("top_k",), ("top_p",), ("min_p",), ("top_k", "top_p"), ("min_p", "top_p"), ("min_p", "top_k", "top_p")]


@pytest.fixture(autouse=True)
def small_room(monkeypatch):
    """A few hundred candidates, and a pilot of three tiles; nothing of the path that filters blocks of rows in torch."""
    from nologits import fused
    from nologits.kernels import threshold

    for name, value in {"CAPACITY": ROOM, "WANTED": 100, "ROOM": 180, "PILOT_SHARE": 4}.items():
        monkeypatch.setattr(threshold, name, value)

    def refuse(*args):
        raise AssertionError("rows of logits were made")

    monkeypatch.setattr(fused, "launch_logits", refuse)


def made(call):
    """How many rows of logits a call made, and what it returned."""
    from nologits.fused import made_rows

    before, counted = int(made_rows(DEVICE)), filtered.Count.rows
    out = call()
    assert filtered.Count.rows == counted  # the host does not know
    return int(made_rows(DEVICE)) - before, out


def plant(logits):
    """A head and hidden states with these logits: row j's lie in column j of the weight."""
    batch, vocab = logits.shape
    depth = max(16, -(-batch // 16) * 16)
    weight = torch.zeros(vocab, depth, device=DEVICE)
    weight[:, :batch] = logits.T.to(DEVICE)
    return torch.eye(batch, depth, device=DEVICE), nl.LMHead(weight)


def on_device(request):
    return {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in request.items()}


def draw(logits, impl, logprobs=True, num_samples=1, **request):
    hidden, head = plant(logits)
    params = nl.SamplingParams(**{"seed": torch.arange(len(logits), device=DEVICE), "position": 5} | on_device(request))
    return head.sample(hidden, params, logprobs=logprobs, num_samples=num_samples, impl=impl)


def agree(got, want):
    assert torch.equal(got.tokens, want.tokens)
    for a, b in zip(got[1:4], want[1:4], strict=True):
        if a is not None:
            torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-5, equal_nan=True)


def check(logits, expected=None, **request):
    """The reference's draws, and as many rows made whole as expected."""
    whole, got = made(lambda: draw(logits, "triton", **request))
    agree(got, draw(logits, "reference", **request))
    assert expected is None or whole == expected
    return whole


def row_numbers(**values):
    dtypes = {"top_k": torch.int64, "top_p": torch.float64, "min_p": torch.float64, "temperature": torch.float32}
    return {name: torch.tensor(value, dtype=dtypes[name]) for name, value in values.items()}


def peaked(batch, seed=0):
    return make_logits("peaked", batch, VOCAB, seed)


# ---- rows with a certificate


@pytest.mark.parametrize(
    "request_",
    [
        {"top_k": 50},
        {"top_p": 0.9},
        {"min_p": 0.05},
        {"top_k": 50, "top_p": 0.95},
        {"top_k": 90, "min_p": 0.01, "top_p": 0.5, "temperature": 0.7},
        {"top_p": 0.0},
        {"top_p": 0.8, "num_samples": 3},
    ],
    ids=str,
)
def test_peaked_rows_are_not_made_whole(request_):
    check(peaked(6), 0, **request_)


def test_rows_without_filters_and_greedy_ones_have_no_candidates(monkeypatch):
    from nologits import fused

    counts, launch = [], fused.launch_choose
    monkeypatch.setattr(fused, "launch_choose", lambda *args: counts.append(args[1].counts.tolist()) or launch(*args))
    request = row_numbers(top_k=[0, 5, -1, 5, 3_000], top_p=[1.0, 1.0, 1.0, 0.5, 1.0], temperature=[1.0, 1.0, 2.0, 0.0, 1.0])
    check(torch.cat((peaked(3), make_logits("gauss", 2, VOCAB, 1))), 0, **request)
    assert [count > 0 for count in counts[0]] == [False, True, False, False, False]


def test_small_vocabularies_are_candidates_whole():
    for name in ("flat", "ties", "gauss"):
        check(make_logits(name, 3, ROOM, 0), 0, top_p=0.9, min_p=1e-5)


def test_a_threshold_leaves_about_what_is_wanted():
    from nologits import fused
    from nologits.kernels.arguments import filter_columns
    from nologits.kernels.threshold import launch_thresholds
    from nologits.params import make_rows
    from nologits.sources import HiddenSource

    logits = make_logits("gauss", 16, VOCAB, 3)
    hidden, head = plant(logits)
    source = HiddenSource(hidden, head.spec)
    for request, low, high in (({"top_k": 5}, 30, 250), ({"top_k": 80}, 60, 350), ({"min_p": 0.9}, 0, 60)):
        rows = make_rows(nl.SamplingParams(**request), 16, VOCAB, DEVICE)
        thresholds = launch_thresholds(source, rows, filter_columns(rows, DEVICE), fused.config_for(source))
        count = (logits.to(DEVICE) >= thresholds[:, None]).sum(-1).double()
        assert low <= float(count.mean()) <= high


# ---- rows without one


MISSES = {
    "a nucleus of 90% of V": ("flat", {"top_p": 0.9}),
    "min-p keeps all": ("flat", {"min_p": 0.01}),
    "all logits equal, cut by p": ("tied", {"top_p": 0.5}),
    "all logits equal, cut by k": ("tied", {"top_k": 300}),
    "more ties than room": ("tied", {"top_k": 5}),
    "k beyond the room": ("gauss", {"top_k": 1_500}),
    "k beyond the room, then p": ("gauss", {"top_k": 1_500, "top_p": 0.9}),
    "a wide nucleus": ("gauss", {"top_p": 0.999}),
}


def miss(name):
    return torch.full((3, VOCAB), -1.5) if name == "tied" else make_logits(name, 3, VOCAB, 0)


@pytest.mark.parametrize("case", MISSES)
def test_planted_misses_are_made_whole_and_exact(case):
    family, request = MISSES[case]
    check(miss(family), 3, num_samples=2, **request)


@pytest.mark.parametrize("breakage", ["overflow", "rest", "none"])
def test_a_broken_certificate_is_seen(breakage, monkeypatch):
    """The control of the tests around: candidates that pass for all there are give other sets."""
    from nologits import fused

    launch = fused.launch_choose

    def broken(drawn, gathered, *args):
        if breakage == "overflow":
            gathered = gathered._replace(counts=gathered.counts.clamp(max=gathered.entries.shape[1]))
        if breakage == "rest":
            gathered = gathered._replace(rest=torch.zeros_like(gathered.rest))
        launch(drawn, gathered, *args)

    monkeypatch.setattr(fused, "launch_choose", broken)
    logits, request = make_logits("gauss", 3, VOCAB, 0), {"top_p": 0.99}
    if breakage == "overflow":  # the last ids are the largest, and come when the room is full
        logits, request = torch.linspace(0, 1, VOCAB).expand(3, -1), {"top_k": 20}
        lowest = torch.zeros(3, device=DEVICE)
        monkeypatch.setattr(fused, "launch_thresholds", lambda *args: lowest)
    whole, got = made(lambda: draw(logits, "triton", num_samples=8, **request))
    want = draw(logits, "reference", num_samples=8, **request)
    if breakage == "none":
        assert whole == 3
        agree(got, want)
    else:
        assert whole == 0
        close = torch.isclose(got.logprobs, want.logprobs, atol=1e-4)
        assert not (torch.equal(got.tokens, want.tokens) and bool(close.all()))


def test_a_boundary_in_doubt_is_settled_exactly():
    """The share p is that of a prefix, to the last bit of fp64: nothing but the exact mass says what is kept."""
    from nologits.selection import fixed_mass

    logits = peaked(6)
    _, mass = fixed_mass(logits.sort(dim=-1, descending=True).values, 1.0)
    prefix = mass.cumsum(-1).double()
    at = torch.tensor([3, 4, 5, 6, 7, 8])
    share = prefix[torch.arange(6), at] / prefix[:, -1]
    check(logits, 6, top_p=share)
    check(logits, 6, top_p=torch.nextafter(share, torch.ones(6, dtype=torch.float64)))
    check(logits, 0, top_p=share * 0.9999)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
def test_the_mass_of_other_logits_is_within_its_doubt(temperature, monkeypatch):
    """As ``choose.py`` bounds it, and far under what would open many rows."""
    from nologits import fused
    from nologits.kernels import choose

    seen, launch = [], fused.launch_choose
    monkeypatch.setattr(fused, "launch_choose", lambda *args: seen.append(args[1]) or launch(*args))
    logits = torch.cat((peaked(3), make_logits("gauss", 3, VOCAB, 5)))
    draw(logits, "triton", top_p=0.9, temperature=temperature)
    rest, thresholds = seen[0].rest.sum(-1).cpu(), seen[0].thresholds.cpu().double()[:, None]
    below = logits.double() < thresholds
    true = (((logits.double() - thresholds) / torch.tensor(temperature).double()).exp() * below).sum(-1)
    octaves = (VOCAB / rest).clamp(min=1).log2()
    bound = (choose.REST_ERROR.value + choose.REST_ERROR_BY_OCTAVE.value * octaves) * choose.ULP.value
    assert bool(((rest - true).abs() <= bound * rest).all())
    assert bool((bound < 3e-6).all())
    assert bool((rest > 0).all())


@pytest.mark.parametrize("tile", [(128, 32, 16), (256, 16, 32), (512, 16, 16)])
def test_the_tile_changes_nothing(tile, monkeypatch):
    """Pilot, thresholds and candidates change with it."""
    from nologits import fused
    from nologits.kernels.config import TileConfig

    logits = torch.stack((peaked(9), make_logits("gauss", 9, VOCAB, 6)), dim=1).flatten(0, 1)
    want = draw(logits, "triton", logprobs="raw", top_p=0.9, top_k=400)
    monkeypatch.setattr(fused, "config_for", lambda source: TileConfig(*tile, 4, 2))
    got = draw(logits, "triton", top_p=0.9, top_k=400)
    agree(got, draw(logits, "reference", top_p=0.9, top_k=400))
    assert torch.equal(got.tokens, want.tokens)


@pytest.mark.parametrize("value", [-INF, -30.0, 0.0, 2.0, 1e30])
def test_no_threshold_decides_what_is_kept(value, monkeypatch):
    from nologits import fused

    rows = torch.full((6,), max(value, torch.finfo(torch.float32).min), device=DEVICE)
    monkeypatch.setattr(fused, "launch_thresholds", lambda *args: rows)
    check(torch.cat((peaked(3), make_logits("gauss", 3, VOCAB, 2))), top_p=0.9)
    check(torch.cat((peaked(3), make_logits("gauss", 3, VOCAB, 2))), top_k=40, min_p=0.02)


def test_open_rows_come_in_blocks(monkeypatch):
    """However few rows there is room for; open and certified ones in turn."""
    logits = torch.stack((peaked(5), make_logits("flat", 5, VOCAB, 0)), dim=1).flatten(0, 1)
    for rows in (1, 3, 64):
        monkeypatch.setattr(filtered, "SCRATCH_BYTES", rows * VOCAB * 20)
        check(logits, 5, top_p=0.9)


# ---- all of it together


@pytest.mark.parametrize("names", MODES, ids="+".join)
def test_mixed_rows_are_the_references(names):
    draw_, batch = random.Random(f"{names}"), 24
    makers = {
        "top_k": lambda: draw_.choice([0, 1, 2, 50, 255, 256, 257, 1_000, 5_000]),
        "top_p": lambda: draw_.choice([0.0, 1.0, 1e-8, 0.5, 0.9, 0.9999999, draw_.random()]),
        "min_p": lambda: draw_.choice([0.0, 1.0, 0.05, draw_.random() ** 4]),
        "temperature": lambda: draw_.choice([0.0, 0.1, 1.0, 4.0]),
    }
    request = row_numbers(**{name: [makers[name]() for _ in range(batch)] for name in (*names, "temperature")})
    logits = torch.stack([make_logits(name, -(-batch // len(MADE)), VOCAB, 1) for name in MADE], dim=1).flatten(0, 1)[:batch]
    whole = check(logits, **request)
    assert whole < batch


def test_invalid_rows_and_what_a_request_adds():
    generator = torch.Generator().manual_seed(1)
    logits = torch.cat((peaked(6), make_logits("gauss", 2, VOCAB, 2)))
    # A NaN of the weight would be every row's: these come with a bias.
    bias = torch.randn(8, VOCAB, generator=generator)
    bias[1, 70] = NAN
    bias[2] = -INF
    bias[3, [9, 1_500]] = INF
    mask = torch.full((8, 63), 0x55555555, dtype=torch.int32)
    mask[5] = 0
    mask[6] = torch.tensor([1, 0, 2] + [0] * 60, dtype=torch.int32)
    request = {
        **row_numbers(
            top_k=[20, 20, 20, 20, -7, 20, 20, 0], top_p=[0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.999], min_p=[0.0, 0.1] * 4
        ),
        "logit_bias": bias, "allowed_tokens": mask,
    }  # fmt: skip
    check(logits, num_samples=2, **request)
    tokens = draw(logits, "triton", **request).tokens.tolist()
    assert [token < 0 for token in tokens] == [False, True, True, False, True, True, False, False]
    sparse = (torch.tensor([[9, 1_500, -1, 9]] * 8).to(DEVICE), torch.tensor([[30.0, 30.0, 1.0, -1.0]] * 8).to(DEVICE))
    check(logits, logit_bias=sparse, top_k=5, top_p=0.7)


def test_impossible_filters_make_invalid_rows():
    request = row_numbers(top_p=[0.5, NAN, 1.5, -0.1], min_p=[NAN, 0.0, 0.0, 0.0], temperature=[1.0, 1.0, 1.0, NAN])
    assert (draw(peaked(4), "triton", **request).tokens == -1).all()


def test_a_row_does_not_see_its_batch():
    """Nor which of its neighbours are open, nor the order in which candidates arrive."""
    logits = torch.stack((peaked(9), make_logits("gauss", 9, VOCAB, 4)), dim=1).flatten(0, 1)
    seed, request = torch.arange(18), {"top_p": 0.95, "top_k": 300}
    every = draw(logits, "triton", seed=seed, **request)
    for row in (0, 1, 17):
        alone = draw(logits[row : row + 1], "triton", seed=seed[row : row + 1], **request)
        for a, b in zip(alone[:4], every[:4], strict=True):
            assert torch.equal(a[0], b[row])


def test_scratch_holds_anything_at_first(poisoned):
    check(torch.cat((peaked(2), make_logits("flat", 2, VOCAB, 0))), 2, top_p=0.9, num_samples=2)
