"""How the processes of the tests open sessions and take part in rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.programs import raised

from waystation import coordination

DEADLINE_S = 60.0
SHORT_DEADLINE_S = 1.0  # to be missed


def open_session(what: str, **options: Any) -> Any:
    return coordination.current().open(what, **{"deadline_s": DEADLINE_S, **options})


def come_together() -> None:
    """Waits for all processes, before a round whose deadline is to be missed by one of them alone."""
    session = open_session("coming together")
    session.barrier()
    session.close()


def attempt(function: Callable[[], Any]) -> Any:
    """What a function returns or raises."""
    try:
        return function()
    except BaseException as error:
        return raised(error)


def try_round(
    what: str, work: Callable[[], bytes], decide: Any = b" ".join, then: Any = None, **options: Any
) -> Any:
    session = open_session(what, **options)
    outcome = attempt(lambda: session.round(work, decide))
    if then is not None:
        then()
    session.close()
    return outcome
