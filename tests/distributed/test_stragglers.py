"""A process that is late: within the deadline the others wait for it, beyond it everybody raises, and what it
does when it comes back harms nobody."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.distributed import torch_scenarios
from tests.support.programs import Programs, Raised, running

import waystation

COUNT, LATE = 3, 1
HANG_S = 60.0


def start(programs: Programs) -> None:
    assert [programs.report(index) for index in range(COUNT)] == ["ready"] * COUNT


def tell(programs: Programs, path: Path) -> None:
    for index in range(COUNT):
        programs.send(index, path)


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


def all_save(programs: Programs, path: Path) -> None:
    """Everything works as if nothing had been."""
    tell(programs, path)
    assert [programs.report(index) for index in range(COUNT)] == [None] * COUNT
    assert waystation.verify(path).damages == []
    assert os.listdir(path.parent) == [path.name]


def test_within_the_deadline_the_others_wait(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with running(
        torch_scenarios.save_when_told, 60.0, 3, count=COUNT, framework="torch", directory=tmp_path
    ) as programs:
        start(programs)
        programs.signal(LATE, signal.SIGSTOP)
        tell(programs, tmp_path / "a" / "1")
        time.sleep(1)
        assert not waystation.is_checkpoint(tmp_path / "a" / "1")
        programs.signal(LATE, signal.SIGCONT)
        assert [programs.report(index) for index in range(COUNT)] == [None] * COUNT
        assert waystation.verify(tmp_path / "a" / "1").damages == []


def test_beyond_the_deadline_all_raise(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with running(
        torch_scenarios.save_when_told, 5.0, 3, count=COUNT, framework="torch", directory=tmp_path
    ) as programs:
        start(programs)
        programs.signal(LATE, signal.SIGSTOP)
        tell(programs, tmp_path / "a" / "1")
        for index in range(COUNT):
            if index != LATE:
                require_named(programs.report(index))
        assert os.listdir(tmp_path / "a") == []
        programs.signal(LATE, signal.SIGCONT)
        late = programs.report(LATE)
        assert isinstance(late, Raised), late
        assert late.type == "Unavailable", late
        assert os.listdir(tmp_path / "a") == []
        all_save(programs, tmp_path / "b" / "2")


def test_late_in_the_middle_of_writing(tmp_path: Path) -> None:
    """The others remove what was begun; the late process finds that gone, and cannot commit or revive it."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with running(
        torch_scenarios.save_when_told, 10.0, 600, count=COUNT, framework="torch", directory=tmp_path
    ) as programs:
        start(programs)
        tell(programs, tmp_path / "a" / "1")
        wait_until(lambda: any((tmp_path / "a").glob(f"*/state/p{LATE:05}-000.safetensors")))
        programs.signal(LATE, signal.SIGSTOP)
        for index in range(COUNT):
            if index != LATE:
                require_named(programs.report(index))
        assert os.listdir(tmp_path / "a") == []
        programs.signal(LATE, signal.SIGCONT)
        late = programs.report(LATE)
        assert isinstance(late, Raised), late
        assert os.listdir(tmp_path / "a") == []
        all_save(programs, tmp_path / "b" / "2")


def require_named(error: object) -> None:
    assert isinstance(error, Raised), error
    assert error.type == "Unavailable", error
    assert f"process {LATE}" in error.message, error
