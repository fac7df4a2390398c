"""The manager fails, or is killed: every program hears of its death, and a log stays that says so."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.runtime.cluster.driving import WAIT_S, Slice, wait_until
from tests.support.long import only_long

from waystation.errors import Unavailable
from waystation.runtime.cluster import ClusterBackend, connect, connecting
from waystation.runtime.cluster.event_log import EventLog, append
from waystation.runtime.control.connector import Connector
from waystation.runtime.control.credentials import Credential
from waystation.runtime.control.packing import Packer
from waystation.runtime.control.program_messages import NO_ANSWER
from waystation.runtime.resources import SliceRequest

pytestmark = pytest.mark.skipif(sys.version_info < (3, 12), reason="the runtime needs Python 3.12")


@pytest.mark.timeout(600)
def test_the_death_of_the_manager_is_told_and_stays_in_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # of the Ray of this program, too
    with connect(name="first") as cluster, connect(cluster.address, name="second") as second:
        backends = [each.backend() for each in (cluster, second)]
        on = Slice(backends[0], "main", 1)
        given = on.put(np.arange(8, dtype=np.float32))
        backends[0].wait([given], WAIT_S)
        client = cluster.start_client()
        (log,) = (tmp_path / "waystation" / "runtime").glob("manager-*.log")
        with connect(cluster.address, name="third") as third:
            packer = Packer()
            packer.integers.append(NO_ANSWER)  # of a call, without the call
            third._connection._connector.send(packer.take())
            wait_until(lambda: "Fatal error" in log.read_text())
        with connect(cluster.address, name="fourth") as fourth:
            fourth._connection._connector.send(b"no pack")
            wait_until(lambda: "of 'fourth' is ended: a pack of control has 7 bytes" in log.read_text())
        with socket.create_connection(
            cluster._connection._connector._socket.getpeername(), WAIT_S
        ) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            wait_until(lambda: "was turned away: the other side does not speak TLS" in log.read_text())
        assert "in _hear" in log.read_text()  # and where
        process_id = int(re.findall(r"the manager begins: process (\d+)", log.read_text())[0])
        os.kill(process_id, signal.SIGKILL)
        wanted = f"process {process_id} on .* all islands.* Connect again.*{re.escape(str(log))}"
        for backend in backends:
            with pytest.raises(Unavailable, match=wanted):
                use_until_it_fails(backend)
        with pytest.raises(Unavailable, match=wanted):
            cluster.status()
        for start in (cluster.start_client, cluster.backend):
            with pytest.raises(Unavailable, match=wanted):
                start()
        client.close()  # which has nothing to end any more
        for name in ("first", "second"):
            wait_until(lambda name=name: f"program '{name}' has lost its connection" in log.read_text())
        assert "island 'main' is ready, epoch 1" in log.read_text()
        assert "the manager ends" not in log.read_text()


@pytest.mark.timeout(600)
@pytest.mark.long
@only_long
def test_a_manager_that_dies_once_it_has_let_a_program_in_is_told_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def kill_the_manager_first(address: str, credential: Credential) -> Connector:
        (log,) = (tmp_path / "waystation" / "runtime").glob("manager-*.log")
        os.kill(int(log.stem.rpartition("-")[2]), signal.SIGKILL)
        return Connector(address, credential)

    monkeypatch.setattr(connecting, "Connector", kill_the_manager_first)
    log = f"{re.escape(str(tmp_path))}/waystation/runtime/manager-.*log"
    with pytest.raises(Unavailable, match=f"let this program in, and is gone: .*{log}"):
        connect(name="alone")


def use_until_it_fails(backend: ClusterBackend) -> None:
    wait_until(lambda: not backend.grant(SliceRequest.of(1, shared=True)) >= 0)


def test_what_fails_where_nobody_waits_for_it_is_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    log = EventLog()

    async def fail_in_a_task() -> None:
        raise ValueError("of a task")

    def fail_in_a_timer() -> None:
        raise ValueError("of a timer")

    async def work() -> None:
        loop = asyncio.get_running_loop()
        log.watch(loop)
        task = loop.create_task(fail_in_a_task())
        loop.call_later(0, fail_in_a_timer)
        await asyncio.wait([task])

    asyncio.run(work())
    gc.collect()
    log.close()
    written = Path(log.path).read_text()
    for what in ("of a task", "of a timer", "in fail_in_a_task", "in fail_in_a_timer"):
        assert what in written


def test_the_newest_logs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    directory = tmp_path / "waystation" / "runtime"
    directory.mkdir(parents=True)
    for number in range(40):
        (directory / f"manager-{number}.log").touch()
        os.utime(directory / f"manager-{number}.log", (number, number))
    log = EventLog()
    log.write("something")
    log.close()
    append(log.path, "something else")
    append(str(tmp_path / "of another machine.log"), "nothing")
    assert len(list(directory.iterdir())) == 32
    assert not (directory / "manager-8.log").exists()
    first, second = Path(log.path).read_text().splitlines()
    assert (first.endswith(" something"), second.endswith(" something else")) == (True, True)
