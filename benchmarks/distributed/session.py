"""One session: runs programs of several processes one after another, and keeps every outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import rounds
from benchmarks.distributed import programs
from benchmarks.distributed.models import TOPOLOGIES
from benchmarks.distributed.process import Request
from benchmarks.distributed.systems import LIBRARIES
from benchmarks.rounds import Case


@dataclass(slots=True, kw_only=True)
class Session(rounds.Session):
    """See the class it extends; a run is a program.

    Attributes:
        topologies: Those between which loads are measured, by name.
        libraries: Those whose resharded loads are measured, by name.
    """

    topologies: Sequence[str] = tuple(TOPOLOGIES)
    libraries: Sequence[str] = LIBRARIES

    def run(self, case: Case, repetition: int, request: Request) -> bool:
        """Runs a program and records it; whether it went well."""
        outcome = self._missing.get(request.system)
        if outcome is None:
            outcome = programs.run(request, self.directory / "program", self.timeout_s)
        if outcome["status"] == "missing":
            self._missing[request.system] = outcome
        return self.record(case, repetition, outcome)
