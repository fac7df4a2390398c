"""The coordinator over a key-value store: it numbers sessions, so that all processes find the same ones.

Processes that disagree on what their n-th session is for have made different calls, so that their numbers no
longer mean the same call. They all end that numbering, and begin the next at 0: see `store`.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Collection, Iterator

from waystation import _forks
from waystation.coordination import round_errors
from waystation.coordination.base import Session, participants
from waystation.coordination.single import SingleSession
from waystation.coordination.store import Store
from waystation.coordination.store_session import Numbering, StoreSession

ADVICE = (
    "a forked process has no part in that. Begin processes that save or load by themselves by 'spawn' or "
    "'forkserver', or name this process alone in multiprocessing.active_processes and primary_host"
)


class StoreCoordinator:
    """Opens sessions over a store, numbered in the order of opening within their sequence.

    Those of some of the processes are numbered by themselves, as the others do not open them.
    """

    def __init__(self, store: Store, process_index: int, process_count: int) -> None:
        self.process_index = process_index
        self.process_count = process_count
        self._store = store
        self._owner = _forks.Owner()
        self._lock = threading.Lock()
        _forks.watch(self)
        self._numberings: dict[str, Numbering] = {}  # that of each sequence by which it numbers now
        generation = store.add(f"waystation/generation/{process_index}", 1)
        self._prefix = f"waystation/{generation}"
        store.join(f"{self._prefix}/liveness", process_index)

    def begin_in_child(self) -> None:
        """See `waystation._forks.Watched`: sessions of one process alone can be opened all the same."""
        self._lock = threading.Lock()

    def open(
        self,
        what: str,
        *,
        deadline_s: float,
        primary: int = 0,
        sequence: str = "",
        processes: Collection[int] | None = None,
    ) -> Session:
        """Opens the next session; nothing is asked of the other processes before its first round."""
        chosen = participants(
            what,
            processes,
            primary=primary,
            process_index=self.process_index,
            process_count=self.process_count,
        )
        if len(chosen) == 1:
            return SingleSession(self.process_index)
        self._owner.require("what the processes of this program talk through", ADVICE)
        # Any text can name a sequence; not any is part of a key, nor are thousands of numbers.
        named = f"named/{sequence.encode().hex()}/" if sequence else ""
        if len(chosen) < self.process_count:
            named += f"of/{hashlib.sha256(repr(chosen).encode()).hexdigest()[:16]}/"
        with self._lock:
            numbering = self._numberings.get(named)
            if numbering is None or numbering.ended_at is not None:
                index = 0 if numbering is None else numbering.index + 1
                numbering = self._numberings[named] = Numbering(f"{self._prefix}/{named}{index}", index)
            number = numbering.opened
            numbering.opened += 1
        own = chosen.index(self.process_index)
        return StoreSession(
            self._store, numbering, number, what, chosen, own, chosen.index(primary), deadline_s
        )

    @contextlib.contextmanager
    def watching(self, what: str, processes: Collection[int]) -> Iterator[Callable[[], None]]:
        """Watches processes, see `Coordinator.watching`."""
        self._owner.require("what the processes of this program talk through", ADVICE)
        others = sorted(set(processes) - {self.process_index})
        self._store.begin(others)

        def require_alive() -> None:
            dead = self._store.dead(others)
            if dead:
                raise round_errors.deaths(what, dead, self._store.describe)
            self._store.get(f"{self._prefix}/nothing", 0)  # fails if the process with the store has died

        try:
            yield require_alive
        finally:
            self._store.end(others)
