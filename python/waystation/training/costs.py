"""What saves cost, as measured: `SaveCosts` remembers the last few and tells what the next will cost.

One that is far from the others (the first, which calibrates the disk; one that a neighbour slowed down) does
not count: the estimate is a median. Safe to use from several threads.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from dataclasses import dataclass

from waystation import _forks

_REMEMBERED = 7


@dataclass(frozen=True, slots=True)
class SaveCost:
    """What one save costs.

    Attributes:
        blocking_s: Seconds for which the program could not go on.
        background_s: Seconds after that until the checkpoint was committed.
    """

    blocking_s: float
    background_s: float


class SaveCosts:
    """The costs of the last saves of one sequence of checkpoints."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _forks.watch(self)
        self._last: deque[SaveCost] = deque(maxlen=_REMEMBERED)

    def begin_in_child(self) -> None:
        """See `waystation._forks.Watched`."""
        self._lock = threading.Lock()

    def record(self, cost: SaveCost) -> None:
        """Remembers what a save has cost."""
        with self._lock:
            self._last.append(cost)

    def estimate(self) -> SaveCost | None:
        """What the next save will cost; None before anything is known."""
        with self._lock:
            if not self._last:
                return None
            return SaveCost(
                statistics.median(cost.blocking_s for cost in self._last),
                statistics.median(cost.background_s for cost in self._last),
            )
