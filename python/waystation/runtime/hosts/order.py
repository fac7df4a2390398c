"""The order in which a host begins messages: strictly by sequence number, whatever the order of arrival.

Every host of an island gets the same numbers, from one that stamps them. If all begin computations in the
order of the numbers, they meet in the same collectives in the same order. Pure: no threads, no clock.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from waystation._errors import Conflict

T = TypeVar("T")


class Order(Protocol[T]):
    """Says what may begin."""

    def accept(self, sequence: int, item: T) -> list[tuple[int, T]]:
        """What may begin now that this has arrived, in order."""
        ...

    @property
    def waiting(self) -> int:
        """How many have arrived and may not begin yet."""
        ...


class BySequence(Generic[T]):
    """Numbers from 0 on, without gaps."""

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, T] = {}

    def accept(self, sequence: int, item: T) -> list[tuple[int, T]]:
        """What may begin now that this has arrived, in order.

        Raises:
            Conflict: The number has come before.
        """
        if sequence < self._next or sequence in self._early:
            raise Conflict(f"message {sequence} has come twice; the next to begin is {self._next}")
        self._early[sequence] = item
        ready = []
        while self._next in self._early:
            ready.append((self._next, self._early.pop(self._next)))
            self._next += 1
        return ready

    @property
    def waiting(self) -> int:
        """How many have come before one with a lower number."""
        return len(self._early)
