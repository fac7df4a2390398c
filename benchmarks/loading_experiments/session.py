"""One session of experiments: the models that they load, and runs recorded as cases.

Cases and documents are those of `benchmarks/rounds.py`; the system of a case is a loader and its
way. Models stay on the disk for the whole session.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from benchmarks import rounds
from benchmarks.analysis import Ratio, Series
from benchmarks.loading_experiments import models, programs
from benchmarks.loading_experiments.loaders import DEFAULT
from benchmarks.loading_experiments.models import Model
from benchmarks.loading_experiments.process import Request
from benchmarks.loading_experiments.programs import Beside, alone
from benchmarks.rounds import Case, Results
from benchmarks.targets import Line

WARM_UP = "llama-half-gb"
MEMORY = Path("/dev/shm")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Loading:
    """A loader and the way in which it loads."""

    loader: str
    way: str = DEFAULT

    @property
    def system(self) -> str:
        """As results and tables have it."""
        return self.loader if self.way == DEFAULT else f"{self.loader} ({self.way})"


@dataclass(slots=True, kw_only=True)
class Session(rounds.Session):
    """See the class it extends.

    Attributes:
        memory_directory: Of this session alone, on a file system in memory.
    """

    memory_directory: Path = field(default_factory=lambda: MEMORY / f"waystation-benchmark-{os.getpid()}")

    def load(
        self,
        case: Case,
        repetition: int,
        loading: Loading,
        model: Model,
        *,
        parent: Path | None = None,
        processes: int = 1,
        divided: bool = False,
        cold: bool = True,
        beside: Beside = alone,
    ) -> None:
        """Loads a model once and records it.

        Args:
            case: What is recorded.
            repetition: Of which round.
            loading: By whom.
            model: It is written first, unless it is there.
            parent: Where models are; on the disk by default.
            processes: That load together.
            divided: Whether each wants its block of rows.
            cold: Whether nothing is in the page cache.
            beside: What runs at the same time.
        """
        outcome = self._missing.get(loading.loader)
        if outcome is None:
            small = Model(WARM_UP, quick=True)
            request = Request(
                loader=loading.loader,
                way=loading.way,
                model=model,
                directory=models.write(model, parent or self.directory),
                warm_up=(small, models.write(small, self.directory)),
                processes=processes,
                divided=divided,
                cold=cold,
                verify_all=repetition == 0,
            )
            outcome = programs.run(request, self.directory / "program", self.timeout_s, beside)
        if outcome["status"] == "missing":
            self._missing[loading.loader] = outcome
        self.record(case, repetition, outcome)

    def remove(self) -> None:
        """Removes everything but the results."""
        shutil.rmtree(self.directory, ignore_errors=True)
        shutil.rmtree(self.memory_directory, ignore_errors=True)


def in_turns(loadings: Sequence[T], repetition: int) -> Iterator[T]:
    """All of them, beginning with another one each round."""
    shift = repetition % len(loadings)
    yield from loadings[shift:]
    yield from loadings[:shift]


def best(results: Results, case: Case, loadings: Sequence[Loading]) -> Series | None:
    """The one with the best median of those that may stand for the system of a case."""
    found = [
        series for loading in loadings if (series := results.series(replace(case, system=loading.system)))
    ]
    return min(found, key=lambda series: series.median, default=None)


def compare(text: str, ours: Series | None, theirs: Series | None, factor: float) -> Line:
    """The target of being so many times as fast."""
    needed = f"≥ {factor:g}x"
    if ours is None or theirs is None:
        return Line(text, needed, "not measured", "", None)
    ratio = Ratio.of(ours, theirs)
    return Line(text, needed, f"{ratio.median:.2f}x", f"{ratio.worst:.2f}x", ratio.median >= factor)
