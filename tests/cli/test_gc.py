"""`waystation gc`: removes what is dead, and nothing else."""

import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import waystation
from waystation.safetensors.destination import Destination
from waystation.storage.attempts import Attempt

from .conftest import SCRIPT


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    waystation.save(tmp_path / "runs" / "step_1", {"a": 1})
    return tmp_path / "runs"


def test_dead_attempts_are_removed_and_running_ones_are_not(runs: Path, script, dead_attempt) -> None:
    dead = dead_attempt(runs / "step_2")
    running = Attempt(str(runs / "step_3"))
    try:
        outcome = script("gc", runs, "--yes")
        assert Path(running.path).is_dir()
    finally:
        running.discard()
    assert not dead.exists()
    assert outcome.code == 0
    lines = re.sub(r"\d+\.\d KiB|\d+ B|\d+ s", "[N]", outcome.out).splitlines()
    assert re.fullmatch(r"step_2 +\[N\] +\[N\]  its process is gone \(process \d+ on .*\)", lines[1])
    assert re.fullmatch(r"step_3 +\[N\] +\[N\]  its process runs \(process \d+ on .*\)", lines[2])
    assert lines[3:] == ["1 attempt can be removed, [N]; 1 may still be running", "removed 1 attempt, [N]"]
    assert waystation.load(runs / "step_1") == {"a": 1}


def test_attempts_of_other_machines_only_after_a_while(runs: Path, run, foreign_attempt) -> None:
    found = foreign_attempt(runs / "step_2", 7200)
    assert "1 may still be running" in run("gc", runs, "--yes").out
    assert found.exists()
    outcome = run("gc", runs, "--yes", "--older-than", "1h")
    assert "of another machine, silent for long" in outcome.out
    assert not found.exists()


def test_a_dry_run_removes_nothing(runs: Path, run, dead_attempt) -> None:
    dead = dead_attempt(runs / "step_2")
    outcome = run("gc", runs, "--dry-run", "--json")
    (attempt,) = outcome.document["attempts"]
    assert (attempt["verdict"], attempt["removable"], attempt["removed"]) == ("dead", True, False)
    assert outcome.document["bytes_removed"] == 0
    assert dead.exists()
    removed = run("gc", runs, "--yes", "--json").document
    assert removed["attempts"][0]["removed"] is True
    assert removed["bytes_removed"] >= 3000
    assert not dead.exists()


def test_where_nobody_can_be_asked_nothing_is_removed(runs: Path, script, dead_attempt) -> None:
    dead = dead_attempt(runs / "step_2")
    for options in ([], ["--json"]):
        outcome = script("gc", runs, *options)
        assert outcome.code == 2
        assert "give --yes to remove what it finds, or --dry-run" in outcome.err
        assert dead.exists()


@pytest.mark.parametrize(("answer", "remains"), [(b"n\n", True), (b"y\n", False)])
@pytest.mark.share(2)
def test_a_person_is_asked(answer: bytes, remains: bool, runs: Path, dead_attempt) -> None:
    dead = dead_attempt(runs / "step_2")
    ours, theirs = pty.openpty()
    try:
        with subprocess.Popen([SCRIPT, "gc", runs], stdin=theirs, stdout=subprocess.PIPE) as process:
            os.write(ours, answer)
            out, _ = process.communicate(timeout=120)
    finally:
        os.close(ours)
        os.close(theirs)
    assert process.returncode == 0
    assert b"Remove them?" in out
    assert dead.exists() is remains


def test_a_record_that_was_being_replaced(runs: Path, run, foreign_attempt) -> None:
    inside = foreign_attempt(runs / "step_1" / "checkpoint.json", 7200)
    assert run("gc", runs, "--yes", "--older-than", "1h").code == 0
    assert not inside.exists()
    assert waystation.load(runs / "step_1") == {"a": 1}


def test_what_killed_exports_left(runs: Path, run) -> None:
    waystation.save(runs / "step_2", {"w": np.arange(1000.0)})
    code = (
        "import os, signal, sys; from waystation.checkpoint.export import export\n"
        "export(sys.argv[1], sys.argv[2], on_progress=lambda *_: os.kill(os.getpid(), signal.SIGKILL))"
    )
    command = [sys.executable, "-c", code, runs / "step_2", runs / "model"]
    (runs / ".mine.waystation-export-1").write_text("a file")
    with Destination(str(runs / "other"), None, overwrite=False).staged() as running:
        assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
        (dead,) = set(runs.glob(".model.waystation-export-*")) - {Path(running)}
        document = run("gc", runs, "--yes", "--json").document
        assert Path(running).is_dir()
    told = {
        entry["path"].replace("[DIR]", str(runs.parent)): (entry["kind"], entry["verdict"])
        for entry in document["attempts"]
    }
    assert told == {str(dead): ("export", "dead"), running: ("export", "running")}
    assert not dead.exists()
    left = sorted(path.name for path in runs.iterdir())
    assert left == [".mine.waystation-export-1", "step_1", "step_2"]


def test_nothing_to_do(runs: Path, run) -> None:
    outcome = run("gc", runs)
    assert (outcome.out, outcome.code) == ("nothing to remove: no save or export was left unfinished\n", 0)
    assert run("gc", runs / "absent").code == 2
    assert run("gc", runs, "--older-than", "soon").code == 2
