"""Draws from a vocabulary in groups: token for token, or in distribution, as from the whole; and what breaks that."""

import itertools
import random

import pytest
import torch

import nologits as nl
from nologits.noise import gumbel_noise
from nologits.testing import chi_squared, count_tokens, make_logits

INF, NAN = float("inf"), float("nan")
V, DRAWS = 24, 30_000


def pieces(vocab, count, seed=0):
    """``count`` ranges of ids that cover the vocabulary, in a random order."""
    draw = random.Random(seed)
    cuts = [0, *sorted(draw.sample(range(1, vocab), count - 1)), vocab]
    ranges = list(itertools.pairwise(cuts))
    draw.shuffle(ranges)
    return ranges


def feed(sampler, logits, ranges):
    for start, stop in ranges:
        sampler.update(logits[:, start:stop], start)
    return sampler.result()


@pytest.mark.parametrize("family", ["peaked", "flat", "ties", "masked"])
def test_pathwise_is_the_draw_from_the_whole(family):
    """With every transform, in any order of groups, the same token and the same log-probabilities."""
    batch, vocab = 5, 1_000
    logits = make_logits(family, batch, vocab)
    generator = torch.Generator().manual_seed(0)
    params = nl.SamplingParams(
        temperature=torch.tensor([1.0, 0.0, 0.5, 3.0, 1.0]), seed=torch.arange(batch), position=torch.arange(batch) + 7,
        logit_bias=torch.randn(vocab, generator=generator),
        allowed_tokens=torch.randint(-(2**31), 2**31, (batch, 32), generator=generator).int(),
    )  # fmt: skip
    want = nl.sample_logits(logits, params, logprobs=True, impl="torch")
    for count in (1, 2, 13):
        sampler = nl.OnlineSampler(batch, vocab, params, logprobs=True)
        got = feed(sampler, logits, pieces(vocab, count, count))
        assert torch.equal(got.tokens, want.tokens)
        for name in ("logprobs", "raw_logprobs", "log_mass"):
            torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=1e-6, atol=1e-6)


def test_ties_between_groups_go_to_the_smaller_id():
    logits = torch.zeros(1, 300)
    for order in ([(200, 300), (0, 100), (100, 200)], [(0, 100), (100, 200), (200, 300)]):
        for merge in ("pathwise", "group"):
            sampler = nl.OnlineSampler(1, 300, nl.SamplingParams(temperature=0), merge=merge)
            assert feed(sampler, logits, order).tokens.item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_head_in_pieces_draws_as_the_head(dtype):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(3, 64, generator=generator).to(dtype)
    weight = torch.randn(700, 64, generator=generator).to(dtype)
    bias = torch.randn(700, generator=generator)
    params = nl.SamplingParams(seed=torch.arange(3))
    want = nl.LMHead(weight, bias=bias, scale=0.5, softcap=20.0).sample(hidden, params, logprobs=True, impl="torch")
    sampler = nl.OnlineSampler(3, 700, params, logprobs=True)
    for start, stop in pieces(700, 5):
        sampler.update_head(hidden, weight[start:stop], start, bias=bias[start:stop], scale=0.5, softcap=20.0)
    got = sampler.result()
    assert torch.equal(got.tokens, want.tokens)
    torch.testing.assert_close(got.logprobs, want.logprobs, rtol=1e-5, atol=1e-5)


def row_and_shares():
    row = torch.randn(1, V, generator=torch.Generator().manual_seed(7))
    return row, row.softmax(-1)[0]


def params_of(temperature=1.0):
    return nl.SamplingParams(temperature=temperature, seed=torch.arange(DRAWS))


def fits(tokens, shares):
    return chi_squared(count_tokens(tokens, V), shares).p_value > 1e-4


@pytest.mark.parametrize("count", [2, 5, V])
def test_groups_have_the_distribution_of_the_whole(count):
    row, shares = row_and_shares()
    rows = row.expand(DRAWS, V)
    got = feed(nl.OnlineSampler(DRAWS, V, params_of(), merge="group", logprobs="processed"), rows, pieces(V, count))
    assert fits(got.tokens, shares)
    torch.testing.assert_close(got.logprobs, shares.log()[got.tokens], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.log_mass, row.logsumexp(-1).expand(DRAWS), rtol=1e-6, atol=1e-6)


def test_noise_of_local_ids_is_seen():
    """The control: shards that number their tokens from 0 share their noise, and the better shard wins every draw."""
    row, shares = row_and_shares()
    noise = gumbel_noise(torch.arange(DRAWS), torch.zeros(DRAWS, dtype=torch.int64), 0, V // 2)
    best = [(row[:, half * (V // 2) :][:, : V // 2] + noise).max(-1) for half in (0, 1)]
    tokens = torch.where(best[1].values > best[0].values, best[1].indices + V // 2, best[0].indices)
    assert not fits(tokens, shares)


def groups_of(row, ranges):
    """A draw from each group, as its owner would make it."""
    drawn = []
    for index, (start, stop) in enumerate(ranges):
        params = nl.SamplingParams(seed=torch.arange(DRAWS), position=torch.full((DRAWS,), index + 1))
        one = nl.sample_logits(row[:, start:stop].expand(DRAWS, -1), params, logprobs="processed")
        drawn.append(one._replace(tokens=one.tokens + start))
    return drawn


def merged(drawn, tree, steps):
    """``tree``: a group's index, or a pair of trees."""
    if isinstance(tree, int):
        return drawn[tree]
    left, right = (merged(drawn, part, steps) for part in tree)
    return nl.merge(left, right, seed=torch.arange(DRAWS), step=next(steps))


TREES = {"left to right": (((0, 1), 2), 3), "balanced": ((0, 1), (2, 3)), "other order": (3, ((2, 0), 1))}


@pytest.mark.parametrize("tree", TREES)
def test_merges_have_the_distribution_of_the_whole_in_any_order(tree):
    row, shares = row_and_shares()
    got = merged(groups_of(row, [(0, 3), (3, 20), (20, 21), (21, V)]), TREES[tree], iter(range(10)))
    assert fits(got.tokens, shares)
    torch.testing.assert_close(got.logprobs, shares.log()[got.tokens], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got.log_mass, row.logsumexp(-1).expand(DRAWS), rtol=1e-6, atol=1e-6)


def test_merges_without_masses_or_with_shared_noise_are_seen():
    """The controls: groups taken for equals, and one step for two merges of the same seed."""
    row, shares = row_and_shares()
    drawn = groups_of(row, [(0, 3), (3, 20), (20, 21), (21, V)])
    equal = [one._replace(log_mass=torch.zeros(DRAWS)) for one in drawn]
    assert not fits(merged(equal, TREES["balanced"], iter(range(10))).tokens, shares)
    assert not fits(merged(drawn, TREES["left to right"], iter([3] * 10)).tokens, shares)


def test_unseeded_draws_follow_torchs_generator():
    row, shares = row_and_shares()
    params = nl.SamplingParams()

    def draw(merge):
        return feed(nl.OnlineSampler(DRAWS, V, params, merge=merge), row.expand(DRAWS, V), pieces(V, 4)).tokens

    for merge in ("pathwise", "group"):
        torch.manual_seed(5)
        first = draw(merge)
        other = draw(merge)
        torch.manual_seed(5)
        assert torch.equal(first, draw(merge))
        assert not torch.equal(first, other)
        assert fits(first, shares)
    a, b = groups_of(row, [(0, 9), (9, V)])
    assert not torch.equal(nl.merge(a, b).tokens, nl.merge(a, b).tokens)
    assert fits(nl.merge(a, b).tokens, shares)


def test_rows_with_nothing_and_rows_that_are_broken():
    """A group may hold nothing for a row; a NaN anywhere spoils the row, and a row without any logit is invalid."""
    logits = torch.full((4, 6), -INF)
    logits[0, 4], logits[1, 1], logits[2, 0] = 1.0, NAN, INF
    for merge in ("pathwise", "group"):
        sampler = nl.OnlineSampler(4, 6, nl.SamplingParams(seed=torch.arange(4)), merge=merge, logprobs="processed")
        got = feed(sampler, logits, [(0, 3), (3, 6)])
        assert got.tokens.tolist() == [4, -1, 0, -1]
        assert got.logprobs.isnan().tolist() == [False, True, False, True]
    empty = nl.Samples(torch.tensor([-1, -1, 3]), log_mass=torch.tensor([-INF, -INF, NAN]))
    full = nl.Samples(torch.tensor([5, -1, 6]), log_mass=torch.tensor([2.0, -INF, 1.0]))
    for a, b in ((empty, full), (full, empty)):
        got = nl.merge(a, b, seed=1)
        assert got.tokens.tolist() == [5, -1, -1]
        assert got.log_mass[:2].tolist() == [2.0, -INF]
        assert got.log_mass[2].isnan()


def test_greedy_groups_merge_to_the_larger():
    a = nl.Samples(torch.tensor([3, 9]), torch.zeros(2), log_mass=torch.tensor([1.0, 2.0]))
    b = nl.Samples(torch.tensor([7, 4]), torch.zeros(2), log_mass=torch.tensor([1.5, 2.0]))
    got = nl.merge(a, b, temperature=0)
    assert got.tokens.tolist() == [7, 4]  # the second by its id
    assert got.log_mass.tolist() == [1.5, 2.0]
    assert got.logprobs.tolist() == [0.0, 0.0]


def test_the_state_does_not_grow():
    sampler = nl.OnlineSampler(2, 1 << 20, nl.SamplingParams(seed=1))
    for start in range(0, 1 << 20, 1 << 14):
        sampler.update(torch.zeros(2, 1 << 14), start)
    assert sampler._seen == [(0, 1 << 20)]
    held = [value for value in vars(sampler._draw).values() if isinstance(value, torch.Tensor)]
    assert sum(value.numel() for value in held) < 20


def raises(match):
    return pytest.raises(ValueError, match=match)


def test_bad_input_is_named_and_changes_nothing():
    with raises("batch must be a positive integer, got 0"):
        nl.OnlineSampler(0, 5)
    with raises('merge must be "pathwise" or "group", got \'best\''):
        nl.OnlineSampler(1, 5, merge="best")
    with raises("params must have no top_k, top_p or min_p"):
        nl.OnlineSampler(1, 5, nl.SamplingParams(top_k=2))
    with raises("logprobs must be False or .processed. with merge=.group., got True"):
        nl.OnlineSampler(1, 5, merge="group", logprobs=True)
    sampler = nl.OnlineSampler(2, 10, nl.SamplingParams(seed=1))
    sampler.update(torch.zeros(2, 4), 2)
    for wrong, first, match in (
        (torch.zeros(3, 2), None, r"logits must be floating \[2, W\], got torch.float32 \[3, 2\]"),
        (torch.zeros(2, 2, dtype=torch.int64), None, "got torch.int64"),
        (torch.zeros(2, 3), 0, "first_id must start ids that have not come, got 0 to 2: 2 to 5 have"),
        (torch.zeros(2, 3), 8, r"logits must be of 1 to 2 ids from 8 on \(V = 10\), got 3"),
        (torch.zeros(2, 3), -1, "first_id must be an integer >= 0, got -1"),
    ):
        with raises(match):
            sampler.update(wrong, first)
    assert sampler.missing == 6
    with pytest.raises(RuntimeError, match="6 of 10 ids have not come, the first 0"):
        sampler.result()
    assert 2 <= sampler.result(partial=True).tokens[0] <= 5
    sampler.update(torch.zeros(2, 2))  # the smallest that has not come
    sampler.update(torch.zeros(2, 4))
    assert sampler.result().tokens.shape == (2,)
    one = nl.Samples(torch.zeros(2, dtype=torch.int64), log_mass=torch.zeros(2))
    with raises("a must have a log_mass"):
        nl.merge(one._replace(log_mass=None), one)
    with raises("b must have as many rows as a, 2, got 1"):
        nl.merge(one, nl.Samples(*(None if part is None else part[:1] for part in one)))
    with raises("step must be an integer in"):
        nl.merge(one, one, step=-1)
