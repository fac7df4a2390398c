"""`memory.serialization_status_callback`: what it is told of each array, as genuine Orbax tells it."""

from __future__ import annotations

import enum
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from orbax.checkpoint import v1 as oracle
from orbax.checkpoint._src.serialization.types import TransferPriority

import waystation
from waystation import errors


class Told:
    """A callback that keeps what it is told."""

    def __init__(self, priority: Any = TransferPriority.SYNCHRONOUS) -> None:
        self.priority = priority
        self.calls: list[tuple[str, Any]] = []

    def key_priority(self, key_path: Any) -> Any:
        self.calls.append(("priority", key_path))
        return self.priority

    def on_transfer_start(self, key_path: Any) -> None:
        self.calls.append(("transfer began", key_path))

    def on_transfer_end(self, key_path: Any) -> None:
        self.calls.append(("transferred", key_path))

    def on_write_start(self, key_path: Any) -> None:
        self.calls.append(("write began", key_path))

    def on_write_end(self, key_path: Any) -> None:
        self.calls.append(("written", key_path))


def _context(library: Any, told: Any, limit_bytes: int | None = None) -> Any:
    context = library.Context()
    context.memory.serialization_status_callback = told
    context.memory.transfer_concurrent_bytes = limit_bytes
    return context


def _state() -> dict[str, Any]:
    return {"layers": [{"w": jax.numpy.ones(4)}, {"w": jax.numpy.zeros((2, 2))}], "b": jax.numpy.arange(3)}


@pytest.mark.parametrize("limit_bytes", [None, 1 << 20])
@pytest.mark.parametrize("call", ["save", "save_async"])
def test_it_is_told_what_orbax_tells(tmp_path: Path, call: str, limit_bytes: int | None) -> None:
    told = []
    for library in (oracle, waystation):
        told.append(Told())
        with _context(library, told[-1], limit_bytes):
            response = getattr(library, call)(tmp_path / library.__name__, _state())
            if response is not None:
                response.result()
    theirs, ours = (Counter((what, str(path)) for what, path in each.calls) for each in told)
    assert ours == theirs


def test_each_array_is_safe_before_a_save_in_the_background_returns(tmp_path: Path) -> None:
    told = Told()
    state = {"jax": jax.numpy.ones(8), "numpy": np.ones(8), "torch": torch.ones(8), "number": 3}
    with _context(waystation, told):
        response = waystation.save_async(tmp_path / "c", state)
        safe = [str(path) for what, path in told.calls if what == "transferred"]
    response.result()
    assert len(safe) == 3
    assert Counter(what for what, _ in told.calls) == {"transferred": 3, "written": 3}


@pytest.mark.parametrize("priority", [TransferPriority.UNKNOWN, None, "high"])
def test_an_unknown_priority_fails_the_save(tmp_path: Path, priority: Any) -> None:
    with (
        _context(waystation, Told(priority), 1 << 20),
        pytest.raises(errors.InvalidInput, match="priority of each array") as caught,
    ):
        waystation.save(tmp_path / "c", _state())
    assert caught.value.context["array"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", ["on_transfer_end", "on_write_end"])
@pytest.mark.parametrize("call", ["save", "save_async"])
def test_an_error_of_the_callback_fails_the_save(tmp_path: Path, call: str, method: str) -> None:
    class Failing(Told):
        pass

    def fail(_: Any) -> None:
        raise RuntimeError("the disk of the metrics is full")

    setattr(Failing, method, staticmethod(fail))

    def save() -> None:
        response = getattr(waystation, call)(tmp_path / "c", _state())
        if response is not None:
            response.result()

    with _context(waystation, Failing()), pytest.raises(RuntimeError, match="metrics is full"):
        save()
    assert not list(tmp_path.iterdir())


def test_what_is_no_callback_is_refused(tmp_path: Path) -> None:
    class Priority(enum.Enum):
        HIGH = 1

    for wrong in (object(), Priority.HIGH, lambda key: None):
        with pytest.raises(errors.InvalidInput, match="on_transfer_end"):
            waystation.Context().memory.serialization_status_callback = wrong
