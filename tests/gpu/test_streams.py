"""Streams to device memory that no framework owns: every array is whole there when it is handed out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benchmarks.cuda_driver import CudaDriver
from tests.support import device_codec

from waystation import _native, errors
from waystation.safetensors import write_checksums
from waystation.safetensors.composed import Composed, Composition, Part
from waystation.safetensors.open_files import OpenFiles
from waystation.safetensors.sources import find

MIB = 1 << 20

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def noise(nbytes: int, seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8).tobytes()


def tensors_of(count: int, least: int, most: int) -> Tensors:
    """Tensors of any sizes, nothing included."""
    sizes = np.random.default_rng(1).integers(least, most, count).tolist()
    sizes[count // 2] = 0
    return {f"t{number}": ("U8", (size,), noise(size, number)) for number, size in enumerate(sizes)}


@pytest.mark.parametrize("verified", [False, True])
@pytest.mark.parametrize("threads", [None, 1])
def test_every_array_is_whole_when_it_is_handed_out(
    driver: CudaDriver, tmp_path: Path, verified: bool, threads: int | None
) -> None:
    tensors = tensors_of(40, 0, 3 * MIB) | tensors_of(700, 0, 900)
    names = list(tensors)
    for part in range(3):
        own = {name: tensors[name] for name in names[part::3]}
        device_codec.write_model(tmp_path / f"model-0000{part + 1}-of-00003.safetensors", own)
    paths = sorted(tmp_path.iterdir())
    if verified:
        write_checksums(paths)
    opened = OpenFiles(find(paths))
    found = list(device_codec.stream(opened, driver, threads=threads))
    assert [name for name, _ in found] == opened.labels
    assert dict(found) == {name: data for name, (_, _, data) in tensors.items()}


def test_arrays_of_several_tensors_wait_for_all_of_them(driver: CudaDriver, tmp_path: Path) -> None:
    """Each is the end of one tensor, and the beginning of another that may be anywhere."""
    tensors = tensors_of(20, MIB, 2 * MIB)
    tensors["t10"] = ("U8", (5 * MIB,), noise(5 * MIB, 10))
    opened = OpenFiles(find(device_codec.write_model(tmp_path / "model.safetensors", tensors)))
    compositions, expected = [], []
    for number in range(20):
        one, other = number, number * 7 % 20
        ends = [len(tensors[name][2]) for name in (opened.labels[one], opened.labels[other])]
        take = min(ends) // 3
        parts = (
            Part(one, ((ends[0] - take,), (take,)), (0,)),
            Part(other, ((0,), (take,)), (take,)),
        )
        compositions.append(Composition(f"c{number}", (2 * take,), parts))
        first, second = (tensors[opened.labels[index]][2] for index in (one, other))
        expected.append(first[ends[0] - take :] + second[:take])
    found = list(device_codec.stream(Composed(opened, compositions), driver))
    assert found == [(f"c{number}", data) for number, data in enumerate(expected)]


def test_damage_behind_is_raised_when_it_is_reached(driver: CudaDriver, tmp_path: Path) -> None:
    tensors = {f"w{number:02}": ("U8", (MIB,), noise(MIB, number)) for number in range(24)}
    path = device_codec.write_model(tmp_path / "model.safetensors", tensors)
    write_checksums(path)
    with path.open("r+b") as file:
        file.seek(-10, 2)
        file.write(b"damage!")
    opened = OpenFiles(find(path))
    coming = device_codec.stream(opened, driver, threads=1)
    seen = []
    with pytest.raises(errors.Corrupt) as caught:
        seen.extend(coming)
    assert len(seen) < 24
    assert all(data == tensors[name][2] for name, data in seen)
    assert caught.value.context["tensor"] == "w23"


def test_a_file_that_changes_on_the_way(driver: CudaDriver, tmp_path: Path) -> None:
    tensors = {f"w{number}": ("U8", (MIB,), noise(MIB, number)) for number in range(6)}
    paths = [
        device_codec.write_model(tmp_path / f"model-{part}.safetensors", tensors_of_part(tensors, part))
        for part in range(2)
    ]
    coming = device_codec.stream(OpenFiles(find(paths)), driver)
    next(coming)
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    with pytest.raises(errors.Conflict, match="changed while it was in use") as caught:
        list(coming)
    assert caught.value.context["path"] == str(paths[1])


def tensors_of_part(tensors: Tensors, part: int) -> Tensors:
    return {name: tensors[name] for name in list(tensors)[part * 3 : part * 3 + 3]}


def test_host_memory_is_bounded(driver: CudaDriver, tmp_path: Path) -> None:
    tensors = {f"w{number:02}": ("U8", (5 * MIB,), noise(5 * MIB, number)) for number in range(8)}
    opened = OpenFiles(find(device_codec.write_model(tmp_path / "model.safetensors", tensors)))
    _native.trim_arena()
    before = _native.arena_statistics()["mapped_bytes"]
    for name, data in device_codec.stream(opened, driver, limit_bytes=4 * MIB):
        assert data == tensors[name][2]
        assert _native.arena_statistics()["mapped_bytes"] - before <= 4 * MIB
