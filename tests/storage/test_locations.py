"""Locations in object stores as paths."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support import programs, s3

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


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("gcs://bucket/run", "gs://bucket/run"),
        ("GCS://bucket/run", "gs://bucket/run"),
        ("S3://Bucket/Run", "s3://Bucket/Run"),
        ("S3A://bucket/run", "s3a://bucket/run"),
        ("AZ://box/run", "az://box/run"),
        ("abfsS://box@me.dfs.core.windows.net/run", "abfss://box@me.dfs.core.windows.net/run"),
        ("s3://bucket/what?", "s3://bucket/what?"),
    ],
)
def test_other_writings_of_schemes_are_known(written: str, meant: str) -> None:
    assert str(Location(written)) == storage.located(written) == meant


@pytest.mark.parametrize(
    "text",
    ["s3://bucket/run?versionId=secret", "gs://bucket/?key=secret", "S3://b/a//b?X-Amz-Signature=secret"],
)
def test_a_query_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(InvalidInput, match="only URLs of HTTP have") as caught:
        storage.located(text)
    assert "secret" not in str(caught.value) + repr(caught.value.context)


def test_of_calls_that_wait_all_end_with_an_interrupt() -> None:
    """Also those that threads make which work for threads that work for the one that is interrupted."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        process = programs.context.Process(target=interrupted, args=(silent.getsockname()[1],), daemon=True)
        process.start()
        process.join(programs.HANG_S)
        assert process.exitcode == 0


def interrupted(port: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def look(number: int) -> object:
        if number % 2:
            return storage.side_by_side("s3://bucket/run", look, [10 * number, 20 * number])
        return storage.status(f"s3://bucket/run/{number}")

    for main_waits in (True, False):
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        begun = time.monotonic()
        with s3.context(f"http://127.0.0.1:{port}", deadline_s=60), pytest.raises(KeyboardInterrupt):
            # The first call is that of this thread.
            storage.side_by_side("s3://bucket/run", look if main_waits else skip_one(look), range(1, 9))
        assert time.monotonic() - begun < 20


def skip_one(look: Callable[[int], object]) -> Callable[[int], object]:
    """The call of the main thread ends, so that it waits for the others."""
    main = threading.current_thread()
    return lambda number: None if threading.current_thread() is main else look(number)
