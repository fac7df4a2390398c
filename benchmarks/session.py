"""Runs the plan: one fresh process per measurement, and every outcome into one JSON file.

The file is written anew after each turn, so that an interrupted session can be resumed. A system that
is not installed, or that fails, stays in the results with its reason; it is never dropped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import measure
from benchmarks.plan import Case, Selection, Turn, all_cases, turns
from benchmarks.processes import ROOT, Outcome
from benchmarks.rounds import Workplace
from benchmarks.systems.limit import RING_PROGRAM
from benchmarks.worker import Request

SCHEMA = 1


@dataclass(slots=True, kw_only=True)
class Session(Workplace):
    """One session of a plan.

    Attributes:
        selection: What is measured.
        repetitions: How often.
    """

    selection: Selection
    repetitions: int

    def count(self) -> int:
        """How many runs that are."""
        return len(all_cases(self.selection)) * self.repetitions

    def run(self) -> None:
        """Measures whatever the document does not hold yet."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for state in self.selection.states:
            for repetition in range(self.repetitions):
                for turn in turns(self.selection, state, repetition):
                    self._take(turn, state, repetition)
                    self.write()

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
            preparation = self._work(Case(state, turn.writer, "save", "default"), path)
            if preparation["status"] != "ok":
                reason = f"{turn.writer} could not write what is to be loaded: {preparation['reason']}"
        for case in loads:
            if reason is None:
                self._measure(case, repetition, path)
            else:
                self._record(case, repetition, {"status": preparation["status"], "reason": reason})

    def _measure(self, case: Case, repetition: int, path: Path) -> None:
        key = case.system, case.way
        outcome = self._missing.get(key) or self._work(case, path, verify_all=repetition == 0)
        if outcome["status"] == "missing":
            self._missing[key] = outcome
        self._record(case, repetition, outcome)

    def _record(self, case: Case, repetition: int, outcome: Outcome) -> None:
        self.document["runs"].append({**asdict(case), "repetition": repetition, **outcome})
        self.on_run(case, outcome)

    def _is_done(self, case: Case, repetition: int) -> bool:
        wanted = {**asdict(case), "repetition": repetition, "status": "ok"}
        return any(wanted.items() <= run.items() for run in self.document["runs"])

    def _work(self, case: Case, path: Path, verify_all: bool = False) -> Outcome:
        """One worker; its outcome, or why there is none."""
        request = Request(
            **asdict(case),
            path=str(path),
            scratch=self.scratch,
            output=self.output,
            quick=self.quick,
            verify_all=verify_all,
        )
        measure.settle_disks(quick=self.quick)
        return self.spawn("benchmarks.worker", request)

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
