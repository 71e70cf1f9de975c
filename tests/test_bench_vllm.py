"""The suite ``vllm``: in a real engine both sides draw in turn, and a result says who drew it."""

import importlib.util
import json

import pytest
import torch
from typer.testing import CliRunner

from nologits.bench import vllm_engine, vllm_suite
from nologits.bench.cli import bench
from nologits.bench.decoder import SHAPES
from nologits.bench.report import tables
from nologits.bench.suite import Plan
from nologits.bench.vllm_engine import NEW_TOKENS, Decoded, Times
from nologits.bench.vllm_model import fill

HAS_VLLM = importlib.util.find_spec("vllm") is not None


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not HAS_VLLM, reason="needs vLLM: make vllm-test")
def test_both_sides_in_one_engine(tmp_path, vllm_script):
    out = tmp_path / "record.json"
    vllm_script("vllm_bench_job.py", out, NOLOGITS_VLLM="1", VLLM_USE_V2_MODEL_RUNNER="0")
    record = json.loads(out.read_text())
    rows = record["rows"]
    cells = [(row["B"], row["mode"], row["provider"]) for row in rows]
    providers = ("decoder", "nologits", "vllm")
    assert cells == [(batch, mode, name) for batch in (1, 3) for mode in ("t06", "t06k20p95") for name in providers]
    assert {row["provider"]: row["taken_share"] for row in rows} == {"decoder": 1.0, "nologits": 1.0, "vllm": 0.0}
    assert {(row["fallbacks"], row["errors"]) for row in rows} == {("", 0)}
    assert all(0 < row["p20_us"] <= row["us"] <= row["p80_us"] for row in rows)
    assert all(0 < row["host_us"] < row["longest_us"] for row in rows)
    assert all(0 < row["middle_us"] < row["longest_us"] for row in rows)
    notes = [note["note"] for note in record["notes"]]
    assert notes[0].startswith("Model Runner V1, vLLM's own filters, ")
    spreads = [float(note.rpartition(" ")[2]) for note in notes[1:]]
    assert len(spreads) == 4
    assert all(4 < spread < 6 for spread in spreads)


def generations(times, taken, fallbacks=None):
    counters = {"steps": NEW_TOKENS, "taken": taken, "fallbacks": fallbacks or {}, "errors": 0}
    return [Decoded(Times(us, us - 1, us + 50, us / 2), counters) for us in times]


def measured(batch):
    whole = batch * NEW_TOKENS
    return {
        "decoder": generations([100.0, 101.0, 99.0], whole),
        "nologits": generations([110.0, 112.0, 108.0], whole // 2, {"penalties": whole - whole // 2}),
        "vllm": generations([121.0, 140.0, 120.0], 0),
    }


def test_rows_say_who_drew(tmp_path):
    rows = [row for batch in (1, 8) for row in vllm_suite.make_rows(SHAPES[0], batch, "t06", measured(batch))]
    floor, ours, stock = rows[3:]
    assert [row["us"] for row in rows[3:]] == [100.0, 110.0, 121.0]
    assert [row["ratio_to_decoder"] for row in rows[3:]] == [1.0, 1.1, 1.21]
    assert [row["speedup"] for row in rows[3:]] == [None, 1.1, None]
    assert (floor["taken_share"], ours["taken_share"], stock["taken_share"]) == (1.0, 0.5, 0.0)
    assert ours["fallbacks"] == "penalties"
    assert (ours["middle_us"], ours["longest_us"], ours["host_us"]) == (109.0, 162.0, 55.0)
    record = {"schema": 1, "suite": "vllm", "rows": rows}
    (table,) = tables(record).renderables[1:]
    taken = next(column for column in table.columns if column.header == "taken")
    assert list(taken.cells)[3:] == ["100%", "50% !", "0%"]
    host = next(column for column in table.columns if column.header == "host us")
    assert list(host.cells)[3:] == ["50", "55", "60"]
    pytest.importorskip("matplotlib")
    from nologits.bench.plots import write_plots

    assert [path.name for path in write_plots(record, tmp_path)] == ["vllm-qwen3-1.7b-t06.png"]


def test_logits_have_a_trained_models_spread():
    torch.manual_seed(1)
    model = torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.embed_tokens = torch.nn.Embedding(4000, 256)
    model.model.norm = torch.nn.RMSNorm(256)
    fill(model)
    hidden = model.model.norm(torch.randn(64, 256))
    assert 4.8 < (hidden @ model.model.embed_tokens.weight.T).std() < 5.2


def test_a_time_is_that_of_steps_in_which_all_decode():
    """Requests that arrive late, and prompts that are read meanwhile, are no part of it."""
    reading = [(second, 1 + second, 400, 9) for second in range(3)]
    decoding = [(10 + 2 * second, 3, 3, 0.5) for second in range(50)]
    ending = [(1000 + second, 2, 2, 9) for second in range(5)]
    assert vllm_engine.step_times(reading + decoding + ending, 3) == (2e6, 2e6, 2e6, 0.5e6)
    late = [(begin + 41 * (step > 30), *rest) for step, (begin, *rest) in enumerate(decoding)]
    assert vllm_engine.step_times(late, 3) == (3e6, 2e6, 43e6, 0.5e6)
    with pytest.raises(RuntimeError, match=r"only 31 of 43 steps had 3 requests that decode, 32 are needed"):
        vllm_engine.step_times(reading + decoding[:40], 3)


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is there")
def test_the_command_needs_vllm():
    result = CliRunner().invoke(bench, ["vllm"])
    assert "bench vllm must run in an environment with vLLM" in str(result.exception)


def test_each_turn_has_another_order():
    asked = []

    class Engine:
        def decode(self, batch, mode, who):
            asked.append(who)
            return who

    plan = Plan(["qwen3-1.7b"], [1], ["t06"], ["decoder", "nologits", "vllm"], 6)
    measured = vllm_suite.measure(Engine(), 1, "t06", plan)
    assert {name: len(done) for name, done in measured.items()} == {"decoder": 6, "nologits": 6, "vllm": 6}
    assert len({tuple(asked[turn : turn + 3]) for turn in range(0, 18, 3)}) == 6
