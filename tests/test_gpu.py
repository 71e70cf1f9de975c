"""Claims that only a GPU can show, at the sizes of real heads: parity, memory, no synchronisation, CUDA graphs, the tail."""

import math

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import nologits as nl
from nologits import fused
from nologits.dispatch import hopper_obstacle
from nologits.integrations.drawing import draw
from nologits.integrations.eligibility import Request
from nologits.integrations.rows import Batch, Keys, make_row
from nologits.kernels.config import TileConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

V, D = 151_936, 4_096


@pytest.fixture(scope="module")
def weight():
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.empty(V, D, dtype=torch.bfloat16, device="cuda")
    yield weight.normal_(0, 5 / D**0.5, generator=generator)
    torch.cuda.empty_cache()


def hidden_of(batch, depth=D, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(batch)
    return torch.empty(batch, depth, dtype=dtype, device="cuda").normal_(generator=generator)


def rows_of(batch):
    return torch.arange(batch, device="cuda")


@pytest.fixture(params=["triton", "hopper"])
def kernels(request):
    """The implementations that run kernels."""
    if request.param == "hopper" and (obstacle := hopper_obstacle(torch.device("cuda"))):
        pytest.skip(obstacle)
    return request.param


@pytest.mark.parametrize("batch", [1, 16, 33, 64, 128, 257])
@pytest.mark.parametrize("filters", [{}, {"top_k": 50}, {"top_k": 50, "top_p": 0.9}, {"min_p": 0.05}], ids=str)
def test_tokens_equal_the_reference_at_the_size_of_a_real_head(weight, batch, filters, kernels):
    hidden, head = hidden_of(batch), nl.LMHead(weight)
    params = nl.SamplingParams(temperature=0.9, seed=rows_of(batch), position=rows_of(batch), **filters)
    exact = head.sample(hidden, params, impl="reference", logprobs=True)
    fast = head.sample(hidden, params, impl=kernels, logprobs=True)
    # Two scores within a bf16 product's fp32 rounding: about one row in ten thousand.
    assert (fast.tokens != exact.tokens).sum() <= 1
    same = fast.tokens == exact.tokens
    # Tensor cores truncate as they accumulate: D / 16 steps of 2^-23 of a logit of 20 or so.
    # That can also move one token across a filter's boundary, and the row's log-probability with it.
    for got, want in zip(fast[1:4], exact[1:4], strict=True):
        apart = (got - want).abs()[same] > D / 16 * 2.0**-23 * 20
        assert apart.sum() <= bool(filters)


@pytest.mark.parametrize("batch", [1, 64, 256])
def test_greedy_is_the_argmax(weight, batch, kernels):
    hidden = hidden_of(batch)
    exact = (hidden.double() @ weight.double().T).argmax(-1)
    assert torch.equal(nl.sample(hidden, weight, temperature=0.0, impl=kernels).tokens, exact)


def test_a_rows_bits_do_not_depend_on_batch_slot_or_tile(weight, monkeypatch, kernels):
    hidden, head = hidden_of(300), nl.LMHead(weight)
    params = dict(temperature=0.8, seed=1234, position=5)
    want = head.sample(hidden[7:8], nl.SamplingParams(**params), impl=kernels).tokens
    for batch in (2, 15, 16, 17, 64, 65, 128, 257):
        block = hidden[:batch].clone()
        for slot in {0, batch // 2, batch - 1}:
            block[slot] = hidden[7]
            assert head.sample(block, nl.SamplingParams(**params), impl=kernels).tokens[slot] == want
    for config in ((128, 16, 64, 4, 4), (128, 32, 64, 4, 3), (256, 64, 64, 8, 4), (128, 128, 64, 8, 4), (256, 16, 64, 4, 3)):
        monkeypatch.setattr(fused, "config_for", lambda source, config=config: TileConfig(*config))
        assert head.sample(hidden[7:8], nl.SamplingParams(**params), impl=kernels).tokens == want, config


@pytest.mark.parametrize("batch", [1, 256, 1024, 4096])
def test_peak_memory_is_far_under_the_logits(weight, batch, kernels):
    hidden, params = hidden_of(batch), nl.SamplingParams(seed=rows_of(batch))
    head = nl.LMHead(weight)
    head.sample(hidden, params, impl=kernels)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    head.sample(hidden, params, impl=kernels)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 0.02 * batch * V * 4


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"seed": 3, "position": 5},
        {"temperature": 0.0},
        {"top_k": 50, "top_p": 0.9, "min_p": 0.01},
        {"top_k": [5, 0, 40, 1], "top_p": [0.5, 0.9, 1.0, 0.2], "temperature": [0.0, 1.0, 0.5, 2.0]},
    ],
    ids=str,
)
def test_nothing_synchronises(parameters, kernels):
    hidden, weight = hidden_of(4, 256), torch.randn(1000, 256, device="cuda", dtype=torch.bfloat16)
    tensors = {
        name: torch.tensor(value, device="cuda") if isinstance(value, list) else value for name, value in parameters.items()
    }
    bias = (torch.tensor([[1, -1]] * 4, device="cuda"), torch.ones(4, 2, device="cuda"))
    mask = torch.full((4, 32), -1, dtype=torch.int32, device="cuda")
    calls = (
        lambda: nl.sample(hidden, weight, logprobs=True, logit_bias=bias, allowed_tokens=mask, impl=kernels, **tensors),
        lambda: nl.sample(hidden, weight, logprobs=True, allowed_tokens=mask, impl=kernels, **tensors),
        lambda: nl.sample_logits(hidden.float() @ weight.float().T, **tensors),
        lambda: nl.select((hidden, nl.LMHead(weight)), top_k=5, top_p=0.9),
        lambda: nl.filter_logits(hidden @ weight.T, top_k=5, top_p=0.9),
    )
    for call in calls:
        call()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("filters", [{}, {"top_k": 40_000}], ids=str)
def test_a_graph_draws_fresh_tokens_at_every_replay(filters):
    logits = torch.zeros(1, 50_000, device="cuda")
    graph, out = capture(lambda: nl.sample_logits(logits, **filters).tokens)
    drawn = []
    for _ in range(100):
        graph.replay()
        drawn.append(out.item())
    assert len(set(drawn)) > 90


def test_a_head_in_a_graph_draws_fresh_tokens_at_every_replay(kernels):
    hidden = torch.zeros(1, 64, device="cuda", dtype=torch.bfloat16)
    weight = torch.zeros(50_000, 64, device="cuda", dtype=torch.bfloat16)
    graph, out = capture(lambda: nl.sample(hidden, weight, impl=kernels).tokens)
    drawn = []
    for _ in range(100):
        graph.replay()
        drawn.append(out.item())
    assert len(set(drawn)) > 90


def test_a_replay_with_new_seeds_equals_the_eager_draw(kernels):
    hidden, seed = torch.zeros(3, 64, device="cuda", dtype=torch.bfloat16), rows_of(3)
    weight = torch.zeros(50_000, 64, device="cuda", dtype=torch.bfloat16)
    graph, out = capture(lambda: nl.sample(hidden, weight, seed=seed, impl=kernels).tokens)
    for start in range(0, 30, 3):
        seed.copy_(rows_of(3) + start)
        graph.replay()
        assert torch.equal(out, nl.sample_logits(torch.zeros(3, 50_000, device="cuda"), seed=seed, impl="torch").tokens)


def test_a_captured_draw_follows_the_weight(kernels):
    hidden = torch.ones(1, 304, device="cuda", dtype=torch.bfloat16)
    weight = torch.zeros(100, 304, device="cuda", dtype=torch.bfloat16)
    weight[3] = 1
    other = torch.zeros_like(weight)
    other[77] = 1
    head = nl.LMHead(weight)
    graph, out = capture(lambda: head.sample(hidden, nl.SamplingParams(temperature=0.0), impl=kernels).tokens)
    graph.replay()
    assert out.item() == 3
    weight.copy_(other)
    graph.replay()
    assert out.item() == 77
    assert head.sample(hidden, nl.SamplingParams(temperature=0.0)).tokens.item() == 77


def test_the_tail_has_its_share():
    """N2: one logit at 0, 129,279 at -18; a 24-bit uniform gives a tail of 0.00016 instead of 0.00196."""
    logits = torch.full((1, 129_280), -18.0, device="cuda")
    logits[0, 0] = 0
    for level, share in ((-18.0, 0.0019650), (-16.0, 0.014340), (-20.0, 0.00026639)):
        logits[0, 1:] = level
        rows, draws = 1000, 1_000_000
        tokens = nl.sample_logits(logits.expand(rows, -1), seed=rows_of(rows), num_samples=draws // rows).tokens
        tail = (tokens != 0).sum().item()
        z = (tail - draws * share) / math.sqrt(draws * share * (1 - share))
        assert abs(z) < 5, (level, tail / draws)


def test_the_last_rows_of_a_tensor_past_2_31_elements():
    """E5: 15,408 x 151,936 logits, rows one-hot at row % V."""
    batch = 15_408
    logits = torch.zeros(batch, V, dtype=torch.bfloat16, device="cuda")
    logits[rows_of(batch), rows_of(batch) % V] = 100
    assert torch.equal(nl.sample_logits(logits, seed=1).tokens, rows_of(batch))


def test_a_heads_tail_has_its_share(kernels):
    """N2 through the matmul: the same shares from a fused head."""
    weight = torch.full((129_280, 64), -18.0 / 64, device="cuda", dtype=torch.bfloat16)
    weight[0] = 0
    hidden = torch.ones(2_000, 64, device="cuda", dtype=torch.bfloat16)
    draws = tail = 0
    for start in range(0, 1_000_000, 2_000):
        tokens = nl.sample(hidden, weight, seed=rows_of(2_000) + start, impl=kernels).tokens
        tail, draws = tail + (tokens != 0).sum(), draws + 2_000
    share = 0.0019650
    z = (tail.item() - draws * share) / math.sqrt(draws * share * (1 - share))
    assert abs(z) < 5, tail.item() / draws


def test_the_last_row_of_a_weight_past_2_31_elements(kernels):
    weight = torch.zeros(262_145, 8_192, dtype=torch.bfloat16, device="cuda")
    weight[-1] = 0.01
    hidden = torch.ones(2, 8_192, dtype=torch.bfloat16, device="cuda")
    assert nl.sample(hidden, weight, seed=1, impl=kernels).tokens.tolist() == [262_144] * 2


@pytest.mark.parametrize("filters", [{}, {"top_k": 20}], ids=str)
def test_compiled_draws_are_the_eager_ones(kernels, filters):
    hidden, weight = hidden_of(4, 256), torch.randn(1000, 256, device="cuda", dtype=torch.bfloat16)
    seed = rows_of(4)

    @torch.compile(fullgraph=True)
    def step(x, keys):
        return nl.sample(x * 2, weight, seed=keys, logprobs=True, impl=kernels, **filters)[:2]

    eager = nl.sample(hidden * 2, weight, seed=seed, logprobs=True, impl=kernels, **filters)
    tokens, logprobs = step(hidden, seed)
    assert torch.equal(tokens, eager.tokens)
    assert torch.equal(logprobs, eager.logprobs)


def capture(call):
    """A graph of ``call`` and the tensor its replays write."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


@pytest.mark.parametrize("alike", [True, False])
def test_an_engines_steady_step_copies_nothing_and_waits_for_nothing(weight, alike):
    """The plugins' draw of the same rows, one position further: no parameter is sent; the tokens are those of a draw alone."""
    count, keys = 64, Keys(0)
    asked = [Request(temperature=0.7, top_k=20 if alike else 20 + place, top_p=0.95) for place in range(count)]
    batch = Batch([make_row(request, V, keys) for request in asked], V, weight.device)
    hidden, head = hidden_of(count), nl.LMHead(weight)
    positions = np.full(count, 7)
    draw(head, hidden, batch, positions, None, "raw_logprobs")
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        torch.cuda.set_sync_debug_mode("error")
        try:
            drawn = draw(head, hidden, batch, positions + 1, None, "raw_logprobs")
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    names = [event.name for event in seen.events()]
    assert not [name for name in names if "Memcpy HtoD" in name or "Pageable" in name or "aten::pin_memory" in name]
    assert torch.equal(drawn.tokens, head.sample(hidden, batch.params(positions + 1)).tokens)
