"""The cases that broke other samplers (filters F, edges of the head E), on every implementation."""

import math

import pytest
import torch

import nologits as nl

INF, NAN = math.inf, math.nan


def as_head(logits):
    """A fused head whose logits are ``logits [V]``: hidden e_0 of D = 16."""
    weight = torch.zeros(len(logits), 16, device=logits.device)
    weight[:, 0] = logits
    hidden = torch.zeros(1, 16, device=logits.device)
    hidden[0, 0] = 1
    return hidden, weight


def oracle(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The kept set of one row by a float64 sort with lowest-id ties, as ids; written from the contract alone."""
    ids = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    ids = [i for i in ids if logits[i] > -INF]
    peak = logits[ids[0]]
    mass = {i: math.exp((logits[i] - peak) / temperature) for i in ids}
    ids = [i for i in ids if mass[i] >= min_p]
    if top_k > 0:
        ids = ids[:top_k]
    if top_p < 1:
        total, before, kept = math.fsum(mass[i] for i in ids), 0.0, []
        for i in ids:
            if kept and before >= top_p * total:
                break
            kept.append(i)
            before += mass[i]
        ids = kept
    return ids


def kept_ids(logits, **filters):
    return (nl.filter_logits(logits, **filters) > -INF).nonzero()[:, 1].tolist()


@pytest.mark.parametrize(
    ("shares", "p", "kept"),
    [
        ([0.3, 0.1, 0.1, 0.5], 0.8, [0, 3]),
        ([0.5, 0.25, 0.125, 0.125], 0.75, [0, 1]),
        ([0.5, 0.25, 0.125, 0.125], 0.7499, [0, 1]),
        ([0.5, 0.25, 0.125, 0.125], 0.7501, [0, 1, 2]),
        ([0.5, 0.3, 0.15, 0.05], 0.6, [0, 1]),
        ([0.5, 0.25, 0.125, 0.125], 0.875, [0, 1, 2]),
    ],
)
def test_f1_f4_top_p_boundaries(device, impl, shares, p, kept):
    logits = torch.tensor([shares], device=device).log()
    assert kept_ids(logits, top_p=p) == kept
    chosen = nl.select(logits, top_p=p, impl=impl)
    assert sorted(chosen.ids[0, : len(kept)].tolist()) == kept
    assert chosen.counts.tolist() == [len(kept)]
    drawn = nl.sample_logits(logits, top_p=p, seed=1, num_samples=60, impl=impl).tokens
    assert set(drawn.flatten().tolist()) == set(kept)


@pytest.mark.parametrize(
    ("make", "filters", "count"),
    [
        (lambda d: torch.zeros(4096, device=d), {"top_p": 0.5}, 2048),
        (lambda d: torch.zeros(4096, device=d), {"top_k": 5}, 5),
        (lambda d: torch.cat([torch.ones(1, device=d), torch.zeros(63, device=d)]), {"top_p": 0.5}, 32),
        (lambda d: -torch.arange(131_072, device=d) * math.log(10) / 131_072, {"top_p": 0.5}, 34_032),
        (lambda d: -torch.arange(131_072, device=d) * math.log(10) / 131_072, {"top_p": 0.9}, 94_536),
        (lambda d: -torch.arange(131_072, device=d) * math.log(10) / 131_072, {"top_p": 0.99}, 126_167),
        (lambda d: torch.zeros(33, device=d), {"top_p": 0.9999999}, 33),
        (lambda d: torch.tensor([3.0, 2, 2, 2, 2, 1, -1], device=d), {"top_k": 2, "top_p": 0.99}, 2),
        (lambda d: torch.cat([torch.full((90,), -1e9), torch.zeros(10)]).to(d), {"top_k": 50}, 50),
    ],
)
def test_f2_f3_f9_f10_counts(device, make, filters, count):
    logits = make(device)[None]
    assert len(kept_ids(logits, **filters)) == count
    assert nl.select(logits, **filters).counts.item() == count


@pytest.mark.parametrize("family", ["gauss", "peaked", "flat", "ties", "bf16", "masked", "outlier", "junk", "cold"])
def test_kept_sets_equal_the_float64_sort(device, family):
    generator = torch.Generator().manual_seed(1)
    rows, vocab = 12, 700
    logits = 3 * torch.randn(rows, vocab, generator=generator)
    temperature = 0.05 if family == "cold" else 1.0
    if family == "peaked":
        logits[:, 5] += 12
    elif family == "flat":
        logits *= 0.01
    elif family == "ties":
        logits = logits.round()
    elif family == "bf16":
        logits = logits.bfloat16()
    elif family == "masked":
        logits[:, torch.randperm(vocab, generator=generator)[: vocab * 9 // 10]] = -INF
    elif family == "outlier":
        logits[:, 3] = 1e9
    elif family == "junk":
        logits[:, 3], logits[:, 4] = -1000, torch.finfo(torch.float32).min
    k = torch.randint(0, 80, (rows,), generator=generator)
    p = torch.rand(rows, generator=generator, dtype=torch.float64)
    m = torch.rand(rows, generator=generator, dtype=torch.float64) * 0.1
    for filters in ({"top_k": k}, {"top_p": p}, {"min_p": m}, {"top_k": k, "top_p": p, "min_p": m}):
        on_device = {name: value.to(device) for name, value in filters.items()}
        out = nl.filter_logits(logits.to(device), temperature=temperature, **on_device)
        chosen = nl.select(logits.to(device), temperature=temperature, **on_device)
        for row in range(rows):
            want = oracle(logits[row].double().tolist(), temperature, **{n: v[row].item() for n, v in filters.items()})
            assert (out[row] > -INF).nonzero().flatten().tolist() == sorted(want)
            assert chosen.ids[row, : chosen.counts[row]].tolist() == want
            alone = {name: value[row : row + 1] for name, value in on_device.items()}
            assert torch.equal(
                nl.filter_logits(logits[row : row + 1].to(device), temperature=temperature, **alone)[0], out[row]
            )


def test_f12_tiny_p_is_the_argmax(device, impl):
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(0)).to(device)
    for p in (0.0, 1e-8):
        for x in (logits, logits.bfloat16()):
            want = nl.sample_logits(x, temperature=0.0, impl=impl).tokens
            assert torch.equal(nl.sample_logits(x, top_p=p, seed=3, impl=impl).tokens, want)


def test_f13_ties_keep_exactly_k_and_draw_uniformly(device, impl):
    logits = torch.zeros(64, 200, device=device)
    rows = torch.arange(64, device=device)
    drawn = nl.sample_logits(logits, top_k=64, seed=rows, num_samples=10, impl=impl).tokens
    counts = drawn.flatten().bincount(minlength=64)
    assert len(counts) == 64
    chi = ((counts - 10.0) ** 2 / 10).sum().item()
    assert 20 < chi < 130  # 63 degrees of freedom
    assert (nl.sample_logits(logits, top_k=1, seed=1, impl=impl).tokens == 0).all()


def test_e1_padding_is_never_drawn(device, impl):
    weight = torch.zeros(128, 16, device=device)
    weight[:100, 0], weight[42, 0], weight[100:, 0] = -1, -0.5, 1e4
    hidden = torch.zeros(1, 16, device=device)
    hidden[0, 0] = 1
    assert nl.sample(hidden, weight, vocab_size=100, temperature=0.0, impl=impl).tokens.item() == 42
    out = nl.sample(hidden, weight, vocab_size=100, seed=2, num_samples=100, logprobs=True, impl=impl)
    assert out.tokens.max() < 100
    assert out.log_mass.item() == pytest.approx(math.log(99 * math.exp(-1) + math.exp(-0.5)), abs=1e-5)


def test_e2_e3_log_probabilities_and_soft_cap(device, impl):
    logits = torch.full((33,), -10.0, device=device)
    logits[5] = -5
    out = nl.sample(*as_head(logits), temperature=0.0, logprobs=True, impl=impl)
    assert out.raw_logprobs.item() == pytest.approx(-0.19525, abs=1e-5)
    assert out.logprobs.item() == 0
    out = nl.sample(*as_head(torch.full((65,), -100.0, device=device)), softcap=30.0, seed=3, num_samples=100, impl=impl)
    assert out.tokens.max() < 65
    hidden, weight = as_head(torch.tensor([60.0, 40.0], device=device))
    out = nl.sample(hidden, weight, scale=0.25, softcap=30.0, temperature=0.0, logprobs="raw", impl=impl)
    assert math.exp(out.raw_logprobs.item()) == pytest.approx(0.98549, abs=1e-5)


def test_e4_strides_and_untouched_inputs(device, impl):
    big = torch.full((8, 128), 1e4, device=device)
    big[:, :100] = torch.randn(8, 100, generator=torch.Generator().manual_seed(0)).to(device)
    views = (big[:, :100], big[::2, :100], big[:, :100].t(), big[:1, :100].expand(4, -1), big.flatten()[1:801].view(8, 100))
    for view in views:
        before = big.clone()
        got = nl.sample_logits(view, seed=1, top_k=20, impl=impl).tokens
        assert torch.equal(got, nl.sample_logits(view.contiguous(), seed=1, top_k=20, impl=impl).tokens)
        assert torch.equal(
            nl.sample_logits(view, seed=1, impl=impl).tokens, nl.sample_logits(view.clone(), seed=1, impl=impl).tokens
        )
        assert torch.equal(big, before)
    hidden, weight = torch.randn(3, 64, device=device), torch.randn(32, 200, device=device)
    strided = nl.sample(hidden[:, ::2], weight.t(), seed=1, impl=impl).tokens
    assert torch.equal(strided, nl.sample(hidden[:, ::2].contiguous(), weight.t().contiguous(), seed=1, impl=impl).tokens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_e6_exact_sums_at_awkward_sizes(device, impl, dtype, monkeypatch):
    """Integer operands: every product and sum is exact, so ids and masses must be too. Scratch starts as NaN."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        out = empty(*args, **kwargs)
        return out.fill_(NAN if out.is_floating_point() else -(2**30))

    monkeypatch.setattr(torch, "empty", poisoned)
    generator = torch.Generator().manual_seed(3)
    for depth, vocab, batch in ((256, 33, 1), (300, 200, 3), (304, 1001, 17), (511, 200, 17)):
        hidden = torch.randint(-3, 4, (batch, depth), generator=generator).to(device, dtype)
        weight = torch.randint(-3, 4, (vocab, depth), generator=generator).to(device, dtype)
        logits = hidden.double() @ weight.double().T
        out = nl.sample(hidden, weight, temperature=0.0, logprobs=True, impl=impl)
        first = (logits == logits.amax(-1, keepdim=True)).to(torch.int8).argmax(-1)
        assert torch.equal(out.tokens, first)
        assert torch.equal(out.log_mass.double(), logits.amax(-1))
        noisy = nl.sample(hidden, weight, temperature=8.0, seed=5, top_k=30, logprobs=True, impl=impl)
        exact = nl.sample_logits(logits.float(), temperature=8.0, seed=5, top_k=30, logprobs=True, impl="reference")
        assert torch.equal(noisy.tokens, exact.tokens)
        torch.testing.assert_close(noisy.logprobs, exact.logprobs, rtol=0, atol=1e-5)


def test_e7_weight_updates_take_effect_at_once(device, impl):
    hidden, weight = torch.ones(1, 300, device=device), torch.zeros(100, 300, device=device)
    weight[3] = 1
    head = nl.LMHead(weight)
    assert head.sample(hidden, nl.SamplingParams(temperature=0.0), impl=impl).tokens.item() == 3
    weight.zero_()
    weight[77] = 1
    assert head.sample(hidden, nl.SamplingParams(temperature=0.0), impl=impl).tokens.item() == 77


def test_e8_mixed_temperatures(device, impl):
    logits = torch.tensor([[1.0, 1, 0, -INF], [0, 0, 0, 0], [-3, -1, -2, -9]], device=device)
    temperature = torch.tensor([0.0, 1.0, 0.0], device=device)
    drawn = nl.sample_logits(logits, temperature=temperature, seed=4, num_samples=400, impl=impl).tokens
    assert (drawn[0] == 0).all()
    assert (drawn[2] == 1).all()
    assert (drawn[1].bincount(minlength=4) - 100).abs().max() < 45


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.5}, {"temperature": 0.0}], ids=str)
def test_e9_invalid_rows_leave_the_others_alone(device, impl, filters):
    logits = torch.randn(5, 1000, generator=torch.Generator().manual_seed(2)).to(device)
    logits[1], logits[2, 5], logits[3, 9], logits[4] = NAN, NAN, INF, -INF
    out = nl.sample_logits(logits, seed=5, logprobs=True, impl=impl, **filters)
    solo = nl.sample_logits(logits[:1], seed=5, logprobs=True, impl=impl, **filters)
    assert out.tokens.tolist() == [solo.tokens.item(), -1, -1, 9, -1]
    for got, want in zip(out[1:4], solo[1:4], strict=True):
        assert got[0] == want[0]
        assert got[[1, 2, 4]].isnan().all()
    assert out.logprobs[3] == 0
    with pytest.raises(ValueError, match="3 invalid rows, the first 1"):
        nl.sample_logits(logits, seed=5, impl=impl, check=True, **filters)
    weight = torch.randn(50, 16, device=device)
    weight[7, 3] = NAN
    assert nl.sample(torch.ones(2, 16, device=device), weight, seed=1, impl=impl).tokens.tolist() == [-1, -1]


def test_e10_ties_across_tiles(device, impl):
    for vocab, first, second in ((33, 3, 30), (65, 3, 40), (700, 8, 1), (700, 200, 650), (700, 72, 65)):
        logits = torch.zeros(1, vocab, device=device)
        logits[0, first] = logits[0, second] = 5
        assert nl.sample_logits(logits, temperature=0.0, impl=impl).tokens.item() == min(first, second)
    zeros = torch.zeros(1, 65, device=device)
    zeros[0, 0] = -0.0
    assert nl.sample_logits(zeros, temperature=0.0, impl=impl).tokens.item() == 0


def test_e12_sparse_bias_and_masks(device, impl):
    logits = torch.randn(2, 100, generator=torch.Generator().manual_seed(2)).to(device)
    ids = torch.tensor([[99, 5, -1, 5], [0, 99, 3, -1]], device=device)
    values = torch.tensor([[4.0, 1, 9, 2], [-INF, 7, 1, 9]], device=device)
    dense = torch.zeros(2, 100, device=device)
    dense[0, 99], dense[0, 5], dense[1, 0], dense[1, 99], dense[1, 3] = 4, 3, -INF, 7, 1
    sparse_out = nl.sample_logits(logits, seed=3, logit_bias=(ids, values), num_samples=50, logprobs=True, impl=impl)
    dense_out = nl.sample_logits(logits + dense, seed=3, num_samples=50, logprobs=True, impl=impl)
    assert torch.equal(sparse_out.tokens, dense_out.tokens)
    torch.testing.assert_close(sparse_out.log_mass, dense_out.log_mass, rtol=0, atol=1e-5)
    assert torch.equal(nl.sample_logits(logits, seed=3, logit_bias=dense, num_samples=50, impl=impl).tokens, dense_out.tokens)
    mask = torch.zeros(2, 4, dtype=torch.int32, device=device)
    mask[0, 1], mask[1, 3], mask[1, 0] = 2, -1, 1  # ids 33; 96..127 (V = 100) and 0
    drawn = nl.sample_logits(logits, seed=3, allowed_tokens=mask, num_samples=60, impl=impl).tokens
    assert (drawn[0] == 33).all()
    assert set(drawn[1].tolist()) == {0, 96, 97, 98, 99}


def test_e13_empty_and_trivial_sizes(device, impl):
    empty = nl.sample(torch.zeros(0, 16, device=device), torch.zeros(5, 16, device=device), impl=impl)
    assert empty.tokens.shape == (0,)
    assert empty.tokens.dtype == torch.int64
    one = torch.zeros(2, 1, device=device), torch.zeros(1, 1, device=device)
    assert nl.sample(*one, impl=impl).tokens.tolist() == [0, 0]
    assert nl.sample(*one, impl=impl, num_samples=0).tokens.shape == (2, 0)
    assert nl.sample(*one, impl=impl, num_samples=3).tokens.shape == (2, 3)


def test_impossible_row_values_are_invalid_rows(device, impl):
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(2)).to(device)
    want = nl.sample_logits(logits[:1], seed=3, impl=impl).tokens.item()
    bad = {"temperature": [1.0, -1.0, NAN, INF], "top_p": [1.0, -0.1, NAN, 1.5], "min_p": [0.0, -0.1, NAN, 1.5]}
    for name, values in bad.items():
        got = nl.sample_logits(logits, seed=3, impl=impl, **{name: torch.tensor(values, device=device)}).tokens
        assert got.tolist() == [want, -1, -1, -1], name
    got = nl.sample_logits(logits, seed=3, top_k=torch.tensor([0, -2, -5, -9], device=device), impl=impl).tokens
    assert got.tolist() == [want, -1, -1, -1]


def test_every_implementation_draws_the_reference_token(device, impl):
    generator = torch.Generator().manual_seed(11)
    hidden, weight = torch.randn(20, 96, generator=generator), torch.randn(600, 96, generator=generator) * 0.3
    bias = torch.randn(600, generator=generator)
    k = torch.randint(0, 60, (20,), generator=generator)
    p = torch.rand(20, generator=generator, dtype=torch.float64)
    temperature = torch.rand(20, generator=generator) * 2
    rows = torch.arange(20)
    mismatches = draws = 0
    for extra in ({}, {"top_k": k}, {"top_p": p}, {"top_k": k, "top_p": p, "min_p": 0.01}, {"temperature": temperature}):
        for head in ({}, {"bias": bias, "scale": 0.7, "softcap": 12.0}, {"vocab_size": 577}):
            arguments = {"seed": rows * 7, "position": rows} | extra | head
            tensors = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}
            if "vocab_size" in head:
                tensors.pop("bias", None)
            got = nl.sample(hidden.to(device), weight.to(device), impl=impl, logprobs=True, num_samples=2, **tensors)
            want = nl.sample(hidden.to(device), weight.to(device), impl="reference", logprobs=True, num_samples=2, **tensors)
            same = got.tokens == want.tokens
            mismatches += int((~same).sum())
            draws += same.numel()
            torch.testing.assert_close(got.logprobs[same], want.logprobs[same], rtol=0, atol=1e-4)
            torch.testing.assert_close(got.raw_logprobs[same], want.raw_logprobs[same], rtol=0, atol=1e-5)
            torch.testing.assert_close(got.log_mass, want.log_mass, rtol=1e-5, atol=1e-5)
    assert mismatches <= draws // 500
