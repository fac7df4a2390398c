"""Runs a function in a child process and kills it with SIGKILL right before its n-th change of the disk.

The child is traced (ptrace), so the kill comes from outside and can fall between any two system calls
of any of its threads; the code under test has no part in it. It stops before changes only (seccomp), for each
stop takes longer than most calls. Linux on x86-64 only.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import platform
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tests.support import failing_calls
from tests.support.long import IS_LONG

SUPPORTED = platform.system() == "Linux" and platform.machine() == "x86_64"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long

_TRACE_ME, _CONTINUE, _SYSCALL, _SET_OPTIONS, _GET_SYSCALL_INFO = 0, 7, 24, 0x4200, 0x420E
_SEIZE, _INTERRUPT, _LISTEN = 0x4206, 0x4207, 0x4208
# Stops are marked and threads followed as below, but the process outlives its tracer.
_OPTIONS_OF_SEIZED = 0x1 | 0x2 | 0x4 | 0x8
_STOP_EVENT = 128
# Follow threads and children; stop as filters say; kill the child when the tracer dies.
_OPTIONS = 0x2 | 0x4 | 0x8 | 0x80 | 0x100000
_FILTER_EVENT = 7
_WAIT_ALL = 0x40000000
_ENTRY, _FILTERED = 1, 3
_CREATE = os.O_CREAT

_CHANGES = {
    1: "write",
    18: "pwrite64",
    20: "writev",
    296: "pwritev",
    328: "pwritev2",
    74: "fsync",
    75: "fdatasync",
    77: "ftruncate",
    82: "rename",
    264: "renameat",
    316: "renameat2",
    83: "mkdir",
    258: "mkdirat",
    84: "rmdir",
    86: "link",
    265: "linkat",
    88: "symlink",
    266: "symlinkat",
    87: "unlink",
    263: "unlinkat",
    277: "sync_file_range",
    285: "fallocate",
    306: "syncfs",
    426: "io_uring_enter",
}
_OPENAT = 257
# Those that name what they change by a path, and which argument that is.
_BY_PATH = {82: 0, 264: 1, 316: 1, 86: 1, 265: 3, 88: 1, 266: 2, 83: 0, 258: 1, 84: 0, 87: 0, 263: 1}


class SyscallInfo(ctypes.Structure):
    """What the kernel tells of a call: `number` and `arguments` count here."""

    _fields_ = [
        ("operation", ctypes.c_uint8),
        ("padding", ctypes.c_uint8 * 3),
        ("architecture", ctypes.c_uint32),
        ("instruction_pointer", ctypes.c_uint64),
        ("stack_pointer", ctypes.c_uint64),
        ("number", ctypes.c_uint64),
        ("arguments", ctypes.c_uint64 * 6),
        ("rest", ctypes.c_uint64),
    ]


def run(function: Callable[[], None], kill_before: int | None) -> tuple[bool, list[str]]:
    """Runs `function` in a forked child.

    Args:
        function: What the child does.
        kill_before: The change of the disk (counted from 0) before which it dies; None lets it live.

    Returns:
        Whether it was killed, and the names of the changes that it made until then.
    """
    child = os.fork()
    if child == 0:
        _ptrace(_TRACE_ME, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        try:
            failing_calls.stop_before(_CHANGES, _OPENAT)
            function()
        except BaseException as error:
            os.write(2, f"the traced child failed: {error!r}\n".encode())
            os._exit(1)
        os._exit(0)
    return _follow(child, kill_before)


def steps_to_walk(changes: list[str], first: int = 0) -> Iterator[int]:
    """The changes before which a walk kills, in turn; without an end, as a run may have more than another.

    Unless the whole is asked for (`tests.support.long`), only some are walked: those before and after each
    rename, as renames commit, and each ninth of the others. Of equal changes in a row (writes to one file,
    files that are removed one by one) those between the first and the last are left out before that.

    Args:
        changes: Those of a run that was not killed.
        first: Where the walk begins.
    """
    steps: Iterable[int] = range(first, len(changes))
    if not IS_LONG:
        ends = [step for step in steps if changes[max(0, step - 1) : step + 2] != [changes[step]] * 3]
        commits = {
            step
            for step in ends
            if any(name.startswith("rename") for name in changes[max(0, step - 1) : step + 1])
        }
        steps = sorted(commits.union(ends[::9]))
    yield from steps
    yield from itertools.count(len(changes))


def _follow(child: int, kill_before: int | None) -> tuple[bool, list[str]]:
    os.waitpid(child, 0)
    _ptrace(_SET_OPTIONS, child, _OPTIONS)
    _libc.ptrace(_CONTINUE, child, None, None)
    changes: list[str] = []
    while True:
        task, status = os.waitpid(-1, _WAIT_ALL)
        if os.WIFSIGNALED(status) or os.WIFEXITED(status):
            if task == child:
                return _ended(status), changes
            continue
        event, stopped_by = status >> 16, os.WSTOPSIG(status)
        if event == _FILTER_EVENT:
            name = _change(task)
            if name is not None:
                if len(changes) == kill_before:
                    os.kill(child, signal.SIGKILL)
                    continue
                changes.append(name)
        own = event != 0 or stopped_by in (signal.SIGSTOP, signal.SIGTRAP)
        # A task that was killed meanwhile cannot be resumed; its end is reported by waitpid.
        _libc.ptrace(_CONTINUE, task, None, 0 if own else stopped_by)


class Walker:
    """Follows a process that runs already, and kills it right before its n-th change of a directory.

    Changes are counted from `attach` on. To be used from one thread, as the kernel wants it.
    """

    def __init__(self, process: int, directory: Path) -> None:
        self._process = process
        self._directory = str(directory)

    def attach(self) -> None:
        """Begins to follow all threads of the process."""
        seized: set[int] = set()
        # Threads may appear while others are seized; those of a seized thread are followed by themselves.
        while found := {int(task) for task in os.listdir(f"/proc/{self._process}/task")} - seized:
            for task in found:
                if _libc.ptrace(_SEIZE, task, None, _OPTIONS_OF_SEIZED) == 0:
                    _libc.ptrace(_INTERRUPT, task, None, None)
                seized.add(task)

    def follow(self, kill_before: int | None) -> tuple[bool, list[str]]:
        """Runs the process to its end; returns whether it was killed, and its changes until then."""
        changes: list[str] = []
        killed = False
        while True:
            try:
                task, status = os.waitpid(-1, _WAIT_ALL)
            except ChildProcessError:
                return killed, changes
            if os.WIFSIGNALED(status) or os.WIFEXITED(status):
                if task == self._process:
                    return killed, changes
                continue
            if os.WSTOPSIG(status) == signal.SIGTRAP | 0x80:
                name = None if killed else self.told_of(task)
                if name is not None:
                    if len(changes) == kill_before:
                        os.kill(self._process, signal.SIGKILL)
                        killed = True
                        continue
                    changes.append(name)
                _resume(task, 0)
            else:
                event, stopped_by = status >> 16, os.WSTOPSIG(status)
                group_stop = event == _STOP_EVENT and stopped_by != signal.SIGTRAP
                if group_stop:
                    _libc.ptrace(_LISTEN, task, None, None)
                else:
                    _resume(task, 0 if event else stopped_by)

    def told_of(self, task: int) -> str | None:
        """What is told of the system call that a task is about to make; None if it does not count."""
        info = entered(task)
        if info is None:
            return None
        if info.number == _OPENAT:
            created = info.arguments[2] & _CREATE and self._is_below(task, info.arguments[1])
            return "create" if created else None
        name = _CHANGES.get(info.number)
        # Rings are not told apart: torch's own store uses them too.
        if name is None or name == "io_uring_enter":
            return None
        if info.number in _BY_PATH:
            return name if self._is_below(task, info.arguments[_BY_PATH[info.number]]) else None
        try:
            path = os.readlink(f"/proc/{task}/fd/{info.arguments[0]}")
        except OSError:
            return None
        return name if path.startswith(self._directory) else None

    def _is_below(self, task: int, address: int) -> bool:
        return text_at(task, address).startswith(self._directory)


def entered(task: int) -> SyscallInfo | None:
    """The system call that a task is about to make; None if it has just made one."""
    info = SyscallInfo()
    result = _libc.ptrace(_GET_SYSCALL_INFO, task, ctypes.sizeof(info), ctypes.byref(info))
    return None if result < 0 or info.operation not in (_ENTRY, _FILTERED) else info


def text_at(task: int, address: int) -> str:
    """The path at an address of a task's memory."""
    with open(f"/proc/{task}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        return os.fsdecode(memory.read(4096).partition(b"\0")[0])


def _ended(status: int) -> bool:
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return True
    assert os.waitstatus_to_exitcode(status) == 0, f"the child ended with {status:#x}"
    return False


def _change(task: int) -> str | None:
    """The change of the disk that a task is about to make, if it is one."""
    info = entered(task)
    if info is None:
        return None
    if info.number == _OPENAT:
        return "create" if info.arguments[2] & _CREATE else None
    return _CHANGES.get(info.number)


def _resume(task: int, signal_number: int) -> None:
    # A task that was killed meanwhile cannot be resumed; its end is reported by waitpid.
    _libc.ptrace(_SYSCALL, task, None, signal_number)


def _ptrace(request: int, process: int, data: int | None = None) -> None:
    if _libc.ptrace(request, process, None, data) < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"ptrace request {request}: {os.strerror(code)}")
