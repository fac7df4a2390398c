"""What was collected from recorders, bounded, and kept also of hosts that are gone."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from waystation.runtime.timeline.clocks import Clock
from waystation.runtime.timeline.recorder import Stamps
from waystation.runtime.timeline.ring import ROW_BYTES

MOST_ROWS = 200_000  # of one source


@dataclass(frozen=True, slots=True)
class Source:
    """Who has made stamps.

    Attributes:
        name: A host, or empty for the controller.
        epoch: The epoch of its island.
        device_count: How many devices it has.
    """

    name: str
    epoch: int = 0
    device_count: int = 0


@dataclass(frozen=True, slots=True)
class Recording:
    """All stamps of one source.

    Attributes:
        source: Who has made them.
        rows: Its rows (`ring.rows_of`).
        names: Its names, by number.
        lost: How many rows were overwritten before they were collected, or dropped since.
        offset_ns: How much more its clock says than the controller's.
        uncertainty_ns: By how much that may be wrong.
    """

    source: Source
    rows: bytes
    names: tuple[str, ...]
    lost: int
    offset_ns: int
    uncertainty_ns: int


class History:
    """What was collected from one source.

    Args:
        source: Which.
        most_rows: How many rows are kept; the oldest go first.
    """

    def __init__(self, source: Source, most_rows: int = MOST_ROWS) -> None:
        self.source = source
        self.clock: Clock = Clock()
        self._most_rows = most_rows
        self._pieces: deque[bytes] = deque()
        self._names: list[str] = []
        self._kept = self._lost = self._next = 0

    @property
    def wanted(self) -> tuple[int, int]:
        """From which numbers on rows and names have not been collected."""
        return self._next, len(self._names)

    def add(self, stamps: Stamps) -> None:
        """Takes what was collected; what is here already counts once."""
        count = len(stamps.rows) // ROW_BYTES
        known = max(0, self._next - stamps.first)
        self._lost += max(0, stamps.first - self._next)
        self._names += stamps.names[max(0, len(self._names) - stamps.first_name) :]
        if known < count:
            self._pieces.append(stamps.rows[known * ROW_BYTES :])
            self._kept += count - known
            self._next = stamps.first + count
        while self._kept > self._most_rows:
            dropped = len(self._pieces.popleft()) // ROW_BYTES
            self._kept -= dropped
            self._lost += dropped

    def go_on_after(self, earlier: History) -> None:
        """Takes its place: what that has, this one does not ask for."""
        self.clock, self._next, self._names = earlier.clock, earlier._next, list(earlier._names)

    def recording(self) -> Recording:
        """All of it."""
        rows = b"".join(self._pieces)
        clock = self.clock
        return Recording(
            self.source, rows, tuple(self._names), self._lost, clock.offset_ns, clock.uncertainty_ns
        )
