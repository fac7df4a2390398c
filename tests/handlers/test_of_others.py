"""Iterators and handlers of other libraries, as they are: Grain's, and those that were written for Orbax."""

from __future__ import annotations

import warnings
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.handlers.examples import Counter

import waystation
from waystation import handlers

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    grain = pytest.importorskip("grain")
    orbax = pytest.importorskip("orbax.checkpoint.experimental.v1")


def numbers(seed: int) -> Any:
    return iter(grain.MapDataset.range(100).shuffle(seed=seed).repeat().to_iter_dataset().batch(4))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_iterator_of_grain(tmp_path: Path, asynchronous: bool) -> None:
    iterator = numbers(seed=3)
    for _ in range(5):
        next(iterator)
    path = tmp_path / "checkpoint"
    given = {"model": {"w": np.ones(3)}, "data": iterator}
    if asynchronous:
        response = waystation.save_checkpointables_async(path, given)
        expected = next(iterator)  # goes on while the rest is written
        response.result()
    else:
        waystation.save_checkpointables(path, given)
        expected = next(iterator)
    fresh = numbers(seed=3)
    loaded = waystation.load_checkpointables(path, {"data": fresh})
    assert loaded["data"] is fresh
    np.testing.assert_array_equal(next(fresh), expected)
    assert not waystation.checkpoint.verify(path).damages


class OrbaxHandler(orbax.handlers.CheckpointableHandler[Counter, None]):
    """As its documentation shows one: a subclass of its protocol, with its types."""

    async def _write(self, directory: Any, value: int) -> None:
        path = await directory.await_creation()
        (path / "counter.txt").write_text(str(value))

    async def save(self, directory: Any, checkpointable: Counter) -> Awaitable[None]:
        assert directory.path.name  # paths may be looked at
        return self._write(directory, checkpointable.value)

    async def load(self, directory: Any, abstract_checkpointable: None = None) -> Awaitable[Counter]:
        async def read() -> Counter:
            return Counter(int((directory / "counter.txt").read_text()))

        return read()

    async def metadata(self, directory: Any) -> None:
        return None

    def is_handleable(self, checkpointable: Any) -> bool:
        return isinstance(checkpointable, Counter)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        return abstract_checkpointable is None


def test_a_handler_written_for_orbax(tmp_path: Path) -> None:
    context = waystation.Context()
    context.checkpointables.registry = handlers.local_registry().add(OrbaxHandler)
    with context:
        waystation.save_checkpointables(tmp_path / "checkpoint", {"counter": Counter(4), "model": {"x": 1}})
        assert waystation.load_checkpointables(tmp_path / "checkpoint")["counter"] == Counter(4)


def test_a_handler_of_orbax_itself(tmp_path: Path) -> None:
    """It asks Orbax who is primary, and writes with its tools; both work in a program of one process."""
    context = waystation.Context()
    registry = handlers.local_registry()
    registry.add(orbax.handlers.JsonHandler, checkpointable_name="config")
    context.checkpointables.registry = registry
    with context:
        waystation.save_checkpointables(tmp_path / "checkpoint", {"config": {"name": "x"}})
        assert waystation.load_checkpointables(tmp_path / "checkpoint") == {"config": {"name": "x"}}
    # Ours reads its files, under the name by which the checkpoint remembers it.
    assert waystation.load_checkpointables(tmp_path / "checkpoint") == {"config": {"name": "x"}}
