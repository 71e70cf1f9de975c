"""The Triton kernels of filtered draws compile, and hardly spill, for GPUs that need not be there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_of_filtered_draws_compile(capability, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("triton_compile_job.py")), str(capability)],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    usage = json.loads(done.stdout.splitlines()[-1])
    assert set(usage) == {"pilot", "whole", "threshold", "gather", "gather, all", "choose", "choose, whole"}
    for name, (registers, stack) in usage.items():
        assert 0 < registers <= 255
        assert stack <= (64 if name.startswith("choose") else 0), (name, stack)
