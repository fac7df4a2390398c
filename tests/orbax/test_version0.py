"""Every way in which the first API of genuine Orbax can still save, read by us bit by bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from google.protobuf import struct_pb2
from jax.sharding import NamedSharding, PartitionSpec
from tests.frameworks.jax_mesh import mesh
from tests.orbax import oracle
from tests.orbax.oracle import v1, version0

import waystation
from waystation.errors import WaystationError

args = version0.args
Writer = Callable[[Path], Path]


def now() -> version0.CheckpointManagerOptions:
    """In the background, what a save has begun when it fails would be waited for during ten minutes."""
    return version0.CheckpointManagerOptions(enable_async_checkpointing=False)


def state() -> dict[str, Any]:
    """A training state with a leaf of every kind that version 0 knows."""
    sharding = NamedSharding(mesh(4, 2), PartitionSpec("x", "y"))
    parameters = {
        "w": jax.device_put(jnp.arange(128.0).reshape(16, 8), sharding),
        "b": jnp.ones(3, jnp.bfloat16),
    }
    return {
        "params": parameters,
        "optimizer": optax.adamw(1e-3).init(parameters),
        "step": 7,
        "rate": 0.1,
        "name": "run ü",
        "host": np.arange(6, dtype=np.int64).reshape(2, 3),
        "nothing": None,
        "pairs": [(jnp.int32(1), {"x": np.float16([1, 2])}), []],
    }


def standard_state() -> dict[str, Any]:
    """What the handler of standard trees takes: no strings."""
    return {name: leaf for name, leaf in state().items() if name != "name"}


def checkpointer(*, asynchronous: bool = False, rich: bool = False, **options: Any) -> Writer:
    """Saves by a checkpointer of trees."""

    def write(path: Path) -> Path:
        metadata = v1.options.PyTreeOptions.Saving().pytree_metadata_options
        handler = version0.PyTreeCheckpointHandler(
            pytree_metadata_options=type(metadata)(support_rich_types=rich), **options
        )
        kind = version0.AsyncCheckpointer if asynchronous else version0.Checkpointer
        with kind(handler) as saver:
            saver.save(path, args=args.PyTreeSave(state()))
        return path

    return write


def with_save_args(**options: Any) -> Writer:
    """Saves with the same arguments for each leaf."""

    def write(path: Path) -> Path:
        tree = {"params": state()["params"], "host": np.arange(64.0)}
        own = jax.tree.map(lambda _: version0.SaveArgs(**options), tree)
        with version0.PyTreeCheckpointer() as saver:
            saver.save(path, tree, save_args=own)
        return path

    return write


def standard(path: Path) -> Path:
    with version0.StandardCheckpointer() as saver:
        saver.save(path, standard_state(), custom_metadata={"mine": 1})
    return path


def small_files(path: Path) -> Path:
    with version0.PyTreeCheckpointer() as saver:
        saver.save(path, state(), ocdbt_target_data_file_size=1000)
    return path


def manager_of_checkpointers(path: Path) -> Path:
    """The manager's first interface: a checkpointer for each item."""
    items = {
        "state": version0.PyTreeCheckpointer(use_ocdbt=False),
        "config": version0.Checkpointer(version0.JsonCheckpointHandler()),
    }
    with version0.CheckpointManager(path, items, now()) as manager:
        manager.save(3, {"state": state(), "config": {"x": 1}})
    return path / "3"


def manager_of_one_checkpointer(path: Path) -> Path:
    with version0.CheckpointManager(path, version0.PyTreeCheckpointer(), now()) as manager:
        manager.save(3, state(), metrics={"loss": 1.0})
    return path / "3"


def manager_with_composite_names(path: Path) -> Path:
    newer, older = (version0.path.step.standard_name_format(step_prefix=name) for name in ("new", "old"))
    options = version0.CheckpointManagerOptions(
        step_name_format=version0.path.step.composite_name_format(newer, [newer, older]),
        enable_async_checkpointing=False,
    )
    with version0.CheckpointManager(path, options=options, metadata={"run": 1}) as manager:
        manager.save(3, args=args.StandardSave(standard_state()), custom_metadata={"note": "x"})
    return path / "new_3"


def older_metadata(path: Path) -> Path:
    """What releases wrote that knew fewer members of `_METADATA`, and no other files beside it."""
    checkpointer(use_ocdbt=False)(path)
    file = path / "_METADATA"
    body = json.loads(file.read_text())
    for name in ("use_ocdbt", "store_array_data_equal_to_fill_value", "custom_metadata"):
        body.pop(name)
    for entry in body["tree_metadata"].values():
        entry["value_metadata"].pop("write_shape", None)
    file.write_text(json.dumps(body))
    for own in (path / "array_metadatas").iterdir():
        own.unlink()
    (path / "array_metadatas").rmdir()
    return path


WRITERS: dict[str, Writer] = {
    "ocdbt": checkpointer(),
    "ocdbt-zarr3": checkpointer(use_zarr3=True),
    "ocdbt-uncompressed": checkpointer(use_compression=False),
    "files": checkpointer(use_ocdbt=False),
    "files-zarr3": checkpointer(use_ocdbt=False, use_zarr3=True),
    "files-uncompressed": checkpointer(use_ocdbt=False, use_compression=False),
    "files-zarr3-uncompressed": checkpointer(use_ocdbt=False, use_zarr3=True, use_compression=False),
    "asynchronous": checkpointer(asynchronous=True),
    "rich types": checkpointer(rich=True),
    "cast": with_save_args(dtype=np.dtype(np.float32)),
    "small chunks": with_save_args(chunk_byte_size=16),
    "chunks along an axis": with_save_args(chunk_byte_size=64, shard_axes=(0,)),
    "aggregated": with_save_args(aggregate=True),  # a name for arrays that are written like others by now
    "standard": standard,
    "small files": small_files,
    "manager of checkpointers": manager_of_checkpointers,
    "manager of one checkpointer": manager_of_one_checkpointer,
    "manager with composite names": manager_with_composite_names,
    "older metadata": older_metadata,
}
writers = pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)


@pytest.mark.share(12)
@writers
def test_what_version_0_writes(write: Writer, tmp_path: Path) -> None:
    path = write(tmp_path / "c")
    expected = oracle.load(path)
    oracle.assert_same(oracle.ours(path), expected)
    abstract = jax.tree.map(
        lambda leaf: waystation.arrays.to_shape_dtype_struct(leaf) if isinstance(leaf, jax.Array) else leaf,
        expected,
    )
    oracle.assert_same(oracle.ours(path, abstract), expected)
    found = waystation.metadata(path)
    assert found.custom_metadata == v1.metadata(path).custom_metadata
    oracle.assert_same(oracle.ours(path, found), expected)


@pytest.mark.share(4)
@writers
@pytest.mark.parametrize("removed", ["_sharding", "_CHECKPOINT_METADATA", "commit_success.txt"])
def test_what_other_releases_did_not_write(write: Writer, removed: str, tmp_path: Path) -> None:
    path = write(tmp_path / "c")
    expected = oracle.load(path)
    for file in path.rglob(removed):
        file.unlink()
    loaded = oracle.ours(path)
    if removed == "_sharding":  # which says where arrays were
        loaded, expected = (jax.tree.map(on_host, tree) for tree in (loaded, expected))
    oracle.assert_same(loaded, expected)


def on_host(leaf: Any) -> Any:
    return np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf


def test_items_of_every_kind(tmp_path: Path) -> None:
    message = struct_pb2.Struct()
    message.update({"a": 1})
    items = {
        "default": args.StandardSave(standard_state()),
        "params": args.PyTreeSave({"w": jnp.ones(3)}),
        "config": args.JsonSave({"x": [1, None]}),
        "message": args.ProtoSave(message),
        "array": args.ArraySave(jnp.arange(4.0)),
        "key": args.JaxRandomKeySave(jax.random.key(3)),
        "old key": args.NumpyRandomKeySave(np.random.get_state()),
    }
    with version0.CheckpointManager(tmp_path / "c", options=now()) as manager:
        manager.save(0, args=args.Composite(**items))
    path = tmp_path / "c" / "0"
    wanted = {"default": None, "params": None, "config": None, "message": struct_pb2.Struct}
    theirs, ours = (library.load_checkpointables(path, wanted) for library in (v1, waystation))
    assert ours.keys() == theirs.keys()
    for name in ("default", "params"):
        oracle.assert_same(ours[name], theirs[name])
    assert ours["config"] == theirs["config"] == {"x": [1, None]}
    assert ours["message"] == theirs["message"] == message
    oracle.assert_same(oracle.ours(path), oracle.load(path))
    for name in ("array", "key", "old key"):  # of which version 1 has no handlers
        found = [outcome(library.load_checkpointables, path, {name: None}) for library in (v1, waystation)]
        if isinstance(found[0], Exception):
            assert isinstance(found[1], WaystationError), (name, found)
        else:
            oracle.assert_same(found[1], found[0])


def outcome(call: Callable[..., Any], *arguments: Any) -> Any:
    """What a call returns, or the error that it raises."""
    try:
        return call(*arguments)
    except Exception as error:
        return error


def test_a_sequence_of_a_manager_goes_on(tmp_path: Path) -> None:
    """Steps of `CheckpointManager` are listed, loaded and gone on with, and it goes on with ours."""
    options = version0.CheckpointManagerOptions(
        enable_async_checkpointing=False, best_fn=lambda metrics: metrics["loss"], best_mode="min"
    )
    with version0.CheckpointManager(tmp_path, options=options) as manager:
        for step in range(3):
            manager.save(step, args=args.StandardSave({"w": jnp.full(3, step)}), metrics={"loss": step})
    context = waystation.Context()
    context.array.saving.use_ocdbt = True
    policy = waystation.training.save_decision_policies.FixedIntervalPolicy(1)
    with waystation.training.Checkpointer(
        tmp_path, context=context, save_decision_policy=policy
    ) as checkpointer:
        assert [(info.step, info.metrics) for info in checkpointer.checkpoints] == [
            (step, {"loss": step}) for step in range(3)
        ]
        np.testing.assert_array_equal(checkpointer.load(1, checkpointable_name="default")["w"], np.full(3, 1))
        assert checkpointer.save_checkpointables(3, {"default": {"w": jnp.full(3, 3)}})
    with version0.CheckpointManager(tmp_path, options=now()) as manager:
        assert sorted(manager.all_steps()) == [0, 1, 2, 3]
        restored = manager.restore(3, args=args.StandardRestore())
        np.testing.assert_array_equal(restored["w"], np.full(3, 3))
