"""SIGKILL between any two steps of a save in Orbax's layouts: genuine Orbax finds none, or a whole one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.orbax.kill_walk import MANY, SCENARIOS
from tests.support import system_calls

from waystation import _native

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(
    not system_calls.SUPPORTED, reason="the tracer knows the system calls of x86-64 Linux only"
)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_at_every_step(scenario: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.orbax.kill_walk", scenario, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'python'}:{ROOT}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    # A walk that traced nothing would prove nothing.
    _, array_count, overwrite = SCENARIOS[scenario]
    changes = report["changes"]
    assert {"mkdir", "create", "pwrite64", "fsync", "renameat2"} <= set(changes)
    assert report["steps"] >= (3 if array_count == MANY else 20)
    if _native.probe(str(tmp_path))["filesystem"]["kind"] in ("ext4", "xfs", "btrfs", "tmpfs"):
        assert changes.count("syncfs") == (array_count == MANY)
        assert array_count < MANY or changes.count("fsync") == 1, "of the directory beside which it was made"
    seen = {outcome.rpartition(" ")[2] for outcome in report["outcomes"]}
    assert seen == ({"1", "2"} if overwrite else {"None", "2"}), f"every kill left the same: {seen}"
