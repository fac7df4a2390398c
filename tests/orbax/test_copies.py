"""Copies and mirrors of checkpoints in Orbax's layouts, between disks and stores, whoever has written
them."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.orbax import oracle
from tests.support import s3
from tests.support.long import IS_LONG
from tests.support.places import on_this_machine

import waystation
from waystation import storage
from waystation.checkpoint.verify import verify
from waystation.errors import CheckpointNotFound, Conflict, Corrupt, Unsupported
from waystation.path import Location
from waystation.storage import AnyPath
from waystation.training.mirror import mirror

PLACES = ("disk", "store")
pairs = pytest.mark.parametrize(("origin", "target"), list(itertools.product(PLACES, PLACES)))


def state_of(value: int) -> dict[str, Any]:
    large = np.random.default_rng(value).random(100_000, np.float32)
    return {"large": large, "b": {"c": np.arange(7) + value}, "step": value}


def check(found: dict[str, Any], value: int) -> None:
    expected = state_of(value)
    assert jax.tree.all(jax.tree.map(np.array_equal, expected, found)), found


def save(path: AnyPath, value: int, *, use_ocdbt: bool = True) -> None:
    options = waystation.Context()
    options.array.saving.use_ocdbt = use_ocdbt
    with options:
        waystation.save(path, state_of(value))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], AnyPath]:
    """Gives a directory of a kind of place."""
    numbers = itertools.count()
    bucket = s3.bucket()
    for name, value in s3.settings(bucket.endpoint).items():
        monkeypatch.setenv(name.upper(), value)

    def give(kind: str) -> AnyPath:
        name = f"{kind}-{next(numbers)}"
        return tmp_path / name if kind == "disk" else Location(f"{bucket.location}/{name}")

    return give


@pairs
@pytest.mark.parametrize("use_ocdbt", [True, False])
@pytest.mark.share(3)
def test_a_copy_is_the_checkpoint(
    place: Callable[[str], AnyPath], origin: str, target: str, use_ocdbt: bool, tmp_path: Path
) -> None:
    source, copied = place(origin) / "ckpt", place(target) / "ckpt"
    save(source, 3, use_ocdbt=use_ocdbt)
    done = waystation.copy(source, copied)
    assert done.files > 0
    check(waystation.load(copied), 3)
    assert verify(copied).damages == verify(copied).strays == []
    assert not [name for name in storage.files_below(os.fspath(copied)) if "waystation-tmp" in name]
    shutil.copytree(on_this_machine(copied), tmp_path / "seen-by-orbax")
    check(oracle.load(tmp_path / "seen-by-orbax"), 3)
    with pytest.raises(Conflict, match="overwrite=True"):
        waystation.copy(source, copied)
    assert mirror(source.parent, copied.parent).equal == ["ckpt"]


@pairs
@pytest.mark.share(2)
def test_what_genuine_orbax_has_saved_is_copied(
    place: Callable[[str], AnyPath], origin: str, target: str, tmp_path: Path
) -> None:
    source, copied = place(origin) / "ckpt", place(target) / "ckpt"
    oracle.save(on_this_machine(source), state_of(5))
    if origin == "disk":
        (on_this_machine(source) / "commit_success.txt").unlink()  # which nothing needs on a disk
    waystation.copy(source, copied)
    check(waystation.load(copied), 5)
    shutil.copytree(on_this_machine(copied), tmp_path / "seen-by-orbax")
    check(oracle.load(tmp_path / "seen-by-orbax"), 5)
    assert mirror(source.parent, copied.parent).equal == ["ckpt"]


def test_steps_of_genuine_orbax_are_mirrored(place: Callable[[str], AnyPath], tmp_path: Path) -> None:
    with oracle.version0.CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2):
            manager.save(step, args=oracle.version0.args.StandardSave(state_of(step)))
            manager.wait_until_finished()
    there = place("store")
    assert list(mirror(tmp_path / "run", there).copied) == ["2", "1"]
    assert mirror(tmp_path / "run", there).equal == ["2", "1"]
    back = tmp_path / "back"
    assert list(mirror(there, back).copied) == ["2", "1"]
    with oracle.version0.CheckpointManager(back) as manager:
        assert sorted(manager.all_steps()) == [1, 2]
        found = manager.restore(2, args=oracle.version0.args.StandardRestore())
    check(found, 2)


@pytest.mark.parametrize("target", PLACES)
def test_damage_is_told_and_nothing_is_made(place: Callable[[str], AnyPath], target: str) -> None:
    source, copied = place("disk") / "ckpt", place(target) / "ckpt"
    save(source, 1)
    files = sorted(on_this_machine(source).rglob("*"), key=lambda file: file.stat().st_size)
    content = bytearray(files[-1].read_bytes())
    content[len(content) // 2] ^= 1
    files[-1].write_bytes(bytes(content))
    with pytest.raises(Corrupt):
        waystation.copy(source, copied)
    assert storage.entries_or_none(copied.parent) == []
    files[-1].unlink()
    with pytest.raises(Corrupt, match="missing"):
        waystation.copy(source, copied)
    assert storage.entries_or_none(copied.parent) == []


def test_what_is_there_is_replaced_on_a_disk_alone(place: Callable[[str], AnyPath]) -> None:
    source, disk, store = place("disk") / "ckpt", place("disk") / "ckpt", place("store") / "ckpt"
    save(source, 1)
    for target in (disk, store):
        save(target, 2)
    waystation.copy(source, disk, overwrite=True)
    check(waystation.load(disk), 1)
    assert os.listdir(disk.parent) == ["ckpt"]
    with pytest.raises(Unsupported, match="delete it first"):
        waystation.copy(source, store, overwrite=True)
    check(waystation.load(store), 2)
    done = mirror(source.parent, store.parent, overwrite=True)
    assert "delete it first" in done.damaged["ckpt"]
    assert mirror(source.parent, store.parent).differing == ["ckpt"]
    check(waystation.load(store), 2)


def test_one_of_ours_in_a_store_is_not_replaced(place: Callable[[str], AnyPath]) -> None:
    """Its record would go on to count."""
    source, target = place("disk") / "ckpt", place("store") / "ckpt"
    save(source, 1)
    waystation.save(target, {"a": np.arange(4)})
    with pytest.raises(Unsupported, match="delete it first"):
        waystation.copy(source, target, overwrite=True)
    assert len(waystation.load(target)["a"]) == 4


@pytest.mark.parametrize("target", PLACES)
def test_a_mirror_removes_what_the_source_has_not(place: Callable[[str], AnyPath], target: str) -> None:
    source, there = place("disk"), place(target)
    for step in (1, 2):
        save(source / str(step), step)
    mirror(source, there)
    waystation.delete(source / "1")
    assert mirror(source, there, delete=True).deleted == ["1"]
    assert [entry.name for entry in storage.entries_or_none(there)] == ["2"]


def test_a_part_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "a", 1)
    with pytest.raises(Unsupported, match="is a part of checkpoint"):
        waystation.copy(tmp_path / "a" / "state", tmp_path / "b")
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("origin", PLACES)
def test_a_source_that_is_replaced_meanwhile_is_copied_as_it_is_then(
    place: Callable[[str], AnyPath], origin: str
) -> None:
    source, copied = place(origin) / "ckpt", place("disk") / "ckpt"
    oracle.save(on_this_machine(source), state_of(1))
    replaced = []

    def replace(done: int, total: int) -> None:
        if not replaced and done:
            replaced.append(done)
            waystation.delete(source)
            save(source, 2)

    waystation.copy(source, copied, on_progress=replace)
    assert replaced
    check(waystation.load(copied), 2)
    replaced.clear()

    def remove(done: int, total: int) -> None:
        if not replaced and done:
            replaced.append(done)
            waystation.delete(source)

    with pytest.raises(CheckpointNotFound):
        waystation.copy(source, copied.parent / "other", on_progress=remove)
    assert [entry.name for entry in storage.entries_or_none(copied.parent)] == ["ckpt"]


def copy_from(endpoint: str, source: str, target: str) -> None:
    with s3.context(endpoint):
        waystation.copy(source, target)


@pytest.mark.long
def test_killed_at_any_request_a_copy_is_whole_or_invisible(tmp_path: Path) -> None:
    bucket = s3.bucket()
    save(tmp_path / "ckpt", 1)
    for number in itertools.count(1) if IS_LONG else [12]:
        path = f"{bucket.location}/run/{number}"
        was_killed = s3.killed_at(bucket, number, copy_from, os.fspath(tmp_path / "ckpt"), path)
        with bucket.context():
            if waystation.is_checkpoint(path):
                check(waystation.load(path), 1)
                assert verify(path).damages == []
            else:
                assert was_killed
        if not was_killed:
            break
