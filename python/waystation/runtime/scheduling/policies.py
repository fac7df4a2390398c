"""Who comes next: first in first out, or proportional shares of device time.

Shares are by deficit round robin (Shreedhar and Varghese, SIGCOMM 1995): in each round every client that
could run gets a quantum of time for its weight, and runs when it has as much as its next program costs. The
quantum is far below the cost of a program, so that turns are fine-grained even where few programs are in
flight; rounds in which nobody can run yet are taken at once. A client keeps what it has while it has nothing
to run, at most the cost of one program, and gets nothing for that time. Time is counted in whole nanoseconds,
so that every run decides alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from waystation._errors import InvalidInput

QUANTUM_NANOSECONDS = 10_000


@dataclass(frozen=True, slots=True)
class Candidate:
    """A client whose next run could be dispatched.

    Attributes:
        client: The client.
        arrival: Grows with every run that arrives; that of its next.
        cost_seconds: What its next run is expected to take.
    """

    client: str
    arrival: int
    cost_seconds: float


class Policy(Protocol):
    """Chooses among clients of equal priority, and is told what they used."""

    def choose(self, candidates: Sequence[Candidate]) -> str:
        """The client that comes next, of one or more."""
        ...

    def charge(self, client: str, seconds: float) -> None:
        """Device time that a client is going to use; less than zero gives back what it did not."""
        ...

    def forget(self, client: str) -> None:
        """A client is gone."""
        ...


class FirstInFirstOut:
    """Runs in the order in which they arrive."""

    def choose(self, candidates: Sequence[Candidate]) -> str:
        """The client whose next run arrived first."""
        return min(candidates, key=lambda candidate: candidate.arrival).client

    def charge(self, client: str, seconds: float) -> None:
        """Use does not matter."""

    def forget(self, client: str) -> None:
        """Nothing is kept."""


class ProportionalShare:
    """Device time in proportion to weights, while there is competition.

    Args:
        weights: The weight of each client that has another than 1.
    """

    def __init__(self, weights: Mapping[str, int] | None = None) -> None:
        self._weights: dict[str, int] = {}
        self._deficits: dict[str, int] = {}
        self._last = ""
        for client, weight in (weights or {}).items():
            self.set_weight(client, weight)

    def set_weight(self, client: str, weight: int) -> None:
        """Sets the weight of a client from now on.

        Raises:
            InvalidInput: It is below 1.
        """
        if weight < 1:
            raise InvalidInput(f"client '{client}' cannot have weight {weight}: weights are 1 or more")
        self._weights[client] = weight

    def choose(self, candidates: Sequence[Candidate]) -> str:
        """The next client in turn that has enough time to its credit."""
        costs = {candidate.client: _nanoseconds(candidate.cost_seconds) for candidate in candidates}
        rounds = min(self._rounds_until(client, cost) for client, cost in costs.items())
        for client in costs:
            self._deficits[client] = self._deficits.get(client, 0) + rounds * self._quantum(client)
        able = sorted(client for client, cost in costs.items() if self._deficits[client] >= cost)
        self._last = next((client for client in able if client > self._last), able[0])
        return self._last

    def charge(self, client: str, seconds: float) -> None:
        """Takes time from a client's credit."""
        self._deficits[client] = self._deficits.get(client, 0) - _nanoseconds(seconds)

    def forget(self, client: str) -> None:
        """Forgets its credit and its weight."""
        self._deficits.pop(client, None)
        self._weights.pop(client, None)

    def _quantum(self, client: str) -> int:
        return QUANTUM_NANOSECONDS * self._weights.get(client, 1)

    def _rounds_until(self, client: str, cost: int) -> int:
        """In how many rounds a client can run."""
        return max(0, -(-(cost - self._deficits.get(client, 0)) // self._quantum(client)))


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
