"""`waystation ls`: checkpoints in order, and saves that did not end."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from tests.support.programs import without_privileges

import waystation
from waystation.storage.attempts import Attempt


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for step in (2, 10, 9):
        waystation.save(
            tmp_path / "runs" / f"step_{step}", {"w": np.zeros(step), "b": np.zeros(3), "n": step}
        )
    waystation.save(tmp_path / "runs" / "best", {"n": 1})
    (tmp_path / "runs" / "notes").mkdir()
    return tmp_path / "runs"


def without_sizes(text: str) -> str:
    """Of the bytes on disk, metadata is the larger part here, and its size is no concern of this test."""
    return re.sub(r" +([\d.]+ KiB|size)  ", "  [SIZE]  ", text)


def test_the_whole_output(runs: Path, script) -> None:
    outcome = script("ls", runs)
    assert (without_sizes(outcome.out), outcome.err, outcome.code) == (
        "checkpoint  step  arrays  [SIZE]  committed                generation\n"
        "best                   0  [SIZE]  [TIME]           1\n"
        "step_2         2       2  [SIZE]  [TIME]           1\n"
        "step_9         9       2  [SIZE]  [TIME]           1\n"
        "step_10       10       2  [SIZE]  [TIME]           1\n",
        "",
        0,
    )


def test_saves_that_did_not_end(runs: Path, run, dead_attempt, foreign_attempt) -> None:
    dead_attempt(runs / "step_11")
    foreign_attempt(runs / "step_12", 7200)
    running = Attempt(str(runs / "step_13"))
    try:
        outcome = run("ls", runs)
        document = run("ls", runs, "--json").document
    finally:
        running.discard()
    assert outcome.code == 0
    listed = outcome.out.partition("saves and exports that did not end:\n")[2]
    assert re.search(r"^step_11 .* its process is gone \(process \d+ on .*\)$", listed, re.MULTILINE)
    assert re.search(r"^step_12 +2.0 KiB +2 h +of another machine, may be running$", listed, re.MULTILINE)
    assert re.search(r"^step_13 .* its process runs", listed, re.MULTILINE)
    assert [(entry["checkpoint"], entry["verdict"]) for entry in document["attempts"]] == [
        ("step_11", "dead"),
        ("step_12", "unknown"),
        ("step_13", "running"),
    ]


def test_json(runs: Path, script) -> None:
    document = script("ls", runs, "--json").document
    listed = [(entry["name"], entry["step"], entry["arrays"]) for entry in document["checkpoints"]]
    assert listed == [("best", None, 0), ("step_2", 2, 2), ("step_9", 9, 2), ("step_10", 10, 2)]
    assert all(entry["problem"] is None and entry["bytes"] > 0 for entry in document["checkpoints"])


def test_the_tables_of_arrays_are_left_to_verify(runs: Path, run, damage) -> None:
    damage(runs / "step_9" / "state" / "chunks.bin", 60)
    assert run("ls", runs).code == 0, "a list of many checkpoints reads the least of each"
    assert run("verify", runs / "step_9").code == 1


def test_a_damaged_record_is_shown_and_exits_with_1(runs: Path, run, damage) -> None:
    damage(runs / "step_9" / "checkpoint.json", 60)
    outcome = run("ls", runs)
    assert outcome.code == 1
    assert re.search(r"^step_9 .* damaged$", outcome.out, re.MULTILINE)
    assert re.search(r"^step_9: .*checksum", outcome.out, re.MULTILINE)
    assert "step_10" in outcome.out


def test_no_checkpoints(tmp_path: Path, run) -> None:
    outcome = run("ls", tmp_path)
    assert (outcome.out, outcome.code) == ("no checkpoints in [DIR]\n", 0)


def test_runs_in_a_directory_are_named(runs: Path, run) -> None:
    (runs.parent / "notes").mkdir()
    (runs.parent / ".cache" / "1").mkdir(parents=True)
    outcome = run("ls", runs.parent)
    assert (outcome.out, outcome.code) == (
        "no checkpoints in [DIR]\ndirectories that hold checkpoints: runs\n",
        0,
    )
    (runs / "older").mkdir()
    waystation.save(runs / "older" / "1", {"n": 1})
    assert run("ls", runs).out.endswith("\n\ndirectories that hold checkpoints: older\n")
    assert run("ls", runs, "--json").document["directories"] == [
        {"path": "[DIR]/runs/notes", "holds_checkpoints": False},
        {"path": "[DIR]/runs/older", "holds_checkpoints": True},
    ]


def test_where_nothing_is_found_directories_lead_on(tmp_path: Path, run) -> None:
    for number in range(30):
        waystation.save(tmp_path / f"team_{number}" / "runs" / "1", {"n": 1})
    outcome = run("ls", tmp_path)
    assert "directories there: team_0, team_1, team_2, " in outcome.out
    assert outcome.out.endswith(", team_19 and 10 more\n")


def test_what_cannot_be_listed(runs: Path, run) -> None:
    absent = run("ls", runs / "absent")
    assert (absent.code, absent.err) == (2, "error: there is no directory '[DIR]/runs/absent'\n")
    checkpoint = run("ls", runs / "best")
    assert checkpoint.code == 2
    assert "'waystation inspect [DIR]/runs/best' shows it" in checkpoint.err
    assert run("ls", runs / "best" / "checkpoint.json").code == 2


def test_a_checkpoint_without_its_record_is_damaged(runs: Path, script) -> None:
    (runs / "step_9" / "checkpoint.json").unlink()
    outcome = script("ls", runs)
    assert "step_9: '" in outcome.out
    assert "it has the files of one, and has lost checkpoint.json" in outcome.out
    assert outcome.code == 1
    outcome = script("verify", "--all", runs)
    assert "step_9: 1 damage" in outcome.out
    assert "step_10: intact" in outcome.out
    assert outcome.code == 1


def test_directories_that_cannot_be_read_stand_beside_the_others(tmp_path: Path) -> None:
    """`lost+found` is in the directory where a file system is mounted, and belongs to root."""
    runs = tmp_path / "runs"
    waystation.save(runs / "step_1", {"a": 1})
    waystation.save(runs / "step_2", {"a": 1})
    (runs / "lost+found").mkdir()
    closed = [runs / "lost+found", runs / "step_2" / "state"]
    for path in closed:
        path.chmod(0)
    told = without_privileges(
        "import json\n"
        "from typer.testing import CliRunner\n"
        "from waystation.cli.application import application\n"
        "from waystation.training import Checkpointer\n"
        f"runs = {str(runs)!r}\n"
        "def call(*arguments):\n"
        "    done = CliRunner().invoke(application, arguments)\n"
        "    return done.exit_code, done.stdout, done.stderr\n"
        "calls = [call('ls', runs), call('ls', runs, '--json'), call('gc', runs, '--yes')]\n"
        "calls += [call('verify', '--all', runs), call('ls', runs + '/lost+found')]\n"
        "with Checkpointer(runs, cleanup_tmp_directories=True):\n"
        "    pass\n"
        "print(json.dumps(calls))"
    )
    for path in closed:
        path.chmod(0o755)
    (ls, text, _), (ls_json, document, _), (gc, *_), verify, inside = json.loads(told)
    assert (ls, ls_json, gc) == (0, 0, 0)
    assert f"  {runs}/lost+found: could not open: Permission denied\n" in text
    assert re.search(r"^step_2 .* unreadable$", text, re.MULTILINE)
    assert json.loads(document)["unreadable"][0]["path"] == f"{runs}/lost+found"
    for code, _, errors in (verify, inside):
        assert code == 2
        assert "Permission denied" in errors
