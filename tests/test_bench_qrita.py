"""The suite of Qrita's parts as far as it goes without a GPU: command, plan, providers, gate, record and table."""

import contextlib
import csv
import importlib
import importlib.util
import json
import sys
from types import ModuleType
from unittest.mock import MagicMock

import pytest
import torch

from nologits import cli, filtered
from nologits.kernels.config import FilterConfig, SearchConfig, filter_config
from nologits.params import SamplingParams, make_rows
from nologits.sources import LogitsSource
from nologits.testing import make_logits

pytest.importorskip("typer")
pytest.importorskip("rich")

from nologits.bench import filter_cases, filters, qrita, report, suite, timing

MODES = list(filter_cases.FILTER_MODES)
ABLATIONS = {
    "no-truncation": SearchConfig(TRUNCATE=0),
    "binary": SearchConfig(ARITY=2),
    "ternary": SearchConfig(ARITY=3),
    "quaternary": SearchConfig(ARITY=4),
    "no-duplicates": SearchConfig(DUPLICATES=0),
    "untiered": SearchConfig(TIERED=0),
}
PROVIDERS = ["amax", "shipped", *ABLATIONS]
KEYS = [
    *("case", "V", "D", "B", "provider", "mode", "us", "p20_us", "p80_us", "ratio_to_matmul", "extra_bytes"),
    *("ratio_to_amax", "gbps", "speedup", "captured", "read_again"),
]
HEADER = ["schema", "suite", "gpu", "driver", "torch", "triton", "commit", "date"]
CEILINGS = timing.Ceilings(4_200.0, 790.0)
LAUNCHER = "nologits.kernels.filters_sm90"
US = {"amax": 10.0, "shipped": 20.0, "no-truncation": 25.0, "quaternary": 16.0}
NOT_HOPPER = "the kernels are for NVIDIA GPUs, not cpu"


def inputs_of(family="gauss", mode="k50", batch=5, vocab=600):
    return filter_cases.make_filter_inputs(make_logits(family, batch, vocab), mode)


def prepare(inputs, mode="k50", names=PROVIDERS):
    return suite.prepare(qrita.SUITE, inputs, mode, names)


def keep_copies(logits, out, mask_value):
    """Keeps all copies of each row's boundary value, as the kernel does without its handling of duplicates."""
    boundary = out.masked_fill(out == mask_value, torch.inf).amin(-1, keepdim=True)
    out.copy_(logits.masked_fill(logits < boundary, mask_value))


@pytest.fixture
def kernel(monkeypatch):
    """A stand-in for the Hopper kernel on this CPU. Gives the configurations of its launches, and the faults by switch."""
    fake = ModuleType(LAUNCHER)
    fake.configs, fake.faults = [], {SearchConfig(DUPLICATES=0): keep_copies}

    def launch_mask(logits, rows, out, mask_value, *, config=None):
        fake.configs.append(config)
        filtered.filter_logits(logits, LogitsSource(logits), rows, out, mask_value)
        fault = fake.faults.get(config.search)
        if fault is not None:
            fault(logits, out, mask_value)

    fake.launch_mask = launch_mask
    monkeypatch.setitem(sys.modules, LAUNCHER, fake)
    monkeypatch.setattr(qrita, "hopper_obstacle", lambda device: "")
    monkeypatch.setattr(qrita, "multiprocessors", lambda device: 132)
    return fake


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Small logits on this CPU, and everything but the clock."""
    monkeypatch.setattr(filters, "make_family", lambda name, batch: make_logits(name, batch, 700))
    monkeypatch.setattr(suite, "environment", lambda: dict.fromkeys(HEADER[2:], "x"))
    monkeypatch.setattr(suite, "measure_ceilings", lambda: CEILINGS)
    monkeypatch.setattr(suite, "measure", lambda calls, repeats: {n: timing.Timing(2.0, 1.0, 3.0, True) for n in calls})
    monkeypatch.setattr(suite, "extra_bytes", lambda call: 64)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def make_record(us=US):
    """A record as the suite makes it, of times that were never measured."""
    cell = suite.Cell("gauss", 151_936, 0, 64, "k50", lambda: None)
    times = {name: timing.Timing(t, t - 1, t + 2, True) for name, t in us.items()}
    rows = qrita.SUITE.make_rows(cell, times, dict.fromkeys(us, 1_000), CEILINGS)
    header = {"schema": 1, "suite": "qrita"} | dict.fromkeys(HEADER[2:], "x")
    return header | CEILINGS._asdict() | {"skipped": [], "notes": [], "rows": rows}


class TestProviders:
    def test_names(self):
        assert list(qrita.QRITA_PROVIDERS) == PROVIDERS
        assert set(qrita.SUITE.ours) == set(PROVIDERS) - {"amax"}

    @pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
    def test_where_the_kernel_cannot_run_it_is_skipped_and_nothing_of_it_is_imported(self, monkeypatch):
        monkeypatch.setitem(sys.modules, LAUNCHER, None)
        calls, reasons, notes = prepare(inputs_of())
        assert (list(calls), notes) == (["amax"], [])
        assert reasons == dict.fromkeys(PROVIDERS[1:], NOT_HOPPER)

    @pytest.mark.parametrize(("name", "search"), [("shipped", SearchConfig()), *ABLATIONS.items()])
    def test_each_launches_what_is_shipped_but_for_its_switch(self, kernel, name, search):
        inputs = inputs_of(batch=2, vocab=20_000)
        call = qrita.QRITA_PROVIDERS[name](inputs, "k50")
        kernel.configs.clear()
        call()
        shipped = filter_config(20_000, 2, 132)
        assert shipped.cluster > 1
        assert kernel.configs == [FilterConfig(shipped.cluster, shipped.threads, search)]

    @pytest.mark.parametrize("mode", MODES)
    def test_logits_are_left_alone_and_results_are_new(self, kernel, mode):
        inputs = inputs_of(mode=mode)
        before = inputs.logits.clone()
        calls, reasons, notes = prepare(inputs, mode)
        assert (list(calls), reasons, notes) == (PROVIDERS, {}, [])
        assert torch.equal(inputs.logits, before)
        first, second = calls["shipped"](), calls["shipped"]()
        assert torch.equal(first, second)
        assert first.data_ptr() != second.data_ptr()


class TestGate:
    @pytest.mark.parametrize("name", [name for name in PROVIDERS[1:] if name != "no-duplicates"])
    def test_a_wrong_set_of_any_other_ends_the_run(self, kernel, name):
        kernel.faults[ABLATIONS.get(name, SearchConfig())] = keep_copies
        with pytest.raises(RuntimeError, match=rf"{name} \(k50\): a wrong set in 5 of 5 rows: nothing is measured"):
            prepare(inputs_of("ties"), names=["amax", name])

    @pytest.mark.parametrize("mode", ["k50", "p90", "k50p95"])
    def test_without_duplicates_it_is_skipped_where_it_keeps_copies(self, kernel, mode):
        calls, reasons, _ = prepare(inputs_of("ties", mode), mode)
        assert list(calls) == [name for name in PROVIDERS if name != "no-duplicates"]
        assert reasons == {"no-duplicates": "it keeps all copies of a boundary value: wrong set in 5 of 5 rows"}

    def test_one_row_with_copies_is_enough(self, kernel):
        inputs = inputs_of()
        rank = inputs.logits[3].sort(descending=True).indices
        inputs.logits[3, rank[50]] = inputs.logits[3, rank[49]]
        _, reasons, _ = prepare(inputs)
        assert reasons["no-duplicates"].endswith("wrong set in 1 of 5 rows")

    def test_min_p_keeps_copies_by_right(self, kernel):
        calls, reasons, _ = prepare(inputs_of("ties", "minp05"), "minp05")
        assert (list(calls), reasons) == (PROVIDERS, {})

    def test_what_is_not_the_switchs_doing_ends_the_run(self, kernel):
        def lose_a_token(logits, out, mask_value):
            keep_copies(logits, out, mask_value)
            out[2, logits[2].argmax()] = mask_value

        kernel.faults[ABLATIONS["no-duplicates"]] = lose_a_token
        for family, wrong in (("gauss", 1), ("ties", 5)):
            with pytest.raises(RuntimeError, match=rf"no-duplicates \(k50\): a wrong set in {wrong} of 5 rows"):
                prepare(inputs_of(family))


class TestRecord:
    def test_keys_and_values(self):
        record = make_record()
        rows = {row["provider"]: row for row in record["rows"]}
        assert all(list(row) == KEYS for row in rows.values())
        assert {name: row["ratio_to_amax"] for name, row in rows.items()} == {n: us / 10 for n, us in US.items()}
        assert {name: row["speedup"] for name, row in rows.items()} == {
            "amax": None, "shipped": None, "no-truncation": 0.8, "quaternary": 1.25,
        }  # fmt: skip
        assert rows["shipped"]["gbps"] == round(64 * 151_936 * 4 / 20e-6 / 1e9, 1)
        assert rows["shipped"]["ratio_to_matmul"] is None
        alone = make_record({"quaternary": 16.0})["rows"][0]
        assert (alone["ratio_to_amax"], alone["speedup"]) == (None, None)

    def test_from_end_to_end(self, on_the_cpu, kernel, nologits, tmp_path):
        arguments = ("--family", "gauss,ties", "--batch", "1,9", "--output", tmp_path / "r.json", "--csv", tmp_path / "r.csv")
        code, out, err = nologits("bench", "qrita", "--ablate", *arguments)
        assert code == 0
        record = json.loads(out)
        assert record == json.loads((tmp_path / "r.json").read_text())
        assert (record["suite"], list(record)[:8]) == ("qrita", HEADER)
        assert "error" not in record
        assert all(list(row) == KEYS for row in record["rows"])
        with (tmp_path / "r.csv").open(newline="") as file:
            assert csv.DictReader(file).fieldnames == KEYS
        places = {(row["case"], row["B"], row["mode"]) for row in record["rows"]}
        assert places == {(f, b, m) for f in ("gauss", "ties") for b in (1, 9) for m in MODES}
        without = {(row["case"], row["mode"]) for row in record["rows"] if row["provider"] == "no-duplicates"}
        assert without == {("gauss", mode) for mode in MODES} | {("ties", "minp05")}
        reason = "it keeps all copies of a boundary value: wrong set in 1 of 1 rows"
        assert {"provider": "no-duplicates", "mode": "k50", "reason": reason} in record["skipped"]
        assert f"no-duplicates (k50) skipped: {reason}" in err

    @pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a Hopper GPU")
    def test_without_a_hopper_gpu_the_floor_is_left(self, on_the_cpu, nologits):
        code, out, err = nologits("bench", "qrita", "--family", "gauss", "--batch", "2", "--mode", "p90")
        assert code == 0
        record = json.loads(out)
        assert [row["provider"] for row in record["rows"]] == ["amax"]
        assert record["skipped"] == [{"provider": "shipped", "mode": "p90", "reason": NOT_HOPPER}]
        assert f"shipped (p90) skipped: {NOT_HOPPER}" in err

    def test_a_wrong_set_ends_the_run_and_what_was_measured_is_written(self, on_the_cpu, kernel, capfd):
        kernel.faults[ABLATIONS["untiered"]] = keep_copies
        with pytest.raises(RuntimeError, match=r"untiered \(k50\): a wrong set in 2 of 2 rows"):
            cli.main(["bench", "qrita", "--ablate", "--family", "gauss,ties", "--batch", "2", "--mode", "k50"])
        record = json.loads(capfd.readouterr().out)
        assert record["error"] == "RuntimeError: untiered (k50): a wrong set in 2 of 2 rows: nothing is measured"
        assert {row["case"] for row in record["rows"]} == {"gauss"}

    def test_table(self, nologits, tmp_path):
        (tmp_path / "r.json").write_text(json.dumps(make_record()))
        code, out, err = nologits("bench", "plot", tmp_path / "r.json")
        assert (code, out) == (0, "")
        assert report.COLUMNS["qrita"] == report.COLUMNS["filters"]
        assert "gauss (one bell of deviation 2.5), 151,936 logits, k50" in err
        assert "x matmul" not in err
        line = next(line for line in err.splitlines() if "no-truncation " in line)
        cells = [cell.strip() for cell in line.strip("│ ").split("│")]
        assert cells == ["no-truncation", "25.0", "24-27", "1,556", "2.50", "0.00 MB", "0.80x"]


class TestCommand:
    def plan(self, monkeypatch, nologits, *arguments):
        """The plan that the command makes."""
        from nologits.bench import cli as bench_cli

        plans = []

        def run(suite, plan, record, note, begin):
            assert suite is qrita.SUITE
            plans.append(plan)
            record |= make_record()

        monkeypatch.setattr(bench_cli, "run", run)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        code, _, err = nologits("bench", "qrita", *arguments)
        assert code == 0, err
        return tuple(plans[0])

    def test_defaults(self, monkeypatch, nologits):
        everywhere = (["gauss", "peaked", "flat", "ties"], [1, 64], MODES)
        assert self.plan(monkeypatch, nologits) == (*everywhere, ["amax", "shipped"], 40)
        assert self.plan(monkeypatch, nologits, "--ablate") == (*everywhere, PROVIDERS, 40)

    def test_options(self, monkeypatch, nologits):
        arguments = ("--family", "bf16,ties", "--batch", "64,2", "--batch", "3", "--mode", "p90", "--repeats", "5")
        assert self.plan(monkeypatch, nologits, *arguments)[:3] == (["bf16", "ties"], [2, 3, 64], ["p90"])
        families = self.plan(monkeypatch, nologits, "--family", "all", "--repeats", "5")
        assert (len(families[0]), families[4]) == (10, 5)

    def test_help(self, nologits):
        code, out, _ = nologits("bench", "qrita", "--help")
        assert code == 0
        for text in ("--ablate", "Default: gauss,peaked,flat,ties.", "Default: 1,64.", "k50, p90, k50p95, minp05, or all"):
            assert text in out
        assert "--provider" not in out
        assert "qrita" in nologits("bench", "--help")[1]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--family", "cauchy"], "--family must be one of gauss, peaked, "),
            (["--batch", "0"], "--batch must be an integer of at least 1, or all, got '0'"),
            (["--mode", "plain"], "--mode must be one of k50, p90, k50p95, minp05, all, got 'plain'"),
            (["--provider", "binary"], "no such option: --provider"),
            (["--repeats", "2"], "invalid value for '--repeats'"),
        ],
        ids=" ".join,
    )
    def test_wrong_argument(self, nologits, arguments, message):
        code, out, err = nologits("bench", "qrita", *arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"error: {message}"), err

    @pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
    def test_needs_a_gpu(self, nologits):
        code, _, err = nologits("bench", "qrita", "--ablate")
        assert (code, err) == (2, "error: bench must run on a machine with a CUDA GPU, got none\n")


def has_bindings():
    try:
        return importlib.util.find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:
        return False


def test_the_launcher_takes_another_configuration(monkeypatch):
    """What reaches the kernel, without a GPU: CUDA's bindings are stood in for where they are missing."""
    if not has_bindings():
        bindings = MagicMock()
        monkeypatch.setitem(sys.modules, "cuda", MagicMock(bindings=bindings))
        monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
        for name in (LAUNCHER, "nologits.kernels.nvrtc"):
            monkeypatch.setitem(sys.modules, name, None)  # what is there now comes back, and the stand-in's module goes
            del sys.modules[name]
    launcher = importlib.import_module(LAUNCHER)
    seen = []
    monkeypatch.setattr(launcher, "load", lambda *arguments: seen.append(dict(arguments[4])) or MagicMock())
    monkeypatch.setattr(launcher, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(launcher, "on_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    logits = torch.zeros(2, 20_000)
    rows = make_rows(SamplingParams(top_k=5), 2, 20_000, logits.device, noise=False)
    shipped = filter_config(20_000, 2, 132)
    other = FilterConfig(4, 512, SearchConfig(ARITY=4, TRUNCATE=0))
    for config in (None, other):
        launcher.launch_mask(logits, rows, torch.empty_like(logits), -torch.inf, config=config)
    keys = ("CLUSTER", "THREADS", "MASK", "DRAW", "ARITY", "TRUNCATE", "DUPLICATES", "TIERED")
    assert [tuple(defines[key] for key in keys) for defines in seen] == [
        (shipped.cluster, shipped.threads, 1, 0, 0, 1, 1, 1), (4, 512, 1, 0, 4, 0, 1, 1),
    ]  # fmt: skip
