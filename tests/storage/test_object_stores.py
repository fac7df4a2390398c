"""Checkpoints in an object store: saves, loads, deletions, errors, and processes that are killed between
requests."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pathlib
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tests.support import programs
from tests.support.long import IS_LONG
from tests.support.s3 import (
    ACCESS_KEY,
    FORBID,
    FULL,
    LOSE_ANSWER,
    PASS,
    QUOTA,
    REFUSE,
    SECRET_KEY,
    SKEWED,
    Bucket,
    bucket,
    context,
    folder_of,
    killed_at,
    proxy,
    settings,
)

import waystation
from waystation import storage
from waystation.checkpoint.verify import verify
from waystation.errors import (
    CheckpointNotFound,
    Conflict,
    Corrupt,
    DiskFull,
    InvalidInput,
    InvalidLayoutError,
    NotFound,
    PermissionDenied,
    Unavailable,
    Unsupported,
    WaystationError,
)
from waystation.layouts.native import commit, in_store
from waystation.storage import signs_of_life, store_leases
from waystation.storage.scratch import ScratchDirectory
from waystation.training import Checkpointer

pytestmark = pytest.mark.usefixtures("place")


@pytest.fixture
def place() -> Bucket:
    """A bucket."""
    return bucket()


def state_of(value: int) -> dict[str, Any]:
    """A state with a large array, that is uploaded in parts, a small one and a scalar; all say which it
    is."""
    return {
        "large": np.full(3 << 20, value, np.float32),
        "small": np.arange(1000) + value,
        "step": value,
    }


def value_of(state: dict[str, Any]) -> int:
    """Which state it is; fails if it is a mixture."""
    value = state["step"]
    assert (state["large"] == value).all()
    assert (state["small"] == np.arange(1000) + value).all()
    return int(value)


def in_another_process(call: Callable[..., None], *arguments: object) -> None:
    """What a process of its own does: saves of one process wait for each other."""
    process = programs.context.Process(target=call, args=arguments, daemon=True)
    process.start()
    process.join(programs.HANG_S)
    assert process.exitcode == 0


def save(endpoint: str, path: str, value: int, overwrite: bool) -> None:
    with context(endpoint):
        waystation.save(path, state_of(value), overwrite=overwrite)


def delete_at(endpoint: str, path: str) -> None:
    with context(endpoint):
        waystation.delete(path)


def test_killed_while_it_tries_a_store_a_deletion_keeps_no_save_away(place: Bucket) -> None:
    """The first removal of a process tries, with an object beside the record, whether the store heeds
    conditions."""
    path = f"{place.location}/run/ckpt"
    with place.context():
        waystation.save(path, {"step": 1})
    with proxy(place.endpoint) as between:
        in_another_process(delete_at, between.endpoint, path)
    trial = next(number for number, (method, _) in enumerate(between.requests, 1) if method == "PUT")
    with place.context():
        waystation.save(path, {"step": 1})
    assert killed_at(place, trial + 1, delete_at, path)
    assert any("probe" in name for name in place.names())
    with place.context():
        assert waystation.load(path) == {"step": 1}
        assert verify(path).strays == []
        waystation.delete(path)
        waystation.save(path, {"step": 2})
        waystation.delete(path)
    assert place.names() == []


def test_a_deletion_of_nothing_leaves_what_comes_meanwhile(place: Bucket) -> None:
    path = f"{place.location}/run/ckpt"
    with proxy(place.endpoint) as between, context(between.endpoint):
        assert not waystation.delete(path, missing_ok=True)
        looks = len(between.requests)

    def come(number: int) -> str:
        if number == looks + 1:
            save(place.endpoint, path, 1, False)
        return PASS

    with proxy(place.endpoint, come) as between, context(between.endpoint):
        with pytest.raises(CheckpointNotFound, match="one has come since"):
            waystation.delete(path)
        assert value_of(waystation.load(path)) == 1


@contextlib.contextmanager
def meanwhile(place: Bucket, act: Callable[[str, str], None]) -> Iterator[waystation.Context]:
    """Options by which a save calls `act` with the method and the path of each of its requests, before
    that."""

    def on_request(number: int) -> str:
        act(*between.requests[number - 1])
        return PASS

    with proxy(place.endpoint, on_request) as between:
        yield context(between.endpoint)


def test_a_state_is_saved_loaded_described_replaced_and_deleted(place: Bucket) -> None:
    path = f"{place.location}/run/ckpt"
    with place.context():
        assert not waystation.is_checkpoint(path)
        waystation.save(path, state_of(1), custom_metadata={"of": "mine"})
        assert waystation.is_checkpoint(path)
        assert value_of(waystation.load(path)) == 1
        described = waystation.metadata(path)
        assert (described.path, described.custom_metadata) == (path, {"of": "mine"})
        assert value_of(waystation.load(path, described)) == 1
        with pytest.raises(Conflict, match="overwrite=True"):
            waystation.save(path, state_of(2))
        waystation.save_async(path, state_of(2), overwrite=True).result()
        assert value_of(waystation.load_async(path).result()) == 2
        assert len({name.split("/")[2] for name in place.names()}) == 2, "the old data are still there"
        assert waystation.delete(path)
        assert place.names() == []
        assert not waystation.delete(path, missing_ok=True)
        with pytest.raises(CheckpointNotFound, match="run/ckpt"):
            waystation.load(path)


def test_a_save_and_a_load_take_few_requests(place: Bucket) -> None:
    with proxy(place.endpoint) as between, context(between.endpoint):
        waystation.save(f"{place.location}/first", {"small": np.arange(10)})  # which probes the store
        before = len(between.requests)
        waystation.save(f"{place.location}/ckpt", {"small": np.arange(10)})
        # Two listings, the lease three times, the data, the record and the tables beside it, the commit.
        saving = len(between.requests) - before
        assert saving <= 2 + 3 + 1 + 6 + 1, between.requests[before:]
        waystation.load(f"{place.location}/ckpt")
        # The commit, the record, the tables, the data.
        assert len(between.requests) - before - saving <= 1 + 1 + 5 + 1, between.requests


def test_one_checkpointable_is_deleted(place: Bucket) -> None:
    path = f"{place.location}/ckpt"
    with place.context():
        waystation.save_checkpointables(path, {"one": state_of(1), "two": state_of(2)})
        assert waystation.delete(path, checkpointable_name="one")
        assert not any("one" in name for name in place.names())
        assert value_of(waystation.load_checkpointables(path)["two"]) == 2


def test_a_part_is_read_by_ranges_and_with_another_sharding(place: Bucket) -> None:
    path = f"{place.location}/ckpt"
    devices = np.array(jax.devices())
    rows = NamedSharding(jax.sharding.Mesh(devices, ("x",)), PartitionSpec("x"))
    columns = NamedSharding(jax.sharding.Mesh(devices.reshape(2, 4), ("a", "b")), PartitionSpec("b", "a"))
    values = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)
    with place.context():
        waystation.save(path, {"w": jax.device_put(values, rows), "rest": np.zeros(8 << 20, np.uint8)})
    found = []
    options = place.context()
    options.array.loading.on_statistics = found.append
    with options:
        asked = {"w": jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=columns), "rest": ...}
        loaded = waystation.load(path, asked)
    assert loaded["w"].sharding == columns
    np.testing.assert_array_equal(loaded["w"], values)
    assert found[0].bytes_read < values.nbytes + (1 << 20)


def test_an_overwrite_of_another_version_is_refused(place: Bucket) -> None:
    path = f"{place.location}/ckpt"
    with place.context():
        waystation.save(path, state_of(1))

    def overwrite(method: str, name: str) -> None:
        if method == "PUT" and name.endswith("record.json"):
            in_another_process(save, place.endpoint, path, 3, True)

    with meanwhile(place, overwrite) as options, options, pytest.raises(Conflict, match="was faster"):
        waystation.save(path, state_of(2), overwrite=True)
    with place.context():
        assert value_of(waystation.load(path)) == 3
    assert len({name.split("/")[1] for name in place.names()}) == 2


def test_readers_beside_a_writer_get_one_version(place: Bucket) -> None:
    path = f"{place.location}/ckpt"
    with place.context():
        waystation.save(path, state_of(0))
    stop, failures = threading.Event(), []

    def read() -> None:
        with place.context():
            last = 0
            while not stop.is_set():
                try:
                    found = value_of(waystation.load(path))
                    assert found >= last
                    last = found
                except BaseException as error:
                    failures.append(error)
                    return

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        with place.context():
            for value in range(1, 8):
                waystation.save(path, state_of(value), overwrite=True)
    finally:
        stop.set()
        for reader in readers:
            reader.join()
    assert not failures, failures


# ---- errors ------------------------------------------------------------------------------------


def calls(path: str) -> list[Callable[[], object]]:
    return [
        lambda: waystation.save(path, {"a": np.ones(3)}),
        lambda: waystation.save(path, {"a": np.ones(3)}, overwrite=True),
        lambda: waystation.load(path),
        lambda: waystation.metadata(path),
        lambda: waystation.delete(path),
    ]


def failures(path: str, kind: type[WaystationError]) -> list[str]:
    """What each call says; none shows a credential."""
    messages = []
    for call in calls(path):
        with pytest.raises(kind) as caught:
            call()
        messages.append(str(caught.value))
        shown = repr(caught.getrepr(style="short")) + repr(caught.value)
        assert SECRET_KEY not in shown
        assert ACCESS_KEY not in shown
        assert path in messages[-1]
    return messages


def test_a_bucket_that_is_missing_is_named(place: Bucket) -> None:
    with place.context():
        for message in failures("s3://no-such-bucket/ckpt", NotFound):
            assert "there is no bucket 's3://no-such-bucket'" in message
        assert not waystation.is_checkpoint("s3://no-such-bucket/ckpt")


def test_a_key_that_is_wrong_is_refused(place: Bucket) -> None:
    with place.context(aws_secret_access_key="another"):
        for message in failures(f"{place.location}/ckpt", PermissionDenied):
            assert "check the credentials" in message
        # Also where the first answer is one to HEAD, which has no body.
        with pytest.raises(PermissionDenied, match="SignatureDoesNotMatch"):
            storage.status(f"{place.location}/ckpt")
        with pytest.raises(PermissionDenied):
            waystation.is_checkpoint(f"{place.location}/ckpt")
    with place.context(aws_access_key_id="nobody"):
        failures(f"{place.location}/ckpt", PermissionDenied)


def test_a_directory_of_checkpoints_is_told_from_one(place: Bucket) -> None:
    with place.context():
        for step in range(1, 9):
            waystation.save(f"{place.location}/run/{step}", {"step": step})
        with pytest.raises(InvalidLayoutError, match="of them: 4, 5, 6, 7, 8; give the path of one"):
            waystation.load(f"{place.location}/run")


def test_a_clock_that_is_wrong_is_named(place: Bucket) -> None:
    with proxy(place.endpoint, lambda _: SKEWED) as between, context(between.endpoint):
        for message in failures(f"{place.location}/ckpt", PermissionDenied):
            assert "clock of this machine" in message


@pytest.mark.parametrize("answer", [FULL, QUOTA])
@pytest.mark.parametrize("fails_at", [".safetensors", "/ckpt/checkpoint.json"], ids=["data", "commit"])
def test_a_store_without_room_is_told_and_not_asked_again(place: Bucket, fails_at: str, answer: str) -> None:
    path = f"{place.location}/ckpt"

    def refuse(number: int) -> str:
        method, target = between.requests[number - 1]
        return answer if method in ("PUT", "POST") and fails_at in target else PASS

    with place.context():
        waystation.save(path, state_of(1))
    before = place.names()
    with proxy(place.endpoint, refuse) as between, context(between.endpoint):
        with pytest.raises(DiskFull, match=r"no room left in the store.* remove what is not needed there"):
            waystation.save(path, state_of(2), overwrite=True)
        refused = [each for each in between.requests if each[0] in ("PUT", "POST") and fails_at in each[1]]
        assert len(refused) == len(set(refused))
        assert waystation.load(path)["step"] == 1
        if fails_at == ".safetensors":
            assert place.names() == before
    with place.context(), store_leases.StoreLeases(place.location).condemned("ckpt") as may_go:
        assert may_go, "nothing looks as if that save were under way"


def is_removal(request: tuple[str, str]) -> bool:
    """Whether a request removes objects: one, or several at once."""
    method, path = request
    return method == "DELETE" or (method == "POST" and "delete" in path)


@pytest.mark.parametrize("may_remove", [True, False])
@pytest.mark.parametrize("fails_at", ["tables", "commit", "nothing"])
def test_a_save_that_was_refused_is_over_at_once(place: Bucket, fails_at: str, may_remove: bool) -> None:
    """It leaves no lease that others would take for that of a save under way."""
    path, parts = f"{place.location}/ckpt", {"tables": "files.bin", "commit": "/ckpt/checkpoint.json"}

    def refuse(number: int) -> str:
        method, target = between.requests[number - 1]
        if is_removal((method, target)):
            return PASS if may_remove else FORBID
        return FORBID if method == "PUT" and parts.get(fails_at, "nothing") in target else PASS

    with proxy(place.endpoint, refuse) as between, context(between.endpoint):
        if fails_at in parts:
            with pytest.raises(PermissionDenied) as caught:
                waystation.save(path, state_of(1))
            assert not [note for note in notes_of(caught.value) if "lease" in note]
        else:
            waystation.save(path, state_of(1))
    with place.context():
        with store_leases.StoreLeases(place.location).condemned("ckpt") as may_go:
            assert may_go
        waystation.save(path, state_of(2), overwrite=fails_at not in parts)
        assert value_of(waystation.load(path)) == 2


def test_a_save_in_a_layout_of_orbax_that_was_refused_makes_room_at_once(place: Bucket) -> None:
    path, is_full = f"{place.location}/ckpt", False

    def refuse(number: int) -> str:
        nonlocal is_full
        method, target = between.requests[number - 1]
        is_full |= method == "PUT" and "/ckpt/state/" in target
        return FORBID if is_full and not is_removal((method, target)) and method == "PUT" else PASS

    with proxy(place.endpoint, refuse) as between:
        options = context(between.endpoint)
        options.array.saving.use_ocdbt = False
        with options, pytest.raises(PermissionDenied):
            waystation.save(path, state_of(1))
        assert is_full
    assert place.names() == []
    options = place.context()
    options.array.saving.use_ocdbt = False
    with options:
        waystation.save(path, state_of(2))


def test_a_save_whose_lease_cannot_be_given_up_says_so(place: Bucket) -> None:
    may_write = True

    def refuse(number: int) -> str:
        nonlocal may_write
        method, target = between.requests[number - 1]
        may_write &= not (method == "PUT" and target.endswith("/ckpt/checkpoint.json"))
        return PASS if may_write or method in ("GET", "HEAD") else FORBID

    with (
        proxy(place.endpoint, refuse) as between,
        context(between.endpoint),
        pytest.raises(PermissionDenied) as caught,
    ):
        waystation.save(f"{place.location}/ckpt", state_of(1))
    (note,) = [note for note in notes_of(caught.value) if "lease" in note]
    assert "10 minutes after its last renewal" in note
    assert SECRET_KEY not in note


def notes_of(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def test_a_store_that_does_not_answer_is_unavailable_in_the_end() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with context(f"http://127.0.0.1:{silent.getsockname()[1]}", deadline_s=0.2):
            failures("s3://bucket/ckpt", Unavailable)


def test_a_store_that_cannot_be_reached_is_unavailable_in_the_end() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        with context(f"http://127.0.0.1:{closed.getsockname()[1]}", deadline_s=0.2):
            failures("s3://bucket/ckpt", Unavailable)


@pytest.mark.parametrize(
    "path", ["ftp://bucket/x", "s3://", "s3://bucket", "s3://bucket/a//b", "s3://bucket/a/../b"]
)
def test_locations_that_make_no_sense_are_refused(path: str) -> None:
    for call in calls(path):
        with pytest.raises(InvalidInput):
            call()


def test_no_location_holds_a_password_or_comes_from_pathlib() -> None:
    with pytest.raises(InvalidInput, match="credentials") as caught:
        waystation.load("s3://me:secret@bucket/x")
    assert "secret" not in str(caught.value)
    for path in (pathlib.Path("s3://bucket/ckpt"), "s3:/bucket/ckpt"):
        with pytest.raises(InvalidInput, match="as a string"):
            waystation.save(path, state_of(1))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"aws_endpoint": "127.0.0.1:9000"}, "aws_endpoint"),
        ({"aws_endpoint": "http://127.0.0.1:1", "aws_allow_http": "false"}, "aws_allow_http"),
    ],
)
def test_an_endpoint_that_cannot_be_meant_is_named(settings: dict[str, str], named: str) -> None:
    made = context("http://127.0.0.1:1")
    made.storage.settings = {**made.storage.settings, **settings}
    with made, pytest.raises(InvalidInput, match=named):
        waystation.load("s3://bucket/ckpt")


def test_what_a_store_cannot_hold_is_refused(place: Bucket) -> None:
    path = f"{place.location}/ckpt"
    options = place.context()
    options.multiprocessing.primary_host = None
    with options, pytest.raises(Unsupported, match="file systems only"):
        waystation.save(path, {"a": np.ones(3)})
    assert place.names() == []


class Files:
    """Makes files with these contents, or reads all that there are."""

    def __init__(self, contents: dict[str, bytes]) -> None:
        self.contents = contents

    async def save(self, directory: Any) -> Any:
        async def write() -> None:
            root = await directory.await_creation()
            for name, content in self.contents.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_bytes(content)

        return write()

    async def load(self, directory: pathlib.Path) -> Any:
        async def read() -> None:
            files = [path for path in directory.rglob("*") if path.is_file()]
            self.contents = {os.fspath(path.relative_to(directory)): path.read_bytes() for path in files}

        return read()


def test_what_handlers_make_passes_through_a_directory_of_this_machine(
    place: Bucket, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", os.fspath(tmp_path))
    path = f"{place.location}/ckpt"
    contents = {
        "large": np.random.default_rng(0).bytes(20 << 20),
        "empty": b"",
        "deep/record.json": b"of any name",
        **{f"many/{number}": b"%d" % number for number in range(100)},
    }
    with place.context():
        waystation.save_checkpointables(
            path, {"files": Files(contents), "state": state_of(1), "json": {"a": 1}}
        )
        assert os.listdir(tmp_path) == []
        loaded = Files({})
        found = waystation.load_checkpointables(path, {"files": loaded, "json": None})
        assert found["json"] == {"a": 1}
        assert loaded.contents == contents
        assert waystation.checkpointables_metadata(path).metadata.keys() == {"files", "json", "state"}
        whole = verify(path)
        assert (whole.damages, whole.strays, whole.files) == ([], [], len(contents) + 1)
        assert waystation.delete(path, checkpointable_name="json")
        (large,) = [name for name in place.names() if name.endswith("/large")]
        file = place.folder / large
        damaged = bytearray(contents["large"])
        damaged[5] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(Corrupt, match="checksum"):
            waystation.load_checkpointables(path, {"files": Files({})})
        assert [damage.path for damage in verify(path).damages] == [f"{place.location}/{large}"]
        file.unlink()
        with pytest.raises(Corrupt, match="missing"):
            waystation.load_checkpointables(path, {"files": Files({})})
        assert waystation.delete(path)
    assert place.names() == []
    assert os.listdir(tmp_path) == []


def test_a_handler_that_fails_leaves_nothing(place: Bucket) -> None:
    class Failing(Files):
        async def save(self, directory: Any) -> Any:
            async def write() -> None:
                (await directory.await_creation() / "half").write_text("written")
                raise OSError("told to fail")

            return write()

    with place.context(), pytest.raises(WaystationError, match="told to fail"):
        waystation.save_checkpointables(f"{place.location}/ckpt", {"files": Failing({"a": b"1"})})
    assert place.names() == []


def test_data_that_are_missing_or_damaged_are_told(place: Bucket) -> None:
    path = f"{place.location}/ckpt"
    with place.context():
        waystation.save(path, state_of(1))
        whole = verify(path)
        assert (whole.damages, whole.strays, whole.files) == ([], [], 1)
        (data,) = [name for name in place.names() if name.endswith(".safetensors")]
        file = place.folder / data
        content = bytearray(file.read_bytes())
        content[-9] ^= 1
        file.write_bytes(content)
        with pytest.raises(Corrupt, match="checksum"):
            waystation.load(path)
        (damage,) = verify(path).damages
        assert damage.path == f"{place.location}/{data}"
        file.unlink()
        (damage,) = verify(path).damages
        assert damage.problem == "is missing"
        with pytest.raises(Corrupt, match="missing"):
            waystation.load(path)


def test_no_settings_are_shown() -> None:
    made = context("http://127.0.0.1:1")
    assert SECRET_KEY not in repr(made)
    assert "aws_secret_access_key" in repr(made)
    with pytest.raises(InvalidInput) as caught:
        made.storage.settings = {"aws_secret_access_key": SECRET_KEY, "number": 5.0}  # type: ignore[dict-item]
    assert SECRET_KEY not in str(caught.value)


# ---- killed between requests -------------------------------------------------------------------


@pytest.mark.long
def test_killed_before_any_request_an_overwrite_leaves_the_old_checkpoint_or_the_new(
    place: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = []
    for number in itertools.count(1, 1 if IS_LONG else 7):
        path = f"{place.location}/{number}"
        with place.context():
            waystation.save(path, state_of(1))
            was_killed = killed_at(place, number, save, path, 2, True)
            outcomes.append(value_of(waystation.load(path)))
            # What is left is taken for dead at once, and the next save removes it.
            with monkeypatch.context() as patched:
                patched.setattr(store_leases, "EXPIRES_S", -10.0)
                waystation.save(path, state_of(3), overwrite=True)
            assert value_of(waystation.load(path)) == 3
            own = [name for name in place.names() if name.startswith(f"{number}/")]
            assert len({name.split("/")[1] for name in own}) == 2, own
            waystation.delete(path)
        if not was_killed:
            break
    assert outcomes == sorted(outcomes), "once it is there, it stays"
    assert set(outcomes) == {1, 2}


@pytest.mark.parametrize("acts", ["delete", "collect"])
def test_a_version_that_comes_before_a_removal_arrives_stays(place: Bucket, acts: str) -> None:
    path = f"{place.location}/run/1"
    with place.context():
        waystation.save(path, state_of(1))
    record = f"/{path.removeprefix('s3://')}/checkpoint.json"
    came: list[str] = []

    def act(method: str, target: str) -> None:
        removes = method == "DELETE" and target == record
        if (removes or (method == "POST" and "delete" in target)) and not came:
            came.append(target)
            in_another_process(save, place.endpoint, path, 2, True)

    def remove() -> None:
        if acts == "delete":
            waystation.delete(path)
        else:
            in_store.withdraw(path, created_ns=commit.read_record(path).created_ns)

    with meanwhile(place, act) as options, options, pytest.raises(Conflict, match="was replaced meanwhile"):
        remove()
    assert came
    with place.context():
        assert value_of(waystation.load(path)) == 2
        assert not waystation.verify(path).damages
        assert waystation.delete(path)
    assert place.names() == []


def test_where_a_store_ignores_conditions_of_removals_a_deletion_gives_way_to_saves(
    place: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_store, "_SAVED_WITHIN_S", 0.2)
    path = f"{place.location}/run/1"
    with proxy(place.endpoint, ignores=("if-match",)) as between, context(between.endpoint):
        waystation.save(path, state_of(1))
        attempt = in_store.StoreAttempt(path, overwrite=True)
        with pytest.raises(Conflict, match="another process saves to"):
            waystation.delete(path)
        attempt.discard()
        assert value_of(waystation.load(path)) == 1
        assert waystation.delete(path)
    assert place.names() == []


@pytest.mark.parametrize(
    "name",
    ["checkpoint.json", "commit_success.txt", "_METADATA", ".waystation-uploads.json", "a/checkpoint.json/b"],
)
def test_a_name_that_objects_of_ours_have_is_refused(
    place: Bucket, tmp_path: pathlib.Path, name: str
) -> None:
    path = f"{place.location}/run/{name}"
    with place.context():
        waystation.save(tmp_path / "1", {"x": 1})
        for call in (
            lambda: waystation.save(path, {"x": 1}),
            lambda: waystation.save_async(path, {"x": 1}).result(),
            lambda: waystation.copy(tmp_path / "1", path),
        ):
            with pytest.raises(InvalidInput, match="is reserved in object stores"):
                call()
        with pytest.raises(InvalidInput, match="is reserved"), Checkpointer(path) as checkpointer:
            checkpointer.save(1, {"x": 1})
    assert place.names() == []


def test_a_name_that_no_listing_shows_is_refused(place: Bucket) -> None:
    with place.context(), pytest.raises(InvalidInput, match="cannot list names"):
        waystation.save(f"{place.location}/run/a\ufffe", {"x": 1})
    assert place.names() == []


def test_what_may_be_alive_is_left_alone(place: Bucket) -> None:
    path = f"{place.location}/ckpt"
    assert killed_at(place, 12, save, path, 2, False)
    left = place.names()
    assert left
    with place.context():
        waystation.save(path, state_of(1))
        assert {*left} <= {*place.names()}
        waystation.delete(path)
    assert place.names() == left
    assert signs_of_life.EXPIRES_S > 0


def take_over(endpoint: str, path: str) -> None:
    store_leases.EXPIRES_S = -10.0  # whoever else writes there counts as dead
    with context(endpoint):
        waystation.save(path, state_of(2))
        waystation.delete(path)


def test_a_save_that_was_taken_for_dead_does_not_commit(
    place: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_leases, "FRESH_S", -1.0)  # as if long had passed since it was renewed
    path = f"{place.location}/ckpt"

    def overtake(method: str, name: str) -> None:
        if method == "PUT" and name.endswith("record.json"):
            in_another_process(take_over, place.endpoint, path)

    with meanwhile(place, overtake) as options, options, pytest.raises(Conflict, match="sign of life"):
        waystation.save(path, state_of(1))
    assert place.names() == []


def clean_up(endpoint: str, path: str) -> None:
    store_leases.EXPIRES_S = -10.0  # whoever else writes there counts as dead
    with context(endpoint):
        in_store.remove_dead(path)


def test_a_commit_of_what_was_taken_for_dead_is_taken_back(
    place: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{place.location}/ckpt"
    with place.context():
        waystation.save(path, state_of(1))
    # As if this process had been stopped right before its commit for longer than a lease lasts.
    monkeypatch.setattr(store_leases, "EXPIRES_S", store_leases.FRESH_S - 1.0)
    cleaned: list[str] = []

    def overtake(method: str, name: str) -> None:
        if method == "PUT" and name.endswith("/checkpoint.json") and not cleaned:
            cleaned.append(name)
            in_another_process(clean_up, place.endpoint, path)

    with meanwhile(place, overtake) as options, options, pytest.raises(Conflict, match="sign of life"):
        waystation.save(path, state_of(2), overwrite=True)
    assert cleaned
    with place.context():
        assert value_of(waystation.load(path)) == 1


# ---- ends and interrupts -----------------------------------------------------------------------


def save_interrupted(endpoint: str, path: str, overwrite: bool) -> None:
    """Saves the state 2, and is interrupted while the commit is made."""
    committed = threading.Event()

    def interrupt(method: str, name: str) -> None:
        if method == "PUT" and name.endswith("/checkpoint.json"):
            os.kill(os.getpid(), signal.SIGINT)
            committed.set()

    def on_request(number: int) -> str:
        interrupt(*between.requests[number - 1])
        return PASS

    signal.signal(signal.SIGINT, signal.default_int_handler)
    with proxy(endpoint, on_request) as between, context(between.endpoint):
        with pytest.raises(KeyboardInterrupt):
            waystation.save(path, state_of(2), overwrite=overwrite)
        assert committed.is_set()


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_interrupt_of_the_commit_removes_nothing_that_it_names(place: Bucket, overwrite: bool) -> None:
    path = f"{place.location}/ckpt"
    with place.context():
        if overwrite:
            waystation.save(path, state_of(1))
        in_another_process(save_interrupted, place.endpoint, path, overwrite)
        assert value_of(waystation.load(path)) == 2


def load_interrupted(port: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with context(f"http://127.0.0.1:{port}"):
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            waystation.load("s3://bucket/ckpt")


def test_an_interrupt_does_not_wait_for_a_silent_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        in_another_process(load_interrupted, silent.getsockname()[1])


_ENDS_AT_ONCE = """
import sys
import numpy as np
import waystation
state = {"large": np.full(3 << 20, 2, np.float32), "small": np.arange(1000) + 2, "step": 2}
waystation.save_async(sys.argv[1], state)
"""


def test_a_program_that_ends_waits_for_its_save(place: Bucket) -> None:
    path = f"{place.location}/ckpt"
    environment = {name.upper(): value for name, value in settings(place.endpoint).items()}
    command = [sys.executable, "-c", _ENDS_AT_ONCE, path]
    subprocess.run(command, env={**os.environ, **environment}, check=True, timeout=programs.HANG_S)
    with place.context():
        assert value_of(waystation.load(path)) == 2


def test_what_somebody_copies_is_left_alone_until_it_is_old(
    place: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{place.location}/ckpt"
    with place.context():
        waystation.save(path, state_of(1))
        present = place.names()
        record = folder_of(path) / "checkpoint.json"
        content = record.read_bytes()
        record.unlink()  # which comes last
        assert in_store.remove_dead(path) == []
        record.write_bytes(content)
        assert value_of(waystation.load(path)) == 1
        assert place.names() == present
        record.unlink()
        monkeypatch.setattr(store_leases, "EXPIRES_S", -10.0)
        assert in_store.remove_dead(path)
        assert place.names() == []


# ---- answers that get lost ---------------------------------------------------------------------


@pytest.mark.parametrize("failure", [REFUSE, LOSE_ANSWER])
@pytest.mark.share(2)
def test_requests_whose_connection_breaks_are_made_again(place: Bucket, failure: str) -> None:
    path = f"{place.location}/ckpt"

    def break_some(number: int) -> str:
        return PASS if number % 3 else failure

    with proxy(place.endpoint, break_some) as between, context(between.endpoint):
        waystation.save(path, state_of(1))
        assert value_of(waystation.load(path)) == 1
        waystation.save(path, state_of(2), overwrite=True)
        assert value_of(waystation.load(path)) == 2
        waystation.delete(path)
    assert place.names() == []


def test_a_commit_whose_answer_never_comes_keeps_its_data(place: Bucket) -> None:
    path = f"{place.location}/ckpt"

    def lose(number: int) -> str:
        method, name = between.requests[number - 1]
        return LOSE_ANSWER if method == "PUT" and name.endswith("checkpoint.json") else PASS

    with proxy(place.endpoint, lose) as between, context(between.endpoint, deadline_s=1.0):
        with pytest.raises(Unavailable) as caught:
            waystation.save(path, state_of(1))
        assert any("is not known" in note for note in caught.value.__notes__)
    with place.context():
        assert value_of(waystation.load(path)) == 1


# ---- beside others -----------------------------------------------------------------------------


def delete(path: str) -> None:
    waystation.delete(path, missing_ok=True)


def lose_record(path: str) -> None:
    """What the first request of a deletion does."""
    (folder_of(path) / "checkpoint.json").unlink(missing_ok=True)


def lose_data(path: str) -> None:
    """What its last ones do."""
    lose_record(path)
    for directory in folder_of(path).iterdir():
        shutil.rmtree(directory)


@pytest.mark.share(10)
@pytest.mark.parametrize("is_copied", [False, True])
@pytest.mark.parametrize("remove", [delete, lose_record, lose_data])
def test_a_load_of_what_is_deleted_meanwhile_says_so(
    place: Bucket, tmp_path: pathlib.Path, remove: Callable[[str], None], is_copied: bool
) -> None:
    if is_copied:
        waystation.save(tmp_path / "ckpt", {"a": np.arange(100)})
    for number in itertools.count(1):
        path = f"{place.location}/{number}"
        if is_copied:
            shutil.copytree(tmp_path / "ckpt", folder_of(path))
        else:
            with place.context():
                waystation.save(path, {"a": np.arange(100)})
        was_removed: list[int] = []

        def on_request(request: int, number: int = number, removed: list[int] = was_removed) -> str:
            if request == number:
                removed.append(request)
                with place.context():
                    remove(f"{place.location}/{number}")
            return PASS

        with proxy(place.endpoint, on_request) as between, context(between.endpoint):
            try:
                np.testing.assert_array_equal(waystation.load(path)["a"], np.arange(100))
            except (CheckpointNotFound, Conflict) as error:
                assert path in str(error)  # noqa: PT017
            except InvalidLayoutError:
                # Nothing tells that there was a checkpoint: whoever copied it may have begun with its data.
                assert (number, remove, is_copied) == (1, lose_record, True)
        if not was_removed:
            break
    assert number > 5


@pytest.mark.long
@pytest.mark.parametrize("use_ocdbt", [None, False])
def test_a_load_beside_saves_and_deletions_is_whole_or_says_that_there_is_nothing(
    place: Bucket, use_ocdbt: bool | None
) -> None:
    """The path has the rest of a killed save at first. Then a checkpoint comes before one request of the
    load, and goes before a later one."""
    options = place.context()
    options.array.saving.use_ocdbt = use_ocdbt
    steps = itertools.product(range(1, 8), range(1, 8)) if IS_LONG else ((4, 5), (7, 4))
    for first, later in steps:
        path = f"{place.location}/{first}-{later}"
        rest = folder_of(path) / "state-82639f6bf5d2-1-1-0123abcd"
        rest.mkdir(parents=True)
        (rest / "files.bin").write_bytes(b"{}")

        def on_request(request: int, path: str = path, first: int = first, later: int = later) -> str:
            with options:
                if request == first:
                    waystation.save(path, {"a": np.arange(100)})
                elif request == first + later:
                    waystation.delete(path)
            return PASS

        with (
            proxy(place.endpoint, on_request) as between,
            context(between.endpoint),
            contextlib.suppress(CheckpointNotFound),
        ):
            np.testing.assert_array_equal(waystation.load(path)["a"], np.arange(100))


def test_a_save_inside_a_checkpoint_is_refused(place: Bucket) -> None:
    path = f"{place.location}/run/ckpt"
    with place.context():
        waystation.save(path, state_of(1))
        before = place.names()
        for inside in ("more", "state/more"):
            with pytest.raises(Conflict, match="is inside the checkpoint") as caught:
                waystation.save(f"{path}/{inside}", state_of(2))
            assert caught.value.context["checkpoint"] == path
        assert place.names() == before
        waystation.save(f"{place.location}/run/ckpt-2", state_of(2))


def test_a_bucket_is_no_object(place: Bucket) -> None:
    with place.context():
        waystation.save(f"{place.location}/ckpt", state_of(1))
        assert storage.is_directory(place.location)
        assert [entry.name for entry in storage.entries(place.location)] == ["ckpt"]
        with pytest.raises(InvalidInput, match="whole bucket"):
            storage.read_file(place.location, limit_bytes=10)
        with pytest.raises(InvalidInput, match="whole bucket"):
            storage.remove_file(place.location)
        assert not waystation.is_checkpoint(place.location)
    empty = bucket()
    with empty.context():
        assert storage.is_directory(empty.location)
    with empty.context():
        assert not storage.is_there("s3://no-such-bucket")


def kill_with_scratch() -> None:
    with open(ScratchDirectory().below("file"), "w"):
        os.kill(os.getpid(), signal.SIGKILL)


def test_what_killed_processes_leave_in_the_directory_for_temporary_files_is_removed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "waystation-of-somebody").mkdir()
    process = multiprocessing.get_context("fork").Process(target=kill_with_scratch)
    process.start()
    process.join(programs.HANG_S)
    assert len(list(tmp_path.iterdir())) == 2
    own, other = ScratchDirectory(), ScratchDirectory()
    paths = {os.path.basename(own.path), os.path.basename(other.path), "waystation-of-somebody"}
    assert {path.name for path in tmp_path.iterdir()} == paths
    own.remove()
    assert not os.path.exists(own.path)


class _Slowly(socketserver.BaseRequestHandler):
    """Passes on what a client sends, at so many bytes a second, and all answers."""

    def handle(self) -> None:
        server: Any = self.server
        with socket.create_connection(server.target) as upstream:
            answers = threading.Thread(target=self._pass, args=(upstream, self.request, None), daemon=True)
            answers.start()
            self._pass(self.request, upstream, server.bytes_per_s)
            answers.join()

    def _pass(self, source: socket.socket, target: socket.socket, bytes_per_s: int | None) -> None:
        with contextlib.suppress(OSError):
            while content := source.recv(64 << 10):
                target.sendall(content)
                if bytes_per_s is not None:
                    time.sleep(len(content) / bytes_per_s)
            target.shutdown(socket.SHUT_WR)


@pytest.mark.long
@pytest.mark.skipif(not IS_LONG, reason="takes a minute")
def test_a_slow_line_is_given_the_time_that_it_needs(place: Bucket) -> None:
    """A part of 8 MiB takes longer than any one request once had."""
    host, port = place.endpoint.removeprefix("http://").split(":")
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Slowly) as slow:
        slow.daemon_threads = True
        slow.target, slow.bytes_per_s = (host, int(port)), 200_000  # type: ignore[attr-defined]
        threading.Thread(target=slow.serve_forever, daemon=True).start()
        values = np.random.default_rng(0).random(1 << 20)
        with context(f"http://127.0.0.1:{slow.server_address[1]}", deadline_s=20):
            begun = time.monotonic()
            waystation.save(f"{place.location}/ckpt", {"a": values})
            assert time.monotonic() - begun > 35
        slow.shutdown()
    with place.context():
        np.testing.assert_array_equal(waystation.load(f"{place.location}/ckpt")["a"], values)
