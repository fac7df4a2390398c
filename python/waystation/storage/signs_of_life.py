"""Leases on what stands in a file system that several machines share, which their owners renew.

The table of processes of a machine proves nothing there: a copy of a virtual machine can have the name, the
boot and the namespaces of its original, and both can have the file system. So what a process has put into
such a file system is given up by itself, or counts as dead once it has not been renewed for `EXPIRES_S`. An
owner renews all that it has each `HEARTBEAT_S`, from one thread.

What that assumes of clocks: times of renewals are those of the file system, so its clock counts, and has to
run on; where the clock of this machine says that less time has passed, that counts. An owner that is stopped
for ten minutes, or cannot reach the file system for so long, loses what it was writing, and its save fails.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path

from waystation import _forks
from waystation._errors import Unavailable

HEARTBEAT_S = 60.0
EXPIRES_S = 600.0

# Only one kernel can have these mounted. Whatever else there is, known or not, counts as shared.
_LOCAL_FILE_SYSTEMS = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "tmpfs", "ramfs", "overlay"}
)


class Heartbeat:
    """Renews what this process holds, from one thread, which lives as long as there is anything."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[Hashable, Callable[[], None]] = {}
        self._stop = threading.Event()
        _forks.watch(self)

    def begin_in_child(self) -> None:
        """See `waystation._forks.Watched`: what the parent holds is for its own thread."""
        self._lock = threading.Lock()
        self._held = {}
        self._stop = threading.Event()

    def begin(self, held: Hashable, touch: Callable[[], None]) -> None:
        """Calls `touch` each `HEARTBEAT_S` from now on, until `end` of the same.

        Raises:
            Unavailable: The system starts no thread.
        """
        with self._lock:
            if not self._held:
                self._stop = threading.Event()
                thread = threading.Thread(
                    target=self._beat, args=(self._stop,), name="waystation: leases", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError as error:
                    raise Unavailable(
                        f"could not start a thread to renew leases: {error}; allow more processes (ulimit -u)"
                    ) from error
            self._held[held] = touch

    def end(self, held: Hashable) -> None:
        """Does not call it any more; once is enough."""
        with self._lock:
            self._held.pop(held, None)
            if not self._held:
                self._stop.set()

    @contextlib.contextmanager
    def of(self, held: Hashable, touch: Callable[[], None]) -> Iterator[None]:
        """Calls `touch` each `HEARTBEAT_S` within the block."""
        self.begin(held, touch)
        try:
            yield
        finally:
            self.end(held)

    def _beat(self, stop: threading.Event) -> None:
        while not stop.wait(HEARTBEAT_S):
            with self._lock:
                held = list(self._held.values())
            self._touch_all(held)

    def _touch_all(self, held: Sequence[Callable[[], None]]) -> None:
        for touch in held:
            with contextlib.suppress(OSError):
                touch()


HEARTBEAT = Heartbeat()


def is_shared(path: str) -> bool:
    """Whether other machines may have the file system that holds a path; True where that cannot be told."""
    return _kind(path) not in _LOCAL_FILE_SYSTEMS


def has_run_out(path: str) -> bool:
    """Whether a file was not renewed for `EXPIRES_S`, by the clock of its file system.

    False where that clock cannot be asked: who cannot write there removes nothing there.
    """
    try:
        renewed = os.stat(path).st_mtime
        if time.time() - renewed <= EXPIRES_S:
            return False
        with tempfile.TemporaryFile(dir=os.path.dirname(path)) as file:
            return os.fstat(file.fileno()).st_mtime - renewed > EXPIRES_S
    except OSError:
        return False


def _kind(path: str) -> str | None:
    """Type of the file system that holds `path`, as mount tables name it; None if it cannot be told."""
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            described = Path(f"/proc/self/fdinfo/{opened}").read_text().split()
        finally:
            os.close(opened)
        mount = described[described.index("mnt_id:") + 1]
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            left, _, right = line.partition(" - ")
            if left.split()[0] == mount:
                return right.split()[0]
    except (OSError, IndexError, ValueError):
        pass
    return None
