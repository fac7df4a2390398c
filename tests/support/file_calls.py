"""Every system call of a running process that has to do with files below a directory (ptrace, x86-64).

Counted are the calls that name a path, and those on open files that change or list something; not the
transfers of data, of which there are as many as there are bytes to move.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.support import system_calls

_HERE = 0xFFFFFF9C  # AT_FDCWD, as the lower half of a register holds it
_NO_DIRECTORY = -1

# For each call, its paths: the argument of the directory that a path starts from, and that of the path.
_NAMING = {
    2: ("open", [(_NO_DIRECTORY, 0)]),
    4: ("stat", [(_NO_DIRECTORY, 0)]),
    6: ("lstat", [(_NO_DIRECTORY, 0)]),
    21: ("access", [(_NO_DIRECTORY, 0)]),
    76: ("truncate", [(_NO_DIRECTORY, 0)]),
    82: ("rename", [(_NO_DIRECTORY, 0), (_NO_DIRECTORY, 1)]),
    83: ("mkdir", [(_NO_DIRECTORY, 0)]),
    84: ("rmdir", [(_NO_DIRECTORY, 0)]),
    87: ("unlink", [(_NO_DIRECTORY, 0)]),
    89: ("readlink", [(_NO_DIRECTORY, 0)]),
    90: ("chmod", [(_NO_DIRECTORY, 0)]),
    137: ("statfs", [(_NO_DIRECTORY, 0)]),
    257: ("openat", [(0, 1)]),
    258: ("mkdirat", [(0, 1)]),
    262: ("newfstatat", [(0, 1)]),
    263: ("unlinkat", [(0, 1)]),
    264: ("renameat", [(0, 1), (2, 3)]),
    267: ("readlinkat", [(0, 1)]),
    269: ("faccessat", [(0, 1)]),
    280: ("utimensat", [(0, 1)]),
    316: ("renameat2", [(0, 1), (2, 3)]),
    332: ("statx", [(0, 1)]),
    437: ("openat2", [(0, 1)]),
    439: ("faccessat2", [(0, 1)]),
}
_ON_FILES = {
    74: "fsync",
    75: "fdatasync",
    77: "ftruncate",
    91: "fchmod",
    217: "getdents64",
    285: "fallocate",
}


class Watcher(system_calls.Walker):
    """Follows a process; `follow(None)` returns each call: its name and its paths below the directory."""

    def __init__(self, process: int, directory: Path) -> None:
        super().__init__(process, directory)
        self._root = f"{directory}/"

    def told_of(self, task: int) -> str | None:
        """The call and what it names, if that is below the directory."""
        info = system_calls.entered(task)
        if info is None:
            return None
        if info.number in _ON_FILES:
            name, paths = _ON_FILES[info.number], [_opened(task, info.arguments[0])]
        elif info.number in _NAMING:
            name, places = _NAMING[info.number]
            paths = [_path(task, info, start, text) for start, text in places]
        else:
            return None
        below = [path for path in paths if path.startswith(self._root)]
        return " ".join([name, *below]) if below else None


def _path(task: int, info: system_calls.SyscallInfo, start: int, text: int) -> str:
    address = info.arguments[text]
    path = system_calls.text_at(task, address) if address else ""
    if path.startswith("/"):
        own = "/proc/self/fd/"
        number, _, rest = path.removeprefix(own).partition("/")
        return os.path.join(_opened(task, int(number)), rest) if path.startswith(own) else path
    if start == _NO_DIRECTORY or info.arguments[start] & 0xFFFFFFFF == _HERE:
        return os.path.join(os.readlink(f"/proc/{task}/cwd"), path)
    return os.path.join(_opened(task, info.arguments[start]), path)


def _opened(task: int, number: int) -> str:
    """What a file descriptor of a task is of; empty if it has none of that number."""
    try:
        return os.readlink(f"/proc/{task}/fd/{number}")
    except OSError:
        return ""
