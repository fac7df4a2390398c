"""A real server of S3's protocol on this machine, VersityGW, and links to it that have a delay."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import ROOT
from benchmarks.systems import UnavailableError

BUCKET = "bench"
ACCESS_KEY, SECRET_KEY, REGION = "benchmark", "benchmark-secret", "us-east-1"
_START_S = 60.0

# `tools/versitygw` puts it beside the interpreter.
PROGRAM = shutil.which(
    "versitygw",
    path=os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath))),
)


@contextlib.contextmanager
def running(directory: Path) -> Iterator[int]:
    """A server whose objects are files in a directory; its port.

    Raises:
        UnavailableError: It is not installed, or does not answer.
    """
    if PROGRAM is None:
        raise UnavailableError("versitygw is not installed; 'make versitygw' does that where Go is")
    (directory / BUCKET).mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    server = subprocess.Popen(
        [PROGRAM, "--quiet", "--keep-alive", "--port", f"127.0.0.1:{port}", "posix", os.fspath(directory)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY},
    )
    try:
        _wait_for(port)
        yield port
    finally:
        server.kill()
        server.wait()


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            if time.monotonic() > deadline:
                raise UnavailableError("versitygw does not answer") from None
            time.sleep(0.02)
        else:
            return


@contextlib.contextmanager
def delayed(port: int, round_trip_s: float) -> Iterator[int]:
    """The port by which a server is reached with a round trip that takes so long."""
    if not round_trip_s:
        yield port
        return
    with _link(port, str(round_trip_s)) as link:
        yield link.port


@contextlib.contextmanager
def throttled(port: int, requests_per_s: float) -> Iterator[Throttled]:
    """A link to a server that lets a bounded number of requests through each second."""
    with _link(port, "0", str(requests_per_s)) as link:
        yield link


@dataclass(slots=True)
class Throttled:
    """A link that counts requests.

    Attributes:
        port: Where it is reached.
    """

    port: int
    _link: subprocess.Popen[str]

    def requests(self) -> int:
        """How many there have been."""
        assert self._link.stdin is not None
        assert self._link.stdout is not None
        self._link.stdin.write("\n")
        self._link.stdin.flush()
        return int(self._link.stdout.readline())


@contextlib.contextmanager
def _link(*arguments: object) -> Iterator[Throttled]:
    command = [sys.executable, "-m", "benchmarks.storage.delay", *map(str, arguments)]
    link = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert link.stdout is not None
        yield Throttled(int(link.stdout.readline()), link)
    finally:
        link.kill()
        link.communicate()
