"""The cache of what loads have read of object stores: shared, damaged, full, and left by killed processes."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from tests.support import programs, s3
from tests.support.long import only_long
from tests.support.s3 import PASS, STUCK, Bucket, bucket, proxy

import waystation
from waystation import storage
from waystation.layouts.native import read_job
from waystation.safetensors import load

MIB = 1 << 20
BLOCK = 8 * MIB


@pytest.fixture
def place() -> Bucket:
    return bucket()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def tensors_of(value: int, nbytes: int = 20 * MIB) -> dict[str, np.ndarray]:
    """A model whose tensors all say which it is."""
    return {
        "large": np.arange(nbytes // 4, dtype=np.float32) + value,
        "small": np.full(1000, value, np.int32),
    }


def publish(place: Bucket, value: int, nbytes: int = 20 * MIB) -> str:
    location = f"{place.location}/model.safetensors"
    with place.context():  # which gives it an ETag
        storage.of(location).write_files([(location, safetensors.numpy.save(tensors_of(value, nbytes)))])
    return location


def require(loaded: dict[str, Any], value: int, nbytes: int = 20 * MIB) -> None:
    for name, expected in tensors_of(value, nbytes).items():
        np.testing.assert_array_equal(loaded[name], expected)


def cached(
    endpoint: str, directory: Path | str, cache_bytes: int = 1 << 30
) -> tuple[waystation.Context, list[waystation.LoadStatistics]]:
    """Options by which a server is reached through a cache, and what loads have moved."""
    found: list[waystation.LoadStatistics] = []
    context = s3.context(endpoint)
    context.storage.cache_directory, context.storage.cache_bytes = os.fspath(directory), cache_bytes
    context.array.loading.on_statistics = found.append
    return context, found


def blocks_in(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if not path.suffix]


def nbytes_in(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


@contextlib.contextmanager
def without(limit: int, value: int) -> Iterator[None]:
    """Has a limit of this process be another one within the block."""
    before = resource.getrlimit(limit)
    resource.setrlimit(limit, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(limit, before)


# ---- one process -------------------------------------------------------------------------------


def test_a_model_is_read_once(place: Bucket, cache: Path) -> None:
    location = publish(place, 1)
    with proxy(place.endpoint) as between:
        context, found = cached(between.endpoint, cache)
        with context:
            require(load(location, framework="numpy"), 1)
            first = between.sent_bytes
            require(load(location, framework="numpy"), 1)
            part = load(location, framework="numpy", select=lambda name: name == "small")
            np.testing.assert_array_equal(part["small"], tensors_of(1)["small"])
    whole = sum(tensor.nbytes for tensor in tensors_of(1).values())
    assert whole <= first < whole + MIB
    assert between.sent_bytes - first < MIB, "the header alone"
    assert (found[0].cached_bytes, found[0].bytes_read >= whole) == (0, True)
    assert found[1].cached_bytes >= whole
    assert found[1].bytes_read == found[2].bytes_read == 0


def test_a_checkpoint_is_read_once(place: Bucket, cache: Path) -> None:
    path = f"{place.location}/run/ckpt"
    with place.context():
        waystation.save(path, tensors_of(1))
    with proxy(place.endpoint) as between:
        context, found = cached(between.endpoint, cache)
        with context:
            require(waystation.load(path), 1)
            first = between.sent_bytes
            require(waystation.load(path), 1)
    assert between.sent_bytes - first < MIB
    assert found[1].cached_bytes >= 20 * MIB
    with place.context():
        waystation.save(path, tensors_of(2), overwrite=True)
    with context:
        require(waystation.load(path), 2)


def test_another_version_of_a_file_is_read_anew(place: Bucket, cache: Path) -> None:
    context, found = cached(place.endpoint, cache)
    with context:
        for value in (1, 2, 1):
            require(load(publish(place, value), framework="numpy"), value)
    assert [each.bytes_read > 0 for each in found[:2]] == [True, True]


def test_two_stores_do_not_meet(cache: Path) -> None:
    """Of two servers whose buckets have one name."""
    place = bucket()
    location = publish(place, 1)
    with cached(place.endpoint, cache)[0]:
        require(load(location, framework="numpy"), 1)
    with proxy(place.endpoint) as between:
        context, found = cached(between.endpoint, cache)
        with context:
            require(load(location, framework="numpy"), 1)
    assert found[0].cached_bytes == 0


def test_what_is_damaged_is_fetched_again(place: Bucket, cache: Path) -> None:
    location = publish(place, 1)
    context, found = cached(place.endpoint, cache)
    with context:
        require(load(location, framework="numpy"), 1)
        for path, offset in zip(sorted(blocks_in(cache)), (5 * MIB, 100, None), strict=True):
            content = bytearray(path.read_bytes())
            if offset is not None:
                content[min(offset, len(content) - 1)] ^= 1
            path.write_bytes(content if offset is not None else content[: len(content) // 2])
        require(load(location, framework="numpy"), 1)
        require(load(location, framework="numpy"), 1)
    assert found[1].bytes_read >= 20 * MIB
    assert found[2].bytes_read == 0


@pytest.mark.long
@only_long
def test_it_has_no_more_than_it_may(place: Bucket, cache: Path) -> None:
    most = 3 * BLOCK
    context, found = cached(place.endpoint, cache, most)
    with context:
        for value in range(3):
            location = publish(place, value, 40 * MIB)
            require(load(location, framework="numpy"), value, 40 * MIB)
            assert 0 < nbytes_in(cache) <= most
    context, found = cached(place.endpoint, cache, MIB)
    with context:
        require(load(location, framework="numpy"), 2, 40 * MIB)
    assert nbytes_in(cache) <= most
    assert found[0].cached_bytes == 0


def test_what_cannot_be_kept_is_loaded_and_told_once(
    place: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    location = publish(place, 1)
    read_job._tell.cache_clear()
    file = tmp_path / "file"
    file.touch()
    context, found = cached(place.endpoint, file / "below")
    with caplog.at_level(logging.WARNING), context:
        for _ in range(2):
            require(load(location, framework="numpy"), 1)
    assert [each.cached_bytes for each in found] == [0, 0]
    (told,) = [record.getMessage() for record in caplog.records if "not kept" in record.getMessage()]
    assert "cache_directory" in told
    assert found[0].bytes_read < 21 * MIB, "no whole blocks, as nobody keeps them"


def test_a_full_disk_fails_no_load(place: Bucket, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    location = publish(place, 1)
    read_job._tell.cache_clear()
    context, _ = cached(place.endpoint, cache)
    with caplog.at_level(logging.WARNING), context, without(resource.RLIMIT_FSIZE, 5 * MIB):
        require(load(location, framework="numpy"), 1)
    assert [record for record in caplog.records if "not kept" in record.getMessage()]
    assert [path for path in cache.iterdir() if path.suffix] == []


# ---- several processes -------------------------------------------------------------------------


def load_at(endpoint: str, directory: str, location: str, value: int, nbytes: int) -> None:
    context, _ = cached(endpoint, directory)
    with context:
        require(load(location, framework="numpy"), value, nbytes)


def begun(call: Callable[..., None], *arguments: object) -> Any:
    process = programs.context.Process(target=call, args=arguments, daemon=True)
    process.start()
    return process


def test_four_processes_fetch_a_model_once(place: Bucket, cache: Path) -> None:
    nbytes = 80 * MIB
    location = publish(place, 1, nbytes)
    with proxy(place.endpoint) as between:
        processes = [
            begun(load_at, between.endpoint, os.fspath(cache), location, 1, nbytes) for _ in range(4)
        ]
        for process in processes:
            process.join(programs.HANG_S)
            assert process.exitcode == 0
    assert between.sent_bytes <= 1.05 * nbytes
    of_data = [path for method, path in between.requests if method == "GET" and path.endswith("safetensors")]
    assert len(of_data) <= 4 + 11, "each has its header, and each block is fetched once"


def test_what_a_killed_process_has_left_is_removed(place: Bucket, cache: Path) -> None:
    location = publish(place, 1)
    with proxy(place.endpoint, lambda _: stuck_in_data(between)) as between:
        process = begun(load_at, between.endpoint, os.fspath(cache), location, 1, 20 * MIB)
        wait_until(lambda: cache.is_dir() and any(path.suffix for path in cache.iterdir()))
        os.kill(process.pid, signal.SIGKILL)
        process.join(programs.HANG_S)
    assert any(path.suffix for path in cache.iterdir())
    (cache / "0123456789abcdef.part").write_bytes(b"of another one")
    context, _ = cached(place.endpoint, cache)
    with context:
        require(load(location, framework="numpy"), 1)
    assert [path for path in cache.iterdir() if path.suffix] == []
    assert len(blocks_in(cache)) == 3


@pytest.mark.long
def test_a_process_that_was_stopped_keeps_nobody_waiting_for_ever(place: Bucket, cache: Path) -> None:
    location = publish(place, 1)
    with proxy(place.endpoint, lambda _: stuck_in_data(between)) as between:
        process = begun(load_at, between.endpoint, os.fspath(cache), location, 1, 20 * MIB)
        wait_until(lambda: cache.is_dir() and any(path.suffix for path in cache.iterdir()))
        os.kill(process.pid, signal.SIGSTOP)
        try:
            context, found = cached(place.endpoint, cache)
            with context:
                require(load(location, framework="numpy"), 1)
            assert found[0].bytes_read > 0
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.join(programs.HANG_S)


def stuck_in_data(between: s3.Proxy) -> str:
    """Nothing comes of the data of a model, after its header."""
    of_file = [path for method, path in between.requests if method == "GET" and path.endswith("safetensors")]
    return STUCK if len(of_file) > 1 else PASS


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + programs.HANG_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)
