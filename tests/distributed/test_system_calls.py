"""Which files a process touches while a program of several saves and loads (ptrace on real processes).

On storage that all share, what a process other than the primary does depends on its own part alone, not on
how many others there are. With local storage, no process looks at what is another's.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from tests.distributed import call_scenarios
from tests.support import system_calls
from tests.support.file_calls import Watcher
from tests.support.programs import Raised, running

pytestmark = pytest.mark.skipif(not system_calls.SUPPORTED, reason="needs ptrace on x86-64 Linux")

WATCHED = 1
# Files by whose presence a directory is a checkpoint.
MARKS = ("checkpoint.json", "_CHECKPOINT_METADATA", "orbax.checkpoint", "_CHECKPOINT_DELETION")


def calls_of(directory: Path, count: int, watched: int, action: str, *, local: bool) -> list[str]:
    """The calls about files below `disks` that one process makes in one save or load."""
    with running(
        call_scenarios.act, action, local, count=count, framework="torch", directory=directory
    ) as programs:
        for index in range(count):
            assert programs.report(index) == "ready"
        watcher = Watcher(programs.process_id(watched), directory / "disks")
        watcher.attach()
        for index in range(count):
            programs.send(index, "go on")
        _, calls = watcher.follow(None)
        ended = programs.end()
    for process in ended:
        assert (process.exit_code, isinstance(process.value, Raised)) == (0, False), process
    return calls


def test_calls_do_not_grow_with_the_number_of_processes(tmp_path: Path) -> None:
    counted: dict[str, list[Counter[str]]] = {"save": [], "load": []}
    for count in (2, 4):
        directory = tmp_path / str(count)
        (directory / "disks").mkdir(parents=True)
        for action, seen in counted.items():
            calls = calls_of(directory, count, WATCHED, action, local=False)
            seen.append(Counter(call.partition(" ")[0] for call in calls))
            # A watch that saw nothing would prove nothing.
            files = [call for call in calls if f"p{WATCHED:05}-000.safetensors" in call]
            assert files, calls
            assert not [call for call in calls if "p00000-000.safetensors" in call], calls
    for action, (few, many) in counted.items():
        assert few == many, f"{action}: {few} with 2 processes, {many} with 4"
        assert sum(few.values()) < 40, few


@pytest.mark.parametrize("watched", [0, 1])
@pytest.mark.share(2)
def test_local_storage_is_nobody_elses(tmp_path: Path, watched: int) -> None:
    for index in range(2):
        (tmp_path / "disks" / f"disk {index}").mkdir(parents=True)
    own = f"{tmp_path}/disks/disk {watched}"
    for action in ("save", "load", "delete"):
        calls = calls_of(tmp_path, 2, watched, action, local=True)
        assert [call for call in calls if own in call], calls
        assert not [call for call in calls if f"{tmp_path}/disks/disk {1 - watched}" in call], calls
        # Above its own it asks only whether a checkpoint is there, which the save would be inside of.
        above = {f"{tmp_path}/disks/{name}" for name in MARKS}
        assert not [call for call in calls if f" {own}" not in call and call.partition(" ")[2] not in above]
