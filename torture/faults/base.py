"""What a fault is to the bench."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

from torture.operations import Workspace
from torture.outcomes import Outcome, Verdict
from torture.systems import System


@dataclass(frozen=True)
class Done:
    """A run that was made.

    Attributes:
        verdict: What came of it.
        at: What exactly the fault was done to.
        count: How many schedules or geometries were tried in it.
    """

    verdict: Verdict
    at: str = ""
    count: int = 1


class Fault(Protocol):
    """Something that is done to a system.

    Attributes:
        name: As journals and tables call it.
    """

    @property
    def name(self) -> str: ...

    def applies(self, system: System) -> bool:
        """Whether it can be done to a system at all."""

    def seeds(self, system: System, workspace: Workspace) -> int:
        """How many seeds are different from each other; more of them begin anew, or draw other values."""

    def run(self, system: System, seed: int, workspace: Workspace) -> Done:
        """Makes one run."""


MISSED = Verdict(Outcome.MISSED, "the process did not come to what the fault is for")


def random_of(system: System, fault: str, seed: int) -> random.Random:
    """Chance that is the same whenever the run is made again."""
    return random.Random(f"{system.name} {fault} {seed}")
