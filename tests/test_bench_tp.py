"""The suites of sharded heads, on CPU processes: what they record, and that wrong tokens and failing ranks stop them."""

import json

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from nologits import sharded
from nologits.bench import tp
from nologits.bench.cases import Case
from nologits.bench.cli import bench
from nologits.bench.plots import write_plots
from nologits.bench.ranks import run_ranks
from nologits.bench.report import load, tables
from nologits.bench.suite import ROW_KEYS, Plan

pytestmark = [
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="what a GPU would run instead takes a GPU a rank"),
]

TINY = Case("tiny", 1_001, 32, "a test")
PLAN = Plan(["tiny"], [1, 3], ["plain", "k50p95", "logprobs"], list(tp.PROVIDERS), 3)


def measure(world):
    record, noted, begun = {}, [], []
    tp.run(PLAN, world, record, noted.append, begun.append, [TINY])
    return record, noted, begun


def test_a_record_of_two_ranks(tmp_path):
    record, noted, begun = measure(2)
    assert record["suite"] == "tp2"
    assert record["ranks"] == 2
    assert len(begun) == 6
    assert all(tuple(row)[: len(ROW_KEYS)] == ROW_KEYS for row in record["rows"])
    by = {(row["mode"], row["B"], row["provider"]): row for row in record["rows"]}
    # A mass (16 bytes), a token and its score (16); 256 candidates of 8 bytes and two masses; a logit (8) more
    assert [by[mode, 3, "nologits"]["bytes_per_row"] for mode in PLAN.modes] == [32, 2_080, 40]
    assert by["plain", 1, "exchange"]["bytes_per_row"] == 32
    assert by["plain", 1, "exchange"]["ratio_to_matmul"] is None  # it is no sampler
    assert all(by[mode, 1, "matmul-shard"]["ratio_to_matmul"] == 1 for mode in PLAN.modes)
    assert by["plain", 1, "nologits"]["speedup"] is not None
    assert ("plain", 1, "gather-multinomial") in by
    assert ("k50p95", 1, "gather-multinomial") not in by
    reasons = {(entry["provider"], entry["mode"]): entry["reason"] for entry in record["skipped"]}
    assert reasons["gather-multinomial", "k50p95"] == "it draws by temperature alone"
    assert any("gather-multinomial (k50p95) skipped" in line for line in noted)

    path = tmp_path / "tp.json"
    path.write_text(json.dumps(record))
    assert len(tables(load(path)).renderables) == 1 + len(PLAN.modes)
    pytest.importorskip("matplotlib")
    assert [path.name for path in write_plots(record, tmp_path)] == [f"tp2-tiny-{mode}.png" for mode in PLAN.modes]


def with_local_ids(rank, *arguments):
    """What the suite must not accept: shards that number their tokens from 0."""
    sample = sharded.sample
    sharded.sample = lambda shard, *rest: sample(shard._replace(start=0), *rest)
    tp._work(rank, *arguments)


def on_one_rank_only(rank, *arguments):
    if rank.number == 1:
        raise ValueError("this rank is broken")
    dist.barrier()


def nothing(kind, message):
    pass


@pytest.mark.parametrize(
    ("work", "message"),
    [(with_local_ids, "rank 0: AssertionError"), (on_one_rank_only, "rank 1: ValueError: this rank is broken")],
    ids=["tokens", "rank"],
)
def test_what_is_wrong_stops_all_ranks(work, message):
    with pytest.raises(RuntimeError, match=message):
        run_ranks(2, work, (PLAN._replace(modes=["plain"], batches=[40]), [TINY]), nothing)


def test_the_command_names_what_it_does_not_know():
    result = CliRunner().invoke(bench, ["--tp", "2", "--provider", "flashinfer-gumbel"])
    assert result.exit_code
    assert "--provider must be one of matmul-shard, exchange, nologits" in str(result.exception)
