"""Modes of the head suite with filters and top log-probabilities, as far as they go without a GPU: parameters, gate, peers."""

import math
import sys
import types
from dataclasses import replace

import pytest
import torch

import nologits as nl

pytest.importorskip("typer")
pytest.importorskip("rich")

from nologits.bench import cases, head, modes, peer_draws, peers, providers, suite, timing
from nologits.bench.gate import HeadGate, _params_of
from nologits.testing import UnavailableError, screened_draw

TINY = cases.Case("tiny", 512, 32, "a test's")
UNFILTERED = ["plain", "logprobs", "greedy"]
FILTERED = ["k50", "p90", "k50p95", "minp05", "p95"]
FALLBACKS = ["fallback0", "fallback1", "fallback100"]


def tiny_inputs(batch, mode):
    return cases.make_inputs(cases.make_weight(TINY, "cpu"), batch, mode)


def draw(inputs, **results):
    return inputs.head.sample(inputs.hidden, inputs.params, impl="torch", **results)


class TestModes:
    def test_modes_of_the_issue(self):
        assert list(modes.MODES) == [*UNFILTERED, *FILTERED, "top_logprobs20", *FALLBACKS, "screened"]
        assert {name: tuple(mode.request) for name, mode in modes.MODES.items() if mode.filtered} == {
            "k50": (50, None, None),
            "p90": (None, 0.9, None),
            "k50p95": (50, 0.95, None),
            "minp05": (None, None, 0.05),
            "p95": (None, 0.95, None),
            **dict.fromkeys(FALLBACKS, (None, 0.9, None)),
        }
        asked = {"logprobs": "processed", "top_logprobs": 20}
        assert modes.MODES["top_logprobs20"].results == asked
        assert modes.MODES["logprobs"].results == asked | {"top_logprobs": 0}
        assert modes.MODES["k50"].results == {"logprobs": False, "top_logprobs": 0}

    def test_parameters_are_tensors_of_every_row(self):
        params = tiny_inputs(3, "k50p95").params
        assert (params.top_k.dtype, params.top_k.tolist()) == (torch.int32, [50] * 3)
        assert torch.equal(params.top_p, torch.full((3,), 0.95))
        assert params.min_p is None
        assert torch.equal(tiny_inputs(3, "minp05").params.min_p, torch.full((3,), 0.05))
        for mode in ("plain", *FILTERED, "top_logprobs20"):
            assert torch.equal(tiny_inputs(3, mode).params.temperature, torch.ones(3))
        assert tiny_inputs(3, "greedy").params.temperature == 0.0

    @pytest.mark.parametrize("batch", [1, 3, 64, 256])
    def test_the_chosen_share_of_rows_is_flat(self, batch):
        for mode, count in zip(FALLBACKS, (0, {256: 3}.get(batch, 1), batch), strict=True):
            temperature = tiny_inputs(batch, mode).params.temperature
            assert sorted(temperature.tolist()) == [0.5] * (batch - count) + [20.0] * count
        spread = (tiny_inputs(256, "fallback1").params.temperature == 20).nonzero().flatten().diff()
        assert spread.tolist() == [86, 85]

    def test_a_flat_row_keeps_most_of_the_vocabulary_and_the_others_little(self):
        inputs = tiny_inputs(8, "fallback1")
        kept = nl.select((inputs.hidden, inputs.head), top_p=inputs.params.top_p, temperature=inputs.params.temperature).counts
        assert kept[0] > 0.8 * TINY.vocab
        assert int(kept[1:].max()) < 20


class TestGate:
    @pytest.mark.parametrize("mode", [*FILTERED, *FALLBACKS])
    def test_tokens_drawn_without_the_filters_are_refused(self, mode):
        """The negative control; logits close to each other, so that every filter drops some that are drawn without it."""
        inputs = tiny_inputs(64, mode)
        inputs = inputs._replace(hidden=inputs.hidden * 0.2)
        gate = HeadGate(inputs, mode)
        assert gate.check("ours", draw(inputs)) is None
        bare = replace(inputs.params, top_k=None, top_p=None, min_p=None)
        with pytest.raises(RuntimeError, match=rf"broken \({mode}\): .* of 64 tokens differ .*the filters drop it"):
            gate.check("broken", draw(inputs._replace(params=bare)))

    def test_differences_are_judged_with_the_parameters_of_their_rows(self):
        params = tiny_inputs(8, "fallback1").params
        for rows in ([0], [5, 0, 7]):
            some = _params_of(params, torch.tensor(rows))
            assert (some.seed.dtype, some.seed.tolist()) == (torch.uint64, rows)
            assert some.position.tolist() == rows
            assert some.temperature.tolist() == [0.5 if row else 20.0 for row in rows]
            assert torch.equal(some.top_p, params.top_p[: len(rows)])

    def test_wrong_top_tokens_are_refused(self):
        inputs = tiny_inputs(4, "top_logprobs20")
        gate = HeadGate(inputs, "top_logprobs20")
        right = draw(inputs, logprobs="processed", top_logprobs=20)
        ids, logprobs = right.top
        assert gate.check("ours", right) is None
        swapped = ids.clone()
        swapped[2, :2] = ids[2, [1, 0]]
        assert float(logprobs[2, 0] - logprobs[2, 1]) > 0.1
        for top, message in (
            (None, r"top log-probabilities \[4, 20\]"),
            (nl.TopTokens(ids[:, :19], logprobs[:, :19]), r"top log-probabilities \[4, 20\]"),
            (nl.TopTokens(ids, logprobs[:, :19]), r"log-probabilities \[4, 20\]"),
            (nl.TopTokens(ids, logprobs + 0.02), "a top log-probability is off by 0.02"),
            (nl.TopTokens(ids, logprobs * math.nan), "a top log-probability is off by nan"),
            (nl.TopTokens(swapped, logprobs), "2 of the top tokens are wrong"),
        ):
            with pytest.raises(RuntimeError, match=message):
                gate.check("broken", right._replace(top=top))

    def test_neighbours_that_rounding_may_swap_pass(self):
        inputs = tiny_inputs(1, "top_logprobs20")
        best = draw(inputs, logprobs="processed", top_logprobs=20).top.ids[0]
        inputs.weight[best[7]] = inputs.weight[best[6]]  # the same logit
        drawn = draw(inputs, logprobs="processed", top_logprobs=20)
        ids = drawn.top.ids.clone()
        ids[0, 6:8] = drawn.top.ids[0, [7, 6]]
        drawn = drawn._replace(top=drawn.top._replace(ids=ids))
        assert HeadGate(inputs, "top_logprobs20").check("ours", drawn) is None


class TestProviders:
    @pytest.mark.usefixtures("no_peers")
    def test_who_is_measured_in_which_modes(self, monkeypatch):
        """Peers that are not there, and kernels for another device, would run."""
        monkeypatch.setattr(peers, "_installed", lambda name: None)
        monkeypatch.setattr(torch.compiler, "reset", lambda: None)
        monkeypatch.setattr(torch, "compile", lambda function, **_options: function)
        everything = list(modes.MODES)
        assert {name: self.measured_modes(name) for name in providers.PROVIDERS} == {
            **dict.fromkeys(("matmul", "nologits-hopper"), everything),
            "nologits-triton": [mode for mode in everything if mode not in (*FALLBACKS, "screened")],
            **dict.fromkeys(("multinomial", "multinomial-compiled"), UNFILTERED),
            "flashinfer-gumbel": ["plain"],
            "flashinfer-topk-topp": ["plain"],
            "flashsampling": ["plain", "greedy"],
            "matmul-nologits": [*FILTERED, "top_logprobs20", *FALLBACKS, "screened"],
            "matmul-vllm-qrita": [mode for mode in FILTERED if mode != "minp05"],
            "matmul-flashinfer": FILTERED,
        }

    def measured_modes(self, name):
        out = []
        for mode in modes.MODES:
            inputs = tiny_inputs(2, mode)
            inputs.head.sample = lambda *_arguments, **_options: None
            try:
                providers.PROVIDERS[name](inputs, mode)
            except peers.SkipError as reason:
                if "set NOLOGITS_" not in str(reason):
                    continue
            out.append(mode)
        return out

    @pytest.mark.parametrize("mode", [*FILTERED, "top_logprobs20", *FALLBACKS])
    def test_our_draw_from_the_matmuls_logits(self, mode):
        inputs = tiny_inputs(6, mode)
        drawn = providers.matmul_nologits(inputs, mode)()
        right = nl.sample_logits(inputs.hidden @ inputs.weight.T, inputs.params)
        assert torch.equal(drawn.tokens, right.tokens)
        assert (drawn.top is not None) == (mode == "top_logprobs20")

    def test_vllms_draw(self, monkeypatch):
        """Inside what its mask keeps, and with the shares of the softmax."""
        inputs = tiny_inputs(2_000, "k50")._replace(hidden=tiny_inputs(1, "plain").hidden.expand(2_000, -1) * 0.4)
        seen = []

        def apply(logits, top_k, top_p):
            seen.append((logits.dtype, top_k, top_p))
            return logits.copy_(nl.filter_logits(logits, top_k=20))  # in place, as vLLM's

        peer = types.SimpleNamespace(apply_top_k_top_p_triton=apply)
        monkeypatch.setattr(peer_draws, "vllm_topk_topp", lambda: peer)
        torch.manual_seed(0)
        tokens = providers.matmul_vllm_qrita(inputs, "k50")()
        assert seen == [(torch.float32, inputs.params.top_k, None)]
        logits, ids = (inputs.hidden[0] @ inputs.weight.T).float().topk(20)
        shares = (tokens[:, None] == ids).double().mean(0)
        assert bool((tokens[:, None] == ids).any(-1).all())
        torch.testing.assert_close(shares, logits.softmax(-1).double(), rtol=0, atol=0.04)

    def test_each_of_flashinfers_calls_is_timed_with_its_matmul(self, monkeypatch):
        inputs = tiny_inputs(3, "k50p95")
        logits = (inputs.hidden @ inputs.weight.T).float()
        products, matmul = [], providers.matmul

        def counted(inputs, mode):
            product = matmul(inputs, mode)
            return lambda: products.append(None) or product()

        def draw_from(got, top_k, top_p, seed, offset):
            assert torch.equal(got, logits) or torch.equal(got, logits.softmax(-1))
            assert (top_k is inputs.params.top_k, top_p is inputs.params.top_p, seed.tolist()) == (True, True, [0, 1, 2])
            return got.argmax(-1)

        def measure(calls, repeats):
            products.clear()
            for call in calls.values():
                call()
            assert len(products) == len(calls) == 3
            return {name: timing.Timing(0 if name.startswith("softmax") else 1, 0, 0, True) for name in calls}

        draws = dict.fromkeys(("top_k_top_p_sampling_from_probs", "top_k_top_p_sampling_from_logits"), draw_from)
        peer = types.SimpleNamespace(softmax=lambda got: got.softmax(-1), **draws)
        monkeypatch.setattr(peer_draws, "flashinfer_sampling", lambda: peer)
        monkeypatch.setattr(peer_draws, "measure", measure)
        monkeypatch.setattr(providers, "matmul", counted)
        call = providers.matmul_flashinfer(inputs, "k50p95")
        assert call.name == "softmax, top_k_top_p_sampling_from_probs"
        assert torch.equal(call(), logits.argmax(-1))


def test_rows_that_fell_back(monkeypatch):
    """Counted around one more draw, for the Hopper kernels and where there are filters."""
    kernels = types.ModuleType("nologits.kernels.categorical_sm90")
    counter = torch.tensor([40])
    kernels.open_rows = lambda device: counter
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    monkeypatch.setattr(providers, "hopper_obstacle", lambda device: "")

    def make(mode):
        inputs = tiny_inputs(64, mode)
        right = inputs.head.sample

        def sample(hidden, params, *, impl):
            assert impl == "hopper"
            counter.add_((params.temperature == 20).sum())
            return right(hidden, params, impl="torch")

        inputs.head.sample = sample
        return inputs

    times = dict.fromkeys(["matmul", "nologits-hopper", "nologits-triton", "matmul-nologits"], timing.Timing(1, 1, 1, True))
    for mode, count in (("fallback1", 1), ("fallback100", 64), ("k50", 0), ("plain", None)):
        place = suite.Cell(*TINY[:3], 64, mode, lambda mode=mode: make(mode))
        rows = head.make_rows(place, times, dict.fromkeys(times, 0), timing.Ceilings(1.0, 1.0))
        assert [row["fallback_rows"] for row in rows] == [None, count, None, None]
    del times["nologits-hopper"]
    rows = head.make_rows(place._replace(make=None), times, dict.fromkeys(times, 0), timing.Ceilings(1.0, 1.0))
    assert [row["fallback_rows"] for row in rows] == [None] * 3


class TestScreened:
    def test_the_head_has_a_screen_in_that_mode_alone(self):
        for mode in modes.MODES:
            assert (tiny_inputs(2, mode).head.spec.screen is not None) == (mode == "screened"), mode
        drawn, plain = (draw(tiny_inputs(40, mode)).tokens for mode in ("screened", "plain"))
        assert torch.equal(drawn, plain)

    def test_candidates_are_those_of_several_draws(self):
        median, p99, largest = providers.count_candidates(lambda: tiny_inputs(9, "screened"))
        assert 1 <= median <= p99 <= largest < TINY.vocab // 4
        inputs = tiny_inputs(9, "screened")
        first = screened_draw(inputs.hidden, inputs.head, inputs.params).candidates
        assert len(first) == 9
        assert largest >= first.max()

    def test_rows_say_what_was_left(self, monkeypatch):
        monkeypatch.setattr(head, "count_left_rows", lambda make: 2)
        monkeypatch.setattr(head, "count_candidates", lambda make: (3, 4, 5))
        times = dict.fromkeys(["matmul", "nologits-hopper"], timing.Timing(1, 1, 1, True))
        keys = ("fallback_rows", *head.CANDIDATES)
        for mode, want in (("screened", [2, 3, 4, 5]), ("plain", [None] * 4)):
            place = suite.Cell(*TINY[:3], 64, mode, None)
            rows = head.make_rows(place, times, dict.fromkeys(times, 0), timing.Ceilings(1.0, 1.0))
            assert [[row[key] for key in keys] for row in rows] == [[None] * 4, want]

    def test_the_real_heads_states_come_round(self, monkeypatch):
        weight, states = cases.make_weight(TINY, "cpu"), torch.randn(5, TINY.depth).bfloat16()
        monkeypatch.setattr(cases, "smollm2_states", lambda device: (states, weight))
        assert cases.make_weight(TINY._replace(real=True), "cpu") is weight
        hidden = cases.make_inputs(weight, 12, "plain", real=True).hidden
        assert sorted(set(map(tuple, hidden.tolist()))) == sorted(map(tuple, states.tolist()))
        assert torch.equal(hidden[:5], hidden[5:10])

    def test_a_model_that_is_not_here_is_skipped(self, monkeypatch):
        def missing(case):
            raise UnavailableError("no weights")

        monkeypatch.setattr(head, "make_weight", missing)
        skipped = []
        assert not list(head.cells(suite.Plan(["smollm2"], [1], ["plain"], []), skipped.append))
        assert skipped == [{"case": "smollm2", "reason": "no weights"}]
