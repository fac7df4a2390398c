"""Kills a save of a step, with the collection that follows it, before each of its changes of the disk in
turn. Of many equal changes in a row it takes the first and the last (`tests.support.system_calls`).

Run as a program, so that children are forked from a process without other threads:
`python -m tests.training.kill_steps DIRECTORY`. Prints one JSON document.
"""

from __future__ import annotations

import json
import shutil
import sys
from functools import partial
from pathlib import Path

import numpy as np
from tests.support import system_calls

from waystation.training import Checkpointer, preservation_policies, save_decision_policies


def state(step: int) -> dict[str, object]:
    return {"a": np.full(2000, step), "step": step}


def open_sequence(root: Path) -> Checkpointer:
    return Checkpointer(
        root,
        save_decision_policy=save_decision_policies.FixedIntervalPolicy(1),
        preservation_policy=preservation_policies.LatestN(2),
    )


def require_whole(checkpointer: Checkpointer) -> int:
    """Loads every step that is listed; returns the latest."""
    for info in checkpointer.checkpoints:
        loaded = checkpointer.load(info.step)
        assert loaded["step"] == info.step
        assert (loaded["a"] == info.step).all()
    assert checkpointer.latest is not None
    return checkpointer.latest.step


def walk(root: Path) -> dict[str, list[str]]:
    """Walks all changes; returns what was found after each, and the changes of a save that is not killed."""
    before = root.with_name("before")
    with open_sequence(before) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step))
    _, whole = _run(before, root, None)
    outcomes: list[str] = []
    for kill_before in system_calls.steps_to_walk(whole):
        killed, _ = _run(before, root, kill_before)
        with open_sequence(root) as found:
            assert found.damaged == []
            outcomes.append(f"{[info.step for info in found.checkpoints]} {require_whole(found)}")
            # The program goes on, and clears away what the kill has left.
            found.save(4, state(4))
            assert require_whole(found) == 4
            left = [path.name for path in root.iterdir() if not path.name.isdigit() and path.suffix != ""]
            assert left == [], kill_before
        if not killed and kill_before >= len(whole):
            return {"outcomes": outcomes, "changes": whole}
    raise AssertionError("a walk has no end of its own")


def _run(before: Path, root: Path, kill_before: int | None) -> tuple[bool, list[str]]:
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(before, root)
    return system_calls.run(partial(_save, open_sequence(root)), kill_before)


def _save(checkpointer: Checkpointer) -> None:
    checkpointer.save(3, state(3))


def main() -> None:
    """Walks in a directory of its own below the given one."""
    json.dump(walk(Path(sys.argv[1]) / "walked"), sys.stdout)


if __name__ == "__main__":
    main()
