"""Orbax's layouts in an object store: what we write there genuine Orbax reads, and what it wrote we read.

Genuine Orbax does not know S3. So it reads what the server keeps, file by file, as it would see it there.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tests.orbax import oracle
from tests.orbax.test_write import LAYOUTS
from tests.support import programs
from tests.support.long import IS_LONG
from tests.support.s3 import PASS, Bucket, bucket, context, folder_of, killed_at, proxy

import waystation
from waystation import training
from waystation.checkpoint.verify import verify
from waystation.errors import (
    CheckpointNotFound,
    Conflict,
    Corrupt,
    InvalidLayoutError,
    Unsupported,
)
from waystation.storage import store_leases

layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


@pytest.fixture
def place() -> Iterator[Bucket]:
    """A bucket, and the options by which it is reached."""
    own = bucket()
    with own.context():
        yield own


def state_of(value: int) -> dict[str, Any]:
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    whole = np.arange(8 * 64, dtype=np.float32).reshape(8, 64) + value
    return {
        "sharded": jax.device_put(whole, NamedSharding(mesh, PartitionSpec("x", "y"))),
        "bfloat": jnp.full((3, 5), value, jnp.bfloat16),
        "large": np.full(3 << 20, value, np.int32),
        "step": value,
    }


def check(found: dict[str, Any], value: int) -> None:
    expected = state_of(value)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(array), err_msg=name)


def in_layout(endpoint: str, **layout: Any) -> waystation.Context:
    """Options of saves to a server in one of Orbax's layouts."""
    options = context(endpoint)
    for name, value in ({"use_ocdbt": True} | layout).items():
        setattr(options.array.saving, name, value)
    return options


def save(endpoint: str, path: str, value: int, **layout: Any) -> None:
    with in_layout(endpoint, **layout):
        waystation.save(path, state_of(value))


@pytest.mark.share(9)
@layouts
def test_both_load_what_we_save(place: Bucket, layout: dict[str, Any], tmp_path: Path) -> None:
    path = f"{place.location}/run/ckpt"
    save(place.endpoint, path, 3, **layout)
    check(waystation.load(path), 3)
    assert verify(path).damages == []
    described = waystation.metadata(path)
    check(waystation.load(path, described), 3)
    assert not [name for name in place.names() if ".waystation-tmp" in name], "the lease is gone"
    shutil.copytree(folder_of(path), tmp_path / "ckpt")
    check(oracle.load(tmp_path / "ckpt"), 3)
    waystation.delete(path)
    assert place.names() == []
    with pytest.raises(CheckpointNotFound):
        waystation.load(path)


@pytest.mark.parametrize("use_ocdbt", [False, True])
def test_we_load_what_genuine_orbax_has_saved(place: Bucket, use_ocdbt: bool) -> None:
    path = f"{place.location}/ckpt"
    oracle.save(folder_of(path), state_of(5), use_ocdbt=use_ocdbt)
    check(waystation.load(path), 5)
    commit = folder_of(path) / "commit_success.txt"
    os.rename(commit, f"{commit}.gone")
    assert not waystation.is_checkpoint(path)
    with pytest.raises(InvalidLayoutError, match=r"without commit_success\.txt"):
        waystation.load(path)


def test_nothing_is_replaced_in_place(place: Bucket) -> None:
    path, native = f"{place.location}/ckpt", f"{place.location}/native"
    save(place.endpoint, path, 1)
    waystation.save(native, state_of(2))
    with pytest.raises(Conflict, match="overwrite=True"):
        save(place.endpoint, path, 3)
    with in_layout(place.endpoint):
        for existing in (path, native):
            with pytest.raises(Unsupported, match="delete it first"):
                waystation.save(existing, state_of(3), overwrite=True)
    with pytest.raises(Unsupported, match="delete it first"):
        waystation.save(path, state_of(3), overwrite=True)
    check(waystation.load(path), 1)
    check(waystation.load(native), 2)
    with in_layout(place.endpoint):
        waystation.save_checkpointables(f"{place.location}/both", {"a": state_of(1), "b": state_of(2)})
    with pytest.raises(Unsupported, match="delete the checkpoint"):
        waystation.delete(f"{place.location}/both", checkpointable_name="a")


def run(call: Callable[..., None], *arguments: object) -> int:
    process = programs.context.Process(target=call, args=arguments, daemon=True)
    process.start()
    process.join(programs.HANG_S)
    assert process.exitcode is not None
    return process.exitcode


@pytest.mark.long
def test_killed_before_any_request_a_save_is_whole_or_invisible(
    place: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = []
    for number in itertools.count(1, 1 if IS_LONG else 7):
        path = f"{place.location}/{number}"
        was_killed = killed_at(place, number, save, path, 2)
        outcomes.append(waystation.is_checkpoint(path))
        if outcomes[-1]:
            check(waystation.load(path), 2)
        else:
            with pytest.raises((CheckpointNotFound, InvalidLayoutError)):
                waystation.load(path)
            if (folder_of(path) / "_CHECKPOINT_METADATA").exists():
                with pytest.raises(Conflict, match="killed there less than 10 minutes ago"):
                    save(place.endpoint, path, 4)
            # What is left is taken for dead at once, and the next save removes it.
            with monkeypatch.context() as patched:
                patched.setattr(store_leases, "EXPIRES_S", -10.0)
                save(place.endpoint, path, 4)
            check(waystation.load(path), 4)
        if not was_killed:
            break
    assert outcomes == sorted(outcomes), "once it is there, it stays"
    assert set(outcomes) == {False, True}


def test_one_of_two_writers_wins(place: Bucket) -> None:
    path = f"{place.location}/ckpt"
    second: list[int] = []

    def overtake(number: int) -> str:
        method, name = between.requests[number - 1]
        if method == "PUT" and name.endswith("/_CHECKPOINT_METADATA") and not second:
            second.append(run(save, place.endpoint, path, 2))
        return PASS

    with (
        proxy(place.endpoint, overtake) as between,
        pytest.raises(Conflict, match="another process saves"),
    ):
        save(between.endpoint, path, 1)
    assert second == [0]
    check(waystation.load(path), 2)
    assert not [name for name in place.names() if ".waystation-tmp" in name]


def refused(endpoint: str, path: str) -> None:
    with pytest.raises(Conflict, match="or deletes there"):
        save(endpoint, path, 2)


def test_a_save_gives_way_to_a_deletion_that_goes_on(place: Bucket) -> None:
    path = f"{place.location}/ckpt"
    save(place.endpoint, path, 1)
    beside: list[int] = []

    def overtake(_: int) -> str:
        if (
            not beside and not (folder_of(path) / "_CHECKPOINT_METADATA").exists()
        ):  # all but the mark has gone
            beside.append(run(refused, place.endpoint, path))
        return PASS

    with proxy(place.endpoint, overtake) as between, context(between.endpoint):
        waystation.delete(path)
    assert beside == [0]
    save(place.endpoint, path, 2)
    check(waystation.load(path), 2)


def take_over(endpoint: str, path: str) -> None:
    store_leases.EXPIRES_S = -10.0  # whoever else writes there counts as dead
    save(endpoint, path, 2)


@pytest.mark.parametrize("at", ["/_CHECKPOINT_METADATA", "/commit_success.txt"])
@pytest.mark.share(2)
def test_who_was_taken_for_dead_leaves_alone_what_another_has_committed(
    place: Bucket, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    # As if this process had been stopped for longer than a lease lasts.
    monkeypatch.setattr(store_leases, "EXPIRES_S", store_leases.FRESH_S - 1.0)
    path = f"{place.location}/ckpt"
    seen: list[int] = []

    def overtake(number: int) -> str:
        method, name = between.requests[number - 1]
        if method == "PUT" and name.endswith(at):
            seen.append(number)
            if len(seen) == (2 if at == "/_CHECKPOINT_METADATA" else 1):  # the first is the claim
                assert run(take_over, place.endpoint, path) == 0
        return PASS

    with proxy(place.endpoint, overtake) as between, pytest.raises(Conflict):
        save(between.endpoint, path, 1)
    assert len(seen) >= 1
    if at == "/commit_success.txt":
        check(waystation.load(path), 2)
    else:  # what was under way has replaced a file: that is told, and nothing was removed
        assert (folder_of(path) / "commit_success.txt").exists()


def test_damage_is_told(place: Bucket) -> None:
    path = f"{place.location}/ckpt"
    save(place.endpoint, path, 1, use_ocdbt=False, use_compression=False)
    (largest,) = sorted(folder_of(path).rglob("*"), key=lambda file: file.stat().st_size)[-1:]
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    with pytest.raises(Corrupt):
        waystation.load(path)


def test_a_handler_writes_and_reads_its_files_there(place: Bucket) -> None:
    path = f"{place.location}/ckpt"
    given = {"state": state_of(1), "notes": {"of": ["mine", 3]}}
    with in_layout(place.endpoint):
        waystation.save_checkpointables(path, given)
    found = waystation.load_checkpointables(path)
    check(found["state"], 1)
    assert found["notes"] == given["notes"]


def test_a_checkpointer_keeps_steps_in_this_layout(place: Bucket) -> None:
    root = f"{place.location}/run"
    policy = training.preservation_policies.LatestN(2)
    with in_layout(place.endpoint):
        with training.Checkpointer(root, preservation_policy=policy) as checkpointer:
            for step in range(4):
                checkpointer.save_async(step, state_of(step), force=True, metrics={"loss": float(step)})
                checkpointer.wait()
        with training.Checkpointer(root, preservation_policy=policy) as checkpointer:
            assert [info.step for info in checkpointer.checkpoints] == [2, 3]
            assert checkpointer.latest is not None
            assert checkpointer.latest.metrics == {"loss": 3.0}
            check(checkpointer.load(), 3)
    assert {name.split("/")[1] for name in place.names()} <= {"2", "3", "metadata"}
