"""A process of a torch program is killed with SIGKILL right before one of its changes of the disk.

The others get a typed error that names it, or the save succeeds; on the disk is no checkpoint or a whole one,
and programs that come later save there as if nothing had been. Steps of the primary and of another process
are walked: in `make test-long` all of them, which takes minutes; in `make test` the last ones, where the
commit is, and some of those before.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.distributed import torch_scenarios
from tests.support import system_calls
from tests.support.long import IS_LONG
from tests.support.programs import Ended, Raised, running

import waystation
from waystation.checkpoint.collect import find_leftovers, remove_leftovers

pytestmark = pytest.mark.skipif(not system_calls.SUPPORTED, reason="needs ptrace on x86-64 Linux")

COUNT = 2
PRIMARY, OTHER = 0, 1


def save_and_kill(
    directory: Path, victim: int, kill_before: int | None, **saving: Any
) -> tuple[bool, list[str], list[Ended]]:
    """Has processes save, with options of `array.saving`; returns whether the victim was killed, what it did
    until then, and all ends."""
    checkpoint = directory / "checkpoints" / "1"
    with running(
        torch_scenarios.save_until_killed,
        checkpoint,
        saving,
        count=COUNT,
        framework="torch",
        directory=directory,
    ) as programs:
        for index in range(COUNT):
            assert programs.report(index) == "ready"
        walker = system_calls.Walker(programs.process_id(victim), checkpoint.parent)
        walker.attach()
        for index in range(COUNT):
            programs.send(index, "go on")
        killed, changes = walker.follow(kill_before)
        return killed, changes, programs.end()


def check_told(ended: list[Ended], victim: int, *, killed: bool) -> None:
    """Checks what the survivors were told."""
    for index, process in enumerate(ended):
        if killed and index == victim:
            continue
        assert process.exit_code == 0, process.output
        if killed and process.value is not None:
            assert isinstance(process.value, Raised), process
            assert process.value.type == "Unavailable", process
            assert f"process {victim}" in process.value.message, process


def look(directory: Path, ended: list[Ended], victim: int, *, killed: bool) -> None:
    """Checks what the survivors were told and what is on the disk."""
    root = directory / "checkpoints"
    check_told(ended, victim, killed=killed)
    committed = waystation.is_checkpoint(root / "1")
    if committed:
        assert waystation.verify(root / "1").damages == []
        remove_leftovers(find_leftovers(root))
        assert os.listdir(root) == ["1"]
    elif victim == OTHER:
        assert os.listdir(root) == [], "the primary lives and has removed the attempt"


def steps_of(changes: list[str]) -> list[int]:
    """The steps that are walked."""
    steps = range(len(changes))
    if IS_LONG:
        return list(steps)
    return sorted({*steps[:: max(1, len(steps) // 2)], *steps[-2:]})


@pytest.mark.long
@pytest.mark.parametrize("victim", [PRIMARY, OTHER], ids=["primary", "other"])
@pytest.mark.share(2)
def test_killed_before_each_change_of_the_disk(tmp_path: Path, victim: int) -> None:
    (tmp_path / "whole" / "checkpoints").mkdir(parents=True)
    killed, changes, ended = save_and_kill(tmp_path / "whole", victim, None)
    assert not killed
    look(tmp_path / "whole", ended, victim, killed=False)
    assert waystation.is_checkpoint(tmp_path / "whole" / "checkpoints" / "1")
    assert len(changes) > 4, changes
    for step in steps_of(changes):
        directory = tmp_path / str(step)
        (directory / "checkpoints").mkdir(parents=True)
        killed, _, ended = save_and_kill(directory, victim, step)
        look(directory, ended, victim, killed=killed)
        if not waystation.is_checkpoint(directory / "checkpoints" / "1"):
            waystation.save(directory / "checkpoints" / "1", {"after": 1})
            assert os.listdir(directory / "checkpoints") == ["1"]
