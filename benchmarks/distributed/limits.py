"""The raw limit of the disk, measured in turns with programs of several processes.

The loops are those of `benchmarks/systems/limit.py`, each in a worker process of the other benchmark. Their
state is one array of 1 GiB; for other sizes the limit is the time that as many bytes take at the same rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks import measure, states
from benchmarks.analysis import Series
from benchmarks.processes import Outcome
from benchmarks.rounds import Case, Results, Session
from benchmarks.systems.limit import Limit
from benchmarks.worker import Request as WorkerRequest

PREFIX = "limit, "
STATE = "one"
SAVE_WAYS, LOAD_WAYS, COPY_WAYS = Limit.save_ways, Limit.load_ways, Limit.copy_ways
_CLOCKS = {"save": "durable", "load-cold": "touched", "copy": "copied"}


def measure_save(session: Session, case: Case, repetition: int, way: str) -> None:
    """Writes a raw file in one way, and removes it."""
    with session.checkpoint() as path:
        measure.settle_disks(quick=session.quick)
        session.record(case, repetition, _run(session, path, "save", way))


def measure_copy(session: Session, case: Case, repetition: int, way: str) -> None:
    """Copies as many bytes in memory in one way."""
    session.directory.mkdir(parents=True, exist_ok=True)
    session.record(case, repetition, _run(session, session.directory, "copy", way))


def measure_loads(
    session: Session,
    experiment: str,
    subject: str,
    operation: str,
    repetition: int,
    ways: Sequence[str] = LOAD_WAYS,
) -> None:
    """Writes a raw file, and reads it in some ways, cold."""
    with session.checkpoint() as path:
        written = _run(session, path, "save", SAVE_WAYS[0])
        for way in ways:
            outcome = _run(session, path, "load-cold", way) if written["status"] == "ok" else written
            session.record(Case(experiment, subject, PREFIX + way, operation), repetition, outcome)


def best(results: Results, experiment: str) -> Series | None:
    """The way with the best median, of those of an experiment."""
    found = [results.series(case) for case in results.cases(experiment) if case.system.startswith(PREFIX)]
    return min((series for series in found if series), key=lambda series: series.median, default=None)


def share(results: Results, case: Case) -> float | None:
    """What share of the limit a case reaches, by the bytes of its state. None where no limit was measured, or
    one of the other direction."""
    limit, own = best(results, case.experiment), results.series(case)
    size = results.series(case, "state_bytes")
    if limit is None or own is None or size is None or (limit.way == "save") != (case.operation == "save"):
        return None
    raw_bytes = states.total_bytes(states.describe(STATE, bool(results.document.get("quick"))))
    return (size.median / own.median) / (raw_bytes / limit.median)


def _run(session: Session, path: Path, operation: str, way: str) -> Outcome:
    """A worker's outcome, with the one time that counts as its seconds."""
    request = WorkerRequest(
        system=Limit.name,
        operation=operation,
        way=way,
        state=STATE,
        path=str(path),
        scratch=session.scratch,
        output=session.output,
        quick=session.quick,
    )
    outcome = session.spawn("benchmarks.worker", request)
    if outcome["status"] == "ok":
        outcome["seconds"] = outcome["seconds"][_CLOCKS[operation]]
    return outcome
