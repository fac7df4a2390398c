"""SIGKILL between any two steps of a save: readers find the model that was there, or the new one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.published.kill_walk import SCENARIOS
from tests.support import system_calls
from tests.support.long import IS_LONG


@pytest.mark.share(16)
@pytest.mark.skipif(
    not system_calls.SUPPORTED, reason="the tracer knows the system calls of x86-64 Linux only"
)
@pytest.mark.parametrize("name", SCENARIOS)
def test_killed_at_every_step(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.published.kill_walk", name, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    # A walk that traced nothing would prove nothing.
    assert report["kills"] >= (6 if IS_LONG else 2)
    assert {"mkdir", "create", "fsync"} <= set(report["changes"])
    seen = {outcome.rpartition(" ")[2] for outcome in report["outcomes"]}
    before = "None" if SCENARIOS[name].before is None else "1"
    assert seen == {before, "2"}, f"every kill left the same: {seen}"
