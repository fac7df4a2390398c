"""What Orbax's version 0 interface needs of JAX: its arrays, its trees by key paths, and its shardings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from waystation._errors import InvalidInput

tree_map: Callable[..., Any] = jax.tree.map
tree_leaves: Callable[..., list[Any]] = jax.tree.leaves
flatten: Callable[..., tuple[list[Any], Any]] = jax.tree_util.tree_flatten
unflatten: Callable[[Any, Iterable[Any]], Any] = jax.tree_util.tree_unflatten

Array = jax.Array
ShapeDtypeStruct = jax.ShapeDtypeStruct


def flatten_with_path(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """A tree's leaves with the keys of JAX along their paths, and its structure.

    Raises:
        InvalidInput: JAX cannot bring the keys of a dict into an order.
    """
    try:
        return jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    except ValueError as error:
        if "pytree dictionary keys" not in str(error):
            raise
        raise InvalidInput(
            "a dict has keys of types that do not compare, such as int and str, which JAX cannot order; give "
            "it keys of one type, or restore without a tree to restore into: all keys are text then"
        ) from error


def is_key_array(value: Any) -> bool:
    """Whether a value is a typed PRNG key."""
    return isinstance(value, jax.Array) and bool(jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key))


def key_data(key: Any) -> tuple[Any, str]:
    """The data of a typed PRNG key, and the name of its implementation."""
    return jax.random.key_data(key), str(jax.random.key_impl(key))


def wrapped_key(data: Any, implementation: str | None) -> Any:
    """A typed PRNG key of its data."""
    return jax.random.wrap_key_data(data, impl=implementation)


def is_sharding(value: Any) -> bool:
    """Whether a value says where an array is."""
    return isinstance(value, Sharding) or _is_format(value)


def _is_format(value: Any) -> bool:
    return type(value).__name__ == "Format" and hasattr(value, "sharding")


def named_sharding(mesh: Any, axes: Any) -> Any:
    """The sharding of an array over a mesh, by the axes that divide it."""
    return NamedSharding(mesh, PartitionSpec() if axes is None else axes)


def single_device_sharding() -> Any:
    """That of an array on the first device of this process."""
    return SingleDeviceSharding(jax.local_devices()[0])


def placed(value: Any, dtype: Any, sharding: Any) -> Any:
    """A value as an array of JAX of this dtype, in this place; None leaves either as it is."""
    array = value if dtype is None else np.asarray(value).astype(dtype)
    return jax.device_put(array, sharding)


def is_a(value: Any, kinds: Iterable[str]) -> bool:
    """Whether a key of a path is of one of JAX's kinds."""
    return isinstance(value, tuple(getattr(jax.tree_util, kind) for kind in kinds))


def register_mapping(
    kind: type,
    children: Callable[[Any], tuple[Any, Any]],
    rebuilt: Callable[[Any, Any], Any],
) -> None:
    """Registers a class with one child that is a tree, and static data, as a node of JAX's trees."""

    def with_keys(value: Any) -> tuple[tuple[Any, ...], Any]:
        child, rest = children(value)
        return ((jax.tree_util.GetAttrKey("tree"), child),), rest

    jax.tree_util.register_pytree_with_keys(
        kind, with_keys, lambda rest, found: rebuilt(next(iter(found)), rest)
    )


def process_index() -> int:
    """Which process of the program this one is."""
    return int(jax.process_index())


def process_count() -> int:
    """How many processes the program has."""
    return int(jax.process_count())


def is_distributed() -> bool:
    """Whether `jax.distributed` connects the processes of the program."""
    return bool(jax.distributed.is_initialized())


def broadcast_one_to_all(tree: Any, *, is_source: bool | None) -> Any:
    """The tree of one process, in all of them."""
    if jax.process_count() == 1:
        return tree_map(np.asarray, tree)
    return multihost_utils.broadcast_one_to_all(tree, is_source=is_source)


def global_array(value: Any) -> Any:
    """A fully replicated array of all processes, of one that each of them has."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("all",))
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.make_array_from_callback(value.shape, sharding, lambda index: np.asarray(value)[index])


def sharded(array: Any, mesh: Any, axes: Any) -> Any:
    """An array of JAX over a mesh, of one of NumPy that all processes have."""
    sharding = NamedSharding(mesh, axes)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: np.asarray(array)[index])


def mesh_of(devices: Sequence[Any] | None, shape: Mapping[str, int]) -> Any:
    """A mesh of devices."""
    chosen = jax.devices() if devices is None else devices
    return jax.sharding.Mesh(np.array(chosen).reshape(tuple(shape.values())), tuple(shape))


def partition(*axes: Any) -> Any:
    """Which axes of a mesh divide those of an array."""
    return PartitionSpec(*axes)


def devices() -> list[Any]:
    """All devices of the program."""
    return list(jax.devices())


def replicated(array: Any) -> Any:
    """An array over several devices, in full on each of them."""
    sharding = NamedSharding(array.sharding.mesh, PartitionSpec())
    return jax.jit(lambda value: value, out_shardings=sharding)(array)
