"""Where tests save checkpoints: a directory of this machine, or a location in an object store.

A test that takes `directory` runs with both, so both keep the same promises.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import s3

from waystation import storage
from waystation.storage import AnyPath, Location


@pytest.fixture(params=["disk", "store"])
def directory(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[AnyPath]:
    """Where checkpoints go. The environment says how the store is reached, also in processes that are
    started."""
    if request.param == "disk":
        yield tmp_path
        return
    place = s3.bucket()
    for name, value in s3.settings(place.endpoint).items():
        monkeypatch.setenv(name.upper(), value)
    yield Location(f"{place.location}/run")


def names_in(directory: AnyPath) -> list[str]:
    """What is in a directory, in order; nothing, if it is not there."""
    return [entry.name for entry in storage.entries_or_none(directory)]


def steps_in(directory: AnyPath) -> list[str]:
    """The names in it that are numbers."""
    return [name for name in names_in(directory) if name.isdigit()]


def on_this_machine(path: AnyPath) -> Path:
    """The files that hold what is at a path, to be damaged."""
    return path if isinstance(path, Path) else s3.folder_of(os.fspath(path))


def part_of(checkpoint: AnyPath, name: str = "state") -> Path:
    """The files of a checkpointable, whose directory in a store has an attempt in its name."""
    (found,) = on_this_machine(checkpoint).glob(f"{name}*")
    return found
