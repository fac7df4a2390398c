"""SIGKILL between any two steps of a save leaves no checkpoint or a whole one; the next save works."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.checkpoint.kill_walk import SCENARIOS
from tests.support import plain_renames, system_calls
from tests.support.long import IS_LONG


@pytest.mark.long
@pytest.mark.skipif(
    not system_calls.SUPPORTED, reason="the tracer knows the system calls of x86-64 Linux only"
)
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.share(8)
def test_killed_at_every_step(scenario: str, tmp_path: Path) -> None:
    if SCENARIOS[scenario].plain_renames and not plain_renames.SUPPORTED:
        pytest.skip("the filter of system calls is for x86-64 and AArch64 Linux")
    command = [sys.executable, "-m", "tests.checkpoint.kill_walk", scenario, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    # A walk that traced nothing would prove nothing.
    is_deletion = scenario.startswith("delete")
    assert len(report["changes"]) >= (5 if is_deletion else 20)
    assert report["kills"] >= (5 if is_deletion else 12) // (1 if IS_LONG else 3)
    assert ("linkat" in report["changes"]) is ("shared" in scenario)
    if not is_deletion:
        assert {"mkdir", "create", "fsync"} <= set(report["changes"])
        # Where the filter of plain renames refuses them, nothing stops before them.
        is_plain = SCENARIOS[scenario].plain_renames
        assert ("renameat2" in report["changes"]) is (scenario != "add" and not is_plain)
        # One rename for a new checkpoint; to overwrite, one each of new data, record and old data.
        renames = 3 if scenario.startswith("overwrite") else 1
        renames += 2 * ("shared" in scenario)  # it has two checkpointables
        # What is added moves in, and then the record is replaced, whatever renames there are.
        expected = 2 if scenario == "add" else renames if is_plain else 0
        assert report["changes"].count("rename") == expected
    seen = {outcome.rpartition(" ")[2] for outcome in report["outcomes"]}
    assert len(seen) == 2, f"every kill left the same: {seen}"
