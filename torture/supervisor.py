"""Every system call that a process makes on files below a directory, stopped before the kernel makes it.

The kernel asks the bench about each (seccomp's user notification), so the bench can kill the process
between any two calls, have one fail with any error, or make a shorter one on the process' behalf. A call is
named by what it does
and to which file, counted among its equals, with the parts of names that differ from run to run left out:
so one and the same call is met again however threads take turns.

io_uring moves bytes without system calls. It is either refused, so that every byte goes through a call, or
allowed, and then `io_uring_enter` is a call like others. Memory-mapped files are not seen. x86-64 only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import platform
import re
import select
import signal
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torture import filters
from torture.processes import HANG_S, Child, Deadline, Ended

SUPPORTED = platform.system() == "Linux" and platform.machine() == "x86_64"

_NO_DIRECTORY = -1
_HERE = 0xFFFFFF9C  # AT_FDCWD, as the lower half of a register holds it

# Name: number, and for each path the argument of the directory that it starts from, and that of the path
# itself.
_NAMING: dict[str, tuple[int, list[tuple[int, int]]]] = {
    "open": (2, [(_NO_DIRECTORY, 0)]),
    "stat": (4, [(_NO_DIRECTORY, 0)]),
    "lstat": (6, [(_NO_DIRECTORY, 0)]),
    "access": (21, [(_NO_DIRECTORY, 0)]),
    "truncate": (76, [(_NO_DIRECTORY, 0)]),
    "rename": (82, [(_NO_DIRECTORY, 0), (_NO_DIRECTORY, 1)]),
    "mkdir": (83, [(_NO_DIRECTORY, 0)]),
    "rmdir": (84, [(_NO_DIRECTORY, 0)]),
    "creat": (85, [(_NO_DIRECTORY, 0)]),
    "link": (86, [(_NO_DIRECTORY, 0), (_NO_DIRECTORY, 1)]),
    "unlink": (87, [(_NO_DIRECTORY, 0)]),
    "symlink": (88, [(_NO_DIRECTORY, 1)]),
    "readlink": (89, [(_NO_DIRECTORY, 0)]),
    "chmod": (90, [(_NO_DIRECTORY, 0)]),
    "statfs": (137, [(_NO_DIRECTORY, 0)]),
    "openat": (257, [(0, 1)]),
    "mkdirat": (258, [(0, 1)]),
    "newfstatat": (262, [(0, 1)]),
    "unlinkat": (263, [(0, 1)]),
    "renameat": (264, [(0, 1), (2, 3)]),
    "linkat": (265, [(0, 1), (2, 3)]),
    "symlinkat": (266, [(1, 2)]),
    "readlinkat": (267, [(0, 1)]),
    "fchmodat": (268, [(0, 1)]),
    "faccessat": (269, [(0, 1)]),
    "utimensat": (280, [(0, 1)]),
    "renameat2": (316, [(0, 1), (2, 3)]),
    "statx": (332, [(0, 1)]),
    "openat2": (437, [(0, 1)]),
    "faccessat2": (439, [(0, 1)]),
}
# Those on an open file, which is their first argument.
_ON_FILES: dict[str, int] = {
    "read": 0,
    "write": 1,
    "close": 3,
    "fstat": 5,
    "pread64": 17,
    "pwrite64": 18,
    "readv": 19,
    "writev": 20,
    "flock": 73,
    "fsync": 74,
    "fdatasync": 75,
    "ftruncate": 77,
    "fchmod": 91,
    "fstatfs": 138,
    "getdents64": 217,
    "sync_file_range": 277,
    "fallocate": 285,
    "preadv": 295,
    "pwritev": 296,
    "syncfs": 306,
    "copy_file_range": 326,
    "preadv2": 327,
    "pwritev2": 328,
}
# Those that only connections know, which are seen where these are watched, too.
_ON_SOCKETS = {"connect": 42, "sendto": 44, "recvfrom": 45, "sendmsg": 46, "recvmsg": 47, "accept4": 288}
_RING_SETUP, _RING_ENTER = 425, 426
_BY_NUMBER = {number: name for name, (number, _) in _NAMING.items()} | {
    number: name for name, number in (_ON_FILES | _ON_SOCKETS).items()
}

READS = frozenset({"read", "pread64", "readv", "preadv", "preadv2"})
WRITES = frozenset({"write", "pwrite64", "writev", "pwritev", "pwritev2"})
_POSITIONED = frozenset({"pread64", "preadv", "preadv2", "pwrite64", "pwritev", "pwritev2"})
_OPENS = frozenset({"open", "openat", "openat2", "creat"})
_SYNCS = frozenset({"fsync", "fdatasync", "syncfs", "sync_file_range"})
_MAKES = frozenset(
    {"mkdir", "mkdirat", "rename", "renameat", "renameat2", "link", "linkat", "symlink", "symlinkat"}
)
# Calls whose failure tells that bytes which were taken before are lost.
LOSING = frozenset({"fsync", "fdatasync", "close"})
_GROWS = frozenset({"fallocate", "ftruncate", "truncate", "copy_file_range"})
# Which calls an error is for: what POSIX and the manual pages of Linux name it for, on some file system.
MAY_FAIL: dict[str, Callable[[Call], bool]] = {
    "EIO": lambda _: True,
    "ENOSPC": lambda call: call.name in WRITES | _SYNCS | _MAKES | _GROWS | {"close"} or call.creates,
    "EINTR": lambda call: call.name in READS | WRITES | _OPENS | _GROWS | {"fsync", "fdatasync", "flock"},
    "short": lambda call: call.name in READS | WRITES and call.nbytes > 1,
}


@dataclass(frozen=True)
class Call:
    """A call that a process makes.

    Attributes:
        name: Of the system call.
        path: What it is about, relative to the watched directory, without what differs from run to run.
        ordinal: How many equal ones came before it.
        creates: Whether it opens a file that need not be there.
        nbytes: How much it is to move.
    """

    name: str
    path: str
    ordinal: int
    creates: bool = field(default=False, compare=False)
    nbytes: int = field(default=0, compare=False)

    @property
    def address(self) -> str:
        """Under which it is met again in another run."""
        return f"{self.name} {self.path} {self.ordinal}"


@dataclass(frozen=True)
class Supervised:
    """What a process did.

    Attributes:
        ended: How it ended.
        calls: Those it made, in order.
        is_hit: Whether it came to the call that the fault was for.
    """

    ended: Ended
    calls: list[Call]
    is_hit: bool


def supervise(
    function: Callable[[], Any],
    watched: Path,
    *,
    address: str | None = None,
    fault: str = "kill",
    ring: bool = False,
    loses: bool = True,
    sockets: bool = False,
    timeout_s: float = HANG_S,
    meanwhile: Callable[[Callable[[int], None]], None] | None = None,
    observe: Callable[[Told], None] | None = None,
) -> Supervised:
    """Runs a function in a process of its own, whose calls are told of.

    Args:
        function: What the process does.
        watched: The directory; calls that are about something else are made as ever.
        address: The call that the fault is for; None has all calls made.
        fault: `kill` before the call, `short`, or the name of an error with which it fails; a disk that is
            full (`ENOSPC`) stays so.
        ring: Whether io_uring is allowed.
        loses: Whether a close or sync that fails has lost what was not synced; nothing is lost in memory.
        sockets: Whether calls on connections are told of, too.
        timeout_s: After this the process hangs.
        meanwhile: Called once the process is about to make the call, instead of a fault. It is given a
            function that answers the other calls of the process until something can be read from a
            descriptor; without that, all stand still.
        observe: Called with each call before it is made.
    """
    with supervised(function, watched, address, ring=ring, sockets=sockets) as supervisor:
        supervisor.fault, supervisor.loses = fault, loses
        supervisor.meanwhile, supervisor.observe = meanwhile, observe
        is_hung = not supervisor.serve(timeout_s)
    return Supervised(supervisor.child.end(is_hung=is_hung), supervisor.calls, supervisor.is_hit)


@contextlib.contextmanager
def supervised(
    function: Callable[[], Any],
    watched: Path,
    address: str | None = None,
    *,
    ring: bool = False,
    sockets: bool = False,
) -> Iterator[Supervisor]:
    """A process that runs a function, and waits before each of its calls until that is answered; see
    `supervise`."""
    reader, writer = os.pipe()

    def stopped() -> Any:
        os.close(reader)
        # No call that could tell of the listener may be made once there is one.
        listener = os.dup(writer)
        os.close(listener)
        os.write(writer, bytes([listener]))
        os.close(writer)
        listener = _install(ring, sockets)
        os.close(listener)
        return function()

    child = Child(stopped)
    os.close(writer)
    with open(reader, "rb") as said:
        (number,) = said.read(1)
    with Supervisor(child, _listener_of(child, number), watched, address, sockets) as supervisor:
        yield supervisor


def _listener_of(child: Child, number: int) -> int:
    """The descriptor where the kernel asks about a child's calls, once the child has it under a number."""
    deadline = Deadline(HANG_S, child.process)
    while "seccomp" not in _opened(child.process, number):
        if child.has_ended(0.001) or deadline.left_s() <= 0:
            raise RuntimeError(f"the calls of a process are not told of: it has {child.end(0).error}")
    return _taken(child.handle, number)


def _taken(handle: int, number: int) -> int:
    """A descriptor of another process, taken over."""
    libc = ctypes.CDLL(None, use_errno=True)
    taken: int = libc.syscall(438, handle, number, 0)  # pidfd_getfd
    if taken < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return taken


def _install(ring: bool, sockets: bool) -> int:
    asked = [*_BY_NUMBER, *([_RING_ENTER] if ring else [])]
    if not sockets:
        asked = [number for number in asked if number not in _ON_SOCKETS.values()]
    return filters.ask_about(asked, {} if ring else {_RING_SETUP: errno.ENOSYS})


# --- the supervisor -------------------------------------------------------------------------------

_RECEIVE, _SEND, _ADD_DESCRIPTOR, _SET_FLAGS = 0xC0502100, 0xC0182101, 0x40182103, 0x40082104
_WAKE_UP_HERE = 1
_CONTINUE = 1
_SET_DESCRIPTOR = 1
_DIRECT_ALIGNMENT = 4096


@dataclass(frozen=True)
class Told:
    """A call that waits for an answer.

    Attributes:
        unique: By which it is answered.
        task: The thread that makes it.
        number: Of the system call.
        arguments: As registers hold them.
        paths: What it is about, relative to the watched directory; empty for what is elsewhere.
    """

    unique: int
    task: int
    number: int
    arguments: tuple[int, ...]
    paths: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Of the system call."""
        return _BY_NUMBER.get(self.number, "")

    def text(self, argument: int) -> str:
        """A string that an argument points to."""
        return _text_at(self.task, self.arguments[argument])

    def written(self) -> bytes:
        """What a call that writes is to write."""
        address, count = self.arguments[1:3]
        if "v" not in self.name:
            return _memory_at(self.task, address, count)
        pieces = struct.iter_unpack("=QQ", _memory_at(self.task, address, 16 * count))
        return b"".join(_memory_at(self.task, start, nbytes) for start, nbytes in pieces)

    def position(self) -> tuple[int, int]:
        """Where the open file of the first argument stands, and the flags that it was opened with."""
        with open(f"/proc/{self.task}/fdinfo/{self.arguments[0]}") as lines:
            found = dict(line.split(":", 1) for line in lines if line.startswith(("pos:", "flags:")))
        return int(found["pos"]), int(found["flags"], 8)


class Supervisor:
    """Answers the kernel's questions.

    Attributes:
        child: The process.
        calls: Those it has made, in order.
        is_hit: Whether it has come to the call that the fault is for.
        fault, loses, meanwhile, observe: As `supervise` takes them.
    """

    def __init__(
        self, child: Child, listener: int, watched: Path, address: str | None, sockets: bool
    ) -> None:
        self.child = child
        self.calls: list[Call] = []
        self.is_hit = False
        self.fault = "kill"
        self.loses = True
        self.meanwhile: Callable[[Callable[[int], None]], None] | None = None
        self.observe: Callable[[Told], None] | None = None
        self._listener, self._watched, self._address = listener, os.fspath(watched), address
        self._sockets = sockets
        self._is_full = False
        self._unsynced: set[str] = set()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._nowhere = os.open(os.devnull, os.O_RDWR)
        # Both are awake at one time only, so they may share a core.
        fcntl.ioctl(listener, _SET_FLAGS, _WAKE_UP_HERE)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        # Calls that wait for an answer fail with ENOSYS from here on.
        os.close(self._listener)
        os.close(self._nowhere)

    def serve(self, timeout_s: float) -> bool:
        """Until the process ends; returns whether that came in time."""
        waiting = select.poll()
        waiting.register(self._listener, select.POLLIN)
        waiting.register(self.child.handle, select.POLLIN)
        deadline = Deadline(timeout_s, self.child.process)
        while (left_s := deadline.left_s()) > 0:
            ready = dict(waiting.poll(left_s * 1000))
            if ready.get(self._listener, 0) & select.POLLIN:
                told = self._receive()
                if told is not None and self._answer(told):
                    return True
            elif self.child.handle in ready or self._listener in ready:
                return True
        return False

    def serve_until(self, descriptor: int) -> None:
        """Until something can be read there, the process ends, or nothing of both comes."""
        waiting = select.poll()
        for each in (self._listener, self.child.handle, descriptor):
            waiting.register(each, select.POLLIN)
        deadline = Deadline(HANG_S, self.child.process)
        while (left_s := deadline.left_s()) > 0:
            ready = dict(waiting.poll(left_s * 1000))
            if descriptor in ready or self.child.handle in ready:
                return
            if ready.get(self._listener, 0) & select.POLLIN and (told := self._receive()) is not None:
                self._answer(told)

    def _receive(self) -> Told | None:
        asked = bytearray(80)
        try:
            fcntl.ioctl(self._listener, _RECEIVE, asked)
        except OSError:  # whoever has asked was killed
            return None
        unique, task, _, number, _, _, *arguments = struct.unpack("=QIIiIQ6Q", asked)
        return Told(unique, task, number, tuple(arguments))

    def _answer(self, told: Told) -> bool:
        """Returns whether the process was killed."""
        call = self._call(told)
        if call is None:
            self._go_on(told)
            return False
        self.calls.append(call)
        if self.observe is not None and call.address != self._address:
            self.observe(told)
        if call.address != self._address or self.fault == "short":
            self._note_written(told)
        if call.address != self._address:
            if self._is_full and call.name != "close" and MAY_FAIL["ENOSPC"](call):
                self._send(told, error=errno.ENOSPC)
            else:
                self._go_on(told)
            return False
        self.is_hit = True
        self._is_full = self.fault == "ENOSPC"
        if self.meanwhile is not None:
            self.meanwhile(self.serve_until)
            self._go_on(told)
        elif self.fault == "kill":
            # What the process has started may be in a session of its own.
            os.kill(_leader(told.task), signal.SIGKILL)
            self.child.kill()
            return True
        elif self.fault == "short":
            self._shorten(told, call)
        else:
            if call.name in LOSING and self.fault in ("EIO", "ENOSPC"):
                # What was written and not synced is gone with such a failure: nobody can write it again.
                self._lose(told)
            if call.name == "close":
                # A close that fails closes all the same.
                self._close(told)
            self._send(told, error=getattr(errno, self.fault))
        return False

    def _call(self, told: Told) -> Call | None:
        if told.number == _RING_ENTER:
            return self._counted("io_uring_enter", "")
        name = _BY_NUMBER[told.number]
        if name in _NAMING:
            paths = [_path(told, start, text) for start, text in _NAMING[name][1]]
        else:
            paths = [_opened(told.task, told.arguments[0])]
            if self._sockets and paths[0].startswith("socket:"):
                return self._counted(name, "a connection")
        told.paths.extend(
            path.removeprefix(self._watched) or "/" if self._is_watched(path) else "" for path in paths
        )
        below = [path.removeprefix(self._watched) or "/" for path in paths if self._is_watched(path)]
        if not below:
            return None
        flags = told.arguments[2 if name == "openat" else 1] if name in {"open", "openat"} else 0
        nbytes = told.arguments[2] if name in READS | WRITES else 0
        named = " ".join(map(_without_chance, below))
        if name in _POSITIONED:  # of which threads make several at once
            named += f"@{told.arguments[3]}"
        return self._counted(name, named, bool(flags & os.O_CREAT), nbytes)

    def _is_watched(self, path: str) -> bool:
        return path == self._watched or path.startswith(self._watched + "/")

    def _counted(self, name: str, path: str, creates: bool = False, nbytes: int = 0) -> Call:
        ordinal = self._counts[name, path]
        self._counts[name, path] += 1
        return Call(name, path, ordinal, creates, nbytes)

    def _go_on(self, told: Told) -> None:
        self._respond(struct.pack("=QqiI", told.unique, 0, 0, _CONTINUE))

    def _send(self, told: Told, *, value: int = 0, error: int = 0) -> None:
        self._respond(struct.pack("=QqiI", told.unique, value, -error, 0))

    def _respond(self, answer: bytes) -> None:
        try:
            fcntl.ioctl(self._listener, _SEND, answer)
        except OSError as error:
            if error.errno != errno.ENOENT:  # it was killed meanwhile
                raise

    def _note_written(self, told: Told) -> None:
        """Remembers which files hold bytes that were written and not synced."""
        if told.name in WRITES:
            self._unsynced.update(told.paths)
        elif told.name in ("fsync", "fdatasync"):
            self._unsynced.difference_update(told.paths)
        elif told.name in ("rename", "renameat", "renameat2") and told.paths[0] in self._unsynced:
            self._unsynced.add(told.paths[1])

    def _lose(self, told: Told) -> None:
        if self.loses and told.paths[0] in self._unsynced:
            os.truncate(f"/proc/{told.task}/fd/{told.arguments[0]}", 0)

    def _close(self, told: Told) -> None:
        """Puts another file in the place of one in the process, which closes that."""
        number = told.arguments[0]
        request = struct.pack("=QIIII", told.unique, _SET_DESCRIPTOR, self._nowhere, number, 0)
        fcntl.ioctl(self._listener, _ADD_DESCRIPTOR, request)

    def _shorten(self, told: Told, call: Call) -> None:
        """Makes a shorter call on behalf of the process."""
        number, address, nbytes, offset = told.arguments[:4]
        if "v" in call.name:
            address, nbytes = _first_piece(told.task, address, nbytes)
        with _Descriptor(told.task, number) as own:
            shorter = _shorter(nbytes, own.is_direct)
            if shorter is None:
                self._go_on(told)
                return
            positioned = call.name.startswith("p")
            try:
                moved = own.move(call.name in READS, address, shorter, offset if positioned else None)
            except OSError as error:
                self._send(told, error=error.errno or errno.EIO)
                return
        self._send(told, value=moved)


def _shorter(nbytes: int, is_direct: bool) -> int | None:
    """How much of a transfer is made; None if it cannot be shorter."""
    if not is_direct:
        return max(1, nbytes // 2 - 1) if nbytes > 1 else None
    return nbytes // 2 // _DIRECT_ALIGNMENT * _DIRECT_ALIGNMENT or None


class _Descriptor:
    """A file that another process has open: the same open file, with its position."""

    def __init__(self, task: int, number: int) -> None:
        self._task = task
        leader = _leader(task)
        handle = os.pidfd_open(leader)
        try:
            self._number = _taken(handle, number)
        finally:
            os.close(handle)
        self.is_direct = bool(fcntl.fcntl(self._number, fcntl.F_GETFL) & os.O_DIRECT)

    def __enter__(self) -> _Descriptor:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._number)

    def move(self, reads: bool, address: int, nbytes: int, offset: int | None) -> int:
        """Reads to, or writes from, memory of the process."""
        aligned = mmap.mmap(-1, nbytes)  # direct transfers need it
        memory = os.open(f"/proc/{self._task}/mem", os.O_RDWR)
        try:
            if not reads:
                os.preadv(memory, [aligned], address)
                return (
                    os.write(self._number, aligned)
                    if offset is None
                    else os.pwrite(self._number, aligned, offset)
                )
            moved = (
                os.readv(self._number, [aligned])
                if offset is None
                else os.preadv(self._number, [aligned], offset)
            )
            if moved:
                os.pwrite(memory, aligned[:moved], address)
            return moved
        finally:
            os.close(memory)


def _leader(task: int) -> int:
    with open(f"/proc/{task}/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Tgid:"))


def _first_piece(task: int, address: int, count: int) -> tuple[int, int]:
    """The first piece of a list of pieces that is not empty."""
    with open(f"/proc/{task}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        listed = memory.read(16 * count)
    pieces = list(struct.iter_unpack("=QQ", listed))
    return next(((start, nbytes) for start, nbytes in pieces if nbytes), (0, 0))


def _path(told: Told, start: int, text: int) -> str:
    path = _text_at(told.task, told.arguments[text])
    if path.startswith("/"):
        own = "/proc/self/fd/"
        number, _, rest = path.removeprefix(own).partition("/")
        return (
            os.path.join(_opened(told.task, int(number)), rest)
            if path.startswith(own)
            else os.path.normpath(path)
        )
    if start == _NO_DIRECTORY or told.arguments[start] & 0xFFFFFFFF == _HERE:
        try:
            base = os.readlink(f"/proc/{told.task}/cwd")
        except OSError:
            base = "/"
    else:
        base = _opened(told.task, told.arguments[start])
    return os.path.normpath(os.path.join(base, path)) if base else ""


def _opened(task: int, number: int) -> str:
    """What a descriptor of a task is of; empty if it has none of that number."""
    try:
        return os.readlink(f"/proc/{task}/fd/{number & 0xFFFFFFFF}").removesuffix(" (deleted)")
    except OSError:
        return ""


def _memory_at(task: int, address: int, nbytes: int) -> bytes:
    with open(f"/proc/{task}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        content = b""
        while len(content) < nbytes and (part := memory.read(nbytes - len(content))):
            content += part
        return content


def _text_at(task: int, address: int) -> str:
    try:
        with open(f"/proc/{task}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            return os.fsdecode(memory.read(4096).partition(b"\0")[0])
    except (OSError, ValueError, OverflowError):  # it points to nothing
        return ""


# Digests, process ids and times in the names of temporary files.
_CHANCE = re.compile(
    r"[0-9a-f]{8,}|\d{6,}|(?<=-)\d+(?=-)|(?<=\.)\d{3,}(?=/|$)|(?<=tmp)[A-Za-z0-9_]{6,8}(?=/|$)"
)


def _without_chance(path: str) -> str:
    return _CHANCE.sub("#", path)


def in_order(calls: Sequence[Call], fault: str) -> list[str]:
    """The addresses of calls that a fault is for, in an order that does not depend on how threads took
    turns."""
    met = [call for call in calls if fault not in MAY_FAIL or MAY_FAIL[fault](call)]
    return sorted({call.address for call in met}, key=_by_place)


def _by_place(address: str) -> tuple[str, int]:
    text, _, ordinal = address.rpartition(" ")
    return text, int(ordinal)
