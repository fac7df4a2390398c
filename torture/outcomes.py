"""What a run can come to, and the journal in which runs are written down.

The journal is a file of one JSON object a line, to which is only appended: a bench that was killed goes on
where it was, and a line that was cut short by that is left out.
"""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path


class Outcome(enum.StrEnum):
    """What a run came to."""

    OK = "ok"
    LOST = "lost"
    TORN = "torn"
    SILENTLY_WRONG = "silently wrong"
    HUNG = "hung"
    REFUSED_WRONGLY = "refused wrongly"
    MISSED = "missed"


# The columns of the tables, and what each means.
MEANINGS = {
    Outcome.LOST: "a version that was committed, or whose save returned, cannot be loaded any more",
    Outcome.TORN: "a version that was never finished is taken for a finished one",
    Outcome.SILENTLY_WRONG: "a load returned values that were never saved together",
    Outcome.HUNG: "a process had not ended after a minute, in which it did not wait for a core",
    Outcome.REFUSED_WRONGLY: "an error though the data were good and the system could have gone on",
}


@dataclass(frozen=True)
class Verdict:
    """What a run came to, and why."""

    outcome: Outcome
    detail: str = ""


@dataclass(frozen=True)
class Run:
    """A run that was made.

    Attributes:
        system, fault, seed: Which run it is.
        outcome: What it came to.
        detail: What was seen, where that is not as it should be.
        at: What the fault was done to.
        revision: Of the sources.
        count: How many schedules or geometries were tried in it; where one goes wrong, it is the last.
    """

    system: str
    fault: str
    seed: int
    outcome: Outcome
    detail: str
    at: str
    revision: str
    count: int = 1

    @property
    def key(self) -> tuple[str, str, int]:
        """By which it is found."""
        return self.system, self.fault, self.seed


class Journal:
    """The runs that were made."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, run: Run) -> None:
        """Writes a run down."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(asdict(run)).encode() + b"\n"
        with self.path.open("ab", buffering=0) as file:
            if file.tell() and not self._ends_with_a_line():
                line = b"\n" + line
            os.write(file.fileno(), line)

    def _ends_with_a_line(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"

    def runs(self) -> list[Run]:
        """The newest of each run."""
        newest: dict[tuple[str, str, int], Run] = {}
        for run in self._lines():
            newest[run.key] = run
        return list(newest.values())

    def done(self, revision_of: Callable[[str], str]) -> set[tuple[str, str, int]]:
        """The runs that were made with the sources that systems have now."""
        return {run.key for run in self._lines() if run.revision == revision_of(run.system)}

    def _lines(self) -> Iterator[Run]:
        if not self.path.exists():
            return
        for line in self.path.read_text().splitlines():
            try:
                entry = json.loads(line)
            except ValueError:  # cut short
                continue
            yield Run(**entry | {"outcome": Outcome(entry["outcome"])})


def counts(runs: Iterable[Run]) -> dict[tuple[str, str], dict[Outcome, int]]:
    """How many runs of each system and fault came to what."""
    found: dict[tuple[str, str], dict[Outcome, int]] = {}
    for run in runs:
        cell = found.setdefault((run.system, run.fault), dict.fromkeys(Outcome, 0))
        cell[run.outcome] += 1
        cell[Outcome.OK] += run.count - 1
    return found
