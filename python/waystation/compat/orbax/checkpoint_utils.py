"""Arguments to restore a whole tree, and waiting for checkpoints that another program saves."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from waystation import storage
from waystation.compat.orbax.metadata import Metadata, ScalarMetadata, StringMetadata, TreeMetadata
from waystation.compat.orbax.tree import is_empty_node, paths_of, str_keypath
from waystation.compat.orbax.type_handlers import ArrayRestoreArgs, RestoreArgs
from waystation.frameworks import jax_version0 as jax
from waystation.storage.leases import Leases
from waystation.training.step_names import NameFormat, standard_name_format

__all__ = ["checkpoints_iterator", "construct_restore_args", "wait_for_new_checkpoint"]

PathLike = str | os.PathLike[str]


def construct_restore_args(
    target: Any,
    sharding_tree: Any = None,
    set_global_shape: bool = True,
    support_layout: bool = False,
    strict: bool = True,
) -> Any:
    """The arguments that restore a tree as another one is.

    Args:
        target: The other one: arrays, abstract arrays, numbers, strings, or metadata of such.
        sharding_tree: The same tree with shardings in the place of leaves; by default those of the target.
        set_global_shape: Whether arrays are to have the shapes of the target.
        support_layout: Restore arrays with the layout in memory that those of the target have.
        strict: Refuse arrays of another shape; else they are cut, or filled with zeros.

    Returns:
        The same tree with `RestoreArgs` in the place of leaves.
    """
    if isinstance(target, TreeMetadata):
        own = construct_restore_args(target.tree, sharding_tree, set_global_shape, support_layout, strict)
        return TreeMetadata(own, target.custom_metadata, target.use_zarr3)
    pairs, structure = jax.flatten_with_path(target, is_leaf=lambda value: isinstance(value, Metadata))
    shardings: dict[Any, Any] = {}
    if sharding_tree is not None:  # which may have None in the place of a leaf
        shardings = {str_keypath(path): value for path, value in paths_of(sharding_tree, _is_sharding)}
    made = [
        _restore_args(value, shardings.get(str_keypath(path)), set_global_shape, support_layout, strict)
        for path, value in pairs
    ]
    return jax.unflatten(structure, made)


def _is_sharding(value: Any) -> bool:
    return jax.is_sharding(value) or hasattr(value, "to_jax_sharding")


def _restore_args(
    value: Any, sharding: Any, set_global_shape: bool, support_layout: bool, strict: bool
) -> Any:
    if is_empty_node(value):
        return value
    if isinstance(value, ScalarMetadata):
        return RestoreArgs(restore_type=_type_of(value.dtype), dtype=value.dtype)
    if isinstance(value, StringMetadata | str):
        return RestoreArgs(restore_type=str)
    if isinstance(value, bool | int | float | bytes):
        return RestoreArgs(restore_type=type(value))
    own = sharding if sharding is not None else _sharding_of(value, support_layout)
    is_host = isinstance(value, np.ndarray | np.generic) or own is None
    if is_host or not hasattr(value, "shape"):
        return RestoreArgs(restore_type=np.ndarray, dtype=getattr(value, "dtype", None))
    shape = tuple(value.shape) if set_global_shape else None
    return ArrayRestoreArgs(dtype=value.dtype, sharding=own, global_shape=shape, shape=shape, strict=strict)


def _sharding_of(value: Any, support_layout: bool) -> Any:
    if support_layout and getattr(value, "format", None) is not None:
        return value.format
    return getattr(value, "sharding", None)


def _type_of(dtype: Any) -> type:
    kind = np.dtype(dtype).kind
    return {"b": bool, "f": float, "c": complex}.get(kind, int)


# ---- waiting -----------------------------------------------------------------------------------


@contextlib.contextmanager
def wait_for_new_checkpoint(
    checkpoint_dir: PathLike,
    *,
    until_step: int | None = None,
    seconds_to_sleep: int = 1,
    timeout: int | None = None,
    timeout_fn: Callable[[], bool] | None = None,
    step_prefix: str | None = None,
    step_format_fixed_length: int | None = None,
    step_name_format: NameFormat | None = None,
    snapshot_dir: Any = None,
    set_immutable: bool | None = None,
    ignore_snapshot_errors: bool | None = True,
) -> Iterator[int]:
    """Waits until there is a checkpoint, which within the block nobody removes who asks for that.

    Args:
        checkpoint_dir: The directory of the sequence.
        until_step: Wait for a checkpoint of at least this step.
        seconds_to_sleep: How often it is looked.
        timeout: For how many seconds at most; None for any number.
        timeout_fn: Called after that time; it says whether to end.
        step_prefix: What stands before the number in the name of a directory.
        step_format_fixed_length: To how many digits the number is padded.
        step_name_format: The names of directories, instead.
        snapshot_dir: Has no effect: a step that somebody reads is not removed.
        set_immutable: Has no effect.
        ignore_snapshot_errors: Has no effect.

    Yields:
        The newest step; -1 if none came in time.
    """
    root = storage.located(checkpoint_dir)
    names = step_name_format or standard_name_format(
        step_prefix=step_prefix, step_format_fixed_length=step_format_fixed_length
    )
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        with contextlib.ExitStack() as held:
            step = _newest(root, names, until_step, held)
            if step is not None:
                yield step
                return
        if deadline is not None and time.monotonic() >= deadline:
            if timeout_fn is None or timeout_fn():
                yield -1
                return
            deadline = time.monotonic() + (timeout or 0)
        time.sleep(seconds_to_sleep)


def _newest(root: str, names: NameFormat, until_step: int | None, held: contextlib.ExitStack) -> int | None:
    """The newest step, which is kept from then on; None if there is none."""
    found = max(names.find_all(root), key=lambda info: info.step, default=None)
    if found is None or (until_step is not None and found.step < until_step):
        return None
    if not storage.is_in_store(root):
        held.enter_context(Leases(root).hold(found.path.name))
    return found.step


def checkpoints_iterator(
    checkpoint_dir: PathLike,
    *,
    min_interval_secs: int = 0,
    seconds_to_sleep: int = 1,
    timeout: int | None = None,
    timeout_fn: Callable[[], bool] | None = None,
    step_prefix: str | None = None,
    step_format_fixed_length: int | None = None,
    step_name_format: NameFormat | None = None,
    snapshot_dir: Any = None,
    set_immutable: bool | None = None,
    ignore_snapshot_errors: bool | None = True,
) -> Iterator[int]:
    """The steps of checkpoints as they come; takes what `wait_for_new_checkpoint` does.

    Args:
        checkpoint_dir: The directory of the sequence.
        min_interval_secs: How many seconds pass between two of them at least.
        seconds_to_sleep: How often it is looked.
        timeout: How many seconds to wait for one at most; the iterator ends then.
        timeout_fn: Called after that time; it says whether to end.
        step_prefix: What stands before the number in the name of a directory.
        step_format_fixed_length: To how many digits the number is padded.
        step_name_format: The names of directories, instead.
        snapshot_dir: Has no effect.
        set_immutable: Has no effect.
        ignore_snapshot_errors: Has no effect.
    """
    last: int | None = None
    while True:
        begun = time.monotonic()
        with wait_for_new_checkpoint(
            checkpoint_dir,
            until_step=None if last is None else last + 1,
            seconds_to_sleep=seconds_to_sleep,
            timeout=timeout,
            timeout_fn=timeout_fn,
            step_prefix=step_prefix,
            step_format_fixed_length=step_format_fixed_length,
            step_name_format=step_name_format,
        ) as step:
            if step < 0:
                return
            last = step
            yield step
        time.sleep(max(0.0, begun + min_interval_secs - time.monotonic()))
