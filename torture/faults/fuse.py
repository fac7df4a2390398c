"""Faults of a file system, by FUSE: they reach what io_uring moves past all system calls, too.

The file system is the one of the tests, in memory, in a process of its own. What it is asked while an
operation runs is counted, and the n-th request fails, moves less than it is told to, or is the last before
the program is killed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import struct
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.support.lossy_mount import HEADER, REQUEST_BYTES, Server

from torture.faults.base import MISSED, Done, Fault
from torture.operations import OPERATIONS, Operation, Workspace
from torture.outcomes import Verdict
from torture.processes import Child, Ended
from torture.systems import System

_READ, _WRITE, _FORGETS = 15, 16, (2, 36, 42)
_REQUESTS = {
    1: "lookup",
    4: "setattr",
    9: "mkdir",
    10: "unlink",
    11: "rmdir",
    12: "rename",
    14: "open",
    15: "read",
    16: "write",
    20: "fsync",
    25: "flush",
    28: "readdir",
    30: "fsyncdir",
    35: "create",
    45: "rename2",
}
_MAY_FAIL = {
    "EIO": set(_REQUESTS),
    "ENOSPC": {4, 9, 12, 16, 20, 25, 35, 45},
    "short": {_READ, _WRITE},
}
_SHORT_ALIGNMENT = 4096


@dataclass(frozen=True)
class _Plan:
    """Which request of those that are for the fault meets it; None only counts them."""

    kind: str
    place: int | None


class _FaultyServer(Server):
    """Answers requests, and does the fault once it is told that the operation runs."""

    def __init__(self, device: int, control: int, report: int, plan: _Plan) -> None:
        super().__init__(device, pattern="", told="")
        self._own_device, self._control, self._report, self._plan = device, control, report, plan
        self._is_armed = False
        self._count = 0
        self._hit = ""

    def serve(self) -> None:
        """Until the file system is unmounted, or nobody is there to tell anything."""
        while True:
            ready, _, _ = select.select([self._own_device, self._control], [], [])
            if self._control in ready and not self._hear():
                return
            if self._own_device in ready and not self._take():
                return

    def _hear(self) -> bool:
        said = os.read(self._control, 1)
        if said == b"r":
            os.write(self._report, f"{self._count} {self._hit}\n".encode())
        self._is_armed = said == b"a"
        return bool(said)

    def _take(self) -> bool:
        try:
            request = os.read(self._own_device, REQUEST_BYTES)
        except OSError as error:
            return error.errno in (errno.ENOENT, errno.EINTR)
        _, call, unique, number, *_ = HEADER.unpack_from(request)
        if call in _FORGETS:
            return True
        code, answer = 0, b""
        try:
            body = request[HEADER.size :]
            answer = self._answer(call, number, self._met(call, body) if self._is_armed else body)
        except OSError as error:
            code = error.errno or errno.EIO
        os.write(self._own_device, _answered(unique, code, answer))
        return True

    def _met(self, call: int, body: bytes) -> bytes:
        """The request as it is answered; raises where it fails."""
        if call not in _MAY_FAIL[self._plan.kind]:
            return body
        self._count += 1
        if self._count - 1 != self._plan.place:
            return body
        self._hit = _REQUESTS[call]
        if self._plan.kind != "short":
            raise OSError(getattr(errno, self._plan.kind), "")
        nbytes = int.from_bytes(body[16:20], "little")
        shorter = nbytes // 2 // _SHORT_ALIGNMENT * _SHORT_ALIGNMENT or nbytes
        return body[:16] + shorter.to_bytes(4, "little") + body[20:]


def _answered(unique: int, code: int, answer: bytes) -> bytes:
    return struct.pack("=IiQ", 16 + len(answer), -code, unique) + answer


class _Mount:
    """The file system at a directory, while the block lasts."""

    def __init__(self, place: Path, plan: _Plan) -> None:
        self._place = place
        control, self._control = os.pipe()
        report, self._report = os.pipe()
        device = os.open("/dev/fuse", os.O_RDWR)
        _mount(place, device)
        self._pipes = (self._control, report)
        self._server = Child(lambda: self._serve(device, control, plan))
        for descriptor in (device, control, self._report):
            os.close(descriptor)

    def _serve(self, device: int, control: int, plan: _Plan) -> None:
        os.close(self._control)  # its end is that of the bench
        _FaultyServer(device, control, self._report, plan).serve()

    def __enter__(self) -> _Mount:
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "--lazy", os.fspath(self._place)], check=False, capture_output=True)
        for descriptor in self._pipes:
            os.close(descriptor)
        self._server.kill()
        self._server.end()

    def during(self, act: Callable[[], int | None]) -> tuple[Ended, int, str]:
        """Runs an operation; returns how it ended, how many requests the fault was for, and which met it."""
        os.write(self._control, b"a")
        ended = Child(act).end()
        os.write(self._control, b"r")
        said = os.read(self._pipes[1], 4096).decode()
        count, _, hit = said.strip().partition(" ")
        return ended, int(count), hit


def _mount(place: Path, device: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}".encode()
    if libc.mount(b"torture", os.fsencode(place), b"fuse", ctypes.c_ulong(0), options) != 0:
        raise OSError(ctypes.get_errno(), f"mount: {os.strerror(ctypes.get_errno())}")


class Fuse:
    """One kind of fault of the file system, at each request of one operation."""

    def __init__(self, kind: str, operation: Operation) -> None:
        self.name = f"fuse {kind}/{operation.name}"
        self._kind, self._operation = kind, operation
        self._counts: dict[str, int] = {}

    def applies(self, system: System) -> bool:
        return system.has_files and os.access("/dev/fuse", os.W_OK) and os.getuid() == 0

    def seeds(self, system: System, workspace: Workspace) -> int:
        if system.name not in self._counts:
            self._counts[system.name] = self._made(system, workspace, None)[1]
        return self._counts[system.name]

    def run(self, system: System, seed: int, workspace: Workspace) -> Done:
        count = self.seeds(system, workspace)
        if not count:
            return Done(MISSED)
        return self._made(system, workspace, seed % count)[0]

    def _made(self, system: System, workspace: Workspace, place: int | None) -> tuple[Done, int]:
        workspace.clear()
        root = workspace.root
        root.mkdir(parents=True)
        with _Mount(root, _Plan(self._kind, place)) as mount:
            prepared = Child(lambda: self._operation.prepare(system, root)).end()
            if prepared.how != "returned":
                return Done(Verdict(MISSED.outcome, f"not even undisturbed: {prepared.error}")), 0
            ended, count, hit = mount.during(lambda: self._operation.act(system, root))
            if place is None or not hit:
                return Done(MISSED), count
            verdict = self._operation.judge(system, root, ended, self._kind != "short")
            return Done(verdict, f"{hit}, the {place}. that may"), count


FUSE: list[Fault] = [
    Fuse(kind, OPERATIONS[name]) for kind in _MAY_FAIL for name in ("save", "overwrite", "load")
]
