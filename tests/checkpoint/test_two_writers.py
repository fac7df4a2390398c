"""Processes that write to one checkpoint in different ways: it is whole, and whoever fails says why."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from tests.checkpoint.two_writers import write
from tests.support.programs import Programs, running

import waystation as ws


def processes(path: Path, calls: list[str], times: int) -> contextlib.AbstractContextManager[Programs]:
    """One process for each call."""
    return running(write, path, calls, times, count=len(calls), framework="torch", directory=path.parent)


def check(path: Path) -> None:
    """Every checkpointable of it is one that was saved."""
    for state in ws.load_checkpointables(path).values():
        assert set(map(int, state["values"])) == {int(state["number"])}


@pytest.mark.share(6)
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
    with processes(path, calls, 30) as writers:
        while writers.are_running:
            check(path)
        assert writers.values() == [None] * len(calls)
    check(path)
    assert not ws.verify(path).damages


@pytest.mark.parametrize("call", ["overwrite", "overwrite in place"])
@pytest.mark.share(2)
def test_one_of_two_that_overwrite_is_killed(tmp_path: Path, call: str) -> None:
    path = tmp_path / "same"
    ws.save(path, {"number": 0, "values": [0]})
    for saves in range(8):
        with processes(path, [call, call], 15) as writers:
            for _ in range(saves):
                writers.report(0)
            with contextlib.suppress(ProcessLookupError):  # it may have come to its end
                writers.signal(0)
            check(path)
            _, other = writers.end()
            assert (other.exit_code, other.value) == (0, None), other.output
        check(path)
        assert not ws.verify(path).damages


def test_two_checkpointers_that_save_the_same_steps(tmp_path: Path) -> None:
    """One of them has saved each step, and the other one is told."""
    with processes(tmp_path / "run", ["checkpointer"] * 2, 10) as writers:
        assert writers.values() == [None, None]
    with ws.training.Checkpointer(tmp_path / "run") as checkpointer:
        assert [info.step for info in checkpointer.checkpoints] == list(range(10))
        for step in range(10):
            state = checkpointer.load(step)
            assert (state["values"] == state["number"]).all()
