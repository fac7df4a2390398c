"""Devices for the tests of this folder; each test is skipped, with the reason, where its device is not.

`tools/gpu-check` runs them on a machine with a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from benchmarks.cuda_driver import CudaDriver

from waystation import _native


@pytest.fixture(scope="session")
def devices() -> list[dict[str, Any]]:
    found = _native.devices()
    if not found:
        pytest.skip("no CUDA device")
    return found


@pytest.fixture
def driver(devices: list[dict[str, Any]]) -> Iterator[CudaDriver]:
    opened = CudaDriver(devices[0]["ordinal"])
    yield opened
    opened.close()


@pytest.fixture
def cuda(devices: list[dict[str, Any]]) -> Any:
    """torch, with a CUDA device."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return torch


@pytest.fixture
def gpu(devices: list[dict[str, Any]]) -> Any:
    """JAX's first GPU."""
    jax = pytest.importorskip("jax")
    try:
        return jax.devices("gpu")[0]
    except RuntimeError as error:
        pytest.skip(f"JAX has no GPU (JAX_PLATFORMS=cuda,cpu?): {error}")


@pytest.fixture
def cufile(devices: list[dict[str, Any]]) -> None:
    """Files can be read straight to the devices."""
    problem = _native.gpu_direct_problem()
    if problem is not None:
        pytest.skip(problem)
