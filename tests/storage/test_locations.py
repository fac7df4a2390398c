"""Locations in object stores as paths."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path

import pytest

from waystation import storage
from waystation.errors import InvalidInput, Unavailable, WaystationError
from waystation.path import Location
from waystation.storage import as_path


def test_a_location_is_a_path() -> None:
    run = Location("s3://bucket/run/")
    step = run / "1200"
    assert os.fspath(step) == str(step) == "s3://bucket/run/1200"
    assert repr(step) == "Location('s3://bucket/run/1200')"
    assert (step.name, step.parent, run.parent.name) == ("1200", run, "")
    assert run.parent.parent == run.parent == Location("s3://bucket")
    assert step / Path("state/tree.json") == Location("s3://bucket/run/1200/state/tree.json")
    assert isinstance(step, os.PathLike)
    assert len({step, Location("s3://bucket/run/1200"), run}) == 2
    assert pickle.loads(pickle.dumps(step)) == step


@pytest.mark.parametrize(
    "text", ["run/1200", "/run", "ftp://host/x", "s3://bucket/../x", "s3://me:secret@b/x"]
)
def test_other_text_is_none(text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Location(text)
    assert "secret" not in str(caught.value)
    with pytest.raises(InvalidInput):
        Location("s3://bucket/run") / ".."


def test_a_path_is_made_of_text_by_what_it_says() -> None:
    assert as_path("run/5") == Path("run/5")
    assert as_path("gs://bucket/run") == as_path(Location("gs://bucket/run")) == Location("gs://bucket/run")


def test_calls_wait_for_a_store_side_by_side_and_for_a_disk_one_after_another() -> None:
    at_once = threading.Barrier(8, timeout=60)

    def together(number: int) -> int:
        at_once.wait()
        return number

    assert storage.side_by_side("s3://bucket/run", together, range(16)) == list(range(16))
    threads = {threading.get_ident()}
    assert set(storage.side_by_side("run", lambda _: threading.get_ident(), range(3))) == threads


def test_of_calls_that_fail_the_first_is_told() -> None:
    def fail(number: int) -> None:
        raise Unavailable(f"call {number}")

    with pytest.raises(WaystationError, match="call 0"):
        storage.side_by_side("s3://bucket/run", fail, range(100))
