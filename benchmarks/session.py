"""Runs the plan: one fresh process per measurement, and every outcome into one JSON file.

The file is written anew after each turn, so that an interrupted session can be resumed. A system that
is not installed, or that fails, stays in the results with its reason; it is never dropped.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.analysis import Results
from benchmarks.plan import Case, Selection, Turn, turns
from benchmarks.systems.limit import RING_PROGRAM
from benchmarks.targets import NATIVE, Standard, as_json
from benchmarks.worker import Request

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = 1
Report = Callable[[Case, dict[str, Any]], None]


@dataclass(slots=True)
class Session:
    """One session: where it works, what it has measured so far.

    Attributes:
        directory: Holds one turn's checkpoints at a time; on the file system that is measured.
        results: The JSON file.
        document: What the file holds.
        standard: What the results are judged by.
        on_run: Told of every finished run.
    """

    selection: Selection
    directory: Path
    results: Path
    document: dict[str, Any]
    repetitions: int
    quick: bool = False
    timeout_s: float = 900.0
    standard: Standard = NATIVE
    on_run: Report = lambda case, outcome: None
    _missing: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)

    def run(self) -> dict[str, Any]:
        """Measures whatever the document does not hold yet."""
        self.directory.mkdir(parents=True, exist_ok=True)
        # A session that is told to stop takes its worker and its gigabytes with it.
        previous = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        try:
            for state in self.selection.states:
                for repetition in range(self.repetitions):
                    for turn in turns(self.selection, state, repetition):
                        self._take(turn, state, repetition)
                        self.write()
        finally:
            signal.signal(signal.SIGTERM, previous)
            shutil.rmtree(self.directory, ignore_errors=True)
            self.document["targets"] = as_json(self.standard.evaluate(Results(self.document)))
            self.write()
        return self.document

    def write(self) -> None:
        self.results.parent.mkdir(parents=True, exist_ok=True)
        partial = self.results.with_suffix(".partial")
        partial.write_text(json.dumps(self.document, indent=1) + "\n")
        partial.replace(self.results)

    def _take(self, turn: Turn, state: str, repetition: int) -> None:
        saves = [case for case in turn.saves if not self._is_done(case, repetition)]
        loads = [case for case in turn.loads if not self._is_done(case, repetition)]
        path = self.directory / f"{state}-{turn.writer}"
        for case in saves:
            self._remove(path)
            self._measure(case, repetition, path)
        if loads:
            self._load(turn, loads, state, repetition, path)
        self._remove(path)

    def _load(self, turn: Turn, loads: list[Case], state: str, repetition: int, path: Path) -> None:
        """Runs the loads of a turn, after making what they read if no save has left it."""
        reason = None
        if not path.exists():
            preparation = self._spawn(Case(state, turn.writer, "save", "default"), path)
            if preparation["status"] != "ok":
                reason = f"{turn.writer} could not write what is to be loaded: {preparation['reason']}"
        for case in loads:
            if reason is None:
                self._measure(case, repetition, path)
            else:
                self._record(case, repetition, {"status": preparation["status"], "reason": reason})

    def _measure(self, case: Case, repetition: int, path: Path) -> None:
        key = case.system, case.way
        outcome = self._missing.get(key) or self._spawn(case, path, verify_all=repetition == 0)
        if outcome["status"] == "missing":
            self._missing[key] = outcome
        self._record(case, repetition, outcome)

    def _record(self, case: Case, repetition: int, outcome: dict[str, Any]) -> None:
        self.document["runs"].append({**asdict(case), "repetition": repetition, **outcome})
        self.on_run(case, outcome)

    def _is_done(self, case: Case, repetition: int) -> bool:
        wanted = {**asdict(case), "repetition": repetition, "status": "ok"}
        return any(wanted.items() <= run.items() for run in self.document["runs"])

    def _spawn(self, case: Case, path: Path, verify_all: bool = False) -> dict[str, Any]:
        """One worker; its outcome, or why there is none."""
        output = self.directory / "outcome.json"
        output.unlink(missing_ok=True)
        scratch = self.directory / "scratch"
        request = Request(
            **asdict(case),
            path=str(path),
            scratch=str(scratch),
            output=str(output),
            quick=self.quick,
            verify_all=verify_all,
        )
        command = [sys.executable, "-m", "benchmarks.worker", request.to_json()]
        os.sync()  # what was removed or written before must not be paid for by this run
        try:
            finished = subprocess.run(
                command, capture_output=True, text=True, timeout=self.timeout_s, cwd=ROOT, check=False
            )
        except subprocess.TimeoutExpired:
            return {"status": "failed", "reason": f"not finished after {self.timeout_s:.0f} s"}
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        if not output.exists():
            reason = f"the worker ended with status {finished.returncode}: {finished.stderr[-2000:]}"
            return {"status": "failed", "reason": reason}
        outcome: dict[str, Any] = json.loads(output.read_text())
        return outcome

    @staticmethod
    def _remove(path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)


def build_ring_program() -> str | None:
    """Builds the program of the ring ways and tells the workers where it is; returns why not, if not."""
    if os.environ.get(RING_PROGRAM):
        return None
    command = ["cargo", "build", "--release", "-p", "waystation-io", "--example", "raw_limit"]
    command += ["--quiet", "--message-format=json"]
    try:
        finished = subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=False,
        )
    except OSError as error:
        return f"cargo cannot be run: {error}"
    for line in finished.stdout.splitlines():
        message = json.loads(line)
        if message.get("executable") and message["target"]["name"] == "raw_limit":
            os.environ[RING_PROGRAM] = message["executable"]
            return None
    return f"cargo failed: {finished.stderr.strip()[-500:]}"


def default_directory() -> Path:
    """A fresh directory beside the results, on the disk of the checkout."""
    parent = ROOT / "benchmarks" / "results"
    parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="work-", dir=parent))
