"""Kills a save of a published model before each of its changes of the disk in turn, and asks its readers.
Of many equal changes in a row it takes the first and the last (`tests.support.system_calls`).

Run as a program, so that children are forked from a process without other threads:
`python -m tests.published.kill_walk SCENARIO DIRECTORY`. Prints one JSON document.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from tests.support import system_calls

import waystation.safetensors
from waystation import errors
from waystation.checkpoint.collect import find_leftovers, remove_leftovers

ONE, TWO, FOUR = 1 << 30, 2048, 1024  # most bytes of a file: of four arrays of 1 KiB

Arrays = dict[str, np.ndarray[Any, Any]]


def model(seed: int) -> Arrays:
    """Arrays of which most have the names that those of any other seed have."""
    values = np.arange(256, dtype=np.float32) + 1000 * seed
    return {name: values + number for number, name in enumerate(["a", "b", "c", f"only {seed}"])}


def seed_of(found: Arrays) -> int:
    """Whose model this is; anything else fails."""
    seed = int(found["a"][0]) // 1000
    assert found.keys() == model(seed).keys(), f"tensors of two models were found: {sorted(found)}"
    for name, array in model(seed).items():
        assert np.array_equal(found[name], array), f"the tensor {name!r} is not of model {seed}"
    return seed


@dataclass(frozen=True)
class Scenario:
    """What is walked.

    Attributes:
        after: Most bytes of a file of what is saved.
        before: The same of what stands there before; None without a model.
        stem: What names of files begin with.
        has_index: Whether what stands there has its index.
        has_directory: Whether there is a directory.
    """

    after: int
    before: int | None = None
    stem: str = "model"
    has_index: bool = True
    has_directory: bool = True

    def save(self, directory: Path, seed: int, max_file_bytes: int) -> list[str]:
        """Saves a model; returns its files."""
        path = directory if self.stem == "model" else directory / f"{self.stem}.safetensors"
        return waystation.safetensors.save(
            model(seed), path, max_file_bytes=max_file_bytes, overwrite=self.before is not None or seed == 3
        )

    def prepare(self, directory: Path) -> None:
        """Makes what stands there before."""
        if self.has_directory:
            directory.mkdir()
            (directory / "config.json").write_text("{}")
        if self.before is not None:
            self.save(directory, 1, self.before)
            if not self.has_index:
                (directory / f"{self.stem}.safetensors.index.json").unlink()

    def allowed(self) -> set[int | None]:
        """What readers of the directory may find."""
        return {None, 2} if self.before is None else {1, 2}

    # ---- readers -------------------------------------------------------------------------------

    def found(self, directory: Path) -> int | None:
        """What our reader of the directory finds, None where there is no model or a part that it refuses."""
        # Files may be seen to come one by one only where there was a directory and no model.
        may_be_in_part = self.before is None and self.has_directory
        refused = (errors.NotFound, errors.Corrupt) if may_be_in_part else errors.NotFound
        try:
            return seed_of(waystation.safetensors.load(directory, framework="numpy"))
        except refused:
            return None

    def found_by_others(self, directory: Path) -> int | None:
        """What tools of Hugging Face find: one file, else what the index names."""
        one = directory / f"{self.stem}.safetensors"
        index = directory / f"{self.stem}.safetensors.index.json"
        if one.exists() and (self.stem == "model" or not index.exists()):
            return seed_of(safetensors.numpy.load_file(one))
        if not index.exists():
            return None
        weight_map = json.loads(index.read_text())["weight_map"]
        files = {name: safetensors.numpy.load_file(directory / name) for name in set(weight_map.values())}
        return seed_of({tensor: files[name][tensor] for tensor, name in weight_map.items()})

    def check_names(self, directory: Path) -> None:
        """Whoever goes by the name of a file or of the index finds one whole model there, or nothing."""
        for name in (f"{self.stem}.safetensors", f"{self.stem}.safetensors.index.json"):
            if (directory / name).exists():
                seed_of(waystation.safetensors.load(directory / name, framework="numpy"))


SCENARIOS = {
    "one": Scenario(ONE, has_directory=False),
    "several": Scenario(TWO, has_directory=False),
    "one-into": Scenario(ONE),
    "several-into": Scenario(TWO),
    "one-over-one": Scenario(ONE, ONE),
    "several-over-one": Scenario(TWO, ONE),
    "one-over-several": Scenario(ONE, TWO),
    "several-over-as-many": Scenario(TWO, TWO),
    "several-over-several": Scenario(TWO, FOUR),
    "several-over-several-without-index": Scenario(TWO, TWO, has_index=False),
    "one-over-several-without-index": Scenario(ONE, TWO, has_index=False),
    "other-name-one-over-one": Scenario(ONE, ONE, "weights"),
    "other-name-several-over-one": Scenario(TWO, ONE, "weights"),
    "other-name-one-over-several": Scenario(ONE, TWO, "weights"),
    "other-name-several-over-as-many": Scenario(TWO, TWO, "weights"),
    "other-name-one-over-several-without-index": Scenario(ONE, TWO, "weights", has_index=False),
}


def walk(scenario: Scenario, parent: Path) -> dict[str, object]:
    """Walks the steps of a scenario."""
    directory = parent / "saved"
    before = parent.with_name(f"{parent.name}-before")
    before.mkdir()
    scenario.prepare(before / "saved")
    _, whole = _run(scenario, before, directory, None)
    outcomes: list[str] = []
    for kills, step in enumerate(system_calls.steps_to_walk(whole)):
        killed, changes = _run(scenario, before, directory, step)
        told = f"killed before change {step} (after {changes})"
        found = scenario.found(directory) if directory.exists() else None
        assert found in scenario.allowed(), f"{told}: found model {found}"
        by_others = scenario.found_by_others(directory) if directory.exists() else None
        expected = scenario.allowed() | (set() if scenario.has_index else {None})
        assert by_others in expected, f"{told}: others found model {by_others}"
        scenario.check_names(directory)
        _check_next(scenario, directory, (ONE, TWO)[step % 2], told)
        outcomes.append(f"{changes[-1] if changes else 'start'}: {found}")
        if not killed and step >= len(whole):
            return {"kills": kills, "changes": whole, "outcomes": outcomes}
    raise AssertionError("a walk has no end of its own")


def _run(
    scenario: Scenario, before: Path, directory: Path, kill_before: int | None
) -> tuple[bool, list[str]]:
    shutil.rmtree(directory.parent)
    shutil.copytree(before, directory.parent)
    return system_calls.run(lambda: _save(scenario, directory), kill_before)


def _save(scenario: Scenario, directory: Path) -> None:
    scenario.save(directory, 2, scenario.after)


def _check_next(scenario: Scenario, directory: Path, max_file_bytes: int, told: str) -> None:
    """The next save replaces whatever is there, and with `gc` nothing else is left."""
    files = scenario.save(directory, 3, max_file_bytes)
    assert scenario.found(directory) == 3, told
    for place in (directory.parent, directory):
        remove_leftovers(find_leftovers(place))
    kept = ["config.json"] if scenario.has_directory else []
    expected = sorted([*kept, *map(os.path.basename, files)])
    assert sorted(os.listdir(directory)) == expected, f"{told}: the next save left {os.listdir(directory)}"
    assert os.listdir(directory.parent) == [directory.name], f"{told}: {os.listdir(directory.parent)}"


def main(name: str, directory: Path) -> None:
    """Walks a scenario in a directory of its own below the given one, and prints what was seen."""
    walked = directory / "walked"
    walked.mkdir()
    json.dump(walk(SCENARIOS[name], walked), sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
