"""Kills a spread of a model before each of its changes of the disks in turn, and asks its readers.

Run as a program, as `kill_walk` is: `python -m tests.published.spread_walk SCENARIO DIRECTORY`. Prints one
JSON document.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import safetensors.numpy
from tests.published.kill_walk import model, seed_of
from tests.support import system_calls

import waystation.safetensors
from waystation import errors
from waystation.checkpoint.collect import find_leftovers, remove_leftovers

SCENARIOS = ("new", "empty", "over")
FOLDERS = ("disk1/model", "disk2/model", "disk3/model")


def spread(place: Path, seed: int, *, overwrite: bool) -> None:
    """Spreads a model over the folders."""
    folders = [place / folder for folder in FOLDERS]
    waystation.safetensors.spread(place / f"source{seed}", folders, max_file_bytes=1024, overwrite=overwrite)


def prepare(scenario: str, place: Path) -> None:
    """Makes the models, the disks, and what stands on these before."""
    for seed in (1, 2, 3):
        waystation.safetensors.save(model(seed), place / f"source{seed}")
    for folder in FOLDERS:
        (place / folder).parent.mkdir()
        if scenario == "empty":
            (place / folder).mkdir()
    if scenario == "over":
        spread(place, 1, overwrite=False)


def found(place: Path) -> int | None:
    """The model that readers of the first folder find: this package's, and those that go by the index."""
    first = place / FOLDERS[0]
    try:
        ours = seed_of(waystation.safetensors.load(first, framework="numpy"))
    except errors.NotFound:
        assert not first.exists() or not os.listdir(first), f"half a model is visible: {os.listdir(first)}"
        return None
    weight_map = json.loads((first / "model.safetensors.index.json").read_text())["weight_map"]
    files = {name: safetensors.numpy.load_file(first / name) for name in set(weight_map.values())}
    assert seed_of({tensor: files[name][tensor] for tensor, name in weight_map.items()}) == ours
    return ours


def check_next(scenario: str, place: Path, present: int | None, told: str, *, collect: bool) -> None:
    """The same command again does its work, and nothing is left but the files of one model, also where
    `waystation gc` has removed what the kill has left."""
    if collect:
        for folder in FOLDERS:
            for directory in ((place / folder).parent, place / folder):
                if directory.exists():
                    remove_leftovers(find_leftovers(directory))
    if present is not None and scenario != "over":
        try:
            spread(place, 3, overwrite=False)
        except errors.Conflict:
            pass
        else:
            raise AssertionError(f"{told}: a model was replaced that nobody wanted replaced")
    spread(place, 3, overwrite=present is not None)
    assert found(place) == 3, told
    read = {path.resolve() for path in (place / FOLDERS[0]).iterdir()}
    there = {path for folder in FOLDERS for path in (place / folder).parent.rglob("*") if path.is_file()}
    left = {path for path in there if path.resolve() not in read}
    assert not left, f"{told}: the next spread left {sorted(map(str, left))}"
    hidden = list(place.rglob(".*"))
    assert not hidden, f"{told}: {hidden}"


def walk(scenario: str, parent: Path) -> dict[str, object]:
    """Walks the steps of a scenario."""
    before, place = parent / "before", parent / "walked"
    before.mkdir()
    prepare(scenario, before)

    def run(kill_before: int | None) -> tuple[bool, list[str]]:
        shutil.rmtree(place, ignore_errors=True)
        # Links are absolute, and a note knows its files by their inodes: the disks are made anew.
        place.mkdir()
        prepare(scenario, place)
        return system_calls.run(lambda: spread(place, 2, overwrite=scenario == "over"), kill_before)

    _, whole = run(None)
    outcomes = []
    for kills, step in enumerate(system_calls.steps_to_walk(whole)):
        killed, changes = run(step)
        told = f"killed before change {step} (after {changes})"
        present = found(place)
        assert present in ({1, 2} if scenario == "over" else {None, 2}), f"{told}: found {present}"
        check_next(scenario, place, present, told, collect=bool(step % 2))
        outcomes.append(f"{changes[-1] if changes else 'start'}: {present}")
        if not killed and step >= len(whole):
            return {"kills": kills, "changes": whole, "outcomes": outcomes}
    raise AssertionError("a walk has no end of its own")


if __name__ == "__main__":
    json.dump(walk(sys.argv[1], Path(sys.argv[2])), sys.stdout)
