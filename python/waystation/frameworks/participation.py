"""Whether all processes of the program take part in what goes on: only then can what needs all be made.

Where some of the processes load (`multiprocessing.active_processes`), the others would never come to make a
process group with them. Invariant: the answer is that of the load whose thread asks.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

from waystation._errors import InvalidInput

_all_take_part: contextvars.ContextVar[bool] = contextvars.ContextVar("all_take_part", default=True)


@contextlib.contextmanager
def participation(*, of_all: bool) -> Iterator[None]:
    """Within it, all processes of the program take part in what goes on, or some."""
    before = _all_take_part.set(of_all)
    try:
        yield
    finally:
        _all_take_part.reset(before)


def require_all(what: str) -> None:
    """Refuses to make what needs all processes, where only some take part.

    Args:
        what: What would be made.

    Raises:
        InvalidInput: Only some take part.
    """
    if not _all_take_part.get():
        raise InvalidInput(
            f"{what} can only be made by all processes of the program, and only "
            "multiprocessing.active_processes load; give an abstract state, with what these have already"
        )
