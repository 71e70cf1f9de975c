"""The suite ``vllm``: in a real engine both sides draw in turn, and a result says who drew it."""

import importlib.util
import json
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from nologits.bench import vllm_engine, vllm_suite
from nologits.bench.cli import bench
from nologits.bench.decoder import SHAPES
from nologits.bench.report import tables
from nologits.bench.vllm_engine import NEW_TOKENS, Decoded
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
    notes = [note["note"] for note in record["notes"]]
    assert notes[0].startswith("Model Runner V1, vLLM's own filters, ")
    spreads = [float(note.rpartition(" ")[2]) for note in notes[1:]]
    assert len(spreads) == 4
    assert all(4 < spread < 6 for spread in spreads)


def generations(times, taken, fallbacks=None):
    counters = {"steps": NEW_TOKENS, "taken": taken, "fallbacks": fallbacks or {}, "errors": 0}
    return [Decoded(us, counters) for us in times]


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
    record = {"schema": 1, "suite": "vllm", "rows": rows}
    (table,) = tables(record).renderables[1:]
    taken = next(column for column in table.columns if column.header == "taken")
    assert list(taken.cells)[3:] == ["100%", "50% !", "0%"]
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


def test_requests_out_of_step_are_no_result():
    """Where a prompt is read while others decode, a step's time is not that of a token."""
    engine = object.__new__(vllm_engine.Engine)
    engine.shape, engine.prompt_tokens = SHAPES[0], 4

    def generate(prompts, params, use_tqdm):
        for _ in range(NEW_TOKENS + 9):
            engine._llm.llm_engine.step()
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * NEW_TOKENS)]) for _ in prompts]

    class LikeVllm:
        def step(self):
            """A step."""

    engine._llm = SimpleNamespace(llm_engine=LikeVllm(), generate=generate)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_engine, "_parameters", lambda mode: None)
        with pytest.raises(RuntimeError, match=f"2 requests took {NEW_TOKENS + 9} steps for"):
            engine.decode(2, None, "nologits")
    assert "step" not in vars(engine._llm.llm_engine)


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is there")
def test_the_command_needs_vllm():
    result = CliRunner().invoke(bench, ["vllm"])
    assert "bench vllm must run in an environment with vLLM" in str(result.exception)
