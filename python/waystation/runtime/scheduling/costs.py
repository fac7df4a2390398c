"""What runs of a program take, learned from those that have been."""

from __future__ import annotations

# Of a program that has never run. Wrong at most once, and the difference is charged afterwards.
FIRST_GUESS_SECONDS = 1e-3
_NEWEST_SHARE = 0.25


class CostEstimates:
    """A moving average of measured device time for each program."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def estimate(self, program: str) -> float:
        """What the next run is expected to take, in seconds."""
        return self._seconds.get(program, FIRST_GUESS_SECONDS)

    def learn(self, program: str, seconds: float) -> None:
        """Notes what a run has taken."""
        before = self._seconds.get(program, seconds)
        self._seconds[program] = before + (seconds - before) * _NEWEST_SHARE
