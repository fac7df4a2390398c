"""Who of the processes still runs, as far as it can be told without their help.

Each process registers once in the store: its host, process id and start time. While it has sessions open, a
thread of its own changes a value in the store (a *beat*), and looks at the beats of the processes that
its sessions depend on. It begins so after a quarter of a beat's interval: sessions that are shorter, as those
of most loads are, cost the store nothing. Two things prove a death:

- A process of this machine no longer runs. The process table tells at once, and start times tell apart
  processes that were given the same id.
- A process of another machine, with sessions open, has not beaten for `SILENCE_S`.

Silence of a process of this machine proves nothing, as long as it runs: it may be stopped, or hold the
interpreter's lock. A process without open sessions does not beat; that it is gone from another machine is
then only seen when it misses a deadline.

Invariants: clocks of different machines are never compared; a process is only called silent right after
its beat has been read, so that a pause of this process looks like no pause of another.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from waystation import _forks, _processes
from waystation._errors import WaystationError

BEAT_INTERVAL_S = 1.0
SILENCE_S = 10.0

_IDLE = b"idle"
_JOIN_S = 2.0


class Board(Protocol):
    """The part of a store that liveness needs."""

    def set(self, key: str, value: bytes) -> None:
        """Puts a value, in place of an earlier one."""
        ...

    def read(self, directory: str, names: Sequence[str]) -> list[bytes | None]:
        """The values that are there now."""
        ...


@dataclass(frozen=True, slots=True)
class Registration:
    """A process as the operating system knows it.

    Attributes:
        host: Name of its machine.
        system: Identifies the set of processes among which an id and a start time mean one process;
            empty where this cannot be told.
        process_id: The operating system's.
        start: When it started, in that system's own measure.
    """

    host: str
    system: str
    process_id: int
    start: str

    @classmethod
    def of_this_process(cls) -> Registration:
        """The registration of the process that asks."""
        process_id = os.getpid()
        return cls(_processes.host_name(), _system(), process_id, _start(process_id))

    def has_ended(self) -> bool:
        """Whether the process provably runs no longer; False for those of other systems."""
        if not self.system or not self.start or self.system != _system():
            return False
        return not _processes.may_run(self.process_id, self.start)


class Liveness:
    """Beats for this process, and watches others, while sessions are open."""

    def __init__(self, board: Board, prefix: str, process_index: int) -> None:
        self._board = board
        self._prefix = prefix
        self._process_index = process_index
        self._lock = threading.Lock()
        self._watched: Counter[int] = Counter()
        self._sessions = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._registered = False
        self._registrations: dict[int, Registration] = {}
        self._silent: set[int] = set()
        _living.add(self)
        _forks.watch(self)

    def begin_in_child(self) -> None:
        """See `waystation._forks.Watched`: nothing of the child beats, or stops what does."""
        _living.discard(self)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = None

    def begin(self, watched: Sequence[int]) -> bool:
        """A session begins that depends on these processes; returns whether it is the only one."""
        with self._lock:
            self._watched.update(watched)
            self._sessions += 1
            if self._sessions > 1:
                return False
            self._stop = threading.Event()
            self._silent = set()
            self._thread = threading.Thread(
                target=self._run, args=(self._stop,), name="waystation-liveness", daemon=True
            )
            self._thread.start()
            return True

    def end(self, watched: Sequence[int]) -> bool:
        """It has ended; returns whether it was the last that was open."""
        with self._lock:
            self._watched.subtract(watched)
            self._watched += Counter()  # drops those that nobody watches any more
            self._sessions -= 1
            if self._sessions:
                return False
        self.stop()
        return True

    def stop(self) -> None:
        """Stops the thread; returns once it is out of the store, which is usually at once."""
        self._stop.set()
        thread = self._thread
        if thread is not None:
            thread.join(_JOIN_S)

    def dead(self, processes: Sequence[int]) -> dict[int, str]:
        """Those of the watched processes that have died, each with how that is known."""
        found = {}
        for index in processes:
            registration = self._registrations.get(index)
            if registration is not None and registration.has_ended():
                found[index] = "has died: it no longer runs"
            elif index in self._silent:
                found[index] = (
                    f"gives no sign of life since more than {SILENCE_S:g} s: "
                    "it has died, or its machine cannot be reached"
                )
        return found

    def seen_here(self, processes: Sequence[int]) -> dict[int, bool]:
        """Whether each has ended, of any processes, watched or not, that registered on this machine."""
        told = zip(processes, self._read("process", processes), strict=True)
        registered = {index: Registration(**json.loads(value)) for index, value in told if value is not None}
        here = _system()
        return {
            index: registration.has_ended()
            for index, registration in registered.items()
            if registration.system == here != ""
        }

    def describe(self, process: int) -> str:
        """The process for people, with its id and host if they are known."""
        known = self._registrations.get(process)
        if known is None:
            return f"process {process}"
        return f"process {process} (pid {known.process_id} on {known.host})"

    def _run(self, stop: threading.Event) -> None:
        """Beats and looks until it is stopped, or the store is gone, which every session notices itself."""
        beats: dict[int, tuple[bytes, float]] = {}
        try:
            self._register()
            if stop.wait(BEAT_INTERVAL_S / 4):
                return
            while not stop.is_set():
                self._beat(b"%d" % time.monotonic_ns())
                self._look(beats)
                stop.wait(BEAT_INTERVAL_S)
            self._beat(_IDLE)
        except WaystationError:
            return

    def _register(self) -> None:
        if not self._registered:
            own = json.dumps(asdict(Registration.of_this_process())).encode()
            self._board.set(f"{self._prefix}/process/{self._process_index}", own)
            self._registered = True

    def _beat(self, beat: bytes) -> None:
        self._board.set(f"{self._prefix}/beat/{self._process_index}", beat)

    def _look(self, beats: dict[int, tuple[bytes, float]]) -> None:
        with self._lock:
            watched = sorted(self._watched)
        # Process 0 is looked up too, since most stores are in it.
        unknown = sorted({0, *watched} - self._registrations.keys())
        for index, told in zip(unknown, self._read("process", unknown), strict=True):
            if told is not None:
                self._registrations[index] = Registration(**json.loads(told))
        read = self._read("beat", watched)
        now = time.monotonic()
        silent = set()
        for index, beat in zip(watched, read, strict=True):
            if beat is None or beat == _IDLE:
                beats.pop(index, None)
                continue
            last, since = beats.get(index, (None, now))
            if beat != last:
                since = now
            beats[index] = (beat, since)
            if now - since > SILENCE_S and not self._runs_here(index):
                silent.add(index)
        self._silent = silent

    def _runs_here(self, index: int) -> bool:
        """Whether a process is of this machine, where the process table knows better."""
        registration = self._registrations.get(index)
        return registration is not None and registration.system == _system() != ""

    def _read(self, kind: str, processes: Sequence[int]) -> list[bytes | None]:
        if not processes:
            return []
        return self._board.read(f"{self._prefix}/{kind}", [str(index) for index in processes])


_living: weakref.WeakSet[Liveness] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stops the threads of sessions that a failing program never closed: one that is in the store when the
    interpreter ends would abort the process."""
    for liveness in list(_living):
        liveness.stop()


class Watching:
    """What a store knows of who still runs: the methods of `Store` that are the same over any of them."""

    _liveness: Liveness | None = None

    def join(self: Any, prefix: str, process_index: int) -> None:
        """This process takes part, with keys that begin like that."""
        self._liveness = Liveness(self, prefix, process_index)

    def begin(self, watched: Sequence[int]) -> bool:
        """A session begins, which has to know if one of these processes dies; returns whether it is the only
        one that is open."""
        return self._liveness is not None and self._liveness.begin(watched)

    def end(self, watched: Sequence[int]) -> bool:
        """It has ended; returns whether it was the last that was open."""
        return self._liveness is not None and self._liveness.end(watched)

    def dead(self, processes: Sequence[int]) -> dict[int, str]:
        """Those of the watched processes that have died, each with how that is known."""
        return {} if self._liveness is None else self._liveness.dead(processes)

    def note_failure(self, dead: Sequence[int]) -> None:
        """A round has failed. Nothing follows from that in a framework whose end waits for nobody."""

    def describe(self, process: int) -> str:
        """The process for people, with its id and host if they are known."""
        # The store may be gone before this process could join.
        return f"process {process}" if self._liveness is None else self._liveness.describe(process)


def _system() -> str:
    try:
        return _processes.system()
    except OSError:
        return ""  # no /proc: processes of this machine are watched like those of others


def _start(process_id: int) -> str:
    try:
        return _processes.start_time(process_id)
    except (OSError, IndexError):
        return ""
