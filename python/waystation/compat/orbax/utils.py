"""Small functions on trees, steps and processes that programs use."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from waystation import storage
from waystation._errors import InvalidInput
from waystation.checkpoint.handlers.choice import STATE
from waystation.compat.orbax import _trees
from waystation.compat.orbax.arrays import to_shape_dtype_struct
from waystation.compat.orbax.multihost import (
    broadcast_one_to_all,
    is_pathways_backend,
    is_primary_host,
    reached_preemption,
    sync_global_devices,
    sync_global_processes,
)
from waystation.compat.orbax.step import (
    TMP_DIR_SUFFIX,
    any_checkpoint_step,
    checkpoint_steps,
    checkpoint_steps_paths,
    get_save_directory,
    is_checkpoint_finalized,
    is_tmp_checkpoint,
    step_from_checkpoint_name,
    tmp_checkpoints,
)
from waystation.compat.orbax.tree import (
    deserialize_tree,
    from_flat_dict,
    from_flattened_with_keypath,
    get_key_name,
    is_dict_key,
    is_empty_node,
    is_empty_or_leaf,
    is_sequence_key,
    serialize_tree,
    to_flat_dict,
)
from waystation.compat.orbax.tree import str_keypath as tuple_path_from_keypath
from waystation.frameworks import jax_version0 as jax

__all__ = [
    "TMP_DIR_SUFFIX",
    "all_leaves_are_placeholders",
    "any_checkpoint_step",
    "broadcast_one_to_all",
    "checkpoint_steps",
    "checkpoint_steps_paths",
    "deserialize_tree",
    "from_flat_dict",
    "from_flattened_with_keypath",
    "fully_replicated_host_local_array_to_global_array",
    "get_key_name",
    "get_save_directory",
    "is_checkpoint_finalized",
    "is_dict_key",
    "is_empty_node",
    "is_empty_or_leaf",
    "is_gcs_path",
    "is_pathways_backend",
    "is_primary_host",
    "is_scalar",
    "is_sequence_key",
    "is_tmp_checkpoint",
    "leaf_is_placeholder",
    "leaf_placeholder",
    "name_from_leaf_placeholder",
    "pytree_structure",
    "reached_preemption",
    "serialize_tree",
    "step_from_checkpoint_name",
    "sync_global_devices",
    "sync_global_processes",
    "tmp_checkpoints",
    "to_flat_dict",
    "to_shape_dtype_struct",
    "tuple_path_from_keypath",
]

_PLACEHOLDER = "PLACEHOLDER://"


def is_scalar(x: Any) -> bool:
    """Whether a value is a number."""
    return isinstance(x, int | float | np.number)


def leaf_placeholder(name: str) -> str:
    """A text that stands for the leaf of a name."""
    return f"{_PLACEHOLDER}{name}"


def leaf_is_placeholder(leaf: Any) -> bool:
    """Whether a value is such a text."""
    return isinstance(leaf, str) and leaf.startswith(_PLACEHOLDER)


def name_from_leaf_placeholder(placeholder: str) -> str:
    """The name that such a text has.

    Raises:
        ValueError: It is none.
    """
    if not leaf_is_placeholder(placeholder):
        raise InvalidInput(f"{placeholder!r:.60} does not stand for a leaf")
    return placeholder.removeprefix(_PLACEHOLDER)


def all_leaves_are_placeholders(tree: Any) -> bool:
    """Whether all leaves of a tree are such texts."""
    return all(map(leaf_is_placeholder, jax.tree_leaves(tree)))


def is_gcs_path(path: os.PathLike[str] | str) -> bool:
    """Whether a path is in Google's store."""
    return os.fspath(path).startswith(("gs://", "/gs/"))


def pytree_structure(directory: str | os.PathLike[str]) -> Any:
    """The saved tree in a directory, with texts in the place of leaves (`leaf_placeholder`).

    Raises:
        FileNotFoundError: It is not there.
    """
    path = storage.located(directory)
    if not storage.is_there(path):
        raise FileNotFoundError(f"there is no directory '{path}'")
    tree = _trees.metadata(_trees.Place(path, STATE), path).tree
    pairs, structure = jax.flatten_with_path(tree, is_leaf=lambda value: hasattr(value, "directory"))
    return jax.unflatten(
        structure, [leaf_placeholder(".".join(tuple_path_from_keypath(path))) for path, _ in pairs]
    )


def fully_replicated_host_local_array_to_global_array(arr: Any) -> Any:
    """An array that all processes have, as one of all of them."""
    return jax.global_array(arr)
