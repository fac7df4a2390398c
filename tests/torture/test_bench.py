"""A part of the torture bench that is bounded by the number of its runs, and whether the bench itself is
sound.

`make torture` makes all of it. Which planted bugs it finds, `python -m torture planted` tells.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.disks import in_memory
from tests.support.long import IS_LONG, only_long
from torture.bench import cells
from torture.faults.agents import DamagedSlots
from torture.operations import OLD
from torture.outcomes import Journal, Outcome, Run, Verdict
from torture.planted import Planted
from torture.processes import Ended
from torture.systems import WaystationAgent

ROOT = Path(__file__).parents[2]
SYSTEMS = [
    *("waystation", "waystation-direct", "waystation-ring"),
    *("waystation-zarr2", "waystation-zarr3", "waystation-ocdbt", "waystation-safetensors"),
]
pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="it knows calls by their numbers")


def torture(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "torture", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


# One run of each: what it costs is known beforehand. `make test` makes all of them with our own layout. Of
# the other systems each makes a third, and the next one another third.
FAULTS = [
    *("kill/*", "EIO/*", "ENOSPC/*", "EINTR/*", "short/*", "power cut/*", "fuse short/*", "fork/*"),
    *("together/two*", "sandbox/docker/*", "sandbox/full disk/*"),
]


def faults_of(system: str) -> list[str]:
    if IS_LONG or system == "waystation":
        return FAULTS
    return FAULTS[SYSTEMS.index(system) % 3 :: 3]


@pytest.mark.share(8)
@pytest.mark.parametrize("system", SYSTEMS)
def test_no_fault_loses_or_changes_anything(system: str, tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    faults = ",".join(faults_of(system))
    with in_memory() as directory:
        options = [f"--systems={system}", f"--faults={faults}", "--runs=1", f"--journal={journal}"]
        done = torture("run", *options, f"--directory={directory}")
    assert done.returncode == 0, done.stdout + done.stderr
    least = 20 if faults_of(system) == FAULTS else 5
    assert sum(run.outcome is Outcome.OK for run in Journal(journal).runs()) > least


@pytest.mark.long
@only_long
def test_damage_of_our_own_layout_is_told(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    with in_memory() as directory:
        options = ["--systems=waystation", "--faults=damage/*", "--runs=8", f"--journal={journal}"]
        done = torture("run", *options, f"--directory={directory}")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
@only_long
def test_an_agent_and_its_programs_are_killed_between_their_calls(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    options = ["--systems=waystation-agent", "--runs=1", f"--journal={journal}"]
    done = torture("run", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sum(run.outcome is Outcome.OK for run in Journal(journal).runs()) > 5


def test_a_disk_after_a_power_cut_has_one_of_both_versions(tmp_path: Path) -> None:
    """A few hundred disks, each of which a power cut may have left during one overwrite."""
    journal = tmp_path / "journal.jsonl"
    with in_memory() as directory:
        options = ["--systems=waystation", "--faults=in process/power cut/overwrite", "--runs=1"]
        done = torture("run", *options, f"--journal={journal}", f"--directory={directory}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sum(run.count for run in Journal(journal).runs()) > 500


@pytest.mark.long
@only_long
def test_what_others_lose_is_found(tmp_path: Path) -> None:
    """Genuine Orbax removes what it overwrites before it has the new: the judge has to see that."""
    journal = tmp_path / "journal.jsonl"
    torture("run", "--systems=orbax", "--faults=kill/overwrite", "--runs=4", f"--journal={journal}")
    assert Outcome.LOST in [run.outcome for run in Journal(journal).runs()]


@pytest.mark.long
@only_long
def test_a_run_is_the_same_when_it_is_made_again(tmp_path: Path) -> None:
    replay = "replay", "waystation-direct", "kill/overwrite", 61
    first, again = torture(*replay), torture(*replay)
    assert first.returncode == 0, first.stdout + first.stderr
    assert first.stdout == again.stdout
    assert "at '" in first.stdout


def test_a_bench_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    verdict = Verdict(Outcome.OK)
    run = Run("waystation", "none/save", 0, verdict.outcome, verdict.detail, "", "revision")
    Journal(path).append(run)
    with path.open("ab") as file:
        file.write(b'{"system": "way')  # cut short
    Journal(path).append(Run("waystation", "none/load", 0, Outcome.LOST, "gone", "", "revision"))
    both = {("waystation", "none/save", 0), ("waystation", "none/load", 0)}
    assert Journal(path).done(lambda _: "revision") == both
    assert Journal(path).done(lambda _: "another") == set()


# A process that needs a core for 0.3 s, with three others that want the same one, and 0.6 s to end.
_BUSY = """
import os, time
from torture.processes import Child
os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
def work(needed_s):
    while time.process_time() < needed_s: pass
beside = [Child(lambda: work(60)) for _ in range(3)]
print(Child(lambda: work(0.3)).end(0.6).how)
print(Child(lambda: time.sleep(60)).end(0.1).how)
for child in beside: child.end(is_hung=True)
"""


def test_what_a_program_says_that_cannot_begin_is_told(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").touch()
    verdict = DamagedSlots().found(WaystationAgent(), tmp_path, Ended("returned", OLD), may_fail=False)
    assert verdict.outcome is Outcome.LOST
    assert "FileExistsError" in verdict.detail


def test_nothing_hangs_because_the_machine_is_busy() -> None:
    command = [sys.executable, "-c", _BUSY]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["returned", "hung"], done.stderr


def test_runs_that_were_never_made_come_first(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    options = ["--systems=safetensors", "--faults=damage/append", f"--journal={path}"]
    torture("run", *options, "--runs=2")
    earlier = Journal(path).runs()
    path.unlink()
    for run in earlier:
        Journal(path).append(replace(run, revision="other sources"))
    torture("run", *options, "--runs=4")
    seeds = [json.loads(line)["seed"] for line in path.read_text().splitlines()[2:]]
    assert len(set(seeds)) == 4
    assert seeds[2:] == [run.seed for run in earlier]


def test_the_page_is_made_of_the_journal(tmp_path: Path) -> None:
    path, page = tmp_path / "journal.jsonl", tmp_path / "page.md"
    Journal(path).append(Run("waystation", "none/save", 0, Outcome.OK, "", "", "revision"))
    Journal(path).append(Run("orbax", "kill/overwrite", 3, Outcome.LOST, "gone", "a call", "revision"))
    done = torture("report", f"--journal={path}", f"--output={page}")
    assert done.returncode == 0, done.stderr
    written = page.read_text()
    lines = [line.strip("| ").split(" | ") for line in written.splitlines() if line.startswith("| ")]
    cells = {line[0]: dict(zip(lines[0], line, strict=False)) for line in reversed(lines)}
    assert cells["kill"]["orbax"] == "1, 1 bad"
    assert (cells["kill"]["waystation"], cells["host lost"]["safetensors"]) == ("not tried", "-")
    assert "| orbax | kill | lost | 1 | `kill/overwrite` 3 | `gone` |" in written


@pytest.mark.parametrize(
    "patch", sorted((ROOT / "torture" / "planted").glob("*.patch")), ids=lambda patch: patch.stem
)
def test_planted_bugs_still_fit_the_sources(patch: Path) -> None:
    done = subprocess.run(
        ["git", "apply", "--check", patch], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"make the patch anew for the sources as they are now:\n{done.stderr}"
    planted = Planted.read(patch)
    assert planted.what
    assert all(cells(system, fault) == [(system, fault)] for system, fault in planted.cells)
