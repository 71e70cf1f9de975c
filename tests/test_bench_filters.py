"""The filter suite as far as it goes without a GPU: inputs, gate, peers, record, tables and plots."""

import csv
import json
import math
import os
import sys

import pytest
import torch

import nologits as nl
from nologits import cli
from nologits.testing import FAMILIES, UnavailableError, kept_sets, make_logits

pytest.importorskip("typer")
pytest.importorskip("rich")

from nologits.bench import filter_cases, filter_providers, filters, peer_draws, peers, report, suite, timing
from nologits.bench.gate import CHECKED_ROWS, SetGate

MODES = list(filter_cases.FILTER_MODES)
OURS = ["nologits", "nologits-draw"]
KEYS = [
    *("case", "V", "D", "B", "provider", "mode", "us", "p20_us", "p80_us", "ratio_to_matmul", "extra_bytes"),
    *("ratio_to_amax", "gbps", "speedup", "captured", "read_again"),
]
HEADER = ["schema", "suite", "gpu", "driver", "torch", "triton", "commit", "date"]
CAN_RUN_TRITON = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"


def inputs_of(family="peaked", mode="k50p95", batch=5, vocab=600):
    return filter_cases.make_filter_inputs(make_logits(family, batch, vocab), mode)


def prepare(inputs, names, mode="k50p95"):
    return suite.prepare(filters.SUITE, inputs, mode, names)


def filtered(inputs):
    return filter_providers.nologits_mask(inputs, "")()


def drawn(inputs):
    return filter_providers.nologits_draw(inputs, "")()


def make_record(batches=(1, 8), modes=("k50",), family="gauss"):
    """A record as the suite makes it, of times that were never measured."""
    us = {"amax": 10.0, "nologits": 20.0, "nologits-draw": 25.0, "torch-sort": 300.0, "vllm-qrita": 110.0}
    rows = []
    for batch in batches:
        for mode in modes:
            times = {name: timing.Timing(t, t - 1, t + 2, True) for name, t in us.items()}
            cell = suite.Cell(family, 151_936, 0, batch, mode, lambda batch=batch, mode=mode: inputs_of(family, mode, batch))
            rows += filters.make_rows(cell, times, dict.fromkeys(us, 1_000), timing.Ceilings(4_200.0, 790.0))
    header = dict.fromkeys(HEADER[2:], "x")
    ceilings = timing.Ceilings(4_200.0, 790.0)._asdict()
    return {"schema": 1, "suite": "filters"} | header | ceilings | {"skipped": [], "notes": [], "rows": rows}


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Small logits on this CPU, and everything but the clock."""
    monkeypatch.setattr(filters, "make_family", lambda name, batch: make_logits(name, batch, 700))
    monkeypatch.setattr(suite, "environment", lambda: dict.fromkeys(HEADER[2:], "x"))
    monkeypatch.setattr(suite, "measure_ceilings", lambda: timing.Ceilings(1.0, 1.0))
    monkeypatch.setattr(suite, "measure", lambda calls, repeats: {n: timing.Timing(2.0, 1.0, 3.0, True) for n in calls})
    monkeypatch.setattr(suite, "extra_bytes", lambda call: 64)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for variable in (peers.FLASHINFER, peers.VLLM_TOPK_TOPP):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(peers, "_installed", lambda name: None)
    peers.vllm_topk_topp.cache_clear()
    peers.flashinfer_sampling.cache_clear()


class TestInputs:
    def test_names_of_the_issue(self):
        assert MODES == ["k50", "p90", "k50p95", "minp05"]
        assert filter_cases.DEFAULT_FILTER_BATCHES == (1, 8, 64, 256)
        names = ["amax", "nologits", "nologits-draw", "torch-sort", "torch-topk", "vllm-qrita", "flashinfer"]
        assert list(filter_providers.FILTER_PROVIDERS) == names

    def test_a_number_for_each_row_and_the_request_says_what_the_tensors_hold(self):
        inputs = inputs_of(mode="k50p95", batch=3)
        assert (inputs.top_k.dtype, inputs.top_p.dtype, inputs.seed.dtype) == (torch.int32, torch.float32, torch.uint64)
        assert inputs.top_k.tolist() == [inputs.request.top_k] * 3 == [50] * 3
        assert inputs.top_p.tolist() == [inputs.request.top_p] * 3
        assert inputs.request.top_p != 0.95
        assert inputs.request.top_p == pytest.approx(0.95, abs=1e-7)
        assert inputs.min_p is inputs.request.min_p is None
        assert inputs_of(mode="minp05").request[:2] == (None, None)

    def test_bytes(self):
        assert filter_cases.logits_bytes("gauss", 1_000, 3) == 12_000
        assert filter_cases.logits_bytes("bf16", 1_000, 3) == 6_000


class TestGate:
    @pytest.mark.parametrize("family", [name for name in FAMILIES if name != "smollm2"])
    @pytest.mark.parametrize("mode", MODES)
    def test_right_sets_and_draws_pass(self, family, mode):
        inputs = inputs_of(family, mode)
        calls, reasons, notes = prepare(inputs, ["amax", *OURS], mode)
        assert (list(calls), reasons) == (["amax", *OURS], {})
        assert notes == []

    @pytest.mark.parametrize("extra", [1, -1])
    @pytest.mark.parametrize("mode", MODES)
    def test_one_token_too_many_or_too_few_is_refused(self, monkeypatch, mode, extra):
        """The negative control, through the suite: a filter that is wrong in one row."""
        inputs = inputs_of(mode=mode)

        def broken(inputs, mode):
            right = filtered(inputs)
            kept = right[-1] > -math.inf
            ranked = inputs.logits[-1].masked_fill(kept, -math.inf) if extra == 1 else -right[-1].masked_fill(~kept, math.inf)
            token = int(ranked.argmax())
            right[-1, token] = inputs.logits[-1, token] if extra == 1 else -math.inf
            assert int((right[-1] > -math.inf).sum()) == int(kept.sum()) + extra
            return lambda: right

        monkeypatch.setitem(filter_providers.FILTER_PROVIDERS, "nologits", broken)
        with pytest.raises(RuntimeError, match=rf"nologits \({mode}\): a wrong set in 1 of 5 rows: nothing is measured"):
            prepare(inputs, ["amax", "nologits"], mode)

    def test_of_equal_logits_the_lowest_ids(self):
        inputs = inputs_of("ties", "k50")
        wrong = filter_providers.nologits_mask(inputs._replace(logits=inputs.logits.flip(-1)), "")().flip(-1)
        assert (wrong > -math.inf).sum(-1).tolist() == [50] * 5
        with pytest.raises(RuntimeError, match="a wrong set in 5 of 5 rows"):
            SetGate(inputs, "k50").check("broken", wrong)

    def test_a_kept_logit_that_changed_is_refused(self):
        inputs = inputs_of()
        with pytest.raises(RuntimeError, match="a wrong set in 5 of 5 rows"):
            SetGate(inputs, "k50p95").check("broken", filtered(inputs) * 1.0001)

    @pytest.mark.parametrize("result", [None, torch.zeros(5, 599), torch.zeros(5)], ids=["none", "narrow", "tokens"])
    def test_other_results_are_refused(self, result):
        with pytest.raises(RuntimeError, match="must return filtered logits or samples"):
            SetGate(inputs_of(), "k50p95").check("broken", result)

    def test_draws_outside_the_set_or_with_other_noise_are_refused(self):
        inputs = inputs_of("flat", "k50")
        right = drawn(inputs)
        gate = SetGate(inputs, "k50")
        assert gate.check("ours", right) is None
        outside = right.tokens.clone()
        outside[2] = int(inputs.logits[2].argmin())
        others = drawn(inputs._replace(seed=inputs.position.add(9).view(torch.uint64))).tokens
        unlucky = int((others != right.tokens).sum())
        assert unlucky >= 3
        for tokens, bad in ((outside, 1), (others, unlucky), (right.tokens * 0 - 1, 5)):
            with pytest.raises(RuntimeError, match=f"a wrong token in {bad} of 5 rows"):
                gate.check("broken", right._replace(tokens=tokens))

    def test_an_invalid_row_is_not_token_0(self):
        logits = torch.tensor([[50.0, 0.0, 0.0]])
        inputs = filter_cases.make_filter_inputs(logits, "p90")
        assert drawn(inputs).tokens.tolist() == [0]
        with pytest.raises(RuntimeError, match="a wrong token in 1 of 1 rows"):
            SetGate(inputs, "p90").check("broken", nl.Samples(torch.tensor([-1])))

    def test_a_large_batch_is_checked_at_both_ends_and_between(self):
        inputs = inputs_of("peaked", "k50", batch=100)
        right = filtered(inputs)
        checked = []
        for row in range(100):
            wrong = right.clone()
            wrong[row, int(inputs.logits[row].argmin())] = 0.0
            try:
                SetGate(inputs, "k50").check("broken", wrong)
            except RuntimeError:
                checked.append(row)
        assert len(checked) == CHECKED_ROWS == 8
        assert (checked[0], checked[-1]) == (0, 99)

    def test_rows_that_rounding_decides_are_left_out_and_counted(self):
        logits = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.6, 0.25, 0.1, 0.05]]).log()
        inputs = filter_cases.make_filter_inputs(logits, "p90")._replace(
            request=filter_cases.Request(top_p=0.75), top_p=torch.full((2,), 0.75)
        )
        gate = SetGate(inputs, "p90")
        either = logits.masked_fill(torch.tensor([[False, False, False, True], [False, False, True, True]]), -math.inf)
        assert gate.check("ours", either) == "ours: 1 of 2 rows not compared, rounding decides them"
        either[1, 1] = -math.inf  # the control: the other row is compared
        with pytest.raises(RuntimeError, match="a wrong set in 1 of 1 rows"):
            gate.check("ours", either)

    def test_what_peers_get_wrong_is_counted_whatever_they_return(self):
        inputs = inputs_of("peaked", "k50")
        gate = SetGate(inputs, "k50")
        right = filtered(inputs)
        assert gate.observe("peer", right) is None
        wrong = right.clone()
        wrong[:3].masked_fill_(wrong[:3] == wrong[:3].amax(-1, keepdim=True), -math.inf)
        assert gate.observe("peer", wrong) == "peer: wrong set in 3 of 5 rows"
        values, ids = inputs.logits.topk(50)
        assert gate.observe("peer", (values, ids)) is None
        values[1, 49] = -math.inf
        assert gate.observe("peer", (values, ids)) == "peer: wrong set in 1 of 5 rows"
        tokens = inputs.logits.argmax(-1)
        assert gate.observe("peer", tokens.int()) is gate.observe("peer", tokens[:, None]) is None
        tokens[0] = inputs.logits[0].argmin()
        assert gate.observe("peer", tokens) == "peer: token outside the set in 1 of 5 rows"


class TestProviders:
    @pytest.mark.parametrize("family", ["gauss", "peaked", "flat", "masked", "outlier"])
    @pytest.mark.parametrize("mode", MODES)
    def test_torch_keeps_the_right_sets_where_nothing_ties(self, family, mode):
        inputs = inputs_of(family, mode, vocab=6_000)
        _, reasons, notes = prepare(inputs, ["torch-sort", "torch-topk"], mode)
        assert reasons == ({} if "k50" in mode else {"torch-topk": "it needs a k"})
        assert notes == []

    def test_the_sorted_mask_keeps_one_token_at_p_0(self):
        inputs = inputs_of("gauss", "p90")
        mask = filter_providers.torch_sort(inputs._replace(top_p=torch.zeros(5)), "p90")()
        assert (mask > -math.inf).sum(-1).tolist() == [1] * 5
        assert torch.equal(mask.argmax(-1), inputs.logits.argmax(-1))

    def test_torch_keeps_every_tie_and_that_is_noted(self):
        _, _, notes = prepare(inputs_of("ties", "k50"), ["torch-sort"], "k50")
        assert notes == ["torch-sort: wrong set in 5 of 5 rows"]

    def test_logits_are_left_alone(self):
        for mode in MODES:
            inputs = inputs_of(mode=mode)
            before = inputs.logits.clone()
            prepare(inputs, ["amax", *OURS, "torch-sort", "torch-topk"], mode)
            assert torch.equal(inputs.logits, before)

    def test_a_peer_that_fails_is_skipped_and_one_of_ours_is_not(self, monkeypatch):
        def failing(inputs, mode):
            def call():
                raise RuntimeError("no kernel image")

            return call

        monkeypatch.setitem(filter_providers.FILTER_PROVIDERS, "vllm-qrita", failing)
        calls, reasons, _ = prepare(inputs_of(), ["amax", "vllm-qrita"])
        assert (list(calls), reasons) == (["amax"], {"vllm-qrita": "RuntimeError: no kernel image"})
        monkeypatch.setitem(filter_providers.FILTER_PROVIDERS, "nologits", failing)
        with pytest.raises(RuntimeError, match="no kernel image"):
            prepare(inputs_of(), ["nologits"])

    def test_the_fastest_of_the_calls_that_run_is_measured_and_named(self, monkeypatch):
        monkeypatch.setattr(
            peer_draws,
            "measure",
            lambda calls, repeats: {n: timing.Timing({"a": 3.0, "b": 2.0}[n], 0, 0, True) for n in calls},
        )

        def broken():
            raise ValueError("wants CUDA")

        chosen = peer_draws.fastest({"a": lambda: 1, "b": lambda: 2, "c": broken})
        assert (chosen.name, chosen()) == ("b", 2)
        with pytest.raises(peers.SkipError, match="ValueError: wants CUDA"):
            peer_draws.fastest({"c": broken})


FLASHINFER = """
import torch

def record(name, logits, kwargs):
    assert kwargs["seed"].dtype == kwargs["offset"].dtype == torch.int64
    for key in ("top_k", "top_p", "min_p"):
        assert key not in kwargs or kwargs[key].shape == logits.shape[:1], key
    calls.append(name)
    return logits.argmax(-1).int()

calls = []

def softmax(logits):
    calls.append("softmax")
    return torch.softmax(logits, -1)

def top_k_sampling_from_probs(probs, top_k, seed, offset):
    return record("k", probs, dict(top_k=top_k, seed=seed, offset=offset))

def top_p_sampling_from_probs(probs, top_p, seed, offset):
    return record("p", probs, dict(top_p=top_p, seed=seed, offset=offset))

def min_p_sampling_from_probs(probs, min_p, seed, offset):
    return record("minp", probs, dict(min_p=min_p, seed=seed, offset=offset))

def top_k_top_p_sampling_from_probs(probs, top_k, top_p, seed, offset):
    return record("kp", probs, dict(top_k=top_k, top_p=top_p, seed=seed, offset=offset))

def top_k_top_p_sampling_from_logits(logits, top_k, top_p, seed, offset):
    assert logits.dtype == torch.float32
    return record("logits", logits, dict(top_k=top_k, top_p=top_p, seed=seed, offset=offset))
"""

# The imports of vLLM's file, and a kernel launched as its kernels are: by names and strides that the launcher fills in.
VLLM = """
from typing import Any
import torch
from vllm.model_executor.warmup.jit_warmup import WarmupChoices, WarmupIntRange, _when
from vllm.model_executor.warmup.jit_warmup_triton_helper import (
    DispatchSpec, TritonWarmupTensor, triton_kernel_dispatcher_with_warmup,
)
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.utils.math_utils import next_power_of_2
from vllm.utils.platform_utils import num_compute_units

@triton.jit(do_not_specialize_on_alignment=["BATCH_SIZE"])
def _mask_kernel(LOGITS, LOGITS_STRIDE_0, LIMIT_ptr, MASK_VALUE: tl.constexpr, VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < VOCAB_SIZE
    at = LOGITS + row * LOGITS_STRIDE_0 + offsets
    logits = tl.load(at, mask=inside, other=0.0)
    tl.store(at, tl.where(logits >= tl.load(LIMIT_ptr + row), logits, MASK_VALUE), mask=inside)

@triton_kernel_dispatcher_with_warmup(kernel=_mask_kernel, warmup_inputs=lambda config: None)
def _mask(logits: torch.Tensor, limit: torch.Tensor, mask_value: float = float("-inf")) -> DispatchSpec:
    return (len(logits),), dict(VOCAB_SIZE=logits.shape[1], BLOCK=next_power_of_2(logits.shape[1]), num_warps=4)

def apply_top_k_top_p_triton(logits, k, p):
    assert logits.dtype == torch.float32 and num_compute_units(logits.device.index) > 0
    with gpu_sync_allowed():
        limit = logits.topk(int(k[0]))[0][:, -1].contiguous()
    _mask(logits, limit)
    return logits
"""


@pytest.mark.usefixtures("no_peers")
class TestPeers:
    def vllm(self, monkeypatch, tmp_path, text=VLLM):
        (tmp_path / "topk_topp_triton.py").write_text(text)
        monkeypatch.setenv(peers.VLLM_TOPK_TOPP, str(tmp_path))

    def test_absent_peers_are_skipped_with_what_to_set(self, monkeypatch, tmp_path):
        monkeypatch.setattr(peers, "_installed", lambda name: None)
        _, reasons, _ = prepare(inputs_of(), ["vllm-qrita", "flashinfer"])
        assert reasons["vllm-qrita"] == "set NOLOGITS_VLLM_TOPK_TOPP to the folder that holds its topk_topp_triton.py"
        assert reasons["flashinfer"].startswith("install flashinfer-python, or set NOLOGITS_FLASHINFER")
        monkeypatch.setenv(peers.VLLM_TOPK_TOPP, str(tmp_path))
        with pytest.raises(peers.SkipError, match=f"must be a folder that holds topk_topp_triton.py, got {tmp_path}"):
            peers.vllm_topk_topp()

    @pytest.mark.skipif(not CAN_RUN_TRITON, reason="needs a GPU or TRITON_INTERPRET=1")
    @pytest.mark.parametrize("family", ["peaked", "bf16"])
    def test_vllms_kernels_run_from_their_file_on_a_copy(self, monkeypatch, tmp_path, device, family):
        self.vllm(monkeypatch, tmp_path)
        inputs = filter_cases.make_filter_inputs(make_logits(family, 3, 600, device=device), "k50")
        before = inputs.logits.clone()
        right = kept_sets(inputs.logits, top_k=50).keep
        masked = filter_providers.vllm_qrita(inputs, "k50")()
        ties = inputs.logits >= inputs.logits.masked_fill(~right, math.inf).amin(-1, keepdim=True)
        assert torch.equal(masked > -math.inf, ties)
        assert torch.equal(masked[ties], before[ties].float())
        assert torch.equal(inputs.logits, before)

    def test_vllm_leaves_no_stand_ins_and_an_installed_one_in_place(self, monkeypatch, tmp_path, no_peers):
        self.vllm(monkeypatch, tmp_path)
        installed = type(sys)("vllm")
        monkeypatch.setitem(sys.modules, "vllm", installed)
        peers.vllm_topk_topp()
        assert sys.modules["vllm"] is installed
        assert [name for name in no_peers() if name.startswith("vllm.")] == []

    def test_a_vllm_file_that_does_not_import_leaves_nothing(self, monkeypatch, tmp_path, no_peers):
        self.vllm(monkeypatch, tmp_path, "from vllm.utils.math_utils import nonesuch\n")
        for _ in range(2):
            with pytest.raises(peers.SkipError, match=f"does not import from {tmp_path}: ImportError: cannot import name"):
                peers.vllm_topk_topp()
        assert no_peers() == {}

    def test_vllm_has_no_min_p(self, monkeypatch, tmp_path):
        self.vllm(monkeypatch, tmp_path)
        with pytest.raises(peers.SkipError, match="no min-p"):
            filter_providers.vllm_qrita(inputs_of(mode="minp05"), "minp05")

    @pytest.mark.parametrize(
        ("mode", "calls"),
        [
            ("k50", ["k", "softmax", "k", "logits"]),
            ("p90", ["p", "softmax", "p"]),
            ("k50p95", ["kp", "softmax", "kp", "logits"]),
            ("minp05", ["minp", "softmax", "minp"]),
        ],
    )
    @pytest.mark.parametrize("family", ["peaked", "bf16"])
    def test_flashinfers_calls_for_each_mode(self, monkeypatch, tmp_path, mode, calls, family):
        (tmp_path / "flashinfer").mkdir()
        (tmp_path / "flashinfer" / "sampling.py").write_text(FLASHINFER)
        monkeypatch.setenv(peers.FLASHINFER, str(tmp_path))
        slower = {"softmax, ": 1.0, "torch.softmax, ": 2.0, "top_k_top_p_sampling_from_logits": 3.0}
        monkeypatch.setattr(
            peer_draws,
            "measure",
            lambda tried, repeats: {
                name: timing.Timing(next(us for start, us in slower.items() if name.startswith(start)), 0, 0, True)
                for name in tried
            },
        )
        call = filter_providers.flashinfer(inputs_of(family, mode), mode)
        sampling = peers.flashinfer_sampling()
        assert sampling.calls == calls
        sampling.calls.clear()
        call()
        assert sampling.calls == ["softmax", calls[0]]
        _, _, notes = prepare(inputs_of(family, mode), ["flashinfer"], mode)
        assert notes[-1].startswith("flashinfer: softmax, ")


class TestRecord:
    def test_keys_and_values(self):
        record = make_record()
        assert list(record)[:8] == HEADER
        rows = {row["provider"]: row for row in record["rows"] if row["B"] == 8}
        assert all(list(row) == KEYS for row in rows.values())
        ours = rows["nologits"]
        assert (ours["case"], ours["V"], ours["D"], ours["mode"]) == ("gauss", 151_936, 0, "k50")
        assert (ours["ratio_to_matmul"], ours["ratio_to_amax"], ours["speedup"]) == (None, 2.0, 5.5)
        assert ours["gbps"] == round(8 * 151_936 * 4 / 20e-6 / 1e9, 1)
        assert (rows["amax"]["ratio_to_amax"], rows["amax"]["speedup"], rows["torch-sort"]["speedup"]) == (1.0, None, None)
        assert make_record(family="bf16")["rows"][0]["gbps"] * 2 == pytest.approx(record["rows"][0]["gbps"], rel=1e-3)

    def test_from_end_to_end(self, monkeypatch, on_the_cpu, nologits, tmp_path):
        """Cells, gate, skips, notes and rows, through the command."""
        right = filters.make_family

        def make_family(name, batch):
            if name == "smollm2":
                raise UnavailableError("no weights")
            return right(name, batch)

        monkeypatch.setattr(filters, "make_family", make_family)
        arguments = ("--family", "gauss,ties,smollm2", "--batch", "1,9", "--output", tmp_path / "r.json")
        code, out, err = nologits("bench", "filters", *arguments)
        assert code == 0
        record = json.loads(out)
        assert record == json.loads((tmp_path / "r.json").read_text())
        assert (record["suite"], list(record)[:8]) == ("filters", HEADER)
        places = {(row["case"], row["B"], row["mode"]) for row in record["rows"]}
        assert places == {(f, b, m) for f in ("gauss", "ties") for b in (1, 9) for m in MODES}
        assert {row["V"] for row in record["rows"]} == {700}
        assert {row["provider"] for row in record["rows"] if row["mode"] == "minp05"} == {"amax", *OURS, "torch-sort"}
        assert record["skipped"].count({"case": "smollm2", "reason": "no weights"}) == 1
        assert {entry.get("provider") for entry in record["skipped"]} == {None, "torch-topk", "vllm-qrita", "flashinfer"}
        note = {"case": "ties", "B": 9, "mode": "k50", "note": "torch-sort: wrong set in 8 of 8 rows"}
        assert note in record["notes"]
        assert "smollm2 skipped: no weights" in err
        assert "error" not in record

    def test_a_wrong_set_ends_the_run_and_what_was_measured_is_written(self, monkeypatch, on_the_cpu, capfd):
        def broken(inputs, mode):
            return lambda: inputs.logits if mode == "p90" else filtered(inputs)

        monkeypatch.setitem(filter_providers.FILTER_PROVIDERS, "nologits", broken)
        with pytest.raises(RuntimeError, match="a wrong set in 2 of 2 rows"):
            cli.main(["bench", "filters", "--family", "peaked", "--batch", "2", "--provider", "amax,nologits"])
        record = json.loads(capfd.readouterr().out)
        assert record["error"] == "RuntimeError: nologits (p90): a wrong set in 2 of 2 rows: nothing is measured"
        assert {row["mode"] for row in record["rows"]} == {"k50"}


class TestCommand:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--family", "cauchy"], "--family must be one of gauss, peaked, "),
            (["--batch", "0"], "--batch must be an integer of at least 1, or all, got '0'"),
            (["--mode", "plain"], "--mode must be one of k50, p90, k50p95, minp05, all, got 'plain'"),
            (["--provider", "matmul"], "--provider must be one of amax, nologits, "),
            (["--repeats", "2"], "invalid value for '--repeats'"),
        ],
        ids=" ".join,
    )
    def test_wrong_argument(self, nologits, arguments, message):
        code, out, err = nologits("bench", "filters", *arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"error: {message}"), err

    @pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
    def test_needs_a_gpu(self, nologits):
        code, _, err = nologits("bench", "filters")
        assert (code, err) == (2, "error: bench must run on a machine with a CUDA GPU, got none\n")

    def test_defaults(self, monkeypatch, nologits):
        from nologits.bench import cli as bench_cli

        plans = []

        def run(suite, plan, record, note, begin):
            plans.append((suite.name, plan))
            record |= make_record()

        monkeypatch.setattr(bench_cli, "run", run)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert nologits("bench", "filters")[0] == 0
        everything = (list(FAMILIES), [1, 8, 64, 256], MODES, list(filter_providers.FILTER_PROVIDERS), 40)
        assert plans == [("filters", everything)]


class TestReport:
    def test_table(self, nologits, tmp_path):
        (tmp_path / "r.json").write_text(json.dumps(make_record(batches=(8,))))
        code, out, err = nologits("bench", "plot", tmp_path / "r.json")
        assert (code, out) == (0, "")
        assert "gauss (one bell of deviation 2.5), 151,936 logits, k50" in err
        assert report.COLUMNS["filters"][2:] == ("us", "p20-p80", "GB/s", "x amax", "extra memory", "speed-up")
        assert all(column in err for column in report.COLUMNS["filters"])
        assert "x matmul" not in err
        line = next(line for line in err.splitlines() if "nologits " in line)
        cells = [cell.strip() for cell in line.strip("│ ").split("│")]
        assert cells == ["nologits", "20.0", "19-22", "243", "2.00", "0.00 MB", "5.50x"]

    def test_csv(self, tmp_path):
        record = make_record()
        report.write_csv(record, tmp_path / "r.csv")
        with (tmp_path / "r.csv").open(newline="") as file:
            reader = csv.DictReader(file)
            assert reader.fieldnames == KEYS
            back = list(reader)
        assert [{k: "" if v is None else str(v) for k, v in row.items()} for row in record["rows"]] == back

    def test_plots(self, nologits, tmp_path):
        pytest.importorskip("matplotlib")
        record = make_record(modes=("k50", "p90"))
        record["rows"] += [row | {"case": "of-an-exploration"} for row in make_record()["rows"]]
        (tmp_path / "r.json").write_text(json.dumps(record))
        code, out, _ = nologits("bench", "plot", tmp_path / "r.json", "--plots", tmp_path / "p")
        assert code == 0
        names = ["gauss-k50", "gauss-p90", "of-an-exploration-k50"]
        assert out.split() == [str(tmp_path / "p" / f"filters-{name}.png") for name in names]

    def test_what_a_figure_shows(self):
        pytest.importorskip("matplotlib")
        from nologits.bench.plots import _figure

        record = make_record()
        figure = _figure(record, record["rows"], 4_200.0, 790.0)
        time, ratio = figure.axes
        lines = {line.get_label(): line for line in time.get_lines()}
        assert list(lines["nologits"].get_ydata()) == [20.0, 20.0]
        floor = lines["floor: one read of the logits"].get_ydata()
        assert floor[1] == pytest.approx(8 * 151_936 * 4 / 4.2e12 * 1e6)
        assert next(list(line.get_ydata()) for line in ratio.get_lines()) == [2.0, 2.0]
        assert ratio.get_ylabel() == "time / time of torch.amax"
        assert "Filters (top-k 50) on gauss" in figure.get_suptitle()


def test_draws_of_the_suite_leave_torchs_generator_alone():
    inputs = inputs_of()
    before = torch.get_rng_state()
    drawn(inputs)
    assert torch.equal(before, torch.get_rng_state())
    nl.sample_logits(inputs.logits, top_k=inputs.top_k, seed=inputs.position)  # the control
    assert not torch.equal(before, torch.get_rng_state())
