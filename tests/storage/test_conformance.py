"""What every storage does, whatever it is: the conformance suite. A new backend is one more of `STORAGES`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from tests.support import gcs, s3
from tests.support.azure import Container
from tests.support.s3 import bucket

from waystation import storage
from waystation.errors import Conflict, Corrupt, NotFound
from waystation.storage.attempts import new_attempt_id
from waystation.storage.base import Identity, Storage

# Each gives the path of an empty directory of its storage.
STORAGES: dict[str, Callable[[Path], AbstractContextManager[str]]] = {
    "local": lambda place: contextlib.nullcontext(os.fspath(place)),
    "s3": lambda _: in_a_bucket(bucket()),
    "gs": lambda _: in_a_bucket(gcs.bucket()),
    "az": lambda _: in_a_bucket(Container()),
}


@contextlib.contextmanager
def in_a_bucket(own: s3.Bucket | Container) -> Iterator[str]:
    with own.context():
        yield f"{own.location}/directory"


@pytest.fixture(params=STORAGES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Storage, str]]:
    """A storage, and an empty directory in it."""
    with STORAGES[request.param](tmp_path) as directory:
        yield storage.of(directory), directory


def read(found: Storage, path: str) -> bytes:
    (content,) = found.read_files([path], limit_bytes=100)
    return content


def version_of(found: Storage, path: str) -> Identity:
    status = found.status(path)
    assert status is not None
    return status.identity


def test_what_is_created_is_read(place: tuple[Storage, str]) -> None:
    found, directory = place
    path = f"{directory}/a/b"
    found.make_directory(f"{directory}/a", parents=True)
    found.create(path, b"content", new_attempt_id())
    assert read(found, path) == b"content"
    with found.opened(path) as file:
        assert (file.read(3, 2), file.read(5, 100), file.read(7, 1)) == (b"te", b"nt", b"")
        assert (file.status.kind, file.status.nbytes) == ("file", 7)
    status = found.status(path)
    assert status == file.status


def test_one_of_two_creators_wins(place: tuple[Storage, str]) -> None:
    found, directory = place
    found.create(f"{directory}/a", b"first", new_attempt_id())
    with pytest.raises(Conflict):
        found.create(f"{directory}/a", b"second", new_attempt_id())
    assert read(found, f"{directory}/a") == b"first"
    assert [entry.name for entry in found.entries(directory)] == ["a"], "nothing is left of the second"


def test_a_replacement_is_whole_and_another_version(place: tuple[Storage, str]) -> None:
    found, directory = place
    identities = set()
    for content in (b"one", b"two", b"three"):
        found.replace(f"{directory}/a", content, new_attempt_id())
        assert read(found, f"{directory}/a") == content
        status = found.status(f"{directory}/a")
        assert status is not None
        identities.add(status.identity)
    assert len(identities) == 3
    assert [entry.name for entry in found.entries(directory)] == ["a"]


def test_a_new_file_is_written_from_its_beginning(place: tuple[Storage, str]) -> None:
    found, directory = place
    with found.new_file(f"{directory}/a") as file:
        for part in (b"first", b"", b" second"):
            file.write(part)
    assert read(found, f"{directory}/a") == b"first second"
    with pytest.raises(Conflict), found.new_file(f"{directory}/a"):
        pass
    with pytest.raises(ValueError, match="of the block"), found.new_file(f"{directory}/b"):
        raise ValueError("of the block")
    assert read(found, f"{directory}/a") == b"first second"


def test_only_the_version_that_was_read_is_replaced(place: tuple[Storage, str]) -> None:
    found, directory = place
    path = f"{directory}/a"
    found.create(path, b"first", new_attempt_id())
    version = version_of(found, path)
    found.replace(path, b"second", new_attempt_id(), expected=version)
    for _ in range(2):  # whoever has read the first comes too late, as often as it tries
        with pytest.raises(Conflict, match="another file has taken its place"):
            found.replace(path, b"third", new_attempt_id(), expected=version)
    assert read(found, path) == b"second"
    version = version_of(found, path)
    found.remove_file(path)
    with pytest.raises(Conflict, match="removed meanwhile"):
        found.replace(path, b"third", new_attempt_id(), expected=version)
    assert storage.entries_or_none(directory) == [], "nothing is left of those that failed"


def test_only_the_version_that_was_read_is_removed(place: tuple[Storage, str]) -> None:
    found, directory = place
    path = f"{directory}/a"
    found.create(path, b"first", new_attempt_id())
    first = version_of(found, path)
    found.replace(path, b"second", new_attempt_id())
    second = version_of(found, path)
    assert storage.is_version(path, second)
    assert not storage.is_version(path, first)
    with pytest.raises(Conflict, match="was left alone: another file has taken its place"):
        found.remove_file(path, expected=first)
    assert read(found, path) == b"second"
    for _ in range(2):  # what has gone already is no error
        found.remove_file(path, expected=second)
        assert found.status(path) is None
    assert storage.entries_or_none(directory) == []


def test_a_store_that_ignores_the_condition_of_a_removal_is_known() -> None:
    """Such stores answer as if there was none. Then two requests compare and remove."""
    own = bucket()
    path = f"{own.location}/run/a"
    with s3.proxy(own.endpoint, ignores=("if-match",)) as between, s3.context(between.endpoint):
        found = storage.of(path)
        assert not found.removes_in_one_act(path)
        found.create(path, b"first", new_attempt_id())
        first = version_of(found, path)
        found.replace(path, b"second", new_attempt_id())
        with pytest.raises(Conflict, match="was left alone"):
            found.remove_file(path, expected=first)
        found.remove_file(path, expected=version_of(found, path))
    assert own.names() == []
    with own.context():
        assert storage.of(path).removes_in_one_act(path)


def test_another_version_than_the_one_that_was_seen_shows(place: tuple[Storage, str]) -> None:
    found, directory = place
    path = f"{directory}/a"
    found.create(path, b"content", new_attempt_id())
    seen = version_of(found, path)
    with found.opened(path, seen=seen) as file:
        assert (file.status.identity, file.read(3, 100)) == (seen, b"tent")
    found.replace(path, b"another", new_attempt_id())
    with found.opened(path, seen=seen) as file:
        if file.status.identity == seen:
            with pytest.raises(Conflict):
                file.read(3, 100)


def test_a_listing_says_how_long_files_are_or_nothing(place: tuple[Storage, str]) -> None:
    found, directory = place
    assert found.is_listable
    found.make_directory(f"{directory}/b", parents=True)
    for name in ("a", "b/c"):
        found.create(f"{directory}/{name}", b"content", new_attempt_id())
    file, below = found.entries(directory)
    assert (file.name, file.kind, below.name, below.kind) == ("a", "file", "b", "directory")
    assert file.nbytes in (7, None)
    assert below.nbytes is None
    assert storage.files_below(directory) == {"a": 7, "b/c": 7}


def test_a_copy_makes_no_other_version(place: tuple[Storage, str]) -> None:
    found, directory = place
    found.create(f"{directory}/a", b"first", new_attempt_id())
    version = version_of(found, f"{directory}/a")
    found.copy(f"{directory}/a", f"{directory}/b")
    found.replace(f"{directory}/a", b"second", new_attempt_id(), expected=version)
    assert (read(found, f"{directory}/a"), read(found, f"{directory}/b")) == (b"second", b"first")


def test_a_version_is_read_with_its_content(place: tuple[Storage, str]) -> None:
    found, directory = place
    found.create(f"{directory}/a", b"first", new_attempt_id())
    expected = b"first", version_of(found, f"{directory}/a")
    assert storage.read_version(f"{directory}/a", limit_bytes=5) == expected
    for path in (f"{directory}/a", directory):
        with pytest.raises(Corrupt):
            storage.read_version(path, limit_bytes=4)


def test_a_listing_says_what_there_is(place: tuple[Storage, str]) -> None:
    found, directory = place
    for name in ("c", "a"):
        found.make_directory(f"{directory}/{name}")
        found.create(f"{directory}/{name}/file", b"", new_attempt_id())
    found.create(f"{directory}/b", b"", new_attempt_id())
    kinds = [(entry.name, entry.kind) for entry in found.entries(directory)]
    assert kinds == [("a", "directory"), ("b", "file"), ("c", "directory")]
    with pytest.raises(NotFound):
        list(found.entries(f"{directory}/nothing"))


def test_absence_is_told_and_raised(place: tuple[Storage, str]) -> None:
    found, directory = place
    assert found.status(f"{directory}/nothing") is None
    with pytest.raises(NotFound), found.opened(f"{directory}/nothing"):
        pass
    with pytest.raises(NotFound):
        found.read_files([f"{directory}/nothing"], limit_bytes=1)
    found.remove_file(f"{directory}/nothing")
    found.remove_tree(f"{directory}/nothing")


def test_a_file_is_not_larger_than_its_limit(place: tuple[Storage, str]) -> None:
    found, directory = place
    found.create(f"{directory}/a", b"123", new_attempt_id())
    found.create(f"{directory}/b", b"1234", new_attempt_id())
    paths = [f"{directory}/a", f"{directory}/b"]
    assert found.read_files(paths, limit_bytes=[3, 4]) == [b"123", b"1234"]
    with pytest.raises(Corrupt):
        found.read_files(paths, limit_bytes=3)


def test_what_is_removed_is_gone_with_all_below(place: tuple[Storage, str]) -> None:
    found, directory = place
    found.make_directory(f"{directory}/a/b", parents=True)
    for name in ("a/b/c", "a/d", "e"):
        found.create(f"{directory}/{name}", b"", new_attempt_id())
    found.remove_tree(f"{directory}/a")
    found.remove_file(f"{directory}/e")
    assert storage.entries_or_none(directory) == []


def test_a_copy_outlives_its_source(place: tuple[Storage, str]) -> None:
    found, directory = place
    found.create(f"{directory}/a", b"content", new_attempt_id())
    found.copy(f"{directory}/a", f"{directory}/b")
    found.remove_file(f"{directory}/a")
    assert read(found, f"{directory}/b") == b"content"


def test_a_root_keeps_its_version(place: tuple[Storage, str]) -> None:
    found, directory = place
    renames = found.renames
    if renames is None:
        pytest.skip("directories have no versions where nothing is renamed")
    for name in ("old", "new"):
        found.make_directory(f"{directory}/{name}")
        found.create(f"{directory}/{name}/file", name.encode(), new_attempt_id())
    root = found.hold(f"{directory}/old")
    renames.over(f"{directory}/old", f"{directory}/aside")
    renames.over(f"{directory}/new", f"{directory}/old")
    assert not root.is_current()
    path = f"{directory}/old/file"
    assert root.read_files([path], limit_bytes=10) == [b"old"]
    with root.opened(path) as file:
        assert file.read(0, 10) == b"old"
    assert [entry.name for entry in root.entries(root.path)] == ["file"]
    status = root.status(path)
    assert status == file.status
    assert root.status(f"{directory}/old/nothing") is None
    renames.over(path, f"{directory}/out", root=root)
    assert read(found, f"{directory}/out") == b"old"
    assert read(found, path) == b"new"


def test_renames_take_no_place_that_is_taken(place: tuple[Storage, str]) -> None:
    found, directory = place
    renames = found.renames
    if renames is None:
        pytest.skip("nothing is renamed here")
    found.create(f"{directory}/a", b"a", new_attempt_id())
    found.create(f"{directory}/b", b"b", new_attempt_id())
    with pytest.raises(Conflict):
        renames.new(f"{directory}/a", f"{directory}/b")
    assert read(found, f"{directory}/b") == b"b"
    renames.new(f"{directory}/a", f"{directory}/c")
    assert read(found, f"{directory}/c") == b"a"
    found.make_directory(f"{directory}/full")
    found.create(f"{directory}/full/file", b"", new_attempt_id())
    found.make_directory(f"{directory}/d")
    with pytest.raises(Conflict):
        renames.over(f"{directory}/d", f"{directory}/full")
