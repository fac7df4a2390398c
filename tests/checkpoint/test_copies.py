"""Copies of checkpoints between disks and object stores."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tests.checkpoint.copy_programs import copy_and_tell, copy_slowly, copying
from tests.handlers.examples import Counter, CounterHandler, SubdirectoryHandler
from tests.handlers.states import with_handlers
from tests.support import programs, s3
from tests.support.long import IS_LONG
from tests.support.places import on_this_machine, part_of

import waystation
from waystation import storage
from waystation.checkpoint.collect import find_leftovers
from waystation.checkpoint.compare import compare
from waystation.errors import (
    CheckpointNotFound,
    Conflict,
    Corrupt,
    InvalidInput,
    Unsupported,
    WrongType,
)
from waystation.storage import AnyPath, Location
from waystation.storage.store_leases import StoreLeases

pytestmark = pytest.mark.long

KINDS = ("disk", "store")
PAIRS = list(itertools.product(KINDS, KINDS)) if IS_LONG else [("disk", "store"), ("store", "disk")]
EVERY_PAIR = pytest.mark.parametrize("places", PAIRS, indirect=True, ids="-".join)
"""The places of a source and of a destination, of all kinds; in `make test` not of two of one kind."""


@pytest.fixture
def places(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[AnyPath, AnyPath]:
    """A directory for the source, and one for the copy."""
    kinds = request.param
    if "store" in kinds:
        bucket = s3.bucket()
        for name, value in s3.settings(bucket.endpoint).items():
            monkeypatch.setenv(name.upper(), value)
    found: list[AnyPath] = []
    for kind, name in zip(kinds, ("from", "to"), strict=True):
        found.append(tmp_path / name if kind == "disk" else Location(f"{bucket.location}/{name}"))
        if kind == "disk":
            (tmp_path / name).mkdir()
    return found[0], found[1]


def state_of(value: int) -> dict[str, Any]:
    """Arrays in several files (see `small_files`), one of them larger than a part of an upload."""
    return {
        "large": np.full(3 << 20, value, np.float32),
        "middle": [np.arange(300_000, dtype=np.int32) + value + number for number in range(6)],
        "half": np.full((100, 7), value, ml_dtypes.bfloat16),
        "empty": np.zeros((0, 5), np.int8),
        "text": "of any kind",
        "step": value,
    }


def small_files() -> waystation.Context:
    """Options by which a state is in several files."""
    made = waystation.Context()
    made.file.file_bytes_target = 2 << 20
    return made


def save(path: AnyPath, value: int, **given: Any) -> None:
    with small_files():
        waystation.save(path, state_of(value), **given)


def assert_equal(first: AnyPath, second: AnyPath) -> None:
    """Both are whole, and hold the same."""
    for path in (first, second):
        found = waystation.verify(path)
        assert (found.damages, found.strays) == ([], [])
    assert not compare(first, second).differences


def leftovers(place: AnyPath) -> list[Any]:
    return find_leftovers(place)


@EVERY_PAIR
@pytest.mark.share(2)
def test_a_copy_is_the_checkpoint(places: tuple[AnyPath, AnyPath]) -> None:
    source, destination = places[0] / "7", places[1] / "there" / "7"
    mesh = jax.make_mesh((4,), ("x",))
    sharded = jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, PartitionSpec("x")))
    context = with_handlers(SubdirectoryHandler)
    context.file.file_bytes_target = 2 << 20
    with context:
        parts = {"state": {**state_of(3), "sharded": sharded}, "other": {"b": np.ones(5)}, "n": Counter(4)}
        waystation.save_checkpointables(source, parts, custom_metadata={"of": ["mine"]})
        told: list[tuple[int, int]] = []
        done = waystation.copy(source, destination, on_progress=lambda *now: told.append(now))
        assert_equal(source, destination)
        loaded = waystation.load_checkpointables(destination)
        assert loaded["n"] == Counter(4)
        described, copied = (waystation.checkpointables_metadata(path) for path in (source, destination))
    assert (copied.custom_metadata, copied.commit_timestamp_nsecs) == (
        described.custom_metadata,
        described.commit_timestamp_nsecs,
    )
    np.testing.assert_array_equal(loaded["state"]["sharded"], sharded)
    assert loaded["state"]["large"].tobytes() == state_of(3)["large"].tobytes()
    assert done.path == os.fspath(destination)
    assert (done.found_bytes, told[-1]) == (0, (done.nbytes, done.nbytes))
    assert done.files >= 4
    assert told == sorted(told)
    assert leftovers(places[1] / "there") == []
    assert [entry.name for entry in storage.entries(destination.parent)] == ["7"]
    with pytest.raises(Conflict, match="overwrite=True"):
        waystation.copy(source, destination)


@EVERY_PAIR
def test_a_copy_of_a_copy_has_the_same_files(places: tuple[AnyPath, AnyPath]) -> None:
    save(places[0] / "a", 1)
    waystation.copy(places[0] / "a", places[1] / "b")
    waystation.copy(places[1] / "b", places[0] / "c")
    first, last = (
        {
            name: (part_of(places[0] / path) / name).read_bytes()
            for name in os.listdir(part_of(places[0] / path))
        }
        for path in ("a", "c")
    )
    assert first == last


@EVERY_PAIR
def test_an_overwrite_replaces_what_is_there_once_the_copy_is_whole(places: tuple[AnyPath, AnyPath]) -> None:
    source, destination = places[0] / "a", places[1] / "b"
    save(source, 1)
    save(destination, 2)

    def look(done: int, total: int) -> None:
        if done < total:
            assert waystation.load(destination)["step"] == 2

    waystation.copy(source, destination, overwrite=True, on_progress=look)
    assert_equal(source, destination)
    assert leftovers(places[1]) == []


@EVERY_PAIR
@pytest.mark.parametrize("lost", [None, "its record", "an earlier record"])
@pytest.mark.share(3)
def test_an_overwrite_repairs_what_is_damaged(
    places: tuple[AnyPath, AnyPath], lost: str | None, tmp_path: Path
) -> None:
    """Nothing of what is there is trusted: it may be replaced because it is damaged."""
    source, destination = places[0] / "a", places[1] / "b"
    context = with_handlers(CounterHandler)
    context.file.file_bytes_target = 2 << 20
    with context:
        waystation.save_checkpointables(source, {"state": state_of(1), "n": Counter(4)})
        waystation.copy(source, destination)
        damage_a_bit(part_of(destination))
        damage_a_bit(part_of(destination, "n"), "value.json")
        record = on_this_machine(destination) / "checkpoint.json"
        if lost == "its record":
            record.write_bytes(record.read_bytes()[:-20])
        elif lost == "an earlier record" and isinstance(destination, Location):
            # As when a copy over it was killed right after its commit.
            stale = part_of(destination)
            shutil.copytree(stale, tmp_path / "kept")
            waystation.copy(source, destination, overwrite=True)
            assert not stale.exists()
            (tmp_path / "kept").rename(stale)
        done = waystation.copy(source, destination, overwrite=True)
        found = waystation.verify(destination)
        assert found.damages == []
        assert waystation.load_checkpointables(destination)["n"] == Counter(4)
        assert done.found_bytes < done.nbytes
    assert not compare(source, destination).differences


def damage_a_bit(directory: Path, name: str = "*.safetensors") -> None:
    """Changes a bit of the largest file of a checkpointable."""
    file = max(directory.rglob(name), key=lambda found: found.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@EVERY_PAIR
def test_damage_of_the_source_is_named_and_nothing_is_there(places: tuple[AnyPath, AnyPath]) -> None:
    source, destination = places[0] / "a", places[1] / "b"
    save(source, 1)
    file = sorted(part_of(source).glob("*.safetensors"))[1]
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    with pytest.raises(Corrupt) as failure:
        waystation.copy(source, destination)
    assert Path(failure.value.context["path"]).name == file.name
    assert int(failure.value.context["offset"]) == (len(content) - 1) // (256 << 10) * (256 << 10)
    assert "middle" in failure.value.context["array"] or "large" in failure.value.context["array"]
    assert not waystation.is_checkpoint(destination)
    assert storage.entries_or_none(places[1]) == []
    file.unlink()
    with pytest.raises(Corrupt, match="missing"):
        waystation.copy(source, destination)
    assert storage.entries_or_none(places[1]) == []


@EVERY_PAIR
def test_damage_of_a_handler_s_file_is_found(places: tuple[AnyPath, AnyPath]) -> None:
    source, destination = places[0] / "a", places[1] / "b"
    with with_handlers(CounterHandler):
        waystation.save_checkpointables(source, {"state": {"a": np.arange(3)}, "n": Counter(4)})
        (file,) = part_of(source, "n").rglob("value.json")
        file.write_text(json.dumps(["plain", 5]))
        with pytest.raises(Corrupt, match="checksum"):
            waystation.copy(source, destination)
    assert storage.entries_or_none(places[1]) == []


def of_stores() -> dict[str, str]:
    """What the environment says of stores; other processes are forked from one that does not have it."""
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def data_files(place: AnyPath) -> set[Path]:
    """The data files beneath a place, with their lengths."""
    return set(on_this_machine(place).rglob("*.safetensors"))


def kill_in_the_middle(source: AnyPath, destination: AnyPath, whole: int) -> None:
    """Copies, and kills that once so many data files are there."""
    process = programs.context.Process(
        target=copy_slowly, args=(of_stores(), source, destination), daemon=True
    )
    process.start()
    until_s = time.monotonic() + programs.HANG_S
    while len(data_files(destination.parent)) <= whole:
        assert process.is_alive()
        assert time.monotonic() < until_s
        time.sleep(0.01)
    assert process.is_alive()
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()


@EVERY_PAIR
@pytest.mark.share(2)
def test_a_copy_that_was_killed_goes_on_where_it_was(
    places: tuple[AnyPath, AnyPath], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "_JOB_BYTES", 1 << 20)
    source, destination = places[0] / "a", places[1] / "b"
    save(source, 1)
    kill_in_the_middle(source, destination, whole=2)
    assert not waystation.is_checkpoint(destination)
    moved: list[str] = []
    start = copying._native.start_copy

    def counted(files: Any, sources: Any, /, **given: Any) -> Any:
        moved.extend(os.path.basename(path) for path, *_ in files)
        return start(files, sources, **given)

    monkeypatch.setattr(copying._native, "start_copy", counted)
    done = waystation.copy(source, destination)
    assert done.found_bytes > 1 << 20
    assert 0 < len(moved) <= done.files - 2
    assert_equal(source, destination)
    if isinstance(destination, Path):
        assert os.listdir(places[1]) == ["b"]
    else:  # whose lease has not run out
        assert len(leftovers(places[1])) == 1


@EVERY_PAIR
@pytest.mark.share(2)
def test_what_a_killed_copy_has_left_of_another_version_is_not_taken(
    places: tuple[AnyPath, AnyPath], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, destination = places[0] / "a", places[1] / "b"
    save(source, 1)
    kill_in_the_middle(source, destination, whole=2)
    save(source, 2, overwrite=True)
    assert waystation.copy(source, destination).found_bytes == 0
    assert_equal(source, destination)


def test_what_a_killed_copy_has_left_on_a_disk_is_verified(tmp_path: Path) -> None:
    source, destination = tmp_path / "a", tmp_path / "to" / "b"
    save(source, 1)
    kill_in_the_middle(source, destination, whole=4)
    whole = [file for file in data_files(tmp_path / "to") if file.stat().st_size > 1 << 20]
    whole.sort()
    content = bytearray(whole[0].read_bytes())
    content[77] ^= 1
    whole[0].write_bytes(content)
    done = waystation.copy(source, destination)
    assert done.found_bytes > 0
    assert_equal(source, destination)


@EVERY_PAIR
def test_an_interrupted_copy_leaves_what_the_next_one_takes(
    places: tuple[AnyPath, AnyPath], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "_JOB_BYTES", 1 << 20)
    source, destination = places[0] / "a", places[1] / "b"
    save(source, 1)

    def interrupt(done: int, total: int) -> None:
        if done > 2 * total // 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        waystation.copy(source, destination, on_progress=interrupt)
    assert not waystation.is_checkpoint(destination)
    done = waystation.copy(source, destination)
    assert done.found_bytes > done.nbytes // 2
    assert_equal(source, destination)
    if isinstance(destination, Path):
        assert os.listdir(places[1]) == ["b"]


@EVERY_PAIR
@pytest.mark.share(2)
def test_of_two_copies_at_once_one_wins_and_the_other_leaves_nothing(places: tuple[AnyPath, AnyPath]) -> None:
    source = places[0] / "a"
    save(source, 1)
    for turn in range(3):
        destination = places[1] / str(turn)
        outcomes = programs.context.Queue()
        processes = [
            programs.context.Process(
                target=copy_and_tell, args=(of_stores(), source, destination, outcomes), daemon=True
            )
            for _ in range(2)
        ]
        for process in processes:
            process.start()
        found = sorted(outcomes.get(timeout=programs.HANG_S) for _ in processes)
        for process in processes:
            process.join(programs.HANG_S)
        assert found == ["Conflict", "copied"]
        assert_equal(source, destination)
        assert leftovers(places[1]) == []


@EVERY_PAIR
@pytest.mark.share(2)
def test_a_source_that_is_overwritten_meanwhile_is_copied_in_one_version(
    places: tuple[AnyPath, AnyPath], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "_JOB_BYTES", 1 << 20)
    source, destination = places[0] / "a", places[1] / "b"
    save(source, 1)
    saved = itertools.count(2)

    def overwrite(done: int, total: int) -> None:
        if total // 3 < done < total and (value := next(saved)) < 4:
            save(source, value, overwrite=True)

    waystation.copy(source, destination, on_progress=overwrite)
    assert_equal(destination, destination)
    loaded = waystation.load(destination)
    assert (loaded["large"] == loaded["step"]).all()
    assert leftovers(places[1]) == []


@EVERY_PAIR
def test_a_source_that_is_deleted_meanwhile_is_not_found(
    places: tuple[AnyPath, AnyPath], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "_JOB_BYTES", 1 << 20)
    source, destination = places[0] / "a", places[1] / "b"
    save(source, 1)

    def delete(done: int, total: int) -> None:
        if done > total // 3:
            waystation.delete(source, missing_ok=True)

    with pytest.raises(CheckpointNotFound):
        waystation.copy(source, destination, on_progress=delete)
    assert storage.entries_or_none(places[1]) == []


@EVERY_PAIR
def test_no_more_is_read_in_a_second_than_is_allowed(places: tuple[AnyPath, AnyPath]) -> None:
    source, destination = places[0] / "a", places[1] / "b"
    save(source, 1)
    done = waystation.copy(source, destination, bytes_per_second=16 << 20)
    assert done.elapsed_s > 0.9 * done.nbytes / (16 << 20)


def test_a_copy_over_a_link_to_its_source_holds_no_mark_of_a_reader(tmp_path: Path) -> None:
    save(tmp_path / "a", 1)
    (tmp_path / "same").symlink_to("a")
    waystation.copy(tmp_path / "a", tmp_path / "same", overwrite=True)
    assert not (tmp_path / "same").is_symlink()
    assert_equal(tmp_path / "a", tmp_path / "same")
    assert sorted(os.listdir(tmp_path / "same")) == sorted(os.listdir(tmp_path / "a"))
    assert sorted(os.listdir(tmp_path)) == ["a", "same"]


def test_what_can_be_no_copy_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "a", 1)
    for destination, error in (
        (tmp_path / "a", InvalidInput),
        (tmp_path / "a" / "inside", Conflict),
        ("https://host/b", Unsupported),
    ):
        with pytest.raises(error):
            waystation.copy(tmp_path / "a", destination)
    with pytest.raises(CheckpointNotFound):
        waystation.copy(tmp_path / "missing", tmp_path / "b")
    for wrong, error in (("fast", WrongType), (0, InvalidInput), (True, WrongType)):
        with pytest.raises(error, match="bytes_per_second"):
            waystation.copy(tmp_path / "a", tmp_path / "b", bytes_per_second=wrong)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("somebody's")
    with pytest.raises(Conflict, match="no save replaces it"):
        waystation.copy(tmp_path / "a", tmp_path / "file", overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["a", "file"]


def test_a_collector_waits_for_a_copy(places_of_store: Location) -> None:
    source = places_of_store / "a"
    save(source, 1)
    held: list[bool] = []

    def look(done: int, total: int) -> None:
        held.append(StoreLeases(os.fspath(places_of_store)).is_held("a"))

    waystation.copy(source, places_of_store / "b", on_progress=look)
    assert all(held)
    assert held


@pytest.fixture
def places_of_store(monkeypatch: pytest.MonkeyPatch) -> Location:
    """A directory in a store."""
    bucket = s3.bucket()
    for name, value in s3.settings(bucket.endpoint).items():
        monkeypatch.setenv(name.upper(), value)
    return Location(f"{bucket.location}/run")
