"""Opens one level of a pytree node that is registered with JAX (flax, optax, equinox, the user's own), and
says key paths as JAX does.

Only public functions of JAX are used. Named tuples are left to the tree package, which knows them better.
"""

from __future__ import annotations

from typing import Any

import jax

from waystation._errors import InvalidInput
from waystation.tree import AttributeKey, ChildKey, DictKey, SequenceKey
from waystation.tree._keys import Key, KeyPath
from waystation.tree._nodes import Rebuild
from waystation.tree._registry import Children

_tree = jax.tree_util


def flatten_one_level(value: Any) -> tuple[Children, Rebuild] | None:
    """The children of a node with their keys, and what makes an equal node of other children.

    Returns:
        None if `value` is no node of JAX's, or a named tuple.
    """
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return None
    paths, structure = _tree.tree_flatten_with_path(value, is_leaf=lambda node: node is not value)
    if len(paths) == 1 and not paths[0][0]:
        return None
    children = [(_key(path, number), child) for number, (path, child) in enumerate(paths)]
    if len({key for key, _ in children}) != len(children):
        raise InvalidInput(
            f"{type(value).__qualname__} names two of its children alike; its registration with JAX must not"
        )
    return children, lambda values: _tree.tree_unflatten(structure, values)


def _key(path: tuple[Any, ...], number: int) -> Key:
    (entry,) = path
    if isinstance(entry, _tree.DictKey):
        return DictKey(entry.key)
    if isinstance(entry, _tree.SequenceKey):
        return SequenceKey(entry.idx)
    if isinstance(entry, _tree.GetAttrKey):
        return AttributeKey(entry.name)
    return ChildKey(number)


def jax_key_path(path: KeyPath) -> tuple[Any, ...]:
    """A key path in JAX's keys."""
    return tuple(_jax_key(key) for key in path)


def _jax_key(key: Key) -> Any:
    if isinstance(key, DictKey):
        return _tree.DictKey(key.key)
    if isinstance(key, SequenceKey):
        return _tree.SequenceKey(key.index)
    if isinstance(key, AttributeKey):
        return _tree.GetAttrKey(key.name)
    return _tree.FlattenedIndexKey(key.index)
