"""Edges of the head: padding, strides, dtypes, scratch that nobody wrote, updates in place, rows that spoil themselves only.

Inputs are integers wherever a test asks for equality: products and sums are then exact in every dtype and order.
"""

import math

import pytest
import torch

import nologits as nl

INF, NAN = math.inf, math.nan
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def as_head(logits):
    """Hidden states and a head of D = 16 whose logits are ``logits [V]``."""
    weight = logits.new_zeros(len(logits), 16)
    weight[:, 0] = logits
    hidden = logits.new_zeros(1, 16)
    hidden[0, 0] = 1
    return hidden, weight


def integers(low, high, *shape, seed=0, dtype=torch.float32, device="cpu"):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def same(one, other, rounding=0.0):
    """Bit-identical results, NaN included; with ``rounding``, equal tokens and log-probabilities as close as that."""
    for a, b in zip(one, other, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            slack = rounding if a.is_floating_point() else 0
            torch.testing.assert_close(a, b, rtol=slack, atol=slack, equal_nan=True)


@pytest.mark.parametrize("padding", [0.0, 1e4, NAN, INF])
def test_e1_padding_rows_do_not_exist(device, impl, padding):
    hidden, weight = as_head(torch.full((128,), -1.0, device=device))
    weight[42, 0], weight[100:] = -0.5, padding
    head = nl.LMHead(weight, vocab_size=100)
    assert head.sample(hidden, nl.SamplingParams(temperature=0.0), impl=impl).tokens.item() == 42
    out = head.sample(hidden, nl.SamplingParams(seed=2), num_samples=10, logprobs=True, impl=impl)
    assert out.tokens.min() >= 0
    assert out.tokens.max() < 100
    total = math.log(99 * math.exp(-1) + math.exp(-0.5))
    assert out.log_mass.item() == pytest.approx(total, abs=1e-5)
    want = torch.where(out.tokens == 42, -0.5, -1.0) - total
    torch.testing.assert_close(out.logprobs, want, rtol=0, atol=1e-5)
    torch.testing.assert_close(out.raw_logprobs, want, rtol=0, atol=1e-5)
    filtered = head.sample(hidden, nl.SamplingParams(seed=2, top_k=100, top_p=0.999), num_samples=10, impl=impl)
    assert filtered.tokens.max() < 100
    assert head.select(hidden, top_k=128, impl=impl).counts.item() == 100


@pytest.mark.parametrize("vocab", [1, 2, 33, 65, 127, 128, 129, 257])
def test_e1_the_last_column_counts(device, impl, vocab):
    hidden, weight = as_head(torch.zeros(vocab, device=device))
    weight[-1, 0] = 3
    out = nl.sample(hidden, weight, temperature=0.0, logprobs="raw", impl=impl)
    assert out.tokens.item() == vocab - 1
    assert out.raw_logprobs.item() == pytest.approx(3 - math.log(vocab - 1 + math.exp(3)), abs=1e-5)
    everything = nl.sample(hidden, weight * 0, seed=1, num_samples=1 if vocab > 65 else 30, logprobs=True, impl=impl)
    assert everything.tokens.max() < vocab
    assert everything.log_mass.item() == pytest.approx(math.log(vocab), abs=1e-5)


def test_e2_a_log_probability_known_by_hand(device, impl):
    logits = torch.full((33,), -10.0, device=device)
    logits[5] = -5
    out = nl.sample(*as_head(logits), temperature=0.0, logprobs=True, impl=impl)
    assert out.tokens.item() == 5
    assert out.raw_logprobs.item() == pytest.approx(-0.19525, abs=1e-5)
    assert out.logprobs.item() == 0
    assert out.log_mass.item() == -5
    out = nl.sample(*as_head(logits), seed=1, num_samples=20, logprobs="processed", impl=impl)
    others = -0.19525 - 5
    torch.testing.assert_close(out.logprobs, torch.where(out.tokens == 5, -0.19525, others), rtol=0, atol=2e-5)
    assert out.raw_logprobs is None


def test_e3_soft_cap_and_scale(device, impl):
    out = nl.sample(
        *as_head(torch.full((65,), -100.0, device=device)), softcap=30.0, seed=3, num_samples=10, logprobs=True, impl=impl
    )
    assert out.tokens.max() < 65
    assert out.log_mass.item() == pytest.approx(30 * math.tanh(-100 / 30) + math.log(65), abs=1e-4)
    hidden, weight = as_head(torch.tensor([60.0, 40.0], device=device))
    out = nl.sample(hidden, weight, scale=0.25, softcap=30.0, temperature=0.0, logprobs="raw", impl=impl)
    assert math.exp(out.raw_logprobs.item()) == pytest.approx(0.98549, abs=1e-5)


def test_e3_the_head_comes_before_the_request(device, impl):
    """bias, then scale, then cap; the request's bias is not capped and not part of the raw log-probability."""
    hidden, weight = as_head(torch.tensor([4.0, 2.0, 0.0], device=device))
    bias = torch.tensor([0.0, 6.0, 1.0], device=device)
    request = torch.tensor([0.0, 0.0, 40.0], device=device)
    out = nl.sample(hidden, weight, bias=bias, scale=2.0, softcap=10.0, logit_bias=request, temperature=0.5, seed=1,
                    logprobs=True, impl=impl)  # fmt: skip
    head = [10 * math.tanh(2 * x / 10) for x in (4.0, 8.0, 1.0)]
    assert out.tokens.item() == 2
    assert out.raw_logprobs.item() == pytest.approx(head[2] - math.log(sum(map(math.exp, head))), abs=1e-5)
    want = torch.tensor([head[0], head[1], head[2] + 40]).double() / 0.5
    assert out.log_mass.item() == pytest.approx(want.logsumexp(0).item(), abs=1e-4)


def strided_logits(big):
    return {
        "columns": big[:, :100],
        "every other row": big[::2, :100],
        "transposed": big[:, :100].t(),
        "one row for all": big[:1, :100].expand(4, -1),
        "every other column": big[:, 1::2],
        "offset by one element": big.flatten()[1:801].view(8, 100),
    }


@pytest.mark.parametrize(
    "view", ["columns", "every other row", "transposed", "one row for all", "every other column", "offset by one element"]
)
def test_e4_strided_logits(device, impl, view):
    big = torch.full((8, 128), 1e4, device=device)
    big[:, :100] = torch.randn(8, 100, generator=torch.Generator().manual_seed(0)).to(device)
    before, logits = big.clone(), strided_logits(big)[view]
    dense = logits.clone(memory_format=torch.contiguous_format)
    for filters in ({}, {"top_k": 20, "top_p": 0.9}):
        one = nl.sample_logits(logits, seed=1, logprobs=True, impl=impl, **filters)
        # A kernel compiled for other strides may add up a tile's mass in another order.
        same(one, nl.sample_logits(dense, seed=1, logprobs=True, impl=impl, **filters), rounding=1e-6)
    assert torch.equal(nl.filter_logits(logits, top_k=7), nl.filter_logits(dense, top_k=7))
    assert torch.equal(big, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_e4_strided_operands(device, impl, dtype):
    x, w = (
        integers(-3, 4, 5, 129, seed=1, dtype=dtype, device=device),
        integers(-3, 4, 66, 400, seed=2, dtype=dtype, device=device),
    )
    shift = integers(-3, 4, 600, seed=3, dtype=dtype, device=device)
    views = {
        "hidden": (x[:, :128:2], w[:64, :200].t().contiguous(), shift[:200].contiguous()),
        "weight": (x[:, :64].contiguous(), w[:64, :200].t(), shift[::3]),
        "offset": (x[:, 1:65], w.flatten()[1:12801].view(200, 64), shift[5:205]),
        "stride 0": (x[:1, :64].expand(5, -1), w[:1, :64].expand(200, -1), shift[:200]),
    }
    for name, (hidden, weight, bias) in views.items():
        before = [t.clone() for t in (x, w, shift)]
        for filters in ({}, {"top_k": 30}):
            arguments = {"seed": 4, "temperature": 3.0, "logprobs": True, "impl": impl} | filters
            one = nl.sample(hidden, weight, bias=bias, **arguments)
            other = nl.sample(hidden.contiguous(), weight.contiguous(), bias=bias.contiguous(), **arguments)
            # Operands that bulk copies cannot address go to another kernel, whose sums round otherwise.
            same(one, other, rounding=4e-6 if impl == "hopper" else 1e-6)
        assert all(torch.equal(t, b) for t, b in zip((x, w, shift), before, strict=True)), name


def test_e4_strided_row_parameters(device, impl):
    """Parameters that are slices, or one value for all by stride 0."""
    logits = torch.randn(4, 90, generator=torch.Generator().manual_seed(0)).to(device)
    grid = torch.tensor([[0.5, 1.0], [1.5, 9.0], [0.0, 9.0], [0.7, 9.0]], device=device)
    numbers = torch.arange(8, device=device).view(4, 2)
    mask = torch.full((4, 9), -2, dtype=torch.int32, device=device)
    bias = torch.randn(4, 200, device=device)
    views = dict(temperature=grid[:, 0], seed=numbers[:, 1], position=numbers[:1, 0].expand(4), allowed_tokens=mask[:, ::3],
                 logit_bias=bias[:, 1:181:2])  # fmt: skip
    dense = {name: value.contiguous() for name, value in views.items()}
    for extra in ({}, {"top_k": numbers[:, 1]}):
        extra_dense = {name: value.contiguous() for name, value in extra.items()}
        one = nl.sample_logits(logits, logprobs=True, impl=impl, **views, **extra)
        same(one, nl.sample_logits(logits, logprobs=True, impl=impl, **dense, **extra_dense), rounding=1e-6)


def test_e5_far_rows_have_their_own_noise(device):
    """A 32-bit product of row and V would wrap: rows 0 and 28,268 at V = 151,936 shared noise elsewhere."""
    from nologits import noise

    slots = torch.tensor([0, 28_268, 2**31, 2**32, 2**62], device=device)
    words = noise.token_words(torch.zeros_like(slots), slots, 0, 1024)
    for row in range(1, len(slots)):
        assert (words[0] == words[row]).sum() <= 1
    many = nl.sample_logits(torch.zeros(1, 64, device=device).expand(30_000, -1), impl="torch").tokens
    assert (many[:1_732] == many[28_268:]).float().mean() < 0.1


SHAPES = [(256, 33, 1), (300, 200, 3), (304, 1001, 17), (511, 200, 17), (511, 33, 3), (1, 200, 2), (64, 129, 16)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("depth", "vocab", "batch"), SHAPES)
def test_e6_exact_sums_at_awkward_sizes(device, impl, dtype, depth, vocab, batch, poisoned):
    hidden = integers(-3, 4, batch, depth, seed=1, dtype=dtype, device=device)
    weight = integers(-3, 4, vocab, depth, seed=2, dtype=dtype, device=device)
    logits = hidden.double() @ weight.double().T
    out = nl.sample(hidden, weight, temperature=0.0, logprobs=True, impl=impl)
    assert torch.equal(out.tokens, (logits == logits.amax(-1, keepdim=True)).int().argmax(-1))
    assert torch.equal(out.log_mass.double(), logits.amax(-1))
    assert (out.logprobs == 0).all()
    temperature = 5.0
    for filters, draws in (({}, 1), ({"top_k": 30}, 2), ({"top_p": 0.9}, 1)):
        noisy = nl.sample(
            hidden, weight, temperature=temperature, seed=5, num_samples=draws, logprobs=True, impl=impl, **filters
        )
        exact = nl.sample_logits(logits.float(), temperature=temperature, seed=5, num_samples=draws, logprobs=True,
                                 impl="reference", **filters)  # fmt: skip
        assert torch.equal(noisy.tokens, exact.tokens)
        for got, want in zip(noisy[1:], exact[1:], strict=True):
            torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
        raw = logits.log_softmax(-1).gather(1, noisy.tokens.view(batch, draws)).view_as(noisy.tokens)
        torch.testing.assert_close(noisy.raw_logprobs.double(), raw, rtol=2e-5, atol=2e-5)
    chosen = nl.select((hidden, nl.LMHead(weight)), top_k=9, impl=impl)
    assert torch.equal(chosen.logits.double(), logits.topk(min(9, vocab)).values)


def test_e6_invalid_rows_with_poisoned_scratch(device, impl, poisoned):
    """Poison itself must not be what makes a row invalid."""
    logits = integers(-3, 4, 5, 300, seed=1, device=device)
    logits[2], logits[3] = NAN, -INF
    for filters in ({}, {"top_k": 3}):
        out = nl.sample_logits(logits, seed=1, num_samples=2, logprobs=True, impl=impl, **filters)
        assert (out.tokens[[0, 1, 4]] >= 0).all()
        assert (out.tokens[[0, 1, 4]] < 300).all()
        assert (out.tokens[2:4] == -1).all()
        assert torch.equal(out.log_mass.isnan(), torch.tensor([False, False, True, True, False], device=device))
    assert torch.equal((nl.filter_logits(logits, top_k=3) > -INF).sum(-1).cpu(), torch.tensor([3, 3, 0, 0, 3]))
    chosen = nl.select(logits, top_k=3, impl=impl)
    assert (chosen.ids[2:4] == -1).all()
    assert (chosen.logprobs[2:4] == -INF).all()


def test_e7_updates_in_place_take_effect_at_once(device, impl):
    hidden, weight = torch.ones(1, 300, device=device), torch.zeros(100, 300, device=device)
    weight[3] = 1
    bias = torch.zeros(100, device=device)
    head = nl.LMHead(weight, bias=bias)
    greedy = nl.SamplingParams(temperature=0.0)
    assert head.sample(hidden, greedy, impl=impl).tokens.item() == 3
    other = torch.zeros_like(weight)
    other[77] = 1
    weight.copy_(other)
    assert head.sample(hidden, greedy, impl=impl).tokens.item() == 77
    assert head.select(hidden, top_k=1, impl=impl).ids.item() == 77
    bias[9] = 1e3
    assert head.sample(hidden, greedy, impl=impl).tokens.item() == 9


@pytest.mark.gpu
def test_e7_updates_take_effect_in_a_captured_graph():
    hidden, weight = torch.ones(1, 304, device="cuda").bfloat16(), torch.zeros(100, 304, device="cuda").bfloat16()
    weight[3] = 1
    head, greedy = nl.LMHead(weight), nl.SamplingParams(temperature=0.0)
    for _ in range(2):
        head.sample(hidden, greedy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = head.sample(hidden, greedy).tokens
    graph.replay()
    assert out.item() == 3
    weight.zero_()
    weight[77] = 1
    graph.replay()
    assert out.item() == 77


def test_e8_one_batch_of_mixed_rows(device, impl, size):
    from nologits.testing import chi_squared, count_tokens

    rows = size(120, 400)
    logits = torch.tensor([[1.0, 1, 0, -INF], [0, 0, 0, 0], [-3, -1, -2, -9]], device=device).repeat(rows, 1)
    temperature = torch.tensor([0.0, 1.0, 0.0], device=device).repeat(rows)
    seed = torch.arange(3 * rows, device=device)
    for filters in ({}, {"top_k": torch.tensor([2, 0, 3], device=device).repeat(rows)}):
        out = nl.sample_logits(logits, temperature=temperature, seed=seed, num_samples=2, logprobs=True, impl=impl, **filters)
        tokens = out.tokens.view(rows, 3, 2)
        assert (tokens[:, 0] == 0).all()
        assert (tokens[:, 2] == 1).all()
        assert chi_squared(count_tokens(tokens[:, 1], 4), [1, 1, 1, 1]).p_value > 1e-4
        assert chi_squared(count_tokens(tokens[:, 1], 4), [1, 1, 1, 0.1]).p_value < 1e-4
        want = torch.tensor([0, -math.log(4), 0], device=device).repeat(rows)[:, None].expand(-1, 2)
        torch.testing.assert_close(out.logprobs, want, rtol=0, atol=1e-5)
        want = torch.tensor([1, math.log(4), -1], device=device).repeat(rows)
        torch.testing.assert_close(out.log_mass, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.5}, {"temperature": 0.0}], ids=str)
def test_e9_invalid_rows_leave_the_others_alone(device, impl, filters):
    logits = torch.randn(6, 700, generator=torch.Generator().manual_seed(2)).to(device)
    logits[1], logits[2, 5], logits[3, 9], logits[4], logits[5, [20, 600]] = NAN, NAN, INF, -INF, INF
    arguments = {"seed": 5, "logprobs": True, "impl": impl} | filters
    out = nl.sample_logits(logits, **arguments)
    same([part[:1] for part in out[:4]], nl.sample_logits(logits[:1], **arguments)[:4])
    assert out.tokens.tolist()[1:] == [-1, -1, 9, -1, 20]
    for part in out[1:4]:
        assert part[[1, 2, 4]].isnan().all()
    # +inf at one id is certain; at two, the first is drawn whatever the noise.
    assert out.logprobs[[3, 5]].tolist() == [0, 0]
    assert out.raw_logprobs[3].item() == 0
    assert out.log_mass[[3, 5]].tolist() == [INF, INF]
    with pytest.raises(ValueError, match="3 invalid rows, the first 1"):
        nl.sample_logits(logits, check=True, **arguments)
    nl.sample_logits(logits[:1], check=True, **arguments)


def test_e9_a_nan_in_the_weight_or_in_one_hidden_row(device, impl):
    hidden, weight = integers(-3, 4, 4, 32, seed=1, device=device), integers(-3, 4, 200, 32, seed=2, device=device)
    clean = nl.sample(hidden, weight, seed=1, temperature=4.0, logprobs=True, impl=impl)
    spoiled = hidden.clone()
    spoiled[2, 7] = NAN
    out = nl.sample(spoiled, weight, seed=1, temperature=4.0, logprobs=True, impl=impl)
    assert out.tokens[2] == -1
    keep = torch.tensor([0, 1, 3], device=device)
    same([part[keep] for part in out[:4]], [part[keep] for part in clean[:4]])
    weight[150, 3] = NAN
    for filters in ({}, {"top_k": 3}):
        assert nl.sample(hidden, weight, seed=1, impl=impl, **filters).tokens.tolist() == [-1] * 4


@pytest.mark.parametrize(
    ("vocab", "ties"), [(33, (3, 30)), (65, (3, 40)), (700, (1, 8)), (700, (65, 72)), (700, (200, 650)), (257, (128, 256))]
)
def test_e10_ties_go_to_the_smaller_id(device, impl, vocab, ties):
    hidden, weight = as_head(torch.zeros(vocab, device=device))
    weight[list(ties), 0] = 5
    assert nl.sample(hidden, weight, temperature=0.0, impl=impl).tokens.item() == ties[0]
    assert nl.sample(hidden, weight, temperature=0.0, top_k=4, impl=impl).tokens.item() == ties[0]
    assert nl.select((hidden, nl.LMHead(weight)), top_k=2, impl=impl).ids.tolist() == [list(ties)]


def test_e10_minus_zero_equals_zero(device, impl):
    logits = torch.zeros(1, 65, device=device)
    logits[0, 0] = -0.0
    assert nl.sample_logits(logits, temperature=0.0, impl=impl).tokens.item() == 0
    assert nl.sample_logits(logits, top_k=1, seed=1, impl=impl).tokens.item() == 0
    logits[0, [8, 64]] = -INF  # the ids that share its noise group, so that no maximum with 0.0 hides the sign
    assert nl.sample_logits(logits, temperature=0.0, impl=impl).tokens.item() == 0
    logits = torch.full((1, 65), -0.0, device=device)
    logits[0, 7] = 0.0
    assert nl.sample_logits(logits, temperature=0.0, impl=impl).tokens.item() == 0


def test_e10_rows_of_nothing(device, impl):
    for value in (NAN, -INF):
        for vocab in (33, 65):
            out = nl.sample_logits(torch.full((2, vocab), value, device=device), seed=1, num_samples=3, impl=impl)
            assert (out.tokens == -1).all()


def test_e12_sparse_bias_equals_the_dense_one(device, impl):
    logits = integers(-4, 5, 2, 300, seed=2, device=device) / 2
    ids = torch.tensor([[99, 5, -1, 5, 299], [0, 99, 3, -1, -1]], device=device)
    values = torch.tensor([[4.0, 1, 99, 2, 3], [-INF, 7, 1, 99, NAN]], device=device)
    dense = torch.zeros(2, 300, device=device)
    dense[0, 99], dense[0, 5], dense[0, 299], dense[1, 0], dense[1, 99], dense[1, 3] = 4, 3, 3, -INF, 7, 1
    for filters in ({}, {"top_k": 40}, {"temperature": 0.0}):
        arguments = {"seed": 3, "logprobs": True, "impl": impl, "num_samples": 5} | filters
        want = nl.sample_logits(logits + dense, **arguments)
        for bias in ((ids, values), dense) if filters else ((ids, values), (ids.int(), values.double()), dense, dense.half()):
            got = nl.sample_logits(logits, logit_bias=bias, **arguments)
            assert torch.equal(got.tokens, want.tokens)
            torch.testing.assert_close(got.logprobs, want.logprobs, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(got.log_mass, want.log_mass, rtol=1e-6, atol=1e-6)
            raw = logits.log_softmax(-1).gather(1, got.tokens)
            torch.testing.assert_close(got.raw_logprobs, raw, rtol=0, atol=1e-5)


def test_e12_bias_shared_by_all_rows(device, impl):
    logits = integers(-4, 5, 3, 100, seed=2, device=device)
    ids, values = torch.tensor([99, 4], device=device), torch.tensor([50.0, 30.0], device=device)
    for bias in ((ids, values), (ids[None], values[None]), torch.zeros(100, device=device).index_put((ids,), values)):
        assert nl.sample_logits(logits, logit_bias=bias, seed=1, impl=impl).tokens.tolist() == [99] * 3
    none = torch.zeros(3, 0, dtype=torch.int64, device=device), torch.zeros(3, 0, device=device)
    same(nl.sample_logits(logits, logit_bias=none, seed=1, impl=impl), nl.sample_logits(logits, seed=1, impl=impl))


@pytest.mark.parametrize("wrong", [100, 127, 128, -2, 2**40])
def test_e12_ids_outside_the_vocabulary(device, impl, wrong):
    """A ValueError where reading the ids does not synchronise; absent on a GPU."""
    logits = torch.zeros(1, 100, device=device)
    bias = torch.tensor([[wrong, 99]], device=device), torch.tensor([[1e4, 50.0]], device=device)
    if device.type == "cpu":
        with pytest.raises(ValueError, match=f"logit_bias ids .*got {wrong}"):
            nl.sample_logits(logits, logit_bias=bias, seed=1, impl=impl)
    else:
        for filters in ({}, {"top_k": 3}):
            out = nl.sample_logits(logits, logit_bias=bias, seed=1, logprobs=True, impl=impl, **filters)
            assert out.tokens.tolist() == [99]
            assert out.logprobs.item() == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("words", [4, 6])
def test_a_masked_token_is_never_drawn(device, impl, words):
    """Bits beyond V, and whole words beyond them, allow nothing."""
    copies = 20
    logits = (integers(-4, 5, 4, 100, seed=2, device=device) / 4).repeat(copies, 1)
    mask = torch.zeros(4, words, dtype=torch.int32, device=device)
    mask[0, 1] = 2
    mask[1, 3:], mask[1, 0] = -1, -(2**31)
    mask[2, 3] = -16  # ids 100 .. 127 alone
    mask[3] = -1
    allowed = [{33}, {31, 96, 97, 98, 99}, {-1}, set(range(100))]
    arguments = {"seed": torch.arange(4 * copies, device=device), "allowed_tokens": mask.repeat(copies, 1)}
    for filters in ({}, {"top_k": 60}, {"temperature": 0.0}):
        out = nl.sample_logits(logits, logprobs=True, impl=impl, **arguments, **filters)
        tokens, logprobs, raw_logprobs = (part.view(copies, 4) for part in out[:3])
        for row, ids in enumerate(allowed):
            assert set(tokens[:, row].tolist()) <= ids
        if filters != {"temperature": 0.0}:
            assert set(tokens[:, 1].tolist()) == allowed[1]
        torch.testing.assert_close(logprobs[:, 0], torch.zeros(copies, device=device), rtol=0, atol=1e-5)
        raw = logits.log_softmax(-1).gather(1, out.tokens.clamp(min=0)[:, None]).view(copies, 4)
        torch.testing.assert_close(raw_logprobs[:, [0, 1, 3]], raw[:, [0, 1, 3]], rtol=0, atol=1e-5)
    one = nl.sample_logits(logits, seed=3, allowed_tokens=mask[0], impl=impl)
    assert one.tokens.tolist() == [33] * (4 * copies)


def test_e13_empty_and_trivial_sizes(device, impl):
    weight = torch.ones(5, 16, device=device)
    empty = nl.sample(torch.zeros(0, 16, device=device), weight, logprobs=True, impl=impl)
    assert [tuple(part.shape) for part in empty[:4]] == [(0,)] * 4
    assert empty.tokens.dtype == torch.int64
    assert nl.filter_logits(torch.zeros(0, 7, device=device), top_k=2).shape == (0, 7)
    assert nl.select(torch.zeros(0, 7, device=device), top_k=2, impl=impl).ids.shape == (0, 2)
    hidden, weight = torch.ones(2, 1, device=device), torch.ones(1, 1, device=device)
    out = nl.sample(hidden, weight, logprobs=True, impl=impl)
    assert out.tokens.tolist() == [0, 0]
    assert out.logprobs.tolist() == pytest.approx([0, 0], abs=1e-6)
    assert out.log_mass.tolist() == pytest.approx([1, 1], abs=1e-6)
    assert nl.sample(hidden, weight, top_k=1, top_p=0.1, impl=impl).tokens.tolist() == [0, 0]
    none = nl.sample(hidden, weight, impl=impl, num_samples=0, logprobs=True)
    assert (none.tokens.shape, none.tokens.dtype) == ((2, 0), torch.int64)
    assert nl.sample(hidden, weight, impl=impl, num_samples=3).tokens.shape == (2, 3)


def test_results_have_the_documented_shapes(device, impl):
    logits = torch.randn(3, 70, device=device)
    for mode, present in ((False, (0, 0, 0)), ("processed", (1, 0, 1)), ("raw", (0, 1, 0)), (True, (1, 1, 1))):
        for filters in ({}, {"top_k": 3}):
            out = nl.sample_logits(logits, logprobs=mode, seed=1, impl=impl, **filters)
            assert tuple(int(part is not None) for part in out[1:4]) == present
            for part in out[1:4]:
                assert part is None or (part.shape == (3,) and part.dtype == torch.float32)
            several = nl.sample_logits(logits, logprobs=mode, seed=1, num_samples=2, impl=impl, **filters)
            assert several.tokens.shape == (3, 2)
            assert several.logprobs is None or several.logprobs.shape == (3, 2)
            assert several.log_mass is None or several.log_mass.shape == (3,)
            # The first of several draws is the single one.
            assert torch.equal(several.tokens[:, 0], out.tokens)


@pytest.mark.parametrize("filters", [{}, {"top_k": 40, "top_p": 0.9}], ids=str)
def test_draws_of_a_row_are_the_single_draws_samples(device, impl, filters):
    """Sample s of one call draws word s of the counter: the reference's scores, drawn by hand."""
    from nologits import noise

    logits = torch.randn(2, 200, generator=torch.Generator().manual_seed(0)).to(device)
    keys, positions = torch.tensor([3, 4], device=device), torch.tensor([7, 8], device=device)
    got = nl.sample_logits(logits, seed=keys, position=positions, num_samples=6, temperature=1.5, impl=impl, **filters).tokens
    kept = nl.filter_logits(logits, temperature=1.5, **filters)
    for s in range(6):
        scores = kept + 1.5 * noise.gumbel_noise(keys, positions, 0, 200, s)
        assert torch.equal(got[:, s], scores.argmax(-1))
    assert len(set(got.flatten().tolist())) > 6


def test_inputs_are_never_written_to(device, impl):
    hidden, weight = integers(-3, 4, 3, 48, seed=1, device=device), integers(-3, 4, 150, 48, seed=2, device=device)
    tensors = dict(
        bias=integers(-3, 4, 150, seed=3, device=device), temperature=torch.tensor([0.0, 1.0, 2.0], device=device),
        top_k=torch.tensor([5, 0, 30], device=device), top_p=torch.tensor([0.9, 1.0, 0.5], device=device).double(),
        min_p=torch.tensor([0.0, 0.1, 0.0], device=device), seed=torch.tensor([1, -1, 3], device=device),
        position=torch.arange(3, device=device), logit_bias=integers(-3, 4, 3, 150, seed=4, device=device),
        allowed_tokens=torch.full((3, 5), -2, dtype=torch.int32, device=device),
    )  # fmt: skip
    before = {name: value.clone() for name, value in (tensors | {"hidden": hidden, "weight": weight}).items()}
    nl.sample(hidden, weight, logprobs=True, num_samples=2, impl=impl, **tensors)
    unfiltered = {name: value for name, value in tensors.items() if name not in ("top_k", "top_p", "min_p")}
    nl.sample(hidden, weight, logprobs=True, num_samples=2, impl=impl, **unfiltered)
    for name, value in (tensors | {"hidden": hidden, "weight": weight}).items():
        assert torch.equal(value, before[name]), name


def test_gradients_are_not_tracked(device, impl):
    hidden = torch.randn(2, 32, device=device, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(40, 32, device=device))
    for filters in ({}, {"top_k": 3}):
        out = nl.sample(hidden, weight, seed=1, logprobs=True, impl=impl, **filters)
        assert not any(part.requires_grad for part in out[:4])


def test_temperatures_at_the_ends(device, impl):
    logits = torch.tensor([[0.0, 2.0, 1.0]], device=device)
    many, seed = logits.expand(60, -1), torch.arange(60, device=device)
    hot = nl.sample_logits(many, temperature=1e30, seed=seed, logprobs=True, impl=impl)
    assert set(hot.tokens.tolist()) == {0, 1, 2}
    torch.testing.assert_close(hot.logprobs, torch.full((60,), -math.log(3), device=device), rtol=0, atol=1e-5)
    for cold in (1e-30, 1e-6):
        assert nl.sample_logits(many, temperature=cold, seed=seed, impl=impl).tokens.tolist() == [1] * 60


@pytest.mark.parametrize(("factor", "temperature"), [(1.0, 1e-30), (1.0, 1e-40), (1e37, 1.0), (30.0, 1e-5)])
def test_log_probabilities_of_near_certain_tokens(device, impl, factor, temperature):
    """Where the temperature is below a logit's last place, the log-probability is still that of the logits."""
    logits = factor * torch.tensor([[0.0, 2.0, 1.0], [-1.0, -3.0, -2.0]], device=device)
    out = nl.sample_logits(logits, temperature=temperature, seed=1, num_samples=3, logprobs=True, impl=impl)
    assert out.tokens.tolist() == [[1] * 3, [0] * 3]
    assert torch.equal(out.logprobs, torch.zeros(2, 3, device=device))
    want = logits.amax(-1).double() / float(torch.tensor(temperature))
    torch.testing.assert_close(out.log_mass, want.float(), rtol=1e-6, atol=0)
