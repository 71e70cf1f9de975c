"""The suite of whole decode steps: its decoder is a real model's, a step draws what the library draws, wrong tokens stop it."""

import pytest
import torch
from typer.testing import CliRunner

from nologits.bench import e2e
from nologits.bench.cli import bench
from nologits.bench.decoder import SHAPES, Decoder, Shape
from nologits.bench.plots import write_plots
from nologits.bench.report import tables
from nologits.bench.suite import Cell, prepare
from nologits.bench.timing import Ceilings, Timing

TINY = Shape("tiny", "a test", 640, 64, 3, 8, 2, 16, 96)


def test_the_decoder_is_qwen3():
    """With its weights in transformers' model, and its cache before it, the same hidden states."""
    transformers = pytest.importorskip("transformers")
    context, batch = 9, 4
    decoder = Decoder(TINY, batch, context, torch.device("cpu"), torch.float32)
    config = transformers.Qwen3Config(
        vocab_size=TINY.vocab, hidden_size=TINY.depth, intermediate_size=TINY.intermediate, num_hidden_layers=TINY.layers,
        num_attention_heads=TINY.heads, num_key_value_heads=TINY.kv_heads, head_dim=TINY.head_dim, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, use_cache=True,
    )  # fmt: skip
    model = transformers.Qwen3Model(config).eval()
    cache = transformers.DynamicCache(config=config)
    heads, kv = TINY.heads * TINY.head_dim, TINY.kv_heads * TINY.head_dim
    with torch.no_grad():
        model.embed_tokens.weight.copy_(decoder.embedding)
        for index, (layer, (into, out, up, down)) in enumerate(zip(model.layers, decoder.layers, strict=True)):
            query, key, value = into.split([heads, kv, kv])
            attention, mlp = layer.self_attn, layer.mlp
            for part, weight in (
                (attention.q_proj, query), (attention.k_proj, key), (attention.v_proj, value), (attention.o_proj, out),
                (mlp.gate_proj, up[: TINY.intermediate]), (mlp.up_proj, up[TINY.intermediate :]), (mlp.down_proj, down),
            ):  # fmt: skip
                part.weight.copy_(weight)
            cache.update(*(part[:, :, :-1].clone() for part in decoder.cache[index]), index)
        tokens = torch.tensor([3, 600, 0, 77])
        position = torch.full((batch, 1), context - 1)
        want = model(tokens[:, None], past_key_values=cache, position_ids=position).last_hidden_state[:, 0]
    got = decoder.step(tokens)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(decoder.step(tokens), got)  # and again: a step leaves the cache as it would find it
    assert not torch.allclose(decoder.step(tokens.roll(1)), got, atol=0.1)


@pytest.mark.parametrize("mode", e2e.E2E_MODES)
def test_a_step_draws_from_its_own_hidden_states(mode):
    inputs = e2e.make_inputs(TINY, 5, mode, "cpu", 7)
    calls, reasons, _ = prepare(e2e.SUITE, inputs, mode, ["decoder", "nologits"])
    assert list(calls) == ["decoder", "nologits"]
    assert not reasons
    inputs.tokens.copy_(torch.arange(5))
    drawn = calls["nologits"]()
    want = inputs.head.sample(inputs.decoder.step(torch.arange(5)), inputs.params).tokens
    assert torch.equal(drawn, want)
    assert torch.equal(inputs.tokens, want)
    assert 3 < inputs.logits().mul(0.6).std() < 7  # of a trained model's spread


def test_wrong_tokens_are_not_measured(monkeypatch):
    inputs = e2e.make_inputs(TINY, 40, "t06", "cpu", 7)
    call = e2e.SUITE.providers["nologits"]
    wrong = e2e.Suite(
        "e2e", {"nologits": lambda *given: lambda: (call(*given)() + 1) % TINY.vocab}, ("nologits",), "decoder", e2e.cells,
        e2e.StepGate, e2e.make_rows,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="nothing is measured"):
        prepare(wrong, inputs, "t06", ["nologits"])


def test_samplers_without_filters_say_so():
    inputs = e2e.make_inputs(TINY, 2, "t06k20p95", "cpu", 7)
    _, reasons, _ = prepare(e2e.SUITE, inputs, "t06k20p95", ["multinomial-compiled"])
    assert reasons == {"multinomial-compiled": "it has no filters"}
    inputs = e2e.make_inputs(TINY, 2, "t06", "cpu", 7)
    _, reasons, _ = prepare(e2e.SUITE, inputs, "t06", ["vllm-qrita"])
    assert reasons == {"vllm-qrita": "it is measured with filters"}


def test_rows_tables_and_plots(tmp_path):
    timings = {"decoder": Timing(100.0, 99.0, 101.0, True), "nologits": Timing(110.0, 109.0, 111.0, True)}
    timings["flashinfer"] = Timing(121.0, 120.0, 122.0, False)
    rows = []
    for batch in (1, 8):
        cell = Cell("small", 151_936, 4_096, batch, "t06", lambda: None)
        rows += e2e.make_rows(cell, timings, dict.fromkeys(timings, 1_000), Ceilings(4_000.0, 700.0))
    assert [row["ratio_to_decoder"] for row in rows[:3]] == [1.0, 1.1, 1.21]
    assert [row["speedup"] for row in rows[:3]] == [None, 1.1, None]
    record = {"schema": 1, "suite": "e2e", "rows": rows}
    assert len(tables(record).renderables) == 2
    pytest.importorskip("matplotlib")
    assert [path.name for path in write_plots(record, tmp_path)] == ["e2e-small-t06.png"]


def test_the_shapes_are_the_models():
    """Parameters without embeddings and head, of the models' own cards: 1.4 and 6.95 billion (7.0 with the norms)."""
    counts = []
    for shape in SHAPES:
        attention = shape.depth * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
        counts.append(shape.layers * (attention + 3 * shape.depth * shape.intermediate) / 1e9)
    assert [round(count, 2) for count in counts] == [1.41, 6.95]


def test_the_command_needs_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    result = CliRunner().invoke(bench, ["e2e", "--case", "qwen3-8b"])
    assert "CUDA GPU" in str(result.exception)
    result = CliRunner().invoke(bench, ["e2e", "--case", "large"])
    assert "--case must be one of qwen3-1.7b, small, qwen3-8b" in str(result.exception)
