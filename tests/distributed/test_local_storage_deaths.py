"""A process is killed with SIGKILL before one of its changes of its disk, while all save to local storage.

The program that comes back finds the same on every disk: what was there before, or the new checkpoint, whole;
never one of them here and the other there. A process that is killed right before the rename of its part, when
the others rename theirs, is the case that needs a second phase: its part is completed.
`make test-long` walks all steps, `make test` the last ones and some of those before.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.distributed import local_scenarios
from tests.support import plain_renames, system_calls
from tests.support.long import IS_LONG
from tests.support.programs import Ended, Programs, Raised, running

from waystation.checkpoint.collect import find_leftovers, remove_leftovers

pytestmark = pytest.mark.skipif(not system_calls.SUPPORTED, reason="needs ptrace on x86-64 Linux")

COUNT = 2
PRIMARY, OTHER = 0, 1
KINDS = ("new", "overwrite", "overwrite in place")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    """A program that lives on: what was there before is its work, and it looks at what is there after."""
    directory = tmp_path_factory.mktemp("others")
    with running(local_scenarios.serve, count=COUNT, framework="torch", directory=directory) as programs:
        yield programs


def ask(others: Programs, action: str, directory: Path) -> list[Any]:
    """Has all processes of the program that lives on do something, each on its disk."""
    for index in range(COUNT):
        others.send(index, (action, directory))
    seen = [others.report(index) for index in range(COUNT)]
    assert not [process for process in seen if isinstance(process, Raised)], seen
    return seen


def save_and_kill(
    others: Programs, directory: Path, kind: str, victim: int, kill_before: int | None
) -> tuple[bool, list[str], list[Ended]]:
    """Has processes save; returns whether the victim was killed, what it did until then, and all ends."""
    for index in range(COUNT):
        (directory / f"disk {index}").mkdir(parents=True)
    if kind != "new":
        assert ask(others, "save", directory) == [["checkpoint"]] * COUNT
    with running(
        local_scenarios.save_until_killed,
        kind == "overwrite in place",
        count=COUNT,
        framework="torch",
        directory=directory,
    ) as programs:
        for index in range(COUNT):
            assert programs.report(index) == "ready"
        walker = system_calls.Walker(programs.process_id(victim), directory / f"disk {victim}")
        walker.attach()
        for index in range(COUNT):
            programs.send(index, "go on")
        killed, changes = walker.follow(kill_before)
        return killed, changes, programs.end()


def check_survivor(ended: list[Ended], victim: int) -> bool:
    """Looks at what the other process was told; returns whether it was told of success."""
    survivor = ended[1 - victim]
    assert survivor.exit_code == 0, survivor.output
    if survivor.value is None:
        return True
    assert isinstance(survivor.value, Raised), survivor
    assert survivor.value.type == "Unavailable", survivor
    return False


@pytest.mark.long
@pytest.mark.parametrize("victim", [PRIMARY, OTHER], ids=["primary", "other"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.share(6)
def test_killed_before_each_change_of_the_disk(
    others: Programs, tmp_path: Path, kind: str, victim: int
) -> None:
    if kind == "overwrite in place" and not plain_renames.SUPPORTED:
        pytest.skip("the filter of system calls is for x86-64 and AArch64 Linux")
    killed, changes, ended = save_and_kill(others, tmp_path / "whole", kind, victim, None)
    assert not killed
    assert check_survivor(ended, victim)
    assert [seen["found"] for seen in ask(others, "come back", tmp_path / "whole")] == [2] * COUNT
    commit = changes.index("renameat2")  # here the other commits, whatever becomes of this process
    steps = set(range(len(changes)))
    if not IS_LONG:
        steps = {*range(victim, commit, 61), *range(commit - 1, min(commit + 6, len(changes)), 2)}
    before = "CheckpointNotFound" if kind == "new" else 1
    for step in sorted(steps):
        directory = tmp_path / str(step)
        killed, done, ended = save_and_kill(others, directory, kind, victim, step)
        told = f"killed before change {step} (after {done[-3:]})"
        was_success = check_survivor(ended, victim)
        for index in range(COUNT):  # nothing here knows what the parts on the other disk are
            kept = [entry for entry in find_leftovers(directory / f"disk {index}") if not entry.removable]
            assert {entry.verdict for entry in kept} <= {"undecided"}, told
            if step % 2:
                remove_leftovers(find_leftovers(directory / f"disk {index}"))
        seen = ask(others, "come back", directory)
        found = [process["found"] for process in seen]
        assert found in ([before] * COUNT, [2] * COUNT), f"{told}: {seen}"
        if was_success or step >= commit:
            assert found == [2] * COUNT, f"{told}: {seen}"
        for process in seen:
            assert process["undecided"] == [], f"{told}: {seen}"
            if (
                kind != "overwrite in place"
            ):  # where the data that were replaced leave with the next overwrite
                assert process.get("strays", []) == [], f"{told}: {seen}"
            assert process["goes on"], told
            assert process["after"] == ["checkpoint"], f"{told}: {seen}"
            assert process["strays after"] == [], f"{told}: {seen}"
