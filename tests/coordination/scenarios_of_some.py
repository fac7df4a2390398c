"""What the processes of the tests do of which only some have a session."""

from __future__ import annotations

import time
from typing import Any

from tests.coordination.rounds import (
    DEADLINE_S,
    SHORT_DEADLINE_S,
    attempt,
    come_together,
    open_session,
    try_round,
)
from tests.support.programs import Place

from waystation.errors import NotFound


def sessions_of_some(place: Place) -> Any:
    """Each process alone, and process 0 with the last one; the others have never heard of that."""
    last = place.count - 1
    alone = open_session("work alone", processes={place.index}, primary=place.index)
    seen: dict[str, Any] = {
        "alone": (alone.process_index, alone.process_count, alone.processes),
        "decided alone": alone.round(lambda: b"x", b"+".join),
        "absent": attempt(lambda: open_session("work", processes={place.index, 99}, primary=place.index)),
        "other": attempt(lambda: open_session("work", processes={(place.index + 1) % place.count})),
        "primary": attempt(
            lambda: open_session("work", processes={1}, primary=0) if place.index == 1 else None
        ),
    }
    alone.close()
    if place.index not in (0, last):
        return seen
    pair = {0, last}

    def fail() -> bytes:
        raise NotFound("not there")

    for number in range(2):
        session = open_session(f"work {number} of two", processes=pair, primary=last)
        seen[f"pair {number}"] = (
            session.process_index,
            session.process_count,
            session.processes,
            session.is_primary,
            session.round(lambda: b"%d" % place.index, b"+".join),
            session.gather(b"%d" % place.index),
        )
        session.close()
    seen["failed"] = try_round("fail", fail if place.index == last else lambda: b"", processes=pair)
    seen["out of step"] = try_round(f"work of {place.index}", lambda: b"", processes=pair)
    return seen


def deadline_of_some(place: Place) -> Any:
    """The last process comes when process 0 has given up; they alone are waited for."""
    last = place.count - 1
    given_up = place.directory / f"{place.ports[-1]}-given-up-of-some"
    come_together()
    if place.index == last:
        until = time.monotonic() + DEADLINE_S
        while not given_up.exists() and time.monotonic() < until:
            time.sleep(0.01)
    if place.index in (0, last):
        options = {"deadline_s": SHORT_DEADLINE_S, "processes": {0, last}}
        return try_round("a round of two", lambda: b"", then=given_up.touch, **options)
    return None
