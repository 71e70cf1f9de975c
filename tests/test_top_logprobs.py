"""The most likely tokens beside a draw: against softmax and a sort in fp64, under every filter, bias and mask."""

import pytest
import torch

import nologits as nl
from nologits.testing import make_logits

INF, NAN = float("inf"), float("nan")
BATCH, VOCAB, DEPTH = 6, 1_000, 64
FILTERS = {
    "none": {},
    "k": {"top_k": 5},
    "p": {"top_p": 0.8},
    "min-p": {"min_p": 0.1},
    "all": {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "per row": {"top_k": torch.tensor([0, 1, 3, 50, 0, 7]), "top_p": torch.tensor([1.0, 0.5, 1.0, 0.9, 0.2, 1.0])},
}


def logits_of(family="peaked", dtype=torch.float32, device="cpu"):
    return make_logits(family, BATCH, VOCAB).to(dtype).to(device)


def on(device, values):
    return {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in values.items()}


def expected(logits, count, temperature=1.0, **filters):
    """Ids and log-probabilities from nologits' sorted kept set and from fp64 softmax over it."""
    kept = nl.select(logits, temperature=temperature, impl="reference", **filters)
    ids, values = kept.ids[:, :count], kept.logits.double() / temperature
    logprobs = values.log_softmax(-1)[:, :count]
    missing = count - ids.shape[1]
    return torch.nn.functional.pad(ids, (0, missing), value=-1), torch.nn.functional.pad(logprobs, (0, missing), value=-INF)


def check_top(top, ids, logprobs):
    assert torch.equal(top.ids, ids)
    assert top.logprobs.dtype == torch.float32
    torch.testing.assert_close(top.logprobs.double(), logprobs, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("count", [1, 20, 128])
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("family", ["peaked", "gauss", "ties", "masked"])
def test_they_are_the_first_of_the_kept_set(impl, device, family, filters, count):
    logits, asked = logits_of(family, device=device), on(device, FILTERS[filters])
    out = nl.sample_logits(logits, temperature=0.7, seed=3, logprobs="processed", top_logprobs=count, impl=impl, **asked)
    assert out.raw_top is None
    check_top(out.top, *expected(logits, count, 0.7, **asked))


def test_a_drawn_token_has_the_log_probability_that_the_list_gives_it(impl, device):
    logits = logits_of(device=device)
    out = nl.sample_logits(
        logits, top_k=20, seed=torch.arange(BATCH, device=device), logprobs="processed", top_logprobs=20, impl=impl
    )
    place = (out.top.ids == out.tokens[:, None]).int().argmax(-1, keepdim=True)
    assert torch.equal(out.top.ids.gather(1, place)[:, 0], out.tokens)
    torch.testing.assert_close(out.top.logprobs.gather(1, place)[:, 0], out.logprobs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_head_s_own_are_of_its_own_logits(impl, device, dtype):
    """Whatever the request adds, masks, tempers or filters; both lists at once, by the function and by the head."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(BATCH, DEPTH, generator=generator).to(dtype).to(device)
    weight = torch.randn(VOCAB, DEPTH, generator=generator).to(dtype).to(device) / 4
    bias = {"logit_bias": torch.randn(BATCH, VOCAB, generator=generator).to(device)}
    request = {"temperature": 0.5, "top_k": 30, "top_p": 0.9, "seed": 1, **bias}
    out = nl.sample(hidden, weight, logprobs=True, top_logprobs=10, impl=impl, **request)
    again = nl.LMHead(weight).sample(hidden, nl.SamplingParams(**request), logprobs=True, top_logprobs=10, impl=impl)
    assert all(torch.equal(a, b) for a, b in zip((*out.top, *out.raw_top), (*again.top, *again.raw_top), strict=True))
    plain = hidden.double() @ weight.double().T
    want = plain.log_softmax(-1).gather(1, out.raw_top.ids)
    torch.testing.assert_close(out.raw_top.logprobs.double(), want, rtol=1e-5, atol=1e-4)
    assert (plain.topk(10).values - plain.gather(1, out.raw_top.ids)).abs().max() < 1e-4
    biased = (plain + bias["logit_bias"].double()).float()
    ids, logprobs = expected(biased, 10, 0.5, top_k=30, top_p=0.9)
    torch.testing.assert_close(out.top.logprobs.double(), logprobs, rtol=1e-5, atol=1e-4)
    assert (out.top.ids == ids).float().mean() > 0.95


def test_masked_tokens_are_not_listed(impl, device):
    allowed = torch.zeros(BATCH, -(-VOCAB // 32), dtype=torch.int32, device=device)
    allowed[:, 3] = 0b1011
    out = nl.sample_logits(logits_of(device=device), allowed_tokens=allowed, seed=1, logprobs=True, top_logprobs=5, impl=impl)
    assert out.top.ids[:, :3].sort(-1).values.tolist() == [[96, 97, 99]] * BATCH
    assert (out.top.ids[:, 3:] == -1).all()
    assert (out.top.logprobs[:, 3:] == -INF).all()
    torch.testing.assert_close(out.top.logprobs[:, :3].exp().sum(-1), torch.ones(BATCH, device=device))
    assert (out.raw_top.ids >= 0).all()


@pytest.mark.parametrize("filters", ["none", "all"])
def test_a_greedy_row_is_certain_of_its_first(impl, device, filters):
    temperature = torch.tensor([0.0, 1.0] * (BATCH // 2), device=device)
    out = nl.sample_logits(
        logits_of("ties", device=device), temperature=temperature, seed=1, logprobs="processed", top_logprobs=4, impl=impl,
        **FILTERS[filters],
    )  # fmt: skip
    greedy = out.top.logprobs[::2]
    assert (greedy[:, 0] == 0).all()
    assert (greedy[:, 1:] == -INF).all()
    assert torch.equal(out.top.ids[::2, 0], out.tokens[::2])
    assert (out.top.logprobs[1::2, 0] < 0).all()


@pytest.mark.parametrize("filters", ["none", "all"])
def test_invalid_rows_list_nothing(impl, device, filters):
    logits = logits_of(device=device)
    logits[0, 5], logits[1] = NAN, -INF
    temperature = torch.tensor([1.0, 1.0, -1.0, NAN, 1.0, 1.0], device=device)
    out = nl.sample_logits(
        logits, temperature=temperature, seed=1, logprobs=True, top_logprobs=3, impl=impl, **FILTERS[filters]
    )
    for top in (out.top, out.raw_top):
        assert (top.ids[:4] == -1).all()
        assert top.logprobs[:4].isnan().all()
        assert (top.ids[4:] >= 0).all()


def test_short_vocabularies_and_no_rows(impl, device):
    logits = torch.tensor([[1.0, 3.0, 3.0]], device=device)
    out = nl.sample_logits(logits, seed=1, logprobs="processed", top_logprobs=5, impl=impl)
    assert out.top.ids.tolist() == [[1, 2, 0, -1, -1]]
    for asked in ({}, {"top_k": 2}):
        none = nl.sample_logits(logits[:0], logprobs=True, top_logprobs=5, impl=impl, **asked)
        assert none.top.ids.shape == none.raw_top.logprobs.shape == (0, 5)


def test_several_draws_a_row_share_one_list(impl, device):
    logits = logits_of(device=device)
    one = nl.sample_logits(logits, top_p=0.9, seed=1, logprobs=True, top_logprobs=7, impl=impl)
    several = nl.sample_logits(logits, top_p=0.9, seed=1, num_samples=3, logprobs=True, top_logprobs=7, impl=impl)
    assert torch.equal(one.top.ids, several.top.ids)
    assert torch.equal(one.raw_top.logprobs, several.raw_top.logprobs)


def test_chunks_of_the_vocabulary_do_not_show(monkeypatch):
    """Rows without filters are streamed: narrow chunks, many of them, give the list of one."""
    from nologits import streaming

    logits, lists = logits_of("ties"), []
    for elements in (1 << 20, 1):
        monkeypatch.setattr(streaming, "_CHUNK_ELEMENTS", elements)
        lists.append(nl.sample_logits(logits, seed=1, logprobs="processed", top_logprobs=128, impl="torch").top)
    assert torch.equal(lists[0].ids, lists[1].ids)
    torch.testing.assert_close(lists[0].logprobs, lists[1].logprobs, rtol=1e-6, atol=1e-6)


def test_a_list_of_the_wrong_rows_is_seen():
    """The control: the check above tells the list of another temperature, and one of other filters."""
    logits = logits_of()
    top = nl.sample_logits(logits, temperature=0.7, top_k=5, seed=3, logprobs="processed", top_logprobs=20, impl="torch").top
    for other in ({"temperature": 0.8, "top_k": 5}, {"temperature": 0.7, "top_k": 6}):
        with pytest.raises(AssertionError):
            check_top(top, *expected(logits, 20, **other))


@pytest.mark.gpu
@pytest.mark.parametrize("filters", [{}, {"top_k": 50, "top_p": 0.9}], ids=str)
def test_nothing_synchronises_on_a_gpu(impl, device, filters):
    if impl == "reference":
        pytest.skip("the specification may")
    logits, seed = logits_of(device=device), torch.arange(BATCH, device=device)

    def call():
        return nl.sample_logits(logits, seed=seed, logprobs=True, top_logprobs=5, impl=impl, **filters)

    want = call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got.top.ids, want.top.ids)


@pytest.mark.parametrize("bad", [-1, 129, 2.0, True, "5", None])
def test_a_bad_number_is_named(bad):
    with pytest.raises(ValueError, match=r"^top_logprobs must be an integer in \[0, 128\], got "):
        nl.sample_logits(logits_of(), logprobs=True, top_logprobs=bad)


def test_they_come_with_log_probabilities():
    with pytest.raises(ValueError, match=r'^logprobs must be "processed", "raw" or True with top_logprobs=5, got False$'):
        nl.sample_logits(logits_of(), top_logprobs=5)
