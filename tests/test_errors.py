"""Bad arguments: a ValueError that names the argument and the value, from every function that takes it, before anything runs.

Values that the host must not read (tensors) cannot raise: their rows are invalid, and only theirs.
"""

import math
import re

import pytest
import torch

import nologits as nl

B, V, D = 3, 100, 16
NAN, INF = math.nan, math.inf


@pytest.fixture
def logits(device):
    return torch.randn(B, V, generator=torch.Generator().manual_seed(0)).to(device)


@pytest.fixture
def operands(device):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(B, D, generator=generator).to(device), torch.randn(V, D, generator=generator).to(device)


def rejects(call, name, value, *, impl_note=""):
    """``call`` raises a ValueError that starts with the argument's name and ends with its value."""
    with pytest.raises(ValueError, match=rf"^{re.escape(name)}.* must .*got .*{re.escape(value)}") as caught:
        call()
    # Never a tensor's contents.
    assert "tensor(" not in str(caught.value)


SCALARS = [
    ("temperature", -1, "-1"), ("temperature", -1e-9, "-1e-09"), ("temperature", NAN, "nan"), ("temperature", INF, "inf"),
    ("temperature", 1e39, "1e+39"), ("temperature", True, "True"), ("temperature", "1", "'1'"), ("temperature", None, "None"),
    ("top_p", -0.1, "-0.1"), ("top_p", 1.0001, "1.0001"), ("top_p", NAN, "nan"), ("top_p", INF, "inf"), ("top_p", [0.5], "[0.5]"),  # noqa: E501
    ("min_p", -0.1, "-0.1"), ("min_p", 1.0001, "1.0001"), ("min_p", NAN, "nan"), ("min_p", "x", "'x'"),
    ("top_k", -2, "-2"), ("top_k", -100, "-100"), ("top_k", 2.5, "2.5"), ("top_k", 2**31, str(2**31)), ("top_k", True, "True"),
    ("seed", 2**64 - 1, str(2**64 - 1)), ("seed", -(2**63) - 1, str(-(2**63) - 1)), ("seed", 1.5, "1.5"), ("seed", "a", "'a'"),
    ("position", -1, "-1"), ("position", 2**63, str(2**63)), ("position", 0.5, "0.5"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "text"), SCALARS, ids=lambda x: str(x)[:12])
def test_scalars_out_of_range(logits, operands, name, value, text):
    rejects(lambda: nl.SamplingParams(**{name: value}), name, text)
    rejects(lambda: nl.sample_logits(logits, **{name: value}), name, text)
    rejects(lambda: nl.sample(*operands, **{name: value}), name, text)
    if name not in ("seed", "position"):
        rejects(lambda: nl.filter_logits(logits, **{name: value}), name, text)
        rejects(lambda: nl.select(logits, **{name: value}), name, text)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 0), ("temperature", 2e36), ("top_p", 0), ("top_p", 1), ("min_p", 1), ("top_k", 2**31 - 1), ("seed", 2**64 - 2),  # noqa: E501
     ("seed", -(2**63)), ("position", 2**63 - 1)],
)  # fmt: skip
def test_the_ends_of_the_ranges_are_allowed(logits, impl, name, value):
    assert (nl.sample_logits(logits, impl=impl, **{name: value}).tokens >= 0).all()


ROW_TENSORS = ("temperature", "top_k", "top_p", "min_p", "seed", "position")


@pytest.mark.parametrize("name", ROW_TENSORS)
def test_row_tensors_of_the_wrong_shape_dtype_or_device(logits, operands, device, name):
    integer = name in ("top_k", "seed", "position")
    dtype = torch.int64 if integer else torch.float32
    calls = (
        lambda value: nl.sample_logits(logits, **{name: value}),
        lambda value: nl.sample(*operands, **{name: value}),
    )
    if name not in ("seed", "position"):
        calls += (lambda v: nl.filter_logits(logits, **{name: v}), lambda v: nl.select(logits, **{name: v}))
    for call in calls:
        for shape in ((B + 1,), (1,), (0,), (B, 1), ()):
            rejects(lambda s=shape: call(torch.zeros(s, dtype=dtype, device=device)), name, str(list(shape)))  # noqa: B023
        for wrong in (torch.float32, torch.bool, torch.uint8) if integer else (torch.int64, torch.bool):
            rejects(lambda w=wrong: call(torch.zeros(B, dtype=w, device=device)), name, str(wrong))  # noqa: B023
        rejects(lambda: call(torch.zeros(B, dtype=dtype, device="meta")), name, "meta")  # noqa: B023


@pytest.mark.parametrize(
    ("value", "text"), [(-1, "-1"), (1.5, "1.5"), (2**24, str(2**24)), (True, "True"), (torch.tensor(2), "")], ids=str
)
def test_num_samples(logits, operands, value, text):
    rejects(lambda: nl.sample_logits(logits, num_samples=value), "num_samples", text)
    rejects(lambda: nl.sample(*operands, num_samples=value), "num_samples", text)


@pytest.mark.parametrize("mode", ["both", "Processed", None, 1, 0, 2.0, []], ids=repr)
def test_logprobs_mode(logits, operands, mode):
    rejects(lambda: nl.sample_logits(logits, logprobs=mode), "logprobs", repr(mode))
    rejects(lambda: nl.sample(*operands, logprobs=mode), "logprobs", repr(mode))


@pytest.mark.parametrize("name", ["cuda", "Triton", "", "hopper-2"])
def test_unknown_implementations(logits, operands, name):
    rejects(lambda: nl.sample_logits(logits, impl=name), "impl", repr(name))
    rejects(lambda: nl.sample(*operands, impl=name), "impl", repr(name))
    rejects(lambda: nl.select(logits, impl=name), "impl", repr(name))


def test_a_named_implementation_never_falls_back(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    rejects(lambda: nl.sample_logits(torch.zeros(1, 9), impl="triton"), "impl='triton'", "cpu")


@pytest.mark.parametrize("shape", [(V,), (), (1, B, V), (B, 0)], ids=str)
def test_logits_of_the_wrong_shape(device, shape):
    wrong = torch.zeros(shape, device=device)
    for call in (nl.sample_logits, nl.filter_logits, nl.select):
        rejects(lambda: call(wrong), "logits", str(list(shape)))  # noqa: B023


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float64, torch.float8_e4m3fn], ids=str)
def test_unsupported_dtypes(device, operands, dtype):
    hidden, weight = operands
    wrong = torch.zeros(V, D, device=device).to(dtype)
    for call in (nl.sample_logits, nl.filter_logits, nl.select):
        rejects(lambda: call(wrong), "logits", str(dtype))  # noqa: B023
    rejects(lambda: nl.sample(hidden, wrong), "weight", str(dtype))
    rejects(lambda: nl.LMHead(wrong), "weight", str(dtype))
    rejects(lambda: nl.sample(wrong, weight), "hidden", str(dtype))
    rejects(lambda: nl.LMHead(weight, bias=torch.zeros(V, device=device).to(dtype)), "bias", str(dtype))


def test_a_quantised_weight_is_told_what_to_do(device):
    with pytest.raises(ValueError, match="dequantise"):
        nl.LMHead(torch.zeros(V, D, dtype=torch.int8, device=device))


@pytest.mark.parametrize("wrong", [[[1.0, 2.0]], None, 3, "x"], ids=repr)
def test_things_that_are_no_tensors(operands, wrong):
    hidden, weight = operands
    for call in (nl.sample_logits, nl.filter_logits, nl.select):
        rejects(lambda: call(wrong), "logits", type(wrong).__name__)  # noqa: B023
    rejects(lambda: nl.sample(wrong, weight), "hidden", type(wrong).__name__)
    rejects(lambda: nl.sample(hidden, wrong), "weight", type(wrong).__name__)


def test_too_many_columns(device):
    wide = torch.zeros(1, 1, device=device).expand(1, 2**22 + 1)
    for call in (nl.sample_logits, nl.filter_logits, nl.select):
        rejects(lambda: call(wide), "logits", str(2**22 + 1))  # noqa: B023


def test_hidden_that_does_not_fit_the_weight(operands, device):
    hidden, weight = operands
    for wrong in (torch.zeros(B, D + 1, device=device), torch.zeros(D, device=device), torch.zeros(1, B, D, device=device)):
        rejects(lambda: nl.sample(wrong, weight), "hidden", str(list(wrong.shape)))  # noqa: B023
        rejects(lambda: nl.select((wrong, nl.LMHead(weight))), "hidden", str(list(wrong.shape)))  # noqa: B023
    rejects(lambda: nl.sample(hidden.half(), weight), "hidden", "torch.float16")
    rejects(lambda: nl.sample(hidden.to("meta"), weight), "hidden", "meta")
    for wrong in (weight[0], weight[None]):
        rejects(lambda: nl.sample(hidden, wrong), "weight", str(list(wrong.shape)))  # noqa: B023
    rejects(lambda: nl.select((hidden, weight)), "head", "Tensor")


@pytest.mark.parametrize("value", [0, -1, V + 1, 2.0, True, "9"], ids=repr)
def test_vocab_size(operands, value):
    hidden, weight = operands
    rejects(lambda: nl.LMHead(weight, vocab_size=value), "vocab_size", repr(value))
    rejects(lambda: nl.sample(hidden, weight, vocab_size=value), "vocab_size", repr(value))


@pytest.mark.parametrize("name", ["scale", "softcap"])
@pytest.mark.parametrize("value", [NAN, INF, -INF, "1"], ids=repr)
def test_scale_and_softcap(operands, name, value):
    hidden, weight = operands
    rejects(lambda: nl.LMHead(weight, **{name: value}), name, repr(value))
    rejects(lambda: nl.sample(hidden, weight, **{name: value}), name, repr(value))


@pytest.mark.parametrize("value", [0, 0.0, -30.0])
def test_a_softcap_is_positive(operands, value):
    rejects(lambda: nl.LMHead(operands[1], softcap=value), "softcap", repr(value))


def test_bias(operands, device):
    weight = operands[1]
    for shape in ((V + 1,), (V, 1), (1,)):
        rejects(lambda s=shape: nl.LMHead(weight, bias=torch.zeros(s, device=device)), "bias", str(list(shape)))
    rejects(lambda: nl.LMHead(weight, bias=[0.0]), "bias", "list")
    rejects(lambda: nl.LMHead(weight, bias=torch.zeros(V, device="meta")), "bias", "meta")


def test_params(logits, operands):
    hidden, weight = operands
    rejects(lambda: nl.sample_logits(logits, {"top_k": 5}), "params", "dict")
    rejects(lambda: nl.LMHead(weight).sample(hidden, {"top_k": 5}), "params", "dict")


def test_logit_bias(logits, operands, device):
    ids, values = torch.zeros(B, 2, dtype=torch.int64, device=device), torch.zeros(B, 2, device=device)
    wrong = [
        (torch.zeros(V + 1, device=device), str([V + 1])),
        (torch.zeros(B + 1, V, device=device), str([B + 1, V])),
        (torch.zeros(V, dtype=torch.int64, device=device), "torch.int64"),
        (torch.zeros(V, device="meta"), "meta"),
        ((ids, values[:, :1]), str([B, 1])),
        ((ids[:2], values[:2]), str([2, 2])),
        ((ids.float(), values), "torch.float32"),
        ((ids, values.long()), "torch.int64"),
        ((ids.to("meta"), values), "meta"),
        ((ids, values.to("meta")), "meta"),
        ((ids,), "tuple"),
        ({5: 1.0}, "dict"),
    ]
    for value, text in wrong:
        rejects(lambda v=value: nl.sample_logits(logits, logit_bias=v), "logit_bias", text)
        rejects(lambda v=value: nl.sample(*operands, logit_bias=v), "logit_bias", text)
        rejects(lambda v=value: nl.select(logits, logit_bias=v), "logit_bias", text)


def test_allowed_tokens(logits, operands, device):
    wrong = [
        (torch.zeros(B, 4, dtype=torch.int64, device=device), "torch.int64"),
        (torch.ones(B, V, dtype=torch.bool, device=device), "torch.bool"),
        (torch.zeros(B, 3, dtype=torch.int32, device=device), str([B, 3])),
        (torch.zeros(B + 1, 4, dtype=torch.int32, device=device), str([B + 1, 4])),
        (torch.zeros(B, 4, dtype=torch.int32, device="meta"), "meta"),
        ([1, 2], "list"),
    ]
    for value, text in wrong:
        rejects(lambda v=value: nl.sample_logits(logits, allowed_tokens=v), "allowed_tokens", text)
        rejects(lambda v=value: nl.sample(*operands, allowed_tokens=v), "allowed_tokens", text)
        rejects(lambda v=value: nl.select(logits, allowed_tokens=v), "allowed_tokens", text)


def test_out(logits, device):
    for out, text in (
        (torch.empty(B, V + 1, device=device), str([B, V + 1])),
        (torch.empty(V, device=device), str([V])),
        (torch.empty(B, V, dtype=torch.float16, device=device), "torch.float16"),
        (torch.empty(B, V, device="meta"), "meta"),
    ):
        rejects(lambda o=out: nl.filter_logits(logits, top_k=3, out=o), "out", text)


def test_an_error_draws_nothing(logits):
    """A rejected call leaves torch's generator where it was."""
    state = torch.random.get_rng_state()
    with pytest.raises(ValueError, match="impl"):
        nl.sample_logits(logits, impl="nothing")
    with pytest.raises(ValueError, match="top_p"):
        nl.sample_logits(logits, top_p=2.0)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_temperature_that_noise_would_overflow(device, impl):
    """Refused, or as uniform as any large one: T * g must stay in fp32's range."""
    try:
        tokens = nl.sample_logits(
            torch.zeros(30, 50, device=device), temperature=3e38, seed=torch.arange(30, device=device), impl=impl
        ).tokens
    except ValueError as error:
        assert "temperature" in str(error)  # noqa: PT017
    else:
        assert len(set(tokens.tolist())) > 15


IMPOSSIBLE = {
    "temperature": [-1.0, -1e-30, NAN, INF, -INF],
    "top_p": [-0.1, 1.5, NAN, INF, -INF],
    "min_p": [-0.1, 1.5, NAN, INF, -INF],
    "top_k": [-2, -100, -(2**31), -(2**62), -(2**63)],
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
@pytest.mark.parametrize("greedy", [False, True])
def test_an_impossible_row_value_spoils_its_row_only(device, impl, name, greedy):
    """Whichever filters the row would have had, and at T = 0 for all rows too, where no filter matters."""
    if greedy and name == "temperature":
        pytest.skip("a scalar temperature and a tensor exclude each other")
    bad = IMPOSSIBLE[name]
    logits = torch.randn(len(bad) + 2, 60, generator=torch.Generator().manual_seed(2)).to(device)
    off = {"temperature": 1.0, "top_p": 0.9, "min_p": 0.01, "top_k": 20}[name]
    values = torch.tensor([off, *bad, off], device=device)
    arguments = {"seed": 3, "logprobs": True, "impl": impl} | ({"temperature": 0.0} if greedy else {})
    out = nl.sample_logits(logits, **arguments, **{name: values})
    good = torch.tensor([0, len(bad) + 1], device=device)
    solo = nl.sample_logits(logits[good], **arguments, **{name: values[good]})
    assert out.tokens.tolist()[1:-1] == [-1] * len(bad)
    for part, want in zip(out[:4], solo[:4], strict=True):
        assert torch.equal(part[good], want)
        assert part is out.tokens or part[1:-1].isnan().all()
    if name != "temperature":
        kept = nl.filter_logits(logits, **{name: values})
        assert (kept[1:-1] == -INF).all()
        assert torch.equal(kept[good], nl.filter_logits(logits[good], **{name: values[good]}))
    counts = nl.select(logits, impl=impl, **{name: values}).counts.tolist()
    assert counts[1:-1] == [0] * len(bad)
    assert min(counts[0], counts[-1]) > 0
    with pytest.raises(ValueError, match=rf"{len(bad)} invalid rows, the first 1"):
        nl.sample_logits(logits, check=True, **arguments, **{name: values})


def test_a_vocabulary_whose_masses_would_overflow_is_refused():
    with pytest.raises(ValueError, match="vocab_size must be at most 4194304, got 4194305"):
        nl.LMHead(torch.zeros(1, 1).expand(2**22 + 1, 1))
