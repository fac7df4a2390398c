"""Kills a save before each of its changes of the disk in turn, and looks at what is left each time.

Run as a program, so that children are forked from a process without other threads:
`python -m tests.checkpoint.kill_walk SCENARIO DIRECTORY`. Prints one JSON document.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tests.support import system_calls

import waystation

LARGE = 3 << 20


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
    return seed


def save_new(path: Path) -> None:
    waystation.save(path, state(2))


def save_over(path: Path) -> None:
    waystation.save(path, state(2), overwrite=True)


def save_async(path: Path) -> None:
    waystation.save_async(path, state(2)).result()


def delete(path: Path) -> None:
    waystation.delete(path)


def save_split(path: Path) -> None:
    """Several data files."""
    context = waystation.Context()
    context.file.file_bytes_target = 1 << 20
    with context:
        waystation.save(path, state(2))


# What runs, what stands there before, and which states may stand there after.
SCENARIOS: dict[str, tuple[Callable[[Path], None], bool, set[int | None]]] = {
    "new": (save_new, False, {None, 2}),
    "overwrite": (save_over, True, {1, 2}),
    "async": (save_async, False, {None, 2}),
    "split": (save_split, False, {None, 2}),
    "delete": (delete, True, {1, None}),
}


def walk(scenario: str, directory: Path) -> dict[str, object]:
    """Walks all steps of a scenario."""
    action, existing, allowed = SCENARIOS[scenario]
    path = directory / "checkpoint"
    outcomes: list[str] = []
    step = 0
    while True:
        waystation.delete(path, missing_ok=True)
        if existing:
            waystation.save(path, state(1))
        killed, changes = system_calls.run(lambda: action(path), step)
        found = present(path)
        assert found in allowed, f"killed before change {step} (after {changes}): found state {found}"
        waystation.save(path, state(3), overwrite=True)
        assert present(path) == 3
        left = sorted(os.listdir(directory))
        assert left == ["checkpoint"], f"killed before change {step}: the next save left {left}"
        outcomes.append(f"{changes[-1] if changes else 'start'}: {found}")
        if not killed:
            return {"steps": step, "changes": changes, "outcomes": outcomes}
        step += 1


if __name__ == "__main__":
    json.dump(walk(sys.argv[1], Path(sys.argv[2])), sys.stdout)
