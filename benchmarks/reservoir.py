"""Memory that a session keeps in use between its runs, so that the host of a virtual machine keeps it backed.

A host takes back within seconds what a guest has freed, the sooner the more it is, and may give it again at
a tenth of the speed of memory: then backing what a run will need takes longer than the run. So the process
of a session holds as much as a run has asked for. A process of a run asks for it when it is about to measure
(`measure.back_free_memory`), and has it until it ends: the kernel closes its connection then, after its
memory was freed. It is not given all at once, or it would be taken back before it is used: as the machine's
free memory becomes less, so much follows. The kernel allocates first what was freed last.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import select
import socket
import struct
import threading
from types import TracebackType

import numpy as np

VARIABLE = "WAYSTATION_BENCHMARK_RESERVOIR"
MOST_OF_THE_MACHINE = 4
"""It holds one such part of the machine's memory at most: agents and peers of a run need theirs meanwhile."""
AHEAD_BYTES = 256 << 20
"""How much is free beforehand: what a run may use before the next look."""
LOOK_EVERY_S = 0.003

_HUGE_BYTES = 2 << 20
_REQUEST = struct.Struct("<Q")
_used: list[socket.socket] = []


class Held:
    """Memory that is really there, of huge pages where the kernel has them, until it is given back.

    Args:
        nbytes: How much.
    """

    def __init__(self, nbytes: int) -> None:
        self._memory = mmap.mmap(
            -1, max(nbytes, 1) + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        with contextlib.suppress(OSError):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._given = -address % _HUGE_BYTES
        self._end = self._given + nbytes
        pages = np.frombuffer(self._memory, np.uint8)[self._given : self._end]
        pages[:: mmap.PAGESIZE] = 1
        del pages  # or the memory could not be given back

    @property
    def nbytes(self) -> int:
        """What is left of it."""
        return self._end - self._given

    def give(self, nbytes: int) -> None:
        """Gives so much back, or what is left, in whole huge pages."""
        nbytes = min(-(-nbytes // _HUGE_BYTES) * _HUGE_BYTES, self.nbytes)
        if nbytes > 0:
            self._memory.madvise(mmap.MADV_DONTNEED, self._given, nbytes)
            self._given += nbytes

    def close(self) -> None:
        """Gives the rest back."""
        self._memory.close()


class Reservoir:
    """`with Reservoir():`; processes that are started inside find it.

    Args:
        ahead_bytes: How much is given at once.
    """

    def __init__(self, ahead_bytes: int = AHEAD_BYTES) -> None:
        self._ahead_bytes = ahead_bytes
        self._limit = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE // MOST_OF_THE_MACHINE
        self._listener = socket.socket(socket.AF_UNIX)
        self._users: dict[socket.socket, int] = {}
        self._thread = threading.Thread(target=self._serve, name="reservoir", daemon=True)

    def __enter__(self) -> Reservoir:
        name = f"waystation-reservoir-{os.getpid()}"
        self._listener.bind(f"\0{name}")
        self._listener.listen()
        self._thread.start()
        os.environ[VARIABLE] = name
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_use()
        del os.environ[VARIABLE]
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for connection in (self._listener, *self._users):
            connection.close()

    def _serve(self) -> None:
        held, most = Held(0), 0
        free = _free_bytes()
        while True:
            wait_s = LOOK_EVERY_S if self._users and held.nbytes else None
            ready = select.select([self._listener, *self._users], [], [], wait_s)[0]
            held.give(free - _free_bytes() if self._users else 0)
            for user in self._users.keys() & set(ready):
                del self._users[user]
                user.close()
            if self._listener in ready:
                try:
                    user, _ = self._listener.accept()
                except OSError:
                    held.close()
                    return
                most = self._admit(user)
                if held.nbytes < most:
                    held.close()
                    held = Held(most)
                held.give(self._ahead_bytes)
                free = _free_bytes()
                with contextlib.suppress(OSError):  # it has ended, which the next look shows
                    user.sendall(b"\0")
            elif not self._users and held.nbytes < most:
                held.close()
                held = Held(most)

    def _admit(self, user: socket.socket) -> int:
        """Notes what a user asks for; the processes of one run ask one after another.

        Returns:
            How much all users need together, as far as the machine has it.
        """
        request = b""
        with contextlib.suppress(OSError):
            request = user.recv(_REQUEST.size, socket.MSG_WAITALL)
        self._users[user] = _REQUEST.unpack(request)[0] if len(request) == _REQUEST.size else 0
        return min(sum(self._users.values()), self._limit)


def _free_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE


def use(nbytes: int) -> bool:
    """Has the session's reservoir give its memory, if there is one, until this process ends or `end_use`.

    Args:
        nbytes: How much will be needed: so much is held, now and for the next run.

    Returns:
        Whether there is one.
    """
    end_use()
    name = os.environ.get(VARIABLE)
    if name is None:
        return False
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(f"\0{name}")
        connection.sendall(_REQUEST.pack(nbytes))
        connection.recv(1)
    except OSError:  # the session is ending
        connection.close()
        return False
    _used.append(connection)
    return True


def end_use() -> None:
    """What this process had of the reservoir goes back to it."""
    while _used:
        _used.pop().close()
