"""The buffer of a host that brings messages back into the island's order, however they were delivered."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class ReorderBuffer(Generic[T]):
    """Gives out the messages of one epoch strictly by sequence.

    Messages of earlier epochs are dropped: the gang that they were meant for is no more. Those of a later
    epoch wait until it begins here. A message that comes twice counts once.

    Args:
        epoch: The epoch that this host was started for.
    """

    def __init__(self, epoch: int = 1) -> None:
        self.epoch: int = epoch
        self._next = 0
        self._waiting: dict[tuple[int, int], T] = {}

    @property
    def missing(self) -> int | None:
        """The sequence number that others wait for; None if nothing waits."""
        return self._next if any(epoch == self.epoch for epoch, _ in self._waiting) else None

    @property
    def waiting(self) -> int:
        """How many messages wait for others."""
        return len(self._waiting)

    def add(self, epoch: int, sequence: int, message: T) -> list[T]:
        """Takes a message; returns those whose turn has come, in order."""
        if (epoch, sequence) >= (self.epoch, self._next):
            self._waiting.setdefault((epoch, sequence), message)
        return self._ready()

    def begin(self, epoch: int) -> list[T]:
        """Goes over to a later epoch; returns the messages whose turn has come.

        An epoch that is not later changes nothing.
        """
        if epoch > self.epoch:
            self.epoch, self._next = epoch, 0
            self._waiting = {key: message for key, message in self._waiting.items() if key[0] >= epoch}
        return self._ready()

    def _ready(self) -> list[T]:
        ready = []
        while (self.epoch, self._next) in self._waiting:
            ready.append(self._waiting.pop((self.epoch, self._next)))
            self._next += 1
        return ready
