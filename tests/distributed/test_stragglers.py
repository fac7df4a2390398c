"""A process that is late: within the deadline the others wait for it, beyond it everybody raises, and what it
does when it comes back harms nobody."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.distributed import torch_scenarios
from tests.distributed.torch_scenarios import Order
from tests.support.long import only_long
from tests.support.programs import Programs, Raised, running

import waystation
from waystation import _native

COUNT, LATE = 3, 1
HANG_S = 60.0


@contextlib.contextmanager
def started(directory: Path) -> Iterator[Programs]:
    """A program that waits for orders to save."""
    for name in ("a", "b"):
        (directory / name).mkdir()
    with running(
        torch_scenarios.save_when_told, count=COUNT, framework="torch", directory=directory
    ) as programs:
        assert [programs.report(index) for index in range(COUNT)] == ["ready"] * COUNT
        yield programs


def tell(programs: Programs, path: Path, deadline_s: float = HANG_S, throttle: Path | None = None) -> None:
    """Has all save; the late one with a throttle, if there is one."""
    for index in range(COUNT):
        programs.send(index, Order(path, deadline_s, {} if throttle is None else {LATE: throttle}))


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
    with started(tmp_path) as programs:
        programs.signal(LATE, signal.SIGSTOP)
        tell(programs, tmp_path / "a" / "1")
        time.sleep(1)
        assert not waystation.is_checkpoint(tmp_path / "a" / "1")
        programs.signal(LATE, signal.SIGCONT)
        assert [programs.report(index) for index in range(COUNT)] == [None] * COUNT
        assert waystation.verify(tmp_path / "a" / "1").damages == []


def test_beyond_the_deadline_all_raise(tmp_path: Path) -> None:
    with started(tmp_path) as programs:
        programs.signal(LATE, signal.SIGSTOP)
        tell(programs, tmp_path / "a" / "1", deadline_s=5)
        require_given_up(programs, tmp_path / "a")
        assert come_back(programs, tmp_path / "a").type == "Unavailable"
        all_save(programs, tmp_path / "b" / "2")


@pytest.mark.long
@only_long
def test_late_in_the_middle_of_writing(tmp_path: Path) -> None:
    """The others remove what was begun; the late process finds that gone, and cannot commit or revive it."""
    throttle = tmp_path / "throttle"
    _native.create_throttle(str(throttle), bytes_per_s=2 << 20)
    with started(tmp_path) as programs:
        tell(programs, tmp_path / "a" / "1", deadline_s=5, throttle=throttle)
        wait_until(lambda: any((tmp_path / "a").glob(f"*/state/p{LATE:05}-000.safetensors")))
        programs.signal(LATE, signal.SIGSTOP)
        require_given_up(programs, tmp_path / "a")
        come_back(programs, tmp_path / "a")
        all_save(programs, tmp_path / "b" / "2")
