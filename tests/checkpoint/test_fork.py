"""Forked children beside loads and saves of their parent: they load by themselves, and never wait for it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import waystation as ws
from waystation.checkpoint.turns import Turn
from waystation.errors import InvalidInput
from waystation.transfers.handle import AsyncResponse

_BOUND_S = 60

# JAX warns of every fork once an earlier test of the process has imported it; these children do not use it.
pytestmark = pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")


def _exit_code_of_child(work: Callable[[], None]) -> int:
    """Runs `work` in a forked child, which is killed where it does not end; -9 then."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + _BOUND_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def test_a_child_loads_though_its_parent_has_a_turn(tmp_path: Path) -> None:
    ws.save(tmp_path / "state", {"a": np.arange(10)})
    turn = Turn()
    try:
        assert _exit_code_of_child(lambda: _load(tmp_path / "state")) == 0
    finally:
        turn.end()


def test_children_forked_while_threads_load_load_too(tmp_path: Path) -> None:
    ws.save(tmp_path / "state", {"a": np.arange(10)})
    stop = threading.Event()

    def load_until_stopped() -> None:
        while not stop.is_set():
            _load(tmp_path / "state")

    threads = [threading.Thread(target=load_until_stopped) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        codes = [_exit_code_of_child(lambda: _load(tmp_path / "state")) for _ in range(10)]
    finally:
        stop.set()
        for thread in threads:
            thread.join(_BOUND_S)
    assert codes == [0] * 10


def test_an_inherited_handle_says_whose_it_is() -> None:
    release = threading.Event()
    response = AsyncResponse("saving 'x'", lambda _: release.wait(_BOUND_S))

    def ask() -> None:
        methods: list[Callable[[], object]] = [
            response.result,
            response.exception,
            response.done,
            response.progress,
            response.cancel,
            lambda: response.on_end(print),
        ]
        for method in methods:
            with pytest.raises(InvalidInput, match=f"process {os.getppid()}"):
                method()

    try:
        assert _exit_code_of_child(ask) == 0
    finally:
        release.set()
    assert response.result(_BOUND_S)


def test_a_handle_that_had_ended_gives_its_result_in_a_child() -> None:
    response = AsyncResponse("loading 'x'", lambda _: 5)
    assert response.result(_BOUND_S) == 5

    def ask() -> None:
        assert response.done()
        assert response.result() == 5

    assert _exit_code_of_child(ask) == 0


def _load(path: Path) -> None:
    assert (ws.load(path)["a"] == np.arange(10)).all()
