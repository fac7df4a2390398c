"""Deaths are seen, also on other machines, and nobody who lives is called dead."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from waystation import _processes
from waystation.coordination import liveness
from waystation.coordination.liveness import Liveness, Registration

SILENCE_S = 0.5


class Board:
    """A store of one process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.lock = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        with self.lock:
            self.values[key] = value

    def read(self, directory: str, names: Sequence[str]) -> list[bytes | None]:
        with self.lock:
            return [self.values.get(f"{directory}/{name}") for name in names]


@pytest.fixture
def board() -> Board:
    return Board()


@pytest.fixture
def watching(board: Board, monkeypatch: pytest.MonkeyPatch) -> Iterator[Liveness]:
    monkeypatch.setattr(liveness, "BEAT_INTERVAL_S", 0.02)
    monkeypatch.setattr(liveness, "SILENCE_S", SILENCE_S)
    watcher = Liveness(board, "test", 0)
    watcher.begin([1])
    yield watcher
    watcher.end([1])


def wait_until(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, "a hang"
        time.sleep(0.005)


def register(board: Board, registration: Registration, beat: bytes = b"1") -> None:
    board.set("test/process/1", json.dumps(dataclasses.asdict(registration)).encode())
    board.set("test/beat/1", beat)


def elsewhere() -> Registration:
    return Registration("elsewhere", "another system", 4711, "17")


def rounds_of_looking(board: Board, count: int) -> None:
    """Waits until the watcher has beaten, so looked, so many times more."""
    for _ in range(count):
        before = board.values.get("test/beat/0")
        wait_until(lambda before=before: board.values.get("test/beat/0") != before)  # type: ignore[misc]


def test_a_process_of_this_machine_is_seen_dead_at_once(board: Board, watching: Liveness) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        own = Registration.of_this_process()
        register(
            board, dataclasses.replace(own, process_id=child.pid, start=_processes.start_time(child.pid))
        )
        wait_until(lambda: "pid" in watching.describe(1))
        assert watching.dead([1]) == {}
        child.kill()
        # Before it is reaped, too: nobody may ever do that.
        wait_until(lambda: watching.dead([1]))
        assert Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    finally:
        child.kill()
        child.wait()
    assert watching.dead([1]) == {1: "has died: it no longer runs"}
    assert watching.describe(1) == f"process 1 (pid {child.pid} on {own.host})"


def test_another_process_with_the_same_id_is_not_taken_for_it(board: Board, watching: Liveness) -> None:
    register(board, dataclasses.replace(Registration.of_this_process(), start="1"))
    wait_until(lambda: watching.dead([1]))


def test_silence_of_a_process_of_this_machine_proves_nothing(board: Board, watching: Liveness) -> None:
    register(board, Registration.of_this_process())
    time.sleep(2 * SILENCE_S)
    rounds_of_looking(board, 3)
    assert watching.dead([1]) == {}


def test_silence_of_a_process_elsewhere_is_death(board: Board, watching: Liveness) -> None:
    register(board, elsewhere())
    rounds_of_looking(board, 3)
    begun = time.monotonic()
    wait_until(lambda: watching.dead([1]))
    assert time.monotonic() - begun > SILENCE_S / 2
    assert watching.dead([1])[1].startswith("gives no sign of life since more than 0.5 s: it has died, or")
    assert watching.describe(1) == "process 1 (pid 4711 on elsewhere)"


def test_who_beats_again_is_alive_again(board: Board, watching: Liveness) -> None:
    register(board, elsewhere())
    wait_until(lambda: watching.dead([1]))
    board.set("test/beat/1", b"2")
    wait_until(lambda: not watching.dead([1]))


@pytest.mark.parametrize("beat", [None, b"idle"], ids=["never came", "idle"])
def test_who_has_no_session_open_is_not_missed(beat: bytes | None, board: Board, watching: Liveness) -> None:
    register(board, elsewhere())
    if beat is None:
        del board.values["test/beat/1"]
    else:
        board.set("test/beat/1", beat)
    time.sleep(2 * SILENCE_S)
    rounds_of_looking(board, 3)
    assert watching.dead([1]) == {}


def test_beats_begin_and_end_with_sessions(board: Board) -> None:
    own = Liveness(board, "test", 7)
    threads = threading.active_count()
    own.begin([1])
    own.begin([1, 2])
    wait_until(lambda: board.values.get("test/beat/7") not in (None, b"idle"))
    registered = json.loads(board.values["test/process/7"])
    assert registered["process_id"] == os.getpid()
    assert not own.end([1])
    assert board.values["test/beat/7"] != b"idle"
    assert own.end([1, 2])
    assert board.values["test/beat/7"] == b"idle"
    assert threading.active_count() == threads
