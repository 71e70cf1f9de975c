"""The noise contract: Philox bit for bit, the frozen mapping, the map to Gumbel noise, streams."""

import ast
import functools
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

    @triton.jit
    def map_kernel(words, log_out, FAST: tl.constexpr):
        i = tl.arange(0, 256)
        tl.store(log_out + i, log2_exponential(tl.load(words + i).to(tl.uint32, bitcast=True), FAST))

    @triton.jit
    def randint_kernel(seed, out):
        i = tl.arange(0, 256)
        r0, r1, r2, r3 = tl.randint4x(seed, i)
        tl.store(out + i * 4, r0.to(tl.int64))
        tl.store(out + i * 4 + 1, r1.to(tl.int64))
        tl.store(out + i * 4 + 2, r2.to(tl.int64))
        tl.store(out + i * 4 + 3, r3.to(tl.int64))


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
    counter, key = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    answer = [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]  # Random123's kat_vectors: the digits of pi
    assert philox_ints(counter, key) == answer
    words = noise.philox4x32(tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key))
    assert [int(w) for w in words] == answer


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


EDGES = [0, 1, 2, 255, 2**23, 2**24 + 1, 2**29 - 1, 2**29, 2**29 + 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]


@needs_triton
def test_kernel_gumbel_map_at_its_edges():
    """N1 in a kernel: finite, not increasing, and the specification's map, at both ends and across the series' seam."""
    around = [2**29 + i for i in range(-60, 60)] + [i * 33_554_431 for i in range(120)]
    words = torch.tensor(sorted([*EDGES, *around, *range(3, 6)]))
    assert (len(words), int(words[-1])) == (256, 2**32 - 1)
    signed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).to(DEVICE)
    logs = torch.zeros(256, device=DEVICE)
    map_kernel[(1,)](signed, logs, FAST=fast_log(logs.device))
    gumbel = (-math.log(2) * logs - math.log(math.log(2))).cpu()
    assert gumbel.isfinite().all()
    assert (gumbel.diff() <= 2e-6).all()
    assert (gumbel - noise.gumbel_from_bits(words)).abs().max() < 1e-5


@needs_triton
def test_words_equal_randint4x():
    """Triton's own generator, for the seeds and offsets that it can express."""
    theirs = torch.zeros(256, 4, dtype=torch.int64, device=DEVICE)
    seed = 2**40 + 12345
    randint_kernel[(1,)](seed, theirs)
    theirs = theirs.cpu() & MASK
    counter = tuple(torch.arange(256) if i == 0 else torch.zeros(256).long() for i in range(4))
    words = noise.philox4x32(counter, (torch.tensor([seed & MASK]), torch.tensor([seed >> 32])))
    assert torch.equal(torch.stack(words, 1), theirs)
    for word, token in enumerate((0, 8, 64, 72)):
        ours = noise.token_words(torch.tensor([seed]), torch.tensor([0]), 0, 128)[0, token]
        assert int(theirs[0, word]) == int(ours) == word_ints(seed, 0, token)


def test_words_do_not_depend_on_the_range_asked_for():
    """N9: a shard of the vocabulary makes the words of its ids, however uneven the shards."""
    seed, position = torch.tensor([5, 6]), torch.tensor([1, 2])
    whole = noise.token_words(seed, position, 0, 700)
    for start, stop in ((0, 57), (57, 101), (101, 102), (127, 129), (130, 700), (699, 700)):
        assert torch.equal(noise.token_words(seed, position, start, stop), whole[:, start:stop])
    assert len(whole[0].unique()) > 695


def test_seeds_positions_and_samples_have_their_own_words():
    zero = torch.zeros(1, dtype=torch.int64)
    variants = [
        (zero, zero, 0, 0), (zero + 1, zero, 0, 0), (zero + 2**32, zero, 0, 0), (zero - 2, zero, 0, 0), (zero, zero + 1, 0, 0),
        (zero, zero + 2**32, 0, 0), (zero, zero, 1, 0), (zero, zero, 2**24 - 1, 0), (zero, zero, 0, 1), (zero, zero, 0, 255),
    ]  # fmt: skip
    words = [noise.token_words(seed, position, 0, 256, sample, stream) for seed, position, sample, stream in variants]
    for one, other in itertools.combinations(words, 2):
        assert (one == other).sum() == 0


def test_equal_rows_equal_their_solo_runs(impl, device, size):
    """N4: four seeds, one seed for all, and each row alone."""
    logits = torch.zeros(4, size(500, 50_000), device=device)
    seeds = torch.tensor([1111, 2222, 3333, 4444], device=device)
    together = nl.sample_logits(logits, seed=seeds, impl=impl).tokens
    assert len(set(together.tolist())) == 4
    for row in range(4):
        assert nl.sample_logits(logits[:1], seed=int(seeds[row]), impl=impl).tokens[0] == together[row]
    assert (nl.sample_logits(logits, seed=seeds[:1].expand(4), impl=impl).tokens == together[0]).all()


@pytest.mark.parametrize("slot", [0, 1, 6])
def test_a_row_does_not_see_its_neighbours(impl, device, slot):
    """N5: greedy, filtered and unseeded neighbours, at any slot."""
    logits = (torch.arange(1000, device=device) / 500).expand(7, -1)
    want = nl.sample_logits(logits[:1], temperature=0.8, seed=42, impl=impl).tokens.item()
    seed = torch.full((7,), -1, device=device)
    temperature = torch.tensor([0.0, 1.0, 0.5, 2.0, 1.0, 0.7, 0.1], device=device)
    top_k = torch.tensor([5, 0, 1, 7, -1, 3, 9], device=device)
    top_p = torch.tensor([1.0, 0.5, 0.9, 1.0, 0.1, 0.5, 1.0], device=device)
    seed[slot], temperature[slot], top_k[slot], top_p[slot] = 42, 0.8, 0, 1.0
    for filters in ({}, {"top_k": top_k}, {"top_p": top_p}, {"top_k": top_k, "top_p": top_p}):
        got = nl.sample_logits(logits, temperature=temperature, seed=seed, impl=impl, **filters).tokens
        assert got[slot].item() == want


def test_a_row_does_not_see_the_batch_size(impl, device, size):
    """N5."""
    logits = torch.arange(1000, device=device)[None] / 500
    want = nl.sample_logits(logits, temperature=0.8, seed=42, impl=impl).tokens.item()
    for batch in size((2, 15, 17, 65), (2, 15, 16, 17, 64, 65, 257)):
        got = nl.sample_logits(logits.expand(batch, -1), temperature=0.8, seed=42, impl=impl)
        assert got.tokens.tolist() == [want] * batch


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


def test_a_masked_token_never_wins(impl, device, size):
    """N3: [-inf, 0] is always id 1."""
    logits = torch.tensor([[-math.inf, 0.0]], device=device).expand(size(100, 100_000), -1)
    for filters in ({}, {"top_p": 0.9}):
        tokens = nl.sample_logits(logits, seed=torch.arange(len(logits), device=device), impl=impl, **filters).tokens
        assert (tokens == 1).all()


LOUD_SEED = 12_121_362
"""Among the first 16 million seeds the one with the smallest word at id 0, 58: noise of 18.1."""


def test_the_loudest_noise_wins_only_what_it_may(impl, device):
    """N1: it lifts a logit by 18, and -inf by nothing."""
    assert word_ints(LOUD_SEED, 0, 0) == 58
    beside = float(noise.gumbel_noise(torch.tensor([LOUD_SEED]), torch.tensor([0]), 1, 2))
    assert -1.9 < beside < 1.1
    logits = torch.zeros(4, 2, device=device)
    logits[:, 0] = torch.tensor([-math.inf, -17.0, -1e30, -20.0], device=device)
    assert nl.sample_logits(logits, seed=LOUD_SEED, position=0, impl=impl).tokens.tolist() == [1, 0, 1, 1]


def share_of(noise_of_words, level, vocab):
    """Exact share of the tail that a map from words to noise gives: V - 1 logits at ``level`` below one at 0.

    P(tail) is the mean, over the top token's noise, of 1 - F(noise - level)^(V - 1), where F counts the map's words below.
    """
    quantiles = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    threshold = -torch.log(-torch.log(quantiles)) - level
    low, high = torch.zeros(len(threshold), dtype=torch.int64), torch.full((len(threshold),), 2**32)
    for _ in range(33):  # how many words give more than the threshold; the map does not increase
        middle = (low + high) // 2
        above = noise_of_words(middle.clamp(max=2**32 - 1)).double() > threshold
        low, high = torch.where(above & (low < high), middle + 1, low), torch.where(above, high, middle)
    return float(-torch.expm1((vocab - 1) * torch.log1p(-high.double() / 2**32)).mean())


@pytest.mark.parametrize(("level", "share"), [(-18.0, 0.0019650), (-16.0, 0.014340), (-20.0, 0.00026639)])
def test_the_map_gives_the_tail_its_share(level, share):
    """N2 without a draw. The control: 24 bits of the same words, -log(-log u) with u at most 1 - 2^-24."""

    def of_24_bits(words):
        return -torch.log(-torch.log1p(-((words >> 8).double() + 1) / 2**24).clamp(max=-1e-30))

    tolerance = 0.05 if level == -20 else 0.01  # the half-step grid ends at 22.9, less than 3 above
    assert share_of(noise.gumbel_from_bits, level, 129_280) == pytest.approx(share, rel=tolerance)
    assert abs(share_of(of_24_bits, level, 129_280) / share - 1) > (0.02 if level == -16 else 0.5)


@pytest.mark.gpu
def test_the_reference_gives_the_tail_its_share():
    """N2 by draws of the specification; test_gpu.py has the kernels'."""
    rows, samples, share = 1_000, 200, 0.0019650
    logits = torch.full((1, 129_280), -18.0, device="cuda")
    logits[0, 0] = 0
    seed = torch.arange(rows, device="cuda")
    tokens = nl.sample_logits(logits.expand(rows, -1), seed=seed, num_samples=samples, impl="reference").tokens
    draws = rows * samples
    z = ((tokens != 0).sum().item() - draws * share) / math.sqrt(draws * share * (1 - share))
    assert abs(z) < 5
    assert abs(draws * (0.00016 - share) / math.sqrt(draws * share)) > 5  # what a 24-bit uniform would give


def fit(tokens, logits):
    from nologits.testing import chi_squared, count_tokens

    return chi_squared(count_tokens(tokens, len(logits)), logits.double().softmax(-1)).p_value


@pytest.mark.parametrize("temperature", [0.7, 2.0])
def test_draws_follow_the_softmax(impl, device, temperature):
    """With the controls that must not: a temperature 5 % off, and a tile that is never drawn."""
    if impl == "triton" and device.type == "cpu":
        pytest.skip("the interpreter is too slow for statistics; test_parity.py has the tokens")
    vocab, rows, samples = 300, 4_096, 10
    logits = 1.5 * temperature * torch.randn(vocab, generator=torch.Generator().manual_seed(3))
    batch, seed = logits.to(device).expand(rows, -1), torch.arange(rows, device=device)
    draw = functools.partial(nl.sample_logits, seed=seed, num_samples=samples, impl=impl)
    assert fit(draw(batch, temperature=temperature).tokens, logits / temperature) > 1e-4
    assert fit(draw(batch, temperature=1.05 * temperature).tokens, logits / temperature) < 1e-4
    dropped = batch.clone()
    dropped[:, 128:256] = -math.inf
    assert fit(draw(dropped, temperature=temperature).tokens, logits / temperature) < 1e-4


def test_filtered_draws_follow_the_kept_distribution(device):
    vocab, rows = 300, 20_000
    logits = 1.5 * torch.randn(vocab, generator=torch.Generator().manual_seed(3))
    kept = nl.filter_logits(logits[None], top_k=60, top_p=0.9)[0]
    batch, seed = logits.to(device).expand(rows, -1), torch.arange(rows, device=device)
    tokens = nl.sample_logits(batch, seed=seed, top_k=60, top_p=0.9).tokens
    assert fit(tokens, kept) > 1e-4
    assert fit(tokens, logits) < 1e-4
    assert fit(tokens, kept / 1.2) < 1e-4


def test_shards_need_the_noise_of_global_ids():
    """N9. The control: shards that number their ids from 0 share their noise, and the second never wins."""
    rows = torch.arange(30_000)
    logits = torch.cat([torch.zeros(128), torch.full((128,), -1.0)])
    share = math.exp(-1) / (1 + math.exp(-1))

    def z_of_the_second(start):
        shards = [noise.gumbel_noise(rows, rows * 0, first, first + 128) for first in (0, start)]
        best = (logits.view(2, 128) + torch.stack(shards, dim=1)).amax(-1)
        wins = (best[:, 1] > best[:, 0]).sum().item()
        return (wins - len(rows) * share) / math.sqrt(len(rows) * share * (1 - share))

    assert abs(z_of_the_second(128)) < 5
    assert z_of_the_second(0) < -50


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
