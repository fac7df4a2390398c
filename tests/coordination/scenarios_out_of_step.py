"""What the processes of the tests do that make different calls, and go on."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from tests.coordination.death_scenarios import CountingStore, get_to_know_each_other
from tests.coordination.rounds import (
    DEADLINE_S,
    SHORT_DEADLINE_S,
    attempt,
    come_together,
    open_session,
    try_round,
)
from tests.coordination.scenarios import left_in_store
from tests.support import programs
from tests.support.programs import Place

from waystation.coordination import liveness, torch_distributed
from waystation.errors import NotFound


def all_cases(place: Place) -> dict[str, Any]:
    """One after the other; what follows each finds the processes in step again."""
    torch_distributed.ANSWER_S = programs.HANG_S
    place.connect()
    seen: dict[str, Any] = {}
    for case in (other_numbers_of_sessions, slow_process, failure_of_another_call, calls_behind):
        seen[case.__name__] = case(place)
        seen[f"after {case.__name__}"] = [save("/c"), load("/c"), save("/d")]
    place.report("closed")
    place.receive()  # so has everybody
    seen["left"] = left_in_store()
    place.report("looked")
    place.receive()
    place.disconnect()
    return seen


def save(path: str, fail: bool = False) -> Any:
    """Opens two sessions, and uses one."""
    session, ending = open_session(f"save '{path}'"), open_session(f"the end of: save '{path}'")

    def work() -> bytes:
        if fail:
            raise NotFound(f"nothing to save at '{path}'")
        return b"saved"

    def use() -> Any:
        with contextlib.closing(ending), contextlib.closing(session):
            return session.round(work, lambda parts: parts[0])

    return attempt(use)


def load(path: str) -> Any:
    return try_round(f"load '{path}'", lambda: b"loaded", lambda parts: parts[0])


def wait_for(path: Path) -> None:
    """Until another process has made a file."""
    until = time.monotonic() + DEADLINE_S
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)


def other_numbers_of_sessions(place: Place) -> Any:
    """One process calls load, which opens one session, while the others call save, which opens two."""
    return save("/a") if place.index != 1 else load("/b")


def slow_process(place: Place) -> Any:
    """The last process comes to the call when the others have been told that they are out of step."""
    told = place.directory / f"{place.ports[-1]}-told"
    if place.index == place.count - 1 > 1:
        wait_for(told)
    outcome = save("/a") if place.index != 1 else load("/b")
    told.touch()
    return outcome


def failure_of_another_call(place: Place) -> Any:
    """Process 0 fails in a save, of which the others make none, and hears of that in its next call."""
    failed = place.directory / f"{place.ports[-1]}-failed"
    if place.index == 0:
        outcome = save("/a", fail=True)
        failed.touch()
        return outcome, save("/c")
    wait_for(failed)
    return load("/b"), None


def calls_behind(place: Place) -> Any:
    """The others have given up two saves when the last process comes to the first; then they disagree."""
    given_up = [place.directory / f"{place.ports[-1]}-{number}-given-up" for number in range(2)]
    come_together()
    if place.index == place.count - 1:
        wait_for(given_up[1])
    late = []
    for path in given_up:
        late.append(try_round("a late save", lambda: b"", deadline_s=SHORT_DEADLINE_S))
        path.touch()
    return [*late, save("/a") if place.index != 1 else load("/b")]


def killed(place: Place, victim: int) -> Any:
    """The test kills the victim when the others are out of step, and waits itself for two of them."""
    place.connect()
    come_together()
    if place.index == victim:
        place.report("ready")
        place.receive()
    seen = [save("/a") if place.index == 0 else load("/b"), save("/c")]
    place.report("done")
    place.receive()  # process 0 may take the store with it
    return seen


def killed_while_telling(place: Place, call: int) -> dict[str, Any]:
    """Processes 0 and 1 are out of step, and 1 dies before one of its calls of the store; then comes 2."""
    liveness.BEAT_INTERVAL_S = 0.02
    place.connect()
    session = open_session("getting to know each other")
    get_to_know_each_other(session)
    session.close()
    told = place.directory / f"{place.ports[-1]}-told"
    if place.index == 2:
        wait_for(told)
    session = open_session("save '/a'" if place.index == 0 else "load '/b'")
    if place.index == 1:
        session._store = CountingStore(session._store, call)
    first = attempt(lambda: session.round(lambda: b"", b"".join))
    session.close()
    told.touch()
    seen = {"first": first, "second": try_round("save '/c'", lambda: b"c", b"".join)}
    place.report("done")
    place.receive()
    return seen
