"""The benchmark of object stores: it runs and is checked, and its link has the delay that it is to have."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.processes import ROOT
from benchmarks.rounds import Results
from benchmarks.storage import server
from benchmarks.storage.__main__ import Session, evaluate
from benchmarks.storage.systems import SYSTEMS
from tests.support import benchmark_processes
from tests.support.long import only_long
from tests.support.programs import HANG_S

from benchmarks import rounds

DELAY_S = 0.05
SENT = bytes(range(256)) * (1 << 14)


def test_a_link_passes_all_on_and_takes_its_round_trip() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        server.delayed(listening.getsockname()[1], DELAY_S) as port,
        socket.create_connection(("127.0.0.1", port), HANG_S) as near,
    ):
        begun = time.monotonic()
        near.sendall(SENT[:1])
        far, _ = listening.accept()
        with far:
            far.settimeout(HANG_S)
            near.sendall(SENT[1:])
            near.shutdown(socket.SHUT_WR)
            assert received(far) == SENT
            far.sendall(SENT)
            far.shutdown(socket.SHUT_WR)
            assert received(near) == SENT
        assert time.monotonic() - begun >= 2 * DELAY_S


def received(end: socket.socket) -> bytes:
    parts = []
    while part := end.recv(1 << 20):
        parts.append(part)
    return b"".join(parts)


def test_a_throttled_link_counts_requests_and_lets_few_through_each_second() -> None:
    request = b"GET /bench/checkpoint HTTP/1.1\r\n\r\n"
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        server.throttled(listening.getsockname()[1], 1 / DELAY_S) as link,
        socket.create_connection(("127.0.0.1", link.port), HANG_S) as near,
    ):
        far, _ = listening.accept()
        begun = time.monotonic()
        with far:
            far.settimeout(HANG_S)
            for number in range(4):
                near.sendall(request)
                assert far.recv(1 << 20) == request
                assert link.requests() == number + 1
                far.sendall(SENT[:100])
                assert near.recv(1 << 20) == SENT[:100]
        assert time.monotonic() - begun >= 3 * DELAY_S


@pytest.mark.skipif(server.PROGRAM is None, reason="versitygw is not installed")
def test_what_was_saved_to_the_store_is_loaded_byte_for_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "spawn", benchmark_processes.spawn)
    names = ["raw", "waystation"]
    session = Session(
        directory=tmp_path / "work",
        results=tmp_path / "results.json",
        document={"runs": []},
        quick=True,
        timeout_s=HANG_S,
        systems=names,
        latencies_ms=(0,),
    )
    session.measure("small", 0, 0)
    runs = session.document["runs"]
    assert [run["status"] for run in runs] == ["ok"] * session.count(["small"])
    lines = list(evaluate(Results(session.document)))
    assert all(line.measured == "not measured" for line in lines)  # neither the model nor a peer


@only_long
@pytest.mark.skipif(server.PROGRAM is None, reason="versitygw is not installed")
def test_the_command_measures_all_systems() -> None:
    command = [sys.executable, "-m", "benchmarks.storage", "--quick", "--latencies-ms", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in SYSTEMS)
