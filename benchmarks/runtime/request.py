"""What a process of an experiment is asked to do, and what an experiment is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks import processes
from benchmarks.processes import Outcome
from benchmarks.rounds import Results
from benchmarks.targets import Line


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(processes.Request):
    """What a process measures: all systems of an experiment, in rounds.

    Attributes:
        experiment: Its name.
        part: Of `Experiment.parts`.
        rounds: How many.
        budget_s: How long to measure one thing in a round.
        quick: Whether this only shows that everything works.
    """

    experiment: str
    part: str
    rounds: int
    budget_s: float
    quick: bool = False


class Experiment(Protocol):
    """A module of one experiment."""

    NAME: str
    TITLE: str

    def parts(self, shapes: Sequence[str], quick: bool) -> Sequence[str]:
        """What is measured by one process each."""
        ...

    def measure(self, request: Request) -> Iterator[Outcome]:
        """Measures a part, in this process."""
        ...

    def evaluate(self, results: Results) -> Iterator[Line]:
        """The targets."""
        ...

    def remarks(self, results: Results) -> Iterator[str]:
        """What else is to be said of the results."""
        ...
