"""The command line as a user meets it: output, exit codes, and errors of one line that name the argument."""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from typer.testing import CliRunner

from nologits import SamplingParams, cli

pytest.importorskip("scipy")
transformers = pytest.importorskip("transformers")

WORDS = [f"w{index}" for index in range(120)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a random Llama of two layers and a tokenizer of 120 words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("model")
    vocab = {word: index for index, word in enumerate(["<unk>", "</s>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


class Outcome:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def nologits(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command in this process, by the entry point, so that errors take the way they take for a user."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str) -> Outcome:
        code = cli.main(arguments)
        return Outcome(code, *capfd.readouterr())

    return run


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    # A shell's background job ignores interrupts, and so would its children: they start as in the foreground.
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "from nologits.cli import main; sys.exit(main())"
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


class TestGenerate:
    def test_streams_text_to_stdout_and_notes_to_stderr(self, nologits: Any, model: str) -> None:
        result = nologits("generate", model, "--prompt", "w1 w2", "--seed", "3", "--max-tokens", "8")
        assert result.code == 0, result.err
        assert 1 <= len(result.out.split()) <= 8
        assert set(result.out.split()) <= {*WORDS, "<unk>"}
        assert "tokens/s" in result.err
        assert "[1, 122] in fp32" in result.err
        assert "Traceback" not in result.err

    def test_a_seed_repeats_the_text(self, nologits: Any, model: str) -> None:
        texts = [nologits("generate", model, "-p", "w1", "--seed", seed, "--max-tokens", "8").out for seed in ("3", "3", "4")]
        assert texts[0] == texts[1] != texts[2]

    def test_the_reference_draws_the_same_text(self, nologits: Any, model: str) -> None:
        options = ("-p", "w1", "--seed", "5", "--top-p", "0.9", "--max-tokens", "8")
        assert nologits("generate", model, *options).out == nologits("generate", model, *options, "--impl", "reference").out

    def test_batch_draws_different_rows(self, nologits: Any, model: str) -> None:
        result = nologits("generate", model, "-p", "w1", "--seed", "3", "--max-tokens", "6", "--batch", "3", "--top-k", "50")
        assert result.code == 0, result.err
        rows = [line.partition(": ") for line in result.out.splitlines()]
        assert [number for number, _, _ in rows] == ["1", "2", "3"]
        assert len({text for _, _, text in rows}) == 3

    def test_logprobs_are_shown_for_each_token(self, nologits: Any, model: str) -> None:
        result = nologits("generate", model, "-p", "w1", "--seed", "3", "--max-tokens", "4", "--top-k", "20", "--logprobs")
        assert result.code == 0, result.err
        *lines, total = [line.split() for line in result.out.splitlines()[1:]]
        assert 1 <= len(lines) <= 4
        # Fewer tokens share the mass after the filter: no token is less likely than before.
        assert all(0 >= float(processed) >= float(raw) for _, processed, raw in lines)
        assert float(total[1]) == pytest.approx(sum(float(processed) for _, processed, _ in lines), abs=1e-3)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="about the CPU's path")
    def test_says_of_how_many_draws_the_logits_were_made(
        self, nologits: Any, model: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from nologits import candidates

        options = ("generate", model, "-p", "w1", "--seed", "3", "--max-tokens", "4", "--top-p", "0.9")
        assert "no row of logits was made" in nologits(*options).err
        monkeypatch.setattr(candidates, "WIDTH", 2)  # a nucleus of the random model has more than two tokens
        assert "4 draws needed a whole row of logits, for their filters" in nologits(*options).err

    def test_says_how_many_draws_took_further_sweeps(self) -> None:
        from nologits.cli.generate import Generation, _how

        said = _how(Generation(torch.empty(1, 1), 1.0, open_rows=3))
        assert said == "no row of logits was made; 3 draws took further sweeps over the head, for their filters"

    def test_says_why_the_stock_loop_ran(self, nologits: Any, model: str) -> None:
        options = ("-p", "w1", "--max-tokens", "4", "--top-p", "0.8", "--min-p", "0.1")
        result = nologits("generate", model, *options)
        assert result.code == 0, result.err
        assert "transformers' own loop ran, which makes logits: min-p comes after top-p" in result.err
        assert "temporary memory" not in result.err
        assert logging.getLogger("nologits").level == logging.NOTSET, "the command's own quiet must end with it"
        refused = nologits("generate", model, *options, "--logprobs")
        assert refused.code == 2
        assert refused.err.startswith("error: --logprobs needs draws by nologits, got transformers' own loop: min-p")

    def test_compare_shows_both(self, nologits: Any, model: str) -> None:
        result = nologits("generate", model, "-p", "w1", "--temperature", "0", "--max-tokens", "6", "--compare")
        assert result.code == 0, result.err
        assert max(map(len, result.out.splitlines())) <= 80
        table = [line.split() for line in result.out.splitlines()]
        assert [line[0] for line in table[-2:]] == ["nologits", "transformers"]
        # Greedy: the same words side by side.
        panels = [line.split("││") for line in result.out.splitlines() if "││" in line]
        assert panels
        assert all(left.strip("│ ") == right.strip("│ ") for left, right in panels)


class TestErrors:
    """One line on standard error, exit code 2, no traceback, and nothing on standard output."""

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["generate", "--temperature", "-1"], "--temperature must be a finite number >= 0, got -1.0"),
            (["generate", "--temperature", "nan"], "--temperature must be a finite number >= 0, got nan"),
            (["generate", "--top-p", "1.5"], "--top-p must be a number in [0, 1], got 1.5"),
            (["generate", "--min-p", "-0.1"], "--min-p must be a number in [0, 1], got -0.1"),
            (["generate", "--top-k", "-5"], "--top-k must be an integer >= -1, got -5"),
            (["generate", "--seed", "-3"], "--seed must be in [0, 2**63), got -3"),
            (["generate", "--max-tokens", "0"], "--max-tokens must be at least 1, got 0"),
            (["generate", "--batch", "0"], "--batch must be at least 1, got 0"),
            (["generate", "--dtype", "int8"], "--dtype must be auto, float32, bfloat16, float16, got 'int8'"),
            (["generate", "--prompt", ""], "--prompt must not be empty, got ''"),
            (["generate", "no/such/folder"], "MODEL must be a local folder with a Hugging Face model, got 'no/such/folder'"),
            (["generate", "--impl", "magic"], "--impl must be one of auto, reference, torch, triton, hopper, got 'magic'"),
            (["generate", "--device", "abacus"], "--device must be auto, cpu, cuda or cuda:N, got 'abacus'"),
            (["generate", "--device", "cuda:99"], "--device must "),
            (["verify", "--impl", "magic"], "--impl must be one of auto, reference, torch, triton, hopper, got 'magic'"),
            (["verify", "--draws", "5"], "--draws must be at least 1000, got 5"),
            (["verify", "--plot", "/no/such/folder/a.png"], "--plot must be a file in a folder that exists"),
            (["verify", "--plot", "a.txt"], "--plot must end in .png, .pdf or .svg, got 'a.txt'"),
            (["generate", "--tempreature", "1"], "no such option: --tempreature"),
            (["generate", "--temperature", "warm"], "invalid value for '--temperature'"),
            (["frobnicate"], "no such command 'frobnicate'"),
        ],
        ids=" ".join,
    )
    def test_wrong_argument(self, nologits: Any, arguments: list[str], message: str) -> None:
        result = nologits(*arguments)
        assert result.code == 2
        assert result.err.startswith(f"error: {message}"), result.err
        assert result.err.count("\n") == 1
        assert not result.out

    def test_folder_without_a_model(self, nologits: Any, tmp_path: Path) -> None:
        result = nologits("generate", str(tmp_path))
        assert result.code == 2
        assert result.err.splitlines()[-1].startswith("error: MODEL must be a folder that transformers can load, got")
        assert "Traceback" not in result.err

    def test_more_tokens_than_positions(self, nologits: Any, model: str) -> None:
        result = nologits("generate", model, "-p", "w1 w2", "--max-tokens", "63")
        assert result.code == 2
        assert "--max-tokens must be at most 62" in result.err

    def test_triton_without_its_interpreter(self, nologits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        result = nologits("generate", "--impl", "triton", "--device", "cpu")
        assert result.code == 2
        assert result.err.startswith("error: --impl triton must have inputs that Triton can run on, got cpu")

    @pytest.mark.parametrize("package", ["typer", "rich"])
    def test_missing_packages_of_the_extra(self, nologits: Any, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name, *rest))
        result = nologits("doctor")
        assert (result.code, result.out) == (2, "")
        assert result.err == f"error: the command line needs {package}: pip install 'nologits[cli]'\n"


class TestDoctor:
    def test_json_is_one_object(self, nologits: Any) -> None:
        result = nologits("doctor", "--json")
        report = json.loads(result.out)
        assert result.code == 0
        assert report["ok"] is True
        assert report["noise_contract"] == 1
        assert report["versions"]["torch"] == torch.__version__
        assert {"device": "cpu", "impl": "torch"}.items() <= report["devices"][0].items()
        assert all(outcome["ok"] for outcome in report["self_test"])
        assert {"Philox4x32-10", "torch = reference"} <= {outcome["name"] for outcome in report["self_test"]}

    def test_fits_80_columns(self, nologits: Any) -> None:
        result = nologits("doctor")
        assert result.code == 0
        assert "3 of 3 known answers" in result.out
        assert max(map(len, result.out.splitlines())) <= 80

    def test_says_why_hopper_does_not_draw(self, nologits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from nologits.cli import doctor

        monkeypatch.setattr(doctor, "hopper_obstacle", lambda device: "it is a Tuesday")
        assert "cpu: not hopper: it is a Tuesday\n" in nologits("doctor").out
        report = json.loads(nologits("doctor", "--json").out)
        assert report["devices"][0]["obstacles"]["hopper"] == "it is a Tuesday"
        assert "cuda-bindings" in report["versions"]

    def test_hopper_is_tested_on_operands_that_its_kernels_take(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("triton")
        from nologits.cli import doctor

        if importlib.util.find_spec("cuda") is None:
            for name in ("cuda", "cuda.bindings"):
                monkeypatch.setitem(sys.modules, name, MagicMock())
            for name in ("nologits.hopper", "nologits.kernels.categorical_sm90", "nologits.kernels.nvrtc"):
                monkeypatch.setitem(sys.modules, name, None)  # restored as it was, absent
                del sys.modules[name]
        params = SamplingParams(temperature=5.0, seed=1, position=2)
        cpu = torch.device("cpu")
        assert doctor._handed_over(*doctor._operands("hopper", cpu), params) == ""
        assert "fp16" in doctor._handed_over(*doctor._operands("triton", cpu), params)

    def test_fails_when_the_hopper_kernels_hand_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from nologits import api
        from nologits.cli import doctor

        # Any implementation in its place: the point is what is asked of it.
        monkeypatch.setattr(api, "resolve", lambda impl, device: "reference" if impl == "reference" else "torch")
        asked: list[int] = []
        monkeypatch.setattr(doctor, "_handed_over", lambda *rest: asked.append(1) or "")
        passed = doctor._equality("hopper", torch.device("cpu"))
        assert (passed.ok, passed.detail, len(asked)) == (True, "56 of 56 tokens equal", 1)
        monkeypatch.setattr(doctor, "_handed_over", lambda *rest: "of the weather")
        failed = doctor._equality("hopper", torch.device("cpu"))
        assert (failed.ok, failed.detail) == (False, "its kernels did not run: of the weather")

    def test_lists_the_configurations_in_force(self, nologits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from nologits.cli import doctor
        from nologits.kernels import config

        monkeypatch.setattr(config, "architecture", lambda device: "sm90")
        rows = doctor.launches_in_force(torch.device("cpu"), ["reference", "torch", "triton", "hopper"])
        assert [(row["head"], row["B"]) for row in rows] == [
            (head, batch) for head in ("small", "large") for batch in (1, 16, 32, 64, 128, 256)
        ]
        assert rows[0]["triton"] == "128x16x128, 4 warps, 4 stages"
        assert rows[5]["hopper"] == "shared 128, 4 stages by 1, cluster 2"
        assert "hopper" not in doctor.launches_in_force(torch.device("cpu"), ["triton"])[0]

        describe = doctor._describe
        monkeypatch.setattr(doctor, "_describe", lambda device: describe(device) | {"launches": rows})
        out = nologits("doctor").out
        assert "B <=" in out
        assert "shared 128, 4 stages by 1, cluster 2" in out
        assert max(map(len, out.splitlines())) <= 80

    def test_fails_when_an_implementation_draws_other_tokens(self, nologits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from nologits import ops

        implementation = ops.implementation

        def broken(impl: str) -> Any:
            sample = implementation(impl)
            if impl == "reference":
                return sample
            return lambda *rest: (drawn := sample(*rest))._replace(tokens=drawn.tokens ^ 1)

        monkeypatch.setattr(ops, "implementation", broken)
        result = nologits("doctor")
        assert result.code == 1
        assert "FAIL" in result.out


class TestVerify:
    def test_passes_and_plots(self, nologits: Any, tmp_path: Path) -> None:
        plot = tmp_path / "counts.png"
        result = nologits("verify", "--draws", "2000", "--plot", str(plot))
        # With so few draws, T = 1.05 is not told from T = 1: a control that passes has to fail the run, and say so.
        assert result.code == 1
        assert "NOT REJECTED" in result.out
        assert " FAIL" not in result.out
        assert result.out.count(" pass ") == 6
        assert plot.read_bytes().startswith(b"\x89PNG")
        assert max(map(len, result.out.splitlines())) <= 80

    def test_rejects_a_sampler_with_another_temperature(self, nologits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from nologits import candidates, noise, reference

        monkeypatch.setattr(reference, "gumbel_noise", lambda *a, **k: 1.2 * noise.gumbel_noise(*a, **k))
        monkeypatch.setattr(candidates, "gumbel_at", lambda *a, **k: 1.2 * noise.gumbel_at(*a, **k))
        result = nologits("verify", "--draws", "2000", "--impl", "torch")
        assert result.code == 1
        assert result.out.count(" FAIL") >= 5

    def test_expected_probabilities_are_the_textbooks(self) -> None:
        from nologits.cli.verify import probabilities, tail_probability

        logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
        expect = {
            ("top_k", 2): [2 / 3, 1 / 3, 0, 0],
            ("top_p", 0.6): [2 / 3, 1 / 3, 0, 0],
            ("min_p", 0.3): [2 / 3, 1 / 3, 0, 0],
            ("temperature", 0.5): [16 / 22, 4 / 22, 1 / 22, 1 / 22],
        }
        for (name, value), shares in expect.items():
            assert probabilities(logits, **{name: value}).tolist() == pytest.approx(shares, abs=1e-7)
        assert tail_probability() == pytest.approx(0.0019650, abs=5e-8)


class TestCommand:
    def test_help_names_every_command(self) -> None:
        from nologits.cli.app import app

        result = CliRunner().invoke(app, ["--help"])
        assert result.exit_code == 0
        assert all(name in result.output for name in ("generate", "doctor", "verify", "tune", "bench"))

    def test_no_arguments_show_the_help(self, nologits: Any) -> None:
        result = nologits()
        assert result.code == 2
        assert "Usage" in result.out + result.err
        assert "error:" not in result.err

    def test_version(self, nologits: Any) -> None:
        from nologits import __version__

        assert nologits("--version").out == f"nologits {__version__}\n"

    def test_bench_without_its_packages(self, nologits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "nologits.bench.cli", None)
        result = nologits("bench")
        assert result.code == 2
        assert result.err.startswith("error: the benchmarks need ")
        assert result.err.count("\n") == 1

    def test_interrupt_leaves_no_traceback(self) -> None:
        process = start("verify", "--draws", "100000000")
        deadline = time.monotonic() + 100
        # Some C extensions swallow an interrupt while they are imported: wait until it has computed for a while since.
        while not self._begun(process.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        begun = self._computed(process.pid)
        while self._computed(process.pid) < begun + 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        try:
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == 130
        assert "Traceback" not in err

    @staticmethod
    def _begun(pid: int) -> bool:
        """scipy is loaded: ``verify`` imports it right before it draws."""
        maps = Path(f"/proc/{pid}/maps")
        return not maps.exists() or "scipy" in maps.read_text()

    @staticmethod
    def _computed(pid: int) -> float:
        """Seconds of processor time that it has had; where that cannot be read, of the clock."""
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists():
            return time.monotonic()
        user, system = stat.read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def test_error_in_a_process_of_its_own(self) -> None:
        out, err = (process := start("generate", "--top-p", "1.5")).communicate(timeout=120)
        assert (process.returncode, out) == (2, "")
        assert err == "error: --top-p must be a number in [0, 1], got 1.5\n"
