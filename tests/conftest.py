"""Shared fixtures: the device, every implementation that can run here, sizes to match, poisoned scratch memory."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nologits.dispatch import hopper_obstacle

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_TRITON = DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
NO_HOPPER = hopper_obstacle(torch.device(DEVICE))


def pytest_addoption(parser):
    # pyproject.toml sets it; under --strict-config an unknown option is an error where pytest-timeout is missing.
    if importlib.util.find_spec("pytest_timeout") is None:
        parser.addini("timeout", "ignored: pytest-timeout is not installed")


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if "gpu" in item.keywords and DEVICE != "cuda":
            item.add_marker(skip)


@pytest.fixture(scope="session")
def device():
    return torch.device(DEVICE)


@pytest.fixture(params=["reference", "torch", "triton", "hopper"])
def impl(request):
    if request.param == "hopper" and NO_HOPPER:
        pytest.skip(NO_HOPPER)
    if request.param == "triton" and not HAS_TRITON:
        pytest.skip("Triton needs a GPU or TRITON_INTERPRET=1")
    return request.param


@pytest.fixture
def size(request):
    """``size(small, real)``: the real size, unless the kernels run in Triton's interpreter, thousands of times slower."""
    name = request.getfixturevalue("impl") if "impl" in request.fixturenames else None
    small = DEVICE != "cuda" and name == "triton"
    return lambda reduced, real: reduced if small else real


@pytest.fixture
def poisoned(monkeypatch):
    """Scratch memory that starts as NaN, as an integer that would win every comparison, or as True: an
    unwritten slot shows."""
    for name in ("empty", "empty_like"):
        make = getattr(torch, name)

        def fill(*args, make=make, **kwargs):
            out = make(*args, **kwargs)
            if out.dtype == torch.bool:
                return out.fill_(True)
            return out.fill_(float("nan") if out.is_floating_point() else torch.iinfo(out.dtype).max - 7)

        monkeypatch.setattr(torch, name, fill)


@pytest.fixture
def nologits(capfd, monkeypatch):
    """Runs the command and returns its exit code and what it wrote."""
    from nologits import cli

    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        code = cli.main([str(argument) for argument in arguments])
        return (code, *capfd.readouterr())

    return run


@pytest.fixture
def no_peers(monkeypatch):
    """No peer of the benchmark named, none loaded, and nothing of the test left behind. Gives what looks for loaded ones."""
    from nologits.bench import peers

    loaders = (peers.flashinfer_sampling, peers.flashsampling_kernel, peers.vllm_topk_topp)
    packages = ("flashinfer", "fused_mm_sampling", "vllm")

    def loaded():
        return {n: m for n, m in sys.modules.items() if n.partition(".")[0] in packages or "peer_vllm" in n}

    def forget():
        for loader in loaders:
            loader.cache_clear()
        for name in loaded():
            del sys.modules[name]

    before, path = loaded(), list(sys.path)
    for variable in (peers.FLASHINFER, peers.FLASHSAMPLING, peers.VLLM_TOPK_TOPP):
        monkeypatch.delenv(variable, raising=False)
    forget()
    yield loaded
    forget()
    sys.modules.update(before)
    sys.path[:] = path


VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@pytest.fixture(scope="session")
def vllm_script():
    """``run(name, argument, **environment)``: what a script beside this file printed, in a process of its own."""

    def run(name, argument, **environment):
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name(name)), str(argument)],
            env={**os.environ, **VLLM_ENVIRONMENT, **environment},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
        return done.stdout + done.stderr

    return run


@pytest.fixture(scope="session")
def vllm_run(tmp_path_factory, vllm_script):
    """``run(engines, runner=, plugin=, record=)``: what a process of ``vllm_job.py`` wrote, and the draws it recorded."""

    def run(engines, runner="V1", plugin="1", record=False):
        folder = tmp_path_factory.mktemp("job")
        job, out = folder / "job.json", folder / "out.json"
        job.write_text(json.dumps({"engines": engines, "runner": runner, "record": record, "out": str(out)}))
        log = vllm_script("vllm_job.py", job, NOLOGITS_VLLM=plugin)
        results = json.loads(out.read_text())
        results["log"] = log
        return (results, torch.load(f"{out}.pt", weights_only=False)) if record else results

    return run


@pytest.fixture(scope="session")
def smollm2():
    from nologits.demo.smollm2 import model_dir

    return str(model_dir())
