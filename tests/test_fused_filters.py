"""Filters under the matmul: the reference's tokens and kept masses, the same bits in every launch, no row left to the host.

Inputs are exact: sums of products of small fractions, or rows of logits fed through an identity. So a boundary lies where the
reference has it, and log-probabilities, exact to fp32's last bits, tell if one token too many or too few is kept.
"""

import functools
import itertools
import math
import random
import time
from fractions import Fraction

import pytest
import torch

import nologits as nl
from nologits.dispatch import hopper_obstacle
from nologits.kernels.config import HOPPER_CONFIGS, HOPPER_SHARED, HOPPER_TURNS_64
from nologits.params import make_rows
from nologits.reference import scores
from nologits.selection import count_sorted
from nologits.sources import transform
from nologits.testing import FAMILIES, chi_squared, compare_tokens, count_tokens, kept_sets, make_logits

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(hopper_obstacle(DEVICE)), reason=hopper_obstacle(DEVICE) or "-")]

INF, NAN = float("inf"), float("nan")
MADE = [name for name in FAMILIES if name != "smollm2"]
PLANTED = 64
MODES = (
    (), ("top_k",), ("top_p",), ("min_p",), ("top_k", "top_p"), ("top_k", "min_p"), ("min_p", "top_p"),
    ("min_p", "top_k", "top_p"),
)  # fmt: skip
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
ROOM = 4_096
"""Candidates of a row that the kernels have room for: a vocabulary of so many is gathered whole."""


@pytest.fixture(autouse=True)
def only_fused(monkeypatch):
    """Fails where rows of logits would be made, or the portable kernels would draw."""
    from nologits import fused, hopper

    def refuse(*args, **kwargs):
        raise AssertionError("another path than the fused one ran")

    monkeypatch.setattr(hopper, "_sample_filtered", refuse)
    monkeypatch.setattr(fused, "sample", refuse)


@pytest.fixture
def force(monkeypatch):
    """``force(config)``: every draw is launched that way; ``force(None)``: as it ships."""
    from nologits import hopper

    shipped = hopper.config_for
    return lambda config: monkeypatch.setattr(hopper, "config_for", (lambda source: config) if config else shipped)


def sample(hidden, head, params, logprobs="processed"):
    return head.sample(hidden, params, logprobs=logprobs, impl="hopper")


def open_rows():
    from nologits.kernels import categorical_sm90

    return int(categorical_sm90.open_rows(DEVICE))


def opened(call):
    """How many rows of a call had no certificate, and what it returned."""
    before = open_rows()
    out = call()
    return open_rows() - before, out


def bits(samples):
    return [part.view(torch.int64 if part.dtype == torch.int64 else torch.int32) for part in samples if part is not None]


def part_of(params, rows):
    """The parameters of some rows; all but scalars are tensors."""
    return nl.SamplingParams(
        **{n: value[rows] if isinstance(value, torch.Tensor) else value for n, value in vars(params).items()}
    )


def keys(batch, start=0):
    slots = torch.arange(batch, device=DEVICE)
    return {"seed": slots * 2**40 + start, "position": slots + 2**33}


# ---- rows whose logits are known


def plant(logits):
    """A head and hidden states with these logits, which bf16 has to hold: row j's lie in column j of the weight."""
    count, vocab = logits.shape
    weight = torch.zeros(vocab, -(-count // 8) * 8, dtype=torch.bfloat16, device=DEVICE)
    weight[:, :count] = logits.T
    assert torch.equal(weight[:, :count].float(), logits.T.to(DEVICE))
    return nl.LMHead(weight), torch.eye(weight.shape[1], dtype=torch.bfloat16, device=DEVICE)[:count]


@functools.cache
def families(vocab):
    """Planted rows of all families in turn: their head, hidden states and logits."""
    made = [make_logits(name, -(-PLANTED // len(MADE)), vocab, 0, DEVICE).bfloat16() for name in MADE]
    # 0 times an infinity is NaN, in every other row: what is masked becomes a number without mass instead.
    logits = torch.stack(made, dim=1).flatten(0, 1)[:PLANTED].clamp(min=-3e38).float()
    return (*plant(logits), logits)


def members(family):
    """The planted rows of a family."""
    return torch.arange(MADE.index(family), PLANTED, len(MADE), device=DEVICE)


def family_rows(draw, vocab, batch):
    head, hidden, logits = families(vocab)
    rows = torch.tensor([draw.randrange(PLANTED) for _ in range(batch)], device=DEVICE)
    return hidden[rows], head, logits[rows]


@functools.cache
def exact_weight(vocab, dtype, coarse):
    generator = torch.Generator(DEVICE).manual_seed(vocab)
    limit, unit, depth = (5, 8, 64) if coarse else (256, 256, 512)
    return (torch.randint(1 - limit, limit, (vocab, depth), generator=generator, device=DEVICE) / unit).to(dtype)


def exact_rows(draw, vocab, batch, dtype=torch.bfloat16, coarse=False):
    """Flat to peaked rows through a matmul of fractions whose sums fit in 21 bits; ``coarse``: with a few hundred values."""
    weight, generator = exact_weight(vocab, dtype, coarse), torch.Generator().manual_seed(draw.randrange(2**31))
    hidden = torch.randint(-15, 16, (batch, weight.shape[1]), generator=generator) / 64
    hidden = (hidden * 2.0 ** torch.randint(-4, 2, (batch, 1), generator=generator)).to(DEVICE, dtype)
    return hidden, nl.LMHead(weight), (hidden.double() @ weight.double().T).float()


def random_params(draw, vocab, batch):
    """What every row asks for, in tensors of either width; some rows have no filter, some are greedy."""
    makers = {
        "top_k": lambda: draw.choice([0, -1, 1, 2, 20, 50, 400, draw.randrange(vocab) + 1, vocab - 1, vocab, vocab + 7]),
        "top_p": lambda: draw.choice([0.0, 1e-8, 0.5, 0.9, 0.95, 0.9999999, draw.random(), 1 - draw.random() ** 4]),
        "min_p": lambda: draw.choice([1.0, 0.05, 1e-9, draw.random(), draw.random() ** 4]),
    }
    columns = {name: [] for name in (*OFF, "temperature")}
    for _ in range(batch):
        wanted = draw.choice(MODES)
        for name, off in OFF.items():
            columns[name].append(makers[name]() if name in wanted else off)
        some = (1.0, 1.0, 0.7, 0.0, draw.randrange(41, 410) / 4096, draw.randrange(1, 81) / 16)
        columns["temperature"].append(draw.choice(some))
    share, count = draw.choice([(torch.float64, torch.int64), (torch.float32, torch.int32)])
    dtypes = {"top_k": count, "top_p": share, "min_p": share, "temperature": torch.float32}
    tensors = {name: torch.tensor(column, dtype=dtypes[name], device=DEVICE) for name, column in columns.items()}
    return nl.SamplingParams(**tensors, **keys(batch, draw.randrange(2**31)))


def request_tensors(requests):
    """One request a row, as tensors."""
    dtypes = {"top_k": torch.int64, "top_p": torch.float64, "min_p": torch.float64, "temperature": torch.float32}
    neutral = {**OFF, "temperature": 1.0}
    return {
        name: torch.tensor([request.get(name, neutral[name]) for request in requests], dtype=dtype, device=DEVICE)
        for name, dtype in dtypes.items()
    }


# ---- the comparison


def has_filter(params, batch, vocab):
    """bool ``[B]``: the rows with a filter that may drop a token."""
    neutral = {**OFF, "temperature": 1.0}
    given = {name: off if getattr(params, name) is None else getattr(params, name) for name, off in neutral.items()}
    k, p, min_p, temperature = (torch.as_tensor(value, device=DEVICE) for value in given.values())
    return ((temperature > 0) & (((k > 0) & (k < vocab)) | (p < 1) | (min_p > 0))).expand(batch)


def check(got, logits, params, mode="processed", generator=None):
    """Numbers and tokens of the reference, but where two scores are a rounding apart: returns how many tokens are others.

    ``generator``: what torch's was seeded with before the draw, if it took its noise from there.
    """
    batch, vocab = logits.shape

    def seeded():
        if generator is not None:
            torch.manual_seed(generator)

    seeded()
    want = nl.sample_logits(logits, params, logprobs=mode, impl="reference")
    differ = got.tokens != want.tokens
    if differ.any():  # the kernels' logarithms are approximate
        seeded()
        rows = make_rows(params, batch, vocab, DEVICE)
        transformed = transform(logits, rows, 0, vocab)
        order, counts = count_sorted(transformed, rows)
        keep = torch.zeros_like(logits, dtype=torch.bool)
        keep.scatter_(1, order, torch.arange(vocab, device=DEVICE) < counts[:, None])
        score = scores(transformed.masked_fill(~keep, -INF), rows, 0, 0)
        best, other = (score.gather(1, tokens.clamp(min=0)[:, None]).squeeze(1) for tokens in (want.tokens, got.tokens))
        size = torch.maximum(best.abs(), torch.as_tensor(rows.temperature32, device=DEVICE))
        explained = ((best - other).abs() <= 1e-5 * size) & (got.tokens >= 0) & (want.tokens >= 0)
        wrong = (differ & ~explained).nonzero().flatten().tolist()
        assert not wrong, [(row, got.tokens[row].item(), want.tokens[row].item(), part_of(params, row)) for row in wrong[:3]]
    filtered = has_filter(params, batch, vocab)
    # Mass that filters keep is counted, in whole units; other masses are sums of approximate exponentials in fp32.
    # A sum of raw masses relative to a token that is less likely than exp(-88) leaves fp32.
    likely = True if want.raw_logprobs is None else ~(want.raw_logprobs < -80)
    comparisons = (
        (got.logprobs, want.logprobs, ~differ & filtered, 3e-7, 2e-6),
        (got.logprobs, want.logprobs, ~differ & ~filtered, 1e-6, 3e-5),
        (got.log_mass, want.log_mass, torch.ones_like(differ), 1e-6, 3e-5),
        (got.raw_logprobs, want.raw_logprobs, ~differ & likely, 1e-6, 3e-5),
    )
    for a, b, compared, rtol, atol in comparisons:
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a[compared], b[compared], rtol=rtol, atol=atol, equal_nan=True)
    return int(differ.sum())


# ---- the reference's draws

TURNS = {1: 120, 3: 120, 64: 24, 70: 24, 128: 16, 200: 10, 300: 8}
SOURCES = (family_rows, exact_rows, functools.partial(exact_rows, coarse=True))


@pytest.mark.parametrize("logprobs", [False, "processed"], ids=["plain", "logprobs"])
@pytest.mark.parametrize("batches", [(1, 3, 64), (70, 128), (200,), (300,)], ids=str)
def test_tokens_are_the_references(batches, logprobs):
    """Of 20,000 rows, filtered and not, in all four launches."""
    draw, others = random.Random(f"{batches} {logprobs}"), 0
    for batch in batches:
        for turn in range(TURNS[batch]):
            source, vocab = SOURCES[turn % 3], (1_000, 4_096, 4_099, 20_000)[turn % 4]
            hidden, head, logits = source(draw, vocab, batch)
            params = random_params(draw, vocab, batch)
            others += check(sample(hidden, head, params, logprobs), logits, params, logprobs)
    assert others <= 2


@pytest.mark.parametrize("batch", [3, 64])
def test_tokens_at_the_size_of_a_real_head(batch):
    draw, vocab = random.Random(batch), 151_936
    others = 0
    for source in SOURCES[:2]:
        hidden, head, logits = source(draw, vocab, batch)
        params = random_params(draw, vocab, batch)
        others += check(sample(hidden, head, params), logits, params)
    assert others <= 1


SCALARS = (
    {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.95}, {"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0},
    {"top_k": 400, "top_p": 0.99, "min_p": 0.001}, {"top_k": 19_999}, {"top_k": 9_000, "top_p": 0.5}, {"top_p": 1e-12},
)  # fmt: skip


def test_filters_may_be_numbers():
    """One kernel where there is a top-p, another where there is none; all log-probabilities."""
    draw, others = random.Random(5), 0
    for request, source in itertools.product(SCALARS, SOURCES[:2]):
        hidden, head, logits = source(draw, 20_000, 64)
        seed = torch.arange(64, device=DEVICE).view(torch.uint64)
        params = nl.SamplingParams(**request, temperature=draw.choice([0.6, 1.0]), seed=seed)
        others += check(sample(hidden, head, params, True), logits, params, True)
    assert others <= 2


def test_a_request_has_the_same_bits_however_it_is_given():
    """Numbers, tensors of either width, and tensors whose entries lie apart or are one and the same."""
    hidden, head, _ = family_rows(random.Random(1), 20_000, 64)
    values = {"top_k": (50, torch.int64, torch.int32), "top_p": (0.75, torch.float64, torch.float32)}
    values |= {"min_p": (0.0078125, torch.float64, torch.float32), "temperature": (0.75, torch.float32, torch.float32)}
    given = [{name: value for name, (value, *_) in values.items()}]
    for which in (1, 2):
        tensors = {name: torch.full((64,), row[0], dtype=row[which], device=DEVICE) for name, row in values.items()}
        given += [tensors, {n: tensor[:1].expand(64) for n, tensor in tensors.items()}]
        apart = {name: torch.stack([tensor, tensor - 9], 1).flatten()[::2] for name, tensor in tensors.items()}
        given += [apart]
    every = [bits(sample(hidden, head, nl.SamplingParams(**request, **keys(64)))) for request in given]
    for got in every[1:]:
        assert all(torch.equal(a, b) for a, b in zip(got, every[0], strict=True))


CHANGED = (
    ("gauss", {"top_k": 50}, {"top_k": 51}),
    ("gauss", {"top_k": 50, "top_p": 0.95}, {"top_k": 50, "top_p": 0.96}),
    ("gauss", {"min_p": 0.05}, {"min_p": 0.03}),
    ("gauss", {"top_p": 0.3}, {"top_p": 0.31}),
    ("flat", {"top_p": 0.9}, {"top_p": 0.9 + 1e-4}),
    ("flat", {"top_k": 9_000}, {"top_k": 9_001}),
    ("gauss", {"top_k": 50}, {"top_k": 50, "temperature": 1.0001}),
)


def test_a_neighbouring_request_is_seen():
    """The control of the tests above: one token more of 9,000, two more of 18,000, a little warmth."""
    head, hidden, logits = families(20_000)
    for family, asked, drawn in CHANGED:
        rows = members(family)
        right, wrong = (nl.SamplingParams(**request_tensors([x] * len(rows)), **keys(len(rows))) for x in (asked, drawn))
        assert not check(sample(hidden[rows], head, right), logits[rows], right)
        other = sample(hidden[rows], head, wrong)
        with pytest.raises(AssertionError):
            check(other, logits[rows], right)


# ---- rows without a certificate


def open_cases(vocab):
    """Logits and requests that no ``ROOM`` candidates can settle: more is kept than that, or there are more copies."""
    generator = torch.Generator().manual_seed(4)
    made = {name: make_logits(name, 1, vocab, 1)[0].bfloat16().float() for name in ("flat", "gauss", "ties")}
    made["equal"] = torch.zeros(vocab)
    made["two levels"] = torch.where(torch.rand(vocab, generator=generator) < 0.2, 1.5, -20.0)
    requests = (
        ("flat", {"top_p": 0.9}), ("flat", {"top_p": 0.5}), ("flat", {"top_p": 0.9999}), ("flat", {"top_k": 20_000}),
        ("flat", {"top_k": 20_000, "top_p": 0.9}), ("flat", {"min_p": 1e-9}), ("flat", {"min_p": 0.5, "top_p": 0.6}),
        ("flat", {"min_p": 1e-9, "top_k": 30_000, "top_p": 0.7}), ("equal", {"top_p": 0.5}), ("equal", {"top_k": 20_000}),
        ("equal", {"top_k": 7}), ("equal", {"min_p": 1.0}), ("equal", {"top_k": 20_000, "top_p": 0.3}),
        ("equal", {"top_p": 0.0}), ("equal", {"min_p": 1.0, "top_k": 5_000}), ("ties", {"top_p": 0.9}),
        ("ties", {"top_k": 20_000}), ("ties", {"min_p": 1e-9}), ("ties", {"top_k": 20_000, "top_p": 0.8}),
        ("gauss", {"top_p": 0.99, "temperature": 3.0}), ("gauss", {"top_k": 40_000, "top_p": 0.9, "temperature": 3.0}),
        ("gauss", {"top_k": 20_000}), ("two levels", {"top_p": 0.5}), ("two levels", {"top_k": 6_000}),
    )  # fmt: skip
    return torch.stack([made[name] for name, _ in requests]), [request for _, request in requests]


@pytest.mark.parametrize("logprobs", [False, "processed"], ids=["plain", "logprobs"])
def test_rows_without_a_certificate_are_settled(logprobs):
    """All of a batch, at three seeds; and each after the other, so that a call settles one row alone."""
    logits, requests = open_cases(50_000)
    (head, hidden), logits, request = plant(logits), logits.to(DEVICE), request_tensors(requests)
    others = 0
    for start in range(3):
        params = nl.SamplingParams(**request, **keys(len(requests), start))
        grown, got = opened(lambda p=params: sample(hidden, head, p, logprobs))
        assert grown == len(requests)
        others += check(got, logits, params, logprobs)
    for row in range(len(requests)):
        alone = slice(row, row + 1)
        one = sample(hidden[alone], head, part_of(params, alone), logprobs)
        assert all(torch.equal(a, b[alone]) for a, b in zip(bits(one), bits(got), strict=True)), requests[row]
    assert others <= 1


def test_flat_rows_of_many_values_are_settled():
    """A few copies of each: boundaries are found in a list, not among ids."""
    draw, requests = (
        random.Random(2),
        [{"top_p": 0.9}, {"top_k": 20_000}, {"top_k": 20_000, "top_p": 0.5}, {"min_p": 1e-9}] * 16,
    )
    hidden, head, _ = exact_rows(draw, 50_000, 64)
    hidden = (hidden.float().sign() / 64).bfloat16()  # all of them flat
    logits = (hidden.double() @ head.spec.weight.double().T).float()
    params = nl.SamplingParams(**request_tensors(requests), **keys(64))
    grown, got = opened(lambda: sample(hidden, head, params))
    assert grown == 64
    assert check(got, logits, params) <= 1


CERTIFIED = (
    ("gauss", {"top_k": 50}),
    ("gauss", {"top_k": 50, "top_p": 0.95}),
    ("gauss", {"min_p": 0.1}),
    ("peaked", {"top_p": 0.9}),
    ("peaked", {"top_k": 20, "top_p": 0.95, "min_p": 0.01}),
)


def test_usual_requests_have_a_certificate():
    """The control of the counts above, too."""
    head, hidden, logits = families(50_000)
    for family, asked in CERTIFIED:
        rows = members(family).repeat(5)
        params = nl.SamplingParams(**request_tensors([asked] * len(rows)), **keys(len(rows)))
        # A block that is suspended while it waits for the pilot gives up. Others may use the GPU: one call in three has to do.
        calls = [opened(lambda rows=rows, p=params: sample(hidden[rows], head, p)) for _ in range(3)]
        assert min(grown for grown, _ in calls) == 0, (family, asked)
        assert not any(check(got, logits[rows], params) for _, got in calls)


# ---- boundaries in exact doubt

UNITS = 2**40


def kept_of_equals(size, p):
    """How many of ``size`` equal logits are the shortest prefix that reaches p, in the contract's arithmetic."""
    target = p * float(size * UNITS)
    return max(1, math.ceil(Fraction(target) / UNITS))


def test_equal_logits_are_cut_where_p_says():
    """Of n equal logits, alone in having mass, p = m / n and its neighbours keep m or m + 1: of a few, and of too many."""
    vocab, sizes, generator = (
        20_000,
        (2, 3, 7, 10, 100, 1_000, 1_024, 1_025, 4_000, 4_097, 10_000),
        torch.Generator().manual_seed(1),
    )
    logits = (torch.randn(len(sizes), vocab, generator=generator) * 2 - 60).bfloat16().float()
    cases = []
    for row, size in enumerate(sizes):
        logits[row, torch.randperm(vocab, generator=generator)[:size]] = 1.5
        for part in sorted({1, size // 3, size // 2, size - 1} - {0}):
            near = part / size
            cases += [(row, p, kept_of_equals(size, p)) for p in (math.nextafter(near, 0), near, math.nextafter(near, 1))]
    rows, p, kept = (list(column) for column in zip(*cases, strict=True))
    head, hidden = plant(logits)
    params = nl.SamplingParams(top_p=torch.tensor(p, dtype=torch.float64, device=DEVICE), **keys(len(rows)))
    grown, got = opened(lambda: sample(hidden[rows], head, params))
    assert grown == len(rows)
    assert not check(got, logits.to(DEVICE)[rows], params)
    assert (-got.logprobs.double()).exp().round().tolist() == kept


def clear_levels(temperature):
    """Multiples of 1/8 from 0 down whose mass is far from half a unit: the same whole number in any fair arithmetic."""
    levels = [-step / 8 for step in range(121)]
    return [level for level in levels if abs(math.exp(level / temperature) * UNITS % 1 - 0.5) > 0.1]


def doubtful_row(draw, vocab, temperature):
    """Logits of a dozen levels, and requests whose p is as nearly as may be the share of a prefix in all, or in the k largest.

    Requests come with the mass that they keep, in units, from whole numbers.
    """
    levels = clear_levels(temperature)
    values = sorted([0.0, *draw.sample(levels[1:], 11)], reverse=True)
    tokens = [value for value in values for _ in range(draw.choice([1, 2, 7, 40, 150]))]
    logits = torch.full((vocab,), -100.0)
    logits[torch.tensor(draw.sample(range(vocab), len(tokens)))] = torch.tensor(tokens)
    prefix = [0, *itertools.accumulate(round(math.exp(value / temperature) * UNITS) for value in tokens)]
    requests = []
    for _ in range(4):
        at = draw.randrange(1, len(tokens))
        for k in (0, draw.randrange(at + 1, len(tokens) + 1)):
            whole = prefix[k or len(tokens)]
            near = prefix[at] / whole
            for p in (
                math.nextafter(near, 0),
                near,
                math.nextafter(near, 1),
                (prefix[at] - 1) / whole,
                (prefix[at] + 1) / whole,
            ):
                count = sum(before < p * float(whole) for before in prefix[: k or len(tokens)])
                requests.append(({"top_k": k, "top_p": min(p, 1.0), "temperature": temperature}, prefix[max(count, 1)]))
    return logits, requests


@pytest.mark.parametrize("vocab", [4_000, 20_000])
def test_sums_that_just_reach_p_are_cut_where_it_says(vocab):
    """With all of the row gathered, and with a certificate that has to admit its doubt."""
    draw, rows, requests, kept, planted = random.Random(vocab), [], [], [], []
    for row, temperature in enumerate((0.5, 1.0, 2.0) * 4):
        logits, asked = doubtful_row(draw, vocab, temperature)
        planted.append(logits)
        for request, mass in asked:
            rows.append(row)
            requests.append(request)
            kept.append(mass)
    logits = torch.stack(planted)
    (head, hidden), logits = plant(logits), logits.to(DEVICE)[rows]
    params = nl.SamplingParams(**request_tensors(requests), **keys(len(rows)))
    grown, got = opened(lambda: sample(hidden[rows], head, params))
    assert (grown > 0) == (vocab > ROOM)
    assert check(got, logits, params) <= 1
    drawn = logits.gather(1, got.tokens[:, None]).squeeze(1).double()  # the peak is 0
    want = drawn / params.temperature - (torch.tensor(kept, dtype=torch.float64, device=DEVICE) / UNITS).log()
    torch.testing.assert_close(got.logprobs.double(), want, rtol=3e-7, atol=2e-6)


# ---- the same bits

VARIED = (  # spread of the logits, and what is asked; the last five have no certificate
    (5.0, {"top_k": 50, "top_p": 0.95, "temperature": 0.8}),
    (5.0, {"top_k": 50}),
    (5.0, {"top_p": 0.9}),
    (5.0, {"min_p": 0.1}),
    (5.0, {"top_k": 400, "top_p": 0.99, "min_p": 0.01}),
    (5.0, {"top_k": 50, "top_p": 0.9, "temperature": 0.0}),
    (5.0, {}),
    (0.1, {"top_p": 0.9}),
    (0.1, {"top_k": 9_000}),
    (0.1, {"top_k": 9_000, "top_p": 0.7, "temperature": 0.5}),
    (0.1, {"min_p": 1e-9}),
    (0.0, {"top_p": 0.3}),
)


@functools.cache
def varied():
    """Two rows of each kind, under a head of no particular numbers: hidden states, weight, parameters."""
    generator = torch.Generator(DEVICE).manual_seed(3)
    weight = (torch.randn(20_000, 512, generator=generator, device=DEVICE) / 512**0.5).bfloat16()
    spreads = torch.tensor([spread for spread, _ in VARIED * 2], device=DEVICE)
    hidden = (torch.randn(len(spreads), 512, generator=generator, device=DEVICE) * spreads[:, None]).bfloat16()
    return hidden, weight, nl.SamplingParams(**request_tensors([request for _, request in VARIED * 2]), **keys(len(spreads)))


def alone(hidden, head, params, logprobs):
    """The bits of every row drawn by itself, as it ships."""
    slots = [slice(row, row + 1) for row in range(len(hidden))]
    every = [bits(sample(hidden[slot], head, part_of(params, slot), logprobs)) for slot in slots]
    return [torch.cat(parts) for parts in zip(*every, strict=True)]


@pytest.mark.parametrize("config", HOPPER_CONFIGS, ids=str)
def test_a_row_has_the_same_bits_in_every_batch_slot_launch_and_run(config, force):
    hidden, weight, params = varied()
    head, count = nl.LMHead(weight), len(hidden)
    want = alone(hidden, head, params, True)
    force(config)
    grown, _ = opened(
        lambda: sample(hidden.repeat(11, 1)[:256], head, part_of(params, torch.arange(256, device=DEVICE) % count), True)
    )
    assert 0 < grown < 256
    for batch in (1, 3, 64, 65, 128, 130, 256, 257):
        if not config.fits(batch):
            continue
        slots = torch.arange(batch, device=DEVICE)
        one = 0 * slots + batch % count
        for rows in ((7 * slots + batch) % count, (7 * slots + batch) % count, one):  # all kinds, twice; one in all slots
            got = bits(sample(hidden[rows], head, part_of(params, rows), True))
            assert all(torch.equal(a, b[rows]) for a, b in zip(got, want, strict=True)), (config, batch)


@pytest.mark.parametrize("softcap", [None, 20.0])
def test_transforms_round_alike_in_every_kernel(softcap, force):
    """Where a product and a sum meet, a compiler may round once: then kernels would disagree about a row's logits."""
    hidden, weight, params = varied()
    generator = torch.Generator(DEVICE).manual_seed(9)
    bias = torch.randn(20_000, generator=generator, device=DEVICE).bfloat16()
    head = nl.LMHead(weight, bias=bias, scale=0.3, softcap=softcap)
    dense = torch.randn(len(hidden), 20_000, generator=generator, device=DEVICE) * 0.1
    params = nl.SamplingParams(**vars(params) | {"logit_bias": dense})
    want = alone(hidden, head, params, "processed")
    for config in (HOPPER_TURNS_64, HOPPER_SHARED):
        force(config)
        got = bits(sample(hidden, head, params, "processed"))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), config
    force(None)
    assert torch.equal(sample(hidden, head, params, False).tokens, want[0])


def test_a_threshold_decides_nothing(monkeypatch):
    """On fewer multiprocessors the pilot is another, down to two logits of one tile; and so are thresholds, but no result."""
    from nologits.kernels import categorical_sm90

    hidden, weight, params = varied()
    head = nl.LMHead(weight)
    want, numbers = alone(hidden, head, params, "processed"), set()
    for processors in (1, 2, 7, 16, 40, 100):
        monkeypatch.setattr(categorical_sm90, "multiprocessors", lambda device, count=processors: count)
        grown, got = opened(lambda: sample(hidden, head, params))
        numbers.add(grown)
        assert all(torch.equal(a, b) for a, b in zip(bits(got), want, strict=True)), processors
    assert len(numbers) > 1  # the change reaches the kernels


def test_neighbours_change_nothing():
    """Rows beside flat ones, which are settled late, beside equal logits, beside NaN, and beside peaks."""
    hidden, weight, params = varied()
    head, count = nl.LMHead(weight), len(hidden)
    want = alone(hidden, head, params, True)
    generator = torch.Generator(DEVICE).manual_seed(1)
    noise = torch.randn(64, 512, generator=generator, device=DEVICE)
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(1))[:count].to(DEVICE)
    for filling, request in itertools.product(
        (noise * 0.1, noise * 0.0, noise * NAN, noise * 30), ({"top_p": 0.9}, {"top_k": 50})
    ):
        block, asked = filling.bfloat16(), request_tensors([request] * 64) | keys(64, 7)
        block[slots] = hidden
        for name, values in asked.items():
            values[slots] = getattr(params, name)
        got = bits(sample(block, head, nl.SamplingParams(**asked), True))
        assert all(torch.equal(a[slots], b) for a, b in zip(got, want, strict=True)), request


# ---- what the head and the request do to logits


def bitmask(allowed):
    """bool ``[B, V]``, V a multiple of 32, as the words of ``allowed_tokens``."""
    words = (allowed.view(len(allowed), -1, 32).long() << torch.arange(32, device=DEVICE)).sum(-1)
    return (words - (words >= 2**31) * 2**32).to(torch.int32)


def with_feature(feature):
    """A head with it, hidden states, the head's exact logits, and what else is asked: of 64 rows."""
    vocab, generator = 20_000, torch.Generator(DEVICE).manual_seed(6)
    dtype = torch.float16 if feature == "fp16" else torch.bfloat16
    hidden, head, logits = exact_rows(random.Random(6), vocab, 64, dtype)
    weight = head.spec.weight

    def fractions(*shape):
        return torch.randint(-64, 65, shape, generator=generator, device=DEVICE) / 32

    if feature == "mask":
        share = torch.tensor([0.01, 0.5, 0.001], device=DEVICE).repeat(22)[:64, None]
        allowed = torch.rand(64, vocab, generator=generator, device=DEVICE) < share
        allowed[:3] = False
        allowed[0, 777] = allowed[1, vocab - 1] = True  # and in row 2 nothing is
        return head, hidden, logits, {"allowed_tokens": bitmask(allowed)}
    if feature == "dense bias":
        dense = fractions(64, vocab)
        return head, hidden, logits, {"logit_bias": dense.masked_fill(dense > 1.5, -INF)}
    if feature == "shared bias":
        return head, hidden, logits, {"logit_bias": fractions(vocab).bfloat16()}
    if feature == "sparse bias":
        ids = torch.randint(-1, vocab, (64, 40), generator=generator, device=DEVICE)
        ids[:, ::5] = ids[:, :1]  # repeated ids add up
        return head, hidden, logits, {"logit_bias": (ids, fractions(64, 40))}
    if feature == "head bias":
        bias = fractions(vocab).bfloat16()
        return nl.LMHead(weight, bias=bias), hidden, logits + bias.float(), {}
    if feature == "scale":
        return nl.LMHead(weight, scale=0.25), hidden, logits * 0.25, {}
    if feature == "vocab_size":
        padded = weight.clone()
        padded[19_001:] = NAN  # what does not exist cannot harm
        return nl.LMHead(padded, vocab_size=19_001), hidden, logits[:, :19_001], {}
    return head, hidden, logits, {}


def rows_with(request, extra):
    """One request for 64 rows at several temperatures, every seventh of them greedy."""
    temperature = torch.tensor([1.0, 0.6, 2.0, 1.0, 0.3, 1.0, 0.0] * 10, device=DEVICE)[:64]
    return nl.SamplingParams(**request, **extra, temperature=temperature, **keys(64))


REQUESTS = ({"top_k": 50, "top_p": 0.95}, {"top_p": 0.9})


@pytest.mark.parametrize(
    "feature", ["mask", "dense bias", "shared bias", "sparse bias", "head bias", "scale", "vocab_size", "fp16"]
)
def test_every_transform_is_filtered_as_the_reference_does(feature):
    head, hidden, logits, extra = with_feature(feature)
    mode = "processed" if "logit_bias" in extra else True
    for request in REQUESTS:
        params = rows_with(request, extra)
        got = sample(hidden, head, params, mode)
        assert check(got, logits, params, mode) <= 1
        if feature == "mask":
            assert got.tokens[:3].tolist() == [777, 19_999, -1]


def test_a_soft_cap_is_filtered_as_the_reference_does():
    """Its tanh is approximate: tokens within the rounding, and kept sets that are the same in most rows."""
    hidden, head, _ = exact_rows(random.Random(8), 20_000, 64)
    head = nl.LMHead(head.spec.weight, scale=2.0, softcap=20.0)
    for request in REQUESTS:
        params = rows_with(request, {})
        got, want = sample(hidden, head, params), head.sample(hidden, params, logprobs="processed", impl="reference")
        assert compare_tokens(got.tokens, hidden, head, params).mismatches <= 1
        same = got.tokens == want.tokens
        assert ((got.logprobs - want.logprobs).abs() < 1e-4)[same].sum() >= 58
        torch.testing.assert_close(got.log_mass, want.log_mass, rtol=1e-5, atol=1e-4)


# ---- rows without a token

BROKEN = (  # parameter, values that it cannot have
    ("top_k", (-2, -(2**31))),
    ("top_p", (1.5, -0.5, NAN, INF)),
    ("min_p", (1.5, -0.5, NAN)),
    ("temperature", (NAN, -1.0, INF)),
)
USUAL = ({"top_k": 50, "top_p": 0.9}, {"top_p": 0.9}, {"min_p": 0.05}, {}, {"temperature": 0.0})


def test_invalid_rows_have_no_token_and_disturb_none():
    """Impossible parameters, a NaN anywhere, nothing allowed; between rows that are settled in every way."""
    hidden, weight, params = varied()
    vocab, good = len(weight), len(hidden)
    requests = [{**usual, name: value} for name, values in BROKEN for value in values for usual in USUAL]
    places = [(place, usual) for place in (0, vocab // 2, vocab - 1, "hidden", "masked") for usual in USUAL]
    bad = len(requests) + len(places)
    asked, seeds = request_tensors(requests + [usual for _, usual in places]), keys(bad, 5)
    states, bias = hidden[:1].repeat(bad, 1), torch.zeros(bad, vocab, device=DEVICE)
    for row, (place, _) in enumerate(places, len(requests)):
        if place == "hidden":
            states[row, 17] = NAN
        elif place == "masked":
            bias[row] = -INF
        else:
            bias[row, place] = NAN
    # Each good row between bad ones
    order = torch.randperm(good + bad, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    mixed = {name: torch.cat([getattr(params, name), values])[order] for name, values in (asked | seeds).items()}
    none = torch.zeros(good, vocab, device=DEVICE)
    head, where = nl.LMHead(weight), order.argsort()
    want = bits(sample(hidden, head, nl.SamplingParams(**vars(params) | {"logit_bias": none})))
    block, extra = torch.cat([hidden, states])[order], torch.cat([none, bias])[order]
    got = sample(block, head, nl.SamplingParams(**mixed, logit_bias=extra))
    assert all(torch.equal(a[where[:good]], b) for a, b in zip(bits(got), want, strict=True))
    assert got.tokens[where[good:]].tolist() == [-1] * bad
    assert all(part[where[good:]].isnan().all() for part in (got.logprobs, got.log_mass))


# ---- statistics


@pytest.mark.parametrize("request_", [{"top_k": 8}, {"top_p": 0.3}], ids=str)
def test_draws_have_the_renormalised_distribution(request_):
    """Of what is kept, and not, which is the control, of the whole row."""
    logits, draws = make_logits("gauss", 1, 5_000, 3, DEVICE).bfloat16().float(), 200_000
    head, hidden = plant(logits)
    seed = torch.arange(draws, device=DEVICE)
    tokens = sample(hidden.expand(draws, -1), head, nl.SamplingParams(**request_, seed=seed), False).tokens
    kept, clear = kept_sets(logits, **request_)
    assert clear.all()
    counts, shares = count_tokens(tokens, 5_000), logits.double().softmax(-1)
    assert chi_squared(counts, (shares * kept)[0]).p_value > 1e-4
    assert chi_squared(counts, shares[0]).p_value < 1e-6


# ---- claims


def test_nothing_synchronises_and_a_replay_follows_its_inputs():
    """From rows with a certificate to rows without, and back."""
    head, states, logits = families(20_000)
    rows = members("gauss").repeat(4)[:24]
    hidden, request = states[rows].clone(), request_tensors([{"top_k": 50, "top_p": 0.95}] * 24) | keys(24)
    params = nl.SamplingParams(**request)

    def call():
        return sample(hidden, head, params, True)

    for _ in range(2):
        call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        out = call()
    turns = (
        ("gauss", {"top_k": 50}),
        ("flat", {"top_p": 0.9}),
        ("ties", {"top_k": 9_000, "top_p": 0.9}),
        ("peaked", {"min_p": 0.1}),
    )
    for family, asked in turns * 2:
        rows = members(family).repeat(4)[:24]
        hidden.copy_(states[rows])
        for name, values in request_tensors([asked] * 24).items():
            request[name].copy_(values)
        request["seed"] += 24
        grown, _ = opened(graph.replay)
        assert grown == 24 or family not in ("flat", "ties")
        assert all(torch.equal(a, b) for a, b in zip(bits(out), bits(call()), strict=True)), family
        assert check(out, logits[rows], params, True) <= 1


def test_a_compiled_draw_is_the_eager_one():
    hidden, weight, params = varied()
    given = (params.top_k, params.top_p, params.min_p, params.temperature, params.seed)

    def step(x, k, p, min_p, temperature, seed):
        drawn = nl.sample(
            x * 2, weight, top_k=k, top_p=p, min_p=min_p, temperature=temperature, seed=seed, logprobs=True, impl="hopper"
        )
        return drawn.tokens, drawn.logprobs, drawn.raw_logprobs, drawn.log_mass

    got, want = torch.compile(step, fullgraph=True)(hidden, *given), step(hidden, *given)
    assert all(torch.equal(a, b) for a, b in zip(bits(got), bits(want), strict=True))


def test_extra_memory_is_a_fraction_of_the_logits():
    batch, vocab = 64, 151_936
    generator = torch.Generator(DEVICE).manual_seed(0)
    weight = torch.randn(vocab, 256, generator=generator, device=DEVICE).bfloat16()
    hidden = torch.randn(batch, 256, generator=generator, device=DEVICE).bfloat16()
    head, seed = nl.LMHead(weight), torch.arange(batch, device=DEVICE).view(torch.uint64)
    params = nl.SamplingParams(top_k=50, top_p=0.95, seed=seed)
    torch.cuda.empty_cache()  # a block that another test left is given whole, and counted whole, if it is up to 1 MiB too large
    sample(hidden, head, params, True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    sample(hidden, head, params, True)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 0.1 * batch * vocab * 4


def test_more_rows_than_one_launch_takes_are_drawn_alike():
    from nologits.hopper import FILTERED_ROWS

    batch, draw = 2 * FILTERED_ROWS + 64, random.Random(3)
    hidden, head, logits = family_rows(draw, 10_000, batch)
    params = random_params(draw, 10_000, batch)
    got = sample(hidden, head, params)
    assert check(got, logits, params) <= 2
    edges = [slice(row, row + 1) for row in (FILTERED_ROWS - 1, FILTERED_ROWS, 2 * FILTERED_ROWS, batch - 1)]
    for some in (*edges, slice(0, 64), slice(FILTERED_ROWS - 32, FILTERED_ROWS + 32), slice(batch - 64, batch)):
        apart = bits(sample(hidden[some], head, part_of(params, some)))
        assert all(torch.equal(a, b[some]) for a, b in zip(apart, bits(got), strict=True)), some


@pytest.mark.parametrize("seeds", ["none", "some"])
def test_unseeded_rows_draw_from_torchs_generator(seeds):
    """Also where they are more than one launch takes."""
    draw = random.Random(4)
    for batch in (64, 576):
        hidden, head, logits = family_rows(draw, 10_000, batch)
        seed = torch.arange(batch, device=DEVICE) % 3 - 1 if seeds == "some" else None
        values = vars(random_params(draw, 10_000, batch)) | {"seed": seed, "position": None}
        params = nl.SamplingParams(**values)

        def tokens(given=(hidden, head, params)):
            return sample(*given)

        torch.manual_seed(11)
        first, second = tokens(), tokens()
        torch.manual_seed(11)
        assert all(torch.equal(a, b) for a, b in zip(bits(tokens()), bits(first), strict=True))
        assert check(first, logits, params, generator=11) <= 1
        fresh = (first.tokens != second.tokens) & ((seed == -1) if seeds == "some" else True)
        assert fresh.sum() > 0.05 * batch
        assert torch.equal(first.tokens != second.tokens, fresh)


def test_two_streams_settle_their_rows_at_once():
    """Blocks that wait for each other must not wait for room that another stream's have taken."""
    logits, requests = open_cases(50_000)
    (head, hidden), drawn = plant(logits), [[], []]
    calls = [(hidden, head, nl.SamplingParams(**request_tensors(requests), **keys(len(hidden), start))) for start in (0, 9)]
    want = [bits(sample(*call)) for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    events = []
    for _ in range(20):
        for which, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                drawn[which].append(bits(sample(*calls[which])))
                events.append(torch.cuda.Event())
                events[-1].record()
    deadline = time.monotonic() + 20
    while not all(event.query() for event in events):
        assert time.monotonic() < deadline, "two draws wait for each other"
        time.sleep(0.001)
    for got, exact in zip(drawn, want, strict=True):
        assert all(torch.equal(a, b) for once in got for a, b in zip(once, exact, strict=True))


@pytest.mark.parametrize("filters", [{}, {"top_k": 30}, {"top_p": 0.9}, {"min_p": 0.02}, {"top_k": 200, "top_p": 0.8}], ids=str)
def test_the_likeliest_tokens_come_along(filters, monkeypatch):
    """From the draw's own pass: of unfiltered and filtered rows, also of ties there is no room for."""
    from nologits import ops

    for vocab, families in (
        (20_000, ["peaked", "gauss", "flat", "ties", "zipf", "outlier", "bf16", "gauss"]),
        (151_936, ["gauss"] * 8),
    ):
        rows = [make_logits(family, 1, vocab, seed) for seed, family in enumerate(families)]
        logits = torch.cat(rows).clamp(-200, 200).bfloat16().float().to(DEVICE)
        head, hidden = nl.LMHead(logits.T.contiguous().bfloat16()), torch.eye(8, dtype=torch.bfloat16, device=DEVICE)
        temperature = torch.tensor([1.0, 0.5, 1.0, 1.0, 2.0, 1.0, 0.7, 3.0], device=DEVICE)
        params = nl.SamplingParams(temperature=temperature, seed=torch.arange(8, device=DEVICE), **filters)
        for count in (1, 20, 128):
            with monkeypatch.context() as patched:
                patched.setattr(ops, "run_top", lambda *args: pytest.fail("another pass looked for them"))
                got = head.sample(hidden, params, logprobs=True, top_logprobs=count, impl="hopper")
            want = nl.sample_logits(logits, params, logprobs=True, top_logprobs=count, impl="reference")
            assert torch.equal(got.tokens, want.tokens)
            for mine, theirs in ((got.top, want.top), (got.raw_top, want.raw_top)):
                assert torch.equal(mine.ids, theirs.ids)
                torch.testing.assert_close(mine.logprobs, theirs.logprobs, rtol=1e-5, atol=1e-5, equal_nan=True)
