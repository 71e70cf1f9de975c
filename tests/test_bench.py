"""The benchmark suite as far as it goes without a GPU: what it measures, refuses, skips, writes and draws."""

import csv
import importlib.util
import json
import math
import sys
import types

import pytest
import torch

import nologits as nl
from nologits import cli

pytest.importorskip("typer")
pytest.importorskip("rich")

from nologits.bench import cases, head, modes, peers, providers, report, suite, timing
from nologits.bench.gate import HeadGate

TINY = cases.Case("tiny", 512, 32, "a test's")

# The keys of the issue, written out: renaming one breaks whoever reads the files.
KEYS = ["case", "V", "D", "B", "provider", "mode", "us", "p20_us", "p80_us", "ratio_to_matmul", "extra_bytes"]
EXTRA_KEYS = ["gbps", "tflops", "bandwidth_share", "speedup", "captured", "fallback_rows"]
EXTRA_KEYS += [f"candidates_{which}" for which in ("median", "p99", "max")]
HEADER = ["schema", "suite", "gpu", "driver", "torch", "triton", "commit", "date"]
PUBLISHED = {
    "small": (151_936, 4_096),
    "large": (128_256, 8_192),
    "llama-3-8b": (128_256, 4_096),
    "llama-3-70b": (128_256, 8_192),
    **{f"qwen3-{size}": (151_936, depth) for size, depth in (("0.6b", 1_024), ("1.7b", 2_048), ("4b", 2_560), ("8b", 4_096))},
    **{f"qwen3-{size}": (151_936, 5_120) for size in ("14b", "32b")},
    **{f"gemma-3-{size}": (262_144, depth) for size, depth in (("270m", 640), ("1b", 1_152))},
    **{f"gemma-3-{size}": (262_208, depth) for size, depth in (("4b", 2_560), ("12b", 3_840), ("27b", 5_376))},
    **{f"gpt-oss-{size}": (201_088, 2_880) for size in ("20b", "120b")},
    "deepseek-v3": (129_280, 7_168),
    "kimi-k2": (163_840, 7_168),
    "smollm2": (49_152, 576),
}


def tiny_inputs(batch=5, mode="plain"):
    return cases.make_inputs(cases.make_weight(TINY, "cpu"), batch, mode)


def draw(inputs, impl="torch", logprobs=False, top_logprobs=0):
    return inputs.head.sample(inputs.hidden, inputs.params, impl=impl, logprobs=logprobs, top_logprobs=top_logprobs)


def cell(case, batch=1, mode="plain"):
    return suite.Cell(case.name, case.vocab, case.depth, batch, mode, lambda: tiny_inputs(batch, mode))


def prepare(inputs, names, mode="plain"):
    return suite.prepare(head.SUITE, inputs, mode, names)


def make_record(batches=(1, 16, 64), modes=("plain",)):
    """A record as the suite makes it, of times that were never measured."""
    us = {"matmul": 300.0, "nologits-triton": 310.0, "multinomial": 450.0, "flashsampling": 400.0}
    ceilings = timing.Ceilings(4_200.0, 790.0)
    rows = []
    for batch in batches:
        for mode in modes:
            times = {name: timing.Timing(t + batch, t + batch - 1, t + batch + 2, True) for name, t in us.items()}
            rows += head.make_rows(cell(cases.CASES[0], batch, mode), times, dict.fromkeys(us, 1_000), ceilings)
    header = dict.fromkeys(HEADER[2:], "x")
    return {"schema": 1, "suite": "head"} | header | ceilings._asdict() | {"skipped": [], "rows": rows}


class TestCases:
    def test_every_published_head_is_there(self):
        shapes = {case.name: (case.vocab, case.depth) for case in cases.CASES}
        shapes |= {name: shapes[target] for name, target in cases.ALIASES.items()}
        assert shapes == PUBLISHED

    def test_a_shape_is_measured_once(self):
        assert len({case.name for case in cases.CASES}) == len({(c.vocab, c.depth) for c in cases.CASES}) == len(cases.CASES)

    def test_inputs_have_the_spread_of_a_model_and_seeds_of_their_own(self):
        inputs = tiny_inputs(batch=64)
        assert float((inputs.hidden.float() @ inputs.weight.float().T).std()) == pytest.approx(5, rel=0.1)
        assert len(set(inputs.params.seed.tolist())) == 64
        assert not torch.equal(draw(inputs).tokens, draw(tiny_inputs(64, "greedy")).tokens)

    @pytest.mark.parametrize("mode", modes.MODES)
    def test_the_draws_leave_torchs_generator_alone(self, mode):
        params = tiny_inputs(4, mode).params
        assert (params.seed.dtype, params.position.dtype) == (torch.uint64, torch.int64)
        before = torch.get_rng_state()
        draw(tiny_inputs(4, mode))
        assert torch.equal(before, torch.get_rng_state())
        draw(tiny_inputs(4)._replace(params=nl.SamplingParams(seed=torch.arange(4))))  # the control: int64 seeds draw from it
        assert not torch.equal(before, torch.get_rng_state())

    def test_counts_of_bytes_and_operations(self):
        assert cases.traffic_bytes(100, 10, 3) == 2 * 100 * 10 + 2 * 3 * 10
        assert cases.operations(100, 10, 3) == 6_000


class TestGate:
    @pytest.mark.parametrize("mode", modes.MODES)
    def test_a_right_sampler_passes(self, mode):
        inputs = tiny_inputs(16, mode)
        assert HeadGate(inputs, mode).check("ours", draw(inputs, **modes.MODES[mode].results)) is None

    @pytest.mark.parametrize("mode", modes.MODES)
    @pytest.mark.parametrize("batch", [1, 40])
    def test_one_wrong_token_is_refused(self, mode, batch):
        inputs = tiny_inputs(batch, mode)
        right = draw(inputs, logprobs="processed")
        wrong = right.tokens.clone()
        wrong[-1] ^= 1
        with pytest.raises(RuntimeError, match=rf"broken \({mode}\): 1 of {batch} tokens differ .* nothing is measured"):
            HeadGate(inputs, mode).check("broken", right._replace(tokens=wrong))

    def test_a_token_that_rounding_explains_is_counted(self):
        inputs = tiny_inputs(3, "greedy")
        token = int(draw(inputs).tokens[0])
        twin = (token + 1) % TINY.vocab
        inputs.weight[twin] = inputs.weight[token]  # the same logit: either may win
        drawn = draw(inputs)
        other = {token: twin, twin: token}[int(drawn.tokens[0])]
        moved = drawn.tokens.clone()
        moved[0] = other
        noted = HeadGate(inputs, "greedy").check("ours", drawn._replace(tokens=moved))
        assert noted == "ours: 1 of 3 tokens differ from the reference's, within rounding"

    def test_wrong_logprobs_are_refused(self):
        inputs = tiny_inputs(4, "logprobs")
        right = draw(inputs, logprobs="processed")
        for change in (right.logprobs + 0.02, right.logprobs * math.nan, None):
            with pytest.raises(RuntimeError, match="log-probabilit"):
                HeadGate(inputs, "logprobs").check("broken", right._replace(logprobs=change))

    def test_a_wrong_shape_is_refused(self):
        inputs = tiny_inputs(4)
        for drawn in (draw(inputs).tokens, nl.Samples(draw(inputs).tokens[:3])):
            with pytest.raises(RuntimeError, match="must return one token a row"):
                HeadGate(inputs, "plain").check("broken", drawn)

    def test_the_suite_asks_the_gate(self, monkeypatch):
        """Control of the wiring: the same wrong implementation under a provider's name."""
        inputs = tiny_inputs(8)

        def broken(inputs, mode):
            drawn = draw(inputs)
            return lambda: drawn._replace(tokens=drawn.tokens ^ 1)

        monkeypatch.setitem(providers.PROVIDERS, "nologits-triton", broken)
        with pytest.raises(RuntimeError, match="8 of 8 tokens differ"):
            prepare(inputs, ["matmul", "nologits-triton"])


class TestProviders:
    def test_names_of_the_issue(self):
        assert set(providers.PROVIDERS) == {
            *("nologits-hopper", "nologits-triton", "matmul", "multinomial", "multinomial-compiled"),
            *("flashinfer-gumbel", "flashinfer-topk-topp", "flashsampling"),
            *("matmul-nologits", "matmul-vllm-qrita", "matmul-flashinfer"),
        }

    def test_an_implementation_that_cannot_run_is_skipped_with_its_reason(self):
        inputs = tiny_inputs()
        with pytest.raises(peers.SkipError, match=r"impl must be one of .* got 'nonesuch'"):
            providers.nologits("nonesuch")(inputs, "plain")
        calls, reasons, _ = prepare(inputs, ["nologits-hopper", "matmul"])
        assert list(calls) == ["matmul"]
        assert "hopper" in reasons["nologits-hopper"]

    def test_an_error_of_ours_is_not_a_skip(self, monkeypatch):
        inputs = tiny_inputs()

        def failing(*_args, **_options):
            raise RuntimeError("a bug")

        monkeypatch.setattr(inputs.head, "sample", failing)
        with pytest.raises(RuntimeError, match="a bug"):
            providers.nologits("triton")(inputs, "plain")

    def test_a_peer_that_fails_when_called_is_skipped(self, monkeypatch):
        def failing(inputs, mode):
            def call():
                raise RuntimeError("Ninja build failed.\nlong output")

            return call

        monkeypatch.setitem(providers.PROVIDERS, "flashsampling", failing)
        calls, reasons, _ = prepare(tiny_inputs(), ["matmul", "flashsampling"])
        assert (list(calls), reasons) == (["matmul"], {"flashsampling": "RuntimeError: Ninja build failed."})

    @pytest.mark.parametrize("mode", modes.UNFILTERED)
    def test_the_textbook(self, mode):
        inputs = tiny_inputs(6, mode)
        logits = (inputs.hidden @ inputs.weight.T).float()
        torch.manual_seed(0)
        drawn = providers.multinomial(inputs, mode)()
        if mode == "greedy":
            assert torch.equal(drawn, logits.argmax(-1))
            return
        tokens, logprobs = drawn if mode == "logprobs" else (drawn, None)
        assert tokens.shape == (6, 1)
        if logprobs is not None:
            torch.testing.assert_close(logprobs, logits.log_softmax(-1).gather(1, tokens), rtol=1e-4, atol=1e-4)

    def test_modes_that_peers_lack(self):
        for name in ("flashinfer-gumbel", "flashinfer-topk-topp"):
            with pytest.raises(peers.SkipError, match="mode plain only"):
                providers.PROVIDERS[name](tiny_inputs(), "greedy")
        with pytest.raises(peers.SkipError, match="no log-probabilities"):
            providers.flashsampling(tiny_inputs(), "logprobs")


@pytest.mark.usefixtures("no_peers")
class TestPeers:
    def write_flashinfer(self, folder, text="import torch\nfrom . import beside\nsampling_from_logits = beside.draw\n"):
        (folder / "flashinfer").mkdir()
        (folder / "flashinfer" / "__init__.py").write_text("raise ImportError('wants NCCL')\n")
        (folder / "flashinfer" / "beside.py").write_text("def draw(logits, seed, offset):\n    return logits.argmax(-1)\n")
        (folder / "flashinfer" / "sampling.py").write_text(text)

    def test_absent(self, monkeypatch):
        monkeypatch.setattr(peers, "_installed", lambda name: None)
        with pytest.raises(peers.SkipError, match="set NOLOGITS_FLASHINFER to a folder that holds it"):
            peers.flashinfer_sampling()
        with pytest.raises(peers.SkipError, match="set NOLOGITS_FLASHSAMPLING to the src folder"):
            peers.flashsampling_kernel()

    def test_a_folder_without_it(self, monkeypatch, tmp_path):
        monkeypatch.setenv(peers.FLASHINFER, str(tmp_path))
        monkeypatch.setenv(peers.FLASHSAMPLING, str(tmp_path))
        with pytest.raises(peers.SkipError, match=f"must be a folder that holds flashinfer/sampling.py, got {tmp_path}"):
            peers.flashinfer_sampling()
        with pytest.raises(peers.SkipError, match=r"does not import from .*ModuleNotFoundError"):
            peers.flashsampling_kernel()

    def test_flashinfer_loads_without_its_own_init(self, monkeypatch, tmp_path):
        self.write_flashinfer(tmp_path)
        monkeypatch.setenv(peers.FLASHINFER, str(tmp_path))
        inputs = tiny_inputs(3)
        drawn = providers.flashinfer_gumbel(inputs, "plain")()
        assert torch.equal(drawn, (inputs.hidden @ inputs.weight.T).argmax(-1))
        assert sys.path[-1] == str(tmp_path)

    def test_an_installed_flashinfer_is_found(self, monkeypatch, tmp_path):
        self.write_flashinfer(tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))
        assert peers.flashinfer_sampling().sampling_from_logits.__module__ == "flashinfer.beside"

    def test_a_flashinfer_that_does_not_import_leaves_nothing(self, monkeypatch, tmp_path):
        self.write_flashinfer(tmp_path, "import no_such_package_at_all\n")
        monkeypatch.setenv(peers.FLASHINFER, str(tmp_path))
        for _ in range(2):  # the second time too
            with pytest.raises(peers.SkipError, match="ModuleNotFoundError: No module named 'no_such_package_at_all'"):
                peers.flashinfer_sampling()
        assert "flashinfer" not in sys.modules

    def test_flashsampling_loads_and_leaves_no_stand_ins(self, monkeypatch, tmp_path):
        package = tmp_path / "fused_mm_sampling"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "core.py").write_text(
            "import flashinfer, nvtx\n\ndef fused_mm_sample_triton(*args, **options):\n    return 3\n"
        )
        monkeypatch.setenv(peers.FLASHSAMPLING, str(tmp_path))
        monkeypatch.delitem(sys.modules, "nvtx", raising=False)
        assert providers.flashsampling(tiny_inputs(), "plain")() == 3
        assert not any(isinstance(sys.modules.get(n), types.ModuleType) and sys.modules[n].__spec__ is None
                       for n in ("flashinfer", "nvtx"))  # fmt: skip


class TestRecord:
    def test_keys_and_their_order(self):
        record = make_record()
        assert list(record)[:8] == HEADER
        assert list(record)[-1] == "rows"
        for row in record["rows"]:
            assert list(row)[: len(KEYS)] == KEYS
            assert list(row)[len(KEYS) :] == EXTRA_KEYS

    def test_values(self):
        us = {"matmul": 100.0, "nologits-triton": 120.0, "multinomial": 300.0, "flashsampling": 180.0}
        times = {name: timing.Timing(t, t - 1, t + 1, True) for name, t in us.items()}
        case = cases.Case("c", 1_000, 100, "m")
        rows = head.make_rows(cell(case, 4), times, dict.fromkeys(us, 7), timing.Ceilings(4.0, 1.0))
        by_name = {row["provider"]: row for row in rows}
        ours = by_name["nologits-triton"]
        assert (ours["ratio_to_matmul"], ours["us"], ours["p20_us"], ours["p80_us"]) == (1.2, 120, 119, 121)
        assert ours["speedup"] == 1.5  # against flashsampling; the matmul draws nothing
        assert ours["gbps"] == round(2 * 100 * 1_004 / 120e-6 / 1e9, 1)
        assert ours["bandwidth_share"] == pytest.approx(2 * 100 * 1_004 / 120e-6 / 4e9, abs=1e-3)
        assert by_name["multinomial"]["speedup"] is None

    def test_without_a_matmul_the_record_is_still_json(self):
        times = {"nologits-triton": timing.Timing(1.0, 1.0, 1.0, False)}
        row = head.make_rows(cell(TINY), times, {"nologits-triton": 0}, timing.Ceilings(1.0, 1.0))[0]
        assert (row["ratio_to_matmul"], row["speedup"], row["captured"]) == (None, None, False)
        json.loads(json.dumps(row, allow_nan=False))

    def test_percentiles(self):
        times = timing.summary([float(value) for value in range(100, 0, -1)], True)
        assert (times.us, times.p20_us, times.p80_us) == (51, 21, 81)
        assert timing.summary([5.0], False) == timing.Timing(5, 5, 5, False)

    def test_commit(self, monkeypatch):
        monkeypatch.setenv("NOLOGITS_COMMIT", "abc1234")
        assert suite.commit() == "abc1234"
        monkeypatch.delenv("NOLOGITS_COMMIT")
        monkeypatch.setenv("GIT_DIR", "/no/such/repository")
        assert suite.commit() == "unknown"

    @pytest.fixture
    def on_the_cpu(self, monkeypatch):
        """The tiny head with everything but the clock."""
        monkeypatch.setattr(head, "CASES", (TINY,))
        monkeypatch.setattr(head, "make_weight", lambda case: cases.make_weight(case, "cpu"))
        monkeypatch.setattr(suite, "environment", lambda: dict.fromkeys(HEADER[2:], "x"))
        monkeypatch.setattr(suite, "measure_ceilings", lambda: timing.Ceilings(1.0, 1.0))
        monkeypatch.setattr(suite, "measure", lambda calls, repeats: {n: timing.Timing(2.0, 1.0, 3.0, True) for n in calls})
        monkeypatch.setattr(suite, "extra_bytes", lambda call: 64)
        monkeypatch.setitem(providers.PROVIDERS, "nologits-triton", providers.nologits("torch"))

    def test_the_suite_from_end_to_end(self, monkeypatch, on_the_cpu):
        """The cells, the gate, the skips, the rows."""
        monkeypatch.delenv(peers.FLASHSAMPLING, raising=False)
        peers.flashsampling_kernel.cache_clear()
        names = ["matmul", "nologits-hopper", "nologits-triton", "multinomial", "flashsampling", "matmul-nologits"]
        notes, cells, record = [], [], {}
        plan = suite.Plan(["tiny"], [1, 3], list(modes.MODES), names)
        suite.run(head.SUITE, plan, record, notes.append, cells.append)
        assert len(cells) == plan.cells == 2 * (3 + 5 + 1 + 3 + 1)
        assert cells[0] == "tiny, B = 1, plain"
        assert list(record)[:8] == HEADER
        for mode in modes.MODES:
            measured = [row["provider"] for row in record["rows"] if row["mode"] == mode]
            peer = "multinomial" if mode in modes.UNFILTERED else "matmul-nologits"
            assert measured == ["matmul", "nologits-triton", peer] * 2
        assert {(row["B"], row["mode"]) for row in record["rows"]} == {(b, m) for b in (1, 3) for m in modes.MODES}
        assert len(record["skipped"]) == len(notes) == 39  # three providers in each mode, told once and not a batch size each
        json.dumps(record, allow_nan=False)

    @pytest.mark.parametrize("error", [RuntimeError("a bug\nof ours"), KeyboardInterrupt()])
    def test_a_failure_loses_no_row(self, monkeypatch, on_the_cpu, tmp_path, capfd, error):
        """The second cell fails; the first is written, with the error beside it, and the error still ends the run."""
        right = providers.PROVIDERS["nologits-triton"]

        def fails_later(inputs, mode):
            if len(inputs.hidden) == 3:
                raise error
            return right(inputs, mode)

        monkeypatch.setitem(providers.PROVIDERS, "nologits-triton", fails_later)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr("nologits.bench.cli.CASES", (TINY,))
        arguments = ["--case", "tiny", "--batch", "1,3", "--provider", "matmul,nologits-triton"]
        arguments += ["--output", str(tmp_path / "r.json"), "--csv", str(tmp_path / "r.csv")]
        if isinstance(error, RuntimeError):
            with pytest.raises(RuntimeError, match="a bug"):  # a traceback and exit code 1
                cli.main(["bench", *arguments])
        else:
            assert cli.main(["bench", *arguments]) == 130
        out, err = capfd.readouterr()
        record = json.loads(out.splitlines()[-1])
        assert record == json.loads((tmp_path / "r.json").read_text())
        assert record["error"] == ("RuntimeError: a bug" if isinstance(error, RuntimeError) else "KeyboardInterrupt")
        assert [(row["B"], row["provider"]) for row in record["rows"]] == [(1, "matmul"), (1, "nologits-triton")]
        assert f"incomplete: {record['error']}" in err
        assert (tmp_path / "r.csv").read_text().count("\n") == 3

    def test_a_gate_that_fails_at_once_leaves_a_record_without_rows(self, monkeypatch, on_the_cpu, capfd):
        def broken(inputs, mode):
            drawn = draw(inputs)
            return lambda: drawn._replace(tokens=drawn.tokens ^ 1)

        monkeypatch.setitem(providers.PROVIDERS, "nologits-triton", broken)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr("nologits.bench.cli.CASES", (TINY,))
        with pytest.raises(RuntimeError, match="nothing is measured"):
            cli.main(["bench", "--case", "tiny", "--batch", "4", "--provider", "nologits-triton"])
        record = json.loads(capfd.readouterr().out)
        assert record["rows"] == []
        assert record["error"].startswith("RuntimeError: nologits-triton (plain): 4 of 4 tokens differ")


class TestReport:
    def test_csv_round_trip(self, tmp_path):
        record = make_record(modes=("plain", "greedy"))
        record["rows"][-1]["tile"] = 128  # other suites have keys of their own
        report.write_csv(record, tmp_path / "new" / "out.csv")
        with (tmp_path / "new" / "out.csv").open(newline="") as file:
            reader = csv.DictReader(file)
            assert reader.fieldnames[: len(KEYS)] == KEYS
            back = list(reader)
        for got, row in zip(back, record["rows"], strict=True):
            assert got == {"tile": ""} | {key: "" if value is None else str(value) for key, value in row.items()}

    def test_table_has_the_columns_and_numbers(self, nologits, tmp_path):
        (tmp_path / "r.json").write_text(json.dumps(make_record(batches=(16,))))
        code, out, err = nologits("bench", "plot", tmp_path / "r.json")
        assert (code, out) == (0, "")
        assert all(column in err for column in report.COLUMNS["head"])
        line = next(line for line in err.splitlines() if "nologits-triton" in line)
        assert [cell.strip() for cell in line.strip("│ ").split("│")] == [
            *("nologits-triton", "326.0", "325-328", "3,818", "90.9%", "1.032", "0.00 MB", "1.28x"),
        ]

    @pytest.mark.parametrize(
        "text",
        ["{", "[]", '{"schema": 2, "rows": [1]}', '{"schema": 1, "rows": []}', '{"schema": 1, "rows": [{"case": "a"}]}'],
    )
    def test_other_files_are_refused_in_one_line(self, nologits, tmp_path, text):
        (tmp_path / "r.json").write_text(text)
        code, out, err = nologits("bench", "plot", tmp_path / "r.json")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("error: RECORD must ")

    def test_no_file(self, nologits, tmp_path):
        code, _, err = nologits("bench", "plot", tmp_path / "none.json")
        assert code == 2
        assert err.startswith("error: RECORD must be a JSON file")


class TestPlots:
    @pytest.fixture(autouse=True)
    def needs_matplotlib(self):
        pytest.importorskip("matplotlib")

    def test_replot_from_a_file(self, nologits, tmp_path):
        (tmp_path / "r.json").write_text(json.dumps(make_record(modes=("plain", "greedy"))))
        code, out, _ = nologits("bench", "plot", tmp_path / "r.json", "--plots", tmp_path / "p", "--csv", tmp_path / "r.csv")
        assert code == 0
        assert out.split() == [str(tmp_path / "p" / f"head-small-{mode}.png") for mode in ("plain", "greedy")]
        for path in out.split():
            with open(path, "rb") as file:
                data = file.read()
            assert data.startswith(b"\x89PNG")
            assert len(data) > 20_000
        assert (tmp_path / "r.csv").read_text().startswith("case,V,D,B,provider")

    @pytest.mark.parametrize("ceilings", [{}, {"read_gbps": 4_200.0}, {"matmul_tflops": 790.0}])
    def test_one_batch_size_no_matmul_and_ceilings_missing(self, tmp_path, ceilings):
        from nologits.bench.plots import write_plots

        record = make_record(batches=(8,))
        record = {key: value for key, value in record.items() if key not in ("read_gbps", "matmul_tflops")} | ceilings
        record["rows"] = [row | {"ratio_to_matmul": None} for row in record["rows"] if row["provider"] != "matmul"]
        assert [path.stat().st_size > 0 for path in write_plots(record, tmp_path)] == [True]

    def test_lines_hold_each_providers_fastest_row_by_batch(self):
        from nologits.bench.plots import lines

        rows = [{"provider": "a", "B": b, "us": us} for b, us in ((4, 9.0), (1, 3.0), (4, 5.0))]
        rows.append({"provider": "matmul", "B": 1, "us": 2.0})
        assert [(name, [(r["B"], r["us"]) for r in line]) for name, line in lines(rows).items()] == [
            ("matmul", [(1, 2.0)]),
            ("a", [(1, 3.0), (4, 5.0)]),
        ]

    def test_every_provider_has_a_colour_and_marker_of_its_own(self):
        from nologits.bench import e2e, tp, vllm_suite
        from nologits.bench.filter_providers import FILTER_PROVIDERS
        from nologits.bench.plots import _MODES, E2E_STYLES, FILTER_STYLES, HEAD_STYLES, TP_STYLES, VLLM_STYLES

        assert set(_MODES) == {*modes.MODES, *modes.FILTER_MODES, *e2e.E2E_MODES}
        for styles, known in (
            (HEAD_STYLES, providers.PROVIDERS),
            (FILTER_STYLES, FILTER_PROVIDERS),
            (TP_STYLES, tp.PROVIDERS),
            (E2E_STYLES, e2e.SAMPLERS),
            (VLLM_STYLES, vllm_suite.PROVIDERS),
        ):
            assert set(styles) == set(known)
            assert (
                len({colour for colour, _ in styles.values()}) == len({marker for _, marker in styles.values()}) == len(styles)
            )


class TestCommand:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--case", "tiny"], "--case must be one of small, large, "),
            (["--case", "small,tiny"], "--case must be one of "),
            (["--batch", "0"], "--batch must be an integer of at least 1, or all, got '0'"),
            (["--batch", "1,-4"], "--batch must be an integer of at least 1, or all, got '-4'"),
            (["--batch", "many"], "--batch must be an integer of at least 1, or all, got 'many'"),
            (["--mode", "fast"], "--mode must be one of plain, logprobs, greedy, k50, "),
            (["--provider", "vllm"], "--provider must be one of matmul, nologits-hopper, "),
            (["--repeats", "1"], "invalid value for '--repeats'"),
            (["plat"], "no such command 'plat'"),
        ],
        ids=" ".join,
    )
    def test_wrong_argument(self, nologits, arguments, message):
        code, out, err = nologits("bench", *arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"error: {message}"), err

    @pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
    def test_needs_a_gpu(self, nologits):
        assert nologits("bench")[::2] == (2, "error: bench must run on a machine with a CUDA GPU, got none\n")

    def run_with(self, monkeypatch, nologits, *arguments):
        """The command with the measuring replaced; returns the plan it made and what it wrote."""
        from nologits.bench import cli as bench_cli

        plans = []

        def run(suite, plan, record, note, begin):
            assert suite.name == "head"
            plans.append(plan)
            note("a peer skipped")
            begin("a cell")
            record |= make_record()

        monkeypatch.setattr(bench_cli, "run", run)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        code, out, err = nologits("bench", *arguments)
        assert code == 0, err
        return plans[0], out, err

    def test_defaults(self, monkeypatch, nologits):
        plan, _, _ = self.run_with(monkeypatch, nologits)
        assert plan == (["small", "large"], [1, 16, 64, 128, 256], ["plain"], list(providers.PROVIDERS), 40)

    def test_all_and_lists_and_models(self, monkeypatch, nologits):
        arguments = ("--case", "all", "--batch", "all", "--mode", "all")
        plan, _, _ = self.run_with(monkeypatch, nologits, *arguments)
        assert plan[:3] == ([c.name for c in cases.CASES], [1, 2, 4, 8, 16, 32, 64, 128, 256, 512], list(modes.MODES))
        arguments = ("--case", "qwen3-8b,small", "--case", "kimi-k2", "--batch", "64,2", "--batch", "3", "--provider", "matmul")
        plan, _, _ = self.run_with(monkeypatch, nologits, *arguments)
        assert plan[:4] == (["small", "kimi-k2"], [2, 3, 64], ["plain"], ["matmul"])

    def test_json_is_the_last_line_and_the_rest_goes_to_stderr(self, monkeypatch, nologits, tmp_path):
        pytest.importorskip("matplotlib")
        files = (tmp_path / "a" / "r.json", tmp_path / "b" / "r.csv", tmp_path / "p")
        _, out, err = self.run_with(
            monkeypatch, nologits, "--output", files[0], "--csv", files[1], "--plots", files[2]
        )  # fmt: skip
        assert out.count("\n") == 1
        assert json.loads(out) == json.loads(files[0].read_text()) == make_record()
        assert "a peer skipped" in err
        assert "speed-up" in err
        assert files[1].exists()
        assert [path.name for path in files[2].iterdir()] == ["head-small-plain.png"]

    def test_plots_without_matplotlib_are_refused_before_measuring(self, monkeypatch, nologits, tmp_path):
        from nologits.bench import cli as bench_cli

        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find(name, *rest)
        )
        monkeypatch.setattr(bench_cli, "run", lambda *_: pytest.fail("it measured"))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        code, out, err = nologits("bench", "--plots", tmp_path)
        assert (code, out) == (2, "")
        assert err == "error: --plots needs matplotlib: pip install 'nologits[bench]'\n"
