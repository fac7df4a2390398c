"""Runs numbered executions in a process of its own, which is watched: for errors, crashes, hangs, memory.

The process tells the number of each execution before it begins, in memory that both share, so that the one
that ended it is known. Whatever ends it early is a finding. Memory is bounded twice: by a limit on its
address space, which a single huge allocation meets, and by its peak, which is compared after every few
hundred executions with what it held at first.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import mmap
import os
import resource
import signal
import struct
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

_BATCH = 256
_WARM_UP = 300
_ADDRESS_SPACE_BYTES = 512 << 20
_POLL_S = 0.05
_NONE_YET = -1


class Workload(Protocol):
    """What is executed."""

    @property
    def most_bytes(self) -> int:
        """The most that the input of one execution had."""
        ...

    def __call__(self, number: int) -> None:
        """Runs one execution; an exception is a finding."""
        ...

    def summary(self) -> dict[str, Any]:
        """What came out, for people."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What ends a run, or makes a finding of it.

    Attributes:
        executions: The most executions.
        seconds: How long it goes on; None for as long as it takes.
        hang_s: How long one execution may take.
        memory_bytes: How much more than at first, and than the input, the process may hold.
    """

    executions: int
    seconds: float | None = None
    hang_s: float = 60.0
    memory_bytes: int = 32 << 20


@dataclass(slots=True)
class Outcome:
    """What a run came to.

    Attributes:
        executions: How many were begun.
        seconds: How long they took.
        peak_bytes: How much more than at first the process held, at most.
        summary: What the workload says of them.
        finding: What ended the run early, and in which execution; None if nothing did.
    """

    executions: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0
    summary: dict[str, Any] = field(default_factory=dict)
    finding: str | None = None


def watch(make: Callable[[], Workload], first: int, limits: Limits) -> Outcome:
    """Runs executions from `first` on in a forked process, which makes the workload itself.

    The calling process has no other threads.
    """
    begun = mmap.mmap(-1, 8)  # shared with the child
    _tell(begun, _NONE_YET)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _run(make, first, limits, begun, writer)
    os.close(writer)
    started = time.monotonic()
    status, is_hung = _followed(child, begun, limits.hang_s)
    outcome = Outcome(seconds=time.monotonic() - started)
    with os.fdopen(reader, "rb") as pipe:
        report = json.loads(pipe.read() or b"{}")
    last = _told(begun)
    outcome.executions = max(0, last + 1 - first) if last != _NONE_YET else 0
    outcome.peak_bytes, outcome.summary = report.get("peak_bytes", 0), report.get("summary", {})
    outcome.finding = report.get("finding")
    if is_hung:
        outcome.finding = f"execution {last} took more than {limits.hang_s:.0f} s"
    elif outcome.finding is None and (status != 0 or not report):
        outcome.finding = f"execution {last} ended the process with {os.waitstatus_to_exitcode(status)}"
    return outcome


def _followed(child: int, begun: mmap.mmap, hang_s: float) -> tuple[int, bool]:
    """Waits for the end of a process; returns its status, and whether it hung and was ended."""
    seen, since = _told(begun), time.monotonic()
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status, False
        now = time.monotonic()
        if (told := _told(begun)) != seen:
            seen, since = told, now
        elif now - since > hang_s:
            os.kill(child, signal.SIGABRT)  # its stacks are printed
            time.sleep(1)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            return os.waitpid(child, 0)[1], True
        time.sleep(_POLL_S)


def _tell(begun: mmap.mmap, number: int) -> None:
    struct.pack_into("<q", begun, 0, number)


def _told(begun: mmap.mmap) -> int:
    (number,) = struct.unpack_from("<q", begun, 0)
    return int(number)


# ---- in the process ----------------------------------------------------------------------------


def _run(make: Callable[[], Workload], first: int, limits: Limits, begun: mmap.mmap, writer: int) -> NoReturn:
    faulthandler.enable()
    report: dict[str, Any] = {}
    try:
        workload = make()
        for number in range(first, first + min(_WARM_UP, limits.executions)):
            _tell(begun, number)
            workload(number)
        _execute(workload, first, limits, begun, report)
        report["summary"] = workload.summary()
    except BaseException:
        report["finding"] = f"execution {_told(begun)}:\n{traceback.format_exc()}"
    os.write(writer, json.dumps(report).encode())
    os._exit(0)


def _execute(
    workload: Workload, first: int, limits: Limits, begun: mmap.mmap, report: dict[str, Any]
) -> None:
    base = _status_bytes("VmRSS")
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_status_bytes("VmSize") + _ADDRESS_SPACE_BYTES, hard))
    end = None if limits.seconds is None else time.monotonic() + limits.seconds
    for begin in range(first, first + limits.executions, _BATCH):
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak is counted from here
        for number in range(begin, min(begin + _BATCH, first + limits.executions)):
            _tell(begun, number)
            workload(number)
        more = _status_bytes("VmHWM") - base
        report["peak_bytes"] = max(report.get("peak_bytes", 0), more)
        if more > limits.memory_bytes + workload.most_bytes:
            raise MemoryError(f"the executions {begin} to {number} took {more} bytes of memory")
        if end is not None and time.monotonic() > end:
            break


def _status_bytes(name: str) -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(name))
    return int(line.split()[1]) << 10
