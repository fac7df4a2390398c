"""How the clocks of machines lie to each other, from messages that are answered at once.

Processes of one machine have one monotonic clock. Between machines the offset is estimated from a round trip
(Cristian, Distributed Computing 1989): the answer was given somewhere between the question and its arrival,
so the middle is wrong by at most half of the round trip. The shortest of the last ones counts; that clocks
drift meanwhile is not taken into account, and comes to microseconds in the minute that they span.
"""

from __future__ import annotations

import functools
import os
from collections import deque

from waystation import _processes

_SAMPLES = 64


@functools.cache
def machine() -> str:
    """What is the same for all processes that have one monotonic clock: a boot, and a time namespace."""
    try:
        boot = _processes.boot_id()
        namespace = os.readlink("/proc/self/ns/time")
    except OSError:
        return f"process {os.getpid()}"  # it cannot be known, so nobody shares it
    return f"{boot} {namespace}"


class Clock:
    """The clock of another process, seen from here."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, int]] = deque(maxlen=_SAMPLES)  # round trip, offset
        self._is_shared = False

    def observe(self, asked_ns: int, answered_ns: int, clock_ns: int, its_machine: str) -> None:
        """An answer has come.

        Args:
            asked_ns: When it was asked for, by the clock here.
            answered_ns: When it came, likewise.
            clock_ns: What the other clock said.
            its_machine: Where that is.
        """
        self._is_shared = its_machine == machine()
        self._samples.append((answered_ns - asked_ns, clock_ns - (asked_ns + answered_ns) // 2))

    @property
    def offset_ns(self) -> int:
        """How much more it says than the clock here, in nanoseconds; 0 for a clock that is the same."""
        return 0 if self._is_shared or not self._samples else min(self._samples)[1]

    @property
    def uncertainty_ns(self) -> int:
        """By how much the offset may be wrong, in nanoseconds."""
        return 0 if self._is_shared or not self._samples else -(-min(self._samples)[0] // 2)
