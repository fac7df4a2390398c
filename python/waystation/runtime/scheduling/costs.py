"""What runs of a program take, learned from those that have been."""

from __future__ import annotations

from collections import OrderedDict

# Of a program that has never run. Wrong at most once, and the difference is charged afterwards.
FIRST_GUESS_SECONDS = 1e-3
_NEWEST_SHARE = 0.25
_MOST_PROGRAMS = 4096


class CostEstimates:
    """A moving average of measured device time for each program.

    Of more than 4,096 programs, the one whose runs ended longest ago is forgotten.
    """

    def __init__(self) -> None:
        self._seconds: OrderedDict[str, float] = OrderedDict()

    def estimate(self, program: str) -> float:
        """What the next run is expected to take, in seconds."""
        return self._seconds.get(program, FIRST_GUESS_SECONDS)

    def learn(self, program: str, seconds: float) -> None:
        """Notes what a run has taken."""
        before = self._seconds.get(program, seconds)
        self._seconds[program] = before + (seconds - before) * _NEWEST_SHARE
        self._seconds.move_to_end(program)
        if len(self._seconds) > _MOST_PROGRAMS:
            self._seconds.popitem(last=False)
