"""Makes runs, one after another, and writes each down before the next begins."""

from __future__ import annotations

import fnmatch
import functools
import gc
import importlib
import importlib.metadata
import multiprocessing
import os
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from torture.faults import FAULTS, Done, Fault
from torture.faults.geometry import Geometry
from torture.faults.sandbox import FullDisk, Sandboxed
from torture.operations import OPERATIONS, Workspace
from torture.outcomes import Journal, Run
from torture.processes import HANG_S, Child, Deadline, Ended, attempt
from torture.systems import SYSTEMS, System

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


class _Server:
    """A process that has imported what one system needs, in which its runs are made.

    The processes of a run are forked there. That costs the less, the less was imported and the more of it was
    used before.
    """

    def __init__(self, system: System, preparation: str, directory: Path, in_memory: Path) -> None:
        self._connection, there = multiprocessing.Pipe()
        self._child = Child(lambda: self._serve(there, system, preparation, directory, in_memory))
        there.close()

    def ask(self, function: Callable[[Workspace], Any]) -> Any:
        """Has a function of the workspace called, and returns what it returns.

        Raises:
            RuntimeError: The bench failed, and not what it tortures.
        """
        try:
            self._connection.send(function)
            ended: Ended = self._connection.recv()
        except (EOFError, BrokenPipeError):
            ended = self._child.end()
        if ended.how != "returned":
            raise RuntimeError(ended.error)
        return ended.value

    def end(self) -> None:
        """Ends the process, after the run that it makes."""
        self._connection.close()
        self._child.end()

    def _serve(
        self, questions: Connection, system: System, preparation: str, directory: Path, in_memory: Path
    ) -> None:
        self._connection.close()
        workspace = Workspace(directory, in_memory)
        system.prepare()
        if preparation == "geometry":
            importlib.import_module("jax")
        elif preparation == "used" and not system.keeps_threads:
            _use(system, directory / "used")
        # Looking through what was imported would copy it in each process.
        gc.collect()
        gc.freeze()
        while True:
            try:
                function = questions.recv()
            except EOFError:
                return
            questions.send(attempt(functools.partial(function, workspace)))
            workspace.clear()


def _use(system: System, root: Path) -> None:
    """Saves and loads here, and waits for the threads that were started for that."""
    OPERATIONS["load"].prepare(system, root)
    OPERATIONS["load"].act(system, root)
    if system.has_collection:
        OPERATIONS["collection"].prepare(system, root)
    deadline = Deadline(HANG_S, os.getpid())
    while len(os.listdir("/proc/self/task")) > 1:
        if deadline.left_s() <= 0:
            raise RuntimeError(f"threads of '{system.name}' stay after a load")
        sleep(0.01)


def _preparation(fault: Fault) -> str:
    """What a server does beforehand for the runs of a fault."""
    if isinstance(fault, Geometry):
        return "geometry"
    # What a process finds out about its environment when it first saves is found out in there.
    return "imported" if isinstance(fault, Sandboxed | FullDisk) else "used"


def _count(system: str, fault: str, workspace: Workspace) -> int:
    return FAULTS[fault].seeds(SYSTEMS[system], workspace)


def _make(system: str, fault: str, seed: int, workspace: Workspace) -> Done:
    return FAULTS[fault].run(SYSTEMS[system], seed, workspace)


class Session:
    """One stretch of runs.

    Attributes:
        journal: Where runs are written down.
    """

    def __init__(self, base: Path, journal: Path, revision: str) -> None:
        self.journal = Journal(journal)
        self._base, self._revision = base, revision
        self._in_memory = tempfile.TemporaryDirectory(prefix="torture-", dir="/dev/shm")
        self._servers: dict[str, _Server] = {}

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        # Those that were started later hold the connections of the earlier ones, too.
        for server in reversed(self._servers.values()):
            server.end()
        self._in_memory.cleanup()

    def _server(self, system: str, fault: str) -> _Server:
        preparation = _preparation(FAULTS[fault])
        name = f"{system}-{preparation}"
        if name not in self._servers:
            places = [Path(base) / name for base in (self._base, self._in_memory.name)]
            for place in places:
                place.mkdir()
            self._servers[name] = _Server(SYSTEMS[system], preparation, *places)
        return self._servers[name]

    def runs(
        self,
        chosen: Sequence[Cell],
        *,
        most: int | None = None,
        until: float | None = None,
        again: bool = False,
    ) -> Iterator[Run]:
        """Makes the runs that are not written down: first those that never were, then those of other sources.

        Args:
            chosen: Which cells of the table.
            most: Of each cell; None takes every seed once.
            until: When no further run begins, by the monotonic clock.
            again: Also those that are written down.
        """
        done = set() if again else self.journal.done(self._revision_of)
        # One seed of each cell, then the next of each, so that a stretch that is short has seen all of them.
        known = {run.key for run in self.journal.runs()}
        waiting = [(cell, self._seeds(cell, most, known)) for cell in chosen]
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

    def _seeds(self, cell: Cell, most: int | None, known: Set[tuple[str, str, int]]) -> Iterator[int]:
        """The seeds of a cell, those of known runs last.

        They are counted when the first is asked for, which takes a run of its own.
        """
        server = self._server(*cell)
        seeds = _spread(server.ask(functools.partial(_count, *cell)), most)
        yield from sorted(seeds, key=lambda seed: (*cell, seed) in known)

    def make(self, system: str, fault: str, seed: int) -> Run:
        """Makes one run, and writes it down."""
        done: Done = self._server(system, fault).ask(functools.partial(_make, system, fault, seed))
        verdict, revision = done.verdict, self._revision_of(system)
        run = Run(system, fault, seed, verdict.outcome, verdict.detail, done.at, revision, done.count)
        self.journal.append(run)
        return run

    def _revision_of(self, system: str) -> str:
        """What is tortured: our sources, or the version of another's package."""
        if SYSTEMS[system].package == "waystation":
            return self._revision
        return importlib.metadata.version(SYSTEMS[system].package)


def _spread(count: int, most: int | None) -> Iterator[int]:
    """Every seed once, in an order that any beginning of spreads over all: every fourth is the next of the
    first ones, the others are drawn."""
    if count > UNBOUNDED_RUNS:
        return iter(range(UNBOUNDED_RUNS if most is None else most))
    drawn = random.Random(count).sample(range(count), count)
    ordered = [seed for turn in range(count) for seed in (turn, *drawn[3 * turn : 3 * turn + 3])]
    return iter(list(dict.fromkeys(ordered))[:most])
