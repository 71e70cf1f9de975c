"""The Hopper kernel's bounds on noise, in float64: never below the noise, and close to it where it wins. No GPU needed."""

import re
from pathlib import Path

import numpy as np
import pytest

SM90 = Path(__file__).parents[1] / "src/nologits/kernels/sm90"


def constant(file, name):
    """A constant of a CUDA header: sums and differences of float literals."""
    terms = re.search(rf"constexpr float {name} = ([^;]+);", (SM90 / file).read_text()).group(1)
    return sum(float(term) for term in re.findall(r"[+-]?\d+\.\d+", terms.replace(" ", "").replace("f", "")))


def codes(words):
    """``noise_codes`` of contract.cuh: exponent and two mantissa bits of the word as fp32, rounded toward zero."""
    exact = words.astype(np.float64)
    rounded = exact.astype(np.float32)
    rounded = np.where(rounded.astype(np.float64) > exact, np.nextafter(rounded, np.float32(0)), rounded).astype(np.float32)
    return np.clip((rounded.view(np.int32) >> 21) - 504, 0, 127)


def bound(words, offset):
    """Upper bound on the noise in units of ln 2, from the byte that is kept."""
    return offset - 32 * (1 + codes(words) / 128)


def noise(words):
    """The noise contract in float64: -log2(E / ln 2)."""
    exponential = -np.log1p(-(words.astype(np.float64) + 0.5) / 2**32)
    return -np.log2(exponential / np.log(2))


@pytest.fixture(scope="module")
def words():
    edges = [np.arange(1 << 12), 2**32 - 1 - np.arange(1 << 12)]
    for exponent in range(2, 33):  # both sides of every power of two and of every quarter of an octave
        for quarter in (4, 5, 6, 7):
            edges.append(2**exponent * quarter // 8 + np.arange(-300, 300))
    random = np.random.default_rng(0).integers(0, 2**32, 1 << 22)
    every = np.concatenate([*edges, random, (2 ** np.random.default_rng(1).uniform(0, 32, 1 << 20)).astype(np.int64)])
    return np.unique(np.clip(every, 0, 2**32 - 1)).astype(np.uint32)


def test_no_bound_lies_below_its_noise(words):
    assert (bound(words, constant("contract.cuh", "BOUND_OFFSET")) - noise(words)).min() > 0.0009


def test_bounds_of_noise_that_wins_are_within_the_first_round(words):
    """One token in a hundred and fewer, down to one in 2^28: what lies near a row's best bound settles most tiles."""
    slack, size = bound(words, constant("contract.cuh", "BOUND_OFFSET")) - noise(words), noise(words)
    assert slack[(size > 6) & (size < 28)].max() < constant("tile.cuh", "FIRST_ROUND")


def test_a_smaller_offset_is_seen(words):
    """The control: the offset has nothing to give but its room for rounding."""
    offset = constant("contract.cuh", "BOUND_OFFSET")
    assert (bound(words, offset - 0.002) - noise(words)).min() < 0


def test_codes_are_bytes_that_order_the_words(words):
    every = codes(words)
    assert (every.min(), every.max()) == (0, 127)
    assert (np.diff(every) >= 0).all()
