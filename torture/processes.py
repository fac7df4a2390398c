"""Functions that run in a process of their own, forked from this one, with an end that is certain.

The bench has imported every library before it forks, so that a process is there within milliseconds, and
starts no threads, so that forking is sound. A child is the leader of a session: whatever it has started
goes with it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

HANG_S = 60.0  # far beyond what anything here takes


class Deadline:
    """The end of a time for a process. While it or this one waits for a core, the time stands still: nothing
    hangs because a machine is busy.

    Args:
        timeout_s: The time.
        process: The process.
    """

    def __init__(self, timeout_s: float, process: int) -> None:
        self._processes = process, os.getpid()
        self._until = time.monotonic() + timeout_s
        self._waited_s = self._waited()

    def left_s(self) -> float:
        """How much is left; 0 or less at the end."""
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            waited_s = self._waited()
            self._until += max(0.0, waited_s - self._waited_s)
            self._waited_s = waited_s
            left_s = self._until - time.monotonic()
        return left_s

    def _waited(self) -> float:
        """For how long both have waited for a core; of threads, the one that has waited longest."""
        return sum(map(_waited_s, self._processes))


def _waited_s(process: int) -> float:
    waited_ns = [0]
    with contextlib.suppress(OSError):  # the process, or a thread, has ended
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/schedstat") as file:
                waited_ns.append(int(file.read().split()[1]))
    return max(waited_ns) / 1e9


@dataclass(frozen=True)
class Ended:
    """How a child ended.

    Attributes:
        how: `returned`, `raised`, `killed` (by anybody), or `hung` (the bench killed it).
        value: What it returned, or the error's type and message.
    """

    how: str
    value: Any = None

    @property
    def error(self) -> str:
        """The error's type and message in one line."""
        return f"{self.value[0]}: {self.value[1]}" if self.how == "raised" else self.how

    @property
    def error_type(self) -> str:
        """The name of the error's type; empty if none was raised."""
        return str(self.value[0]) if self.how == "raised" else ""


class Child:
    """A process that runs one function."""

    def __init__(self, function: Callable[[], Any]) -> None:
        reader, writer = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.process = os.fork()
        if self.process == 0:
            os.close(reader)
            _run(function, writer)
        os.close(writer)
        self.handle = os.pidfd_open(self.process)
        self._reader = reader

    def kill(self) -> None:
        """Kills it, and what it has started."""
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                kill(self.process, signal.SIGKILL)

    def has_ended(self, timeout_s: float) -> bool:
        """Waits for its end, but no longer than that, and leaves it running."""
        waiting = select.poll()
        waiting.register(self.handle, select.POLLIN)
        return bool(waiting.poll(timeout_s * 1000))

    def end(self, timeout_s: float = HANG_S, *, is_hung: bool = False) -> Ended:
        """Waits for its end, and kills it where that does not come."""
        content = b""
        if not is_hung:
            content, is_hung = self._read(timeout_s)
        self.kill()  # what it has left behind in its session; and itself, where it hangs
        _, status = os.waitpid(self.process, 0)
        os.close(self.handle)
        os.close(self._reader)
        if is_hung:
            return Ended("hung")
        if not content and os.WIFEXITED(status):
            return Ended("raised", ("MemoryError", "there was not enough to say more"))
        if not content:
            return Ended("killed")
        how, value = pickle.loads(content)  # noqa: S301  (of our own child)
        return Ended(how, value)

    def _read(self, timeout_s: float) -> tuple[bytes, bool]:
        """What the child has said, and whether it has not ended in time."""
        content = b""
        waiting = select.poll()
        waiting.register(self._reader, select.POLLIN)
        waiting.register(self.handle, select.POLLIN)
        deadline = Deadline(timeout_s, self.process)
        while (left_s := deadline.left_s()) > 0:
            ready = dict(waiting.poll(left_s * 1000))
            if self._reader in ready:
                part = os.read(self._reader, 1 << 16)
                content += part
                if not part:
                    waiting.unregister(self._reader)
            elif self.handle in ready:
                return content, False
        return content, True


def in_child(function: Callable[[], Any], timeout_s: float = HANG_S) -> Ended:
    """Runs a function in a process of its own."""
    return Child(function).end(timeout_s)


def attempt(function: Callable[[], Any]) -> Ended:
    """Runs a function right here."""
    try:
        return Ended("returned", function())
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of Rust is no Exception
        if os.environ.get("TORTURE_TRACEBACKS"):
            traceback.print_exc()
        return Ended("raised", (type(error).__name__, _in_one_line(error)))


def _run(function: Callable[[], Any], writer: int) -> None:
    """What a child does; it never returns."""
    code = 1
    try:
        os.setsid()
        _silence()
        ended = attempt(function)
        code = int(ended.how != "returned")
        content = pickle.dumps((ended.how, ended.value))
        while content:
            content = content[os.write(writer, content) :]
    finally:
        os._exit(code)


def _in_one_line(error: BaseException) -> str:
    """What an error says; of those that quote whole tracebacks, the beginning and the end."""
    text = " ".join(str(error).split())
    return text if len(text) <= 400 else f"{text[:200]} ... {text[-200:]}"


def _silence() -> None:
    """Libraries print and warn; thousands of runs would drown what the bench says."""
    if os.environ.get("TORTURE_TRACEBACKS"):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
