"""Copies of device memory that no framework owns: bytes, pins, forks, Ctrl-C, write jobs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.cuda_driver import CudaDriver

from waystation import _native
from waystation.errors import InvalidInput

MIB = 1 << 20
ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def on_device(driver: CudaDriver, host: np.ndarray[Any, Any]) -> Iterator[int]:
    with driver.device_memory(host.nbytes) as address:
        driver.copy_to_device(address, host.ctypes.data, host.nbytes)
        yield address


def noise(nbytes: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)


def bytes_of(slab: _native.Slab) -> np.ndarray[Any, Any]:
    return np.frombuffer(slab, np.uint8)


def test_devices_are_described(devices: list[dict[str, Any]]) -> None:
    assert [device["ordinal"] for device in devices] == list(range(len(devices)))
    for device in devices:
        assert device["name"]
        assert device["total_bytes"] > 1 << 28
        assert device["pci_bus_id"].count(":") == 2
        major, minor = device["compute_capability"]
        assert major >= 3
        assert minor >= 0


@pytest.mark.parametrize("nbytes", [1, 4097, MIB, pytest.param(100 * MIB + 3, id="large")])
def test_bytes_arrive(driver: CudaDriver, nbytes: int) -> None:
    host = noise(nbytes)
    with on_device(driver, host) as address:
        for _ in range(3):  # fresh memory, then pinned memory again
            slab = _native.allocate(nbytes)
            _native.copy_from_devices(np.array([0, slab.address, address, nbytes, 1, 0]), [slab], None)
            np.testing.assert_array_equal(bytes_of(slab), host)
            bytes_of(slab)[:] = 0
            del slab


def test_many_small_arrays_share_a_slab(driver: CudaDriver) -> None:
    host = noise(3000 * 512)
    slab = _native.allocate(host.nbytes)
    order = np.random.default_rng(1).permutation(3000) * 512
    with on_device(driver, host) as address:
        zero = np.zeros_like(order)
        words = np.stack([zero, slab.address + order, address + order, zero + 512, zero + 1, zero], axis=1)
        _native.copy_from_devices(words, [slab], None)
    np.testing.assert_array_equal(bytes_of(slab), host)


@pytest.mark.parametrize(
    ("row_bytes", "rows"), [(1, 3000), (100, 700), (4096, 5000), pytest.param(40 * MIB, 2, id="large")]
)
def test_rows_at_a_step_become_contiguous(driver: CudaDriver, row_bytes: int, rows: int) -> None:
    host = noise(3 * row_bytes * rows).reshape(rows, 3 * row_bytes)
    slab = _native.allocate(row_bytes * rows)
    with on_device(driver, host) as address:
        words = np.array([0, slab.address, address + row_bytes, row_bytes, rows, 3 * row_bytes])
        _native.copy_from_devices(words, [slab], None)
    np.testing.assert_array_equal(
        bytes_of(slab)[: row_bytes * rows].reshape(rows, row_bytes), host[:, row_bytes : 2 * row_bytes]
    )


def test_every_device_is_copied_from(devices: list[dict[str, Any]]) -> None:
    if len(devices) < 2:
        pytest.skip("one device only")
    host = noise(40 * MIB)
    slab = _native.allocate(host.nbytes * len(devices))
    words: list[int] = []
    with contextlib.ExitStack() as stack:
        for device in devices:
            driver = CudaDriver(device["ordinal"])
            stack.callback(driver.close)
            address = stack.enter_context(on_device(driver, np.roll(host, driver.ordinal)))
            words += (driver.ordinal, slab.address + driver.ordinal * host.nbytes, address, host.nbytes, 1, 0)
        _native.copy_from_devices(np.array(words), [slab], None)
    for device, found in zip(devices, bytes_of(slab).reshape(len(devices), -1), strict=True):
        np.testing.assert_array_equal(found, np.roll(host, device["ordinal"]))


def test_memory_that_is_given_back_is_pinned_anew(driver: CudaDriver) -> None:
    host = noise(8 * MIB)
    with on_device(driver, host) as address:
        for nbytes in (8 * MIB, 7 * MIB, 8 * MIB - 5, 8 * MIB):
            slab = _native.allocate(nbytes)
            _native.copy_from_devices(np.array([0, slab.address, address, nbytes, 1, 0]), [slab], None)
            np.testing.assert_array_equal(bytes_of(slab), host[:nbytes])
            del slab
            if nbytes % MIB:
                _native.trim_arena()


def test_a_device_that_is_not_there_is_refused(devices: list[dict[str, Any]]) -> None:
    slab = _native.allocate(4096)
    with pytest.raises(InvalidInput, match=f"no CUDA device {len(devices)}"):
        _native.copy_from_devices(np.array([len(devices), slab.address, 1 << 40, 1, 1, 0]), [slab], None)


FORKED = """
import os, sys
import numpy as np
from waystation import _native, errors
assert _native.devices()
if os.fork() == 0:
    slab = _native.allocate(4096)
    try:
        _native.copy_from_devices(np.array([0, slab.address, 1 << 40, 4096, 1, 0]), [slab], None)
    except errors.Unsupported as error:
        os._exit(0 if "forked" in str(error) else 2)
    os._exit(1)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_a_forked_child_is_told(devices: list[dict[str, Any]]) -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], cwd=ROOT, check=False)
    assert done.returncode == 0


def test_pins_survive_a_fork_in_the_parent(driver: CudaDriver) -> None:
    host = noise(4 * MIB)
    with on_device(driver, host) as address:
        for _ in range(3):
            slab = _native.allocate(host.nbytes)
            _native.copy_from_devices(np.array([0, slab.address, address, host.nbytes, 1, 0]), [slab], None)
            np.testing.assert_array_equal(bytes_of(slab), host)
            child = fork_sleeper()
            bytes_of(slab)[:] = 0  # now the pages are this process's own copies
            _native.copy_from_devices(np.array([0, slab.address, address, host.nbytes, 1, 0]), [slab], None)
            np.testing.assert_array_equal(bytes_of(slab), host)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            del slab


def fork_sleeper() -> int:
    """A child that keeps this process's pages shared."""
    fork = ctypes.PyDLL(None).fork  # runs the handlers of pthread_atfork, but none of Python's warnings
    child: int = fork()
    if child == 0:
        signal.pause()
    return child


def test_after_ctrl_c_nothing_is_copied_any_more(driver: CudaDriver) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    nbytes = 256 * MIB
    slab = _native.allocate(nbytes)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with on_device(driver, noise(nbytes)) as address:
            words = np.array([0, slab.address, address, nbytes, 1, 0])
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            with pytest.raises(Interrupted):
                copy_for_ever(words, slab)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    bytes_of(slab)[:] = 7
    time.sleep(0.1)
    assert (bytes_of(slab) == 7).all()


def copy_for_ever(words: np.ndarray[Any, Any], slab: _native.Slab) -> None:
    while True:
        _native.copy_from_devices(words, [slab], None)


@pytest.mark.parametrize("mode", [None, "direct-threads", "buffered"])
def test_write_jobs_gather_from_devices(driver: CudaDriver, tmp_path: Path, mode: str | None) -> None:
    rows, columns = 2048, 6000  # a third each: device, host, device
    host = noise(rows * columns).reshape(rows, columns)
    parts = [np.ascontiguousarray(part) for part in np.split(host, 3, axis=1)]
    with on_device(driver, parts[0]) as left, on_device(driver, parts[2]) as right:
        words = [0, 1, 2, rows, columns, 3]
        for number, (device, address) in enumerate([(0, left), (-1, parts[1].ctypes.data), (0, right)]):
            words += (device, address, 0, number * 2000, rows, 2000, 2000, 1)
        path = tmp_path / "file"
        job = _native.start_write([(str(path), b"", host.nbytes, np.array(words))], parts, mode=mode)
        job.result()
    np.testing.assert_array_equal(np.fromfile(path, np.uint8).reshape(host.shape), host)
    assert job.result()["checksums"][0][:8] == _native.crc64(host.tobytes()[:262144]).to_bytes(8, "little")


def test_concurrent_write_jobs_share_a_device(driver: CudaDriver, tmp_path: Path) -> None:
    host = noise(24 * MIB)
    with on_device(driver, host) as address:
        words = np.array([0, host.nbytes, 0, 1, 0, address])
        paths = [tmp_path / f"{number}" for number in range(4)]
        jobs = [_native.start_write([(str(path), b"", host.nbytes, words)], None) for path in paths]
        for job in jobs:
            job.result()
    for path in paths:
        np.testing.assert_array_equal(np.fromfile(path, np.uint8), host)
