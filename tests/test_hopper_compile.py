"""The Hopper kernels compile without spills (the filters' search: with few), wherever CUDA's compiler is: no GPU needed."""

import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from nologits.kernels.config import HOPPER_CONFIGS, filter_config

NVCC = shutil.which("nvcc")
SOURCES = Path(__file__).parents[1] / "src/nologits/kernels/sm90"
FEATURES = {
    "plain": {},
    "greedy": {"GREEDY": 1},
    "logprobs": {"MASS": 1, "RAW": 1},
    "every transform": {"MASS": 1, "BIAS": 2, "HEAD_SCALE": 1, "SOFTCAP": 1, "LOGIT_BIAS": 3, "ALLOWED": 1},
    "sparse bias": {"MASS": 1, "SPARSE_BIAS": 1},
}
GATHERING = {
    "filters": {"FILTER": 1},
    "top-p": {"FILTER": 1, "REST": 1},
    "logprobs": {"FILTER": 1, "REST": 1, "MASS": 1, "RAW": 1},
}
OFF = dict.fromkeys(
    ("GREEDY", "MASS", "RAW", "BIAS", "HEAD_SCALE", "SOFTCAP", "LOGIT_BIAS", "SPARSE_BIAS", "ALLOWED", "FILTER", "REST"), 0
)
FILTERED = {
    "mask": {"MASK": 1, "DRAW": 0, "LOGPROBS": 0},
    "draw": {"MASK": 0, "DRAW": 1, "LOGPROBS": 0},
    "draw with logprobs": {"MASK": 0, "DRAW": 1, "LOGPROBS": 1},
}
FILTER_CONFIGS = {
    str(config): config
    for config in itertools.starmap(
        filter_config, itertools.product((1_000, 32_000, 151_936, 1 << 20), (1, 9, 33, 64, 128, 256), (132,))
    )
}
"""All that :func:`filter_config` returns on an H200."""


def compile_kernel(source, defines, target):
    macros = [f"-D{name}={value}" for name, value in defines.items()]
    command = [NVCC, "-gencode=arch=compute_90a,code=sm_90a", "-std=c++17", "-cubin", "-Xptxas", "-v", "-o", str(target)]
    done = subprocess.run([*command, *macros, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
@pytest.mark.parametrize(("config", "feature"), list(itertools.product(HOPPER_CONFIGS, FEATURES)))
def test_no_shipped_launch_spills(config, feature, tmp_path):
    launch = {name.upper(): int(getattr(config, name)) for name in ("turns", "rows", "stages", "pair", "cluster")}
    report = compile_kernel(SOURCES / "categorical.cu", launch | OFF | FEATURES[feature], tmp_path / "kernel.cubin")
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report, report
    assert "warning" not in report, report


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
@pytest.mark.parametrize(("config", "feature"), list(itertools.product(HOPPER_CONFIGS, GATHERING)))
def test_gathering_candidates_spills_little(config, feature, tmp_path):
    """With 128 rows a block, registers run short while thresholds are found, once a row; elsewhere next to none spill."""
    launch = {name.upper(): int(getattr(config, name)) for name in ("turns", "rows", "stages", "pair", "cluster")}
    report = compile_kernel(SOURCES / "categorical.cu", launch | OFF | GATHERING[feature], tmp_path / "kernel.cubin")
    assert "warning" not in report, report
    frames = [int(size) for size in re.findall(r"(\d+) bytes stack frame", report)]
    assert max(frames) <= (160 if config.turns and config.rows == 128 else 32), report


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
@pytest.mark.parametrize("features", [{}, {"MASS": 1, "RAW": 1}], ids=["plain", "logprobs"])
def test_what_follows_the_tiles_compiles(features, tmp_path):
    on = {"MASS": 0, "RAW": 0} | features
    for blocks, top in ((1, 0), (2, 0), (2, 1)):
        report = compile_kernel(SOURCES / "choose.cu", on | {"BLOCKS": blocks, "TOP": top}, tmp_path / "kernel.cubin")
        assert "warning" not in report, report
    without = {name: value for name, value in OFF.items() if name not in ("GREEDY", "FILTER", "MASS", "RAW")}
    report = compile_kernel(SOURCES / "finish.cu", on | without, tmp_path / "kernel.cubin")
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report, report
    assert "warning" not in report, report


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
def test_a_spill_is_seen(tmp_path):
    """The control: local memory shows in the report that is read above."""
    source = tmp_path / "spill.cu"
    source.write_text(
        'extern "C" __global__ void k(float* x, int n) { float a[64]; for (int i = 0; i < n; ++i) a[i & 63] = x[i];\n'
        "  x[0] = a[n & 63]; }\n"
    )
    assert " 0 bytes stack frame" not in compile_kernel(source, {}, tmp_path / "spill.cubin")


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
@pytest.mark.parametrize(("greedy", "masses"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_the_merge_kernel_does_not_spill(greedy, masses, tmp_path):
    report = compile_kernel(SOURCES / "merge.cu", {"GREEDY": greedy, "MASS": masses, "RAW": masses}, tmp_path / "merge.cubin")
    assert " 0 bytes spill stores" in report, report
    assert "warning" not in report, report


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
@pytest.mark.parametrize("outputs", FILTERED)
@pytest.mark.parametrize("element", [1, 2, 3], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("config", FILTER_CONFIGS)
def test_the_filters_kernel_spills_little(config, element, outputs, tmp_path):
    """1,024 threads a multiprocessor leave each 64 registers. The search, which sweeps a row again where the first sweep did
    not settle it, spills up to 210 bytes, mostly around its sweeps; the first sweep and the results spill at most a few."""
    launch = {"CLUSTER": FILTER_CONFIGS[config].cluster, "THREADS": FILTER_CONFIGS[config].threads, "ELEMENT": element}
    defines = launch | FILTERED[outputs] | FILTER_CONFIGS[config].search._asdict()
    report = compile_kernel(SOURCES / "filters.cu", defines, tmp_path / "filters.cubin")
    assert max(int(size) for size in re.findall(r"(\d+) bytes spill stores", report)) <= 256, report
    assert "warning" not in report, report


def test_every_launch_of_the_filters_kernel_is_compiled():
    launches = {(config.cluster, config.threads) for config in FILTER_CONFIGS.values()}
    assert launches == {(1, 512), (1, 1024), (2, 1024), (4, 1024), (8, 1024), (16, 1024)}
