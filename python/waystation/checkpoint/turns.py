"""Turns: what concurrent loads of one process do in the order in which they were called.

Some places for arrays can only be made by all processes together, in the same order: torch's device meshes
with their process groups. Loads run in threads of their own, which no two processes schedule alike; but the
program calls them in the same order everywhere. So each load takes a turn when it is called, and makes such
places only when all earlier loads have made theirs, or have ended.

Invariants: a turn depends on earlier ones only, so none waits in a circle; every turn that was taken ends.
"""

from __future__ import annotations

import threading
from collections import deque

_condition = threading.Condition()
_waiting: deque[Turn] = deque()


class Turn:
    """The turn of one load; taken when it is made."""

    def __init__(self) -> None:
        with _condition:
            _waiting.append(self)

    def wait(self) -> None:
        """Waits until all earlier turns have ended."""
        with _condition:
            _condition.wait_for(lambda: self not in _waiting or _waiting[0] is self)

    def end(self) -> None:
        """Lets the next one go on; idempotent, and possible before it was one's turn."""
        with _condition:
            if self in _waiting:
                _waiting.remove(self)
                _condition.notify_all()
