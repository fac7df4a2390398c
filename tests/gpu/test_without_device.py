"""What a machine without a CUDA driver answers. Nothing here may import a framework."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.device_codec import write_model

from waystation import _native
from waystation.errors import InvalidInput, Unsupported
from waystation.frameworks.base import Codec, Target
from waystation.safetensors.open_files import OpenFiles
from waystation.safetensors.sources import find
from waystation.transfers import devices
from waystation.transfers.buffers import Incoming

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


class HopefulCodec(Codec):
    """A codec of a framework that sees devices which the engine does not."""

    name = "hopeful"

    def __init__(self) -> None:
        self.devices: Any = self

    def goes_to_devices(self, target: Target, stored_dtype: str) -> bool:
        return True


def test_arrays_go_through_host_memory_and_the_reason_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    devices._has_devices.cache_clear()
    opened = OpenFiles(find(write_model(tmp_path / "m.safetensors", {"x": ("U8", (3,), b"abc")})))
    codec: Any = HopefulCodec()
    incoming = Incoming(0, opened.array(0), 0, None, Target((3,), "uint8", [((0,), (3,))], None))
    with caplog.at_level("WARNING", "waystation"):
        assert not devices.can_take(opened, codec, incoming)
        assert not devices.can_take(opened, codec, incoming)
    (record,) = caplog.records
    assert "through host memory" in record.message
    assert "CUDA" in record.message


def test_reading_to_device_memory_is_unsupported(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    words = np.array([0, 0, 4096, 0, 1 << 40])
    job = _native.start_read([(str(path), 4096, None)], words, None, device_memory=[(0, 1 << 40, 4096)])
    with pytest.raises(Unsupported, match="CUDA"):
        job.result()


@pytest.mark.parametrize("regions", [[(0, 1 << 40, 4095)], [(0, 1 << 40, 9), (1, (1 << 40) + 8, 5000)]])
def test_regions_are_checked_first(tmp_path: Path, regions: list[tuple[int, int, int]]) -> None:
    words = np.array([0, 0, 4096, 0, 1 << 40])
    with pytest.raises(InvalidInput, match="region"):
        _native.start_read([(str(tmp_path / "file"), 4096, None)], words, None, device_memory=regions)


def test_a_write_of_device_memory_fails_and_leaves_nothing(tmp_path: Path) -> None:
    words = np.array([DATA_START, 4096, 0, 1, 0, 1 << 40])
    job = _native.start_write([(str(tmp_path / "file"), bytes(DATA_START), DATA_START + 4096, words)], None)
    with pytest.raises(Unsupported, match="CUDA"):
        job.result()
    assert list(tmp_path.iterdir()) == []
