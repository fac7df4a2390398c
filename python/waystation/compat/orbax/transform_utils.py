"""Transformations of trees: from which saved leaves those of another structure are made."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from waystation._errors import InvalidInput
from waystation.compat.orbax.tree import from_flat_dict, is_empty_node, str_keypath, to_flat_dict
from waystation.frameworks import jax_version0 as jax

__all__ = ["RestoreTransform", "Transform", "apply_transformations", "intersect_trees", "merge_trees"]

_SEPARATOR = "/"


@dataclasses.dataclass
class Transform:
    """How a leaf of the new tree is made. It stands in a tree of transformations, at a key that is a regular
    expression.

    Attributes:
        original_key: The leaf that it is made of, divided by slashes, with what groups of the expression have
            matched (`\\1`); None for the one of the same name.
        use_fallback: Take it from the new tree as it is; from the original one if `default_to_original` is
            False.
        value_fn: Makes the leaf of the original one.
        multi_value_fn: Makes it of its own name and the whole original tree.
    """

    original_key: str | tuple[str] | None = None
    use_fallback: bool = False
    value_fn: Callable[..., Any] | None = None
    multi_value_fn: Callable[..., Any] | None = None


@dataclasses.dataclass
class RestoreTransform(Transform):
    """The same, in a restore. `multi_value_fn` gets the `RestoreArgs` of the leaf as its last argument.

    Attributes:
        multi_value_fn_input_args: Of the leaves that `multi_value_fn` needs, the `RestoreArgs`, by regular
            expressions; None restores all leaves for it, as they were saved.
    """

    multi_value_fn_input_args: dict[str, Any] | None = None


def apply_transformations(
    original_tree: Any, transformations: Any, new_tree: Any, default_to_original: bool | None = True
) -> Any:
    """Makes the leaves of a new tree of those of another one.

    Args:
        original_tree: The other one.
        transformations: A dict, nested or not, of `Transform`s. The first whose key matches a leaf's name
            counts.
        new_tree: The containers of the result, and the leaves of those that are taken from here.
        default_to_original: Whether a leaf without a transformation is the original one of its name, where
            there is one. Else it is that of the new tree.

    Returns:
        The new tree with its leaves.

    Raises:
        ValueError: The original tree has no leaf that is needed, or a transformation contradicts itself.
    """
    return transformed(
        original_tree,
        transformations,
        new_tree,
        bool(default_to_original),
        lambda function, name, *a: function(*a),
    )


def transformed(
    original_tree: Any,
    transformations: Any,
    new_tree: Any,
    default_to_original: bool,
    call: Callable[..., Any],
) -> Any:
    """See `apply_transformations`; a `multi_value_fn` is called by `call(function, name, …)`."""
    original = to_flat_dict(original_tree, sep=_SEPARATOR, keep_empty_nodes=True)
    known = _flat(transformations)
    pairs, structure = jax.flatten_with_path(new_tree, is_leaf=is_empty_node)
    made = []
    for path, fallback in pairs:
        name = _SEPARATOR.join(str_keypath(path))
        found, transform = _matching(name, known)
        if is_empty_node(fallback) and fallback is not None:
            made.append(fallback)
        elif found is None:
            made.append(original.get(name, fallback) if default_to_original else fallback)
        else:
            made.append(
                _made(
                    name,
                    found,
                    transform or Transform(),
                    _Given(fallback, original, original_tree, default_to_original),
                    call,
                )
            )
    return jax.unflatten(structure, made)


def transformation_of(name: str, transformations: Any) -> tuple[re.Match[str] | None, Transform | None]:
    """How the key of the transformation that makes a leaf matches its name, and the transformation."""
    return _matching(name, _flat(transformations))


def _flat(transformations: Any) -> dict[str, Any]:
    known = to_flat_dict(transformations or {}, sep=_SEPARATOR, keep_empty_nodes=True)
    return {key: value for key, value in known.items() if not isinstance(value, dict)}


def _matching(name: str, known: dict[str, Any]) -> tuple[re.Match[str] | None, Any]:
    for key, transform in known.items():
        found = re.fullmatch(key, name)
        if found is not None:
            return found, transform
    return None, None


@dataclasses.dataclass(frozen=True)
class _Given:
    """What a leaf can be made of.

    Attributes:
        fallback: That of the new tree.
        original: The leaves of the original tree, by their names.
        original_tree: That tree.
        default_to_original: Whether leaves are those of the original tree where nothing else is said.
    """

    fallback: Any
    original: dict[str, Any]
    original_tree: Any
    default_to_original: bool


def source_of(
    name: str, found: re.Match[str] | None, transform: Transform | None, default_to_original: bool
) -> str | None:
    """The name of the original leaf that one is made of.

    Args:
        name: The leaf of the new tree.
        found: How the key of its transformation matches that name; None without one.
        transform: The transformation.
        default_to_original: As in `apply_transformations`.

    Returns:
        The name; None if it is made of none, or of any.

    Raises:
        ValueError: The transformation contradicts itself.
    """
    if found is None or transform is None:
        return name if default_to_original else None
    if transform.use_fallback:
        if transform.original_key or transform.value_fn or transform.multi_value_fn:
            raise InvalidInput(f"the transformation of '{name}' takes it as it is, and so makes nothing")
        # The fallback is what leaves without a transformation are not.
        return None if default_to_original else name
    if transform.multi_value_fn is not None:
        if transform.original_key or transform.value_fn:
            raise InvalidInput(f"the transformation of '{name}' has two ways to make it; give one")
        return None
    key = transform.original_key
    if key is None:
        return name
    return found.expand(key if isinstance(key, str) else _SEPARATOR.join(key))


def _made(
    name: str, found: re.Match[str], transform: Transform, given: _Given, call: Callable[..., Any]
) -> Any:
    source = source_of(name, found, transform, given.default_to_original)
    if transform.multi_value_fn is not None:
        return call(transform.multi_value_fn, name, name, given.original_tree)
    if source is None:
        return given.fallback
    if source not in given.original:
        raise InvalidInput(f"'{name}' is to be made of '{source}', which the original tree does not have")
    value = given.original[source]
    return value if transform.value_fn is None else transform.value_fn(value)


def merge_trees(*trees: Any, target: Any = None) -> Any:
    """One tree with the leaves of all; of leaves of one name the last counts.

    Args:
        trees: The trees.
        target: The containers of the result; None for nested dicts.
    """
    merged: dict[Any, Any] = {}
    for tree in trees:
        merged |= to_flat_dict(tree, keep_empty_nodes=True)
    return from_flat_dict(merged, target)


def intersect_trees(*trees: Any, target: Any = None) -> Any:
    """The tree of the leaves that all have, with the values of the last.

    Args:
        trees: The trees.
        target: The containers of the result; None for nested dicts.
    """
    flat = [to_flat_dict(tree, keep_empty_nodes=True) for tree in trees]
    shared = set.intersection(*map(set, flat))
    return from_flat_dict({path: value for path, value in flat[-1].items() if path in shared}, target)
