"""Checkpointers, handlers, and arguments of leaves: what one library has saved the other restores, alike."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as theirs
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tests.frameworks.jax_mesh import mesh
from tests.version0.pair import LIBRARIES, assert_same, kinds_of, outcome, state

import waystation
import waystation.compat.orbax as ours
from waystation.errors import Corrupt, InvalidInput, LossyCast, StructureMismatch, Unsupported

both = pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)


def other(library: types.ModuleType) -> types.ModuleType:
    return theirs if library is ours else ours


def train_state() -> dict[str, Any]:
    """A training state over devices, with the containers of an optimizer."""
    spread = NamedSharding(mesh(4, 2), PartitionSpec("x", "y"))
    params = {"w": jax.device_put(jnp.arange(128.0).reshape(16, 8), spread), "b": jnp.ones(3, jnp.bfloat16)}
    return {**state(5), "params": params, "optimizer": optax.adamw(1e-3).init(params)}


# ---- checkpointers -----------------------------------------------------------------------------


def standard(library: Any, path: Path) -> None:
    with library.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, train_state(), custom_metadata={"mine": 1})


def tree(library: Any, path: Path, **options: Any) -> None:
    with library.PyTreeCheckpointer(**options) as checkpointer:
        checkpointer.save(path, {**train_state(), "name": "run ü"})


def with_save_args(library: Any, path: Path) -> None:
    item = {"w": jnp.arange(4096.0).reshape(64, 64), "host": np.arange(64.0), "step": 3}
    save_args = {
        "w": library.SaveArgs(dtype=np.dtype(jnp.bfloat16), chunk_byte_size=1024, shard_axes=(0,)),
        "host": library.SaveArgs(chunk_byte_size=64),
        "step": library.SaveArgs(),
    }
    with library.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, item, save_args=save_args)


def background(library: Any, path: Path) -> None:
    with library.AsyncCheckpointer(library.PyTreeCheckpointHandler(use_zarr3=True), timeout_secs=60) as saver:
        saver.save(path, args=library.args.PyTreeSave(train_state(), custom_metadata={"a": [1]}))


TREES: dict[str, Callable[[Any, Path], None]] = {
    "standard": standard,
    "tree": tree,
    "files": lambda library, path: tree(library, path, use_ocdbt=False),
    "zarr3": lambda library, path: tree(library, path, use_zarr3=True, use_compression=False),
    "save args": with_save_args,
    "background": background,
}


@pytest.mark.parametrize("save", TREES.values(), ids=TREES)
def test_a_tree_is_read_by_both(save: Callable[[Any, Path], None], tmp_path: Path) -> None:
    found = []
    for name, library in LIBRARIES.items():
        save(library, tmp_path / name)
        for reader in LIBRARIES.values():
            with reader.PyTreeCheckpointer() as checkpointer:
                found.append((checkpointer.restore(tmp_path / name), checkpointer.metadata(tmp_path / name)))
    (first, described), *rest = found
    for restored, metadata in rest:
        assert_same(restored, first, save)
        assert metadata.custom_metadata == described.custom_metadata
        assert metadata.item_handlers == described.item_handlers
        assert metadata.item_metadata.custom_metadata == described.item_metadata.custom_metadata
    assert waystation.verify(tmp_path / "ours").damages == []


@both
def test_an_abstract_tree_says_what_is_restored(library: Any, tmp_path: Path) -> None:
    standard(library, tmp_path / "c")
    spread = NamedSharding(mesh(8), PartitionSpec("x"))
    wanted = jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=spread) if leaf.ndim == 2 else leaf
        ),
        train_state()["params"],
    )
    abstract = {**train_state(), "params": wanted, "rate": 0.0, "host": np.zeros(3, np.float32)}
    found = []
    for reader in LIBRARIES.values():
        with reader.StandardCheckpointer() as checkpointer:
            found.append(checkpointer.restore(tmp_path / "c", abstract))
    assert_same(*found, "restored")
    assert found[0]["params"]["w"].sharding == spread
    assert type(found[0]["optimizer"]) is type(abstract["optimizer"])


REFUSED = {
    "another shape": lambda item: {**item, "host": np.zeros(5, np.int64)},
    "a leaf too many": lambda item: {**item, "more": jnp.ones(2)},
    "a leaf too few": lambda item: {key: value for key, value in item.items() if key != "host"},
    "a list where a dict is": lambda item: {**item, "params": [1, 2]},
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_what_is_not_there_is_refused_alike(change: Any, tmp_path: Path) -> None:
    standard(ours, tmp_path / "c")
    item = change(jax.tree.map(lambda leaf: leaf, train_state()))
    if "more" not in item and "host" in item and isinstance(item["params"], dict):
        item["w"] = jnp.zeros((4, 4))  # genuine Orbax looks at shapes of JAX arrays only
    raised = []
    for reader in LIBRARIES.values():
        with reader.StandardCheckpointer() as checkpointer:
            raised.append(
                outcome(lambda checkpointer=checkpointer: checkpointer.restore(tmp_path / "c", item)).error
            )  # type: ignore[misc]
    assert raised[0] is not None
    assert isinstance(raised[1], kinds_of(raised[0]) or ValueError), raised


def restore_args(library: Any) -> dict[str, Any]:
    placed = {"mesh": mesh(8), "mesh_axes": PartitionSpec(None, "x")}
    return {
        "w": library.ArrayRestoreArgs(**placed, dtype=jnp.float32, global_shape=(16, 8)),
        "b": library.ArrayRestoreArgs(global_shape=(4,), strict=False),
        "host": library.RestoreArgs(restore_type=np.ndarray, dtype=np.float32),
        "step": library.RestoreArgs(restore_type=float),
        "rest": library.RestoreArgs(),
    }


@pytest.mark.parametrize("has_item", [False, True])
@pytest.mark.parametrize("partial", [False, True])
def test_restore_args_say_what_leaves_become(has_item: bool, partial: bool, tmp_path: Path) -> None:
    item = {
        "w": jnp.arange(128.0, dtype=jnp.bfloat16).reshape(16, 8),
        "b": jnp.arange(3),
        "host": np.arange(4),
        "step": 3,
        "rest": jnp.ones(2),
    }
    for name, library in LIBRARIES.items():
        with library.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / name, {**item, **({"more": 1} if partial else {})})
    found = []
    for library in LIBRARIES.values():
        own = restore_args(library)
        for name in LIBRARIES:
            with library.PyTreeCheckpointer() as checkpointer:
                args = library.args.PyTreeRestore(
                    item=dict.fromkeys(item, 0) if has_item or partial else None,
                    restore_args=own,
                    partial_restore=partial,
                )
                found.append(checkpointer.restore(tmp_path / name, args=args))
    for restored in found[1:]:
        assert_same(restored, found[0], "restored")


TRANSFORMS: dict[str, Callable[[Any], tuple[Any, Any, dict[str, Any]]]] = {
    "renamed": lambda ocp: ({"x": 0, "b": {"c": 0}}, {"x": ocp.Transform(original_key="a")}, {}),
    "computed": lambda ocp: (
        {"x": 0, "b": {"c": 0}},
        {"x": ocp.Transform(original_key="b/d", value_fn=lambda value: value * 10)},
        {},
    ),
    "by groups": lambda ocp: (
        {"n": {"c": 0, "d": 0}},
        {r"n/(.*)": ocp.Transform(original_key=r"b/\1")},
        {},
    ),
    "fallback": lambda ocp: (
        {"a": 0, "new": np.ones(2)},
        {"new": ocp.Transform(use_fallback=True)},
        {"transforms_default_to_original": True},
    ),
    "of several": lambda ocp: (
        {"x": 0},
        {
            "x": ocp.RestoreTransform(
                multi_value_fn=lambda name, tree, args: tree["a"] + tree["b"]["c"],
                multi_value_fn_input_args={"a": ocp.RestoreArgs(), "b/c": ocp.RestoreArgs()},
            )
        },
        {},
    ),
}


@pytest.mark.parametrize("case", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transformations_make_other_trees(case: Any, tmp_path: Path) -> None:
    saved = {"a": np.arange(3), "b": {"c": np.ones(3), "d": np.full(2, 7)}}
    with theirs.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", saved)
    found = []
    for library in LIBRARIES.values():
        item, transforms, more = case(library)
        own = jax.tree.map(lambda _, library=library: library.RestoreArgs(restore_type=np.ndarray), item)
        with library.PyTreeCheckpointer() as checkpointer:
            found.append(
                checkpointer.restore(
                    tmp_path / "c", item=item, restore_args=own, transforms=transforms, **more
                )
            )
    assert_same(*reversed(found), "transformed")


# ---- handlers ----------------------------------------------------------------------------------


@both
def test_items_of_every_kind(library: Any, tmp_path: Path) -> None:
    args = library.args
    items = {
        "state": args.StandardSave(state(3)),
        "tree": args.PyTreeSave({"name": "x", "w": jnp.ones(3)}),
        "config": args.JsonSave({"x": [1, None]}),
        "array": args.ArraySave(jnp.arange(4.0)),
        "number": args.ArraySave(7),
        "key": args.JaxRandomKeySave(jax.random.key(3)),
        "old_key": args.JaxRandomKeySave(jax.random.PRNGKey(3)),
        "numpy": args.NumpyRandomKeySave(np.random.RandomState(4).get_state()),
    }
    with library.Checkpointer(library.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "c", args=args.Composite(**items), custom_metadata={"a": 1})
    found = []
    for reader in LIBRARIES.values():
        with reader.Checkpointer(reader.CompositeCheckpointHandler()) as checkpointer:
            restored = checkpointer.restore(tmp_path / "c")
            found.append(restored)
            assert checkpointer.metadata(tmp_path / "c").custom_metadata == {"a": 1}
    ours_found, theirs_found = found[1], found[0]
    for name in ("state", "tree", "config", "array", "number", "old_key"):
        assert_same({"": ours_found[name]}, {"": theirs_found[name]}, name)
    for one in found:
        assert jax.random.key_data(one["key"]).tolist() == jax.random.key_data(jax.random.key(3)).tolist()
        assert jax.random.key_impl(one["key"]) == jax.random.key_impl(jax.random.key(3))
        assert one["numpy"][0] == "MT19937"
        np.testing.assert_array_equal(one["numpy"][1], np.random.RandomState(4).get_state()[1])


@both
def test_a_checkpoint_of_one_small_thing(library: Any, tmp_path: Path) -> None:
    with library.Checkpointer(library.JsonCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "c", {"a": 1})
    for reader in LIBRARIES.values():
        with reader.Checkpointer(reader.JsonCheckpointHandler()) as checkpointer:
            assert checkpointer.restore(tmp_path / "c") == {"a": 1}
    with library.Checkpointer(library.ArrayCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "a", jnp.ones(3))
    for reader in LIBRARIES.values():
        with reader.Checkpointer(reader.ArrayCheckpointHandler()) as checkpointer:
            np.testing.assert_array_equal(checkpointer.restore(tmp_path / "a"), np.ones(3))


def own_handler(library: Any) -> types.SimpleNamespace:
    """A handler that keeps a tree among its files, as programs have them."""
    calls: list[str] = []

    class Handler(library.CheckpointHandler):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self._trees = library.PyTreeCheckpointHandler()

        def save(self, directory: Any, args: Any = None) -> None:
            calls.append("save")
            inner = Path(directory) / "inner"
            inner.mkdir()
            (Path(directory) / "note.json").write_text(json.dumps(args.note))
            self._trees.save(directory / "inner", args=library.args.PyTreeSave(args.item))

        def restore(self, directory: Any, args: Any = None) -> Any:
            return json.loads((Path(directory) / "note.json").read_text()), self._trees.restore(
                directory / "inner", args=library.args.PyTreeRestore()
            )

        def finalize(self, directory: Any) -> None:
            calls.append("finalize")
            self._trees.finalize(directory / "inner")

    @library.args.register_with_handler(Handler, for_save=True)
    @dataclasses.dataclass
    class Save(library.args.CheckpointArgs):  # type: ignore[misc, name-defined]
        item: Any
        note: Any = None

    @library.args.register_with_handler(Handler, for_restore=True)
    @dataclasses.dataclass
    class Restore(library.args.CheckpointArgs):  # type: ignore[misc, name-defined]
        pass

    return types.SimpleNamespace(handler=Handler, save=Save, restore=Restore, calls=calls)


@both
def test_a_handler_of_a_program(library: Any, tmp_path: Path) -> None:
    own, elsewhere = own_handler(library), own_handler(other(library))
    with library.CheckpointManager(tmp_path / "run") as manager:
        args = library.args.Composite(
            own=own.save({"w": jnp.ones(3), "n": "x"}, {"a": 1}), state=library.args.StandardSave(state(1))
        )
        manager.save(0, args=args)
        manager.wait_until_finished()
        assert own.calls == ["save", "finalize"]
        note, tree = manager.restore(0).own
        assert note == {"a": 1}
    with other(library).CheckpointManager(tmp_path / "run") as manager:
        found = manager.restore(0, args=other(library).args.Composite(own=elsewhere.restore()))
        assert_same(found.own[1], tree, "own")
    if library is ours:
        assert waystation.verify(tmp_path / "run" / "0").damages == []


def test_a_handler_that_a_library_has_registered_with_orbax(tmp_path: Path) -> None:
    """Its arguments are taken though `install` was not called, or came too late for the library."""
    own = own_handler(theirs)
    with ours.CheckpointManager(tmp_path / "run") as manager:
        args = ours.args.Composite(
            state=ours.args.StandardSave(state(1)), own=own.save({"w": jnp.ones(3)}, 1)
        )
        manager.save(0, args=args)
        manager.wait_until_finished()
        note, tree = manager.restore(0, args=ours.args.Composite(own=own.restore())).own
    assert note == 1
    np.testing.assert_array_equal(tree["w"], np.ones(3))


# ---- what is better here -----------------------------------------------------------------------


def test_an_overwrite_keeps_the_old_one_until_the_new_one_is(tmp_path: Path) -> None:
    with ours.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", state(1))
        checkpointer.wait_until_finished()
        with pytest.raises(ValueError, match="force=True"):
            checkpointer.save(tmp_path / "c", state(2))
        with pytest.raises(Unsupported):
            checkpointer.save(tmp_path / "c", {"a": object()}, force=True)
        assert checkpointer.restore(tmp_path / "c")["step"] == 1
        checkpointer.save(tmp_path / "c", state(2), force=True)
        assert checkpointer.restore(tmp_path / "c")["step"] == 2


@pytest.mark.parametrize("save", [standard, lambda library, path: tree(library, path, use_ocdbt=False)])
def test_damage_is_found(save: Any, tmp_path: Path) -> None:
    save(ours, tmp_path / "c")
    files = [path for path in (tmp_path / "c").rglob("*") if path.is_file() and path.stat().st_size > 300]
    file = max(files, key=lambda path: ("/d/" in str(path) or "params.w" in str(path), path.stat().st_size))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with ours.PyTreeCheckpointer() as checkpointer, pytest.raises(Corrupt):
        checkpointer.restore(tmp_path / "c")
    assert waystation.verify(tmp_path / "c").damages


def test_a_lossy_cast_is_refused(tmp_path: Path) -> None:
    with ours.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", {"w": jnp.full(2, 1.5)})
        checkpointer.wait_until_finished()
        with pytest.raises(LossyCast):
            checkpointer.restore(tmp_path / "c", {"w": jax.ShapeDtypeStruct((2,), jnp.int32)})


def test_the_native_layout(tmp_path: Path) -> None:
    ours.set_layout("native")
    try:
        with ours.CheckpointManager(tmp_path / "run") as manager:
            args = ours.args
            items = args.Composite(
                state=args.StandardSave(state(1)),
                config=args.JsonSave({"a": 1}),
                key=args.JaxRandomKeySave(jax.random.key(1)),
            )
            manager.save(0, args=items)
            manager.wait_until_finished()
            found = manager.restore(0)
            assert found.config == {"a": 1}
            assert (found.key == jax.random.key(1)).all()
        with ours.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "c", state(1))
            checkpointer.wait_until_finished()
            assert checkpointer.restore(tmp_path / "c", state(0))["step"] == 1
    finally:
        ours.set_layout("orbax")
    assert (tmp_path / "run" / "0" / "checkpoint.json").exists()
    with ours.CheckpointManager(tmp_path / "run") as manager:
        assert_same(manager.restore(0).state, waystation.load(tmp_path / "run" / "0"), "state")
    with pytest.raises(InvalidInput, match="'orbax' or 'native'"):
        ours.set_layout("zip")  # type: ignore[arg-type]


# ---- the same array at several places ----------------------------------------------------------


@both
def test_save_args_are_of_one_place_not_of_all_where_an_array_is(library: Any, tmp_path: Path) -> None:
    shared, host = jnp.arange(8.0) / 3, np.arange(8.0) / 3
    item = {"params": shared, "ema": shared, "host": host, "small": host}
    half = np.dtype(jnp.bfloat16)
    save_args = {
        "params": library.SaveArgs(),
        "ema": library.SaveArgs(dtype=half),
        "host": library.SaveArgs(),
        "small": library.SaveArgs(dtype=np.dtype(np.float16)),
    }
    with library.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", item, save_args=save_args)
        found = checkpointer.restore(tmp_path / "c")
    assert {name: str(leaf.dtype) for name, leaf in found.items()} == {
        "params": "float32",
        "ema": "bfloat16",
        "host": "float64",
        "small": "float16",
    }


@both
def test_save_args_are_of_one_item_not_of_all_where_an_array_is(library: Any, tmp_path: Path) -> None:
    args, weights = library.args, {"w": jnp.arange(8.0) / 3}
    small = {"w": library.SaveArgs(dtype=np.dtype(jnp.bfloat16))}
    with library.CheckpointManager(tmp_path / "c") as manager:
        own = args.Composite(full=args.PyTreeSave(weights), small=args.PyTreeSave(weights, save_args=small))
        manager.save(0, args=own)
        manager.wait_until_finished()
        wanted = args.Composite(full=args.PyTreeRestore(), small=args.PyTreeRestore())
        found = manager.restore(0, args=wanted)
    assert (found.full["w"].dtype, found.small["w"].dtype) == (jnp.float32, jnp.bfloat16)


# ---- transformations ---------------------------------------------------------------------------


def transformed(library: Any, path: Path, item: Any, transforms: Any, **options: Any) -> Any:
    args = library.args.PyTreeRestore(
        item,
        restore_args=library.checkpoint_utils.construct_restore_args(item),
        transforms=transforms,
        **options,
    )
    with library.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(path, args=args)


def host(*values: float) -> Any:
    return np.array(values, np.float32)


TRANSFORMS: dict[str, Callable[[Any], tuple[Any, Any, dict[str, Any]]]] = {
    "what is not there stays abstract": lambda library: (
        {"a": host(0, 0), "new": jax.ShapeDtypeStruct((2,), jnp.float32)},
        {},
        {},
    ),
    "what is not there stays": lambda library: ({"a": host(0, 0), "new": host(7)}, {}, {}),
    "nothing by default": lambda library: (
        {"a": host(9, 9), "n": host(7)},
        {"n": library.Transform(original_key="b")},
        {"transforms_default_to_original": False},
    ),
    "the fallback is the original": lambda library: (
        {"a": host(9, 9), "b": host(7)},
        {"a": library.Transform(use_fallback=True)},
        {"transforms_default_to_original": False},
    ),
    "the fallback is not there": lambda library: (
        {"new": host(7)},
        {"new": library.Transform(use_fallback=True)},
        {"transforms_default_to_original": False},
    ),
    "a function of a value": lambda library: (
        {"x": host(0, 0)},
        {"x": library.RestoreTransform(original_key="a", value_fn=lambda value: value * 2)},
        {},
    ),
    "a function of the tree": lambda library: (
        {"x": host(0)},
        {
            "x": library.RestoreTransform(
                multi_value_fn=lambda name, tree, args: (name, tree["a"].sum() + tree["b"].sum()),
                multi_value_fn_input_args={"[ab]": library.RestoreArgs(restore_type=np.ndarray)},
            )
        },
        {},
    ),
    "renamed": lambda library: (
        {"m": {"a": host(0, 0)}},
        {r"m/(.*)": library.Transform(original_key=r"\1")},
        {},
    ),
}


@pytest.mark.parametrize("case", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transformations_give_the_same(case: Any, tmp_path: Path) -> None:
    with theirs.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", {"a": host(1, 2), "b": host(3), "c": host(4)})
    found = {}
    for name, library in LIBRARIES.items():
        item, transforms, options = case(library)
        found[name] = outcome(
            lambda library=library, item=item, transforms=transforms, options=options: transformed(  # type: ignore[misc]
                library, tmp_path / "c", item, transforms, **options
            )
        )
    mine, other = found["ours"], found["theirs"]
    assert (mine.error is None) == (other.error is None), (mine, other)
    if other.error is None:
        assert jax.tree.map(str, mine.value) == jax.tree.map(str, other.value)


def test_a_transformation_reads_only_what_it_needs_and_checks_shapes(tmp_path: Path) -> None:
    with ours.PyTreeCheckpointer(use_ocdbt=False) as checkpointer:
        checkpointer.save(tmp_path / "c", {"a": jnp.ones((4, 2)), "other": np.ones(9)})
    for data in (tmp_path / "c" / "other").glob("[0-9]*"):
        data.write_bytes(b"?")
    one = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    found = transformed(
        ours, tmp_path / "c", {"a": jax.ShapeDtypeStruct((4, 2), "float32", sharding=one)}, {}
    )
    assert found["a"].sharding == one
    with pytest.raises(InvalidInput):
        transformed(ours, tmp_path / "c", {"a": jax.ShapeDtypeStruct((2, 2), "float32", sharding=one)}, {})


# ---- leaves ------------------------------------------------------------------------------------


def test_a_handler_of_leaves_that_writes_itself_is_refused(tmp_path: Path) -> None:
    class Doubling(ours.type_handlers.NumpyHandler):
        async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
            raise AssertionError

    with pytest.raises(Unsupported, match="Doubling"):
        ours.type_handlers.register_type_handler(np.ndarray, Doubling(), override=True)


@both
def test_a_number_is_restored_as_the_dtype_asks(library: Any, tmp_path: Path) -> None:
    with library.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", {"i": 7})
        found = checkpointer.restore(
            tmp_path / "c", restore_args={"i": library.RestoreArgs(dtype=np.float32)}
        )
    assert type(found["i"]) is float


@pytest.mark.parametrize("implementation", ["rbg", "unsafe_rbg", "threefry2x32"])
def test_keys_of_all_implementations_come_back(implementation: str, tmp_path: Path) -> None:
    key = jax.random.key(1, impl=implementation)
    with ours.CheckpointManager(tmp_path / "c") as manager:
        manager.save(0, args=ours.args.Composite(key=ours.args.JaxRandomKeySave(key)))
        manager.wait_until_finished()
        found = manager.restore(0, args=ours.args.Composite(key=ours.args.JaxRandomKeyRestore())).key
    assert found.dtype == key.dtype
    assert (jax.random.key_data(found) == jax.random.key_data(key)).all()


# ---- trees that are stored in different ways ---------------------------------------------------


@pytest.mark.parametrize("layout", ["orbax", "native"])
def test_items_of_handlers_with_different_options_come_back(layout: Any, tmp_path: Path) -> None:
    args = ours.args
    handlers = {
        "first": ours.PyTreeCheckpointHandler(),
        "zarr3": ours.PyTreeCheckpointHandler(use_zarr3=True),
        "files": ours.PyTreeCheckpointHandler(use_ocdbt=False),
        "standard": ours.StandardCheckpointHandler(),
    }
    item = {"w": jnp.arange(6.0), "n": 3}
    ours.set_layout(layout)
    try:
        with ours.CheckpointManager(tmp_path / "c", item_handlers=handlers) as manager:
            own = {
                name: args.PyTreeSave(item, custom_metadata={"of": name})
                for name in handlers
                if name != "standard"
            }
            small = args.PyTreeSave(
                item, ocdbt_target_data_file_size=1 << 10, custom_metadata={"of": "first"}
            )
            own["first"] = small
            manager.save(0, args=args.Composite(**own, standard=args.StandardSave(item)))
    finally:
        ours.set_layout("orbax")
    asked = {name: args.PyTreeRestore() for name in own} | {"standard": args.StandardRestore(item)}
    with ours.CheckpointManager(tmp_path / "c", item_names=list(handlers)) as manager:
        found = manager.restore(0, args=args.Composite(**asked))
        for name in handlers:
            assert_same(found[name], item, name)
            assert_same(manager.restore(0)[name], item, name)
        described = manager.item_metadata(0)
    assert waystation.verify(tmp_path / "c" / "0").damages == []
    if layout == "orbax":
        assert {name: described[name].custom_metadata for name in own} == {name: {"of": name} for name in own}
        with theirs.CheckpointManager(tmp_path / "c", item_names=list(handlers)) as manager:
            asked = {name: theirs.args.PyTreeRestore() for name in own}
            other = manager.restore(0, args=theirs.args.Composite(**asked))
        for name in own:
            assert_same(found[name], other[name], name)


# ---- handlers of older programs ----------------------------------------------------------------


@both
def test_a_handler_without_registered_arguments_gets_what_is_passed(library: Any, tmp_path: Path) -> None:
    class Text(library.CheckpointHandler):  # type: ignore[misc, name-defined]
        def save(self, directory: Any, item: str, upper: bool = False) -> None:
            (directory / "text").write_text(item.upper() if upper else item)

        def restore(self, directory: Any, item: Any = None, times: int = 1) -> str:
            return str((directory / "text").read_text()) * times

    with library.Checkpointer(Text()) as checkpointer:
        checkpointer.save(tmp_path / "c", "ab", upper=True)
        assert checkpointer.restore(tmp_path / "c") == "AB"
        assert checkpointer.restore(tmp_path / "c", times=2) == "ABAB"
    savers = {"text": library.Checkpointer(Text()), "state": library.PyTreeCheckpointer()}
    for _ in range(2):
        with library.CheckpointManager(tmp_path / "m", savers) as manager:
            if manager.latest_step() is None:
                manager.save(0, {"text": "ab", "state": {"n": 1}})
                manager.wait_until_finished()
            found = manager.restore(0)
            assert (found["text"], found["state"]) == ("ab", {"n": 1})
            assert manager.restore(0, {"text": None}, {"text": {"times": 2}})["text"] == "abab"


# ---- leaves and containers that few programs have ----------------------------------------------


@dataclasses.dataclass
class Plain:
    """A dataclass that JAX does not know."""

    w: Any
    step: Any


@pytest.mark.parametrize(
    "scalar", [np.float64(1.5), np.float32(0.1), np.int64(7), np.uint8(3), np.str_("ü")], ids=repr
)
def test_scalars_of_numpy_are_python_s_in_a_tree(scalar: Any, tmp_path: Path) -> None:
    found = []
    for name, library in LIBRARIES.items():
        with library.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / name, {"a": scalar, "b": np.ones(2)})
    for name in LIBRARIES:
        for library in LIBRARIES.values():
            with library.PyTreeCheckpointer() as checkpointer:
                found += [
                    checkpointer.restore(tmp_path / name),
                    checkpointer.restore(tmp_path / name, {"a": 0, "b": 0}),
                ]
    for restored in found:
        assert type(restored["a"]) is type(scalar.item())
        assert_same(restored, found[0], "restored")


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.int64])
@pytest.mark.parametrize("saved", [3, np.array(3), jnp.int32(3)], ids=["number", "numpy", "jax"])
def test_scalars_of_numpy_are_restored_where_they_are_asked_for(
    saved: Any, kind: Any, tmp_path: Path
) -> None:
    with theirs.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", {"a": saved})
    found = []
    for library in LIBRARIES.values():
        with library.PyTreeCheckpointer() as checkpointer:
            own = {"a": library.RestoreArgs(restore_type=kind)}
            found.append(checkpointer.restore(tmp_path / "c", restore_args=own)["a"])
    assert {type(each) for each in found} == {kind}
    assert found[0] == found[1]


SAVED = {"a": np.arange(3), "b": {"c": np.ones(2), "d": 5}, "e": [np.zeros(1), {"x": 1}], "n": None, "z": {}}
PARTS: dict[str, Any] = {
    "everything": None,
    "none for a leaf": {"a": None, "b": {"c": 0, "d": None}},
    "none for a container": {"a": 0, "b": None},
    "none in a list": {"e": [None, {"x": 0}]},
    "none for what is not there": {"a": 0, "new": None},
    "an empty dict for a leaf": {"a": {}, "b": {"d": 0}},
    "an empty dict for an empty one": {"a": 0, "n": {}, "z": {}},
    "an empty dict for what is not there": {"a": 0, "new": {}},
    "a leaf that is not there": {"a": 0, "new": 7, "b": {"more": np.ones(1)}},
    "a leaf for what is none": {"a": 0, "n": 0, "z": 0},
    "only what is not there": {"new": {"x": 1}},
}


@pytest.mark.parametrize("has_args", [False, True])
@pytest.mark.parametrize("item", PARTS.values(), ids=PARTS)
@pytest.mark.share(2)
def test_a_part_is_restored_alike(item: Any, has_args: bool, tmp_path: Path) -> None:
    with theirs.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", SAVED)
    found = []
    for library in (ours, theirs):
        own = jax.tree.map(lambda _, library=library: library.RestoreArgs(), item) if has_args else None
        args = library.args.PyTreeRestore(item=item, restore_args=own, partial_restore=True)
        with library.PyTreeCheckpointer() as checkpointer:
            found.append(checkpointer.restore(tmp_path / "c", args=args))
    assert_same(*found, "restored")
    assert jax.tree.structure(found[0]) == jax.tree.structure(found[1])


def test_what_a_part_asks_of_containers(tmp_path: Path) -> None:
    """Genuine Orbax refuses both of these."""
    with theirs.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", SAVED)
    with ours.PyTreeCheckpointer() as checkpointer:
        for item in ({}, {"b": {}, "e": []}, {"e": None}):
            args = ours.args.PyTreeRestore(item=item, partial_restore=True)
            assert checkpointer.restore(tmp_path / "c", args=args) == item
        for item in ({"b": 0}, {"a": {"x": 0}}):
            args = ours.args.PyTreeRestore(item=item, partial_restore=True)
            with pytest.raises(StructureMismatch):
                checkpointer.restore(tmp_path / "c", args=args)
        with pytest.raises(StructureMismatch, match="n"):
            checkpointer.restore(tmp_path / "c", {**SAVED, "n": 0})


def is_saved_by_ours(library: Any, checkpointer: Any, path: Path, item: Any) -> bool:
    """Saves what genuine Orbax refuses; returns whether it is there."""
    if library is theirs:
        with pytest.raises(ValueError):  # noqa: PT011 # whatever it says
            checkpointer.save(path, item)
        return False
    checkpointer.save(path, item)
    if hasattr(checkpointer, "wait_until_finished"):
        checkpointer.wait_until_finished()
    return True


@pytest.mark.parametrize("kind", ["Standard", "PyTree"])
@pytest.mark.parametrize("within", [False, True])
def test_dataclasses_that_jax_does_not_know(kind: str, within: bool, tmp_path: Path) -> None:
    def made(w: Any, step: Any) -> Any:
        plain = Plain(w, step)
        return {"p": plain, "more": 1} if within else plain

    for library in (theirs, ours):
        with getattr(library, f"{kind}Checkpointer")() as checkpointer:
            if not is_saved_by_ours(library, checkpointer, tmp_path / "c", made(np.ones(3), 7)):
                continue
            bare = checkpointer.restore(tmp_path / "c")
            like = checkpointer.restore(tmp_path / "c", made(np.zeros(3), 0))
    assert (bare["p"] if within else bare)["step"] == 7
    own = like["p"] if within else like
    assert isinstance(own, Plain)
    assert own.step == 7
    np.testing.assert_array_equal(own.w, np.ones(3))


@pytest.mark.parametrize("kind", ["Standard", "PyTree"])
def test_keys_of_several_types_in_one_dict(kind: str, tmp_path: Path) -> None:
    item = {"m": {3: 1, "b": np.ones(2)}}
    for library in (theirs, ours):
        with getattr(library, f"{kind}Checkpointer")() as checkpointer:
            if not is_saved_by_ours(library, checkpointer, tmp_path / "c", item):
                continue
            bare = checkpointer.restore(tmp_path / "c")
            with pytest.raises(InvalidInput, match="keys of one type"):
                checkpointer.restore(tmp_path / "c", item)
    assert list(bare["m"]) == ["3", "b"]
    with ours.PyTreeCheckpointer() as checkpointer, pytest.raises(InvalidInput, match="rename one"):
        checkpointer.save(tmp_path / "same", {"1": 1, 1: 2})


def test_variables_of_flax_are_restored_by_arguments_that_they_hold(tmp_path: Path) -> None:
    """As the checkpoint manager of tunix does it."""
    from flax import nnx

    found = []
    for name, library in LIBRARIES.items():
        saved = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(1)))
        wanted = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(2)))
        own = library.checkpoint_utils.construct_restore_args(target=wanted)
        with library.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / name, saved)
            found.append(checkpointer.restore(tmp_path / name, item=wanted, restore_args=own))
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(one, other)
