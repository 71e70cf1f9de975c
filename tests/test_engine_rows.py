"""What the plugins of engines share: eligibility, counters, rows of a batch, and a step's draw. No engine is needed."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import nologits as nl
from nologits.integrations.drawing import draw
from nologits.integrations.eligibility import Counters, Request, obstacle
from nologits.integrations.rows import Batch, Keys, make_row

B, V, D = 6, 997, 32
CPU = torch.device("cpu")

REQUESTS = [
    Request(temperature=0.0, logprobs=2, top_k=3, top_p=0.5),
    Request(temperature=0.7, top_k=20, seed=3),
    Request(temperature=1.2, top_p=0.8, seed=-4, logprobs=5),
    Request(temperature=1.0, min_p=0.1, seed=2**64 - 2, logit_bias={5: 2.0, 900: -1.5}),
    Request(temperature=1.0, seed=2**63, allowed_tokens=[1, 31, 32, 63, 996]),
    Request(temperature=0.9, seed=8, logit_bias={7: 50.0}),
]
POSITIONS = np.array([0, 1, 2**40, 3, 4, 5])


@pytest.fixture
def head():
    generator = torch.Generator().manual_seed(3)
    return nl.LMHead(torch.randn(V + 27, D, generator=generator), torch.randn(V, generator=generator), 0.5, 9.0, V)


@pytest.fixture
def hidden():
    return torch.randn(B, D, generator=torch.Generator().manual_seed(4))


def batch_of(requests):
    keys = Keys(0)
    return Batch([make_row(request, V, keys) for request in requests], V, CPU)


def one_by_one(head, hidden, requests, positions, grammar=None):
    """The draws of the public function, a row at a time and from scalars."""
    for row, (request, position) in enumerate(zip(requests, positions.tolist(), strict=True)):
        bias, mask = None, np.full(-(-V // 32), -1, dtype=np.int32)
        if request.logit_bias:
            bias = torch.zeros(V)
            for token, value in request.logit_bias.items():
                bias[token] = value
        if request.allowed_tokens:
            bits = np.zeros(len(mask) * 32, dtype=np.uint8)
            bits[list(request.allowed_tokens)] = 1
            mask = np.packbits(bits, bitorder="little").view(np.int32)
        if grammar and row in grammar:
            mask = mask & grammar[row][: len(mask)]
        yield head.sample(
            hidden[row : row + 1],
            nl.SamplingParams(
                request.temperature, request.top_k, request.top_p, request.min_p, request.seed or 0, position, bias,
                torch.from_numpy(mask),
            ),
            logprobs=True,
            top_logprobs=5,
        )  # fmt: skip


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_draw_equals_rows_one_by_one(head, hidden, mode):
    drawn = draw(head, hidden, batch_of(REQUESTS), POSITIONS, None, mode)
    for row, out in enumerate(one_by_one(head, hidden, REQUESTS, POSITIONS)):
        assert drawn.tokens[row] == out.tokens == drawn.ids[row, 0]
        raw = mode == "raw_logprobs"
        if raw or REQUESTS[row].temperature:  # a greedy row tells its distribution at T = 1
            expected, top = (out.raw_logprobs, out.raw_top) if raw else (out.logprobs, out.top)
            torch.testing.assert_close(drawn.logprobs[row, :1], expected, atol=1e-5, rtol=0)
            kept = top.ids[0] >= 0
            assert torch.equal(drawn.ids[row, 1:][kept], top.ids[0][kept])
            torch.testing.assert_close(drawn.logprobs[row, 1:], top.logprobs[0], atol=1e-5, rtol=0)
    greedy = draw(head, hidden[:1], batch_of(REQUESTS[:1]), POSITIONS[:1], None, "processed_logprobs")
    torch.testing.assert_close(greedy.logprobs, drawn.logprobs[:1, :3] if mode == "processed_logprobs" else greedy.logprobs)
    assert greedy.logprobs[0, 0] < 0
    assert greedy.ranks.tolist() == [1]


def test_ranks_and_grammar(head, hidden):
    """Of the logits after the grammar's mask, as engines count them; bits beyond V mean nothing, missing words forbid."""
    grammar = {1: np.full(40, -1, dtype=np.int32), 4: np.full(40, -1, dtype=np.int32), 5: np.array([0b1011], dtype=np.int32)}
    grammar[4][0] = 0b10  # with the row's own mask: 1 of the first word
    drawn = draw(head, hidden, batch_of(REQUESTS), POSITIONS, grammar, "raw_logprobs")
    assert drawn.tokens[5] in (0, 1, 3)
    assert drawn.tokens[4] in (1, 32, 63, 996)
    logits = nl.select((hidden, head))
    for row in range(B):
        full = torch.empty(V)
        full[logits.ids[row]] = logits.logits[row]
        if row == 5:
            full[[v for v in range(V) if v not in (0, 1, 3)]] = float("-inf")
        if row == 4:
            full[[v for v in range(32) if v != 1]] = float("-inf")
        token = drawn.tokens[row]
        assert drawn.ranks[row] == (full >= full[token]).sum()
        torch.testing.assert_close(drawn.logprobs[row, 0], full.log_softmax(0)[token], atol=1e-5, rtol=0)
    padded = [make_row(request, V, Keys(0)) for request in REQUESTS]
    words = np.full(-(-V // 32) + 3, -1, dtype=np.int32)
    assert Batch(padded[1:2], V, CPU).allowed({0: words}).shape == (1, -(-V // 32))


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_lists_have_no_token_twice(head, hidden, mode):
    """Where a row keeps fewer tokens than are asked for too: a dictionary of its list must not lose an entry."""
    few = [Request(seed=1, logprobs=8, allowed_tokens=[0, 2, 5]), Request(seed=2, logprobs=8, top_k=1), Request(logprobs=8)]
    grammar = {2: np.array([0b101], dtype=np.int32)}
    drawn = draw(head, hidden[:3], batch_of(few), POSITIONS[:3], grammar, mode)
    for row, kept in enumerate([3, 1, 2] if mode == "processed_logprobs" else [8, 8, 2]):
        listed, logprobs = drawn.ids[row].tolist(), drawn.logprobs[row]
        assert len(set(listed[1:])) == 8
        assert logprobs[1:].isfinite().sum() == kept
        assert listed[0] in listed[1:] or kept == 8
        assert logprobs[1 + listed[1:].index(listed[0])] == pytest.approx(logprobs[0].item(), abs=1e-5) if kept < 8 else True
        assert all(0 <= token < V for token in listed)


def test_a_row_without_a_token_gets_one_that_exists(head, hidden):
    hidden = hidden.clone()
    hidden[2] = float("nan")
    drawn = draw(head, hidden, batch_of(REQUESTS), POSITIONS, None, "raw_logprobs")
    assert drawn.tokens.min() >= 0
    assert drawn.tokens[2] == 0
    whole = draw(head, hidden[:2], batch_of(REQUESTS[:2]), POSITIONS[:2], None, "raw_logprobs")
    assert torch.equal(drawn.tokens[:2], whole.tokens)


def test_keys():
    """A sequence a seed and a replica: no two requests share noise, and a restart repeats it."""
    sequences = [[keys.next() for _ in range(100)] for keys in (Keys(0), Keys(0), Keys(1), Keys(0, 1))]
    assert sequences[0] == sequences[1]
    assert len({key for sequence in sequences[1:] for key in sequence}) == 300
    request = Request(temperature=1.0)
    keys = Keys(0)
    assert [make_row(request, V, keys).key for _ in range(3)] == sequences[0][:3]
    assert make_row(Request(seed=-4), V, keys).key == 2**64 - 4


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Request(presence_penalty=0.1), "penalties"),
        (Request(frequency_penalty=-0.1), "penalties"),
        (Request(repetition_penalty=1.1), "penalties"),
        (Request(bad_words=True), "bad words"),
        (Request(min_tokens=1), "min_tokens"),
        (Request(logprobs=-1), "more than 128 log-probabilities"),
        (Request(logprobs=129), "more than 128 log-probabilities"),
        (Request(logit_bias={V: 1.0}), "a token id outside the vocabulary"),
        (Request(allowed_tokens=[-1]), "a token id outside the vocabulary"),
        (Request(seed=-1), "a seed of more than 64 bits"),
        (Request(seed=2**64), "a seed of more than 64 bits"),
        (Request(temperature=float("inf")), "a temperature above 1e30"),
        (Request(engine_only="replay of a trace"), "replay of a trace"),
        (Request(), ""),
        (Request(0.3, 5, 0.9, 0.1, 2**64 - 2, {0: 1.0, V - 1: 2.0}, [3], True, 128), ""),
    ],
)
def test_obstacles(request_, reason):
    assert obstacle(request_, V) == reason


def test_modes_of_logprobs():
    assert obstacle(Request(logprobs=1), V, "raw_logits") == "logprobs mode raw_logits"
    assert obstacle(Request(), V, "raw_logits") == ""


def test_counters():
    counters = Counters()
    assert counters.step(3, ["penalties", "penalties"]) == ["penalties"]
    assert counters.step(2, ["penalties", "bad words"]) == ["bad words"]
    counters.error()
    assert counters.snapshot() == {"steps": 2, "taken": 5, "fallbacks": {"penalties": 3, "bad words": 1}, "errors": 1}
    counters.reset()
    assert counters.snapshot() == {"steps": 0, "taken": 0, "fallbacks": {}, "errors": 0}


def test_registration_never_raises(monkeypatch):
    """Without an engine, or with one that cannot be imported: a reason, and nothing else."""
    from nologits.integrations.vllm import plugin

    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(plugin, "_status", plugin.Status(False, ""))
    plugin.register()
    assert not plugin.status().active
    assert "vllm" in plugin.status().reason
    monkeypatch.setenv(plugin.SWITCH, "0")
    plugin.register()
    assert plugin.status().reason == "NOLOGITS_VLLM=0"


def test_split_heads_stay_off_gpus():
    from nologits.integrations.vllm import ranks

    assert ranks.device_obstacle(CPU) == ""
    assert ranks.device_obstacle(torch.device("cuda", 1)) == (
        "the head is split over tensor parallel ranks, and a sharded draw has no kernels on a GPU yet"
    )


def test_a_failed_draw_of_a_split_head_is_not_done_by_one_rank_alone():
    """Its other ranks may wait in the draw's exchange. What the library refuses, all ranks leave to the engine."""
    from nologits.integrations.vllm import plugin
    from nologits.integrations.vllm.session import Session

    def session(split):
        made = Session.__new__(Session)
        made.site = SimpleNamespace(split=split)
        return made

    plugin.reset_counters()
    lost = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        session(True).draw_failed(lost, 2)
    assert plugin.counters()["errors"] == 0
    session(True).draw_failed(ValueError("top_p must be in [0, 1], got 7"), 2, ["penalties"])
    session(False).draw_failed(lost, 1)
    told = {"steps": 2, "taken": 0, "fallbacks": {"error in nologits": 3, "penalties": 1}, "errors": 2}
    assert plugin.counters() == told
    plugin.reset_counters()
