"""Runs that wait, by client: each client's in its own order, whatever order they arrive in."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from waystation._errors import Conflict

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Waiting(Generic[T]):
    """A run in line.

    Attributes:
        position: Its place among the client's.
        arrival: When it got in line.
        run: The run.
    """

    position: int
    arrival: int
    run: T


class ClientQueue(Generic[T]):
    """The runs of one client; only those whose predecessors have all come are in line.

    Attributes:
        line: What is in line, by position.
    """

    def __init__(self, arrivals: Iterator[int]) -> None:
        self.line: deque[Waiting[T]] = deque()
        self._arrivals = arrivals
        self._early: dict[int, T] = {}
        self._next = 0
        self._closed = False

    def add(self, position: int, run: T) -> None:
        """Adds a run; it and those that were waiting for it get in line.

        Raises:
            Conflict: There was one at that position already.
        """
        if self._closed:
            self._line_up([*self.line, Waiting(position, next(self._arrivals), run)])
            return
        if position < self._next or position in self._early:
            raise Conflict(f"a client has submitted two runs at position {position}; number each once")
        self._early[position] = run
        while self._next in self._early:
            self.line.append(Waiting(self._next, next(self._arrivals), self._early.pop(self._next)))
            self._next += 1

    def close(self, keep: Callable[[T], bool]) -> list[T]:
        """The client is gone: only these of its runs stay, and none waits for one that will not come.

        Returns:
            Those that do not stay.
        """
        self._closed = True
        early = [Waiting(at, next(self._arrivals), run) for at, run in sorted(self._early.items())]
        self._early.clear()
        present = [*self.line, *early]
        self._line_up([waiting for waiting in present if keep(waiting.run)])
        return [waiting.run for waiting in present if not keep(waiting.run)]

    def _line_up(self, waiting: list[Waiting[T]]) -> None:
        self.line = deque(sorted(waiting, key=lambda each: each.position))
