"""Mirrors of whole sequences of checkpoints."""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.handlers.examples import Counter, CounterHandler
from tests.handlers.states import with_handlers
from tests.support import s3
from tests.support.places import on_this_machine, part_of, steps_in
from tests.support.programs import without_privileges

import waystation
from waystation.checkpoint.compare import compare
from waystation.errors import InvalidInput, NotDirectory, NotFound, Unavailable
from waystation.storage import AnyPath, Location
from waystation.storage.leases import Leases
from waystation.training import Checkpointer, mirror, save_decision_policies

KINDS = ("disk", "store")


@pytest.fixture(params=list(itertools.product(KINDS, KINDS)), ids="-".join)
def places(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[AnyPath, AnyPath]:
    """Where a sequence is, and where its mirror is to be: in `make test` both on disks or both in stores."""
    if "store" in request.param:
        bucket = s3.bucket()
        for name, value in s3.settings(bucket.endpoint).items():
            monkeypatch.setenv(name.upper(), value)

    def place(kind: str, name: str) -> AnyPath:
        return tmp_path / name if kind == "disk" else Location(f"{bucket.location}/{name}")

    first, second = request.param
    return place(first, "from"), place(second, "to")


def state(step: int) -> dict[str, Any]:
    return {"a": np.full(300_000, step, np.int32), "step": step}


def save(root: AnyPath, *steps: int) -> None:
    policy = save_decision_policies.FixedIntervalPolicy(1)
    with Checkpointer(root, save_decision_policy=policy, custom_metadata={"run": "mine"}) as checkpointer:
        for step in steps:
            checkpointer.save(step, state(step), metrics={"score": step}, force=True, overwrite=True)


@pytest.mark.share(3)
def test_what_is_deleted_meanwhile_is_passed_over(places: tuple[AnyPath, AnyPath]) -> None:
    source, target = places
    save(source, 1, 2)

    def come_between(name: str) -> Callable[[int, int], None]:
        if name == "2":
            waystation.delete(source / "2")
        return lambda _done, _total: None

    done = mirror(source, target, on_checkpoint=come_between)
    assert (list(done.copied), done.damaged) == (["1"], {})
    assert steps_in(target) == ["1"]


@pytest.mark.share(3)
def test_what_is_lacking_is_copied_the_newest_first(places: tuple[AnyPath, AnyPath]) -> None:
    source, target = places
    save(source, 1, 2, 10)
    done = mirror(source, target)
    assert list(done.copied) == ["10", "2", "1"]
    assert (done.equal, done.differing, done.damaged, done.deleted) == ([], [], {}, [])
    save(source, 11)
    done = mirror(source, target)
    assert (list(done.copied), sorted(done.equal)) == (["11"], ["1", "10", "2"])
    with Checkpointer(source) as one, Checkpointer(target) as other:
        assert [info.step for info in other.checkpoints] == [1, 2, 10, 11]
        assert other.load(10)["step"] == 10
        assert other.root_metadata().custom_metadata == {"run": "mine"}
        for first, second in zip(one.checkpoints, other.checkpoints, strict=True):
            assert (first.metrics, first.commit_timestamp) == (second.metrics, second.commit_timestamp)
            assert not compare(first.path, second.path).differences
            assert waystation.verify(second.path).damages == []


@pytest.mark.share(3)
def test_what_differs_is_replaced_only_if_that_is_asked_for(places: tuple[AnyPath, AnyPath]) -> None:
    source, target = places
    save(source, 1, 2)
    mirror(source, target)
    waystation.save(source / "2", {"a": np.arange(3)}, overwrite=True)
    assert mirror(source, target).differing == ["2"]
    assert waystation.load(target / "2")["step"] == 2
    assert list(mirror(source, target, overwrite=True).copied) == ["2"]
    np.testing.assert_array_equal(waystation.load(target / "2")["a"], np.arange(3))
    assert sorted(mirror(source, target).equal) == ["1", "2"]


@pytest.mark.share(3)
def test_nothing_is_removed_unless_that_is_asked_for(places: tuple[AnyPath, AnyPath]) -> None:
    source, target = places
    save(source, 1, 2, 3)
    mirror(source, target)
    waystation.delete(source / "1")
    waystation.delete(source / "2")
    mirror(source, target)
    assert steps_in(target) == ["1", "2", "3"]
    assert mirror(source, target, delete=True).deleted == ["1", "2"]
    assert steps_in(target) == ["3"]
    waystation.delete(source / "3")
    with pytest.raises(InvalidInput, match="no checkpoints"):
        mirror(source, target, delete=True)
    assert steps_in(target) == ["3"]


@pytest.mark.share(3)
def test_damage_of_one_does_not_keep_others_away(places: tuple[AnyPath, AnyPath]) -> None:
    source, target = places
    save(source, 1, 2, 3)
    file = next(part_of(source / "2").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    done = mirror(source, target)
    assert (list(done.copied), list(done.damaged)) == (["3", "1"], ["2"])
    assert file.name in done.damaged["2"]
    assert steps_in(target) == ["1", "3"]


@pytest.mark.share(3)
def test_files_of_handlers_are_equal_on_disks_and_in_stores(places: tuple[AnyPath, AnyPath]) -> None:
    with with_handlers(CounterHandler):
        for value in (1, 2):
            waystation.save_checkpointables(
                places[0] / "a", {"state": state(1), "n": Counter(value)}, overwrite=True
            )
            done = mirror(*places, overwrite=True)
            assert list(done.copied) == ["a"]
            assert mirror(*places).equal == ["a"]
            assert waystation.load_checkpointables(places[1] / "a")["n"] == Counter(value)


@pytest.mark.share(3)
def test_a_mirror_that_is_interrupted_goes_on(places: tuple[AnyPath, AnyPath]) -> None:
    save(places[0], 1, 2, 3)
    begun: list[str] = []

    def interrupt(name: str) -> Any:
        begun.append(name)
        if len(begun) > 1:
            raise KeyboardInterrupt
        return lambda _done, _total: None

    with pytest.raises(KeyboardInterrupt):
        mirror(*places, on_checkpoint=interrupt)
    done = mirror(*places)
    assert (list(done.copied), done.equal) == (["2", "1"], ["3"])


def test_what_somebody_reads_at_the_destination_stays(tmp_path: Path) -> None:
    save(tmp_path / "from", 1, 2)
    mirror(tmp_path / "from", tmp_path / "to")
    waystation.delete(tmp_path / "from" / "1")
    with Leases(tmp_path / "to").hold("1"):
        assert mirror(tmp_path / "from", tmp_path / "to", delete=True).deleted == []
    assert mirror(tmp_path / "from", tmp_path / "to", delete=True).deleted == ["1"]


@pytest.mark.parametrize("becomes", ["empty", "another"])
def test_nothing_is_removed_once_the_source_has_gone(tmp_path: Path, becomes: str) -> None:
    """As when it is unmounted during the copies: its mount point is there, and empty."""
    source, target = tmp_path / "from", tmp_path / "to"
    save(source, 9, 10)
    save(target, 1, 2)

    def unmount(_done: int, _total: int) -> None:
        if not (tmp_path / "gone").exists():
            source.rename(tmp_path / "gone")
            source.mkdir()
            if becomes == "another":
                waystation.save(source / "77", state(77))

    with pytest.raises(Unavailable, match="nothing was removed"):
        mirror(source, target, delete=True, on_checkpoint=lambda _name: unmount)
    assert {"1", "2"} <= set(steps_in(target))


@pytest.mark.share(3)
def test_what_the_source_had_at_first_is_not_removed(places: tuple[AnyPath, AnyPath]) -> None:
    source, target = places
    save(source, 1, 2)
    mirror(source, target)
    save(source, 3)
    save(target, 7)

    def delete(_done: int, _total: int) -> None:
        waystation.delete(source / "1", missing_ok=True)

    assert mirror(source, target, delete=True, on_checkpoint=lambda _name: delete).deleted == ["7"]
    assert steps_in(target) == ["1", "2", "3"]


@pytest.mark.share(3)
def test_what_is_in_the_place_of_a_checkpoint_is_told_and_the_others_are_copied(
    places: tuple[AnyPath, AnyPath],
) -> None:
    source, target = places
    save(source, 1, 2, 3)
    note = on_this_machine(target) / "2" / "notes.txt"
    note.parent.mkdir(parents=True)
    note.write_text("somebody's")
    done = mirror(source, target)
    assert (list(done.copied), list(done.damaged)) == (["3", "1"], ["2"])
    assert "no save replaces it" in done.damaged["2"]
    assert note.read_text() == "somebody's"
    assert [name for name in steps_in(target) if waystation.is_checkpoint(target / name)] == ["1", "3"]


def test_links_to_checkpoints_beside_them_are_passed_over(tmp_path: Path) -> None:
    source, target = tmp_path / "from", tmp_path / "to"
    save(source, 1, 2)
    save(tmp_path / "elsewhere", 5)
    (source / "latest").symlink_to("2")
    (source / "5").symlink_to(tmp_path / "elsewhere" / "5")
    waystation.save(target / "latest", state(0))
    assert sorted(mirror(source, target, delete=True).copied) == ["1", "2", "5"]
    assert waystation.load(target / "latest")["step"] == 0


def test_what_can_have_no_name_in_a_store_is_told_and_the_others_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = s3.bucket()
    for name, value in s3.settings(bucket.endpoint).items():
        monkeypatch.setenv(name.upper(), value)
    for name in ("one", "a b", "ü?", "a\nb", "a?b=1"):
        waystation.save(tmp_path / name, state(1))
    done = mirror(tmp_path, f"{bucket.location}/to")
    assert (sorted(done.copied), sorted(done.damaged)) == (["a b", "one", "ü?"], ["a\nb", "a?b=1"])
    for name in done.copied:
        assert waystation.load(f"{bucket.location}/to/{name}")["step"] == 1


def test_a_link_that_goes_in_a_circle_is_no_checkpoint(tmp_path: Path) -> None:
    source, target = tmp_path / "from", tmp_path / "to"
    save(source, 1)
    (source / "round").symlink_to("round")
    assert list(mirror(source, target).copied) == ["1"]
    with Checkpointer(source) as checkpointer:
        assert [info.step for info in checkpointer.checkpoints] == [1]


def test_a_bucket_that_is_not_there_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = s3.bucket()
    for name, value in s3.settings(bucket.endpoint).items():
        monkeypatch.setenv(name.upper(), value)
    with pytest.raises(NotFound, match="no bucket 's3://waystation-no-such-bucket'; create it"):
        mirror("s3://waystation-no-such-bucket/run", tmp_path / "to")


def test_a_place_is_the_same_by_all_its_schemes() -> None:
    bucket = s3.bucket()
    with bucket.context():
        waystation.save(f"{bucket.location}/run/1", {"x": 1})
        other = f"s3a{bucket.location.removeprefix('s3')}/run"
        with pytest.raises(InvalidInput, match="mirror of itself"):
            mirror(other, f"{bucket.location}/run")
        assert waystation.load(f"{other}/1")["x"] == 1


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv of util-linux, when run as root")
def test_what_may_not_be_read_is_told_once_all_else_is_there(tmp_path: Path) -> None:
    for step in range(5):
        waystation.save(tmp_path / "here" / str(step), {"x": np.arange(9) + step})
    waystation.save(tmp_path / "there" / "9", {"x": 0})
    (tmp_path / "here" / "1").chmod(0)
    (data,) = (tmp_path / "here" / "3" / "state").glob("*.safetensors")
    data.chmod(0)
    (tmp_path / "here" / "4" / "checkpoint.json").chmod(0)
    said = without_privileges(
        f"""
from waystation import training
try:
    training.mirror({str(tmp_path / "here")!r}, {str(tmp_path / "there")!r}, delete=True)
except waystation.errors.PermissionDenied as error:
    print(error)
"""
    )
    assert said.startswith("'1', '3', '4' in "), said
    assert "Nothing was removed" in said
    assert steps_in(tmp_path / "there") == ["0", "2", "9"]


def test_what_can_be_no_mirror_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "from", 1)
    with pytest.raises(InvalidInput, match="of itself"):
        mirror(tmp_path / "from", tmp_path / "from")
    (tmp_path / "link").symlink_to("from")
    with pytest.raises(InvalidInput, match="of itself"):
        mirror(tmp_path / "from", tmp_path / "link")
    (tmp_path / "link").unlink()
    with pytest.raises(InvalidInput, match="is a checkpoint itself"):
        mirror(tmp_path / "from" / "1", tmp_path / "to")
    with pytest.raises(NotFound):
        mirror(tmp_path / "missing", tmp_path / "to")
    assert os.listdir(tmp_path) == ["from"]
    (tmp_path / "file").touch()
    with pytest.raises(NotDirectory, match="is a file; give a directory that holds checkpoints"):
        mirror(tmp_path / "file", tmp_path / "to")


def test_a_file_in_a_store_has_no_mirror(tmp_path: Path) -> None:
    bucket = s3.bucket()
    (bucket.folder / "file").touch()
    with (
        bucket.context(),
        pytest.raises(NotDirectory, match="is a file; give a directory that holds checkpoints"),
    ):
        mirror(f"{bucket.location}/file", tmp_path / "to")
    assert os.listdir(tmp_path) == []


def test_all_copies_of_a_mirror_share_a_bound(tmp_path: Path) -> None:
    save(tmp_path / "from", 1, 2, 3)
    begun_s = time.monotonic()
    mirror(tmp_path / "from", tmp_path / "to", bytes_per_second=8 << 20)
    assert time.monotonic() - begun_s > 0.9 * 3 * 1_200_000 / (8 << 20)
