"""Filtered draws on a CPU from a row's best tokens: certificates are never wrong, and rows without one are drawn as well."""

import random

import pytest
import torch

import nologits as nl
from nologits import candidates, filtered, noise
from nologits.params import make_rows
from nologits.selection import count_sorted
from nologits.sources import LogitsSource
from nologits.testing import FAMILIES, make_logits

INF, NAN = float("inf"), float("nan")
MADE = [name for name in FAMILIES if name != "smollm2"]
MODES = [("top_k",), ("top_p",), ("min_p",), ("top_k", "top_p"), ("min_p", "top_k", "top_p")]


def mixed(count, vocab, seed=0):
    """Rows of all families in turn."""
    each = -(-count // len(MADE))
    return torch.stack([make_logits(name, each, vocab, seed) for name in MADE], dim=1).flatten(0, 1)[:count]


def request_of(names, draw, rows):
    """Random filters and temperatures, a number a row."""
    makers = {
        "top_k": lambda: draw.choice([0, 1, 2, 50, 255, 256, 257, 5_000]),
        "top_p": lambda: draw.choice([0.0, 1.0, 1e-8, 0.5, 0.9, 0.9999999, draw.random()]),
        "min_p": lambda: draw.choice([0.0, 1.0, 0.05, draw.random() ** 4]),
        "temperature": lambda: draw.choice([0.0, 0.1, 1.0, 4.0]),
    }
    dtypes = {"top_k": torch.int64, "top_p": torch.float64, "min_p": torch.float64, "temperature": torch.float32}
    return {name: torch.tensor([makers[name]() for _ in range(rows)], dtype=dtypes[name]) for name in (*names, "temperature")}


def certified(logits, request):
    """The rows that have a certificate, how many tokens it says each keeps, and how many the sort keeps."""
    rows = make_rows(nl.SamplingParams(**request), *logits.shape, logits.device, noise=False)
    width = min(logits.shape[1], candidates.width_for(rows))
    best = candidates.collect(LogitsSource(logits), rows, width, True, False)
    counts, certain = candidates.count_kept(best, rows, logits.shape[1])
    return certain, counts, count_sorted(logits, rows)[1]


@pytest.mark.parametrize("vocab", [100, 3_000, 20_000])
@pytest.mark.parametrize("names", MODES, ids="+".join)
def test_a_certificate_is_never_wrong(names, vocab):
    draw, seen = random.Random(f"{names} {vocab}"), 0
    for seed in range(3):
        logits, request = mixed(90, vocab, seed), request_of(names, draw, 90)
        certain, counts, want = certified(logits, request)
        greedy = request["temperature"] == 0  # whatever else its set has, its first token is drawn
        assert torch.equal(counts[certain & ~greedy], want[certain & ~greedy])
        seen += int(certain.sum())
    assert seen > 60


@pytest.mark.parametrize(
    ("name", "request_"),
    [
        ("flat", {"top_p": 0.9}),  # a nucleus of most of V
        ("flat", {"min_p": 0.01}),  # min-p keeps them all
        ("ties", {"top_p": 0.5}),
        ("gauss", {"top_k": 5_000}),
        ("gauss", {"top_p": torch.tensor([1.0] * 4)}),  # no filter cuts these rows
    ],
    ids=str,
)
def test_rows_that_reach_beyond_the_candidates_have_none(name, request_):
    certain, *_ = certified(make_logits(name, 4, 20_000), request_)
    assert not certain.any()


def test_a_wrong_certificate_is_seen(monkeypatch):
    """The control: masses that are off by a thousandth give sets that the comparison above rejects."""
    whole = candidates.RunningMass.update

    def off(self, logits):
        whole(self, logits)
        self.total = self.total * 1.0005

    monkeypatch.setattr(candidates.RunningMass, "update", off)
    request = {"top_p": torch.linspace(0.5, 0.95, 90, dtype=torch.float64)}
    certain, counts, want = certified(make_logits("peaked", 90, 20_000), request)
    assert not torch.equal(counts[certain], want[certain])


@pytest.mark.parametrize("logprobs", [False, "processed", True])
@pytest.mark.parametrize("names", MODES, ids="+".join)
def test_draws_are_the_reference_s(names, logprobs):
    """Rows with a certificate and without, greedy and invalid ones, several draws a row."""
    logits, request = mixed(45, 3_000), request_of(names, random.Random(str(names)), 45)
    logits[7, 5], logits[8], request["temperature"][9] = NAN, -INF, -1.0
    asked = {"seed": torch.arange(45), "position": 3, "logprobs": logprobs, "num_samples": 2, **request}
    got, want = (nl.sample_logits(logits, impl=name, **asked) for name in ("torch", "reference"))
    assert torch.equal(got.tokens, want.tokens)
    for a, b in zip(got[1:4], want[1:4], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-5, equal_nan=True)


def test_hidden_states_and_what_a_request_adds():
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(5, 32, generator=generator), torch.randn(2_000, 32, generator=generator)
    request = {
        "top_k": 20, "top_p": 0.9, "temperature": 0.8, "seed": torch.arange(5),
        "logit_bias": torch.randn(5, 2_000, generator=generator),
        "allowed_tokens": torch.full((5, 63), 0x55555555, dtype=torch.int32),
    }  # fmt: skip
    got, want = (nl.sample(hidden, weight, logprobs=True, impl=name, **request) for name in ("torch", "reference"))
    assert torch.equal(got.tokens, want.tokens)
    for a, b in zip(got[1:4], want[1:4], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


def test_rows_with_a_certificate_are_not_made_whole(monkeypatch):
    taken = []
    monkeypatch.setattr(filtered, "sample", lambda source, *rest: taken.append(source.batch))
    nl.sample_logits(make_logits("peaked", 64, 20_000), top_k=50, top_p=0.95, seed=1, impl="torch")
    assert not taken


def test_only_rows_without_one_are_made_whole(monkeypatch):
    taken, whole = [], filtered.sample
    monkeypatch.setattr(filtered, "sample", lambda source, *rest: taken.append(source.batch) or whole(source, *rest))
    logits = make_logits("gauss", 9, 20_000)
    top_k = torch.tensor([50, 0, 0, 50, 50, 0, 50, 50, 5_000])
    out = nl.sample_logits(logits, top_k=top_k, seed=torch.arange(9), impl="torch")
    assert taken == [2, 1, 1]
    assert torch.equal(out.tokens, nl.sample_logits(logits, top_k=top_k, seed=torch.arange(9), impl="reference").tokens)


def test_the_noise_of_any_ids_is_the_noise_of_their_range():
    seed, position = torch.tensor([3, -5]), torch.tensor([2**40, 7])
    ids = torch.stack([torch.randperm(5_000)[:300], torch.randperm(5_000)[:300]])
    for sample in (0, 3):
        every = noise.gumbel_noise(seed, position, 0, 5_000, sample)
        assert torch.equal(noise.gumbel_at(seed, position, ids, sample), every.gather(1, ids))


@pytest.mark.parametrize("names", MODES, ids="+".join)
def test_kept_sets_come_from_the_best_tokens(names, monkeypatch):
    """Sets, sorted, with their log-probabilities, are the reference's; whole rows are made for no others than the uncertain."""
    logits, request = mixed(60, 5_000), request_of(names, random.Random(f"sets {names}"), 60)
    certain, _, _ = certified(logits, request)
    made, whole = [], filtered.select
    monkeypatch.setattr(filtered, "select", lambda source, *rest: made.append(source.batch) or whole(source, *rest))
    got = nl.select(logits, **request, impl="torch")
    assert sum(made) == int((~certain | (request["temperature"] == 0)).sum())
    want = nl.select(logits, **request, impl="reference")
    assert torch.equal(got.counts, want.counts)
    assert torch.equal(got.ids, want.ids)
    assert torch.equal(got.logits, want.logits)
    torch.testing.assert_close(got.logprobs, want.logprobs, rtol=1e-5, atol=1e-5)
