"""Checkpoints in Google Cloud Storage, as fake-gcs-server has it (`tools/fake-gcs-server` builds it).

The conformance suites have a column for it. Here is what differs there from S3: versions are generations,
uploads in parts, and genuine Orbax, which knows gs://.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import gcs, s3
from tests.support.long import IS_LONG, amount, only_long
from tests.support.programs import HANG_S

import waystation
from waystation import storage
from waystation.checkpoint.collect import find_leftovers, remove_leftovers
from waystation.checkpoint.verify import verify
from waystation.errors import (
    CheckpointNotFound,
    Conflict,
    InvalidInput,
    InvalidLayoutError,
    NotFound,
    WaystationError,
)
from waystation.layouts.native import in_store
from waystation.storage import store_leases
from waystation.storage.store_leases import StoreLeases
from waystation.training import Checkpointer, Remote, preservation_policies, save_decision_policies
from waystation.training.mirror import mirror

EVERY_STEP = save_decision_policies.FixedIntervalPolicy(1)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> gcs.Bucket:
    """A bucket; the environment says how it is reached."""
    made = gcs.bucket()
    for name, value in made.settings(made.endpoint).items():
        monkeypatch.setenv(name.upper(), value)
    return made


def state_of(value: int, items: int = 50_000) -> dict[str, Any]:
    """A state, all of which says which it is."""
    return {"large": np.full(items, value, np.float32), "small": np.arange(100) + value, "step": value}


# Of an array that is uploaded in two parts.
IN_PARTS = 9 << 18


def value_of(state: dict[str, Any]) -> int:
    """Which state it is; fails if it is a mixture."""
    value = int(state["step"])
    assert (state["large"] == value).all()
    assert (state["small"] == np.arange(100) + value).all()
    return value


def at(endpoint: str) -> waystation.Context:
    """Options by which the store is reached at an address."""
    made = waystation.Context()
    made.storage.settings = gcs.settings(endpoint)
    return made


def test_a_state_is_saved_replaced_loaded_and_deleted(place: gcs.Bucket) -> None:
    path = f"{place.location}/run/ckpt"
    waystation.save(path, state_of(1, IN_PARTS))
    with pytest.raises(Conflict, match="overwrite=True"):
        waystation.save(path, state_of(2))
    waystation.save(path, state_of(2, IN_PARTS), overwrite=True)
    assert value_of(waystation.load(path)) == 2
    assert verify(path).damages == []
    assert waystation.delete(path)
    with pytest.raises(CheckpointNotFound):
        waystation.load(path)
    assert place.names() == [], "neither objects nor parts of uploads"


def test_an_equal_content_is_another_version(place: gcs.Bucket) -> None:
    """ETags of equal contents are equal here, so only generations tell."""
    path = f"{place.location}/a"
    found = storage.of(path)
    versions = []
    for number in range(2):
        found.replace(path, b"the same", f"attempt-{number}")
        status = found.status(path)
        assert status is not None
        versions.append(status.identity)
    assert versions[0].tag == versions[1].tag
    assert versions[0] != versions[1]
    assert found.removes_in_one_act(path)
    with pytest.raises(Conflict):
        found.remove_file(path, expected=versions[0])
    found.remove_file(path, expected=versions[1])
    assert place.names() == []


def save(endpoint: str, path: str, value: int) -> None:
    with at(endpoint):
        waystation.save(path, state_of(value), overwrite=True)


def delete(endpoint: str, path: str) -> None:
    with at(endpoint):
        waystation.delete(path)


@pytest.mark.long
def test_killed_at_any_request_an_overwrite_is_whole_or_did_not_happen(
    place: gcs.Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{place.location}/run/ckpt"
    waystation.save(path, state_of(1))
    outcomes = set()
    for number in itertools.count(1) if IS_LONG else [9]:
        was_killed = s3.killed_at(place, number, save, path, 2)
        outcomes.add(value_of(waystation.load(path)))
        assert verify(path).damages == []
        waystation.save(path, state_of(1), overwrite=True)
        if not was_killed:
            break
    assert outcomes <= {1, 2}
    remove_at_once(f"{place.location}/run", monkeypatch)
    assert len({name.split("/")[2] for name in place.names() if name.startswith("run/ckpt/")}) == 2


@pytest.mark.long
def test_killed_at_any_request_a_deletion_is_done_or_not(
    place: gcs.Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{place.location}/run/ckpt"
    for number in itertools.count(1) if IS_LONG else [4]:
        waystation.save(path, state_of(1))
        was_killed = s3.killed_at(place, number, delete, path)
        with contextlib.suppress(CheckpointNotFound, InvalidLayoutError):
            assert value_of(waystation.load(path)) == 1
            waystation.delete(path)
        remove_at_once(f"{place.location}/run", monkeypatch)
        assert [name for name in place.names() if name.startswith("run/")] == []
        if not was_killed:
            break


def remove_at_once(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes what is left over, as if it were old."""
    with monkeypatch.context() as patched:
        for module in (store_leases, in_store):
            patched.setattr(module, "EXPIRES_S", -10.0)
        with contextlib.suppress(NotFound):
            remove_leftovers(find_leftovers(root, older_than_s=0), older_than_s=0)


@pytest.mark.long
def test_of_two_writers_one_wins(place: gcs.Bucket) -> None:
    path = f"{place.location}/run/ckpt"
    barrier = threading.Barrier(2)

    def write(number: int, value: int) -> int | None:
        state = {"value": np.full(1000, value), "step": value}
        barrier.wait(HANG_S)
        try:
            waystation.save(f"{path}-{number}", state)
        except Conflict:
            return None
        return value

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for number in range(amount(3, 200)):
            ends = [pool.submit(contextvars.copy_context().run, write, number, value) for value in (1, 2)]
            (winner,) = [end.result() for end in ends if end.result() is not None]
            assert waystation.load(f"{path}-{number}")["step"] == winner


def test_a_sequence_keeps_what_its_policy_says_and_who_reads(place: gcs.Bucket) -> None:
    root = f"{place.location}/steps"
    policy = preservation_policies.LatestN(2)
    with (
        Checkpointer(root, save_decision_policy=EVERY_STEP, preservation_policy=policy) as run,
        contextlib.ExitStack() as reading,
    ):
        for step in range(4):
            run.save(step, {"a": np.full(1000, step)}, metrics={"loss": 1 / (1 + step)})
            if step == 0:
                assert reading.enter_context(StoreLeases(root).hold("0"))
        assert [each.step for each in run.checkpoints] == [0, 2, 3]
        reading.close()
        run.save(4, {"a": np.full(1000, 4)})
        assert [each.step for each in run.checkpoints] == [3, 4]
        assert run.load()["a"][0] == 4


def test_a_remote_shares_what_is_unchanged_and_a_mirror_brings_it_back(
    place: gcs.Bucket, tmp_path: Path
) -> None:
    frozen = np.random.default_rng(0).random(100_000)
    there = f"{place.location}/run"
    with Checkpointer(
        tmp_path / "run", save_decision_policy=EVERY_STEP, reuse_unchanged=True, remote=Remote(there)
    ) as run:
        for step in range(2):
            run.save(step, {"frozen": frozen, "step": step})
            run.wait()
    assert sum(place.sizes().values()) < 1.5 * frozen.nbytes
    done = mirror(there, tmp_path / "back")
    assert list(done.copied) == ["1", "0"]
    assert mirror(tmp_path / "back", there).equal == ["1", "0"]
    waystation.delete(f"{there}/0")
    assert waystation.load(f"{there}/1")["step"] == 1
    assert np.array_equal(waystation.load(tmp_path / "back" / "0")["frozen"], frozen)


def test_a_save_that_fails_leaves_no_parts(place: gcs.Bucket) -> None:
    def refuse_second_part(number: int) -> str:
        return s3.FORBID if "partNumber=2" in between.requests[number - 1][1] else s3.PASS

    with s3.proxy(place.endpoint, refuse_second_part) as between, at(between.endpoint):
        with pytest.raises(WaystationError):
            waystation.save(f"{place.location}/run/ckpt", state_of(1, IN_PARTS))
        assert any("partNumber=2" in path for _, path in between.requests)
    assert place.names() == []


def test_marks_of_empty_folders_are_nothing(place: gcs.Bucket) -> None:
    """Consoles and other tools put them there: objects whose names end with a slash."""
    root, path = f"{place.location}/run", f"{place.location}/run/1"
    for name in ("run/", "run/1/"):
        place.write(name, b"")
    for value in (1, 2):
        waystation.save(path, state_of(value))
        assert value_of(waystation.load(path)) == value
        assert verify(path).strays == []
        assert [entry.name for entry in storage.entries_or_none(root)] == ["1"]
        waystation.delete(path)
    place.write("run/1", b"somebody's")
    storage.remove_tree(f"{root}/1/nothing")
    assert place.read("run/1") == b"somebody's"


def test_an_object_that_no_path_names_is_told(place: gcs.Bucket) -> None:
    for name in ("run//x", "run/a\tb"):
        place.write(name, b"")
        with pytest.raises(InvalidInput, match="an object there has a name that cannot be used"):
            storage.entries_or_none(f"{place.location}/run")
        place.remove(name)


# ---- genuine Orbax -----------------------------------------------------------------------------

STATE_OF_ORBAX = {"a": np.arange(50_000, dtype=np.float32), "b": {"c": np.full(3, 7)}, "step": 5}

_ORBAX = """
import sys
import jax
import numpy as np
import orbax.checkpoint as version0
from orbax.checkpoint import v1

action, version, path = sys.argv[1:]
state = {"a": np.arange(50_000, dtype=np.float32), "b": {"c": np.full(3, 7)}, "step": 5}
if version == "v1":
    if action == "save":
        v1.save(path, state)
    else:
        found = v1.load(path)
elif path.endswith("/ckpt"):  # as version 1 has it
    with version0.Checkpointer(version0.CompositeCheckpointHandler()) as checkpointer:
        args = version0.args.Composite(state=version0.args.StandardRestore())
        found = checkpointer.restore(path, args=args).state
else:
    with version0.StandardCheckpointer() as checkpointer:
        if action == "save":
            checkpointer.save(path, state)
        else:
            found = checkpointer.restore(path)
if action == "load":
    assert jax.tree.all(jax.tree.map(lambda one, other: np.array_equal(one, other), state, found)), found
"""


def orbax(action: str, version: str, path: str) -> None:
    """Has genuine Orbax do something, in a process that reaches the server by its own protocol."""
    address = f"http://{gcs.server().address}"
    environment = {
        **os.environ,
        "STORAGE_EMULATOR_HOST": address,
        "TENSORSTORE_GCS_HTTP_URL": address,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "nobody's",
        "GOOGLE_CLOUD_PROJECT": "tests",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.fspath(gcs.PACKAGES),
    }
    command = [sys.executable, "-W", "ignore", "-c", _ORBAX, action, version, path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-5000:]


@only_long
@pytest.mark.long
@pytest.mark.skipif(not gcs.PACKAGES.exists(), reason=gcs.MISSING)
@pytest.mark.parametrize("version", ["v1", "version 0"])
@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_genuine_orbax_loads_what_we_save(place: gcs.Bucket, version: str, use_ocdbt: bool) -> None:
    path = f"{place.location}/run/ckpt"
    options = waystation.Context()
    options.array.saving.use_ocdbt = use_ocdbt
    with options:
        waystation.save(
            path, {"a": np.arange(50_000, dtype=np.float32), "b": {"c": np.full(3, 7)}, "step": 5}
        )
    orbax("load", version, path)


@only_long
@pytest.mark.long
@pytest.mark.skipif(not gcs.PACKAGES.exists(), reason=gcs.MISSING)
@pytest.mark.parametrize("version", ["v1", "version 0"])
def test_genuine_orbax_loads_what_a_remote_has(place: gcs.Bucket, version: str, tmp_path: Path) -> None:
    options = waystation.Context()
    options.array.saving.use_ocdbt = True
    there = f"{place.location}/run"
    with Checkpointer(
        tmp_path, remote=Remote(there), context=options, save_decision_policy=EVERY_STEP
    ) as run:
        run.save(5, {"a": np.arange(50_000, dtype=np.float32), "b": {"c": np.full(3, 7)}, "step": 5})
    waystation.copy(f"{there}/5", f"{place.location}/run/ckpt")
    orbax("load", version, f"{place.location}/run/ckpt")
    if version == "v1":
        orbax("load", version, f"{there}/5")


@only_long
@pytest.mark.long
@pytest.mark.skipif(not gcs.PACKAGES.exists(), reason=gcs.MISSING)
@pytest.mark.parametrize("version", ["v1", "version 0"])
def test_we_load_and_copy_what_genuine_orbax_saves(place: gcs.Bucket, version: str, tmp_path: Path) -> None:
    path = f"{place.location}/run/{version}"
    orbax("save", version, path)
    assert waystation.load(path)["step"] == 5
    waystation.copy(path, tmp_path / "copy")
    waystation.copy(tmp_path / "copy", f"{place.location}/run/again")
    for copied in (tmp_path / "copy", f"{place.location}/run/again"):
        assert np.array_equal(waystation.load(copied)["a"], np.arange(50_000))
    orbax("load", version, f"{place.location}/run/again")
