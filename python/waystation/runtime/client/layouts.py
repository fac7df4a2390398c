"""Shardings as JAX has them, made those of programs, for functions on a slice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from waystation._errors import InvalidInput
from waystation.runtime.client.slices import Slice
from waystation.runtime.ir import Sharding
from waystation.runtime.tracing.recorder import Kind

Axes = tuple[tuple[str, int], ...]
P = jax.sharding.PartitionSpec


def is_sharding(value: Any) -> bool:
    """Whether this is a leaf where shardings are given."""
    return value is None or isinstance(value, P | jax.sharding.Sharding)


def flattened(given: Any, tree: Any, leaves: Sequence[Any], what: str) -> list[Any]:
    """One sharding, or None, for each leaf, where shardings may be given for whole branches.

    Args:
        given: A tree of shardings whose leaves stand for branches.
        tree: The structure of the values.
        leaves: Their leaves.
        what: What they are, for the message.

    Raises:
        InvalidInput: It is not like the tree of the values.
    """
    values = jax.tree.unflatten(tree, leaves)

    def spread(one: Any, branch: Any) -> _Spread:
        return _Spread([one] * len(jax.tree.leaves(branch)))

    try:
        branches = jax.tree.map(spread, given, values, is_leaf=is_sharding)
    except ValueError as error:
        raise InvalidInput(f"{what} is not like the tree that it is for: {error}") from error
    return [each for branch in jax.tree.leaves(branches) for each in branch]


class _Spread(list[Any]):
    """What was said of a branch, once for each leaf of it; to JAX a leaf, as it is of a class of its own."""


def default_axes(on: Slice) -> Axes:
    """The mesh of a slice."""
    return tuple(zip(on.axes, on.shape, strict=True))


def layout(given: Any, on: Slice, what: str) -> Sharding:
    """A sharding that was given, over the devices of a slice.

    Raises:
        InvalidInput: It is for other devices, or of a kind that programs do not have.
    """
    if isinstance(given, P):
        return Sharding(default_axes(on), _spec(given))
    if not isinstance(given, jax.sharding.NamedSharding):
        raise InvalidInput(f"{what} has to be a PartitionSpec or a NamedSharding, not {type(given).__name__}")
    axes = tuple((str(name), int(size)) for name, size in given.mesh.shape.items())
    found = Sharding(axes, _spec(given.spec))
    if found.device_count != on.device_count:
        raise InvalidInput(
            f"{what} is over a mesh of {found.device_count} devices, and {on} has {on.device_count}; make it "
            "over slice.mesh"
        )
    return found


def operand_layouts(given: Sequence[Any], found: Sequence[Kind | None], on: Slice) -> list[Sharding]:
    """How each operand of a call is to lie.

    What was not said lies as the array does, if that has as many devices as the slice and the same mesh, and
    else whole on each device.

    Args:
        given: What was said of each, or None.
        found: What each is, if it is an array of the runtime.
        on: The slice of the call.
    """
    said = [None if one is None else layout(one, on, "a sharding of an argument") for one in given]
    followed = [
        kind.sharding
        for kind in found
        if kind is not None and kind.sharding.device_count == on.device_count and any(kind.sharding.spec)
    ]
    axes = next((each.axes for each in (*said, *followed) if each is not None), default_axes(on))
    made = []
    for one, kind in zip(said, found, strict=True):
        if one is not None:
            made.append(one)
        elif kind is not None and kind.sharding.axes == axes:
            made.append(kind.sharding)
        else:
            made.append(Sharding(axes))
    return made


def result_layouts(
    given: Sequence[Any],
    shapes: Sequence[tuple[int, ...]],
    operands: Sequence[tuple[Any, Sharding]],
    on: Slice,
) -> list[Sharding]:
    """How each result of a call lies: as was said; else as the first operand of its shape; else whole on
    each device.

    Args:
        given: What was said of each, or None.
        shapes: Their shapes.
        operands: Shape and sharding of each operand.
        on: The slice of the call.
    """
    axes = next((sharding.axes for _, sharding in operands), default_axes(on))
    made = []
    for one, shape in zip(given, shapes, strict=True):
        alike = next((how for other, how in operands if tuple(other) == tuple(shape)), Sharding(axes))
        made.append(alike if one is None else layout(one, on, "a sharding of a result"))
    return made


def _spec(spec: P) -> tuple[tuple[str, ...], ...]:
    parts = [() if part is None else (part,) if isinstance(part, str) else tuple(part) for part in spec]
    while parts and not parts[-1]:  # axes that are not divided need not be named
        parts.pop()
    return tuple(parts)
