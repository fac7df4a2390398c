"""Runs a function in a child process and kills it with SIGKILL right before its n-th change of the disk.

The child is traced (ptrace), so the kill comes from outside and can fall between any two system calls
of any of its threads; the code under test has no part in it. Linux on x86-64 only.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
from collections.abc import Callable

SUPPORTED = platform.system() == "Linux" and platform.machine() == "x86_64"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long

_TRACE_ME, _SYSCALL, _SET_OPTIONS, _GET_SYSCALL_INFO = 0, 24, 0x4200, 0x420E
# Mark system-call stops; follow threads and children; kill the child when the tracer dies.
_OPTIONS = 0x1 | 0x2 | 0x4 | 0x8 | 0x100000
_WAIT_ALL = 0x40000000
_ENTRY = 1
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
    87: "unlink",
    263: "unlinkat",
    277: "sync_file_range",
    285: "fallocate",
    426: "io_uring_enter",
}
_OPENAT = 257


class _SyscallInfo(ctypes.Structure):
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
            function()
        except BaseException as error:
            os.write(2, f"the traced child failed: {error!r}\n".encode())
            os._exit(1)
        os._exit(0)
    return _follow(child, kill_before)


def _follow(child: int, kill_before: int | None) -> tuple[bool, list[str]]:
    os.waitpid(child, 0)
    _ptrace(_SET_OPTIONS, child, _OPTIONS)
    _ptrace(_SYSCALL, child)
    changes: list[str] = []
    while True:
        task, status = os.waitpid(-1, _WAIT_ALL)
        if os.WIFSIGNALED(status) or os.WIFEXITED(status):
            if task == child:
                return _ended(status), changes
            continue
        if os.WSTOPSIG(status) == signal.SIGTRAP | 0x80:
            name = _change(task)
            if name is not None:
                if len(changes) == kill_before:
                    os.kill(child, signal.SIGKILL)
                    continue
                changes.append(name)
            _resume(task, 0)
        else:
            stopped_by = os.WSTOPSIG(status)
            own = status >> 16 != 0 or stopped_by in (signal.SIGSTOP, signal.SIGTRAP)
            _resume(task, 0 if own else stopped_by)


def _ended(status: int) -> bool:
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return True
    assert os.waitstatus_to_exitcode(status) == 0, f"the child ended with {status:#x}"
    return False


def _change(task: int) -> str | None:
    """The change of the disk that a task is about to make, if it is one."""
    info = _SyscallInfo()
    result = _libc.ptrace(_GET_SYSCALL_INFO, task, ctypes.sizeof(info), ctypes.byref(info))
    if result < 0 or info.operation != _ENTRY:
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
