"""torch tensors that are read straight to GPUs, and what fastsafetensors calls that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import device_codec

from waystation.compat.fastsafetensors import SafeTensorsFileLoader, SingleGroup
from waystation.safetensors import load

MIB = 1 << 20


def tensors_of(count: int, most: int) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Tensors of any sizes and bytes."""
    random = np.random.default_rng(0)
    sizes = random.integers(0, most, count).tolist()
    return {
        f"t{number}": ("U8", (size,), random.integers(0, 256, size, np.uint8).tobytes())
        for number, size in enumerate(sizes)
    }


def test_torch_tensors_are_the_same(cuda: Any, cufile: None, tmp_path: Path) -> None:
    tensors = tensors_of(20, 2 * MIB)
    path = device_codec.write_model(tmp_path / "model.safetensors", tensors)
    for name, tensor in load(path, framework="torch", device="cuda", gpu_direct=True).items():
        assert tensor.cpu().numpy().tobytes() == tensors[name][2]


@pytest.mark.parametrize("nogds", [False, True])
def test_nogds_means_what_it_means_to_fastsafetensors(
    cuda: Any, cufile: None, tmp_path: Path, nogds: bool
) -> None:
    tensors = tensors_of(20, 2 * MIB)
    path = device_codec.write_model(tmp_path / "model.safetensors", tensors)
    loader = SafeTensorsFileLoader(SingleGroup(), "cuda:0", nogds=nogds)
    loader.add_filenames({0: [str(path)]})
    buffers = loader.copy_files_to_device()
    for name, (_, _, data) in tensors.items():
        assert buffers.get_tensor(name).cpu().numpy().tobytes() == data


def test_a_gpu_without_a_number_is_the_one_in_use(cuda: Any, tmp_path: Path) -> None:
    path = device_codec.write_model(tmp_path / "model.safetensors", tensors_of(3, 1000))
    loader = SafeTensorsFileLoader(SingleGroup(), "cuda")
    loader.add_filenames({0: [str(path)]})
    assert loader.copy_files_to_device().get_tensor("t0").device == cuda.device("cuda:0")
