"""Forked children beside loads and saves of their parent: they load by themselves, and never wait for it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.support.agents import memory_directory, running_agent
from tests.support.long import amount

import waystation as ws
from waystation._collection import paused_collection
from waystation.checkpoint.context import Context
from waystation.checkpoint.loading import Ticket
from waystation.errors import InvalidInput
from waystation.safetensors.destination import Destination
from waystation.storage.attempts import Attempt
from waystation.storage.leases import Leases
from waystation.training.catalogue import Catalogue
from waystation.training.costs import SaveCosts
from waystation.training.in_flight import SavesInFlight
from waystation.transfers.handle import AsyncResponse

_BOUND_S = 60

# JAX warns of every fork once an earlier test of the process has imported it; these children do not use it.


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


def test_a_child_loads_though_its_parent_has_a_ticket(tmp_path: Path) -> None:
    ws.save(tmp_path / "state", {"a": np.arange(10)})
    turn = Ticket()
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


def test_a_child_leaves_attempts_leases_and_stages_to_its_parent(tmp_path: Path) -> None:
    attempt = Attempt(str(tmp_path / "state"))
    stage = Destination(str(tmp_path / "model.safetensors"), None, overwrite=False).staged()
    staged = Path(stage.__enter__())
    (tmp_path / "5").mkdir()
    lease = Leases(tmp_path).hold("5")
    assert lease.__enter__()

    def end_what_the_parent_has_begun() -> None:
        attempt.discard()
        stage.__exit__(None, None, None)
        lease.__exit__(None, None, None)

    assert _exit_code_of_child(end_what_the_parent_has_begun) == 0
    assert Path(attempt.path).is_dir()
    assert staged.is_dir()
    assert Leases(tmp_path).is_held("5")
    lease.__exit__(None, None, None)
    stage.__exit__(None, None, None)
    attempt.discard()
    assert not Leases(tmp_path).is_held("5")
    assert [path.name for path in tmp_path.rglob("*")] == ["5"]


def test_a_child_beats_for_its_own_leases_though_its_parent_has_some(tmp_path: Path) -> None:
    for name in ("state", "other"):
        (tmp_path / name).mkdir()

    def hold_one() -> None:
        before = {thread.ident for thread in threading.enumerate()}
        with Leases(tmp_path).hold("other"):
            assert {thread.name for thread in threading.enumerate() if thread.ident not in before} == {
                "waystation: leases"
            }

    with Leases(tmp_path).hold("state"):
        assert _exit_code_of_child(hold_one) == 0


def test_collection_goes_on_in_a_child_that_was_forked_in_a_pause() -> None:
    def check() -> None:
        assert gc.isenabled()
        with paused_collection():
            assert not gc.isenabled()
        assert gc.isenabled()

    is_paused, may_end = threading.Event(), threading.Event()

    def pause() -> None:
        with paused_collection():
            is_paused.set()
            assert may_end.wait(_BOUND_S)

    thread = threading.Thread(target=pause)
    thread.start()
    assert is_paused.wait(_BOUND_S)
    try:
        assert _exit_code_of_child(check) == 0
    finally:
        may_end.set()
        thread.join(_BOUND_S)
    assert gc.isenabled()


def test_a_child_has_locks_of_its_own() -> None:
    """Of everything that is told of forks, whatever its parent's threads hold."""
    held = [SavesInFlight(1), SaveCosts(), Catalogue(), Context()]
    locks = [each._lock for each in held]

    def take() -> None:
        for each in held:
            assert each._lock.acquire(timeout=_BOUND_S / 2)

    for lock in locks:
        lock.acquire()
    try:
        assert _exit_code_of_child(take) == 0
    finally:
        for lock in locks:
            lock.release()


def test_a_child_cannot_go_on_with_a_stream_of_its_parent_and_may_end_it(tmp_path: Path) -> None:
    arrays = {str(number): np.full(1 << 18, number, np.float32) for number in range(8)}
    ws.safetensors.save(arrays, tmp_path / "model.safetensors")
    coming = ws.safetensors.stream(tmp_path / "model.safetensors", framework="numpy", memory_limit=4 << 20)
    assert next(coming)[0] == "0"

    def go_on() -> None:
        with pytest.raises(InvalidInput, match=f"process {os.getppid()}"):
            next(coming)

    def close() -> None:
        coming.close()

    def drop() -> None:
        nonlocal coming
        failures: list[object] = []
        sys.unraisablehook = failures.append
        del coming
        gc.collect()
        assert not failures

    assert [_exit_code_of_child(each) for each in (go_on, close, drop)] == [0, 0, 0]
    assert [name for name, _ in coming] == list("1234567")


def test_a_child_begins_a_stream_that_its_parent_has_not(tmp_path: Path) -> None:
    ws.safetensors.save({"a": np.arange(5)}, tmp_path / "model.safetensors")
    coming = ws.safetensors.stream(tmp_path / "model.safetensors", framework="numpy")

    def take() -> None:
        assert [name for name, _ in coming] == ["a"]

    assert _exit_code_of_child(take) == 0
    assert [name for name, _ in coming] == ["a"]


@pytest.mark.share(2)
@pytest.mark.parametrize("seed", [1, 2])
def test_children_forked_at_any_time(tmp_path: Path, seed: int) -> None:
    with memory_directory() as directory, running_agent(directory) as agent:
        arguments = [str(seed), str(amount(6, 24)), str(tmp_path), str(agent.directory)]
        ended = subprocess.run(
            [sys.executable, "-m", "tests.checkpoint.forking", *arguments],
            check=False,
            capture_output=True,
            text=True,
            timeout=10 * _BOUND_S,
        )
    assert ended.returncode == 0, ended.stderr


def _load(path: Path) -> None:
    assert (ws.load(path)["a"] == np.arange(10)).all()
