"""A process that is late: within the deadline the others wait for it, beyond it everybody raises, and what it
does when it comes back harms nobody."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.distributed import torch_scenarios
from tests.support.programs import Programs, Raised, running

import waystation

COUNT, LATE = 3, 1
HANG_S = 60.0


@contextlib.contextmanager
def started(directory: Path, deadline_s: float, mebibytes: int) -> Iterator[Programs]:
    """A program that waits for where to save a tensor of so many mebibytes."""
    for name in ("a", "b"):
        (directory / name).mkdir()
    with running(
        torch_scenarios.save_when_told,
        deadline_s,
        mebibytes,
        count=COUNT,
        framework="torch",
        directory=directory,
    ) as programs:
        assert [programs.report(index) for index in range(COUNT)] == ["ready"] * COUNT
        yield programs


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


def require_given_up(programs: Programs, directory: Path) -> None:
    """All but the late one have raised, naming it, and removed what they had begun."""
    for index in range(COUNT):
        if index != LATE:
            error = programs.report(index)
            assert isinstance(error, Raised), error
            assert error.type == "Unavailable", error
            assert f"process {LATE}" in error.message, error
    assert os.listdir(directory) == []


def come_back(programs: Programs, directory: Path) -> Raised:
    """The late one goes on, and raises as well."""
    programs.signal(LATE, signal.SIGCONT)
    error = programs.report(LATE)
    assert isinstance(error, Raised), error
    assert os.listdir(directory) == []
    return error


def test_within_the_deadline_the_others_wait(tmp_path: Path) -> None:
    with started(tmp_path, 60.0, 3) as programs:
        programs.signal(LATE, signal.SIGSTOP)
        tell(programs, tmp_path / "a" / "1")
        time.sleep(1)
        assert not waystation.is_checkpoint(tmp_path / "a" / "1")
        programs.signal(LATE, signal.SIGCONT)
        assert [programs.report(index) for index in range(COUNT)] == [None] * COUNT
        assert waystation.verify(tmp_path / "a" / "1").damages == []


def test_beyond_the_deadline_all_raise(tmp_path: Path) -> None:
    with started(tmp_path, 5.0, 3) as programs:
        programs.signal(LATE, signal.SIGSTOP)
        tell(programs, tmp_path / "a" / "1")
        require_given_up(programs, tmp_path / "a")
        assert come_back(programs, tmp_path / "a").type == "Unavailable"
        all_save(programs, tmp_path / "b" / "2")


def test_late_in_the_middle_of_writing(tmp_path: Path) -> None:
    """The others remove what was begun; the late process finds that gone, and cannot commit or revive it."""
    with started(tmp_path, 10.0, 600) as programs:
        tell(programs, tmp_path / "a" / "1")
        wait_until(lambda: any((tmp_path / "a").glob(f"*/state/p{LATE:05}-000.safetensors")))
        programs.signal(LATE, signal.SIGSTOP)
        require_given_up(programs, tmp_path / "a")
        come_back(programs, tmp_path / "a")
        all_save(programs, tmp_path / "b" / "2")
