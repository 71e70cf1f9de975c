"""The noise contract: Philox bit for bit, the frozen mapping, the map to Gumbel noise, streams."""

import ast
import itertools
import math
import os
import subprocess
import sys

import pytest
import torch

import nologits as nl
from nologits import noise

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_TRITON = DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton needs a GPU or TRITON_INTERPRET=1")
MASK = 0xFFFFFFFF


if HAS_TRITON:
    import triton
    import triton.language as tl

    from nologits.kernels.arguments import fast_log
    from nologits.kernels.primitives import log2_exponential, philox

    @triton.jit
    def noise_kernel(seed_lo, seed_hi, out, reference, log_out, FAST: tl.constexpr):
        i = tl.arange(0, 256)
        c0 = i.to(tl.uint32)
        zero = c0 * 0
        w0, w1, w2, w3 = philox(c0, zero + 5, zero + 6, zero + 7, zero + seed_lo.to(tl.uint32), zero + seed_hi.to(tl.uint32))
        r0, r1, r2, r3 = tl.philox((seed_hi.to(tl.uint64) << 32) | seed_lo.to(tl.uint64), c0, zero + 5, zero + 6, zero + 7)
        for_out = out + i * 4
        tl.store(for_out, w0.to(tl.int64))
        tl.store(for_out + 1, w1.to(tl.int64))
        tl.store(for_out + 2, w2.to(tl.int64))
        tl.store(for_out + 3, w3.to(tl.int64))
        for_ref = reference + i * 4
        tl.store(for_ref, r0.to(tl.int64))
        tl.store(for_ref + 1, r1.to(tl.int64))
        tl.store(for_ref + 2, r2.to(tl.int64))
        tl.store(for_ref + 3, r3.to(tl.int64))
        tl.store(log_out + i, log2_exponential(w0, FAST))


def philox_ints(counter, key):
    """Philox4x32-10 in Python integers, written from the paper, independent of the library."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & MASK, (p0 >> 32) ^ c[3] ^ k[1], p0 & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


def word_ints(seed, position, token, sample=0):
    words = philox_ints((token & ~72, position & MASK, position >> 32, sample), (seed & MASK, (seed >> 32) & MASK))
    return words[((token >> 3) & 1) + 2 * ((token >> 6) & 1)]


def test_philox_known_answers():
    zero, ones = torch.zeros(1, dtype=torch.int64), torch.full((1,), MASK)
    assert [int(w) for w in noise.philox4x32((zero,) * 4, (zero,) * 2)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert [int(w) for w in noise.philox4x32((ones,) * 4, (ones,) * 2)] == philox_ints((MASK,) * 4, (MASK,) * 2)


def test_the_mapping_is_the_documented_one():
    seed, position = torch.tensor([7, -(2**62) - 5]), torch.tensor([3, 2**33 + 9])
    words = noise.token_words(seed, position, 100, 300, sample=2)
    for row in range(2):
        for token in (100, 101, 108, 127, 128, 136, 192, 200, 299):
            assert int(words[row, token - 100]) == word_ints(int(seed[row]), int(position[row]), token, 2)


def test_frozen_answers():
    """Version 1 for good: changing any of these is a new version of the contract."""
    seed, position = torch.tensor([0, 42, 2**63 - 1]), torch.tensor([0, 17, 2**40])
    words = noise.token_words(seed, position, 0, 128, sample=1)[:, [0, 8, 64, 72, 127]]
    assert noise.NOISE_VERSION == 1
    assert words.tolist() == FROZEN_WORDS
    torch.testing.assert_close(noise.gumbel_from_bits(words), torch.tensor(FROZEN_GUMBELS), rtol=0, atol=1e-6)


FROZEN_WORDS = [
    [768504805, 323543615, 4244168940, 2726800091, 1818397724],
    [1631907573, 2383262247, 12631001, 3772282629, 2341384469],
    [3257865796, 3159148499, 3939378373, 12633195, 2433341834],
]
FROZEN_GUMBELS = [
    [1.623797, 2.546961, -1.490054, -0.007508, 0.596802],
    [0.738211, 0.211402, 5.827573, -0.744895, 0.238538],
    [-0.351371, -0.285247, -0.912854, 5.827399, 0.179134],
]


def test_gumbel_map_is_finite_monotone_and_accurate():
    """N1: the half-step grid of the contract tops out at 22.87, ln 3 above its neighbour."""
    ends = torch.tensor([0, 1, 2**23, 2**29 - 1, 2**29, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1])
    dense = torch.linspace(0, 2**32 - 1, 1_000_000, dtype=torch.float64).long()
    words = torch.cat([ends, dense, torch.arange(2**29 - 500, 2**29 + 500)]).sort().values
    gumbel = noise.gumbel_from_bits(words)
    assert gumbel.isfinite().all()
    assert (gumbel.diff() <= 0).all()
    exact = -torch.log(-torch.log1p(-(words.double() + 0.5) / 2**32))
    assert (gumbel - exact).abs().max() < 2e-6
    top = noise.gumbel_from_bits(ends)
    assert 22.8 < top[0] < 22.9
    assert abs(float(top[0] - top[1]) - math.log(3)) < 1e-5


@needs_triton
def test_kernel_noise_equals_the_specification():
    words, theirs = (torch.zeros(256, 4, dtype=torch.int64, device=DEVICE) for _ in range(2))
    logs = torch.zeros(256, device=DEVICE)
    noise_kernel[(1,)](123456789, 987654321, words, theirs, logs, FAST=fast_log(words.device))
    words, theirs = words & MASK, theirs & MASK
    assert torch.equal(words, theirs)
    for i in (0, 1, 255):
        assert words[i].tolist() == philox_ints((i, 5, 6, 7), (123456789, 987654321))
    gumbel = -math.log(2) * logs - math.log(math.log(2))
    assert (gumbel - noise.gumbel_from_bits(words[:, 0])).abs().max() < 1e-5


def test_rows_equal_their_solo_runs(impl, device):
    """N4, N5: neighbours, slots and batch sizes leave a seeded row alone."""
    logits = (torch.arange(1000, device=device) / 500).expand(7, -1)
    want = nl.sample_logits(logits[:1], temperature=0.8, seed=42, impl=impl).tokens.item()
    for slot in (0, 1, 6):
        seed = torch.full((7,), -1, device=device)
        seed[slot] = 42
        temperature = torch.tensor([0.0, 1.0, 0.5, 2.0, 1.0, 0.7, 0.1], device=device)
        temperature[slot] = 0.8
        top_k = torch.tensor([5, 0, 1, 7, -1, 3, 9], device=device)
        top_k[slot] = 0
        got = nl.sample_logits(logits, temperature=temperature, seed=seed, top_k=top_k, impl=impl)
        assert got.tokens[slot].item() == want
    for batch in (2, 15, 16, 17, 65):
        got = nl.sample_logits(logits[:1].expand(batch, -1), temperature=0.8, seed=42, impl=impl)
        assert (got.tokens == want).all()


def test_unseeded_draws_are_fresh_and_follow_manual_seed(impl, device):
    """N6."""
    logits = torch.zeros(1, 100, device=device)

    def sequence(draws):
        torch.manual_seed(5)
        return [nl.sample_logits(logits, impl=impl).tokens.item() for _ in range(draws)]

    first = sequence(200)
    assert 75 <= len(set(first)) <= 98
    assert sum(a == b for a, b in itertools.pairwise(first)) < 15
    assert sequence(20) == first[:20]


def test_a_draw_does_not_depend_on_earlier_draws(device):
    """N8: positions 4..9 alone, in a fresh process."""
    code = (
        "import torch, nologits as nl; logits = torch.arange(1000, device={d!r})[None] / 500; "
        "print([nl.sample_logits(logits, seed=7, position=p).tokens.item() for p in range({s}, 10)])"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code.format(d=DEVICE, s=start)], capture_output=True, text=True, check=True
        ).stdout
        for start in (0, 4)
    ]
    assert ast.literal_eval(runs[0])[4:] == ast.literal_eval(runs[1])


def test_an_extreme_word_never_wins_a_masked_column(impl, device):
    """N1, N3: [-inf, 0] is always id 1, for many rows and samples."""
    logits = torch.tensor([[-math.inf, 0.0]], device=device).expand(64, -1)
    assert (nl.sample_logits(logits, seed=torch.arange(64, device=device), num_samples=20, impl=impl).tokens == 1).all()


def test_tail_share_and_its_negative_control(device):
    """N2 at a size for the CPU: V = 1,000, one logit at 0, the rest at -12."""
    vocab, level, draws = 1_000, -12.0, 10_000
    logits = torch.full((vocab,), level, device=device)
    logits[0] = 0
    share = (vocab - 1) * math.exp(level) / (1 + (vocab - 1) * math.exp(level))
    rows = torch.arange(draws, device=device)
    tokens = nl.sample_logits(logits.expand(len(rows), -1), seed=rows).tokens

    def z(tail):
        return (tail - draws * share) / math.sqrt(draws * share * (1 - share))

    assert abs(z((tokens != 0).sum().item())) < 5
    # A 16-bit uniform ends at -log(-log(1 - 2^-17)) = 11.8 < 12 and draws no tail at all: the test sees that.
    assert abs(z(0)) > 5
