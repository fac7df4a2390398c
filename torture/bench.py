"""Makes runs, one after another, and writes each down before the next begins."""

from __future__ import annotations

import fnmatch
import gc
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from time import monotonic

from torture.faults import FAULTS
from torture.operations import Workspace
from torture.outcomes import Journal, Run
from torture.systems import SYSTEMS

Cell = tuple[str, str]
UNBOUNDED_RUNS = 10_000  # of a fault whose every seed is another one


def cells(systems: str = "", faults: str = "") -> list[Cell]:
    """The systems and faults that patterns (divided by commas) choose, where the one can be done to the
    other."""
    return [
        (system, fault)
        for system in _matching(SYSTEMS, systems)
        for fault in _matching(FAULTS, faults)
        if FAULTS[fault].applies(SYSTEMS[system])
    ]


def _matching(names: Iterable[str], patterns: str) -> list[str]:
    wanted = [pattern for pattern in patterns.split(",") if pattern] or ["*"]
    found = [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in wanted)]
    if not found:
        raise SystemExit(f"nothing is called '{patterns}'; 'python -m torture list' prints what there is")
    return found


class Session:
    """One stretch of runs.

    Attributes:
        journal: Where runs are written down.
    """

    def __init__(self, base: Path, journal: Path, revision: str) -> None:
        self.journal = Journal(journal)
        self._in_memory = tempfile.TemporaryDirectory(prefix="torture-", dir="/dev/shm")
        self._workspace = Workspace(base, Path(self._in_memory.name))
        self._revision = revision

    def prepare(self, systems: Iterable[str]) -> None:
        """Imports all that is needed, once for all processes that are forked from this one."""
        for system in systems:
            SYSTEMS[system].prepare()
        # Looking through what was imported would copy it in each of them.
        gc.collect()
        gc.freeze()

    def runs(
        self,
        chosen: Sequence[Cell],
        *,
        most: int | None = None,
        until: float | None = None,
        again: bool = False,
    ) -> Iterator[Run]:
        """Makes the runs that are not written down.

        Args:
            chosen: Which cells of the table.
            most: Of each cell; None takes every seed once.
            until: When no further run begins, by the monotonic clock.
            again: Also those that are written down.
        """
        done = set() if again else self.journal.done(self._revision)
        # One seed of each cell, then the next of each, so that a stretch that is short has seen all of them.
        waiting = [(cell, self._seeds(cell, most)) for cell in chosen]
        while waiting:
            left = []
            for (system, fault), seeds in waiting:
                if until is not None and monotonic() >= until:
                    return
                seed = next((seed for seed in seeds if (system, fault, seed) not in done), None)
                if seed is None:
                    continue
                yield self.make(system, fault, seed)
                left.append(((system, fault), seeds))
            waiting = left

    def _seeds(self, cell: Cell, most: int | None) -> Iterator[int]:
        """The seeds of a cell; they are counted when the first is asked for, which takes a run of its own."""
        system, fault = cell
        yield from _spread(FAULTS[fault].seeds(SYSTEMS[system], self._workspace), most)

    def make(self, system: str, fault: str, seed: int) -> Run:
        """Makes one run, and writes it down."""
        done = FAULTS[fault].run(SYSTEMS[system], seed, self._workspace)
        verdict = done.verdict
        run = Run(system, fault, seed, verdict.outcome, verdict.detail, done.at, self._revision, done.count)
        self.journal.append(run)
        self._workspace.clear()
        return run


def _spread(count: int, most: int | None) -> Iterator[int]:
    """Every seed once, or as many as wanted, spread over all where they are fewer."""
    if most is None or not count:
        return iter(range(min(count, UNBOUNDED_RUNS)))
    if most >= count or count > UNBOUNDED_RUNS:
        return iter(range(most))
    return iter(sorted({index * count // most for index in range(most)}))
