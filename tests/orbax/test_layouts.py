"""Every structure that genuine Orbax has written or writes: of version 0 and 1, whole and damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint.experimental.v1._src.deletion import metadata as deletion
from tests.orbax import oracle
from tests.orbax.oracle import FIXTURES, v1, version0

import waystation
from waystation.errors import InvalidInput, NotFound, WaystationError

STATE = {"a": jnp.arange(8, dtype=jnp.int32), "b": {"c": jnp.ones(3), "d": [1, 2.5]}}


def fixtures() -> list[Path]:
    """The checkpoints of earlier releases."""
    found = {path.parent for path in FIXTURES.rglob("_CHECKPOINT_METADATA")}
    found |= {
        path.parent for path in FIXTURES.rglob("_METADATA") if path.parent.name not in ("state", "dummy")
    }
    found |= {path.parent.parent for path in FIXTURES.rglob("_METADATA") if path.parent.name == "state"}
    return sorted(found)


def outcome(load: Callable[..., Any], path: Path, *arguments: Any) -> Any:
    """What a load gives, or that it fails."""
    try:
        return load(path, *arguments)
    except Exception as error:
        return error


@pytest.mark.share(3)
@pytest.mark.parametrize("path", fixtures(), ids=lambda path: "-".join(path.relative_to(FIXTURES).parts[-3:]))
def test_checkpoints_of_earlier_releases(path: Path, tmp_path: Path) -> None:
    """What genuine Orbax loads, we load the same; what it cannot load is an error that says what it is, or
    loads all the same."""
    copy = shutil.copytree(path, tmp_path / "c")
    theirs, ours = outcome(oracle.load, copy), outcome(oracle.ours, copy)
    if not isinstance(theirs, Exception):
        oracle.assert_same(ours, theirs)
    elif isinstance(ours, Exception):
        assert isinstance(ours, WaystationError), repr(ours)
    else:
        assert set(ours) == {"a", "b"}
        np.testing.assert_array_equal(ours["a"], np.arange(8))


def standard(path: Path) -> str:
    with version0.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, STATE)
    return ""


def pytree(path: Path) -> str:
    with version0.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, STATE)
    return ""


def pytree_files(path: Path) -> str:
    with version0.PyTreeCheckpointer(use_ocdbt=False) as checkpointer:
        checkpointer.save(path, STATE)
    return ""


def pytree_zarr3(path: Path) -> str:
    with version0.PyTreeCheckpointer(use_ocdbt=False, use_zarr3=True) as checkpointer:
        checkpointer.save(path, STATE)
    return ""


def manager(path: Path) -> str:
    with version0.CheckpointManager(path) as steps:
        steps.save(7, args=version0.args.StandardSave(STATE), metrics={"loss": 1.0})
        steps.wait_until_finished()
    return "7"


def manager_of_items(path: Path) -> str:
    with version0.CheckpointManager(path, item_names=("params", "config")) as steps:
        items = version0.args.Composite(
            params=version0.args.PyTreeSave(STATE), config=version0.args.JsonSave({"x": 1})
        )
        steps.save(7, args=items)
        steps.wait_until_finished()
    return "7"


def manager_with_names(path: Path) -> str:
    options = version0.CheckpointManagerOptions(step_prefix="step", step_format_fixed_length=6)
    with version0.CheckpointManager(path, options=options) as steps:
        steps.save(7, args=version0.args.StandardSave(STATE))
        steps.wait_until_finished()
    return "step_000007"


def checkpointer(path: Path) -> str:
    with v1.training.Checkpointer(path) as steps:
        steps.save(7, STATE, metrics={"loss": 1.0})
    return "7"


def free_function(path: Path) -> str:
    v1.save(path, STATE)
    return ""


WRITERS = [
    standard,
    pytree,
    pytree_files,
    pytree_zarr3,
    manager,
    manager_of_items,
    manager_with_names,
    checkpointer,
    free_function,
]
writers = pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)


@pytest.mark.share(3)
@writers
@pytest.mark.parametrize("removed", ["nothing", "_CHECKPOINT_METADATA", "commit_success.txt", "_sharding"])
def test_every_structure(write: Callable[[Path], str], removed: str, tmp_path: Path) -> None:
    root = tmp_path / "c"
    path = root / write(root)
    for file in list(path.rglob(removed)):
        file.unlink()
    assert waystation.is_checkpoint(path)
    loaded = oracle.ours(path)
    oracle.assert_same(loaded, STATE)
    abstract = waystation.metadata(path).metadata
    oracle.assert_same(oracle.ours(path, abstract), STATE)


@writers
def test_a_directory_of_steps_is_no_checkpoint(write: Callable[[Path], str], tmp_path: Path) -> None:
    root = tmp_path / "c"
    step = write(root)
    if not step:
        return
    assert not waystation.is_checkpoint(root)
    with pytest.raises(InvalidInput, match=step):
        oracle.ours(root)


@writers
def test_what_is_unfinished_is_no_checkpoint(write: Callable[[Path], str], tmp_path: Path) -> None:
    root = tmp_path / "c"
    path = root / write(root)
    unfinished = path.rename(path.parent / f"{path.name}.orbax-checkpoint-tmp")
    assert not waystation.is_checkpoint(unfinished)
    with pytest.raises(InvalidInput, match=r"unfinished"):
        oracle.ours(unfinished)


def test_what_is_nothing_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").touch()
    for name in ("directory", "file"):
        assert not waystation.is_checkpoint(tmp_path / name)
        with pytest.raises(InvalidInput, match=r"not a checkpoint"):
            oracle.ours(tmp_path / name)
    with pytest.raises(NotFound):
        oracle.ours(tmp_path / "absent")


def test_a_directory_with_the_name_of_the_indicator_indicates_nothing(tmp_path: Path) -> None:
    """Orbax's indicator is a file; a run may keep its checkpoints in a directory of that name."""
    for name in ("orbax.checkpoint/0", "beside"):
        waystation.save(tmp_path / name, STATE)
        oracle.assert_same(waystation.load(tmp_path / name), STATE)
    assert not waystation.is_checkpoint(tmp_path)


def test_metadata_say_when_and_what(tmp_path: Path) -> None:
    v1.save(tmp_path / "c", STATE, custom_metadata={"mine": [1, None]})
    theirs, ours = v1.metadata(tmp_path / "c"), waystation.metadata(tmp_path / "c")
    assert ours.custom_metadata == theirs.custom_metadata == {"mine": [1, None]}
    assert ours.commit_timestamp_nsecs == theirs.commit_timestamp_nsecs
    assert ours.init_timestamp_nsecs == theirs.init_timestamp_nsecs


def test_checkpointables_with_handlers(tmp_path: Path) -> None:
    items = {"model": {"w": jnp.ones(3)}, "config": {"lr": 0.1, "name": "x"}}
    registry = v1.handlers.local_registry()
    registry.add(v1.handlers.JsonHandler, checkpointable_name="config")
    context = v1.Context()
    context.checkpointables.registry = registry
    with context:
        v1.save_checkpointables(tmp_path / "c", items)
    loaded = waystation.load_checkpointables(tmp_path / "c")
    assert loaded.keys() == items.keys()
    assert loaded["config"] == items["config"]
    np.testing.assert_array_equal(loaded["model"]["w"], np.ones(3))
    assert set(waystation.checkpointables_metadata(tmp_path / "c").metadata) == items.keys()
    only = waystation.load_checkpointables(tmp_path / "c", {"config": None})
    assert only == {"config": items["config"]}


def test_version_0_items_with_handlers(tmp_path: Path) -> None:
    step = manager_of_items(tmp_path / "c")
    loaded = waystation.load_checkpointables(tmp_path / "c" / step)
    assert loaded["config"] == {"x": 1}
    oracle.assert_same(loaded["params"], STATE)


def test_an_item_whose_deletion_has_begun_is_not_there(tmp_path: Path) -> None:
    v1.save_checkpointables(tmp_path / "c", {"one": {"w": jnp.ones(3)}, "two": {"w": jnp.zeros(3)}})
    original = json.loads((tmp_path / "c" / "_CHECKPOINT_METADATA").read_text())
    record = deletion.DeletionRecord(
        operation_id="0" * 32,
        checkpointable_name="two",
        destination=None,
        original_metadata=original,
        updated_metadata=deletion.updated_metadata(original, "two"),
    )
    (tmp_path / "c" / "_CHECKPOINT_DELETION").write_text(json.dumps(record.to_json()))
    assert set(waystation.load_checkpointables(tmp_path / "c")) == set(
        v1.load_checkpointables(tmp_path / "c")
    )
    for load in (v1.load, waystation.load):
        with pytest.raises(RuntimeError, match=r"(?i)delet"):
            load(tmp_path / "c", checkpointable_name="two")
