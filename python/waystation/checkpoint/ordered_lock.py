"""A lock that the concurrent loads of a process hold in the order in which the program called them.

Some places for arrays, such as torch's device meshes with their process groups, are made by all processes
together and in the same order. Each load runs in its own thread, and no two processes schedule threads
alike, but the program calls the loads in the same order in every process. So a load takes a ticket when it is
called, and makes such places once all earlier tickets have ended.

Invariants: a ticket waits for earlier tickets only, so waits form no circle; every ticket that is taken ends.
A forked child begins without tickets, because the threads that would end its parent's are not in it.
"""

from __future__ import annotations

import os
import threading
from collections import deque


class _Queue:
    """The tickets that have not ended, in the order in which they were taken."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begins without tickets, with a condition that no thread holds."""
        self.condition = threading.Condition()
        self.waiting: deque[Ticket] = deque()


_queue = _Queue()
os.register_at_fork(after_in_child=_queue.begin)


class Ticket:
    """The place of one load in the order; taken when it is made."""

    def __init__(self) -> None:
        with _queue.condition:
            _queue.waiting.append(self)

    def wait(self) -> None:
        """Waits until all earlier tickets have ended."""
        with _queue.condition:
            waiting = _queue.waiting
            _queue.condition.wait_for(lambda: self not in waiting or waiting[0] is self)

    def end(self) -> None:
        """Lets the next ticket go on. Idempotent, and allowed before all earlier tickets have ended."""
        with _queue.condition:
            if self in _queue.waiting:
                _queue.waiting.remove(self)
                _queue.condition.notify_all()
