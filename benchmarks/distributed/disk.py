"""Four processes save one state together, against the raw limit of the disk that they share.

The limit is that of `benchmarks/systems/limit.py`, on as many bytes, in the same rounds.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.analysis import Ratio, Series
from benchmarks.distributed.process import Request
from benchmarks.distributed.programs import ROOT
from benchmarks.distributed.session import Case, Results, Session
from benchmarks.systems.limit import Limit
from benchmarks.targets import Line
from benchmarks.worker import Request as WorkerRequest

NAME = "disk"
PROCESSES = 4
SUBJECT = "one disk"
OURS = f"waystation, {PROCESSES} processes"
LIMIT = "limit, "
OPERATION = "save"
NEEDED = 0.8


def measure(session: Session, repetition: int) -> None:
    """One round: all ways of the limit around the save, which comes elsewhere among them each time."""
    ways = list(Limit.save_ways)
    place = (repetition * 4 + 2) % len(ways)
    for way in ways[:place]:
        _measure_limit(session, repetition, way)
    _save(session, repetition)
    for way in ways[place:]:
        _measure_limit(session, repetition, way)


def _save(session: Session, repetition: int) -> None:
    with session.checkpoint() as path:
        request = Request(
            system="waystation",
            operation="save",
            model="one",
            mesh=(1, PROCESSES, 1),
            devices=PROCESSES,
            processes=PROCESSES,
            path=str(path),
            quick=session.quick,
        )
        session.run(Case(NAME, SUBJECT, OURS, OPERATION), repetition, request)


def _measure_limit(session: Session, repetition: int, way: str) -> None:
    """Runs a worker of the other benchmark, which measures one way in a process of its own."""
    with session.checkpoint() as path:
        output = session.directory / "outcome.json"
        request = WorkerRequest(
            system=Limit.name,
            operation=OPERATION,
            way=way,
            state="one",
            path=str(path),
            scratch=str(session.directory / "scratch"),
            output=str(output),
            quick=session.quick,
        )
        output.unlink(missing_ok=True)
        os.sync()
        outcome = run_worker(request, session.timeout_s)
        shutil.rmtree(request.scratch, ignore_errors=True)
        session.record(Case(NAME, SUBJECT, f"{LIMIT}{way}", OPERATION), repetition, outcome)


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
        outcome["seconds"] = outcome["seconds"]["durable"]
    return outcome


def count(rounds: int) -> int:
    """How many programs that many rounds run."""
    return rounds * (1 + len(Limit.save_ways))


def limit_of(results: Results) -> Series | None:
    """The way with the best median."""
    found = [results.series(case) for case in results.cases(NAME) if case.system.startswith(LIMIT)]
    return min((series for series in found if series), key=lambda series: series.median, default=None)


def evaluate(results: Results) -> Iterator[Line]:
    """What share of the limit the processes reach together."""
    ours, limit = results.series(Case(NAME, SUBJECT, OURS, OPERATION)), limit_of(results)
    text, needed = f"{PROCESSES} processes save together: of the raw write limit", f"≥ {NEEDED:g}x"
    if ours is None or limit is None:
        yield Line(text, needed, "not measured", "", None)
        return
    ratio = Ratio.of(ours, limit)
    yield Line(text, needed, f"{ratio.median:.2f}x", f"{ratio.worst:.2f}x", ratio.median >= NEEDED)
