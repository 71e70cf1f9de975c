"""Kept sets: exact, independent of batch and slot, the same from every function and implementation.

The oracle sorts in fp64 and is written from the contract alone. A draw shows its set through the log-probability of what it
drew: log p_i minus the log of the kept mass.
"""

import math
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nologits as nl

INF = math.inf


def oracle(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """``(ids in order, log-probabilities)`` of one row's kept set; logits any dtype ``[V]``."""
    values, ids = torch.sort(logits.detach().cpu().double(), descending=True, stable=True)
    # A temperature is an fp32 number, as given or as a scalar acts.
    scale = float(torch.tensor(temperature, dtype=torch.float32))
    mass = ((values - values[0]) / scale).exp() if scale > 0 else (values == values[0]).double()
    count = int(((values > -INF) & (mass >= min_p)).sum())
    if top_k > 0:
        count = min(count, top_k)
    if top_p < 1:
        before = torch.cat([mass.new_zeros(1), mass[:count].cumsum(0)[:-1]])
        count = max(1, int((before < top_p * float(mass[:count].sum())).sum()))
    logprobs = (values[:count] - values[0]) / scale if scale > 0 else mass[:count].log()
    return ids[:count].tolist(), logprobs - mass[:count].sum().log()


def on(device, logits, dtype=torch.float32):
    """Made on the CPU, so that a GPU's own logarithm cannot move a boundary."""
    return torch.as_tensor(logits, dtype=torch.float64).to(dtype).to(device)


def as_head(logits):
    """A head of D = 16 and hidden states with logits ``logits [B, V]``: row b of the batch picks column b of the weight."""
    batch = len(logits)
    assert batch <= 16
    weight = logits.new_zeros(logits.shape[1], 16)
    weight[:, :batch] = logits.T
    return torch.eye(batch, 16, dtype=logits.dtype, device=logits.device), weight


def kept(logits, **filters):
    out = nl.filter_logits(logits, **filters)
    inside = out > -INF
    assert torch.equal(out[inside], logits[inside])
    return [row.nonzero().flatten().tolist() for row in inside]


def row_of(filters, row):
    return {name: value[row].item() if isinstance(value, torch.Tensor) else value for name, value in filters.items()}


def check_sets(logits, impl, draws=1, **filters):
    """filter_logits, select and draws from logits agree with the oracle, row by row."""
    got = kept(logits, **filters)
    chosen = nl.select(logits, impl=impl, **filters)
    drawn = nl.sample_logits(logits, seed=5, num_samples=draws, logprobs="processed", impl=impl, **filters)
    tokens, logprobs = (part.reshape(len(logits), -1).cpu() for part in drawn[:2])
    for row in range(len(logits)):
        ids, shares = oracle(logits[row], **row_of(filters, row))
        assert got[row] == sorted(ids)
        count = int(chosen.counts[row])
        assert chosen.ids[row, :count].tolist() == ids
        assert (chosen.ids[row, count:] == -1).all()
        assert torch.equal(chosen.logits[row, :count], logits[row, ids].float())
        torch.testing.assert_close(chosen.logprobs[row, :count].cpu().double(), shares, rtol=1e-6, atol=1e-6)
        at = [ids.index(token) for token in tokens[row].tolist()]
        want = torch.zeros(draws).double() if row_of(filters, row).get("temperature") == 0 else shares[at]
        # An unfiltered kernel has its logits in fp32 scores only: a unit in their last place, over T.
        peak = float(logits[row, ids].abs().max())
        slack = 2e-6 + 2.0**-22 * peak / (row_of(filters, row).get("temperature") or 1.0)
        torch.testing.assert_close(logprobs[row].double(), want, rtol=1e-6, atol=slack)


@pytest.mark.parametrize(
    ("shares", "p", "ids"),
    [
        ([0.3, 0.1, 0.1, 0.5], 0.8, [0, 3]),
        ([0.5, 0.25, 0.125, 0.125], 0.75, [0, 1]),
        ([0.5, 0.25, 0.125, 0.125], 0.7499, [0, 1]),
        ([0.5, 0.25, 0.125, 0.125], 0.7501, [0, 1, 2]),
        ([0.5, 0.25, 0.125, 0.125], 0.875, [0, 1, 2]),
        ([0.5, 0.3, 0.15, 0.05], 0.6, [0, 1]),
    ],
)
def test_f1_f4_boundaries_of_small_rows(device, impl, shares, p, ids):
    logits = on(device, [[math.log(share) for share in shares]])
    assert kept(logits, top_p=p) == [ids]
    chosen = nl.select(logits, top_p=p, impl=impl)
    assert sorted(chosen.ids[0, : chosen.counts[0]].tolist()) == ids
    drawn = nl.sample_logits(logits, top_p=p, seed=1, num_samples=40, logprobs=True, impl=impl)
    assert sorted(set(drawn.tokens[0].tolist())) == ids
    share = sum(shares[i] for i in ids)
    want = [math.log(shares[i] / share) for i in drawn.tokens[0].tolist()]
    torch.testing.assert_close(drawn.logprobs[0].cpu(), torch.tensor(want), rtol=0, atol=1e-5)


def test_a_p_is_taken_literally(device):
    """0.8 in fp32 is 0.800000012, above what 0.5 + 0.3 reach; in fp64 it is not."""
    logits = on(device, [[0.0, 0.0, 0.0, 0.0, 0.0]])
    assert kept(logits, top_p=0.8) == [[0, 1, 2, 3]]
    assert kept(logits, top_p=torch.tensor([0.8], dtype=torch.float64, device=device)) == [[0, 1, 2, 3]]
    assert kept(logits, top_p=torch.tensor([0.8], device=device)) == [[0, 1, 2, 3, 4]]


def test_f2_a_p_just_below_one_keeps_all(device, impl):
    for vocab in (12, 19, 23, 31, 33):
        logits = torch.zeros(1, vocab, device=device)
        check_sets(logits, impl, top_p=0.9999999)
        assert kept(logits, top_p=0.9999999) == [list(range(vocab))]


@pytest.mark.parametrize(("p", "count"), [(0.5, 34_032), (0.9, 94_536), (0.99, 126_167)])
def test_f3_counts_of_a_geometric_row(device, impl, p, count):
    logits = on(device, -torch.arange(131_072, dtype=torch.float64) * math.log(10) / 131_072)[None]
    assert kept(logits, top_p=p) == [list(range(count))]
    assert nl.select(logits, top_p=p, impl=impl).counts.tolist() == [count]


@pytest.mark.parametrize(("p", "count"), [(0.5, 0.2596), (0.9, 0.7213), (0.99, 0.9626)])
def test_f3_draws_of_a_geometric_row(device, impl, size, p, count):
    vocab = size(1_000, 131_072)
    logits = on(device, -torch.arange(vocab, dtype=torch.float64) * math.log(10) / vocab)[None]
    assert abs(len(kept(logits, top_p=p)[0]) - count * vocab) <= 2 + vocab // 10_000
    check_sets(logits, impl, top_p=p)


def test_f4_ties_at_the_boundary(device, impl):
    logits = torch.zeros(1, 64, device=device)
    logits[0, 0] = 1
    assert kept(logits, top_p=0.5) == [list(range(32))]
    check_sets(logits, impl, top_p=0.5)


def half_the_mass(vocab):
    """F5: one id holds as much as the others together."""
    logits = 0.5 * torch.randn(vocab, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    logits[7] = logits[torch.arange(vocab) != 7].logsumexp(0)
    return logits


def test_f5_a_flat_tail_under_a_peak(device, impl, size):
    vocab = size(1_000, 131_072)
    logits = on(device, half_the_mass(vocab))[None]
    check_sets(logits, impl, top_p=0.9)
    count = len(kept(logits, top_p=0.9)[0])
    assert 0.61 < count / vocab < 0.66  # a production kernel keeps 0.533 of them


def test_f6_a_cold_row_keeps_one(device, impl, size):
    vocab = size(1_000, 16_384)
    logits = 3 * torch.randn(1, vocab, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for row, temperature in ((on(device, logits / 0.05), 1.0), (on(device, logits), 0.05)):
        assert kept(row, top_p=0.9, temperature=temperature) == [[int(logits.argmax())]]
        check_sets(row, impl, top_p=0.9, temperature=temperature)


def test_f7_junk_values_do_not_move_the_set(device, impl):
    logits = on(device, torch.randn(1, 600, generator=torch.Generator().manual_seed(7), dtype=torch.float64))
    logits[0, 3] = -1000
    junk = logits.clone()
    junk[0, 3] = -INF
    assert kept(logits, top_p=0.9) == kept(junk, top_p=0.9)
    check_sets(logits, impl, top_p=0.9)
    logits[0, 3] = torch.finfo(torch.float32).min
    assert len(kept(logits, top_k=50)[0]) == 50
    check_sets(logits, impl, top_k=50)
    logits[0, 60:] = -1e9
    assert len(kept(logits, top_k=50)[0]) == 50
    check_sets(logits, impl, top_k=50)
    logits[0, 40:] = -1e9
    assert kept(logits, top_k=50) == [sorted([i for i in range(40) if i != 3] + list(range(40, 51)))]


def test_f8_an_outlier_does_not_widen_top_k(device, impl):
    logits = on(device, torch.randn(1, 900, generator=torch.Generator().manual_seed(8), dtype=torch.float64))
    logits[0, 123] = 1e9
    assert len(kept(logits, top_k=50)[0]) == 50
    check_sets(logits, impl, top_k=50)


def test_f9_ties_stay_with_the_lowest_ids(device, impl, size):
    logits = on(device, [[3, 2, 2, 2, 2, 1, -1, -1]])
    assert kept(logits, top_k=2, top_p=0.99) == [[0, 1]]
    check_sets(logits, impl, top_k=2, top_p=0.99, draws=20)
    vocab = size(1_000, 131_072)
    row = on(device, 2.5 * torch.randn(1, vocab, generator=torch.Generator().manual_seed(9)).double(), torch.bfloat16)
    assert len(kept(row, top_k=50)[0]) == 50
    check_sets(row, impl, top_k=50)


@pytest.mark.parametrize(("filters", "count"), [({"top_p": 0.5}, 2_048), ({"top_k": 5}, 5)])
def test_f10_a_flat_row(device, impl, size, filters, count):
    vocab = size(512, 4_096)
    count = count * vocab // 4_096 if "top_p" in filters else count
    logits = torch.zeros(1, vocab, device=device)
    assert kept(logits, **filters) == [list(range(count))]
    check_sets(logits, impl, **filters)


@pytest.mark.parametrize("batch", [1, 8, 64, 65, 256])
def test_f11_the_batch_does_not_move_the_set(device, size, batch):
    vocab = 131_072 if device.type == "cuda" else 4_096  # fewer bytes, the same row blocks in ratio
    row = on(device, half_the_mass(vocab))[None]
    want = nl.filter_logits(row, top_p=0.9)
    got = nl.filter_logits(row.expand(batch, -1), top_p=0.9)
    assert torch.equal(got, want.expand(batch, -1))
    counts = nl.select(row.expand(batch, -1), top_p=0.9).counts
    assert torch.equal(counts, (want > -INF).sum().expand(batch))


def test_f11_row_blocks_do_not_move_the_set(device, impl, monkeypatch):
    """However few rows fit in the scratch at once."""
    from nologits import filtered

    logits = on(device, 3 * torch.randn(9, 300, generator=torch.Generator().manual_seed(3)).double())
    filters = {"top_k": torch.arange(9, device=device) * 7, "top_p": 0.9}
    whole = nl.filter_logits(logits, **filters), nl.sample_logits(logits, seed=3, logprobs=True, impl=impl, **filters)
    monkeypatch.setattr(filtered, "SCRATCH_BYTES", 300 * 56 * 2)
    assert len(list(filtered.row_blocks(9, 300, 56))) == 5
    parts = nl.filter_logits(logits, **filters), nl.sample_logits(logits, seed=3, logprobs=True, impl=impl, **filters)
    assert torch.equal(whole[0], parts[0])
    for one, other in zip(whole[1][:4], parts[1][:4], strict=True):
        assert torch.equal(one, other)


def test_unseeded_rows_of_different_blocks_draw_apart(device, impl, monkeypatch):
    from nologits import filtered

    logits = torch.zeros(24, 300, device=device)
    torch.manual_seed(1)
    whole = nl.sample_logits(logits, top_p=0.9, impl=impl).tokens
    monkeypatch.setattr(filtered, "SCRATCH_BYTES", 300 * 56 * 2)
    torch.manual_seed(1)
    assert torch.equal(nl.sample_logits(logits, top_p=0.9, impl=impl).tokens, whole)
    assert len(set(whole.tolist())) > 18


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0, 0.0, 1e-8])
def test_f12_a_tiny_p_is_the_argmax(device, impl, size, p, dtype):
    vocab = size(500, 4_096)
    logits = on(device, torch.randn(3, vocab, generator=torch.Generator().manual_seed(12)).double(), dtype)
    want = [[oracle(row, top_k=1)[0][0]] for row in logits]
    assert kept(logits, top_p=p) == want
    assert nl.sample_logits(logits, top_p=p, seed=3, impl=impl).tokens.tolist() == [ids[0] for ids in want]


def test_f13_draws_are_uniform_over_ties(device, impl):
    from nologits.testing import chi_squared, count_tokens

    logits = torch.zeros(64, 1_000, device=device)
    draws = nl.sample_logits(logits, top_k=64, seed=torch.arange(64, device=device), num_samples=10, impl=impl).tokens
    counts = count_tokens(draws, 1_000)
    shares = torch.zeros(1_000)
    shares[:64] = 1 / 64
    assert chi_squared(counts, shares).p_value > 1e-4
    # The same draws do not fit 62 of the 64, nor a set without its last two ids.
    shares[62:64] = 0
    assert chi_squared(counts, shares).p_value < 1e-4


@pytest.mark.parametrize("k", [1, 10])
def test_f13_copies_of_the_maximum(device, impl, k):
    logits = on(device, torch.randn(1, 600, generator=torch.Generator().manual_seed(13)).double(), torch.bfloat16)
    copies = torch.randperm(600, generator=torch.Generator().manual_seed(14))[:50].sort().values
    logits[0, copies.to(device)] = logits.amax() + 1
    assert kept(logits, top_k=k) == [copies[:k].tolist()]
    check_sets(logits, impl, top_k=k, draws=10)
    greedy = nl.sample_logits(logits, temperature=0.0, impl=impl).tokens.tolist()
    assert greedy == [int(copies[0])]
    if k == 1:
        assert nl.sample_logits(logits, top_k=1, seed=3, impl=impl).tokens.tolist() == greedy


def test_filters_run_in_the_contracts_order(device, impl):
    """min-p, then top-k, then top-p on what is left: here every other order keeps something else."""
    logits = on(device, [[math.log(s) for s in (0.4, 0.2, 0.15, 0.1, 0.1, 0.05)]])
    # min-p 0.3 leaves .4 .2 .15; top-k 3 all of them; 0.78 of 0.75 needs two of them (0.6 >= 0.585).
    assert kept(logits, min_p=0.3, top_k=3, top_p=0.78) == [[0, 1]]
    # Top-p first would need five of six at 0.86; after top-k 4 (mass 0.85) three reach 0.731.
    assert kept(logits, top_k=4, top_p=0.86) == [[0, 1, 2]]
    check_sets(logits, impl, min_p=0.3, top_k=3, top_p=0.78)
    check_sets(logits, impl, top_k=4, top_p=0.86)


def test_min_p_is_relative_to_the_largest_share(device, impl):
    logits = on(device, [[0.0, -math.log(2), -math.log(4), -INF]])
    for p, count in ((0.2499, 3), (0.2501, 2), (0.4999, 2), (0.5001, 1), (1.0, 1), (0.0, 3)):
        assert nl.select(logits, min_p=p, impl=impl).counts.tolist() == [count], p
    # min-p sees the temperature: at T = 2 a share of 1/4 becomes 1/2.
    assert nl.select(logits, min_p=0.4, temperature=2.0, impl=impl).counts.tolist() == [3]
    assert kept(logits, min_p=0.4, temperature=2.0) == [[0, 1, 2]]


@pytest.mark.parametrize(
    "off", [{}, {"top_k": None}, {"top_k": 0}, {"top_k": -1}, {"top_k": 80}, {"top_p": 1.0}, {"min_p": 0.0}]
)
def test_off_values_change_nothing(device, impl, off):
    logits = on(device, torch.randn(3, 80, generator=torch.Generator().manual_seed(1)).double())
    plain = nl.sample_logits(logits, seed=9, logprobs=True, impl=impl)
    for values in (off, {name: torch.tensor([v] * 3, device=device) for name, v in off.items() if v is not None}):
        assert torch.equal(nl.filter_logits(logits, **values), logits)
        same = nl.sample_logits(logits, seed=9, logprobs=True, impl=impl, **values)
        assert torch.equal(same.tokens, plain.tokens)
        torch.testing.assert_close(same.logprobs, plain.logprobs, rtol=0, atol=1e-5)


def test_filtered_and_unfiltered_draws_share_their_noise(device, impl):
    """The filter that keeps an unfiltered draw's token draws it too."""
    logits = on(device, 2 * torch.randn(16, 400, generator=torch.Generator().manual_seed(1)).double())
    seed = torch.arange(16, device=device)
    plain = nl.sample_logits(logits, seed=seed, impl=impl).tokens
    drawn = nl.sample_logits(logits, seed=seed, top_k=100, impl=impl).tokens
    stays = nl.filter_logits(logits, top_k=100).gather(1, plain[:, None]).squeeze(1) > -INF
    assert 4 < stays.sum() < 16
    assert torch.equal(drawn[stays], plain[stays])
    assert (drawn[~stays] != plain[~stays]).all()


FAMILIES = ("gauss", "peaked", "flat", "ties", "bf16", "masked", "outlier", "cold")


def family(name, rows, vocab, seed):
    """Logits ``[rows, V]`` and a temperature, of one kind that has broken a sampler."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, vocab, generator=generator)
    if name == "peaked":
        logits[:, vocab // 3] += 12
    elif name == "flat":
        logits *= 0.01
    elif name == "ties":
        logits = logits.round()
    elif name == "bf16":
        logits = logits.bfloat16()
    elif name == "masked":
        logits[:, torch.randperm(vocab, generator=generator)[: vocab * 9 // 10]] = -INF
    elif name == "outlier":
        logits[:, vocab // 2] = 1e9
    return logits, 0.05 if name == "cold" else 1.0


def filters_of(seed, rows, device):
    """Random k, p and min-p: every row its own, or one for all."""
    draw = random.Random(seed)
    makers = {
        "top_k": lambda: draw.choice([0, -1, 1, 2, draw.randrange(3, 60), draw.randrange(60, 400)]),
        "top_p": lambda: draw.choice([1.0, 0.0, draw.random(), 1 - draw.random() ** 4]),
        "min_p": lambda: draw.choice([0.0, 1.0, draw.random() ** 4]),
    }
    dtypes = {"top_k": torch.int32, "top_p": torch.float64, "min_p": torch.float64}
    filters = {}
    for name, make in makers.items():
        kind = draw.randrange(3)
        if kind == 1:
            filters[name] = make()
        elif kind == 2:
            filters[name] = torch.tensor([make() for _ in range(rows)], dtype=dtypes[name], device=device)
    return filters


@pytest.mark.parametrize("name", FAMILIES)
def test_random_sets_equal_the_sort(device, impl, name):
    rows = 6
    for seed in range(3):
        logits, temperature = family(name, rows, 300, seed)
        filters = filters_of(FAMILIES.index(name) * 100 + seed, rows, device)
        check_sets(logits.to(device), impl, temperature=temperature, **filters)
        # Finite, for a product with zeros; as the smallest logit a masked one is still below every boundary.
        logits32 = logits.float().clamp(min=-1e30).to(device)
        hidden, weight = as_head(logits32)
        drawn = nl.sample(hidden, weight, seed=5, temperature=temperature, logprobs="processed", impl=impl, **filters)
        chosen = nl.select((hidden, nl.LMHead(weight)), temperature=temperature, impl=impl, **filters)
        for row in range(rows):
            ids, shares = oracle(logits32[row], temperature, **row_of(filters, row))
            assert chosen.ids[row, : chosen.counts[row]].tolist() == ids
            want = float(shares[ids.index(int(drawn.tokens[row]))])
            slack = 2e-5 + 2.0**-22 * float(logits32[row].max()) / temperature
            assert float(drawn.logprobs[row]) == pytest.approx(want, abs=slack)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    values=st.lists(st.floats(-60, 60, width=16), min_size=1, max_size=40),
    k=st.integers(-1, 45),
    p=st.floats(0, 1),
    m=st.floats(0, 1),
    temperature=st.sampled_from([0.05, 0.5, 1.0, 3.0]),
)
def test_any_small_row_equals_the_sort(device, values, k, p, m, temperature):
    logits = on(device, [values])
    filters = {"top_k": k, "top_p": p, "min_p": m, "temperature": temperature}
    ids, _shares = oracle(logits[0], **filters)
    # A boundary nearer than the stated resolution, 2^-40 of the largest term, may fall either way.
    values64 = logits[0].double().cpu().sort(descending=True).values
    mass = ((values64 - values64[0]) / float(torch.tensor(temperature))).exp()
    if bool((mass / m - 1 if m > 0 else mass + 1).abs().min() < 1e-9):
        return
    before = mass.cumsum(0)
    if p < 1 and any(abs(float(b) - p * float(t)) < 1e-9 * len(values) for t in before for b in before):
        return
    assert kept(logits, **filters) == [sorted(ids)]
    chosen = nl.select(logits, **filters)
    assert chosen.ids[0, : chosen.counts[0]].tolist() == ids


def test_sets_are_the_same_at_every_run(device):
    logits, _ = family("ties", 8, 3_000, 1)
    logits = logits.to(device)
    first = nl.filter_logits(logits, top_p=0.9, top_k=900)
    assert all(torch.equal(nl.filter_logits(logits, top_p=0.9, top_k=900), first) for _ in range(5))


def test_select_is_as_wide_as_a_scalar_k(device, impl):
    logits = on(device, torch.randn(2, 90, generator=torch.Generator().manual_seed(1)).double())
    assert nl.select(logits, top_k=7, impl=impl).ids.shape == (2, 7)
    assert nl.select(logits, top_k=700, impl=impl).ids.shape == (2, 90)
    assert nl.select(logits, top_p=0.5, impl=impl).ids.shape == (2, 90)
    chosen = nl.select(logits, top_k=7, impl=impl)
    torch.testing.assert_close(chosen.logprobs.exp().sum(-1), torch.ones(2, device=device))


def test_filter_logits_writes_where_it_is_told(device):
    big = torch.randn(6, 100, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    logits, before = big[::2, :50], big.clone()
    out = torch.full((3, 70), 5.0, dtype=torch.bfloat16, device=device)
    result = nl.filter_logits(logits, top_k=5, out=out[:, 10:60])
    assert result.data_ptr() == out[:, 10:60].data_ptr()
    assert torch.equal(result, nl.filter_logits(logits.contiguous(), top_k=5))
    assert (out[:, :10] == 5).all()
    assert (out[:, 60:] == 5).all()
    assert torch.equal(big, before)
    nl.filter_logits(logits, top_k=5, out=logits)  # in place
    assert torch.equal(big[::2, :50], result)


def test_invalid_rows_keep_nothing(device, impl):
    logits = on(device, torch.randn(5, 40, generator=torch.Generator().manual_seed(1)).double())
    logits[1, 3], logits[2], logits[3, 9] = math.nan, -INF, INF
    p = torch.tensor([0.5, 0.5, 0.5, 0.5, math.nan], device=device)
    out = nl.filter_logits(logits, top_p=p)
    assert torch.equal(out[0], nl.filter_logits(logits[:1], top_p=0.5)[0])
    assert (out[[1, 2, 4]] == -INF).all()
    assert (out[3] > -INF).nonzero().flatten().tolist() == [9]
    assert nl.select(logits, top_p=p, impl=impl).counts.tolist()[1:] == [0, 0, 1, 0]


def test_kept_rows_one_after_the_other(device, impl):
    """CSR: what speculative verification and RL replays store."""
    logits = on(device, 3 * torch.randn(5, 90, generator=torch.Generator().manual_seed(3)).double())
    logits[3] = math.nan
    chosen = nl.select(logits, top_p=torch.tensor([0.1, 0.9, 1.0, 0.5, 0.0], device=device), impl=impl)
    rows = chosen.to_csr()
    assert rows.offsets.diff().tolist() == chosen.counts.tolist()
    assert chosen.counts[3] == 0
    for b in range(5):
        one, count = slice(rows.offsets[b], rows.offsets[b + 1]), chosen.counts[b]
        for packed, padded in zip(rows[1:], chosen[:3], strict=True):
            assert torch.equal(packed[one], padded[b, :count])


def test_mask_value(device):
    logits = on(device, torch.randn(3, 70, generator=torch.Generator().manual_seed(3)).double())
    logits[1, 4] = math.nan
    plain = nl.filter_logits(logits, top_k=9)
    masked = nl.filter_logits(logits, top_k=9, mask_value=-1e4)
    assert torch.equal(masked, plain.masked_fill(plain == -INF, -1e4))
    assert (masked[1] == -1e4).all()
    with pytest.raises(ValueError, match=r"^mask_value must be a number, got None"):
        nl.filter_logits(logits, top_k=9, mask_value=None)
