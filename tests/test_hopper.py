"""The Hopper kernels: the same bits in every launch, the reference's tokens on inputs made to fool their bounds, no spills."""

import itertools

import pytest
import torch

import nologits as nl
from nologits.dispatch import hopper_obstacle
from nologits.testing import compare_tokens

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(hopper_obstacle(DEVICE)), reason=hopper_obstacle(DEVICE) or "-")]

V, D = 20_000, 512


def configs():
    from nologits.kernels.config import HOPPER_CONFIGS

    return HOPPER_CONFIGS


@pytest.fixture
def only_hopper(monkeypatch):
    """Fails where the portable kernels would be used."""
    from nologits import fused

    def refuse(*args, **kwargs):
        raise AssertionError("the portable kernels ran")

    monkeypatch.setattr(fused, "sample", refuse)


@pytest.fixture
def force(monkeypatch):
    """``force(config)``: every draw is launched that way; ``force(None)``: as it ships."""
    from nologits import hopper

    shipped = hopper.config_for
    return lambda config: monkeypatch.setattr(hopper, "config_for", (lambda source: config) if config else shipped)


def operands(batch, vocab=V, depth=D, dtype=torch.bfloat16, spread=5.0):
    generator = torch.Generator("cuda").manual_seed(batch)
    hidden = torch.randn(batch, depth, generator=generator, device="cuda").to(dtype)
    weight = (torch.randn(vocab, depth, generator=generator, device="cuda") * spread / depth**0.5).to(dtype)
    return hidden, weight


def bits(samples):
    return [None if part is None else part.view(torch.int64 if part.dtype == torch.int64 else torch.int32) for part in samples]


@pytest.mark.parametrize("logprobs", [False, True], ids=["plain", "logprobs"])
def test_a_row_has_the_same_bits_in_every_batch_slot_and_launch(logprobs, force, only_hopper):
    hidden, weight = operands(300)
    head = nl.LMHead(weight)

    def draw(block):
        return bits(
            head.sample(block, nl.SamplingParams(temperature=0.8, seed=1234, position=5), logprobs=logprobs, impl="hopper")
        )

    want = draw(hidden[7:8])
    for batch in (2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 256, 257, 300):
        block = hidden[:batch].clone()
        slots = {0, batch // 2, batch - 1}
        for slot in slots:
            block[slot] = hidden[7]
        launches = [None, *(config for config in configs() if config.fits(batch))]
        for config in launches:
            force(config)
            for got, exact in zip(draw(block), want, strict=True):
                assert got is None or all(torch.equal(got[slot], exact[0]) for slot in slots), (batch, config)


@pytest.mark.parametrize("batch", [1, 5, 64, 100, 128, 130, 256, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_transform_draws_the_references_tokens(batch, dtype, only_hopper):
    hidden, weight = operands(batch, 10_007, 520, dtype)
    generator = torch.Generator("cuda").manual_seed(batch)
    bias = torch.randn(10_007, generator=generator, device="cuda").to(dtype)
    mask = torch.randint(-(2**31), 2**31, (batch, 313), generator=generator, device="cuda").to(torch.int32)
    ids = torch.randint(-1, 9_900, (batch, 40), generator=generator, device="cuda")
    dense = torch.randn(batch, 9_900, generator=generator, device="cuda")
    rows = torch.arange(batch, device="cuda")
    temperature = torch.rand(batch, generator=generator, device="cuda") * 3
    temperature[::3] = 0
    heads = (nl.LMHead(weight, vocab_size=9_900), nl.LMHead(weight, bias=bias, scale=0.25, softcap=30.0, vocab_size=9_900))
    requests = (
        {"allowed_tokens": mask},
        {"logit_bias": (ids, torch.ones(batch, 40, device="cuda"))},
        {"logit_bias": dense, "allowed_tokens": mask},
        {"logit_bias": dense[0].bfloat16()},
    )
    for head, request in itertools.product(heads, requests):
        params = nl.SamplingParams(temperature=temperature, seed=rows - 1 + (rows == 0), position=rows + 2**33, **request)
        mode = True if "logit_bias" not in request else "processed"
        got = head.sample(hidden, params, logprobs=mode, impl="hopper")
        want = head.sample(hidden, params, logprobs=mode, impl="reference")
        assert compare_tokens(got.tokens, hidden, head, params).mismatches <= 1
        same = got.tokens == want.tokens
        assert torch.equal(got.tokens == -1, want.tokens == -1)
        for a, b in zip(got[1:], want[1:], strict=True):
            if a is not None:
                torch.testing.assert_close(a[same], b[same], rtol=1e-4, atol=2e-3, equal_nan=True)


FAMILIES = {
    "flat": lambda logits: torch.zeros_like(logits),
    "tied at the top": lambda logits: logits.clamp(max=logits.max() - 2),
    "one peak": lambda logits: logits.index_fill(1, torch.tensor([777], device="cuda"), 127.0),
    "ascending": lambda logits: logits.sort(dim=1).values,
    "descending": lambda logits: logits.sort(dim=1, descending=True).values,
    "huge": lambda logits: logits * 1e30,
    "mostly masked": lambda logits: logits.masked_fill(torch.rand_like(logits) > 0.01, float("-inf")),
    "nothing left": lambda logits: torch.full_like(logits, float("-inf")),
    "infinite": lambda logits: logits.index_fill(1, torch.tensor([9, 3000], device="cuda"), float("inf")),
    "one NaN": lambda logits: logits.index_fill(1, torch.tensor([2999], device="cuda"), float("nan")),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [1e-5, 0.3, 1.0, 30.0, 1e30])
def test_bounds_never_hide_the_winner(family, temperature, force, only_hopper):
    """Logits of eight rows, exact in bf16, fed through an identity; every launch, many seeds."""
    logits = (torch.randn(8, 5_000, generator=torch.Generator("cuda").manual_seed(1), device="cuda") * 4).round()
    logits = FAMILIES[family](logits).bfloat16()
    rows = torch.arange(256, device="cuda")
    eye = torch.eye(8, device="cuda", dtype=torch.bfloat16)
    # 0 * inf would be NaN in a product: infinities go in as a dense logit bias.
    finite = torch.where(logits.isfinite(), logits, 0.0)
    extra = torch.where(logits.isfinite(), 0.0, logits.float())[rows % 8]
    head = nl.LMHead(finite.T.contiguous())
    params = nl.SamplingParams(temperature=temperature, seed=rows, logit_bias=extra)
    want = nl.sample_logits(logits.float()[rows % 8], temperature=temperature, seed=rows, logprobs=True, impl="reference")
    for config in configs():
        force(config)
        got = head.sample(eye[rows % 8], params, logprobs="processed", impl="hopper")
        differ = got.tokens != want.tokens
        if differ.any():  # approximate logarithms may swap scores a rounding apart
            # Noise of 1e-5 on a logit of 12 is a dozen of its last bits: close scores are common there.
            mismatches = compare_tokens(got.tokens, eye[rows % 8], head, params).mismatches
            assert mismatches <= (8 if temperature < 1e-4 else 1)
        for a, b in ((got.logprobs, want.logprobs), (got.log_mass, want.log_mass)):
            torch.testing.assert_close(a[~differ], b[~differ], rtol=2e-5, atol=max(2e-5, 1e-6 / temperature), equal_nan=True)


def test_a_kernel_without_noise_is_seen(monkeypatch):
    """The control of the tests above."""
    from nologits.kernels import categorical_sm90

    tile_kernel = categorical_sm90.tile_kernel
    monkeypatch.setattr(
        categorical_sm90, "tile_kernel", lambda source, rows, *rest: tile_kernel(source, rows._replace(temperature=0.0), *rest)
    )
    hidden, weight = operands(64)
    head, params = nl.LMHead(weight), nl.SamplingParams(temperature=2.0, seed=torch.arange(64, device="cuda"))
    tokens = head.sample(hidden, params, impl="hopper").tokens
    with pytest.raises(AssertionError):
        assert compare_tokens(tokens, hidden, head, params).mismatches <= 1


def test_masses_summed_otherwise_are_seen():
    """The control of the bitwise test: log-probabilities summed in another order have other bits."""
    hidden, weight = operands(64)
    head, params = nl.LMHead(weight), nl.SamplingParams(seed=torch.arange(64, device="cuda"))
    hopper = head.sample(hidden, params, logprobs=True, impl="hopper")
    triton = head.sample(hidden, params, logprobs=True, impl="triton")
    assert torch.equal(hopper.tokens, triton.tokens)
    assert not torch.equal(hopper.logprobs, triton.logprobs)


@pytest.mark.parametrize("features", ["plain", "logprobs", "greedy", "everything"])
def test_no_shipped_configuration_spills(features):
    from nologits.kernels.categorical_sm90 import merge_kernel, tile_kernel
    from nologits.params import make_rows
    from nologits.sources import HiddenSource

    hidden, weight = operands(4)
    head = nl.LMHead(weight)
    params = nl.SamplingParams(temperature=0.0 if features == "greedy" else 1.0, seed=1)
    if features == "everything":
        head = nl.LMHead(weight, bias=torch.zeros(V, device="cuda"), scale=2.0, softcap=30.0)
        params = nl.SamplingParams(seed=1, allowed_tokens=torch.full((625,), -1, dtype=torch.int32, device="cuda"))
    masses = features in ("logprobs", "everything")
    rows, source = make_rows(params, 4, V, hidden.device), HiddenSource(hidden, head.spec)
    for config in configs():
        kernel = tile_kernel(source, rows, masses, features == "everything", config)
        assert kernel.spilled_bytes == 0, (config, kernel)
    assert merge_kernel(hidden.device, features == "greedy", masses, masses).spilled_bytes == 0


@pytest.mark.parametrize("batch", [1, 64, 128, 256, 1024])
@pytest.mark.parametrize("logprobs", [False, "processed"])
def test_extra_memory_is_under_one_percent_of_the_logits(batch, logprobs):
    vocab = 151_936
    hidden, weight = operands(batch, vocab, 256)
    head, params = nl.LMHead(weight), nl.SamplingParams(seed=torch.arange(batch, device="cuda").view(torch.uint64))
    head.sample(hidden, params, logprobs=logprobs, impl="hopper")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    head.sample(hidden, params, logprobs=logprobs, impl="hopper")
    torch.cuda.synchronize()
    # The allocator rounds each of up to eight tensors up to 512 bytes.
    assert torch.cuda.max_memory_allocated() - before < 0.01 * batch * vocab * 4 + 8 * 512


def test_two_streams_do_not_disturb_each_other():
    hidden, weight = operands(128)
    head, params = nl.LMHead(weight), nl.SamplingParams(seed=torch.arange(128, device="cuda"))
    want = head.sample(hidden, params, impl="hopper").tokens
    streams, drawn = [torch.cuda.Stream() for _ in range(2)], []
    torch.cuda.synchronize()
    for turn in range(40):
        with torch.cuda.stream(streams[turn % 2]):
            drawn.append(head.sample(hidden, params, impl="hopper").tokens)
    torch.cuda.synchronize()
    assert all(torch.equal(tokens, want) for tokens in drawn)


def test_what_the_kernels_cannot_take_is_drawn_all_the_same():
    """Odd row pitches, strides, fp32, fp64 biases, several draws: the portable kernels, the reference's tokens."""
    hidden, weight = operands(6, 1_001, 304)
    rows = torch.arange(6, device="cuda")
    cases = (
        (hidden[:, :300].contiguous(), weight[:, :300].contiguous(), {}),
        (hidden[:, ::2], weight[:, ::2], {}),
        (hidden[:, ::2].clone(), weight[:, :152].contiguous(), {}),
        (hidden, weight.T.contiguous().T, {}),
        (hidden.float(), weight.float(), {}),
        (hidden, weight, {"num_samples": 3}),
        (hidden, weight, {"logit_bias": torch.ones(1_001, device="cuda", dtype=torch.float64)}),
        (torch.as_strided(hidden, (6, 304), (0, 1)), weight, {}),
    )
    for h, w, extra in cases:
        got = nl.sample(h, w, seed=rows, impl="hopper", **extra).tokens
        assert torch.equal(got, nl.sample(h, w, seed=rows, impl="reference", **extra).tokens)


def test_the_c_and_python_parameters_agree():
    """Field by field: the ctypes structure against the declaration in the CUDA header."""
    import ctypes
    import re

    from nologits.kernels.categorical_sm90 import Params
    from nologits.kernels.nvrtc import SOURCES

    body = re.search(r"struct Params \{(.*?)\n\};", (SOURCES / "params.cuh").read_text(), re.S).group(1)
    kinds = {"i64": ctypes.c_int64, "int": ctypes.c_int32, "float": ctypes.c_float, "double": ctypes.c_double}
    fields = []
    for declaration in re.sub(r"//[^\n]*", "", body).split(";"):
        kind, _, names = declaration.strip().removeprefix("const ").partition(" ")
        for name in filter(None, (n.strip() for n in names.split(","))):
            fields.append((name, ctypes.c_void_p if kind.endswith("*") else kinds[kind]))
    assert fields == list(Params._fields_)


@pytest.mark.parametrize("logprobs", [False, True], ids=["plain", "logprobs"])
@pytest.mark.parametrize("filters", [{}, {"top_k": 50}, {"top_p": 0.9}], ids=["all", "top_k", "top_p"])
def test_the_compiler_remarks_nothing(filters, logprobs, monkeypatch):
    """A call beside wgmma serialises it, which NVRTC only says in its log; ``clock()`` was one."""
    from nologits.kernels import categorical_sm90, nvrtc

    remarks = []
    monkeypatch.setattr(
        categorical_sm90, "load", lambda *arguments: remarks.append(nvrtc.load(*arguments).remarks) or nvrtc.load(*arguments)
    )
    for batch in (3, 100, 200):
        hidden, weight = operands(batch)
        nl.LMHead(weight).sample(hidden, nl.SamplingParams(seed=1, **filters), logprobs=logprobs, impl="hopper")
    assert len(remarks) >= 6
    assert set(remarks) == {""}
