"""What tests of programs use: trees, arrays over devices, and comparisons."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from waystation import storage
from waystation.compat.orbax.args import CheckpointArgs, register_with_handler
from waystation.compat.orbax.future import Future
from waystation.compat.orbax.handlers import AsyncCheckpointHandler, PyTreeCheckpointHandler
from waystation.compat.orbax.multihost import sync_global_processes
from waystation.compat.orbax.utils import is_empty_or_leaf as is_leaf
from waystation.frameworks import jax_version0 as jax

__all__ = [
    "ErrorCheckpointHandler",
    "ErrorRestoreArgs",
    "ErrorSaveArgs",
    "PyTreeCheckpointHandler",
    "apply_function",
    "assert_array_equal",
    "assert_every_n_is_x_apart",
    "assert_tree_equal",
    "assert_tree_same_structure",
    "create_sharded_array",
    "empty_directory",
    "erase_and_create_empty",
    "is_leaf",
    "print_directory",
    "replicate_sharded_array",
    "save_fake_tmp_dir",
    "setup_pytree",
    "setup_sharded_pytree",
    "sync_global_processes",
]

_TMP_OF_ORBAX = ".orbax-checkpoint-tmp"


def erase_and_create_empty(directory: str | os.PathLike[str]) -> Any:
    """Makes a directory anew."""
    path = storage.located(directory)
    if storage.is_there(path):
        storage.remove_tree(path)
    storage.make_directory(path, parents=True)
    return storage.as_path(path)


def empty_directory(directory: str | os.PathLike[str]) -> bool:
    """Whether a directory has nothing in it."""
    return not storage.list_names(storage.located(directory))


def print_directory(directory: str | os.PathLike[str], level: int = 0) -> None:
    """Prints the names of the files below a directory."""
    root = storage.located(directory)
    for name, nbytes in sorted(storage.files_below(root).items()):
        print(f"{'..' * level}{name} ({nbytes} bytes)")  # noqa: T201 - that is what it is for


def save_fake_tmp_dir(
    directory: str | os.PathLike[str],
    step: int,
    item: str,
    subdirs: list[str] | None = None,
    step_prefix: str | None = None,
) -> Any:
    """Makes what a save of Orbax leaves that is interrupted."""
    name = f"{'' if step_prefix is None else step_prefix + '_'}{step}{_TMP_OF_ORBAX}"
    path = os.path.join(storage.located(directory), name, f"{item}{_TMP_OF_ORBAX}")
    for own in ("", *(subdirs or ())):
        storage.make_directory(os.path.join(path, own), parents=True)
    return storage.as_path(path)


def setup_pytree(add: int = 0) -> Any:
    """A tree of four arrays of NumPy."""
    tree = {
        "a": np.arange(8) * 1,
        "b": np.arange(16) * 2,
        "c": {
            "a": np.arange(8).reshape(2, 4) * 3,
            "e": np.arange(16).reshape(4, 4) * 4,
        },
    }
    return jax.tree_map(lambda value: value + add, tree)


def create_sharded_array(arr: Any, mesh: Any, mesh_axes: Any) -> Any:
    """An array over the devices of a mesh, of a value that all processes have."""
    return jax.sharded(np.asarray(arr), mesh, mesh_axes)


def setup_sharded_pytree(
    pytree: Any = None, reverse_devices: bool = False, devices: list[Any] | None = None
) -> tuple[Any, Any, Any]:
    """The tree over devices, with its meshes and what divides its arrays."""
    tree = setup_pytree() if pytree is None else pytree
    chosen = jax.devices() if devices is None else devices
    chosen = list(reversed(chosen)) if reverse_devices else list(chosen)
    line = jax.mesh_of(chosen, {"x": len(chosen)})
    width = 2 if len(chosen) % 2 == 0 else 1
    grid = jax.mesh_of(chosen, {"x": width, "y": len(chosen) // width})
    meshes = {"a": line, "b": line, "c": {"a": grid, "e": grid}}
    axes = {
        "a": jax.partition(None),
        "b": jax.partition("x"),
        "c": {"a": jax.partition("x", "y"), "e": jax.partition("x", "y")},
    }
    made = jax.tree_map(create_sharded_array, tree, meshes, axes)
    return made, meshes, axes


def replicate_sharded_array(arr: Any) -> Any:
    """An array in full on all devices."""
    return jax.replicated(arr)


def apply_function(tree: Any, function: Callable[[Any], Any]) -> Any:
    """The tree with another value in the place of each leaf."""
    return jax.tree_map(function, tree)


def _require(testclass: Any, is_so: bool, otherwise: str) -> None:
    """Fails a test in its own way."""
    if not is_so:
        testclass.fail(otherwise)


def assert_array_equal(testclass: Any, v_expected: Any, v_actual: Any) -> None:
    """Fails a test if two values are not equal, or arrays of JAX differ in where they are."""
    _require(testclass, isinstance(v_actual, type(v_expected)), f"{v_actual!r} is no {type(v_expected)}")
    if isinstance(v_expected, jax.Array):
        counts = [len(array.addressable_shards) for array in (v_expected, v_actual)]
        _require(testclass, counts[0] == counts[1], f"{counts[1]} shards where {counts[0]} are expected")
        for expected, actual in zip(v_expected.addressable_shards, v_actual.addressable_shards, strict=True):
            np.testing.assert_array_equal(expected.data, actual.data)
    else:
        np.testing.assert_array_equal(v_expected, v_actual)


def assert_tree_equal(testclass: Any, expected: Any, actual: Any) -> None:
    """Fails a test if two trees are not equal."""
    assert_tree_same_structure(testclass, expected, actual)
    jax.tree_map(lambda first, second: assert_array_equal(testclass, first, second), expected, actual)


def assert_tree_same_structure(testclass: Any, expected: Any, actual: Any) -> None:
    """Fails a test if two trees have different containers."""
    structures: list[Any] = [jax.flatten(tree)[1] for tree in (expected, actual)]
    _require(testclass, structures[0] == structures[1], f"{structures[1]} where {structures[0]} is expected")


def assert_every_n_is_x_apart(testclass: Any, values: Any, n: int, x: int) -> None:
    """Fails a test if values that are n places apart do not differ by x at least."""
    for first, second in zip(values, values[n:], strict=False):
        _require(testclass, second - first >= x, f"{second} is less than {x} after {first}")


class ErrorCheckpointHandler(AsyncCheckpointHandler):
    """A handler that fails once everything is written.

    Args:
        handler: What saves and restores.
        executor: Has no effect.
    """

    def __init__(self, handler: Any, executor: Any = None) -> None:
        self._handler = handler

    async def async_save(self, directory: Any, args: Any = None) -> list[Future] | None:
        """Saves, and fails in the background."""
        futures = await self._handler.async_save(directory, args=args.args)
        return [*(futures or ()), _Failing()]

    def restore(self, directory: Any, args: Any = None) -> Any:
        """Restores."""
        return self._handler.restore(directory, args=None if args is None else args.args)


class _Failing:
    def result(self, timeout: float | None = None) -> None:
        raise SyntaxError("this handler fails")


class _Wrapped(CheckpointArgs):
    def __init__(self, args: Any = None) -> None:
        self.args = args


@register_with_handler(ErrorCheckpointHandler, for_save=True)
class ErrorSaveArgs(_Wrapped):
    """Arguments of a save that fails.

    Args:
        args: Those of the handler that saves.
    """


@register_with_handler(ErrorCheckpointHandler, for_restore=True)
class ErrorRestoreArgs(_Wrapped):
    """Arguments of a restore.

    Args:
        args: Those of the handler that restores.
    """
