"""Shared fixtures: the device, and every implementation that can run here."""

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_TRITON = DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(scope="session")
def device():
    return torch.device(DEVICE)


@pytest.fixture(params=["reference", "torch", "triton"])
def impl(request):
    if request.param == "triton" and not HAS_TRITON:
        pytest.skip("Triton needs a GPU or TRITON_INTERPRET=1")
    return request.param


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if "gpu" in item.keywords and DEVICE != "cuda":
            item.add_marker(skip)
