"""Saves of one process to one path are committed in the order in which they were called."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import waystation
from waystation import errors
from waystation.checkpoint.save import in_background, open_saving
from waystation.checkpoint.saving import Saving


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


class Gate:
    """A checkpointable that is written once the gate is open."""

    def __init__(self, gate: threading.Event, first: Callable[[], object] = lambda: None) -> None:
        self.gate, self.first = gate, first

    async def save(self, directory: waystation.path.PathAwaitingCreation) -> Any:
        self.first()

        async def write() -> None:
            while not self.gate.is_set():
                await asyncio.sleep(0.01)
            ((await directory.await_creation()) / "file").write_text("written")

        return write()

    async def load(self, directory: Path) -> Any:
        raise NotImplementedError


def begin(path: Path, step: int, gate: threading.Event) -> waystation.AsyncResponse[None]:
    """A save in the background that ends once the gate is open."""
    state = {"state": {"step": step}, "gate": Gate(gate)}
    return waystation.save_checkpointables_async(path, state, overwrite=True)


def refused(path: Path) -> None:
    with pytest.raises(errors.UnsupportedLeaf):
        waystation.save_async(path, {"step": object()}, overwrite=True)


def refused_by_a_handler(path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("not now")

    with pytest.raises(errors.HandlerFailed):
        waystation.save_checkpointables_async(path, {"gate": Gate(threading.Event(), fail)}, overwrite=True)


def cancelled(path: Path) -> None:
    second = waystation.save_async(path, {"step": 2}, overwrite=True)
    second.cancel()
    with pytest.raises(errors.Cancelled):
        second.result()


def interrupted(path: Path) -> None:
    interrupt = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        waystation.save(path, {"step": 2}, overwrite=True)


@pytest.mark.parametrize("end", [refused, refused_by_a_handler, cancelled, interrupted])
def test_a_save_that_ends_early_leaves_the_order_of_the_others(
    tmp_path: Path, end: Callable[[Path], None]
) -> None:
    path, gate = tmp_path / "checkpoint", threading.Event()
    first = begin(path, 1, gate)
    end(path)
    third = waystation.save_async(path, {"step": 3}, overwrite=True)
    with pytest.raises(TimeoutError):
        third.result(0.5)
    gate.set()
    first.result()
    third.result()
    assert waystation.load(path)["step"] == 3


def test_one_that_finds_the_checkpoint_of_one_before_says_so(tmp_path: Path) -> None:
    path, gate = tmp_path / "checkpoint", threading.Event()
    first = waystation.save_checkpointables_async(path, {"gate": Gate(gate)})
    second = waystation.save_async(path, {"step": 1})
    gate.set()
    first.result()
    with pytest.raises(errors.Conflict, match="an earlier save of this program") as caught:
        second.result()
    assert caught.value.context["path"] == str(path)
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_one_that_is_cancelled_after_the_next_was_called(tmp_path: Path) -> None:
    path, gate = tmp_path / "checkpoint", threading.Event()
    first = begin(path, 1, gate)
    second = waystation.save_async(path, {"step": 2}, overwrite=True)
    third = waystation.save_async(path, {"step": 3}, overwrite=True)
    second.cancel()
    with pytest.raises(errors.Cancelled):
        second.result()
    gate.set()
    first.result()
    third.result()
    assert waystation.load(path)["step"] == 3


def test_what_is_added_is_added_to_what_was_saved_before(tmp_path: Path) -> None:
    path, gate = tmp_path / "checkpoint", threading.Event()
    waystation.save(path, {"step": 0})
    first = begin(path, 1, gate)
    threading.Timer(0.3, gate.set).start()
    waystation.checkpoint.add_checkpointables(path, {"more": {"x": 2}})
    first.result()
    found = waystation.load_checkpointables(path, {"state": None, "more": None})
    assert (found["state"]["step"], found["more"]["x"]) == (1, 2)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_save_inside_another_one_does_not_wait_for_it(tmp_path: Path, in_background: bool) -> None:
    path, gate = tmp_path / "checkpoint", threading.Event()
    gate.set()
    seen = []

    def save_inside() -> None:
        waystation.save(path, {"step": 1}, overwrite=True)
        seen.append(waystation.load(path)["step"])

    state = {"state": {"step": 2}, "gate": Gate(gate, save_inside)}
    if in_background:
        waystation.save_checkpointables_async(path, state, overwrite=True).result()
    else:
        waystation.save_checkpointables(path, state, overwrite=True)
    assert seen == [1]
    assert waystation.load(path)["step"] == 2


def test_a_signal_handler_saves_during_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint"
    seen: list[int] = []
    finish = Saving.finish

    def interrupted_finish(self: Saving, *arguments: Any) -> None:
        if not seen:
            seen.append(0)
            signal.raise_signal(signal.SIGUSR1)
        finish(self, *arguments)

    def handle(*_: object) -> None:
        waystation.save(path, {"step": 1}, overwrite=True)
        seen.append(waystation.load(path)["step"])

    monkeypatch.setattr(Saving, "finish", interrupted_finish)
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        waystation.save(path, {"step": 2}, overwrite=True)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [0, 1]
    assert waystation.load(path)["step"] == 2


def test_nobody_waits_for_a_save_that_was_interrupted_before_its_thread_began(tmp_path: Path) -> None:
    """The traceback keeps what the save was, while the program saves once more."""
    path = tmp_path / "checkpoint"
    saving = open_saving(path, overwrite=True)

    def interrupt(*_: object) -> Any:
        raise KeyboardInterrupt

    try:
        in_background(saving, {"state": {"step": 0}}, None, respond=interrupt)
    except KeyboardInterrupt as error:
        waystation.save(path, {"step": 1}, overwrite=True)
        del error
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


def test_a_load_of_what_is_being_saved_says_so(tmp_path: Path) -> None:
    path, gate = tmp_path / "checkpoint", threading.Event()
    first = begin(path, 1, gate)
    with pytest.raises(errors.NotFound, match="1 save is still writing it; wait for that"):
        waystation.load(path)
    gate.set()
    first.result()
    assert waystation.load_checkpointables(path, {"state": None})["state"] == {"step": 1}
