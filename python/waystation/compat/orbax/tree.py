"""Trees as nested dicts and lists of text keys, as Orbax stores them, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from waystation._errors import InvalidInput
from waystation.compat.orbax.arrays import to_shape_dtype_struct
from waystation.frameworks import jax_version0 as jax

__all__ = [
    "JsonType",
    "PyTree",
    "deserialize_tree",
    "from_flat_dict",
    "get_param_names",
    "is_flat_dict",
    "merge_trees",
    "serialize_tree",
    "str_keypath",
    "to_flat_dict",
    "to_shape_dtype_struct",
]

PyTree: TypeAlias = Any
JsonType: TypeAlias = Any
Path = tuple[str, ...]


def is_dict_key(key: Any) -> bool:
    """Whether a key of JAX's names a member of a dict or an attribute."""
    return jax.is_a(key, ("DictKey", "GetAttrKey"))


def is_sequence_key(key: Any) -> bool:
    """Whether a key of JAX's is the place in a sequence."""
    return jax.is_a(key, ("SequenceKey", "FlattenedIndexKey"))


def get_key_name(key: Any) -> int | str:
    """The name or the place that a key of JAX's says.

    Raises:
        ValueError: It is no key.
    """
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            found = getattr(key, attribute)
            return found if isinstance(found, int | str) else str(found)
    raise InvalidInput(f"{key!r} is no key of a path")


def str_keypath(keypath: Sequence[Any]) -> Path:
    """The names along a path of JAX's keys, as text."""
    return tuple(str(get_key_name(key)) for key in keypath)


def is_empty_node(x: Any) -> bool:
    """Whether a value is None or an empty container."""
    return x is None or (isinstance(x, dict | list | tuple) and not x)


def is_empty_or_leaf(x: Any) -> bool:
    """Whether a value has no children."""
    if is_empty_node(x):
        return True
    leaves = jax.tree_leaves(x, is_leaf=lambda node: node is not x)
    return len(leaves) == 1 and leaves[0] is x


def paths_of(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[tuple[Any, ...], Any]]:
    """The leaves of a tree, and its empty containers, with their paths of JAX's keys."""

    def stops(node: Any) -> bool:
        return is_empty_node(node) or (is_leaf is not None and is_leaf(node))

    found: list[tuple[tuple[Any, ...], Any]] = jax.flatten_with_path(tree, is_leaf=stops)[0]
    return found


def to_flat_dict(
    tree: Any,
    sep: str | None = None,
    keep_empty_nodes: bool = False,
    is_leaf: Callable[[Any], bool] | None = None,
) -> dict[Any, Any]:
    """The leaves of a tree by their paths.

    Args:
        tree: The tree.
        sep: What joins the names of a path to one; None leaves paths tuples.
        keep_empty_nodes: Whether empty containers are among the leaves.
        is_leaf: Says what else is a leaf.
    """
    flat: dict[Any, Any] = {}
    for keypath, value in paths_of(tree, is_leaf):
        if is_empty_node(value) and not keep_empty_nodes:
            continue
        path = str_keypath(keypath)
        flat[path if sep is None else sep.join(path)] = value
    return flat


def is_flat_dict(tree: Any) -> bool:
    """Whether a dict has paths as keys."""
    return isinstance(tree, dict) and all(isinstance(key, tuple) for key in tree)


def from_flat_dict(
    flat_dict: Any, target: Any = None, sep: str | None = None, *, inplace: bool = False
) -> Any:
    """The tree of a flat dict: nested dicts, or with a target the same containers as that.

    Args:
        flat_dict: Leaves by paths.
        target: A tree of the wanted structure.
        sep: What joins the names of paths; None where they are tuples.
        inplace: Has no effect beyond that `flat_dict` may be emptied.

    Raises:
        KeyError: The target has a leaf that is not there.
    """
    found = {tuple(key.split(sep)) if sep is not None else key: value for key, value in flat_dict.items()}
    if target is None:
        nested: dict[str, Any] = {}
        for path, value in found.items():
            place = nested
            for name in path[:-1]:
                place = place.setdefault(name, {})
            place[path[-1]] = value
        return nested
    pairs, structure = jax.flatten_with_path(target, is_leaf=is_empty_node)
    values = [
        value if is_empty_node(value) and str_keypath(path) not in found else found[str_keypath(path)]
        for path, value in pairs
    ]
    return jax.unflatten(structure, values)


def serialize_tree(tree: Any, keep_empty_nodes: bool = False) -> Any:
    """A tree as nested dicts with text as keys, and lists.

    Args:
        tree: The tree.
        keep_empty_nodes: Whether empty containers stay.
    """
    return from_paths(
        (path, value) for path, value in paths_of(tree) if keep_empty_nodes or not is_empty_node(value)
    )


def from_paths(pairs: Any) -> Any:
    """Nested dicts and lists of values by paths of JAX's keys."""
    root: Any = None
    places: dict[tuple[Any, ...], Any] = {}
    for path, value in pairs:
        if not path:
            return value
        for depth, key in enumerate(path):
            above = path[:depth]
            if above not in places:
                place: Any = [] if is_sequence_key(key) else {}
                places[above] = place
                _put(places, above, place)
                root = places[()]
        _put(places, path, value)
    return {} if root is None else root


def _put(places: dict[tuple[Any, ...], Any], path: tuple[Any, ...], value: Any) -> None:
    if not path:
        return
    container, name = places[path[:-1]], get_key_name(path[-1])
    if isinstance(container, list):
        container.append(value)
    else:
        container[str(name)] = value


def from_flattened_with_keypath(flat_with_keys: Sequence[tuple[tuple[Any, ...], Any]]) -> Any:
    """Nested dicts and lists of leaves with paths of JAX's keys, as `tree_flatten_with_path` gives them."""
    return from_paths(flat_with_keys)


def deserialize_tree(serialized: Any, target: Any, keep_empty_nodes: bool = False) -> Any:
    """A serialized tree in the containers of another one.

    Args:
        serialized: Nested dicts and lists, as `serialize_tree` makes them.
        target: A tree of the wanted structure.
        keep_empty_nodes: Has no effect: empty containers are those of the target.

    Raises:
        KeyError: The target has a leaf that is not there.
    """
    return from_flat_dict(to_flat_dict(serialized, keep_empty_nodes=True), target)


def get_param_names(item: Any, *, include_empty_nodes: bool = True) -> Any:
    """The same tree with the name in the place of each leaf: its path, joined by dots."""

    def stops(node: Any) -> bool:
        return include_empty_nodes and is_empty_node(node)

    pairs, structure = jax.flatten_with_path(item, is_leaf=stops)
    return jax.unflatten(structure, [".".join(str_keypath(path)) for path, _ in pairs])


def merge_trees(*trees: Any, overwrite: bool = False, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """One tree with the leaves of all.

    Args:
        trees: Nested dicts.
        overwrite: Whether a later tree may have a leaf of an earlier one.
        is_leaf: Says what else is a leaf.

    Raises:
        ValueError: Two of them have the same leaf.
    """
    merged: dict[Any, Any] = {}
    for tree in trees:
        flat = to_flat_dict(tree, keep_empty_nodes=True, is_leaf=is_leaf)
        both = merged.keys() & flat.keys()
        if both and not overwrite:
            raise InvalidInput(f"two trees have a leaf at {'.'.join(min(both))}; give overwrite=True")
        merged |= flat
    return from_flat_dict(merged)
