"""Named families of logits, for tests and benchmarks of filters.

A sampler that searches for its boundary is fast or right on some shapes of rows and not on others, so each family is a shape
that has its own reason. A family is a pure function of (batch, vocab, seed, device): rows are made on the CPU, each by a
generator of its own, so that they have the same bits on every device and at every batch size.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

VOCAB = 151_936
"""Of Qwen3: the largest vocabulary that most published numbers are about."""

SMOLLM2_VOCAB = 49_152
SMOLLM2_POSITIONS = 256
SPREAD = 2.5
COLD = 0.05


class UnavailableError(Exception):
    """A family that cannot be made here; the text is the reason."""


class Family(NamedTuple):
    """One family.

    Attributes:
        name: what it is called.
        about: what its rows look like, in a few words.
        make: ``(batch, vocab, seed, device) -> logits [batch, vocab]``.
        vocab: V where the caller has no wish.
        dtype: of the logits.
    """

    name: str
    about: str
    make: Callable[[int, int, int, torch.device | str], Tensor]
    vocab: int = VOCAB
    dtype: torch.dtype = torch.float32


def _gauss(vocab: int, generator: torch.Generator, row: int) -> Tensor:
    """One bell, as wide as the bulk of a trained model's logits: the shape that searches with a normal law in mind are made
    for, and whose nucleus(.9), a ninth of the vocabulary, is too large for any of them to hold in registers."""
    return torch.randn(vocab, generator=generator) * SPREAD


def _peaked(vocab: int, generator: torch.Generator, row: int) -> Tensor:
    """A bulk and 200 outliers above it (an eighth of a small vocabulary): nucleus(.9) about 30, like a trained model's."""
    logits = torch.randn(vocab, generator=generator) * 1.8 - 4
    outliers = min(200, -(-vocab // 8))
    ids = torch.randperm(vocab, generator=generator)[:outliers]
    logits[ids] = torch.randn(outliers, generator=generator) * 2.5 + 8
    return logits


def _flat(vocab: int, generator: torch.Generator, row: int) -> Tensor:
    """All but uniform: nucleus(.9) is nine tenths of the vocabulary, and the boundary one of many close neighbours."""
    return torch.randn(vocab, generator=generator) * 0.05


def _zipf(vocab: int, generator: torch.Generator, row: int) -> Tensor:
    """Word frequencies: the tail never ends, so mass gathers over decades of ranks."""
    share = 1 / torch.arange(1, vocab + 1, dtype=torch.float64)
    return (share / share.sum()).log().float()[torch.randperm(vocab, generator=generator)]


def _ties(vocab: int, generator: torch.Generator, row: int) -> Tensor:
    """Nine values, exact in every dtype: each boundary falls among thousands of equals."""
    return torch.randint(-4, 5, (vocab,), generator=generator).float() / 2


def _bf16(vocab: int, generator: torch.Generator, row: int) -> Tensor:
    """What a head without upcast gives: ties everywhere, most of them near the top-k boundary."""
    return (SPREAD * torch.randn(vocab, generator=generator)).bfloat16()


def _masked(vocab: int, generator: torch.Generator, row: int) -> Tensor:
    """A grammar's mask over peaked rows: one id in a hundred is left, so that statistics over a row are about -inf."""
    logits = _peaked(vocab, generator, row)
    allowed = torch.randperm(vocab, generator=generator)[: max(1, vocab // 100)]
    return torch.full_like(logits, float("-inf")).scatter_(0, allowed, logits[allowed])


def _outlier(vocab: int, generator: torch.Generator, row: int) -> Tensor:
    """One logit at 1e9, and in odd rows one at the smallest finite number: a search between minimum and maximum runs out of
    steps before it comes near any other token."""
    logits = _gauss(vocab, generator, row)
    ids = torch.randperm(vocab, generator=generator)[:2]
    logits[ids[0]] = 1e9
    if row % 2 and vocab > 1:
        logits[ids[1]] = torch.finfo(torch.float32).min
    return logits


def _cold(vocab: int, generator: torch.Generator, row: int) -> Tensor:
    """Peaked rows at a temperature of 0.05: nearly all probabilities underflow in fp32."""
    return _peaked(vocab, generator, row) / COLD


def _smollm2(batch: int, vocab: int, seed: int, device: torch.device | str) -> Tensor:
    """Positions of :data:`TEXT` in an order that the seed draws; beyond their number they come again.

    Raises:
        ValueError: another V than the model's.
        UnavailableError: the weights, or the packages that read them, are not here.
    """
    if vocab != SMOLLM2_VOCAB:
        raise ValueError(f"vocab must be {SMOLLM2_VOCAB} for smollm2, got {vocab}")
    logits = _smollm2_logits()
    order = torch.randperm(len(logits), generator=torch.Generator().manual_seed(seed))
    return logits[order[torch.arange(batch) % len(logits)]].to(device)


def smollm2_file() -> Path:
    """Where the logits of :data:`TEXT` are kept once made (50 MB): carried there, they spare a machine the model."""
    return kept_file("logits")


def kept_file(what: str) -> Path:
    """Where ``what`` SmolLM2-135M makes of :data:`TEXT` is kept."""
    cache = Path(os.environ.get("NOLOGITS_CACHE") or Path.home() / ".cache" / "nologits")
    return cache / f"smollm2-135m-{what}-{zlib.crc32(TEXT.encode()):08x}.pt"


def load_reader(path: Path, **options: Any) -> tuple[Any, Tensor]:
    """SmolLM2-135M, loaded with ``options``, and :data:`TEXT`'s ids ``[1, 256]``; what it makes of them is to go to ``path``.

    Raises:
        UnavailableError: the weights, or the packages that read them, are not here.
    """
    try:
        from ..demo.smollm2 import load

        model, tokenizer = load(**options)
    except ImportError as error:
        raise UnavailableError(f"{error}; or copy {path.name} to {path.parent}") from error
    ids = tokenizer(TEXT, return_tensors="pt").input_ids[:, :SMOLLM2_POSITIONS]
    if ids.shape[1] < SMOLLM2_POSITIONS:
        raise RuntimeError(f"TEXT must have {SMOLLM2_POSITIONS} tokens, got {ids.shape[1]}")
    return model, ids


def keep(made: object, path: Path) -> None:
    """Saves it. It appears complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}")
    torch.save(made, scratch)
    scratch.replace(path)


def _smollm2_logits() -> Tensor:
    """fp32 ``[256, 49152]``, from the file or from the model, on the CPU."""
    path = smollm2_file()
    if path.is_file():
        kept: Tensor = torch.load(path, weights_only=True, map_location="cpu")
        return kept
    model, ids = load_reader(path)
    with torch.inference_mode():
        logits: Tensor = model(ids).logits[0].float().clone()
    keep(logits, path)
    return logits


def _by_row(row: Callable[[int, torch.Generator, int], Tensor]) -> Callable[[int, int, int, torch.device | str], Tensor]:
    def make(batch: int, vocab: int, seed: int, device: torch.device | str) -> Tensor:
        generators = (torch.Generator().manual_seed((seed << 20) + index) for index in range(batch))
        return torch.stack([row(vocab, generator, index) for index, generator in enumerate(generators)]).to(device)

    return make


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("gauss", "one bell of deviation 2.5", _by_row(_gauss)),
        Family("peaked", "a bulk and 200 outliers", _by_row(_peaked)),
        Family("flat", "all but uniform", _by_row(_flat)),
        Family("zipf", "Zipf's law in random order", _by_row(_zipf)),
        Family("ties", "nine values", _by_row(_ties)),
        Family("bf16", "one bell of deviation 2.5 in bf16", _by_row(_bf16), dtype=torch.bfloat16),
        Family("masked", "peaked, all but 1% at -inf", _by_row(_masked)),
        Family("outlier", "one bell and a logit at 1e9", _by_row(_outlier)),
        Family("coldT", "peaked, over a temperature of 0.05", _by_row(_cold)),
        Family("smollm2", "SmolLM2-135M on text", _smollm2, SMOLLM2_VOCAB),
    )
}
"""By name."""


def make_logits(family: str, batch: int, vocab: int | None = None, seed: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Logits ``[B, V]`` of a family.

    Args:
        family: a name in :data:`FAMILIES`.
        batch: B, at least 1.
        vocab: V; default: the family's.
        seed: another seed, other rows.
        device: where to.

    Raises:
        ValueError: there is no such family, or it has no such V.
        UnavailableError: it cannot be made here.
    """
    if family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}")
    if batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}")
    chosen = FAMILIES[family]
    return chosen.make(batch, chosen.vocab if vocab is None else vocab, seed, device)


TEXT = """\
The harbour was quiet when the first boats came back. Marta counted nine of them from the wall and wrote the number in her
notebook, as her father had done every morning for thirty years. "One is missing," she said. The boy beside her shook his head:
the tenth had left a day later than the others, because its engine needed a new pump, and nobody expected it before Thursday.

A sampler draws the next token of a text from the probabilities that a language model gives. Most of the time a handful of
tokens share nearly all of them. At the start of a sentence, or after a word such as "and", thousands are possible. The question
is not which token is the likeliest, but how to be fair to all of them at once without reading the list twice.

def mean(values):
    total = 0.0
    for value in values:
        total += value
    return total / len(values)

Ingredients: 250 g of flour, 2 eggs, half a litre of milk, a pinch of salt. Whisk the eggs, add the milk slowly, then the flour.
Let it rest for twenty minutes. Heat a pan with a little butter and pour in just enough to cover the bottom. Turn it once. Serve
with sugar and lemon, or with cheese and ham. In 1969, 1971 and 1972 people walked on the Moon; the last of them, Eugene Cernan,
left on the 14th of December. Since then only machines have been there. Paris is the capital of France, Rome of Italy, and
Canberra, not Sydney, of Australia.
"""
"""Prose, code, lists and facts, written for this: positions where a model is sure and where it is not."""
