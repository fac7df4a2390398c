"""Memory that a session keeps in use between its runs, so that the host of a virtual machine keeps it backed.

A host takes back within seconds what a guest has freed, and may give it again at a tenth of the speed of
memory: then backing what a run will need takes longer than the run. So the process of a session holds as
much as the run before has asked for. A process of a run asks for it when it is about to measure
(`measure.back_free_memory`), and has it until it ends: the kernel closes its connection then, after its
memory was freed, which is taken at once.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import threading
from types import TracebackType

import numpy as np

VARIABLE = "WAYSTATION_BENCHMARK_RESERVOIR"
MOST_OF_THE_MACHINE = 4
"""It holds one such part of the machine's memory at most: agents and peers of a run need theirs meanwhile."""

_REQUEST = struct.Struct("<Q")
_used: list[socket.socket] = []


class Reservoir:
    """`with Reservoir():`; processes that are started inside find it."""

    def __init__(self) -> None:
        self._limit = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE // MOST_OF_THE_MACHINE
        self._listener = socket.socket(socket.AF_UNIX)
        self._user: socket.socket | None = None
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
        for connection in (self._listener, self._user):
            with contextlib.suppress(OSError):  # it has no other end any more
                if connection is not None:
                    connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        held: mmap.mmap | None = None
        while True:
            try:
                user, _ = self._listener.accept()
            except OSError:
                return
            self._user = user
            with user, contextlib.suppress(OSError):
                request = user.recv(_REQUEST.size, socket.MSG_WAITALL)
                if len(request) < _REQUEST.size:
                    continue
                if held is not None:
                    held.close()
                user.sendall(b"\0")
                user.recv(1)  # until it has ended
                held = hold(min(_REQUEST.unpack(request)[0], self._limit))


def hold(nbytes: int) -> mmap.mmap:
    """Memory that is really there, in whole pages; closing it gives it back."""
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    pages = np.frombuffer(memory, np.uint8)
    pages[:: mmap.PAGESIZE] = 1
    del pages  # or the memory could not be given back
    return memory


def use(nbytes: int) -> None:
    """Has the session's reservoir freed, if there is one, until this process ends or `end_use`.

    Args:
        nbytes: How much will be needed: so much is held for the next run.
    """
    end_use()
    name = os.environ.get(VARIABLE)
    if name is None:
        return
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(f"\0{name}")
        connection.sendall(_REQUEST.pack(nbytes))
        connection.recv(1)
    except OSError:  # the session is ending
        connection.close()
    else:
        _used.append(connection)


def end_use() -> None:
    """What this process had of the reservoir goes back to it."""
    while _used:
        _used.pop().close()
