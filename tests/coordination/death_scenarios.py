"""What the processes of the tests do of which some die, and a store that counts, and kills on demand."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections import Counter
from typing import Any

from tests.coordination.rounds import DEADLINE_S, attempt, open_session, try_round
from tests.support.programs import Place

from waystation.coordination import liveness, store_session, torch_distributed
from waystation.coordination.store_session import StoreSession

NOT_LONG_S = 30.0


class CountingStore:
    """Counts the calls of a store, asking again for the same key as one; may end its process at one."""

    def __init__(self, store: Any, kill_before: int | None = None) -> None:
        self._store = store
        self._kill_before = kill_before
        self._last: Any = None
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._store, name)
        if name not in ("set", "set_once", "add", "get", "read", "delete"):
            return attribute

        def call(*arguments: Any) -> Any:
            this = (name, arguments[0])
            if name != "get" or this != self._last:
                if self.calls.total() == self._kill_before:
                    os.kill(os.getpid(), signal.SIGKILL)
                self.calls[name] += 1
            self._last = this
            return attribute(*arguments)

        return call


def counted(place: Place) -> dict[str, int]:
    """The calls of this process in ten rounds."""
    place.connect()
    session = open_session("ten rounds")
    session.barrier()  # the first is different
    store = CountingStore(session._store)
    session._store = store
    for _ in range(10):
        session.round(lambda: bytes(1000), lambda parts: bytes(1000))
    calls = dict(store.calls)
    session.close()
    place.report("done")
    place.receive()
    place.disconnect()
    return calls


def get_to_know_each_other(session: StoreSession) -> None:
    """As it is when the first save takes more than an instant: all know of those whom they watch."""
    session.barrier()
    until = time.monotonic() + DEADLINE_S
    for index in {0, *session._watched}:
        while "pid" not in session._store.describe(index):
            assert time.monotonic() < until, "a process does not register"
            time.sleep(0.005)
    session.barrier()


def killed_at(place: Place, victim: int, primary: int, call: int | None) -> dict[str, Any]:
    """Two rounds, in which the victim dies before one of its calls of the store, if any."""
    liveness.BEAT_INTERVAL_S = 0.02
    torch_distributed.ANSWER_S = 10.0
    place.connect()
    session = open_session("a save with a death", primary=primary)
    store = CountingStore(session._store, call if place.index == victim else None)
    outcomes: list[Any] = []
    get_to_know_each_other(session)
    place.report("known")
    place.receive()  # once all have come here: the victim may take the store with it
    session._store = store
    for number in range(2):
        outcome = attempt(
            lambda number=number: session.round(  # type: ignore[misc]
                lambda: b"%d" % number, b",".join
            )
        )
        outcomes.append(outcome)
        if not isinstance(outcome, bytes):
            break
    session.close()
    return {"outcomes": outcomes, "calls": store.calls.total()}


def killed_by_signal(place: Place, victim: int) -> Any:
    """The test kills the victim in its work, while the others wait."""
    liveness.BEAT_INTERVAL_S = 0.02
    torch_distributed.ANSWER_S = 10.0
    place.connect()
    session = open_session("a save with a death")
    get_to_know_each_other(session)

    def work() -> bytes:
        place.report("working")
        if place.index == victim:
            time.sleep(2 * DEADLINE_S)
        return b""

    # Closed as every operation closes its own: process 0, which holds the store, lets the others leave first.
    with contextlib.closing(session):
        session.round(work, lambda parts: b"")


def frozen_host(place: Place, waiting: bool) -> Any:
    """The test stops process 0, which holds the store, without closing its connections: when the others
    have begun to wait for it, or before they hand in their parts."""
    liveness.BEAT_INTERVAL_S = 0.02
    torch_distributed.ANSWER_S = 1.0
    place.connect()
    session = open_session("a save without answers")
    get_to_know_each_other(session)

    def work() -> bytes:
        place.report("ready")
        if place.index == 0 or not waiting:
            place.receive()
        return b""

    outcome = attempt(lambda: session.round(work, lambda parts: b""))
    session.close()
    return outcome


def late_registration(place: Place) -> Any:
    """Process 1 ends well before it ever opens a session."""
    liveness.BEAT_INTERVAL_S = 0.1
    place.connect()
    if place.index == 1:
        return None
    return try_round("a save without process 1", lambda: b"", deadline_s=1.0)


def never_comes(place: Place, deadline_s: float) -> Any:
    """Process 1 makes no call. Process 0, which holds the store, waits for it and does not stay any longer.

    Returns:
        Of process 0 what it raises, what it logs, and how long it took after the deadline or the interrupt.
    """
    store_session.FAREWELL_S = 2 * NOT_LONG_S
    store_session.TELL_AFTER_S = 0.1
    place.connect()
    if place.index == 1:
        place.receive()
        return None
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("waystation").addHandler(handler)

    def work() -> bytes:
        place.report("working")
        return b""

    begun = time.monotonic()
    outcome = try_round("a save without process 1", work, deadline_s=deadline_s)
    return outcome, told, time.monotonic() - begun
