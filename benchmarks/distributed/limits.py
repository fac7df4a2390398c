"""The raw limit of the disk, measured in turns with programs of several processes.

The loops are those of `benchmarks/systems/limit.py`, each in a worker process of the other benchmark. Their
state is one array of 1 GiB; for other sizes the limit is the time that as many bytes take at the same rate.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import states
from benchmarks.analysis import Series
from benchmarks.distributed.programs import ROOT
from benchmarks.distributed.session import Case, Results, Session
from benchmarks.systems.limit import Limit
from benchmarks.worker import Request as WorkerRequest

PREFIX = "limit, "
STATE = "one"
SAVE_WAYS, LOAD_WAYS, COPY_WAYS = Limit.save_ways, Limit.load_ways, Limit.copy_ways
_CLOCKS = {"save": "durable", "load-cold": "touched", "copy": "copied"}


def measure_save(session: Session, case: Case, repetition: int, way: str) -> None:
    """Writes a raw file in one way, and removes it."""
    with session.checkpoint() as path:
        os.sync()
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


def _run(session: Session, path: Path, operation: str, way: str) -> dict[str, Any]:
    request = WorkerRequest(
        system=Limit.name,
        operation=operation,
        way=way,
        state=STATE,
        path=str(path),
        scratch=str(session.directory / "scratch"),
        output=str(session.directory / "outcome.json"),
        quick=session.quick,
    )
    Path(request.output).unlink(missing_ok=True)
    outcome = run_worker(request, session.timeout_s)
    shutil.rmtree(request.scratch, ignore_errors=True)
    return outcome


def run_worker(request: WorkerRequest, timeout_s: float) -> dict[str, Any]:
    """Runs a worker; its outcome, with the one time that counts as its seconds."""
    command = [sys.executable, "-m", "benchmarks.worker", request.to_json()]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT, check=False
        )
        with open(request.output) as file:
            outcome: dict[str, Any] = json.load(file)
    except subprocess.TimeoutExpired:
        return {"status": "failed", "reason": f"not finished after {timeout_s:.0f} s"}
    except FileNotFoundError:
        return {"status": "failed", "reason": done.stderr[-2000:]}
    if outcome["status"] == "ok":
        outcome["seconds"] = outcome["seconds"][_CLOCKS[request.operation]]
    return outcome
