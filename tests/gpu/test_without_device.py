"""What a machine without a CUDA driver answers. Nothing here may import a framework."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from waystation import _native
from waystation.errors import InvalidInput, Unsupported

DATA_START = 8


@pytest.fixture(autouse=True)
def without_devices() -> None:
    if _native.devices():
        pytest.skip("this machine has a CUDA device")


def test_copying_is_unsupported_with_the_reason() -> None:
    slab = _native.allocate(4096)
    words = np.array([0, slab.address, 1 << 40, 4096, 1, 0])
    with pytest.raises(Unsupported, match="CUDA"):
        _native.copy_from_devices(words, [slab], None)


def test_nothing_to_copy_needs_no_device() -> None:
    _native.copy_from_devices(np.empty(0, np.int64), [], None)
    _native.copy_from_devices(np.array([0, 0, 0, 0, 0, 0]), [], None)


@pytest.mark.parametrize(
    "record",
    [
        [-1, 0, 1, 1, 1, 0],
        [0, 0, 1, -1, 1, 0],
        [0, 0, 1, 1, -1, 0],
        [0, 4096, 1, 1, 1, 0],
        [0, 0, 1, 4097, 1, 0],
        [0, 0, 1, 1024, 5, 1024],
        [0, 0, 1 << 20, 1024, 4, -(1 << 20)],
        [0, 0, 1, 1],
        [0, 0, -1, 4096, 1, 0],
    ],
)
def test_records_are_checked_first(record: list[int]) -> None:
    slab = _native.allocate(4096)
    if len(record) > 3:
        record[1] += slab.address
    with pytest.raises(InvalidInput):
        _native.copy_from_devices(np.array(record), [slab], None)


def test_a_write_of_device_memory_fails_and_leaves_nothing(tmp_path: Path) -> None:
    words = np.array([DATA_START, 4096, 0, 1, 0, 1 << 40])
    job = _native.start_write([(str(tmp_path / "file"), bytes(DATA_START), DATA_START + 4096, words)], None)
    with pytest.raises(Unsupported, match="CUDA"):
        job.result()
    assert list(tmp_path.iterdir()) == []
