"""Processes that write to one checkpoint in different ways: it is whole, and whoever fails says why."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import waystation as ws

BOUND_S = 120

# Writes as it is told to. Whoever adds or removes may find that another process was first.
PROGRAM = """
import sys
import numpy as np
import waystation as ws
from tests.support import plain_renames
from waystation.errors import Conflict, NotFound
from waystation.training import Checkpointer
from waystation.training.save_decision_policies import FixedIntervalPolicy

path, call, number, times = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
state = {"number": np.array(number), "values": np.full(10_000, number)}
if "in place" in call:
    plain_renames.allow_only_plain_renames()
for time in range(times):
    try:
        if "overwrite" in call:
            ws.save(path, state, overwrite=True)
        elif call == "add":
            ws.add_checkpointables(path, {f"added {number} {time}": state})
        elif call == "remove":
            for name in ws.checkpointables_metadata(path).metadata:
                if name != "state":
                    ws.delete(path, checkpointable_name=name)
        else:
            with Checkpointer(path, save_decision_policy=FixedIntervalPolicy(1)) as checkpointer:
                checkpointer.save(time, state)
    except (Conflict, NotFound) as error:
        assert call not in ("overwrite", "overwrite in place"), error
    print(time, flush=True)
"""


@contextlib.contextmanager
def processes(path: Path, calls: list[str], times: int) -> Iterator[list[subprocess.Popen[str]]]:
    """One process for each call."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(path), call, str(number), str(times)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number, call in enumerate(calls, 1)
    ]
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.communicate(timeout=BOUND_S)


def check(path: Path) -> None:
    """Every checkpointable of it is one that was saved."""
    for state in ws.load_checkpointables(path).values():
        assert set(map(int, state["values"])) == {int(state["number"])}


@pytest.mark.parametrize(
    "calls",
    [
        ["overwrite", "add"],
        ["overwrite in place", "add"],
        ["overwrite in place", "overwrite in place", "add"],
        ["overwrite", "add", "remove"],
    ],
    ids=", ".join,
)
def test_a_checkpoint_is_whole_beside_and_after_them(tmp_path: Path, calls: list[str]) -> None:
    path = tmp_path / "same"
    ws.save(path, {"number": 0, "values": [0]})
    with processes(path, calls, 30) as running:
        while any(process.poll() is None for process in running):
            check(path)
        assert [process.returncode for process in running] == [0] * len(calls)
    check(path)
    assert not ws.verify(path).damages


@pytest.mark.parametrize("call", ["overwrite", "overwrite in place"])
def test_one_of_two_that_overwrite_is_killed(tmp_path: Path, call: str) -> None:
    path = tmp_path / "same"
    ws.save(path, {"number": 0, "values": [0]})
    for saves in range(8):
        with processes(path, [call, call], 15) as (victim, other):
            assert victim.stdout is not None
            for _ in range(saves):
                victim.stdout.readline()
            victim.send_signal(signal.SIGKILL)
            victim.wait(BOUND_S)
            check(path)
            assert other.wait(BOUND_S) == 0
        check(path)
        assert not ws.verify(path).damages


def test_two_checkpointers_that_save_the_same_steps(tmp_path: Path) -> None:
    """One of them has saved each step, and the other one is told."""
    with processes(tmp_path / "run", ["checkpointer"] * 2, 10) as running:
        assert [process.wait(BOUND_S) for process in running] == [0, 0]
    with ws.training.Checkpointer(tmp_path / "run") as checkpointer:
        assert [info.step for info in checkpointer.checkpoints] == list(range(10))
        for step in range(10):
            state = checkpointer.load(step)
            assert (state["values"] == state["number"]).all()
