"""The proof of the screen, tried: a head of 8 bits never hides the token that the reference draws, and hides nearly all others.

By the specification in torch; the kernels' tests are ``test_screen_emulated.py`` and ``test_screen_hopper.py``.
"""

import pytest
import torch

import nologits as nl
from nologits.screen import make_screen, part_rows, refresh, screen_rows
from nologits.testing import UnavailableError, screened_draw, smollm2_states

V, D, B = 1_500, 96, 48
INF, NAN = float("inf"), float("nan")


def gauss(generator):
    return torch.randn(B, D, generator=generator), torch.randn(V, D, generator=generator) * 5 / D**0.5


def outliers(generator):
    hidden, weight = gauss(generator)
    weight[::7, 3] *= 40
    hidden[:, 5] *= 300
    return hidden, weight


def norms(generator):
    hidden, weight = gauss(generator)
    return hidden * torch.logspace(-6, 6, B)[:, None], weight * torch.logspace(-3, 0.5, V)[:, None]


def twins(generator):
    hidden, weight = gauss(generator)
    return hidden, weight[torch.randint(V // 4, (V,), generator=generator)]


def zeros(generator):
    hidden, weight = gauss(generator)
    weight[::3], hidden[::5] = 0, 0
    return hidden, weight


def denormals(generator):
    hidden, weight = gauss(generator)
    weight[::2] *= 1e-39
    hidden[::2] *= 1e-39
    return hidden, weight


def huge(generator):
    hidden, weight = gauss(generator)
    weight[::5] *= 1e18
    hidden[::3] *= 1e20
    return hidden, weight


def not_finite(generator):
    hidden, weight = gauss(generator)
    hidden[3, 7], hidden[5, 0], hidden[6] = INF, NAN, -INF
    weight[11, 2], weight[12] = INF, -INF
    return hidden, weight


def aligned(generator):
    """Hidden states along the quantisation error of a token, which is where a product is furthest from its middle."""
    _, weight = gauss(generator)
    weight = weight.bfloat16().float()
    screen = make_screen(weight)
    error = weight - screen.scales[:V, None] * screen.weight
    return torch.nn.functional.normalize(error[:B]) * 8, weight


def near_ties(generator):
    """Every token has all but the same logit in every row: the hidden states are all but one."""
    hidden, weight = gauss(generator)
    state = hidden[:1].bfloat16().float()
    weight += (10 + 0.01 * torch.randn(V, 1, generator=generator) - weight @ state.T) @ state / state.square().sum()
    return state * torch.linspace(0.5, 2, B)[:, None], weight


KINDS = {make.__name__: make for make in (
    gauss, outliers, norms, twins, zeros, denormals, huge, not_finite, aligned, near_ties
)}  # fmt: skip


def operands(kind, dtype=torch.bfloat16, seed=0):
    hidden, weight = KINDS[kind](torch.Generator().manual_seed(seed))
    return hidden.to(dtype), weight.to(dtype)


def mixed(seed=0):
    """Rows from greedy to hot, each with a seed."""
    temperature = torch.tensor([0.0, 0.02, 0.7, 1.0, 1.0, 2.0]).repeat(B // 6)
    return nl.SamplingParams(temperature, seed=torch.arange(B) + 1_000 * seed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_the_references(kind, dtype):
    for seed in range(6):
        hidden, weight = operands(kind, dtype, seed)
        head = nl.LMHead(weight)
        got = screened_draw(hidden, head, mixed(seed))
        assert torch.equal(got.tokens, head.sample(hidden, mixed(seed), impl="reference").tokens)


@pytest.mark.parametrize("kind", ["gauss", "norms", "near_ties"])
@pytest.mark.parametrize(
    "head", [{"scale": 0.3}, {"softcap": 5.0}, {"bias": True, "scale": 2.0, "softcap": 30.0}, {"vocab_size": V - 99}], ids=str
)
def test_transforms_bias_and_masks_are_monotone(kind, head):
    hidden, weight = operands(kind)
    generator = torch.Generator().manual_seed(3)
    bias = torch.randn(V, generator=generator)
    head = nl.LMHead(weight, **head | ({"bias": bias} if "bias" in head else {}))
    vocab = head.vocab_size
    allowed = torch.randint(-(2**31), 2**31, (B, -(-vocab // 32)), generator=generator).int()
    allowed[1] = 0
    for extra in (
        {},
        {"logit_bias": torch.randn(B, vocab, generator=generator)},
        {"logit_bias": (torch.tensor([[3, 1_400, -1]]), torch.tensor([[6.0, INF, 1.0]]))},
        {"allowed_tokens": allowed},
    ):
        params = nl.SamplingParams(torch.tensor([0.0, 1.0] * (B // 2)), seed=torch.arange(B), **extra)
        got = screened_draw(hidden, head, params)
        assert torch.equal(got.tokens, head.sample(hidden, params, impl="reference").tokens), list(extra)


def test_few_tokens_are_left():
    """What a screen is for: at a temperature of 1 a handful of 1,500. Rows that are not finite are the full path's."""
    counts = screened_draw(*operands_and_head("gauss"), mixed()).candidates
    assert counts.float().median() <= 8
    assert counts.max() <= 40
    counts = screened_draw(*operands_and_head("not_finite"), mixed()).candidates
    assert counts[[3, 5, 6]].tolist() == [V] * 3
    assert counts.sort().values[: B - 3].max() <= 60


def operands_and_head(kind):
    hidden, weight = operands(kind)
    return hidden, nl.LMHead(weight)


def wrong(spoil):
    """How many of a few thousand tokens are not the reference's with a screen that was spoiled."""
    count = 0
    for seed in range(10):
        hidden, weight = operands("near_ties", seed=seed)
        head, params = nl.LMHead(weight), mixed(seed)
        screen, states = spoil(weight, make_screen(weight), screen_rows(hidden))
        got = screened_draw(hidden, head, params, screen, states).tokens
        count += int((got != head.sample(hidden, params, impl="reference").tokens).sum())
    return count


def shrunk(factor):
    def spoil(weight, screen, states):
        scales = states.scales.clone()
        scales[:, 2:] *= factor
        return screen, states._replace(scales=scales)

    return spoil


def stale(weight, screen, states):
    before = weight.float() + 0.02 * torch.randn(V, D, generator=torch.Generator().manual_seed(1))
    refresh(screen, before.bfloat16())
    return screen, states


def a_row_off(weight, screen, states):
    return screen._replace(weight=screen.weight.roll(1, 0)), states


CONTROLS = {"a sixteenth of the bound": shrunk(1 / 16), "a stale screen": stale, "a row off": a_row_off}


@pytest.mark.parametrize("control", CONTROLS)
def test_controls_lose_tokens(control):
    assert wrong(lambda weight, *rest: rest) == 0
    assert wrong(CONTROLS[control]) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_every_product_lies_within_its_bound(kind):
    """In exact arithmetic, up to the rounding of fp64; and what is not finite has no bound."""
    hidden, weight = operands(kind)
    screen, states = make_screen(weight), screen_rows(hidden)
    row, rest, of_error, of_length = states.scales.double()[:, :, None].unbind(1)
    first, second = (states.parts[at].double() for at in part_rows(len(hidden), hidden.device))
    codes, scales = screen.weight.double(), screen.scales[:V].double()
    middle = (row * (first @ codes.T) + rest * (second @ codes.T)) * scales
    bound = of_error * screen.errors[:V].double() + of_length * screen.lengths[:V].double()
    finite = weight.isfinite().all(1) & hidden.isfinite().all(1)[:, None]
    off = (hidden.double() @ weight.double().T - middle).abs()
    assert (off <= bound)[finite].all()
    assert not (bound[~finite] < INF).any()
    if kind == "aligned":
        assert (off / bound)[finite].max() > 0.9


def test_a_refresh_is_a_new_screen_in_the_same_memory():
    _, weight = operands("gauss")
    screen = make_screen(weight)
    pointers = [part.data_ptr() for part in screen]
    weight = weight * -2
    refresh(screen, weight)
    assert pointers == [part.data_ptr() for part in screen]
    for got, want in zip(screen, make_screen(weight), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("request_", [{"top_k": 5}, {"min_p": torch.zeros(B)}])
def test_requests_that_no_screen_serves(request_):
    hidden, weight = operands("gauss")
    with pytest.raises(ValueError, match="params must have no filters"):
        screened_draw(hidden, nl.LMHead(weight), nl.SamplingParams(seed=1, **request_))
    with pytest.raises(ValueError, match="scale above 0"):
        screened_draw(hidden, nl.LMHead(weight, scale=-1.0), nl.SamplingParams(seed=1))


def test_smollm2_keeps_few_candidates():
    """Its head, and its hidden states on a text; random weights flatter nobody."""
    try:
        hidden, weight = smollm2_states()
    except UnavailableError as reason:
        pytest.skip(str(reason))
    hidden, head = hidden[::8], nl.LMHead(weight)
    params = nl.SamplingParams(torch.tensor([0.7, 1.0] * 16), seed=torch.arange(32))
    got = screened_draw(hidden, head, params)
    assert torch.equal(got.tokens, head.sample(hidden, params, impl="reference").tokens)
    assert got.candidates.median() <= 8
    assert got.candidates.max() <= 80
