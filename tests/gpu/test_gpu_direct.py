"""Files that are read straight to device memory by cuFile: a real one, or a simulated one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.cuda_driver import CudaDriver
from tests.support import device_codec, simulated_driver

from waystation.layouts.opened import ReadStatistics
from waystation.safetensors import write_checksums
from waystation.safetensors.open_files import OpenFiles
from waystation.safetensors.sources import find

MIB = 1 << 20

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


@pytest.fixture(autouse=True)
def _with_cufile(cufile: None) -> None:
    """Each test needs it."""


def noise(nbytes: int, seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8).tobytes()


def tensors_of(count: int, most: int, seed: int = 0) -> Tensors:
    """Tensors of any sizes, so that none begins where storage likes it."""
    sizes = np.random.default_rng(seed).integers(0, most, count).tolist()
    return {f"t{number:05}": ("U8", (size,), noise(size, seed + number)) for number, size in enumerate(sizes)}


def loaded(
    path: Path | list[Path], driver: CudaDriver, **options: Any
) -> tuple[dict[str, bytes], ReadStatistics]:
    """The tensors on the device, and how they were read: past the page cache, which holds the new files."""
    opened = OpenFiles(find(path))
    found, filling = device_codec.load(opened, driver, gpu_direct=True, read_mode="direct-threads", **options)
    return {opened.labels[number]: data for number, (data,) in found.items()}, filling.reading.statistics


def same(found: dict[str, bytes], tensors: Tensors) -> bool:
    return found == {name: data for name, (_, _, data) in tensors.items()}


@pytest.mark.parametrize("threads", [None, 1, 3])
@pytest.mark.parametrize(("count", "most"), [(5, 9 * MIB), (3000, 900), (60, 300_000)])
def test_tensors_of_every_alignment_arrive(
    driver: CudaDriver, tmp_path: Path, threads: int | None, count: int, most: int
) -> None:
    tensors = tensors_of(count, most)
    path = device_codec.write_model(tmp_path / "model.safetensors", tensors)
    found, statistics = loaded(path, driver, threads=threads)
    assert same(found, tensors)
    if path.stat().st_size > MIB:  # shorter files come in one request
        assert statistics.gpu_direct_bytes >= sum(len(data) for _, _, data in tensors.values())
        assert not statistics.gpu_direct_reasons
    simulated = simulated_driver.cufile_statistics()
    if simulated is not None:
        assert (simulated["files"], simulated["buffers"]) == (0, 0)


def test_files_are_let_go_of_one_by_one(driver: CudaDriver, tmp_path: Path) -> None:
    tensors: Tensors = {}
    paths = []
    for number in range(6):
        own = {f"{number}.{name}": tensor for name, tensor in tensors_of(4, 2 * MIB, 10 * number).items()}
        own[f"{number}.last"] = ("U8", (2 * MIB,), noise(2 * MIB, number))
        paths.append(device_codec.write_model(tmp_path / f"model-{number}.safetensors", own))
        tensors |= own
    found, statistics = loaded(paths, driver)
    assert same(found, tensors)
    assert not statistics.gpu_direct_reasons


def test_boxes_of_rows_arrive(driver: CudaDriver, tmp_path: Path) -> None:
    rows = np.random.default_rng(3).integers(0, 256, (2000, 3001), np.uint8)
    path = device_codec.write_model(tmp_path / "model.safetensors", {"x": ("U8", rows.shape, rows.tobytes())})
    opened = OpenFiles(find(path))
    boxes = [((0, 0), (2000, 1500)), ((3, 1501), (1000, 7)), ((1999, 0), (1, 3001))]
    found, filling = device_codec.load(
        opened, driver, boxes={0: boxes}, gpu_direct=True, read_mode="direct-threads"
    )
    for (begin, shape), data in zip(boxes, found[0], strict=True):
        part = rows[begin[0] : begin[0] + shape[0], begin[1] : begin[1] + shape[1]]
        assert data == part.tobytes()
    assert filling.reading.statistics.gpu_direct_bytes > 0


def test_streams_are_read_so_too(driver: CudaDriver, tmp_path: Path) -> None:
    tensors = tensors_of(30, 2 * MIB)
    opened = OpenFiles(find(device_codec.write_model(tmp_path / "model.safetensors", tensors)))
    found = device_codec.stream(opened, driver, gpu_direct=True, read_mode="direct-threads")
    assert same(dict(found), tensors)


def test_what_is_verified_goes_through_host_memory_and_the_log_says_so(
    driver: CudaDriver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = tensors_of(8, MIB)
    path = device_codec.write_model(tmp_path / "model.safetensors", tensors)
    write_checksums(path)
    with caplog.at_level(logging.WARNING, "waystation"):
        found, statistics = loaded(path, driver)
    assert same(found, tensors)
    assert statistics.gpu_direct_bytes == 0
    (reason,) = statistics.gpu_direct_reasons
    assert "verified in the memory of the host" in reason
    assert any(reason in message for message in caplog.messages)
    found, statistics = loaded(path, driver, verify=False)
    assert same(found, tensors)
    assert statistics.gpu_direct_bytes > 0


def test_what_the_page_cache_holds_is_taken_from_there(driver: CudaDriver, tmp_path: Path) -> None:
    tensors = tensors_of(8, MIB)
    path = device_codec.write_model(tmp_path / "model.safetensors", tensors)
    path.read_bytes()
    opened = OpenFiles(find(path))
    found, filling = device_codec.load(opened, driver, gpu_direct=True, read_mode="buffered")
    assert same({opened.labels[number]: data for number, (data,) in found.items()}, tensors)
    assert filling.reading.statistics.gpu_direct_bytes == 0
    assert "in memory already" in filling.reading.statistics.gpu_direct_reasons.pop()


def test_nobody_who_does_not_ask_gets_it(driver: CudaDriver, tmp_path: Path) -> None:
    opened = OpenFiles(find(device_codec.write_model(tmp_path / "m.safetensors", tensors_of(4, MIB))))
    _, filling = device_codec.load(opened, driver, read_mode="direct-threads")
    assert filling.reading.statistics.gpu_direct_bytes == 0
    assert not filling.reading.statistics.gpu_direct_reasons
