"""Shards for the tests of the agent's client: made, saved, loaded, and a trainer to be killed.

`python -m tests.memory.shards DIRECTORY STEP` saves a shard whose last part cannot be read, and so is in the
middle of it until it is killed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.held_memory import HeldMemory

from waystation import _native

Arrays = dict[str, np.ndarray[Any, Any]]
EPOCH = 1


def arrays_of(step: int) -> Arrays:
    """A state: of several dtypes, one empty, one without axes, one whose elements do not lie in a row."""
    random = np.random.default_rng(step)
    return {
        "weights": random.standard_normal((600, 301)).astype(np.float32),
        "empty": np.zeros((3, 0, 2), np.int16),
        "step": np.asarray(step, np.int64),
        "columns": random.integers(0, 255, (64, 2000), np.uint8).T[::3],
    }


def start_save(
    client: _native.AgentClient, step: int, arrays: Arrays, epoch: int = EPOCH, shard: str = "0/1"
) -> _native.Job:
    """Begins to save whole arrays as a shard."""
    entries = [
        (name, str(array.dtype), array.shape, (0,) * array.ndim, array.shape, array.nbytes)
        for name, array in arrays.items()
    ]
    contents, offsets, data_bytes = _native.place_shard(entries)
    words: list[int] = []
    for array, offset in zip(arrays.values(), offsets, strict=True):
        words += (offset, array.itemsize, array.ndim, *array.shape, 1)
        words += (-1, array.ctypes.data, *(0,) * array.ndim, *array.shape, *array.strides)
    return client.start_save(
        epoch, step, shard, contents, np.asarray(words, np.int64), arrays, data_bytes=data_bytes
    )


def save(client: _native.AgentClient, step: int, epoch: int = EPOCH) -> dict[str, Any]:
    """Saves the state of a step."""
    return start_save(client, step, arrays_of(step), epoch).result()


def load(client: _native.AgentClient, step: int, epoch: int = EPOCH) -> Arrays:
    """Loads the state of a step, verified."""
    return read(client.hold(epoch, step, "0/1"))


def read(held: _native.HeldShard) -> Arrays:
    """Reads what is held."""
    arrays: Arrays = {}
    words: list[int] = []
    for path, dtype, shape, offset, box, file_offset, nbytes in held.entries:
        assert (offset, box) == ((0,) * len(shape), shape)
        array = arrays[path] = np.empty(shape, dtype)
        assert array.nbytes == nbytes
        words += (0, file_offset, array.itemsize, array.ndim, *shape, *offset, *box)
        words += (array.ctypes.data, *array.strides)
    # The file of a slot goes on after the data.
    _native.start_read([held.file], np.asarray(words, np.int64), (held, arrays), may_be_longer=True).result()
    return arrays


def assert_equal(found: Arrays, expected: Arrays) -> None:
    """To the last bit."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def states(client: _native.AgentClient) -> list[str]:
    """Of all slots."""
    return [slot["state"] for slot in client.inventory()]


def held_arrays(memory: HeldMemory) -> Arrays:
    """Zeros, of which the last cannot be read yet."""
    return {"held": np.frombuffer(memory.buffer, np.uint8)}


def _main(directory: Path, step: int) -> None:
    client = _native.AgentClient(str(directory))
    job = start_save(client, step, held_arrays(HeldMemory(1 << 20)))
    sys.stdout.write("saving\n")
    sys.stdout.flush()
    job.result()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
