"""What sessions of experiments share: cases, runs in rounds, and the JSON file of all outcomes.

A run belongs to a case, and runs of one case can be compared over the rounds. What failed, or could not be
measured here, stays in the results with its reason.
"""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.analysis import Series
from benchmarks.processes import Outcome, Request, spawn

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured.

    Attributes:
        experiment: Of which module.
        subject: What it is measured on: a topology, a number of processes.
        system: Who does it, and how.
        operation: What is done.
    """

    experiment: str
    subject: str
    system: str
    operation: str

    def __str__(self) -> str:
        return f"{self.experiment}: {self.subject}: {self.operation}, {self.system}"


class Results:
    """The runs of a document, by case."""

    def __init__(self, document: Document) -> None:
        self.document = document

    def runs(self, **wanted: str) -> list[Outcome]:
        """The runs whose case has these members."""
        return [run for run in self.document["runs"] if wanted.items() <= run.items()]

    def cases(self, experiment: str) -> list[Case]:
        """The cases of an experiment, in the order in which they came."""
        names = ("experiment", "subject", "system", "operation")
        found = [Case(*(run[name] for name in names)) for run in self.runs(experiment=experiment)]
        return list(dict.fromkeys(found))

    def series(self, case: Case, metric: str = "seconds") -> Series | None:
        """A figure of the runs of a case that went well; None if there are none."""
        values = {
            run["round"]: float(run[metric])
            for run in self.runs(**asdict(case))
            if run["status"] == "ok" and run.get(metric) is not None
        }
        return Series(case.system, case.operation, values) if values else None


def mean_and_deviation(values: list[float]) -> str:
    """As the guide has it: mean ± standard deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.2f} ± {deviation:.2f}"


@dataclass(slots=True, kw_only=True)
class Workplace:
    """Where a session works, and what it has measured so far.

    Attributes:
        directory: Holds checkpoints, a turn's at a time; on the file system that is measured.
        results: The JSON file.
        document: What the file holds.
        quick: Whether small states are meant.
        timeout_s: For one run.
        on_run: Told of every finished run.
    """

    directory: Path
    results: Path
    document: Document
    quick: bool = False
    timeout_s: float = 900.0
    on_run: Callable[[Any, Outcome], None] = lambda case, outcome: None
    _missing: dict[Any, Outcome] = field(default_factory=dict)

    @property
    def output(self) -> str:
        """Where a process of this session leaves its outcome."""
        return str(self.directory / "outcome.json")

    @property
    def scratch(self) -> str:
        """Where a process of this session may warm up."""
        return str(self.directory / "scratch")

    def spawn(self, module: str, request: Request) -> Outcome:
        """Runs a fresh process, which leaves its outcome at `output`."""
        return spawn(module, request, self.timeout_s)

    def write(self) -> None:
        """Writes the document anew, so that an interrupted session loses nothing."""
        self.results.parent.mkdir(parents=True, exist_ok=True)
        partial = self.results.with_suffix(".partial")
        partial.write_text(json.dumps(self.document, indent=1) + "\n")
        partial.replace(self.results)

    def remove(self) -> None:
        """Removes everything but the results."""
        shutil.rmtree(self.directory, ignore_errors=True)


@dataclass(slots=True, kw_only=True)
class Session(Workplace):
    """A session whose runs belong to a `Case` and a round."""

    @contextmanager
    def checkpoint(self) -> Iterator[Path]:
        """A path to save to, gone afterwards."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / "checkpoint"
        shutil.rmtree(path, ignore_errors=True)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def record(self, case: Case, repetition: int, outcome: Outcome) -> bool:
        """Adds a run to the document; whether it went well."""
        self.document["runs"].append({**asdict(case), "round": repetition, **outcome})
        self.write()
        self.on_run(case, outcome)
        return bool(outcome["status"] == "ok")
