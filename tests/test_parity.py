"""Every implementation draws the reference's token, under every tile, batch size and slot.

Where logits are integers sums are exact and so is the equality. Elsewhere a token may differ only where rounding explains it,
which ``nologits.testing.compare_tokens`` decides and which must stay rare.
"""

import math
import random

import pytest
import torch

import nologits as nl
from nologits.dispatch import hopper_obstacle
from nologits.testing import compare_tokens

INF = math.inf


def normal(generator, *shape):
    return torch.randn(*shape, generator=generator)


def configuration(index, device, small):
    """Hidden states, head and parameters of one random kind; the same for the same index."""
    draw, generator = random.Random(index), torch.Generator().manual_seed(index)
    dtype = draw.choice([torch.float32, torch.float16, torch.bfloat16])
    large = device.type == "cuda"
    batch = draw.choice([1, 2, 5, 16, 17] if small else [1, 3, 16, 17, 64, 130] + [260] * large)
    vocab = draw.choice([33, 129, 300, 640] if small else [33, 640, 1_001, 3_000] + [32_000, 50_257] * large)
    depth = draw.choice([16, 48, 100, 256] if small else [16, 100, 256] + [1_024] * large)
    rows = draw.choice([0, 0, 28])
    hidden = normal(generator, batch, depth).to(device, dtype)
    weight = (normal(generator, vocab + rows, depth) * draw.choice([0.3, 1, 4]) / depth**0.5).to(device, dtype)
    head = nl.LMHead(
        weight,
        bias=normal(generator, vocab).to(device, dtype) if draw.random() < 0.3 else None,
        scale=draw.choice([1.0, 1.0, 0.25, 3.0]),
        softcap=draw.choice([None, None, 5.0, 30.0]),
        vocab_size=vocab,
    )
    parameters = {}
    for name, p, make in (
        ("temperature", 0.6, lambda: draw.choice([0.0, 0.3, 0.8, 1.0, 2.5])),
        ("top_k", 0.4, lambda: draw.choice([0, -1, 1, 5, 40, 10_000])),
        ("top_p", 0.4, lambda: draw.choice([0.0, 0.3, 0.9, 1.0, draw.random()])),
        ("min_p", 0.2, lambda: draw.choice([0.0, 0.02, 0.5, draw.random()])),
    ):
        if draw.random() < p:
            value = make() if draw.random() < 0.5 else torch.tensor([make() for _ in range(batch)], device=device)
            parameters[name] = value
    if draw.random() < 0.25:
        ids = torch.randint(0, vocab, (batch, 3), generator=generator)
        ids[:, 2] = -1
        parameters["logit_bias"] = ids.to(device), normal(generator, batch, 3).to(device)
    elif draw.random() < 0.25:
        parameters["logit_bias"] = normal(generator, batch, vocab).to(device)
    if draw.random() < 0.25:
        words = torch.randint(-(2**31), 2**31, (batch, -(-vocab // 32)), generator=generator)
        parameters["allowed_tokens"] = words.to(device, torch.int32)
    parameters["seed"] = draw.choice([7, torch.arange(batch, device=device) * 977])
    parameters["position"] = draw.choice([None, 3, torch.arange(batch, device=device) + 2**33])
    return hidden, head, nl.SamplingParams(**parameters)


def agree(got, want, temperature):
    """Log-probabilities of equal tokens, to fp32 rounding of logits of this size over the temperature."""
    for name in ("logprobs", "raw_logprobs"):
        a, b = getattr(got, name), getattr(want, name)
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5 / temperature, equal_nan=True)
    torch.testing.assert_close(got.log_mass, want.log_mass, rtol=2e-5, atol=2e-5 / temperature, equal_nan=True)


@pytest.mark.parametrize("name", ["torch", "triton", "hopper"])
def test_random_requests_draw_the_references_tokens(device, name, request):
    if name == "hopper" and (obstacle := hopper_obstacle(device)):
        pytest.skip(obstacle)
    small = device.type == "cpu" and name == "triton"
    if small:
        request.getfixturevalue("interpreted")
    draws = mismatches = 0
    for index in range(24 if device.type == "cuda" else 40):
        hidden, head, params = configuration(index, device, small)
        samples = 1 + index % 2
        got = head.sample(hidden, params, num_samples=samples, logprobs=True, impl=name)
        want = head.sample(hidden, params, num_samples=samples, logprobs=True, impl="reference")
        result = compare_tokens(got.tokens, hidden, head, params)
        draws, mismatches = draws + result.draws, mismatches + result.mismatches
        assert torch.equal(got.tokens == -1, want.tokens == -1)
        if torch.equal(got.tokens, want.tokens) and not crosses_a_boundary(hidden, head, params, name):
            agree(got, want, 0.3)
    assert draws > (300 if small else 1_000)
    assert mismatches < max(2, draws / 1000)


def crosses_a_boundary(hidden, head, params, name):
    """The kept sets differ by rounding, so the log-probabilities may differ by the mass of a token."""
    filters = {n: getattr(params, n) for n in ("top_k", "top_p", "min_p", "temperature", "logit_bias", "allowed_tokens")}
    counts = [head.select(hidden, impl=impl, **filters).counts for impl in (name, "reference")]
    return not torch.equal(*counts)


@pytest.fixture
def interpreted():
    from nologits.dispatch import triton_obstacle

    if triton_obstacle(torch.device("cpu")):
        pytest.skip("Triton needs a GPU or TRITON_INTERPRET=1")


def test_the_comparison_refuses_other_noise(device):
    """The control of the test above: tokens of another seed are no rounding."""
    hidden, head, params = configuration(1, device, True)  # noqa: RUF059
    other = head.sample(hidden, nl.SamplingParams(seed=1234)).tokens
    with pytest.raises(AssertionError, match="reference draws"):
        compare_tokens(other, hidden, head, nl.SamplingParams(seed=1235))


def exact_operands(device, batch, vocab, depth, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(batch + vocab)
    hidden = torch.randint(-2, 3, (batch, depth), generator=generator).to(device, dtype)
    return hidden, torch.randint(-2, 3, (vocab, depth), generator=generator).to(device, dtype)


@pytest.mark.parametrize("filters", [{}, {"top_k": 30}, {"top_p": 0.8}, {"min_p": 0.05}, {"temperature": 0.0}], ids=str)
def test_exact_logits_give_equal_results(device, impl, size, filters):
    hidden, weight = exact_operands(device, 16, size(700, 20_000), 64)
    arguments = {"temperature": 6.0, "seed": torch.arange(16, device=device), "position": 4, "logprobs": True} | filters
    got, want = (nl.sample(hidden, weight, impl=name, **arguments) for name in (impl, "reference"))
    assert torch.equal(got.tokens, want.tokens)
    for a, b in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("filters", [{}, {"top_k": 30, "top_p": 0.9}], ids=str)
def test_a_row_does_not_see_its_batch(device, impl, size, filters):
    hidden, weight = exact_operands(device, 66, size(300, 5_000), 48)
    arguments = {"temperature": 5.0, "seed": 11, "position": 2, "impl": impl} | filters
    want = nl.sample(hidden[7:8], weight, logprobs=True, **arguments)
    for batch in size((2, 15, 17, 66), (2, 15, 16, 17, 32, 33, 64, 65, 66)):
        for slot in {0, batch // 2, batch - 1}:
            block = hidden[:batch].clone()
            block[slot] = hidden[7]
            got = nl.sample(block, weight, logprobs=batch < 16, **arguments)
            assert got.tokens[slot] == want.tokens[0], (batch, slot)
            if batch < 16:
                torch.testing.assert_close(got.logprobs[slot], want.logprobs[0], rtol=1e-6, atol=1e-6)


TILES = [(128, 16, 16, 4, 1), (128, 128, 32, 8, 3), (256, 32, 64, 8, 3), (512, 16, 64, 8, 2)]


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_the_tile_changes_nothing(device, tile, monkeypatch, request):
    if device.type == "cpu":
        request.getfixturevalue("interpreted")
    from nologits import fused
    from nologits.kernels.config import TileConfig

    hidden, weight = exact_operands(device, 18, 700 if device.type == "cpu" else 9_000, 80)
    logits = (hidden.float() @ weight.float().T) / 4
    plain = {"temperature": 6.0, "seed": torch.arange(18, device=device), "logprobs": True}

    def draw(impl):
        return [
            nl.sample(hidden, weight, impl=impl, **plain),
            nl.sample(hidden, weight, impl=impl, top_k=50, **plain),
            nl.sample_logits(logits, impl=impl, **plain),
        ]

    want = draw("reference")
    used = []
    monkeypatch.setattr(fused, "config_for", lambda source: used.append(tile) or TileConfig(*tile))
    for got, exact in zip(draw("triton"), want, strict=True):
        assert torch.equal(got.tokens, exact.tokens)
        for a, b in zip(got[1:], exact[1:], strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
    assert len(used) >= 3


def test_the_chunk_changes_nothing(device, monkeypatch):
    """Streaming in chunks of 128 ids, ties across chunks included: the smaller id stays."""
    from nologits import streaming

    hidden, weight = exact_operands(device, 18, 700, 80)
    tied = torch.zeros(1, 700, device=device)
    tied[0, [130, 300, 650]] = 5
    seed = torch.arange(18, device=device)

    def draw(impl):
        return [
            nl.sample(hidden, weight, temperature=6.0, seed=seed, logprobs=True, num_samples=2, impl=impl),
            nl.sample(hidden, weight, temperature=6.0, seed=seed, logprobs=True, top_k=50, impl=impl),
            nl.sample(hidden, weight, temperature=0.0, logprobs=True, impl=impl),
            nl.sample_logits(tied, temperature=0.0, logprobs=True, impl=impl),
        ]

    want = draw("reference")
    monkeypatch.setattr(streaming, "_CHUNK_ELEMENTS", 1)
    for got, exact in zip(draw("torch"), want, strict=True):
        assert torch.equal(got.tokens, exact.tokens)
        for a, b in zip(got[1:], exact[1:], strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
    assert want[-1].tokens.item() == 130


def test_a_dropped_tile_is_seen(device, monkeypatch, request):
    """The control of the tests above: without the winners of one tile, tokens differ from the reference's."""
    if device.type == "cpu":
        request.getfixturevalue("interpreted")
    from nologits import fused
    from nologits.kernels.config import TileConfig

    launch = fused.launch_tiles

    def drop(*args, **kwargs):
        tiles = launch(*args, **kwargs)
        tiles.key[..., 2] = -(2**63)
        return tiles

    monkeypatch.setattr(fused, "launch_tiles", drop)
    monkeypatch.setattr(fused, "config_for", lambda source: TileConfig(128, 32, 32, 4, 2))
    hidden, weight = exact_operands(device, 18, 640, 32)
    seed = torch.arange(18, device=device)
    got, want = (nl.sample(hidden, weight, temperature=6.0, seed=seed, impl=name).tokens for name in ("triton", "reference"))
    lost = (want >= 256) & (want < 384)
    assert torch.equal(got != want, lost)
    assert lost.any()


def test_configurations_are_pure_and_legal():
    """A launch configuration depends on its arguments alone; tiles hold whole noise blocks of 128 ids."""
    pytest.importorskip("triton")
    from nologits.kernels.config import tile_config

    for arch in ("sm80", "sm89", "sm90", "sm100", "interpreter", "hip"):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for batch in (1, 16, 17, 64, 65, 10_000):
                config = tile_config(arch, dtype, 151_936, 4_096, batch)
                assert config == tile_config(arch, dtype, 151_936, 4_096, batch)
                assert config.BLOCK_V % 128 == 0
                for part in (config.BLOCK_V, config.BLOCK_B, config.BLOCK_D, config.num_warps):
                    assert part & (part - 1) == 0
                assert config.BLOCK_B >= 16
