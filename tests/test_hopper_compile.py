"""The Hopper kernels compile without spills, wherever CUDA's compiler is: no GPU needed."""

import itertools
import shutil
import subprocess
from pathlib import Path

import pytest

from nologits.kernels.config import HOPPER_CONFIGS

NVCC = shutil.which("nvcc")
SOURCES = Path(__file__).parents[1] / "src/nologits/kernels/sm90"
FEATURES = {
    "plain": {},
    "greedy": {"GREEDY": 1},
    "logprobs": {"MASS": 1, "RAW": 1},
    "every transform": {"MASS": 1, "BIAS": 2, "HEAD_SCALE": 1, "SOFTCAP": 1, "LOGIT_BIAS": 3, "ALLOWED": 1},
    "sparse bias": {"MASS": 1, "SPARSE_BIAS": 1},
}
OFF = dict.fromkeys(("GREEDY", "MASS", "RAW", "BIAS", "HEAD_SCALE", "SOFTCAP", "LOGIT_BIAS", "SPARSE_BIAS", "ALLOWED"), 0)


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
