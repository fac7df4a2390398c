"""Single checkpointables are deleted from Orbax's checkpoints; genuine Orbax sees them before or after."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint.experimental.v1._src.deletion import execution
from tests.orbax import oracle, writing
from tests.orbax.oracle import v1, version0
from tests.support import system_calls

import waystation
from waystation.checkpoint.collect import find_leftovers
from waystation.errors import CheckpointableNotFound, DeletionRecoveryError, InvalidInput

ROOT = Path(__file__).resolve().parents[2]
STATE = {"w": jnp.arange(12.0).reshape(3, 4), "step": 7, "name": "x"}
OTHER = {"m": np.arange(5)}


def by_orbax(path: Path, custom_metadata: Any = None) -> Path:
    v1.save_checkpointables(path, {"state": STATE, "other": OTHER}, custom_metadata=custom_metadata)
    return path


def by_us(path: Path) -> Path:
    with writing.layout_of({"use_ocdbt": False}):
        waystation.save_checkpointables(path, {"state": STATE, "other": OTHER})
    return path


def step_of_version_0(path: Path) -> Path:
    # In the background, what a save has begun when it fails is waited for during ten minutes.
    options = version0.CheckpointManagerOptions(enable_async_checkpointing=False)
    with version0.CheckpointManager(path.with_name("steps"), options=options) as steps:
        items = version0.args.Composite(
            state=version0.args.PyTreeSave(STATE), other=version0.args.PyTreeSave(OTHER)
        )
        steps.save(7, args=items, metrics={"loss": 1.0})
    return (path.parent / "steps" / "7").rename(path)


def without_metadata(path: Path) -> Path:
    """One whose metadata were lost, as genuine Orbax reports."""
    (step_of_version_0(path) / "_CHECKPOINT_METADATA").unlink()
    return path


writers = pytest.mark.parametrize(
    "write", [by_orbax, by_us, step_of_version_0, without_metadata], ids=lambda write: write.__name__
)


@writers
@pytest.mark.parametrize("asynchronous", [False, True])
def test_genuine_orbax_loads_the_rest(
    write: Callable[[Path], Path], asynchronous: bool, tmp_path: Path
) -> None:
    path = write(tmp_path / "checkpoint")
    if asynchronous:
        assert waystation.delete_async(path, checkpointable_name="other").result()
    else:
        assert waystation.delete(path, checkpointable_name="other")
    assert not waystation.delete(path, checkpointable_name="other", missing_ok=True)
    for library in (v1, waystation):
        loaded = library.load_checkpointables(path)
        assert loaded.keys() == {"state"}
        oracle.assert_same(loaded["state"], STATE)
        assert set(library.checkpointables_metadata(path).metadata) == {"state"}
        with pytest.raises(KeyError):
            library.load_checkpointables(path, {"other": None})
    with pytest.raises(FileNotFoundError):
        waystation.delete(path, checkpointable_name="other")
    assert not (path / "other").exists()
    present = set(os.listdir(path)) - {".waystation-checksums"}
    assert not any("waystation" in name or "DELETION" in name for name in present)
    assert not find_leftovers(tmp_path)


def test_the_metadata_are_what_genuine_orbax_makes_of_them(tmp_path: Path) -> None:
    ours = by_orbax(tmp_path / "ours", {"mine": [1, None]})
    (tmp_path / "theirs").mkdir()
    theirs = tmp_path / "theirs" / "checkpoint"
    subprocess.run(["cp", "-r", ours, theirs], check=True)
    waystation.delete(ours, checkpointable_name="other")
    v1.delete(theirs, checkpointable_name="other")
    mine, other = (json.loads((path / "_CHECKPOINT_METADATA").read_text()) for path in (ours, theirs))
    assert mine == other
    assert sorted(os.listdir(ours)) == sorted(os.listdir(theirs))


@writers
def test_what_must_not_be_deleted(write: Callable[[Path], Path], tmp_path: Path) -> None:
    path = write(tmp_path / "checkpoint")
    with pytest.raises(CheckpointableNotFound, match=r"'absent'.*it has: other, state"):
        waystation.delete(path, checkpointable_name="absent")
    for name in ("metrics", "../checkpoint", "_CHECKPOINT_DELETION"):
        with pytest.raises(InvalidInput):
            waystation.delete(path, checkpointable_name=name)
    waystation.delete(path, checkpointable_name="other")
    with pytest.raises(InvalidInput, match="is the last checkpointable"):
        waystation.delete(path, checkpointable_name="state")
    oracle.assert_same(waystation.load(path), STATE)
    assert waystation.delete(path)
    assert not path.exists()


def test_a_tree_without_a_name_is_deleted_whole_only(tmp_path: Path) -> None:
    with version0.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", STATE)
    with pytest.raises(ValueError, match="last checkpointable"):
        waystation.delete(tmp_path / "checkpoint", checkpointable_name="state")
    assert waystation.delete(tmp_path / "checkpoint")


@pytest.mark.parametrize("library", [v1, waystation], ids=["orbax", "ours"])
def test_a_part_of_a_checkpoint_is_no_checkpoint_to_delete(library: Any, tmp_path: Path) -> None:
    path = by_orbax(tmp_path / "checkpoint")
    with pytest.raises(ValueError, match=r"(?i)checkpointable"):
        library.delete(path / "other")
    assert v1.load_checkpointables(path).keys() == {"state", "other"}


def interrupt(path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deletion by genuine Orbax that ends as soon as it has said what it is going to do."""

    async def stop(*_: Any) -> None:
        raise InterruptedError

    with monkeypatch.context() as patched:
        patched.setattr(execution, "_execute", stop)
        with pytest.raises(InterruptedError):
            v1.delete(path, checkpointable_name=name)
    assert (path / "_CHECKPOINT_DELETION").exists()


@pytest.mark.parametrize("metadata", [{"mine": 1}, {"mine": float("nan")}], ids=str)
def test_a_deletion_by_orbax_is_ended(
    metadata: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = by_orbax(tmp_path / "checkpoint", metadata)
    interrupt(path, "other", monkeypatch)
    for library in (v1, waystation):
        with pytest.raises(RuntimeError):
            library.delete(path, checkpointable_name="state")
    assert waystation.delete(path, checkpointable_name="other", missing_ok=True)
    assert v1.load_checkpointables(path).keys() == {"state"}
    assert not (path / "_CHECKPOINT_DELETION").exists()


def test_a_checkpoint_whose_deletion_has_begun_is_deleted_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = by_orbax(tmp_path / "checkpoint")
    interrupt(path, "other", monkeypatch)
    assert waystation.delete(path)
    assert os.listdir(tmp_path) == []


DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no name": lambda record: record.pop("checkpointable_name"),
    "a name that leads out": lambda record: record.update(checkpointable_name="../other"),
    "metadata that lose more": lambda record: record["updated_metadata"].update(item_handlers={}),
    "metadata of another": lambda record: [
        record[which].update(custom_metadata={"x": 1}) for which in ("original_metadata", "updated_metadata")
    ],
    "another kind": lambda record: record.update(original_metadata=[]),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_record_that_makes_no_sense_is_not_acted_upon(
    damage: Callable[[dict[str, Any]], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = by_orbax(tmp_path / "checkpoint")
    interrupt(path, "other", monkeypatch)
    record = json.loads((path / "_CHECKPOINT_DELETION").read_text())
    damage(record)
    (path / "_CHECKPOINT_DELETION").write_text(json.dumps(record))
    for call in (waystation.load, lambda path: waystation.delete(path, checkpointable_name="other")):
        with pytest.raises(DeletionRecoveryError):
            call(path)
    with pytest.raises(RuntimeError):
        v1.load(path)
    assert (path / "other" / "_METADATA").exists()


@pytest.mark.long
@pytest.mark.skipif(
    not system_calls.SUPPORTED, reason="the tracer knows the system calls of x86-64 Linux only"
)
@pytest.mark.parametrize("write", [by_us, without_metadata], ids=lambda write: write.__name__)
@pytest.mark.share(2)
def test_killed_at_every_step(write: Callable[[Path], Path], tmp_path: Path) -> None:
    """Whatever is left, genuine Orbax sees both checkpointables or one, whole; either library ends it."""
    path, walked = write(tmp_path / "checkpoint"), tmp_path / "walked"
    walked.mkdir()
    command = [sys.executable, "-m", "tests.orbax.kill_deletion", str(path), "other", str(walked)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["python", str(ROOT)])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    changes = json.loads(done.stdout)
    seen = set()
    for turn, step in enumerate(sorted(int(path.name) for path in walked.iterdir())):
        left = walked / str(step) / "checkpoint"
        told = f"killed before change {step} of {changes}"
        for library in (v1, waystation):
            loaded = library.load_checkpointables(left)
            assert loaded.keys() in ({"state"}, {"state", "other"}), told
            oracle.assert_same(loaded["state"], STATE)
            if "other" in loaded:
                np.testing.assert_array_equal(loaded["other"]["m"], OTHER["m"])
            seen.add((library.__name__, len(loaded)))
        has_metadata = (left / "_CHECKPOINT_METADATA").exists()
        library = v1 if turn % 2 and has_metadata else waystation
        library.delete(left, checkpointable_name="other", missing_ok=True)
        assert v1.load_checkpointables(left).keys() == {"state"}, told
        if library is waystation:
            assert not (left / "other").exists(), told
            assert not (left / "_CHECKPOINT_DELETION").exists(), told
    assert len(seen) == 4, f"every kill left the same: {seen}"
