"""Runs that wait, by client: each client's in its own order, whatever order they arrive in."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
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


class ClientQueues(Generic[T]):
    """The runs of all clients. Of a client that is gone, and has no more in line, only the name is kept."""

    def __init__(self) -> None:
        self._arrivals = count()
        self._queues: dict[str, _ClientQueue[T]] = {}
        self._gone: set[str] = set()

    def __len__(self) -> int:
        """How many runs are in line."""
        return sum(len(queue.line) for queue in self._queues.values())

    def heads(self) -> dict[str, Waiting[T]]:
        """What is next in the line of each client that has one."""
        return {client: queue.line[0] for client, queue in self._queues.items() if queue.line}

    def add(self, client: str, position: int, run: T) -> None:
        """Adds a run; it and those of its client that were waiting for it get in line.

        Raises:
            Conflict: There was one at that position already.
        """
        self._queue(client).add(position, run)

    def pop(self, client: str) -> T:
        """Takes the next run of a client out of its line."""
        run = self._queues[client].line.popleft().run
        self._forget_empty(client)
        return run

    def drop(self, client: str, keep: Callable[[T], bool]) -> list[T]:
        """A client is gone: only these of its runs stay, and none waits for one that will not come.

        Returns:
            Those that do not stay.
        """
        queue = self._queue(client)
        self._gone.add(client)
        dropped = queue.close(keep)
        self._forget_empty(client)
        return dropped

    def _queue(self, client: str) -> _ClientQueue[T]:
        if client not in self._queues:
            queue = self._queues[client] = _ClientQueue(self._arrivals)
            if client in self._gone:
                queue.close(lambda _: True)
        return self._queues[client]

    def _forget_empty(self, client: str) -> None:
        if client in self._gone and not self._queues[client].line:
            del self._queues[client]


class _ClientQueue(Generic[T]):
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
