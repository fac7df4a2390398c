"""Memory of devices is compared with blocks of files, and a frozen tensor on a GPU is not written again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.cuda_driver import CudaDriver

import waystation
from waystation import _native, _plans

BLOCK: int = _native.BLOCK_BYTES


def test_blocks_of_device_memory_are_compared(driver: CudaDriver) -> None:
    """Of an array on the device, and of one that the device and the host have a half of each."""
    host = np.random.default_rng(0).integers(0, 256, 5 * BLOCK + 777, np.uint8)
    half = len(host) // 2
    with driver.device_memory(host.nbytes) as address:
        driver.copy_to_device(address, host.ctypes.data, host.nbytes)
        halves = [0, 1, 1, len(host), 2, driver.ordinal, address, 0, half, 1]
        halves += [-1, host.ctypes.data + half, half, len(host) - half, 1]
        words = np.array([*_plans.byte_segment(0, host.nbytes, address, driver.ordinal), *halves], np.int64)
        rows, counts, expected = [], [], []
        for array in (0, 1):
            for begin in range(0, len(host), BLOCK):
                block = host[begin : begin + BLOCK]
                cut = len(block) // 3
                rows += [(array, begin, cut), (array, begin + cut, len(block) - cut)]
                counts.append(2)
                expected.append(_native.crc64(block))
        expected[3] ^= 1
        columns = np.array(rows, np.int64), np.array(counts, np.int64), np.array(expected, np.uint64)
        job = _native.start_comparison(words, *columns, host, threads=3)
        job.wait()
        found = list(job.result()["equal"])
    assert found == [1, 1, 1, 0, 1, 1] + 6 * [1]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("snapshot_bytes", [None, 0])
def test_frozen_tensors_are_shared(
    cuda: Any, tmp_path: Path, asynchronous: bool, snapshot_bytes: int | None
) -> None:
    frozen = cuda.arange(8 << 20, dtype=cuda.float32, device="cuda").reshape(2048, -1)
    seen: list[waystation.SaveStatistics] = []
    context = waystation.Context()
    context.array.saving.on_statistics = seen.append
    context.memory.snapshot_bytes = snapshot_bytes

    def state(step: int) -> dict[str, Any]:
        trained = cuda.full((3000,), float(step), device="cuda")
        return {"frozen": frozen, "columns": frozen[:, ::2].T, "trained": trained}

    with context:
        waystation.save(tmp_path / "1", state(1))
        if asynchronous:
            waystation.save_async(tmp_path / "2", state(2), unchanged_from=tmp_path / "1").result()
        else:
            waystation.save(tmp_path / "2", state(2), unchanged_from=tmp_path / "1")
    assert seen[1].bytes_shared == 3 * frozen.nbytes // 2
    assert seen[1].bytes_written < 20_000
    for name, tensor in waystation.load(tmp_path / "2").items():
        assert cuda.equal(tensor.to("cuda"), state(2)[name]), name
    assert not waystation.verify(tmp_path / "2").damages
