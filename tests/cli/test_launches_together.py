"""Launches on several hosts, each a process of its own: they start a program together, and end it so."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.agents import end_agent, memory_directory
from tests.support.ports import claimed_ports

from waystation.errors import Conflict
from waystation_launch import rendezvous
from waystation_launch.rendezvous import Rendezvous

SCRIPT = str(Path(sys.executable).parent / "waystation")
HANG_S = 120
HOSTS = ("a", "b", "c")

# Runs until it is told to end, or to kill itself; tells of each start.
PROGRAM = """
import os, pathlib, signal, sys, time
index, directory = os.environ["WAYSTATION_PROCESS_INDEX"], pathlib.Path(sys.argv[1])
with open(directory / f"{index}.starts", "a") as file:
    file.write(f"{os.getpid()}\\n")
victim = directory / f"kill-{index}"
while not (directory / "end").exists():
    if victim.exists():
        victim.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.02)
"""


class Launches:
    """Those of three hosts, which are addresses of this machine."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.directory = directory
        self._options = options
        self._claims = contextlib.ExitStack()
        (port,) = self._claims.enter_context(claimed_ports(1))
        self._port = port - 2
        self._running: dict[str, subprocess.Popen[str]] = {}
        listed = [{"name": name, "address": f"127.0.0.{index}:1"} for index, name in enumerate(HOSTS, 2)]
        (directory / "hosts.json").write_text(json.dumps(listed))

    def start(self, host: str, *more: str) -> None:
        options = ["--hosts", str(self.directory / "hosts.json"), "--host", host, "--port", str(self._port)]
        command = [SCRIPT, "launch", *options, "--grace", "0.5", "--json", *self._options, *more]
        with (self.directory / f"{host}.err").open("a") as errors:
            self._running[host] = subprocess.Popen(
                [*command, "--", sys.executable, "-c", PROGRAM, str(self.directory)],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def kill(self, host: str) -> None:
        """SIGKILL, and with the launch its processes."""
        launch = self._running.pop(host)
        launch.kill()
        launch.communicate()

    def kill_process(self, host: str) -> None:
        (self.directory / f"kill-{HOSTS.index(host)}").touch()

    def starts(self) -> list[list[int]]:
        """For each host the ids of the processes that were started there."""
        paths = [self.directory / f"{index}.starts" for index in range(len(HOSTS))]
        return [
            [int(line) for line in path.read_text().splitlines()] if path.exists() else [] for path in paths
        ]

    def await_starts(self, count: int) -> None:
        until(lambda: [len(found) for found in self.starts()] == [count] * len(HOSTS))

    def said(self, host: str) -> str:
        return (self.directory / f"{host}.err").read_text()

    def ended(self) -> dict[str, tuple[int, dict[str, Any]]]:
        """The code and the document of each launch, once all have ended."""
        found = {}
        for host, launch in self._running.items():
            output, _ = launch.communicate(timeout=HANG_S)
            found[host] = launch.returncode, json.loads(output)
        self._running.clear()
        return found

    def close(self) -> None:
        for host in list(self._running):
            self.kill(host)
        self._claims.close()


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_alive(process: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, 0)
        return True
    return False


@pytest.fixture
def launches(tmp_path: Path) -> Iterator[Launches]:
    with contextlib.closing(Launches(tmp_path, "--restarts", "2")) as launches:
        yield launches


def test_all_start_again_when_one_process_is_killed(launches: Launches, tmp_path: Path) -> None:
    for host in HOSTS:
        launches.start(host)
    launches.await_starts(1)
    for count, victim in ((2, "b"), (3, "a")):
        earlier = [found[-1] for found in launches.starts()]
        launches.kill_process(victim)
        launches.await_starts(count)
        assert not any(map(is_alive, earlier)), "nobody is left of the start before"
    (tmp_path / "end").touch()
    ended = launches.ended()
    assert {host: code for host, (code, _) in ended.items()} == dict.fromkeys(HOSTS, 0)
    assert {document["restarts"] for _, document in ended.values()} == {2}
    assert "the program has failed elsewhere: host 'b': process 1 has failed" in launches.said("c")


@pytest.mark.parametrize("victim", ["b", "a"], ids=["a-member", "the-first-host"])
@pytest.mark.share(2)
def test_all_wait_for_a_launch_that_was_killed(launches: Launches, tmp_path: Path, victim: str) -> None:
    for host in HOSTS:
        launches.start(host)
    launches.await_starts(1)
    earlier = [found[-1] for found in launches.starts()]
    launches.kill(victim)
    until(lambda: not any(map(is_alive, earlier)))
    others = [host for host in HOSTS if host != victim]
    until(lambda: all(f"waiting for host '{victim}'" in launches.said(host) for host in others))
    assert [len(found) for found in launches.starts()] == [1] * 3, "nobody goes on alone"
    launches.start(victim)
    launches.await_starts(2)
    (tmp_path / "end").touch()
    ended = launches.ended()
    assert {host: code for host, (code, _) in ended.items()} == dict.fromkeys(HOSTS, 0)
    assert {host: ended[host][1]["restarts"] for host in others} == dict.fromkeys(others, 1)


def test_all_end_when_one_does_not_start_again(tmp_path: Path) -> None:
    with contextlib.closing(Launches(tmp_path)) as launches:
        for host, restarts in zip(HOSTS, ("9", "1", "9"), strict=True):
            launches.start(host, "--restarts", restarts)
        launches.await_starts(1)
        launches.kill_process("c")
        launches.await_starts(2)
        launches.kill_process("a")
        ended = launches.ended()
        assert {code for code, _ in ended.values()} == {1}
        assert [len(found) for found in launches.starts()] == [2, 2, 2]
        assert "the program has failed elsewhere: host 'a': process 0 has failed" in launches.said("b")
        assert "host 'b': " in launches.said("c")


def test_what_fails_on_one_host_ends_all_where_nothing_is_restarted(tmp_path: Path) -> None:
    with contextlib.closing(Launches(tmp_path)) as launches:
        for host in HOSTS:
            launches.start(host)
        launches.await_starts(1)
        launches.kill_process("b")
        assert {host: code for host, (code, _) in launches.ended().items()} == dict.fromkeys(HOSTS, 1)
        assert not any(is_alive(found[-1]) for found in launches.starts())
        assert "the program has failed elsewhere: host 'b'" in launches.said("c")


def test_a_launch_with_another_secret_is_told_so_where_nothing_is_restarted(tmp_path: Path) -> None:
    with (
        memory_directory() as store,
        claimed_ports(len(HOSTS)) as ports,
        contextlib.closing(Launches(tmp_path)) as launches,
    ):
        places = zip(HOSTS, range(2, 5), ports, strict=True)
        listed = [{"name": name, "address": f"127.0.0.{index}:{port}"} for name, index, port in places]
        (tmp_path / "hosts.json").write_text(json.dumps(listed))
        try:
            for host in HOSTS:
                secret = store / f"{host}.secret"
                secret.touch(0o600)
                secret.write_bytes((b"other " if host == "b" else b"") + b"a secret of the agents")
                agent = ["--agent", str(store / host), "--agent-memory", "32MiB"]
                launches.start(host, *agent, "--secret-file", str(secret))
            until(lambda: "start them with the same --secret-file" in launches.said("b"))
            until(lambda: "turned away" in launches.said("a"))
            assert launches.starts() == [[], [], []]
        finally:
            for host in HOSTS:
                end_agent(store / host)


def test_a_launch_that_is_told_to_end_ends_all(launches: Launches) -> None:
    for host in HOSTS:
        launches.start(host)
    launches.await_starts(1)
    launches._running["b"].send_signal(signal.SIGINT)
    codes = {host: code for host, (code, _) in launches.ended().items()}
    assert codes == {"a": 1, "b": 130, "c": 1}
    assert [len(found) for found in launches.starts()] == [1] * 3


def test_who_does_not_come_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    with contextlib.closing(Launches(tmp_path, "--restarts", "1", "--wait", "3")) as launches:
        launches.start("a")
        launches.start("b")
        for host in ("a", "b"):
            launch = launches._running[host]
            launch.wait(HANG_S)
            assert launch.returncode in (1, 2)
        said = launches.said("a") + launches.said("b")
        assert "host 'c'" in said
        assert launches.starts() == [[], [], []]


def meet(first: Rendezvous, *others: Rendezvous, is_over: Callable[[], bool]) -> None:
    """Gives each its turn, as they are in one thread, until that is so."""
    deadline = time.monotonic() + HANG_S
    while not is_over():
        assert time.monotonic() < deadline
        for each in (first, *others):
            each.handle(0.01)


@pytest.mark.parametrize(
    ("names", "secret", "why"),
    [
        (["a", "b"], b"another secret ...", "does not know the secret of this job; start them with the same"),
        (["a", "b"], b"", "does not know the secret of this job; start them with the same"),
        (
            ["a", "b", "c"],
            b"one secret of ours",
            "the other side belongs to another run; start them with the",
        ),
    ],
    ids=["other-secret", "no-secret", "other-hosts"],
)
def test_launches_of_other_jobs_do_not_meet(names: list[str], secret: bytes, why: str) -> None:
    told: list[str] = []
    with claimed_ports(1) as (port,):
        address = ("127.0.0.1", port)
        first = Rendezvous(["a", "b"], "a", address, b"one secret of ours", 30.0, told.append)
        with contextlib.closing(first):
            with contextlib.closing(Rendezvous(names, "b", address, secret, 30.0, lambda _: None)) as second:
                meet(first, second, is_over=lambda: bool(told))
                with pytest.raises(Conflict, match=why):
                    second.join()
            assert "a client from 127.0.0.1 was turned away: " in told[0]
            with pytest.raises(Conflict, match="give another --port"):
                Rendezvous(["a", "b"], "a", address, b"one secret of ours", 30.0, lambda _: None)


@pytest.mark.parametrize("secret", [b"one secret of ours", b""], ids=["secret", "no-secret"])
def test_strangers_keep_no_launch_out(secret: bytes) -> None:
    told: list[str] = []
    with claimed_ports(1) as (port,), contextlib.ExitStack() as undo:
        address = ("127.0.0.1", port)
        first = undo.enter_context(
            contextlib.closing(Rendezvous(["a", "b"], "a", address, secret, 30.0, told.append))
        )
        before = len(open_sockets())
        strangers = []
        for number in range(200):
            stranger = undo.enter_context(socket.create_connection(address, HANG_S))
            stranger.sendall((b"", b"{}\n", b"\x16\x03\x01\xff", b"\x17\x03\x03\x40\x00")[number % 4])
            strangers.append(stranger)
            first.handle(0.0)
        second = undo.enter_context(
            contextlib.closing(Rendezvous(["a", "b"], "b", address, secret, 30.0, lambda _: None))
        )
        joined = threading.Thread(target=second.join)
        joined.start()
        assert first.join()
        joined.join(HANG_S)
        assert second._is_running
        # What strangers can have held here is bounded, and they are told of once.
        assert len(open_sockets()) - before <= len(strangers) + rendezvous._MOST_UNPROVEN + 4
        assert [line for line in told if "was turned away" in line] == told[:1]
        assert strangers[0].recv(1) == b""


def test_a_long_reason_is_cut_and_ends_the_run_all_the_same() -> None:
    with claimed_ports(1) as (port,):
        address, secret = ("127.0.0.1", port), b"one secret of ours"
        with (
            contextlib.closing(Rendezvous(["a", "b"], "a", address, secret, 30.0, lambda _: None)) as first,
            contextlib.closing(Rendezvous(["a", "b"], "b", address, secret, 30.0, lambda _: None)) as second,
        ):
            joined = threading.Thread(target=second.join)
            joined.start()
            assert first.join()
            joined.join(HANG_S)
            second.fails("\N{SNOWMAN}" * (1 << 20))
            meet(first, second, is_over=lambda: first.stopped is not None)
            assert str(first.stopped).startswith("host 'b': \N{SNOWMAN}")


def test_a_stranger_that_says_a_little_now_and_then_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "SILENCE_S", 0.3)
    told: list[str] = []
    with claimed_ports(1) as (port,):
        address = ("127.0.0.1", port)
        with (
            contextlib.closing(
                Rendezvous(["a", "b"], "a", address, b"one secret of ours", 30.0, told.append)
            ) as first,
            socket.create_connection(address, HANG_S) as stranger,
        ):
            said = iter(b"\x16\x03\x01\x40\x00" + bytes(1 << 14))
            deadline = time.monotonic() + HANG_S
            while not told:
                assert time.monotonic() < deadline
                stranger.sendall(bytes([next(said)]))
                time.sleep(0.002)  # or a fast machine has said all before it is given up
                first.handle(0.02)
    assert told == ["a client from 127.0.0.1 was turned away: it has not proved itself"]


def open_sockets() -> set[str]:
    """The sockets of this process."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(entry))
    return {name for name in found if name.startswith("socket:")}


def test_a_rendezvous_that_is_over_leaves_no_connection_open() -> None:
    with claimed_ports(1) as (port,):
        before = open_sockets()
        with contextlib.closing(
            Rendezvous(["a"], "a", ("127.0.0.1", port), b"a secret of ours", 30.0, lambda _: None)
        ) as only:
            assert only.join()
            assert open_sockets() - before
        assert not open_sockets() - before
