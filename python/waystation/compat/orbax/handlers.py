"""Handlers of items: how one item is saved to a directory, restored from it, and described.

A handler of a program's own is a class with `save(directory, args=…)` and `restore(directory, args=…)`, whose
arguments are registered by `args.register_with_handler`. `async_save` returns futures of what goes on in the
background. Those of this module write by the library's engine.
"""

from __future__ import annotations

import abc
import asyncio
import inspect
import json
import os
from collections.abc import Callable, Coroutine, Mapping, MutableMapping
from typing import Any, Protocol

from waystation import _native, storage
from waystation._errors import Conflict, InvalidInput, NoHandler, Unsupported
from waystation._threads import Threads
from waystation.checkpoint.context import Context
from waystation.checkpoint.handlers.choice import STATE
from waystation.checkpoint.handlers.registry import Remembered
from waystation.checkpoint.handlers.simple import writes_here
from waystation.checkpoint.nested_orbax import NestedTree
from waystation.compat.orbax import _trees
from waystation.compat.orbax import args as args_lib
from waystation.compat.orbax.args import Composite, register_with_handler
from waystation.compat.orbax.future import Future, NoopFuture, ThreadFuture
from waystation.compat.orbax.metadata import StepMetadata, TreeMetadata
from waystation.compat.orbax.options import (
    AsyncOptions,
    AtomicityOptions,
    FileOptions,
    MemoryLimitOptions,
    MultiprocessingOptions,
    PyTreeMetadataOptions,
    TreeOptions,
    apply_multiprocessing,
    context_with,
)
from waystation.compat.orbax.type_handlers import GLOBAL, apply_types
from waystation.frameworks import jax_version0 as jax
from waystation.tree import flatten

ArrayRestoreArgs = args_lib.ArrayRestore
ArraySaveArgs = args_lib.ArraySave
CompositeArgs = args_lib.Composite
CompositeResults = args_lib.Composite
JaxRandomKeyRestoreArgs = args_lib.JaxRandomKeyRestore
JaxRandomKeySaveArgs = args_lib.JaxRandomKeySave
JsonRestoreArgs = args_lib.JsonRestore
JsonSaveArgs = args_lib.JsonSave
NumpyRandomKeyRestoreArgs = args_lib.NumpyRandomKeyRestore
NumpyRandomKeySaveArgs = args_lib.NumpyRandomKeySave
ProtoRestoreArgs = args_lib.ProtoRestore
ProtoSaveArgs = args_lib.ProtoSave
PyTreeRestoreArgs = args_lib.PyTreeRestore
PyTreeSaveArgs = args_lib.PyTreeSave
StandardRestoreArgs = args_lib.StandardRestore
StandardSaveArgs = args_lib.StandardSave

_ROOTS = "orbax.checkpoint._src.handlers"
_LIMIT_BYTES = 1 << 30
_GIB = 1 << 30


def run_coroutine(work: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine to its end, also where this thread runs another one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with Threads(1, "coroutine") as pool:
        return pool.submit(asyncio.run, work).result()


class CheckpointHandler(abc.ABC):
    """Saves and restores items of one kind."""

    @abc.abstractmethod
    def save(self, directory: Any, *args: Any, **kwargs: Any) -> None:
        """Saves an item to a directory that is there."""

    @abc.abstractmethod
    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Restores it."""

    def metadata(self, directory: Any) -> Any:
        """What is known of it without restoring it."""
        raise NotImplementedError(f"{type(self).__name__} has no metadata")

    def finalize(self, directory: Any) -> None:  # noqa: B027 - a subclass may have nothing to do
        """Called by the primary process once everything of the item is written."""

    def close(self) -> None:  # noqa: B027 - a subclass may have nothing to do
        """Lets go of everything."""

    @classmethod
    def typestr(cls) -> str:
        """The name under which checkpoints remember the class."""
        return f"{cls.__module__}.{cls.__qualname__}"


class AsyncCheckpointHandler(CheckpointHandler):
    """Saves items in the background."""

    @abc.abstractmethod
    async def async_save(self, directory: Any, *args: Any, **kwargs: Any) -> list[Future] | None:
        """Takes what may change afterwards; what it returns ends once the item is written."""

    def save(self, directory: Any, *args: Any, **kwargs: Any) -> None:
        """Saves an item and waits for that."""

        async def save() -> list[Future] | None:
            return await self.async_save(directory, *args, **kwargs)

        for future in run_coroutine(save()) or ():
            future.result()


# ---- trees -------------------------------------------------------------------------------------


class _TreeHandler(AsyncCheckpointHandler):
    """Handles trees by the library's engine.

    Attributes:
        tree_options: How they are stored.
    """

    _save_args: type = args_lib.PyTreeSave
    _restore_args: type = args_lib.PyTreeRestore
    tree_options: TreeOptions
    _multiprocessing: MultiprocessingOptions | None = None
    _types: Any = None

    def changes(self, context: Context) -> None:
        """Sets the options of a save or restore."""
        self.tree_options.apply(context)
        apply_multiprocessing(self._multiprocessing, context)
        apply_types(GLOBAL if self._types is None else self._types, context)

    def check(self, args: Any) -> Any:
        """The tree that arguments of a save have, as it is to be stored.

        Raises:
            ValueError: They have none that can be saved.
        """
        return _trees.with_python_scalars(args.item)

    async def async_save(
        self, directory: Any, item: Any = None, save_args: Any = None, args: Any = None
    ) -> list[Future] | None:
        """Takes the tree; see `AsyncCheckpointHandler`."""
        if args is None:
            is_args = args_lib.is_args(save_args)
            args = save_args if is_args else self._save_args(item, save_args)
        state = self.check(args)
        directory = os.fspath(getattr(directory, "path", directory))
        storage.make_directory(directory, parents=True)
        changes = [self.changes, self._remembering(args.custom_metadata)]
        options = _trees.storage_options({STATE: (state, args.save_args)})
        with context_with(*changes, *([] if options is None else [options])):
            saving = NestedTree(directory)
            saving.prepare(state)
        return [ThreadFuture(saving.finish)]

    def _remembering(self, custom_metadata: Any) -> Callable[[Context], None]:
        """What has the metadata of a tree hold the program's own."""
        from waystation.compat.orbax._items import ItemRegistry

        registry = ItemRegistry({STATE: Remembered(args_lib.name_of(type(self)), custom_metadata)})

        def apply(context: Context) -> None:
            context.checkpointables.registry = registry

        return apply

    def restore(
        self,
        directory: Any,
        item: Any = None,
        restore_args: Any = None,
        transforms: Any = None,
        transforms_default_to_original: bool = True,
        legacy_transform_fn: Any = None,
        args: Any = None,
    ) -> Any:
        """Restores a tree from its directory."""
        if args is None:
            args = args_lib.PyTreeRestore(
                item, restore_args, transforms, transforms_default_to_original, legacy_transform_fn
            )
        return _trees.restore(_trees.Place(os.fspath(directory), STATE), args, self.changes)

    def metadata(self, directory: Any) -> TreeMetadata:
        """What is known of the tree in a directory."""
        return _trees.metadata(_trees.Place(os.fspath(directory), STATE), os.fspath(directory))


def _bytes_of(gigabytes: int | None) -> int | None:
    return None if gigabytes is None else gigabytes * _GIB


class PyTreeCheckpointHandler(_TreeHandler):
    """Handles trees of arrays, numbers and strings.

    Args:
        aggregate_filename: Has no effect: nothing is stored in such a file.
        save_concurrent_gb: How much is written at a time, in GB.
        restore_concurrent_gb: How much is read at a time.
        save_device_host_concurrent_gb: How much is copied from devices at a time.
        memory_limit_options: The same.
        use_ocdbt: Store arrays in a database; else in files.
        use_zarr3: In zarr of version 3; else 2.
        use_compression: Compressed.
        multiprocessing_options: The processes that take part.
        type_handler_registry: Handlers of leaves, see `type_handlers`.
        handler_impl: A handler to take the options of instead.
        pytree_metadata_options: What is said of containers.
        array_metadata_validator: Has no effect.
        enable_pinned_host_transfer: Has no effect.
        is_prioritized_key_fn: Has no effect.
    """

    def __init__(
        self,
        aggregate_filename: str | None = None,
        *,
        save_concurrent_gb: int | None = None,
        restore_concurrent_gb: int | None = None,
        save_device_host_concurrent_gb: int | str | None = None,
        memory_limit_options: MemoryLimitOptions | None = None,
        use_ocdbt: bool = True,
        use_zarr3: bool = False,
        use_compression: bool = True,
        multiprocessing_options: MultiprocessingOptions | None = None,
        type_handler_registry: Any = None,
        handler_impl: Any = None,
        pytree_metadata_options: PyTreeMetadataOptions | None = None,
        array_metadata_validator: Any = None,
        enable_pinned_host_transfer: bool | None = None,
        is_prioritized_key_fn: Any = None,
    ) -> None:
        transfer = save_device_host_concurrent_gb
        if memory_limit_options is not None:
            transfer = memory_limit_options.max_transfer_concurrent_gb
        self.tree_options: TreeOptions = TreeOptions(
            use_ocdbt,
            use_zarr3,
            use_compression,
            pytree_metadata_options is not None and pytree_metadata_options.support_rich_types,
            None,
            _bytes_of(save_concurrent_gb),
            _bytes_of(restore_concurrent_gb),
            _bytes_of(transfer) if isinstance(transfer, int) else None,
        )
        self._multiprocessing = multiprocessing_options
        self._types = type_handler_registry
        if handler_impl is not None:
            self.tree_options, self._types = handler_impl.tree_options, handler_impl._types

    @classmethod
    def typestr(cls) -> str:
        """See `CheckpointHandler`."""
        is_own = cls is PyTreeCheckpointHandler
        return f"{_ROOTS}.pytree_checkpoint_handler.PyTreeCheckpointHandler" if is_own else super().typestr()


class BasePyTreeCheckpointHandler(PyTreeCheckpointHandler):
    """The same, whose bounds are in bytes.

    Args:
        save_concurrent_bytes: How much is written at a time.
        restore_concurrent_bytes: How much is read at a time.
        save_device_host_concurrent_bytes: How much is copied from devices at a time.
        enable_post_merge_validation: Has no effect.
        kwargs: What `PyTreeCheckpointHandler` takes.
    """

    def __init__(
        self,
        *,
        save_concurrent_bytes: int | None = None,
        restore_concurrent_bytes: int | None = None,
        save_device_host_concurrent_bytes: int | str | None = None,
        enable_post_merge_validation: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        given = self.tree_options
        transfer = save_device_host_concurrent_bytes
        self.tree_options: TreeOptions = TreeOptions(
            given.use_ocdbt,
            given.use_zarr3,
            given.use_compression,
            given.support_rich_types,
            None,
            save_concurrent_bytes,
            restore_concurrent_bytes,
            transfer if isinstance(transfer, int) else given.transfer_concurrent_bytes,
        )

    def get_param_names(self, item: Any) -> Any:
        """The tree with the name in the place of each leaf."""
        from waystation.compat.orbax.tree import get_param_names

        return get_param_names(item)


class StandardCheckpointHandler(_TreeHandler):
    """Handles trees of arrays and numbers, restored by abstract trees.

    Args:
        save_concurrent_gb: How much is written at a time, in GB.
        restore_concurrent_gb: How much is read at a time.
        multiprocessing_options: The processes that take part.
        pytree_metadata_options: What is said of containers.
        use_ocdbt: Store arrays in a database; else in files.
    """

    _save_args = args_lib.StandardSave
    _restore_args = args_lib.StandardRestore

    def __init__(
        self,
        *,
        save_concurrent_gb: int = 96,
        restore_concurrent_gb: int = 96,
        multiprocessing_options: MultiprocessingOptions | None = None,
        pytree_metadata_options: PyTreeMetadataOptions | None = None,
        use_ocdbt: bool = True,
    ) -> None:
        self.tree_options: TreeOptions = TreeOptions(
            use_ocdbt,
            support_rich_types=pytree_metadata_options is not None
            and pytree_metadata_options.support_rich_types,
            write_concurrent_bytes=None if save_concurrent_gb == 96 else _bytes_of(save_concurrent_gb),
            read_concurrent_bytes=None if restore_concurrent_gb == 96 else _bytes_of(restore_concurrent_gb),
        )
        self._multiprocessing = multiprocessing_options

    def check(self, args: Any) -> Any:
        """See `_TreeHandler`."""
        item = args.item
        if item is None:
            raise InvalidInput("StandardSave needs a tree to save, not None")
        if _is_one_leaf(item):
            raise InvalidInput(
                f"StandardSave saves trees, not a single {type(item).__name__}; use ArraySave for one array"
            )
        leaves, structure = flatten(item)
        strings = [number for number, leaf in enumerate(leaves) if isinstance(leaf, str)]
        if strings:
            place = ".".join(_trees.names_of(structure.key_paths()[strings[0]]))
            raise InvalidInput(
                f"StandardSave saves arrays and numbers, and '{place}' is a string; use PyTreeSave"
            )
        return item

    def restore(self, directory: Any, item: Any = None, args: Any = None) -> Any:  # type: ignore[override]
        """Restores a tree from its directory."""
        return super().restore(directory, args=args or args_lib.StandardRestore(item))

    @classmethod
    def typestr(cls) -> str:
        """See `CheckpointHandler`."""
        is_own = cls is StandardCheckpointHandler
        return (
            f"{_ROOTS}.standard_checkpoint_handler.StandardCheckpointHandler" if is_own else super().typestr()
        )


def _is_one_leaf(item: Any) -> bool:
    leaves, _ = flatten(item)
    return len(leaves) == 1 and leaves[0] is item


# ---- small things ------------------------------------------------------------------------------


def _write_text(directory: Any, name: str, text: str) -> list[Future]:
    """Writes a file, if it is this process that does."""
    path = os.path.join(os.fspath(getattr(directory, "path", directory)), name)
    if not writes_here():
        return [NoopFuture()]
    return [ThreadFuture(lambda: _native.write_small_files([(path, text.encode())]))]


def _read_text(directory: Any, *candidates: str) -> str:
    for name in candidates:
        path = os.path.join(os.fspath(directory), name)
        if storage.is_file(path):
            return storage.read_file(path, limit_bytes=_LIMIT_BYTES).decode()
    raise FileNotFoundError(f"'{directory}' has no file {' or '.join(candidates)}")


class JsonCheckpointHandler(AsyncCheckpointHandler):
    """Handles JSON values.

    Args:
        filename: Of the file; `metadata` by default.
        multiprocessing_options: The processes that take part.
    """

    def __init__(
        self, filename: str | None = None, *, multiprocessing_options: MultiprocessingOptions | None = None
    ) -> None:
        self._filename = filename or "metadata"

    async def async_save(self, directory: Any, item: Any = None, args: Any = None) -> list[Future] | None:
        """Writes the value."""
        return _write_text(directory, self._filename, json.dumps(item if args is None else args.item))

    def restore(self, directory: Any, item: Any = None, args: Any = None) -> Any:
        """Reads it."""
        return json.loads(_read_text(directory, self._filename, "data.json"))

    def metadata(self, directory: Any) -> None:
        """Nothing."""

    @classmethod
    def typestr(cls) -> str:
        """See `CheckpointHandler`."""
        is_own = cls is JsonCheckpointHandler
        return f"{_ROOTS}.json_checkpoint_handler.JsonCheckpointHandler" if is_own else super().typestr()


class ProtoCheckpointHandler(AsyncCheckpointHandler):
    """Handles messages of protocol buffers.

    Args:
        filename: Of the file.
        multiprocessing_options: The processes that take part.
    """

    def __init__(
        self,
        filename: str = "proto.pbtxt",
        *,
        multiprocessing_options: MultiprocessingOptions | None = None,
    ) -> None:
        self._filename = filename

    async def async_save(self, directory: Any, item: Any = None, args: Any = None) -> list[Future] | None:
        """Writes the message."""
        from google.protobuf import text_format

        message = item if args is None else args.item
        return _write_text(directory, self._filename, text_format.MessageToString(message))

    def restore(self, directory: Any, item: Any = None, args: Any = None) -> Any:
        """Reads it as the class that is given."""
        from google.protobuf import text_format

        kind = item if args is None else args.item
        if kind is None:
            raise InvalidInput("the file of a message does not say its class; give ProtoRestore(Message)")
        return text_format.Parse(_read_text(directory, self._filename), kind())

    def metadata(self, directory: Any) -> None:
        """Nothing."""

    @classmethod
    def typestr(cls) -> str:
        """See `CheckpointHandler`."""
        is_own = cls is ProtoCheckpointHandler
        return f"{_ROOTS}.proto_checkpoint_handler.ProtoCheckpointHandler" if is_own else super().typestr()


class ArrayCheckpointHandler(AsyncCheckpointHandler):
    """Handles one array or number.

    Args:
        checkpoint_name: Its name in the files; `checkpoint` by default.
    """

    def __init__(self, checkpoint_name: str | None = None) -> None:
        self._name = checkpoint_name or "checkpoint"
        self._trees = PyTreeCheckpointHandler(use_ocdbt=False)

    async def async_save(
        self, directory: Any, item: Any = None, save_args: Any = None, args: Any = None
    ) -> list[Future] | None:
        """Takes the array."""
        args = args or args_lib.ArraySave(item, save_args)
        if not _is_one_leaf(args.item):
            raise InvalidInput(f"ArraySave saves one array or number, not a {type(args.item).__name__}")
        own = None if args.save_args is None else {self._name: args.save_args}
        return await self._trees.async_save(directory, args=args_lib.PyTreeSave({self._name: args.item}, own))

    def restore(self, directory: Any, item: Any = None, restore_args: Any = None, args: Any = None) -> Any:
        """Restores it."""
        args = args or args_lib.ArrayRestore(item, restore_args)
        own = None if args.restore_args is None else {self._name: args.restore_args}
        found = self._trees.restore(directory, args=args_lib.PyTreeRestore(restore_args=own))
        return found[self._name]

    def metadata(self, directory: Any) -> Any:
        """What is known of it."""
        return self._trees.metadata(directory)[self._name]

    @classmethod
    def typestr(cls) -> str:
        """See `CheckpointHandler`."""
        is_own = cls is ArrayCheckpointHandler
        return f"{_ROOTS}.array_checkpoint_handler.ArrayCheckpointHandler" if is_own else super().typestr()


class _RandomKeyHandler(AsyncCheckpointHandler):
    """Handles the state of random numbers: data, and a JSON value that says how to read them."""

    _default_name = ""

    def __init__(self, key_name: str | None = None) -> None:
        self._name = key_name or self._default_name

    def _taken(self, args: Any) -> tuple[AsyncCheckpointHandler, Any, dict[str, Any]]:
        """What saves the data, the arguments of that, and the JSON value."""
        raise NotImplementedError

    def _given(self, directory: Any, args: Any, said: Mapping[str, Any]) -> Any:
        raise NotImplementedError

    async def async_save(self, directory: Any, args: Any = None) -> list[Future] | None:
        """Takes the state."""
        root = os.fspath(getattr(directory, "path", directory))
        handler, own, said = self._taken(args)
        futures: list[Future] = []
        for name, saver, value in (
            (self._name, handler, own),
            (f"{self._name}_metadata", JsonCheckpointHandler(), args_lib.JsonSave(said)),
        ):
            place = os.path.join(root, name)
            storage.make_directory(place, parents=True)
            futures += await saver.async_save(place, args=value) or []
        return futures

    def restore(self, directory: Any, args: Any = None) -> Any:
        """Restores it."""
        root = os.fspath(directory)
        said = JsonCheckpointHandler().restore(os.path.join(root, f"{self._name}_metadata"))
        return self._given(os.path.join(root, self._name), args, said)

    def metadata(self, directory: Any) -> None:
        """Nothing."""
        raise NotImplementedError(f"{type(self).__name__} has no metadata")


class JaxRandomKeyCheckpointHandler(_RandomKeyHandler):
    """Handles PRNG keys of JAX, typed or not.

    Args:
        key_name: Its name in the files.
    """

    _default_name = "jax_random_key"

    def _taken(self, args: Any) -> tuple[AsyncCheckpointHandler, Any, dict[str, Any]]:
        data, said = args.item, dict[str, Any](typed=False)
        if jax.is_key_array(data):
            data, implementation = jax.key_data(data)
            said = {"typed": True, "impl": implementation}
        return ArrayCheckpointHandler(), args_lib.ArraySave(data, args.save_args), said

    def _given(self, directory: Any, args: Any, said: Mapping[str, Any]) -> Any:
        own = None if args is None else args.restore_args
        data = ArrayCheckpointHandler().restore(directory, args=args_lib.ArrayRestore(restore_args=own))
        return jax.wrapped_key(data, said.get("impl")) if said.get("typed") else data

    @classmethod
    def typestr(cls) -> str:
        """See `CheckpointHandler`."""
        is_own = cls is JaxRandomKeyCheckpointHandler
        return f"{_ROOTS}.random_key_checkpoint_handler.{cls.__name__}" if is_own else super().typestr()


class NumpyRandomKeyCheckpointHandler(_RandomKeyHandler):
    """Handles what `numpy.random.get_state` returns.

    Args:
        key_name: Its name in the files.
    """

    _default_name = "np_random_key"

    def _taken(self, args: Any) -> tuple[AsyncCheckpointHandler, Any, dict[str, Any]]:
        is_legacy = isinstance(args.item, tuple)
        tree = list(args.item) if is_legacy else args.item
        return PyTreeCheckpointHandler(), args_lib.PyTreeSave(tree), {"legacy": is_legacy}

    def _given(self, directory: Any, args: Any, said: Mapping[str, Any]) -> Any:
        found = PyTreeCheckpointHandler().restore(directory)
        return tuple(found) if said.get("legacy") else found

    @classmethod
    def typestr(cls) -> str:
        """See `CheckpointHandler`."""
        is_own = cls is NumpyRandomKeyCheckpointHandler
        return f"{_ROOTS}.random_key_checkpoint_handler.{cls.__name__}" if is_own else super().typestr()


# ---- which handler takes which item ------------------------------------------------------------


class NoEntryError(NoHandler):
    """A registry has no handler of an item and its arguments."""


class AlreadyExistsError(Conflict):
    """A registry has one already."""


class CheckpointHandlerRegistry(Protocol):
    """Which handler takes which item, by the class of the arguments."""

    def add(self, item: str | None, args: Any, handler: Any = None) -> None:
        """Adds a handler of an item, or of all items by None.

        Raises:
            ValueError: There is one.
        """
        ...

    def get(self, item: str | None, args: Any) -> Any:
        """The handler of an item.

        Raises:
            KeyError: There is none.
        """
        ...

    def has(self, item: str | None, args: Any) -> bool:
        """Whether there is one."""
        ...

    def get_all_entries(self) -> MutableMapping[tuple[str | None, type], Any]:
        """All of them, by item and class of arguments."""
        ...


class DefaultCheckpointHandlerRegistry:
    """A registry of handlers.

    Args:
        other_registry: Its entries are taken over.
    """

    def __init__(self, other_registry: CheckpointHandlerRegistry | None = None) -> None:
        self._entries: dict[tuple[str | None, type], Any] = {}
        if other_registry is not None:
            self._entries.update(other_registry.get_all_entries())

    def add(self, item: str | None, args: Any, handler: Any = None) -> None:
        """See `CheckpointHandlerRegistry.add`; by default that with which the arguments are registered."""
        cls = args if isinstance(args, type) else type(args)
        if (item, cls) in self._entries:
            raise AlreadyExistsError(
                f"item '{item}' has a handler of {cls.__name__} in this registry already"
            )
        found = args_lib.get_registered_handler_cls(cls) if handler is None else handler
        self._entries[item, cls] = found() if isinstance(found, type) else found

    def get(self, item: str | None, args: Any) -> Any:
        """See `CheckpointHandlerRegistry.get`."""
        cls = args if isinstance(args, type) else type(args)
        if (item, cls) in self._entries:
            return self._entries[item, cls]
        raise NoEntryError(f"no handler of {cls.__name__} for item '{item}' is in this registry")

    def has(self, item: str | None, args: Any) -> bool:
        """See `CheckpointHandlerRegistry.has`."""
        cls = args if isinstance(args, type) else type(args)
        return (item, cls) in self._entries

    def get_all_entries(self) -> MutableMapping[tuple[str | None, type], Any]:
        """See `CheckpointHandlerRegistry.get_all_entries`."""
        return self._entries


def create_default_handler_registry(**items_to_handlers: Any) -> CheckpointHandlerRegistry:
    """A registry of items with their handlers."""
    registry = DefaultCheckpointHandlerRegistry()
    for item, handler in items_to_handlers.items():
        for args in args_lib.get_registered_args_cls(handler):
            registry.add(item, args, handler)
    return registry


class CompositeOptions:
    """Options of a handler of several items, which its checkpointer's are.

    Args:
        multiprocessing_options: The processes that take part.
        temporary_path_class: Refused but for None.
        file_options: Files.
        atomicity_options: How a checkpoint becomes visible.
        async_options: Saves in the background.
    """

    def __init__(
        self,
        multiprocessing_options: MultiprocessingOptions | None = None,
        temporary_path_class: Any = None,
        file_options: FileOptions | None = None,
        atomicity_options: AtomicityOptions | None = None,
        async_options: AsyncOptions | None = None,
    ) -> None:
        if temporary_path_class is not None:
            raise Unsupported("temporary_path_class must be None: a rename commits a checkpoint")
        self.multiprocessing_options: MultiprocessingOptions = (
            multiprocessing_options or MultiprocessingOptions()
        )
        self.temporary_path_class: None = None
        self.file_options = file_options
        self.atomicity_options = atomicity_options
        self.async_options = async_options


class CompositeCheckpointHandler(AsyncCheckpointHandler):
    """Handles several items, each in a directory of its own. Its checkpointer saves all of them at once.

    Args:
        item_names: The names of items whose handlers follow from their arguments.
        composite_options: Options.
        handler_registry: Which handler takes which item.
        items_and_handlers: Items with their handlers.
    """

    def __init__(
        self,
        *item_names: str,
        composite_options: CompositeOptions | None = None,
        handler_registry: CheckpointHandlerRegistry | None = None,
        **items_and_handlers: Any,
    ) -> None:
        from waystation.compat.orbax._items import Items

        if handler_registry is not None and (item_names or items_and_handlers):
            raise InvalidInput("give either items or handler_registry, which says all of them")
        self.items: Items = Items(item_names, items_and_handlers, handler_registry)

    async def async_save(self, directory: Any, args: Any = None) -> list[Future] | None:
        """Saves the items to directories below one that is there."""
        futures: list[Future] = []
        for name, own in args.items():
            handler = self.items.for_save(name, own)
            place = os.path.join(os.fspath(getattr(directory, "path", directory)), name)
            storage.make_directory(place, parents=True)
            if hasattr(handler, "async_save"):
                begun = handler.async_save(storage.as_path(place), args=own)
                futures += (await begun if inspect.isawaitable(begun) else begun) or []
            else:
                handler.save(storage.as_path(place), args=own)
        return futures

    def restore(self, directory: Any, args: Any = None) -> Composite:
        """Restores items."""
        return self.items.restore(os.fspath(directory), args)

    def metadata(self, directory: Any) -> StepMetadata:
        """What is known of the items."""
        return self.items.metadata(os.fspath(directory))

    def finalize(self, directory: Any) -> None:
        """Has handlers of items end them."""

    def close(self) -> None:
        """Closes the handlers of items."""
        self.items.close()

    @classmethod
    def typestr(cls) -> str:
        """See `CheckpointHandler`."""
        return f"{_ROOTS}.composite_checkpoint_handler.CompositeCheckpointHandler"


def _register() -> None:
    for handler, save, restore in (
        (StandardCheckpointHandler, args_lib.StandardSave, args_lib.StandardRestore),
        (PyTreeCheckpointHandler, args_lib.PyTreeSave, args_lib.PyTreeRestore),
        (JsonCheckpointHandler, args_lib.JsonSave, args_lib.JsonRestore),
        (ProtoCheckpointHandler, args_lib.ProtoSave, args_lib.ProtoRestore),
        (ArrayCheckpointHandler, args_lib.ArraySave, args_lib.ArrayRestore),
        (JaxRandomKeyCheckpointHandler, args_lib.JaxRandomKeySave, args_lib.JaxRandomKeyRestore),
        (NumpyRandomKeyCheckpointHandler, args_lib.NumpyRandomKeySave, args_lib.NumpyRandomKeyRestore),
    ):
        register_with_handler(handler, for_save=True)(save)
        register_with_handler(handler, for_restore=True)(restore)
    register_with_handler(CompositeCheckpointHandler, for_save=True, for_restore=True)(Composite)


_register()
