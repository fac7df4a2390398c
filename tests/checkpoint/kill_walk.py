"""Kills a save before each of its changes of the disk in turn, and looks at what is left each time.
Of many equal changes in a row it takes the first and the last (`tests.support.system_calls`).

Run as a program, so that children are forked from a process without other threads:
`python -m tests.checkpoint.kill_walk SCENARIO DIRECTORY`. Prints one JSON document.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tests.support import plain_renames, system_calls

import waystation
from waystation.checkpoint.collect import find_leftovers, remove_leftovers

LARGE = 3 << 20


@functools.cache
def state(seed: int) -> dict[str, object]:
    """A state with arrays of several alignments, one larger than a block, and scalars."""
    random = np.random.default_rng(seed)
    return {
        "large": random.integers(0, 255, LARGE, dtype=np.uint8),
        "odd": random.standard_normal(1001).astype(np.float32),
        "nested": {"step": seed, "empty": np.zeros((0, 3))},
    }


def same(left: dict[str, object], right: dict[str, object]) -> bool:
    """Whether two of these states are equal, bit for bit."""
    arrays = all(np.array_equal(left[name], right[name]) for name in ("large", "odd"))
    return arrays and left["nested"]["step"] == right["nested"]["step"]  # type: ignore[index]


def present(path: Path) -> int | None:
    """Which of the states is at `path`: its seed; None without a checkpoint. Anything else fails."""
    if not waystation.is_checkpoint(path):
        assert not path.exists(), f"{path} exists but is no checkpoint"
        return None
    loaded = waystation.load(path)
    seed = int(loaded["nested"]["step"])
    assert same(loaded, state(seed)), f"{path} holds a damaged state {seed}"
    return seed + _others(path)


def _others(path: Path) -> int:
    """100 if another state is beside it, 0 otherwise; either is whole, and so are files of a handler."""
    names = waystation.metadata(path).checkpointable_names
    if "dataset" in names:
        position = Position(0)
        waystation.load_checkpointables(path, {"dataset": position})
        assert position.value == 7, f"{path} holds damaged files"
    if "other" not in names:
        return 0
    assert same(waystation.load(path, checkpointable_name="other"), state(9)), (
        f"{path} holds a damaged other state"
    )
    return 100


def leftovers(directory: Path) -> list[str]:
    """What is in a directory besides the checkpoint, and in the checkpoint besides what it is made of."""
    beside = [name for name in os.listdir(directory) if name != "checkpoint"]
    path = directory / "checkpoint"
    return sorted(beside + (waystation.checkpoint.verify(path).strays if path.exists() else []))


def nothing(_path: Path) -> None:
    """There is no checkpoint."""


def first(path: Path) -> None:
    waystation.save(path, state(1))


def first_in_place(path: Path) -> None:
    """A checkpoint that another process, gone since, has overwritten with state 1."""
    waystation.save(path, state(0))
    killed, _ = system_calls.run(lambda: waystation.save(path, state(1), overwrite=True), None)
    assert not killed


def save_new(path: Path) -> None:
    waystation.save(path, state(2))


def save_over(path: Path) -> None:
    waystation.save(path, state(2), overwrite=True)


def save_async(path: Path) -> None:
    waystation.save_async(path, state(2)).result()


def delete(path: Path) -> None:
    waystation.delete(path)


def several(path: Path) -> None:
    """State 1 beside another checkpointable."""
    waystation.save_checkpointables(path, {"state": state(1), "other": state(9)})


def delete_one(path: Path) -> None:
    waystation.delete(path, checkpointable_name="other")


def save_several(path: Path) -> None:
    """State 2 beside files of a handler."""
    waystation.save_checkpointables(path, {"state": state(2), "dataset": Position(7)})


def save_shared(path: Path) -> None:
    """State 2 beside another checkpointable, whose files are shared with the checkpoint that is replaced."""
    checkpointables = {"state": state(2), "other": state(9)}
    waystation.save_checkpointables(path, checkpointables, overwrite=True, unchanged_from=path)


def add(path: Path) -> None:
    waystation.add_checkpointables(path, {"other": state(9)})


class Position:
    """Saves itself."""

    def __init__(self, value: int) -> None:
        self.value = value

    async def save(self, directory: Any) -> Any:
        async def write() -> None:
            path = await directory.await_creation()
            (path / "below").mkdir()
            (path / "below" / "position.txt").write_text(str(self.value))

        return write()

    async def load(self, directory: Any) -> Any:
        async def read() -> None:
            self.value = int((directory / "below" / "position.txt").read_text())

        return read()


def save_split(path: Path) -> None:
    """Several data files."""
    context = waystation.Context()
    context.file.file_bytes_target = 1 << 20
    with context:
        waystation.save(path, state(2))


def save_last(path: Path) -> None:
    """The save after a kill."""
    waystation.save(path, state(3), overwrite=True)


@dataclass(frozen=True)
class Scenario:
    """What is walked.

    Attributes:
        action: What runs and is killed.
        before: Makes what stands there before.
        allowed: The states that may stand there after.
        plain_renames: Whether the file system has no other renames.
        present: Tells which state is there.
        leftovers: Lists what is there besides.
        again: Saves state 3 over whatever is there.
        from_first: Names of changes of the disk: the walk begins before the first of them, if there are any.
    """

    action: Callable[[Path], None]
    before: Callable[[Path], None]
    allowed: frozenset[int | None]
    plain_renames: bool = False
    present: Callable[[Path], int | None] = present
    leftovers: Callable[[Path], list[str]] = leftovers
    again: Callable[[Path], None] = save_last
    from_first: tuple[str, ...] = ()


NEW, OVER, GONE = frozenset({None, 2}), frozenset({1, 2}), frozenset({1, None})
ONE_GONE = frozenset({101, 1})

SCENARIOS = {
    "new": Scenario(save_new, nothing, NEW),
    "overwrite": Scenario(save_over, first, OVER),
    "async": Scenario(save_async, nothing, NEW),
    "split": Scenario(save_split, nothing, NEW),
    "delete": Scenario(delete, first, GONE),
    "delete-one": Scenario(delete_one, several, ONE_GONE),
    "add": Scenario(add, first, ONE_GONE),
    "several": Scenario(save_several, nothing, NEW),
    "overwrite-shared": Scenario(save_shared, several, frozenset({101, 102})),
    "overwrite-shared-plain": Scenario(save_shared, several, frozenset({101, 102}), plain_renames=True),
    "new-plain": Scenario(save_new, nothing, NEW, plain_renames=True),
    "overwrite-plain": Scenario(save_over, first, OVER, plain_renames=True),
    "overwrite-again-plain": Scenario(save_over, first_in_place, OVER, plain_renames=True),
}


def walk(scenario: Scenario, directory: Path) -> dict[str, object]:
    """Walks the steps of a scenario."""
    path = directory / "checkpoint"
    before, copy = (directory.with_name(f"{directory.name}-{name}") for name in ("before", "copy"))
    before.mkdir()
    scenario.before(before / "checkpoint")
    _, whole = _run(scenario, before, directory, None)
    first_step = min((whole.index(name) for name in scenario.from_first if name in whole), default=0)
    outcomes: list[str] = []
    for kills, step in enumerate(system_calls.steps_to_walk(whole, first_step)):
        killed, changes = _run(scenario, before, directory, step)
        found = scenario.present(path)
        told = f"killed before change {step} (after {changes})"
        assert found in scenario.allowed, f"{told}: found state {found}"

        shutil.copytree(directory, copy)
        remove_leftovers(find_leftovers(copy))
        assert scenario.present(copy / "checkpoint") == found, f"{told}: then 'gc' has touched the checkpoint"
        assert scenario.leftovers(copy) == [], f"{told}: 'gc' left {scenario.leftovers(copy)}"
        shutil.rmtree(copy)

        scenario.again(path)
        assert scenario.present(path) == 3
        assert scenario.leftovers(directory) == [], (
            f"{told}: the next save left {scenario.leftovers(directory)}"
        )
        outcomes.append(f"{changes[-1] if changes else 'start'}: {found}")
        if not killed and step >= len(whole):
            return {"kills": kills, "changes": whole, "outcomes": outcomes}
    raise AssertionError("a walk has no end of its own")


def _run(
    scenario: Scenario, before: Path, directory: Path, kill_before: int | None
) -> tuple[bool, list[str]]:
    shutil.rmtree(directory)
    shutil.copytree(before, directory)
    return system_calls.run(lambda: scenario.action(directory / "checkpoint"), kill_before)


def main(name: str, directory: Path) -> None:
    """Walks a scenario in a directory of its own below the given one, and prints what was seen."""
    scenario = SCENARIOS[name]
    if scenario.plain_renames:
        plain_renames.allow_only_plain_renames()
    walked = directory / "walked"
    walked.mkdir()
    json.dump(walk(scenario, walked), sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
