"""Saves of one process to one path are committed in the order in which they were called."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

import waystation
from waystation import errors
from waystation.checkpoint.save import open_saving


def large() -> np.ndarray:
    return np.zeros(1 << 20)


@pytest.mark.parametrize("repetition", range(5))
def test_the_last_call_wins(repetition: int, tmp_path: Path) -> None:
    del repetition
    path = tmp_path / "checkpoint"
    waystation.save(path, {"step": -1})
    first = waystation.save_async(path, {"step": 0, "w": large()}, overwrite=True)
    second = waystation.save_async(path, {"step": 1, "w": large()}, overwrite=True)
    waystation.save(path, {"step": 2}, overwrite=True)
    first.result()
    second.result()
    assert waystation.load(path)["step"] == 2
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_a_save_that_fails_lets_the_next_one_go_on(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    first = waystation.save_async(path, {"step": 0, "w": large()})
    second = waystation.save_async(path, {"step": 1})  # without `overwrite`
    third = waystation.save_async(path, {"step": 2}, overwrite=True)
    first.result()
    with pytest.raises(errors.Conflict):
        second.result()
    third.result()
    assert waystation.load(path)["step"] == 2


def test_a_save_that_waits_can_be_cancelled(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    first = waystation.save_async(path, {"step": 0, "w": large()})
    second = waystation.save_async(path, {"step": 1}, overwrite=True)
    second.cancel()
    first.result()
    with pytest.raises(errors.Cancelled):
        second.result()
    assert waystation.load(path)["step"] == 0


def test_nobody_waits_for_a_save_that_nobody_has(tmp_path: Path) -> None:
    """A thread was interrupted between the steps of a save."""
    path = tmp_path / "checkpoint"
    saving = open_saving(path, overwrite=True)
    saving.begin({"state": {"step": 0}}, None)
    del saving
    waystation.save(path, {"step": 1}, overwrite=True)
    assert waystation.load(path)["step"] == 1


def test_a_child_waits_for_no_save_of_its_parent(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    saving = open_saving(path, overwrite=True)
    saving.begin({"state": {"step": 0}}, None)
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # no wait for ever
        waystation.save(path, {"step": 1}, overwrite=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert waystation.load(path)["step"] == 1
    with saving:
        pass
