"""How leaves are restored and stored: `RestoreArgs`, `SaveArgs`, and the types of leaves that there are.

The library itself stores every leaf. Handlers of types can be registered for the types that it knows; what
their options say is then in effect for all saves and restores. A handler that stores leaves itself is
refused.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from waystation import storage
from waystation._errors import InvalidInput, Unsupported
from waystation.checkpoint.context import Context
from waystation.compat.orbax.options import PyTreeMetadataOptions
from waystation.frameworks import jax_version0 as jax
from waystation.layouts.orbax import names

__all__ = [
    "ArrayHandler",
    "ArrayRestoreArgs",
    "NumpyHandler",
    "RestoreArgs",
    "SaveArgs",
    "ScalarHandler",
    "SingleReplicaArrayHandler",
    "SingleReplicaArrayRestoreArgs",
    "StringHandler",
    "TypeHandler",
    "TypeHandlerRegistry",
    "create_type_handler_registry",
    "get_type_handler",
    "has_type_handler",
    "is_ocdbt_checkpoint",
    "is_supported_empty_value",
    "is_supported_type",
    "register_standard_handlers_with_options",
    "register_type_handler",
    "supported_types",
]


@dataclasses.dataclass
class SaveArgs:
    """How a leaf is stored.

    Attributes:
        aggregate: Has no effect, as in Orbax.
        dtype: As which dtype; None for its own.
        chunk_byte_size: How large a chunk may be, in bytes.
        shard_axes: Along which axes chunks are cut first.
    """

    aggregate: bool = False
    dtype: Any = None
    chunk_byte_size: int | None = None
    shard_axes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.aggregate:
            self.aggregate = bool(self.aggregate)


@dataclasses.dataclass
class RestoreArgs:
    """As what a leaf is restored.

    Attributes:
        restore_type: `jax.Array`, `numpy.ndarray`, `int`, `float`, `str`, …; None for what was saved.
        dtype: Of an array; None for what was saved.
    """

    restore_type: Any = None
    dtype: Any = None


@dataclasses.dataclass
class ArrayRestoreArgs(RestoreArgs):
    """Where a leaf is restored as an array of JAX.

    Attributes:
        restore_type: `jax.Array`.
        mesh: The mesh of its sharding, if `sharding` is None.
        mesh_axes: Which axes of the mesh divide it.
        sharding: Its sharding, or metadata of one; None without a mesh for the saved one.
        global_shape: Its shape; None for the saved one.
        shape: The same, for what is not over several processes.
        strict: Refuse another shape than the saved one; else it is cut, or filled with zeros.
    """

    restore_type: Any = jax.Array
    mesh: Any = None
    mesh_axes: Any = None
    sharding: Any = None
    global_shape: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    strict: bool = True

    def __post_init__(self) -> None:
        if self.global_shape is None:
            self.global_shape = self.shape


@dataclasses.dataclass
class SingleReplicaArrayRestoreArgs(ArrayRestoreArgs):
    """The same, for programs that read one replica and send it to the others.

    Attributes:
        single_replica_sharding: Has no effect: who reads follows from the sharding.
    """

    single_replica_sharding: Any = None


# ---- handlers of types -------------------------------------------------------------------------


class TypeHandler:
    """Handles the leaves of a type. Subclasses of this module's own classes say options only."""

    def typestr(self) -> str:
        """What metadata say of the leaves."""
        raise NotImplementedError

    def apply(self, context: Context) -> None:
        """Sets the options of a save or restore."""
        raise Unsupported(
            f"{type(self).__name__} cannot handle leaves: the library stores them itself, and takes options "
            "from ArrayHandler, SingleReplicaArrayHandler, NumpyHandler, ScalarHandler and StringHandler. "
            "Save other objects by a CheckpointHandler, as an item of their own"
        )

    def finalize(self, directory: Any) -> None:
        """Does nothing."""


class ArrayHandler(TypeHandler):
    """Handles arrays of JAX.

    Args:
        metadata_key: Refused but for None.
        primary_host: As in `MultiprocessingOptions`, which counts.
        replica_id: Has no effect: all replicas take their share of what is written.
        use_replica_parallel: Whether they do.
        min_slice_bytes_for_replica_parallel: How much each has to write at least, in bytes.
        max_replicas_for_replica_parallel: How many do, at most.
        enable_write_sharding_file: Whether the shardings are stored.
        array_metadata_store: Has no effect: it is always the default one.
        enable_replica_parallel_separate_folder: As in `waystation.options`.
        dispatcher: Refused but for None.
        callback: Refused but for None.
    """

    def __init__(
        self,
        metadata_key: str | None = None,
        primary_host: int | None = 0,
        replica_id: int | None = 0,
        use_replica_parallel: bool | None = None,
        min_slice_bytes_for_replica_parallel: int | None = None,
        max_replicas_for_replica_parallel: int | None = None,
        enable_write_sharding_file: bool = True,
        array_metadata_store: Any = None,
        enable_replica_parallel_separate_folder: bool = False,
        dispatcher: Any = None,
        callback: Any = None,
    ) -> None:
        refused = {"metadata_key": metadata_key, "dispatcher": dispatcher, "callback": callback}
        for name, value in refused.items():
            if value is not None:
                raise Unsupported(f"{name} must be None: the library itself stores arrays")
        self._saving = {
            "use_replica_parallel": use_replica_parallel,
            "min_slice_bytes_for_replica_parallel": min_slice_bytes_for_replica_parallel,
            "max_replicas_for_replica_parallel": max_replicas_for_replica_parallel,
            "enable_write_sharding_file": enable_write_sharding_file,
            "enable_replica_parallel_separate_folder": enable_replica_parallel_separate_folder,
        }

    def typestr(self) -> str:
        """See `TypeHandler`."""
        return "jax.Array"

    def apply(self, context: Context) -> None:
        """See `TypeHandler`."""
        for name, value in self._saving.items():
            setattr(context.array.saving, name, value)


class SingleReplicaArrayHandler(ArrayHandler):
    """Handles arrays of JAX of which one replica is read, and sent to the others.

    Args:
        replica_axis_index: Which axis of the mesh has the replicas.
        primary_replica_id: Which of them is read.
        broadcast_memory_limit_bytes: How much is sent at a time, in bytes.
        broadcast_memory_scaling_factor: Has no effect.
        kwargs: What `ArrayHandler` takes.
    """

    def __init__(
        self,
        replica_axis_index: int | None = 0,
        primary_replica_id: int | None = 0,
        broadcast_memory_limit_bytes: int | None = None,
        broadcast_memory_scaling_factor: float | None = 0.75,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._loading = {
            "replica_axis_index": replica_axis_index,
            "primary_replica_id": primary_replica_id,
            "broadcast_memory_limit_bytes": broadcast_memory_limit_bytes,
            "broadcast_memory_scaling_factor": broadcast_memory_scaling_factor,
        }

    def apply(self, context: Context) -> None:
        """See `TypeHandler`."""
        super().apply(context)
        context.array.loading.use_load_and_broadcast = True
        for name, value in self._loading.items():
            setattr(context.array.loading.load_and_broadcast_options, name, value)


class NumpyHandler(TypeHandler):
    """Handles arrays of NumPy.

    Args:
        metadata_key: Refused but for None.
        ocdbt_process_id: Has no effect.
        deepcopy_host_arrays: Whether arrays are copied, so that they may change once `save` has returned.
    """

    def __init__(
        self,
        metadata_key: str | None = None,
        ocdbt_process_id: str | None = None,
        deepcopy_host_arrays: bool = True,
    ) -> None:
        if metadata_key is not None:
            raise Unsupported("metadata_key must be None: the library itself stores arrays")
        self._deepcopy = deepcopy_host_arrays

    def typestr(self) -> str:
        """See `TypeHandler`."""
        return "np.ndarray"

    def apply(self, context: Context) -> None:
        """See `TypeHandler`."""
        if not self._deepcopy:
            context.memory.caller_keeps = True


class ScalarHandler(NumpyHandler):
    """Handles numbers.

    Args:
        metadata_key: Refused but for None.
        ocdbt_process_id: Has no effect.
    """

    def __init__(self, metadata_key: str | None = None, ocdbt_process_id: str | None = None) -> None:
        super().__init__(metadata_key, ocdbt_process_id)

    def typestr(self) -> str:
        """See `TypeHandler`."""
        return "scalar"


class StringHandler(TypeHandler):
    """Handles strings.

    Args:
        filename: Refused but for None.
    """

    def __init__(self, filename: str | None = None) -> None:
        if filename is not None:
            raise Unsupported("filename must be None: strings are stored where Orbax finds them")

    def typestr(self) -> str:
        """See `TypeHandler`."""
        return "string"

    def apply(self, context: Context) -> None:
        """See `TypeHandler`."""


class TypeHandlerRegistry(Protocol):
    """Which handler there is for which type."""

    def add(
        self,
        ty: Any,
        handler: Any,
        func: Callable[[Any], bool] | None = None,
        override: bool = False,
        ignore_warnings: bool = False,
    ) -> None:
        """Adds a handler of a type.

        Raises:
            ValueError: There is one, and `override` is False.
        """
        ...

    def get(self, ty: Any) -> Any:
        """The handler of a type.

        Raises:
            ValueError: There is none.
        """
        ...

    def has(self, ty: Any) -> bool:
        """Whether there is one."""
        ...


class _Registry:
    def __init__(self) -> None:
        self._entries: list[tuple[Any, Callable[[Any], bool], Any]] = []

    def add(
        self,
        ty: Any,
        handler: Any,
        func: Callable[[Any], bool] | None = None,
        override: bool = False,
        ignore_warnings: bool = False,
    ) -> None:
        if not _says_options_only(handler):
            TypeHandler.apply(handler, Context())
        known = next((number for number, entry in enumerate(self._entries) if entry[0] is ty), None)
        if known is not None and not override:
            raise InvalidInput(f"a handler of {ty} is registered already; give override=True to replace it")
        entry = (ty, func or (lambda other: _is_subclass(other, ty)), handler)
        if known is None:
            self._entries.append(entry)
        else:
            self._entries[known] = entry

    def get(self, ty: Any) -> Any:
        for _, fits, handler in self._entries:
            if fits(ty):
                return handler
        raise InvalidInput(f"no handler of {ty} is registered")

    def has(self, ty: Any) -> bool:
        return any(fits(ty) for _, fits, _ in self._entries)

    def types(self) -> list[Any]:
        return [entry[0] for entry in self._entries]

    def apply(self, context: Context) -> None:
        for _, _, handler in self._entries:
            handler.apply(context)


def _says_options_only(handler: Any) -> bool:
    """Whether a handler is of this module, or of a subclass that would not store or read leaves itself."""
    own = isinstance(handler, TypeHandler) and type(handler).apply is not TypeHandler.apply
    return own and not any(hasattr(handler, name) for name in ("serialize", "deserialize"))


def _is_subclass(other: Any, ty: Any) -> bool:
    return isinstance(other, type) and issubclass(other, ty)


def _standard() -> list[tuple[Any, TypeHandler]]:
    return [
        (int, ScalarHandler()),
        (float, ScalarHandler()),
        (bytes, ScalarHandler()),
        (np.number, ScalarHandler()),
        (np.ndarray, NumpyHandler()),
        (jax.Array, ArrayHandler()),
        (str, StringHandler()),
        (type(...), StringHandler()),
    ]


def create_type_handler_registry(*handlers: tuple[Any, Any]) -> TypeHandlerRegistry:
    """A registry of types with their handlers."""
    registry = _Registry()
    for ty, handler in handlers:
        registry.add(ty, handler)
    return registry


GLOBAL = create_type_handler_registry(*_standard())


def register_type_handler(
    ty: Any, handler: Any, func: Callable[[Any], bool] | None = None, override: bool = False
) -> None:
    """Registers the handler of a type for the whole program; see `TypeHandlerRegistry.add`.

    Raises:
        ValueError: There is one, and `override` is False.
        Unsupported: It stores leaves itself.
    """
    GLOBAL.add(ty, handler, func, override)


def register_standard_handlers_with_options(**kwargs: Any) -> None:
    """Registers the handler of arrays of JAX, with options that `ArrayHandler` takes."""
    GLOBAL.add(jax.Array, ArrayHandler(**kwargs), override=True)


def get_type_handler(ty: Any) -> Any:
    """The handler of a type.

    Raises:
        ValueError: There is none.
    """
    return GLOBAL.get(ty)


def has_type_handler(ty: Any) -> bool:
    """Whether leaves of a type can be saved."""
    return GLOBAL.has(ty)


def supported_types() -> list[Any]:
    """The types of which leaves can be saved."""
    assert isinstance(GLOBAL, _Registry)
    return GLOBAL.types()


def apply_types(registry: Any, context: Context) -> None:
    """Sets the options that the handlers of types say."""
    apply = getattr(registry, "apply", None)
    if callable(apply):
        apply(context)


def is_supported_type(value: Any, pytree_metadata_options: Any = None) -> bool:
    """Whether a value can be a leaf, or an empty container, of what is saved."""
    return has_type_handler(type(value)) or is_supported_empty_value(value)


def is_supported_empty_value(value: Any, pytree_metadata_options: Any = None) -> bool:
    """Whether a value is None or an empty container that can be saved."""
    rich = isinstance(pytree_metadata_options, PyTreeMetadataOptions)
    if value is None:
        return True
    if isinstance(value, tuple) and not value:
        return not hasattr(value, "_fields") or not rich or bool(pytree_metadata_options.support_rich_types)
    return isinstance(value, dict | list) and not value


def is_ocdbt_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a directory has a database of arrays."""
    return storage.is_there(os.path.join(storage.located(path), names.MANIFEST))
