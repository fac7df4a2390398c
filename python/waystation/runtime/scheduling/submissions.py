"""What clients submit to schedulers and schedulers hand on: one message for each static subgraph and island.

Messages name programs; the code, and what each host does for it, is known by the fingerprint and was sent
once. Numbers that clients give (`ClientNumbers`) let messages travel in any order: a scheduler takes those of
one client in the order in which the client meant them, since later programs use what earlier ones make.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class RunKey(NamedTuple):
    """One run of one static subgraph.

    Attributes:
        client: Whose it is.
        run: The client's number for this call of the program.
        subgraph: The number of the subgraph.
    """

    client: str
    run: int
    subgraph: int = 0


@dataclass(frozen=True, slots=True)
class Submission:
    """What an island's scheduler is to order.

    Attributes:
        key: The run.
        program: The fingerprint of the program.
        position: Its place among all that the client submits to this island, from 0 on without gaps.
        cost_seconds: Device time that it will take on the island; None to go by earlier runs.
        priority: Higher ones go first, always.
        ticket: If it spans several islands, its place among all such runs on this island; given by the
            `Sequencer`, from 0 on without gaps.
    """

    key: RunKey
    program: str
    position: int
    cost_seconds: float | None = None
    priority: int = 0
    ticket: int | None = None


@dataclass(frozen=True, slots=True)
class SpanningSubmission:
    """A run that spans several islands, for the sequencer to order.

    Attributes:
        key: The run.
        program: The fingerprint of the program.
        order: Its place among all that the client submits to the sequencer, from 0 on without gaps.
        positions: For each island its `Submission.position` there.
        cost_seconds: As in `Submission`.
        priority: As in `Submission`.
    """

    key: RunKey
    program: str
    order: int
    positions: tuple[tuple[str, int], ...]
    cost_seconds: float | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A run has its place in the order of an island; every host of the island gets this.

    Attributes:
        island: The island.
        epoch: Which gang of hosts it is for; a rebuilt island has a higher one.
        sequence: Its place in the order, from 0 on in each epoch, without gaps.
        key: The run.
        program: The fingerprint of the program.
    """

    island: str
    epoch: int
    sequence: int
    key: RunKey
    program: str


class ClientNumbers:
    """Gives a client's submissions their numbers, in the order in which the client submits."""

    def __init__(self) -> None:
        self._positions: Counter[str] = Counter()
        self._order = 0

    def position(self, island: str) -> int:
        """The position of a run of one island."""
        self._positions[island] += 1
        return self._positions[island] - 1

    def spanning(self, islands: Iterable[str]) -> tuple[int, tuple[tuple[str, int], ...]]:
        """The order and the positions of a run of several islands."""
        self._order += 1
        return self._order - 1, tuple((island, self.position(island)) for island in sorted(islands))
