"""Kills saves in Orbax's layouts before each of their changes of the disk, by `tests.checkpoint.kill_walk`.

Run as a program: `python -m tests.orbax.kill_walk SCENARIO DIRECTORY`. What is left is loaded by genuine
Orbax, in a process of its own, since this one forks.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tests.checkpoint.kill_walk import NEW, OVER, Scenario, nothing, walk
from tests.orbax import load_server

import waystation

LAYOUTS: dict[str, dict[str, Any]] = {
    "files": {"use_ocdbt": False},
    "files-plain": {"use_ocdbt": False, "use_compression": False},
    "ocdbt": {"use_ocdbt": True},
}
MANY = 30
_RANDOM = re.compile(r"[0-9a-f]{32}")


def state(seed: int, array_count: int) -> dict[str, Any]:
    """Small arrays, a number and a string; genuine Orbax loads it as it is."""
    random = np.random.default_rng(seed)
    arrays = {f"a{number}": random.integers(0, 255, 100 + number) for number in range(array_count)}
    return {"arrays": arrays, "step": seed, "name": f"state {seed}"}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two of these states are equal, bit for bit."""
    arrays, others = one["arrays"], other["arrays"]
    return (
        (one["step"], one["name"]) == (other["step"], other["name"])
        and arrays.keys() == others.keys()
        and all(array.tobytes() == others[name].tobytes() for name, array in arrays.items())
    )


class Walked:
    """Saves in one layout, and looks at what is left of them.

    Args:
        layout: Options of `array.saving`.
        array_count: Arrays of the state.
        load: Loads a checkpoint with genuine Orbax.
    """

    def __init__(self, layout: dict[str, Any], array_count: int, load: Callable[[Path], Any]) -> None:
        self._layout = layout
        self._count = array_count
        self._load = load
        self._whole: list[str] = []  # what a checkpoint consists of

    def save(self, seed: int, *, overwrite: bool = False) -> Callable[[Path], None]:
        """Saves a state."""

        def action(path: Path) -> None:
            context = waystation.Context()
            for name, value in self._layout.items():
                setattr(context.array.saving, name, value)
            with context:
                waystation.save(path, state(seed, self._count), overwrite=overwrite)

        return action

    def learn(self, path: Path) -> None:
        """Learns of what a checkpoint consists."""
        self.save(0)(path)
        self._whole = _files(path)
        waystation.delete(path)

    def present(self, path: Path) -> int | None:
        """Which state is there to genuine Orbax, and to us; None without a checkpoint."""
        if not path.exists():
            return None
        loaded = self._load(path)
        seed = int(loaded["step"])
        assert same(loaded, state(seed, self._count)), f"genuine Orbax finds a damaged state {seed}"
        assert same(waystation.load(path), state(seed, self._count)), f"{path} is damaged to us"
        return seed

    def leftovers(self, directory: Path) -> list[str]:
        """What is besides the checkpoint, and what is in it besides that of which one consists."""
        beside = [name for name in os.listdir(directory) if name != "checkpoint"]
        path = directory / "checkpoint"
        inside = _files(path) if path.exists() else self._whole
        more, fewer = Counter(inside), Counter(self._whole)
        return [*beside, *(more - fewer + (fewer - more)).elements()]

    def scenario(self, *, overwrite: bool) -> Scenario:
        """The walk of a save."""
        return Scenario(
            self.save(2, overwrite=overwrite),
            self.save(1) if overwrite else nothing,
            OVER if overwrite else NEW,
            present=self.present,
            leftovers=self.leftovers,
            again=self.save(3, overwrite=True),
            # From many paths on they are made durable at once; only there that is another save.
            from_first=("syncfs",) if self._count == MANY else (),
        )


def _files(path: Path) -> list[str]:
    """The paths of all files below a directory, without what is random in their names."""
    return [_RANDOM.sub("*", str(file.relative_to(path))) for file in path.rglob("*")]


# The layout, how many arrays, and whether there is a checkpoint already.
SCENARIOS = {
    "files-new": ("files", 2, False),
    "files-overwrite": ("files", 2, True),
    "files-many-new": ("files-plain", MANY, False),
    "ocdbt-new": ("ocdbt", 2, False),
    "ocdbt-overwrite": ("ocdbt", 2, True),
}


def main(name: str, directory: Path) -> None:
    """Walks a scenario in a directory of its own below the given one, and prints what was seen."""
    layout, array_count, overwrite = SCENARIOS[name]
    with load_server.running() as server:
        walked = Walked(LAYOUTS[layout], array_count, server.load)
        walked.learn(directory / "whole")
        place = directory / "walked"
        place.mkdir()
        json.dump(walk(walked.scenario(overwrite=overwrite), place), sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
