"""SIGKILL between any two steps of a save in Orbax's layouts: genuine Orbax finds none, or a whole one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.orbax.kill_walk import MANY, SCENARIOS
from tests.support import disks, system_calls
from tests.support.long import IS_LONG

ROOT = Path(__file__).resolve().parents[2]


pytestmark = pytest.mark.skipif(
    not system_calls.SUPPORTED, reason="the tracer knows the system calls of x86-64 Linux only"
)


def walked(scenario: str, directory: Path) -> dict[str, Any]:
    """What a walk reports."""
    command = [sys.executable, "-m", "tests.orbax.kill_walk", scenario, str(directory)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'python'}:{ROOT}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert {"mkdir", "create", "pwrite64", "fsync", "renameat2"} <= set(report["changes"])
    _, _, overwrite = SCENARIOS[scenario]
    seen = {outcome.rpartition(" ")[2] for outcome in report["outcomes"]}
    assert seen == ({"1", "2"} if overwrite else {"None", "2"}), f"every kill left the same: {seen}"
    return report


@pytest.mark.long
@pytest.mark.parametrize("scenario", [name for name, (_, count, _) in SCENARIOS.items() if count < MANY])
@pytest.mark.share(4)
def test_killed_at_every_step(scenario: str, tmp_path: Path) -> None:
    report = walked(scenario, tmp_path)
    # A walk that traced nothing would prove nothing.
    assert len(report["changes"]) >= 20
    assert report["kills"] >= (12 if IS_LONG else 4)
    assert "syncfs" not in report["changes"]


@pytest.mark.long
def test_killed_where_many_files_are_made_durable_at_once() -> None:
    with disks.in_memory() as directory:
        report = walked("files-many-new", directory)
    assert report["kills"] >= (3 if IS_LONG else 2)
    assert report["changes"].count("syncfs") == 1
    assert report["changes"].count("fsync") == 1, "of the directory beside which it was made"
