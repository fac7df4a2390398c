"""Who a process is, and whether it still runs: the one place where Python asks the kernel for that.

A process is known by its *system* (the name of the machine, the boot of its kernel, the namespaces of process
ids and of time), its id and its start time. What depends on the answer is the deletion of what a process was
writing, so these rules hold:

- Only a process of the same system can be called dead. Copies of a virtual machine have the boot id, and
  often the namespace, of their original; their names tell them apart. A machine that has been renamed is
  another system: nobody here calls dead what it left behind under its old name.
- A process is dead if the kernel has no process of its id, if that began at another time, or if only a zombie
  without other threads is left of it. A process that cannot be looked at (`hidepid`) counts as running.
- Start times are those that the reader's namespace of time shows, so they are compared within one only.
- Where the kernel does not tell, nothing is dead: without /proc, and where that was mounted in another
  namespace of process ids, so that an id means another process there.

The agent asks in the same way (`crates/waystation-agent/src/process.rs`); the cases in its
`tests/vectors/processes.json` hold both to it.
"""

from __future__ import annotations

import errno
import functools
import os
import socket
from pathlib import Path

_PROC = "/proc"
_STATE_FIELD, _START_FIELD = 0, 19  # after the name of the program in /proc/ID/stat
_GONE = frozenset("ZX")  # only an entry of it is left, unless threads go on
_INITIAL_TIME = "time:[4026531834]"  # the same number on every kernel that has such namespaces


@functools.cache
def host_name() -> str:
    """The name of this machine, as it was when this process first asked."""
    return socket.gethostname()


@functools.cache
def boot_id() -> str:
    """The id of this boot of the kernel. Raises OSError where /proc does not tell."""
    return Path(_PROC, "sys/kernel/random/boot_id").read_text().strip()


def system() -> str:
    """The set of processes among which an id and a start time name one process.

    Raises OSError where /proc does not tell.
    """
    _require_own_table()
    found = f"{host_name()} {boot_id()} {os.readlink(f'{_PROC}/self/ns/pid')}"
    try:
        time = os.readlink(f"{_PROC}/self/ns/time")
    except FileNotFoundError:  # Linux before 5.6
        time = _INITIAL_TIME
    return found if time == _INITIAL_TIME else f"{found} {time}"


def start_time(process_id: int) -> str:
    """When a process of this system began, in clock ticks since the boot.

    Raises OSError or IndexError where that cannot be told.
    """
    return _stat(process_id)[_START_FIELD]


def may_run(process_id: int, start: str) -> bool:
    """Whether a process of this system that began at `start` may still run; False is proof of its death."""
    try:
        fields = _stat(process_id)
        if fields[_START_FIELD] != start:
            return False
        # A zombie's threads may still write; a zombie without other threads cannot.
        return fields[_STATE_FIELD] not in _GONE or len(os.listdir(f"{_PROC}/{process_id}/task")) > 1
    except (FileNotFoundError, ProcessLookupError):  # the second if it ends between opening and reading
        return _is_hidden(process_id)
    except (OSError, IndexError):
        return True


def _is_hidden(process_id: int) -> bool:
    """Whether the kernel has a process of this id, although /proc does not show it."""
    if not os.path.exists(f"{_PROC}/self/stat"):
        return True
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    # It may be a process that began meanwhile; the next one who asks sees it, or not.
    return True


def _stat(process_id: int) -> list[str]:
    """What the process table says of a process, from its state on."""
    _require_own_table()
    return Path(_PROC, str(process_id), "stat").read_text().rpartition(")")[2].split()


def _require_own_table() -> None:
    """Raises OSError where ids in /proc are not those by which this process knows processes."""
    own, _, _ = Path(_PROC, "self/stat").read_text().partition(" ")
    if own != str(os.getpid()):
        raise OSError(errno.EXDEV, f"'{_PROC}' was mounted in another namespace of process ids")
