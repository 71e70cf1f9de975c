"""The screened draw's kernels, compiled for the CPU: the tokens of exact scores, from a head of 8 bits."""

import ctypes
import functools
import platform
import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import nologits as nl
from nologits.kernels.config import HOPPER_TURNS_64
from nologits.params import make_rows
from nologits.screen import make_screen, part_rows, screen_rows
from nologits.sources import HiddenSource
from nologits.types import ScreenedRows

GXX = shutil.which("g++")
pytestmark = pytest.mark.skipif(GXX is None or platform.machine() != "x86_64", reason="needs g++ and an x86-64 processor")

TOOLS = runpy.run_path(str(Path(__file__).parent / "emulated" / "build.py"))
SOURCES = Path(nl.__file__).parent / "kernels" / "sm90"
V, D = 3_000, 192


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    """``build(defines)``: the loaded library of a kernel under these macros."""
    folder = tmp_path_factory.mktemp("emulated")
    TOOLS["copy_sources"](SOURCES, folder)
    return functools.cache(lambda defines, name="screen": TOOLS["build"](GXX, folder, defines, name))


@pytest.fixture
def draw(build, monkeypatch):
    """``draw(head, hidden, params)``: tokens; ``draw.how`` has what is shuffled, broken and seen."""
    module = TOOLS["launcher"]("categorical_sm90")
    screened = TOOLS["launcher"]("screen_sm90")
    how = SimpleNamespace(seed=0, poison=0xFF, processors=5, spoil=lambda screen, states: None, state=None, launched=[])

    def load(name, entry, threads, shared, defines, index):
        def launch(grid, arguments, device, dependent=False):
            params = next(part for part in arguments if isinstance(part, module.Params))
            how.launched.append(name)
            if name in ("categorical", "merge"):
                return launch_full(name, defines, params, grid, shared)
            library = build((*defines, ("RESCORE", 1)) if name == "rescore" else (*defines,))
            assert library.params_bytes() == ctypes.sizeof(params)
            library.launch.argtypes = [*[ctypes.c_void_p] * 4, *[ctypes.c_int] * 3, ctypes.c_ulonglong, ctypes.c_int]
            first, second, operands = how.state
            failure = library.launch(
                ctypes.addressof(params), first.data_ptr(), second.data_ptr(), ctypes.addressof(operands),
                *grid, shared, how.seed, how.poison,
            )  # fmt: skip
            assert not failure, f"{name}: {failure.decode()}"

        return SimpleNamespace(launch=launch)

    def launch_full(name, defines, params, grid, shared):
        if name == "categorical":
            library = build((*defines,), "tiles")
            failure = TOOLS["launch_tiles"](library, [[params]], [how.logits], grid, shared, how.seed, how.poison)
        else:
            library = build((*defines,), "merge")
            library.launch.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_ulonglong, ctypes.c_int]
            failure = library.launch(ctypes.addressof(params), grid[0], how.seed, how.poison)
        assert not failure, f"{name}: {failure.decode()}"

    for part in (module, screened):
        monkeypatch.setattr(part, "load", load, raising=False)
        monkeypatch.setattr(part, "tensor_map", lambda *arguments: None)
    monkeypatch.setattr(module, "multiprocessors", lambda device: how.processors)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def launch(head, hidden, params):
        screen, states = make_screen(head.spec.weight), screen_rows(hidden)
        how.spoil(screen, states)
        products = states.parts.double() @ screen.weight.double().T
        assert products.abs().max() < 2**31
        first, second = (products[at].int() for at in part_rows(len(hidden), hidden.device))
        weight = head.spec.weight
        operands = screened.Operands(hidden.data_ptr(), hidden.stride(0), weight.data_ptr(), weight.stride(0))
        how.state = (first, second, operands)
        how.logits = (hidden.float() @ weight.float().T).contiguous()
        rows = make_rows(params, len(hidden), head.spec.vocab_size, hidden.device)
        source = HiddenSource(hidden, head.spec)
        drawn, left = screened.launch_screened(source, screen, states, rows, HOPPER_TURNS_64)
        return drawn.tokens[:, 0], left

    launch.how = how
    return launch


def operands(batch=9, kind="gauss", seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(V, D, generator=generator) * 5 / D**0.5
    hidden = torch.randn(batch, D, generator=generator)
    if kind == "outliers":
        weight[::7, 3] *= 40
        hidden[:, 5] *= 30
    elif kind == "norms":
        weight *= torch.logspace(-3, 0.5, V)[:, None]
    elif kind == "near ties":
        state = hidden[:1].bfloat16().float()  # which has all but the same logit from every token
        weight += (10.0 + 0.01 * torch.randn(V, 1, generator=generator) - weight @ state.T) @ state / state.square().sum()
        hidden = hidden[:1]
    elif kind == "twins":
        weight = weight[torch.randint(V // 3, (V,), generator=generator)]
        weight[::11] = 0
    return weight.bfloat16(), hidden.bfloat16()


@pytest.mark.parametrize("kind", ["gauss", "outliers", "norms", "twins"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 2.0])
@pytest.mark.parametrize("batch", [9, 32, 45])
def test_tokens_are_the_references(draw, kind, temperature, batch):
    weight, hidden = operands(batch, kind)
    head, params = nl.LMHead(weight), nl.SamplingParams(temperature=temperature, seed=torch.arange(batch))
    tokens, left = draw(head, hidden, params)
    assert not left.any()
    assert torch.equal(tokens, head.sample(hidden, params, impl="reference").tokens)


def test_transforms_bias_and_masks(draw):
    weight, hidden = operands()
    generator = torch.Generator().manual_seed(4)
    allowed = torch.randint(-(2**31), 2**31, (9, -(-V // 32)), generator=generator).int()
    allowed[3] = 0
    head = nl.LMHead(weight, torch.randn(V, generator=generator) * 3, scale=0.5, softcap=8.0)
    for extra in (
        {},
        {"logit_bias": torch.randn(9, V, generator=generator)},
        {"logit_bias": (torch.tensor([[3, 2_999]]).expand(9, -1), torch.tensor([[4.0, 5.0]]).expand(9, -1))},
        {"allowed_tokens": allowed},
    ):
        params = nl.SamplingParams(temperature=0.6, seed=torch.arange(9), **extra)
        tokens, left = draw(head, hidden, params)
        assert left[0] == 0
        assert torch.equal(tokens, head.sample(hidden, params, impl="reference").tokens), list(extra)


def test_what_is_not_finite_takes_the_full_path(draw):
    weight, hidden = operands()
    hidden[1, 3], hidden[2, 7] = float("inf"), float("nan")
    weight[5, 1] = float("inf")
    params = nl.SamplingParams(seed=torch.arange(9))
    tokens, left = draw(nl.LMHead(weight), hidden, params)
    assert left.tolist() == [2, 0, 1, 1, 0, 0, 0, 0, 0, 0]
    want = nl.LMHead(weight).sample(hidden, params, impl="reference").tokens
    assert torch.equal(tokens, want)
    assert want[2] == -1


def test_more_candidates_than_there_is_room_for_take_the_full_path(draw):
    """A vocabulary of one token, many times over."""
    weight, hidden = operands()
    weight = weight[:1].expand(V, -1).repeat(3, 1)
    params = nl.SamplingParams(temperature=torch.tensor([0.0] * 3 + [1.0] * 6), seed=torch.arange(9))
    tokens, left = draw(nl.LMHead(weight), hidden, params)
    assert left[1:4].tolist() == [1, 1, 1]
    assert torch.equal(tokens, nl.LMHead(weight).sample(hidden, params, impl="reference").tokens)


def test_the_bound_holds_and_is_needed(draw):
    """Hidden states along a token's quantisation error come near the bound. The control: bounds of a sixteenth are found out,
    or lose tokens (those of the specification, which checks nothing, do: ``test_screen.py``)."""
    weight, _ = operands(seed=3)
    screen = make_screen(weight)
    error = weight.double() - screen.scales[:V, None].double() * screen.weight.double()
    hidden = torch.nn.functional.normalize(error[:64]).mul(8).bfloat16()
    states = screen_rows(hidden)
    middle = (
        states.scales[:, :1].double() * states.parts[:64].double() + states.scales[:, 1:2].double() * states.parts[64:].double()
    ) @ (screen.scales[:V, None].double() * screen.weight.double()).T
    off = (hidden.double() @ weight.double().T - middle).abs()
    bound = (
        states.scales[:, 2:3].double() * screen.errors[:V].double()
        + states.scales[:, 3:].double() * screen.lengths[:V].double()
    )
    assert (off <= bound).all()
    assert (off / bound).max() > 0.9

    hidden = hidden[:9]
    params = nl.SamplingParams(temperature=0.02, seed=torch.arange(9))
    want = nl.LMHead(weight).sample(hidden, params, impl="reference").tokens
    assert torch.equal(draw(nl.LMHead(weight), hidden, params)[0], want)

    def shrink(screen, states):
        states.scales[:, 2:] /= 16

    def stale(screen, states):
        screen.weight[:] = screen.weight.roll(1, 0)

    def count_wrong():
        wrong = 0
        for seed in range(8):
            weight, hidden = operands(seed=seed, kind="near ties")
            head, params = nl.LMHead(weight), nl.SamplingParams(temperature=0.0)
            tokens, left = draw(head, hidden, params)
            wrong += int((tokens != head.sample(hidden, params, impl="reference").tokens).sum() + left[0])
        return wrong

    assert count_wrong() == 0
    for spoil in (shrink, stale):
        draw.how.spoil = spoil
        assert count_wrong() > 0


def test_bytes_of_other_weights_are_noticed(draw):
    """Not always: where only some weights changed, another token may pass for the winner."""
    weight, hidden = operands(64)
    head, params = nl.LMHead(weight), nl.SamplingParams(seed=torch.arange(64))
    want = head.sample(hidden, params, impl="reference").tokens

    def stale(rows):
        def spoil(screen, states):
            screen.weight[:rows] = screen.weight[:rows].roll(1, 0)

        return spoil

    draw.how.spoil = stale(V)
    tokens, left = draw(head, hidden, params)
    assert left[0] >= 60
    assert (tokens != want).sum() <= 1
    draw.how.spoil = stale(V // 2)
    tokens, left = draw(head, hidden, params)
    assert 0 < left[0] < 64
    assert (tokens != want).sum() > 1


@pytest.mark.parametrize("order", [1, 2])
def test_the_order_of_threads_changes_nothing(draw, order):
    weight, hidden = operands()
    params = nl.SamplingParams(seed=torch.arange(9))
    first, _ = draw(nl.LMHead(weight), hidden, params)
    draw.how.seed, draw.how.poison, draw.how.processors = order, 0, 3
    assert torch.equal(draw(nl.LMHead(weight), hidden, params)[0], first)


class RowArguments(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("hidden", "parts", "scales", "words")]
    _fields_ += [(name, ctypes.c_int64) for name in ("stride", "pitch")]
    _fields_ += [(name, ctypes.c_int) for name in ("B", "D", "num_words", "packed")]


@pytest.mark.parametrize("batch", [6, 19, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_rows_bytes_are_the_specifications(build, dtype, batch):
    hidden = torch.randn(batch, D, generator=torch.Generator().manual_seed(0)).to(dtype)
    hidden[1] *= 1e-3
    hidden[2] = 0
    hidden[3, 7], hidden[4, 9] = float("inf"), float("nan")
    want = screen_rows(hidden)
    parts, scales = torch.zeros_like(want.parts), torch.empty(batch, 4)
    library = build((("OPERAND", '"bf16"' if dtype == torch.bfloat16 else '"f16"'),), "screen_rows")
    library.launch.argtypes = [ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_int]
    words = torch.full((sum(ScreenedRows.word_counts(batch).values()),), 7, dtype=torch.int32)
    given = RowArguments(
        hidden.data_ptr(), parts.data_ptr(), scales.data_ptr(), words.data_ptr(), hidden.stride(0), parts.stride(0),
        batch, D, len(words), ScreenedRows.packed(batch),
    )  # fmt: skip
    failure = library.launch(ctypes.addressof(given), 0, 0xFF)
    assert not failure, failure.decode()
    assert not words.any()
    finite = hidden.isfinite().all(-1)
    for at in part_rows(batch, hidden.device):
        assert torch.equal(parts[at[finite]], want.parts[at[finite]])
    torch.testing.assert_close(scales[finite], want.scales[finite], rtol=3e-7, atol=0.0)
    assert not scales[~finite, 2].isfinite().any()
    assert not want.scales[~finite, 2].isfinite().any()
