"""Locations in object stores as paths."""

from __future__ import annotations

import http.server
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.support import programs, s3
from tests.support.long import only_long

import waystation
from waystation import storage
from waystation.errors import Corrupt, InvalidInput, Unavailable, WaystationError
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


@pytest.mark.parametrize("url", ["file://{}", "FILE://{}", "file://localhost{}"])
def test_the_url_of_a_file_is_its_path(tmp_path: Path, url: str) -> None:
    named = url.format(f"{tmp_path}/a%20b")
    waystation.save(named, {"w": np.arange(3)})
    assert (tmp_path / "a b" / "checkpoint.json").exists()
    assert waystation.is_checkpoint(named)
    assert waystation.load(named, framework="numpy")["w"].tolist() == [0, 1, 2]
    waystation.copy(named, url.format(tmp_path / "copy"))
    assert waystation.is_checkpoint(tmp_path / "copy")


@pytest.mark.parametrize("url", ["file://host/a", "file://", "file:///a?b", "file:///a#b", "file:///%00"])
def test_what_is_no_url_of_a_file_here_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput, match="no URL of a file on this machine"):
        storage.located(url)


@pytest.mark.parametrize(
    "text", ["file:/ckpt/x", "s3:/bucket/x", "s3:bucket/x", "GS:/b/x", os.fspath(Path("file:///ckpt/x"))]
)
def test_a_location_that_lost_a_slash_is_refused(text: str) -> None:
    for take in (storage.located, storage.absolute):
        with pytest.raises(InvalidInput, match="lacks a slash"):
            take(text)
    assert storage.located(f"./{text}").endswith(text)


def test_a_cache_is_a_directory_of_this_machine() -> None:
    context = waystation.Context()
    with pytest.raises(InvalidInput, match="a directory of this machine"):
        context.storage.cache_directory = "s3://bucket/cache"


@only_long
def test_a_server_that_was_never_reached_is_told_before_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    context = s3.context(f"http://127.0.0.1:{port}")
    with context, pytest.raises(Unavailable, match=f"127.0.0.1:{port} refuses connections; check the end"):
        waystation.load("s3://bucket/run")


def test_a_listing_that_names_an_object_again_is_an_error() -> None:
    answer = (
        b"<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>same</NextContinuationToken>"
        b"<Contents><Key>run/x</Key><Size>1</Size><LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"
        b"</ListBucketResult>"
    )

    class Server(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        context = s3.context(f"http://127.0.0.1:{server.server_port}")
        with context, pytest.raises(Corrupt, match="names one object twice"):
            storage.of("s3://bucket/run").remove_tree("s3://bucket/run")
        server.shutdown()


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
        ("S3A://bucket/run", "s3://bucket/run"),
        ("s3a://bucket/run/", "s3://bucket/run"),
        ("AZ://box/run", "az://box/run"),
        ("abfs://box/run", "az://box/run"),
        ("abfs://box@me.dfs.core.windows.net/run", "abfss://box@me.dfs.core.windows.net/run"),
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
