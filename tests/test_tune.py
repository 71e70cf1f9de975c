"""``nologits tune`` as far as it goes without a GPU: what it tries, how it chooses, what it prints and what it refuses."""

import dataclasses
import functools
import os
import sys

import pytest
import torch

import nologits as nl

pytest.importorskip("typer")
pytest.importorskip("rich")

from nologits.bench.timing import Timing
from nologits.cli import tune
from nologits.cli.tune import Result, Target, Trial, Workload
from nologits.dispatch import Choice
from nologits.kernels import config
from nologits.kernels.config import HOPPER_CONFIGS, TILES, TileConfig

H200_SHARED = 232_448
BF16, FP32 = torch.bfloat16, torch.float32
TRITON = Target("triton", "sm90", BF16, 151_936, 4_096, H200_SHARED)
HOPPER = TRITON._replace(impl="hopper")


def read(lines):
    """Evaluates printed source, as the file it is meant for would."""
    return eval("{\n" + "\n".join(lines) + "\n}", vars(config))


def tile(block_b=16, stages=4):
    return TileConfig(128, block_b, 64, 4, stages)


@pytest.fixture
def nologits(nologits, monkeypatch):
    """Runs ``nologits tune``."""
    monkeypatch.setenv("COLUMNS", "100")
    return functools.partial(nologits, "tune")


class Bench:
    """A GPU that is not there: times and tokens by rule, and a record of what ran."""

    def __init__(self, us, tokens=None):
        self.us, self.timed, self.batches = us, [], []
        self.tokens = tokens or (lambda config, batch: torch.arange(batch)[:, None])

    def workload(self, batch):
        self.batches.append(batch)
        return Workload(lambda c: self.tokens(c, batch), lambda c: self.us(c, batch), lambda: 100.0)

    def time(self, calls):
        self.timed.append(list(calls))
        return {name: call() for name, call in calls.items()}

    def tune(self, target, batch):
        return tune.tune_batch(batch, target.candidates(batch), self.workload(batch), self.time, lambda step: None)


@pytest.fixture
def gpu(monkeypatch):
    """Lets the command find a GPU, which is ``Bench``."""

    def install(bench, target=TRITON, impl="triton"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Imaginary GPU")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: object())
        monkeypatch.setattr(tune, "resolve_impl", lambda impl_, device: Choice(impl, "a test"))
        monkeypatch.setattr(tune, "architecture", lambda device: target.arch)
        monkeypatch.setattr(tune, "make_operands", lambda target, device: None)
        monkeypatch.setattr(tune, "make_workload", lambda target, operands, batch: bench.workload(batch))
        monkeypatch.setattr(
            tune, "measure", lambda calls, repeats: {n: Timing(us, us, us, True) for n, us in bench.time(calls).items()}
        )

    return install


class TestCandidates:
    @pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32])
    @pytest.mark.parametrize("shared", [H200_SHARED, 101_376])
    @pytest.mark.parametrize("batch", [1, 17, 64, 65, 1_000])
    def test_tiles_fit_and_cover_the_batch(self, batch, shared, dtype):
        tiles = tune.tile_candidates(batch, dtype, shared)
        assert 12 <= len(tiles) == len(set(tiles)) <= 48
        used = [(t.BLOCK_V + t.BLOCK_B) * t.BLOCK_D * dtype.itemsize * t.num_stages for t in tiles]
        assert max(used) <= shared
        assert max(used) > shared // 2
        assert {t.BLOCK_B for t in tiles} == ({64, 128} if batch > 64 else {{1: 16, 17: 32, 64: 64}[batch]})
        assert {t.BLOCK_V % 128 for t in tiles} == {0}

    @pytest.mark.parametrize("target", [TRITON, HOPPER])
    @pytest.mark.parametrize("batch", tune.BATCHES)
    def test_in_force_comes_first_and_once(self, target, batch):
        candidates = target.candidates(batch)
        assert candidates[0] == target.in_force(batch)
        assert len(candidates) == len(set(candidates)) > 1

    @pytest.mark.parametrize(("batch", "count"), [(1, 3), (64, 3), (128, 3), (129, 4), (256, 4), (320, 3)])
    def test_clusters_need_their_blocks_in_pairs(self, batch, count):
        candidates = tune.hopper_candidates(batch)
        assert len(candidates) == count
        odd = [c for c in HOPPER_CONFIGS if c.cluster == 2 and -(-batch // c.rows) % 2]
        assert set(candidates) == set(HOPPER_CONFIGS) - set(odd)
        # No rule of the library may choose what cannot run.
        assert HOPPER.in_force(batch) in candidates


class TestWinner:
    def choose(self, *times):
        trials = [Trial(tile(stages=3 + index), us) for index, us in enumerate(times)]
        return tune.winner(trials).num_stages - 3

    def test_only_more_than_the_margin_changes_anything(self):
        assert self.choose(100.0, 99.5, 120.0) == 0
        assert self.choose(100.0, 98.5, 120.0) == 1
        assert self.choose(100.0, 98.5, 97.0) == 2

    def test_without_times(self):
        assert self.choose(None, 99.5, 120.0) == 1
        assert self.choose(100.0, None, None) == 0
        assert self.choose(None, None) == 0


class TestTable:
    FORCE = {16: tile(16), 64: tile(64), -1: tile(128)}  # noqa: RUF012

    def test_a_batch_stands_for_those_down_to_the_next_bound(self):
        new = tune.new_table(self.FORCE, {1: tile(16, 3), 128: tile(64, 5), 256: tile(128, 5)})
        assert new == {1: tile(16, 3), 16: tile(16), 64: tile(64), 128: tile(64, 5), -1: tile(128, 5)}

    def test_neighbours_with_one_tile_are_one_bin(self):
        new = tune.new_table(self.FORCE, {1: tile(64), 16: tile(64), 100: tile(128), 200: tile(128)})
        assert new == {64: tile(64), -1: tile(128)}

    def test_unmeasured_bounds_keep_their_tiles(self):
        assert tune.new_table(self.FORCE, {}) == self.FORCE
        assert tune.new_table(self.FORCE, {16: tile(16, 5)}) == self.FORCE | {16: tile(16, 5)}
        assert tune.new_table(self.FORCE, {32: tile(32)}) == {16: tile(16), 32: tile(32), 64: tile(64), -1: tile(128)}
        assert tune.new_table(self.FORCE, {64: tile(64, 5)})[-1] == tile(128)

    @pytest.mark.parametrize(("arch", "kind"), TILES)
    def test_the_fragment_is_source(self, arch, kind):
        assert read(tune.fragment(arch, kind, TILES[arch, kind])) == {(arch, kind): TILES[arch, kind]}

    def test_the_library_reads_the_table_as_it_was_meant(self, monkeypatch):
        best = {1: tile(16, 3), 16: tile(16, 5), 32: tile(32), 64: tile(64), 128: tile(128), 256: tile(128, 5)}
        results = [Result(batch, [Trial(best_tile, 1.0)], 1.0, best_tile) for batch, best_tile in best.items()]
        target = TRITON._replace(arch="sm120")
        monkeypatch.setattr(config, "TILES", TILES | read(tune.proposal(target, results)))
        for batch, best_tile in best.items():
            assert target.in_force(batch) == best_tile
        assert target.in_force(2) == tile(16, 5)
        assert target.in_force(1_000) == tile(128, 5)
        assert TRITON.in_force(16) == TILES["sm90", "half"][16]

    @pytest.mark.parametrize("launch", HOPPER_CONFIGS)
    def test_hopper_lines_are_source_and_name_the_constant(self, launch):
        line = tune.hopper_line(Result(64, [Trial(launch, 10.0)], 1.0, launch))
        assert read([line]) == {64: launch}
        assert getattr(config, line.split("# ")[1].split(",")[0]) == launch
        assert line.endswith(", in force")

    def test_hopper_lines_say_what_changes(self):
        turns, wide = config.HOPPER_TURNS_64, config.HOPPER_TURNS_128
        line = tune.hopper_line(Result(64, [Trial(turns, 110.0), Trial(wide, 100.0)], 1.0, wide))
        assert line.endswith("# HOPPER_TURNS_128, instead of HOPPER_TURNS_64, 10.0% faster")
        line = tune.hopper_line(Result(64, [Trial(turns, None), Trial(wide, 100.0)], 1.0, wide))
        assert line.endswith("instead of HOPPER_TURNS_64, which does not run")
        line = tune.hopper_line(Result(64, [Trial(turns, None)], 1.0, turns))
        assert line.endswith("in force, but it does not run")


class TestTrials:
    def test_other_tokens_are_excluded_however_fast(self):
        wrong = TRITON.candidates(16)[5]
        bench = Bench(
            lambda c, batch: 1.0 if c == wrong else 100.0,
            lambda c, batch: torch.arange(batch)[:, None] + (c == wrong) * (torch.arange(batch)[:, None] == 3),
        )
        result = bench.tune(TRITON, 16)
        assert result.best == TRITON.in_force(16)
        assert not result.ok
        (trial,) = [trial for trial in result.trials if trial.wrong]
        assert trial == Trial(wrong, None, "draws other tokens in 1 of 16 rows", True)
        assert tune.short(wrong) not in bench.timed[0]
        # The same candidate with the right tokens wins.
        assert Bench(bench.us).tune(TRITON, 16).best == wrong

    def test_what_does_not_run_is_left_out_in_a_line(self):
        broken = HOPPER.candidates(256)[2]

        def tokens(c, batch):
            if c == broken:
                raise RuntimeError("out of resource: shared memory\nand a page of details")
            return torch.zeros(batch, 1)

        result = Bench(lambda c, batch: 50.0, tokens).tune(HOPPER, 256)
        assert result.ok
        assert result.trials[2].problem == "does not run: RuntimeError: out of resource: shared memory"
        assert [trial.us is None for trial in result.trials] == [trial.config == broken for trial in result.trials]

    def test_a_new_gpu_where_what_is_in_force_does_not_run(self):
        force = TRITON.in_force(16)

        def tokens(c, batch):
            if c == force:
                raise RuntimeError("no")
            return torch.zeros(batch, 1)

        result = Bench(lambda c, batch: 50.0 + c.num_stages, tokens).tune(TRITON, 16)
        assert result.ok
        assert result.best.num_stages == 3

    def test_a_gpu_that_stops_working_is_one_line(self, nologits, gpu):
        bench = Bench(lambda c, batch: 1.0)
        bench.time = lambda calls: (_ for _ in ()).throw(RuntimeError("CUDA error: an illegal memory access\nmore"))
        gpu(bench)
        code, out, err = nologits("--batch", "16")
        assert (code, out) == (2, "")
        reason = "RuntimeError: CUDA error: an illegal memory access at B = 16"
        assert err.splitlines()[-1] == f"error: every candidate must leave the GPU working, got {reason}"


class TestCommand:
    def test_prints_a_table_that_the_library_can_take(self, nologits, gpu):
        def us(c, batch):
            return 100.0 + c.num_stages + c.BLOCK_V / 128 + c.BLOCK_D / 64 + c.num_warps + c.BLOCK_B / 16

        bench = Bench(us)
        gpu(bench)
        code, out, err = nologits("--batch", "16", "--batch", "64,256", "--repeats", "5")
        assert code == 0, err
        assert bench.batches == [16, 64, 256]
        assert out.startswith("# Imaginary GPU, V = 151936, D = 4096, bfloat16\n")
        table = read(out.splitlines())["sm90", "half"]
        best = {width: TileConfig(128, width, 64, 4, 3) for width in (16, 64)}
        assert table == {16: best[16], 32: TILES["sm90", "half"][32], -1: best[64]}
        # Each batch size's table on standard error: fastest first, with both ratios.
        assert [line.strip() for line in err.splitlines() if line.startswith("B = ")] == ["B = 16", "B = 64", "B = 256"]
        first = err.splitlines()[2].split()
        assert first == ["128x16x64,", "4", "warps,", "3", "stages", "110.0", "0.982", "1.100", "best"]
        assert any("in force" in line and " 1.000 " in line for line in err.splitlines())

    def test_hopper_by_default_where_it_draws(self, nologits, gpu):
        bench = Bench(lambda c, batch: 10.0 * c.stages)
        gpu(bench, HOPPER, "hopper")
        code, out, err = nologits()
        assert code == 0, err
        assert bench.batches == [1, 16, 32, 64, 128, 256]
        assert read(out.splitlines())[256] == config.HOPPER_SHARED_CLUSTERED
        assert read(out.splitlines())[128] == config.HOPPER_SHARED
        line = "128: HopperConfig(turns=False, rows=128, stages=4, pair=1, cluster=1),  # HOPPER_SHARED, instead of"
        assert line in out

    @pytest.mark.parametrize("options", [("--dtype", "float32"), ("--depth", "1001")])
    def test_auto_is_what_would_draw(self, nologits, gpu, options):
        gpu(Bench(lambda c, batch: 1.0), HOPPER, "hopper")
        code, out, err = nologits("--batch", "8", *options)
        assert code == 0, err
        assert list(read(out.splitlines())) == [("sm90", "float32" if "float32" in options else "half")]
        code, out, err = nologits("--batch", "8", "--impl", "hopper", *options)
        assert (code, out) == (2, "")
        assert err.startswith(f"error: {options[0]} must be ")

    def test_other_tokens_fail_the_command(self, nologits, gpu):
        wrong = TRITON.candidates(16)[5]
        gpu(Bench(lambda c, batch: 1.0 if c == wrong else 9.0, lambda c, batch: torch.full((batch, 1), int(c == wrong))))
        code, out, err = nologits("--batch", "16")
        assert code == 1
        assert f"error: {tune.short(wrong)} draws other tokens in 16 of 16 rows\n" in err
        assert tune.code(wrong) not in out

    def test_nothing_that_runs_fails_the_command(self, nologits, gpu):
        def tokens(c, batch):
            raise ValueError("no compiler")

        gpu(Bench(lambda c, batch: 1.0, tokens))
        code, out, err = nologits("--batch", "16")
        assert code == 1
        assert read(out.splitlines()) == {("sm90", "half"): TILES["sm90", "half"]}
        assert f"left out: {tune.short(TRITON.in_force(16))} does not run: ValueError: no compiler\n" in err

    def test_show_needs_no_gpu(self, nologits, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        code, out, err = nologits("--show")
        assert (code, err) == (0, "")
        shown = read(out.splitlines())
        assert {key: shown[key] for key in shown if isinstance(key, tuple)} == {
            key: TILES[key] for key in (("sm90", "half"), ("any", "half"))
        }
        assert [shown[batch] for batch in tune.BATCHES] == [HOPPER.in_force(batch) for batch in tune.BATCHES]

    @pytest.mark.parametrize(
        ("arguments", "keys"),
        [
            (["--arch", "sm80"], [("sm80", "half")]),
            (["--arch", "sm90", "--dtype", "float32"], [("sm90", "float32")]),
            (["--arch", "sm90", "--batch", "7"], [("sm90", "half"), 7]),
            (["--impl", "hopper", "--batch", "7"], [7]),
            (["--impl", "triton", "--arch", "sm90"], [("sm90", "half")]),
        ],
        ids=lambda value: " ".join(value) if isinstance(value[0], str) else "",
    )
    def test_show_what_was_asked_for(self, nologits, monkeypatch, arguments, keys):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        code, out, err = nologits("--show", *arguments)
        assert code == 0, err
        assert list(read(out.splitlines())) == keys

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "tune must run on a machine with a CUDA GPU, got none (tune --show needs none)"),
            (["--vocab", "0"], "--vocab must be in [1, "),
            (["--depth", "0"], "--depth must be at least 1, got 0"),
            (["--batch", "16,x"], "--batch must be an integer of at least 1, got 'x'"),
            (["--batch", "0"], "--batch must be an integer of at least 1, got '0'"),
            (["--dtype", "int8"], "--dtype must be one of bfloat16, float16, float32, got 'int8'"),
            (["--impl", "torch"], "--impl must be one of auto, triton, hopper, got 'torch'"),
            (["--repeats", "2"], "--repeats must be at least 3, got 2"),
            (["--arch", "sm90"], "--arch must come with --show"),
            (["--show", "--arch", "hopper"], "--arch must be any, hip or a compute capability like sm90, got 'hopper'"),
            (["--show", "--impl", "hopper", "--arch", "sm80"], "--arch must be sm90 with --impl hopper, got 'sm80'"),
            (["--show", "--impl", "hopper", "--dtype", "float32"], "--dtype must be bfloat16 or float16 with --impl hopper"),
            (["--show", "--impl", "hopper", "--depth", "12"], "--depth must be a multiple of 8 with --impl hopper, got 12"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_wrong_arguments_are_one_line(self, nologits, monkeypatch, arguments, message):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        code, out, err = nologits(*arguments)
        assert (code, out) == (2, "")
        assert err.startswith(f"error: {message}"), err
        assert err.count("\n") == 1

    def test_too_little_memory_is_one_line(self, nologits, gpu, monkeypatch):
        gpu(Bench(lambda c, batch: 1.0))
        monkeypatch.setattr(tune, "make_operands", lambda *rest: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA: no")))
        code, out, err = nologits("--vocab", "1000000", "--batch", "8")
        assert (code, out) == (2, "")
        assert err == "error: --vocab, --depth and --batch must fit the GPU's memory, got 1000000, 4096 and 8\n"


@pytest.mark.interpreter
@pytest.mark.skipif(
    torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 on a CPU"
)
class TestKernels:
    """The kernels themselves, in Triton's interpreter, under a clock that is not there."""

    TARGET = Target("triton", "interpreter", FP32, 300, 48, sys.maxsize)
    OTHERS = (TileConfig(256, 16, 32, 4, 3), TileConfig(128, 32, 64, 8, 3))

    def workload(self, batch):
        operands = tune.make_operands(self.TARGET, torch.device("cpu"))
        return operands, tune.make_workload(self.TARGET, operands, batch)

    def result(self, workload):
        candidates = [self.TARGET.in_force(5), *self.OTHERS]

        def time(calls):
            return {name: 100.0 - index for index, (name, call) in enumerate(calls.items()) if call() is not None}

        return tune.tune_batch(5, candidates, workload, time, lambda step: None)

    def test_every_candidate_draws_the_tokens_of_the_reference(self):
        (exact, _), workload = self.workload(5)
        result = self.result(workload)
        assert result.ok
        assert result.best == self.OTHERS[1]
        assert result.matmul_us == 100.0
        integers = torch.randint(-1, 2, (5, 48), generator=torch.Generator().manual_seed(5)).float()
        rows = torch.arange(5)
        temperature = torch.full((5,), (48 * 8 / 3) ** 0.5 / 5)
        params = nl.SamplingParams(temperature=temperature, seed=rows, position=rows)
        expected = nl.LMHead(exact).sample(integers, params, impl="reference").tokens
        assert len(set(expected.tolist())) > 1
        for candidate in (self.TARGET.in_force(5), *self.OTHERS):
            assert workload.tokens(candidate).flatten().tolist() == expected.tolist()

    def test_a_kernel_that_loses_a_tile_is_excluded(self, monkeypatch):
        from nologits.kernels import categorical

        launch = categorical.launch_tiles

        def broken(source, rows, num_samples, mass, raw, launch_config):
            tiles = launch(source, rows, num_samples, mass, raw, launch_config)
            if launch_config == self.OTHERS[0]:
                tiles.key[:, :, 0] = -(2**63)
            return tiles

        monkeypatch.setattr(categorical, "launch_tiles", broken)
        result = self.result(self.workload(5)[1])
        assert not result.ok
        assert [trial.wrong for trial in result.trials] == [False, True, False]
        assert result.best == self.OTHERS[1]

    def test_a_tile_that_cannot_be_compiled_is_left_out(self):
        odd = dataclasses.replace(self.OTHERS[0], BLOCK_V=96)
        _, workload = self.workload(5)
        result = tune.tune_batch(
            5, [self.TARGET.in_force(5), odd], workload, lambda calls: dict.fromkeys(calls, 1.0), lambda step: None
        )
        assert result.trials[1].problem.startswith("does not run: ")
        assert "\n" not in result.trials[1].problem
