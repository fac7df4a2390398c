"""Loads to device memory that no framework owns: of published models and of checkpoints."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.cuda_driver import CudaDriver
from tests.support import device_codec, simulated_driver

import waystation
from waystation import _native, errors
from waystation.layouts.native.read import open_checkpoint, open_checkpointable
from waystation.safetensors import write_checksums
from waystation.safetensors.open_files import OpenFiles
from waystation.safetensors.sources import find
from waystation.transfers.handle import Progress

MIB = 1 << 20
ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F4": 4, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip


def noise(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8).tobytes()


def every_dtype() -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Tensors of odd sizes, so that none but the first is aligned in its file."""
    shape = (3, 5, 14)
    return {
        f"{dtype} {number}": (dtype, shape, noise(3 * 5 * 14 * bits // 8, number))
        for number, (dtype, bits) in enumerate(ITEM_BITS.items())
    }


def large(count: int = 6, nbytes: int = 5 * MIB + 1234) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {f"w{number}": ("U8", (nbytes,), noise(nbytes, number)) for number in range(count)}


def same(opened: OpenFiles, found: dict[int, list[bytes]], tensors: dict[str, Any]) -> None:
    assert {opened.labels[number]: data for number, (data,) in found.items()} == {
        name: data for name, (_, _, data) in tensors.items()
    }


@pytest.mark.parametrize("limit", [None, 4 * MIB, 256 * MIB], ids=["no bound", "4 MiB", "256 MiB"])
def test_every_dtype_arrives_at_aligned_addresses(
    driver: CudaDriver, tmp_path: Path, limit: int | None
) -> None:
    tensors = every_dtype() | large()
    opened = OpenFiles(find(device_codec.write_model(tmp_path / "model.safetensors", tensors)))
    found, filling = device_codec.load(opened, driver, limit_bytes=limit)
    same(opened, found, tensors)
    assert filling.reading.statistics.bytes_needed == sum(len(data) for _, _, data in tensors.values())


def test_many_small_tensors_of_several_files_arrive(driver: CudaDriver, tmp_path: Path) -> None:
    tensors = {f"t{number}": ("U8", (number % 700,), noise(number % 700, number)) for number in range(3000)}
    names = list(tensors)
    paths = [
        device_codec.write_model(
            tmp_path / f"model-{part}.safetensors", {name: tensors[name] for name in names[part::3]}
        )
        for part in range(3)
    ]
    opened = OpenFiles(find(paths))
    found, _ = device_codec.load(opened, driver)
    same(opened, found, tensors)


@pytest.mark.parametrize("limit", [2 * MIB, 16 * MIB])
def test_pinned_memory_is_bounded_and_every_copy_leaves_it(
    driver: CudaDriver, tmp_path: Path, limit: int
) -> None:
    opened = OpenFiles(find(device_codec.write_model(tmp_path / "model.safetensors", large())))
    _native.trim_arena()  # and with it what earlier tests have pinned
    before = _native.arena_statistics()
    device_codec.load(opened, driver, limit_bytes=limit)
    after = _native.arena_statistics()
    assert after["mapped_bytes"] - before["mapped_bytes"] <= limit
    assert after["live_bytes"] == before["live_bytes"]
    simulated = simulated_driver.statistics()
    if simulated is not None:  # which knows what was pinned
        assert simulated["unpinned_copies"] == 0


def test_memory_stays_pinned_for_the_next_load(driver: CudaDriver, tmp_path: Path) -> None:
    tensors = large(2)
    opened = OpenFiles(find(device_codec.write_model(tmp_path / "model.safetensors", tensors)))
    mapped = []
    for _ in range(3):
        found, _ = device_codec.load(opened, driver, threads=1)
        same(opened, found, tensors)
        mapped.append(_native.arena_statistics()["mapped_bytes"])
    assert mapped[1] == mapped[2]


def test_checksums_of_published_files_are_verified(driver: CudaDriver, tmp_path: Path) -> None:
    tensors = large(2)
    path = device_codec.write_model(tmp_path / "model.safetensors", tensors)
    write_checksums(path)
    opened = OpenFiles(find(path))
    found, _ = device_codec.load(opened, driver, verify=True)
    same(opened, found, tensors)
    damage(path, path.stat().st_size - 100)
    with pytest.raises(errors.Corrupt, match="checksum") as caught:
        device_codec.load(OpenFiles(find(path)), driver, verify=True)
    assert caught.value.context["tensor"] == "w1"


def damage(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def test_a_file_that_shrank_is_an_error(driver: CudaDriver, tmp_path: Path) -> None:
    path = device_codec.write_model(tmp_path / "model.safetensors", large(2))
    opened = OpenFiles(find(path))
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(errors.Conflict):
        device_codec.load(opened, driver)


def test_a_cancelled_load_reads_nothing(driver: CudaDriver, tmp_path: Path) -> None:
    opened = OpenFiles(find(device_codec.write_model(tmp_path / "model.safetensors", large(1))))
    progress = Progress()
    progress.cancel()
    with pytest.raises(errors.Cancelled):
        device_codec.load(opened, driver, progress=progress)


@pytest.mark.parametrize("verify", [None, False])
def test_a_checkpoint_arrives(driver: CudaDriver, tmp_path: Path, verify: bool | None) -> None:
    state = {
        "small": np.arange(77, dtype=np.int16),
        "large": np.random.default_rng(1).standard_normal((1500, 1001)),
        "scalar": np.float32(2.5) * np.ones((), np.float32),
        "empty": np.zeros((0, 4), np.int8),
    }
    context = waystation.Context()
    context.array.saving.storage_options.chunk_bytes = 1 << 20
    with context:
        waystation.save(tmp_path / "checkpoint", state)
    target = str(tmp_path / "checkpoint")
    opened = open_checkpointable(target, open_checkpoint(target), "state")
    found, _ = device_codec.load(opened, driver, verify=verify)
    for number, (data,) in found.items():
        assert data == state[opened.tree.labels[number]].tobytes()
    # Parts of an array: rows, columns, and what begins at an odd place.
    number = opened.tree.labels.index("large")
    boxes = [((3, 0), (700, 1001)), ((0, 5), (1500, 3)), ((1499, 1000), (1, 1))]
    found, _ = device_codec.load(opened, driver, verify=verify, boxes={number: boxes})
    for (offset, shape), data in zip(boxes, found[number], strict=True):
        own = tuple(slice(begin, begin + extent) for begin, extent in zip(offset, shape, strict=True))
        assert data == np.ascontiguousarray(state["large"][own]).tobytes()


def test_a_damaged_checkpoint_is_an_error(driver: CudaDriver, tmp_path: Path) -> None:
    waystation.save(tmp_path / "checkpoint", {"x": np.arange(3 * MIB, dtype=np.uint8)})
    (data,) = (tmp_path / "checkpoint").rglob("p*.safetensors")
    damage(data, data.stat().st_size - 5)
    target = str(tmp_path / "checkpoint")
    opened = open_checkpointable(target, open_checkpoint(target), "state")
    with pytest.raises(errors.Corrupt, match="checksum") as caught:
        device_codec.load(opened, driver)
    assert "x" in caught.value.context["array"]


def test_memory_of_several_devices_is_filled_by_one_job(
    devices: list[dict[str, Any]], tmp_path: Path
) -> None:
    if len(devices) < 2:
        pytest.skip("one device only")
    data = noise(9 * MIB)
    path = tmp_path / "file"
    path.write_bytes(data)
    words: list[int] = []
    regions: list[tuple[int, int, int]] = []
    with contextlib.ExitStack() as stack:
        for device in devices[:2]:
            driver = CudaDriver(device["ordinal"])
            stack.callback(driver.close)
            address = stack.enter_context(driver.device_memory(len(data)))
            words += (0, 0, len(data), 0, address)
            regions.append((driver.ordinal, address, len(data)))
        files = [(str(path), len(data), None)]
        statistics = _native.start_read(files, np.array(words), None, device_memory=regions).result()
        for _, address, _ in regions:
            host = np.empty(len(data), np.uint8)
            driver.copy_to_host(host.ctypes.data, address, host.nbytes)
            assert host.tobytes() == data
    assert statistics["bytes_read"] == len(data)
    assert statistics["bytes_needed"] == 2 * len(data)
