"""A host on this machine, as far as its processes can tell: a network, mounts and process ids of its own, and
memory of its own at `/dev/shm`.

When it is lost it is lost as a machine is: its first process gets SIGKILL, at which the kernel kills all
others, takes the network away, and frees the memory with the last of them. Nothing has a name that outlives
this process: if it dies, by whatever signal, the pipe that it holds closes, the first process of the host
ends for that reason, and so does everything else. Linux only, and only for those who may.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from waystation.errors import Unavailable

HANG_S = 60.0  # far beyond what anything here takes
_UNSHARED = ("unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c")
# Ends when its stdin does: once the process that holds the other end has closed it, or is dead.
_INIT = """
mount -t tmpfs -o size=$1,mode=1777 none /dev/shm && ip link set lo up && echo ready && exec cat > /dev/null
"""


def why_forbidden(*commands: str) -> str | None:
    """Why there can be no such hosts here, connected with each other; None if there can be.

    Args:
        commands: Further ones of a shell that have to succeed in there.
    """
    missing = [program for program in ("ip", "unshare", "nsenter") if shutil.which(program) is None]
    if missing:
        return f"there is no program '{missing[0]}'"
    tried = ["ip link add one type veth peer name two", "ip link add three type bridge", *commands]
    done = subprocess.run([*_UNSHARED, " && ".join(tried)], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"namespaces are forbidden here: {done.stderr.strip()}"


class Namespaces:
    """Such a host, and the first process in it.

    Args:
        memory_bytes: How much memory it has at `/dev/shm`.

    Attributes:
        init: The id of its first process, outside of it.
    """

    def __init__(self, memory_bytes: int) -> None:
        command = [*_UNSHARED, _INIT, "init", str(memory_bytes)]
        # What `unshare` says of the death of its child is not of interest, what it says before is.
        pipe = subprocess.PIPE
        self._outer = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        assert self._outer.stdout is not None
        init = _only_child(self._outer) if self._outer.stdout.readline() == "ready\n" else None
        if init is None:
            why = self._outer.communicate()[1].strip()
            raise Unavailable(f"a host could not be made of namespaces: {why}")
        self.init = init
        self._started: list[Started] = []

    def start(self, command: Sequence[object], **options: Any) -> Started:
        """Starts a command inside, with the options of `subprocess.Popen`."""
        started = Started(subprocess.Popen([*self._entering, *map(str, command)], **options))
        self._started.append(started)
        return started

    def run(self, *command: object) -> str:
        """Runs a command inside that has to succeed; returns what it says."""
        return _run([*self._entering, *map(str, command)])

    @property
    def _entering(self) -> list[str]:
        return ["nsenter", f"--target={self.init}", "--net", "--mount", "--pid"]

    def network(self, *command: str, stdin: str = "") -> str:
        """Runs a command on its network alone, so that process ids are those of outside."""
        return _run(["nsenter", f"--target={self.init}", "--net", *command], stdin)

    def configure(self, *lines: str) -> None:
        """Runs commands of `ip` on its network."""
        self.network("ip", "-batch", "-", stdin="\n".join(lines))

    def outside(self, path: Path) -> Path:
        """The path by which that is reached from outside which has `path` in there."""
        return Path(f"/proc/{self.init}/root", *path.parts[1:])

    def kill(self) -> None:
        """Ends everything inside, at once; returns when nothing is left."""
        if self._outer.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.init, signal.SIGKILL)
        for started in self._started:
            started.wait()
        self._outer.communicate(timeout=HANG_S)


class Started:
    """A process that was started on a host.

    Attributes:
        entered: Has entered the host and waits for the process; its pipes are those of the process.
        process: Its id outside of the host; None if it had ended before that was known.
    """

    def __init__(self, entered: subprocess.Popen[Any]) -> None:
        self.entered = entered
        self.process = _only_child(entered)

    def signal(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        if self.process is None or self.entered.poll() is not None:
            raise ProcessLookupError("the process has ended")
        os.kill(self.process, number)
        if number == signal.SIGCONT:
            self._wake()

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        """Waits for its end; returns its exit code, negative if it is the signal that ended it."""
        self._wake()
        return self.entered.wait(HANG_S)

    def _wake(self) -> None:
        """`nsenter` stops when the process does, and would then not take note of its death."""
        self.entered.send_signal(signal.SIGCONT)


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits for what happens by itself.

    Raises:
        Unavailable: It does not.
    """
    deadline = time.monotonic() + HANG_S
    while not condition():
        if time.monotonic() > deadline:
            raise Unavailable(f"what a host of namespaces waits for has not happened within {HANG_S:g} s")
        time.sleep(0.002)


def _run(command: list[str], stdin: str = "") -> str:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unavailable(f"'{' '.join(command)}' failed: {done.stderr.strip()}")
    return done.stdout


def _only_child(parent: subprocess.Popen[Any]) -> int | None:
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    found: list[str] = []

    def is_known() -> bool:
        with contextlib.suppress(FileNotFoundError):
            found[:] = children.read_text().split()
        return bool(found) or parent.poll() is not None

    wait_until(is_known)
    return int(found[0]) if found else None
