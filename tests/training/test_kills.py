"""SIGKILL at saves and collections: whatever is left, the latest step is whole, and the program goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support import system_calls
from tests.support.programs import running
from tests.training import sequences

import waystation
from waystation.training import Checkpointer


@pytest.mark.long
@pytest.mark.skipif(not system_calls.SUPPORTED, reason="the tracer knows x86-64 Linux only")
def test_killed_before_each_change_of_a_save_and_its_collection(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.training.kill_steps", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {"mkdir", "renameat2", "rename", "unlink", "rmdir"} <= set(report["changes"])
    # Before the commit; between it and the removal of what is not wanted any more; after that.
    assert set(report["outcomes"]) == {"[1, 2] 2", "[1, 2, 3] 3", "[2, 3] 3"}


@pytest.mark.parametrize("victim", [0, 1], ids=["primary", "other"])
@pytest.mark.share(2)
def test_a_program_of_several_processes_is_killed_and_goes_on(tmp_path: Path, victim: int) -> None:
    root = tmp_path / "run"
    newest = 0
    for _ in range(2):
        with running(
            sequences.train_and_be_killed, root, count=2, framework="torch", directory=tmp_path
        ) as programs:
            starts = [programs.report(index) for index in range(2)]
            assert starts[0] == starts[1]
            kind, start = starts[0]
            assert kind == "start"
            assert start >= newest, "what was told to be committed is there"
            for _ in range(3):
                _, newest = programs.report(0)
            programs.signal(victim)
    with Checkpointer(root) as checkpointer:
        assert checkpointer.latest is not None
        assert checkpointer.latest.step >= newest
        for info in checkpointer.checkpoints:
            assert waystation.verify(info.path).damages == []
