"""What a discrete-event model is made of: a clock, machines with cores, and processes that do one thing at
a time.

Nothing here knows the runtime. Events of one instant happen in the order in which they were set, so a run
with the same seed is the same run.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from itertools import count

Action = Callable[[], None]


class Clock:
    """Virtual time.

    Attributes:
        now_s: What time it is, in seconds.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Action]] = []
        self._numbers = count()

    def after(self, seconds: float, action: Action) -> None:
        """Sets an event."""
        heapq.heappush(self._events, (self.now_s + seconds, next(self._numbers), action))

    def run(self) -> None:
        """Goes on until nothing is set any more."""
        while self._events:
            self.now_s, _, action = heapq.heappop(self._events)
            action()


class Machine:
    """Cores, which whoever wants to compute gets in turn.

    Args:
        clock: The time.
        cores: How many there are.
    """

    def __init__(self, clock: Clock, cores: int) -> None:
        self._clock = clock
        self._free = cores
        self._waiting: deque[tuple[float, Action]] = deque()

    def compute(self, seconds: float, then: Action) -> None:
        """Keeps a core busy for so long, once one is free."""
        self._waiting.append((seconds, then))
        self._begin()

    def _begin(self) -> None:
        while self._free and self._waiting:
            seconds, then = self._waiting.popleft()
            self._free -= 1
            self._clock.after(seconds, lambda then=then: self._end(then))  # type: ignore[misc]

    def _end(self, then: Action) -> None:
        self._free += 1
        then()
        self._begin()


class Process:
    """One thread of a machine: what it is given it does in turn.

    Args:
        machine: Where it is.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._waiting: deque[tuple[float, Action]] = deque()
        self._busy = False

    def do(self, seconds: float, then: Action) -> None:
        """Takes so much of a core, after everything that was given before."""
        self._waiting.append((seconds, then))
        self._begin()

    def _begin(self) -> None:
        if self._busy or not self._waiting:
            return
        self._busy = True
        seconds, then = self._waiting.popleft()

        def end() -> None:
            self._busy = False
            then()
            self._begin()

        self.machine.compute(seconds, end)
