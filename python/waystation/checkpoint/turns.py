"""Turns: what concurrent loads of one process do in the order in which they were called.

Some places for arrays can only be made by all processes together, in the same order: torch's device meshes
with their process groups. Loads run in threads of their own, which no two processes schedule alike; but the
program calls them in the same order everywhere. So each load takes a turn when it is called, and makes such
places only when all earlier loads have made theirs, or have ended.

Invariants: a turn depends on earlier ones only, so none waits in a circle; every turn that was taken ends.
A child process that was forked begins with none: the threads that would end its parent's turns are not in it.
"""

from __future__ import annotations

import os
import threading
from collections import deque


class _Queue:
    """The turns that have not ended, in the order in which they were taken."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begins without turns, with a condition that no thread holds."""
        self.condition = threading.Condition()
        self.waiting: deque[Turn] = deque()


_queue = _Queue()
os.register_at_fork(after_in_child=_queue.begin)


class Turn:
    """The turn of one load; taken when it is made."""

    def __init__(self) -> None:
        with _queue.condition:
            _queue.waiting.append(self)

    def wait(self) -> None:
        """Waits until all earlier turns have ended."""
        with _queue.condition:
            waiting = _queue.waiting
            _queue.condition.wait_for(lambda: self not in waiting or waiting[0] is self)

    def end(self) -> None:
        """Lets the next one go on; idempotent, and possible before it was one's turn."""
        with _queue.condition:
            if self in _queue.waiting:
                _queue.waiting.remove(self)
                _queue.condition.notify_all()
