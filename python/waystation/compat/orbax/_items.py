"""The items of a checkpoint: which handler takes each, and how all of them are saved and restored at once.

A tree whose handler is one of this package's own is a state of the core, which plans and writes all states
together. Any other item is *called*: the core gives its handler a directory. Invariant: once an item has a
handler, only arguments of that handler are taken for it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from waystation import storage
from waystation._errors import CheckpointNotFound, InvalidInput, InvalidLayoutError, WaystationError
from waystation._options.in_effect import current_options
from waystation.checkpoint import opening
from waystation.checkpoint.context import Context
from waystation.checkpoint.handlers.choice import METRICS, STATE
from waystation.checkpoint.handlers.pytree_handler import PyTreeHandler
from waystation.checkpoint.handlers.registry import Registry, Remembered
from waystation.checkpoint.handlers.simple import MetricsHandler
from waystation.checkpoint.load import load_checkpointables
from waystation.checkpoint.paths import locate
from waystation.checkpoint.sessions import open_session
from waystation.compat.orbax import _trees
from waystation.compat.orbax import args as args_lib
from waystation.compat.orbax.args import Composite
from waystation.compat.orbax.metadata import StepMetadata
from waystation.compat.orbax.options import TreeOptions, context_with
from waystation.layouts.orbax import checkpoint as orbax
from waystation.training import step_records

_JSON = "orbax.checkpoint._src.handlers.json_checkpoint_handler.JsonCheckpointHandler"


# ---- a handler of this interface, as the core calls it -----------------------------------------


class Plain(args_lib.CheckpointArgs):
    """What a handler without registered arguments takes, as older programs pass it.

    Attributes:
        args: In order.
        kwargs: By name.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs


def _called(method: Callable[..., Any], directory: Any, args: Any) -> Any:
    if isinstance(args, Plain):
        return method(directory, *args.args, **args.kwargs)
    return method(directory, args=args)


class ItemNotFound(InvalidLayoutError, KeyError):
    """A checkpoint has no item of that name.

    As with Orbax it is no FileNotFoundError: programs take that for a run that has not begun.
    """

    def __str__(self) -> str:
        return WaystationError.__str__(self)


@dataclasses.dataclass(frozen=True)
class Called:
    """An item that its handler saves or restores.

    Attributes:
        handler: The handler.
        args: Its arguments.
    """

    handler: Any
    args: Any


class CalledHandler:
    """Has the handlers of this interface save and restore."""

    async def save(self, directory: Any, checkpointable: Called) -> Awaitable[None]:
        """Has the handler take what may change; what this returns waits for its futures."""
        handler, args = checkpointable.handler, checkpointable.args
        path = await directory.await_creation()
        futures: Sequence[Any] = ()
        if callable(getattr(handler, "async_save", None)):
            begun = _called(handler.async_save, path, args)
            futures = (await begun if inspect.isawaitable(begun) else begun) or ()
        else:
            _called(handler.save, path, args)
        options = current_options()
        session = open_session(f"end of the item '{path}'", options)

        def finish() -> None:
            try:
                for future in futures:
                    future.result()
                session.barrier()
                if session.is_primary and callable(getattr(handler, "finalize", None)):
                    handler.finalize(path)
            finally:
                session.close()

        async def wait() -> None:
            await asyncio.to_thread(finish)

        return wait()

    async def load(self, directory: Path, abstract_checkpointable: Called | None = None) -> Awaitable[Any]:
        """Has the handler restore."""
        assert abstract_checkpointable is not None, "it is never asked for without"
        called = abstract_checkpointable
        found = _called(called.handler.restore, directory, called.args)

        async def restored() -> Any:
            return await found if inspect.isawaitable(found) else found

        return restored()

    async def metadata(self, directory: Path) -> None:
        """Nothing: it is asked for by this interface itself."""

    def is_handleable(self, checkpointable: Any) -> bool:
        """Whether it is an item of this interface."""
        return isinstance(checkpointable, Called)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        """Whether it is an item of this interface."""
        return isinstance(abstract_checkpointable, Called)


class ItemRegistry(Registry):
    """Handlers of the core for items, and what checkpoints are to remember of these.

    Args:
        remembered: That, by item.
    """

    def __init__(self, remembered: Mapping[str, Remembered] | None = None) -> None:
        super().__init__()
        self._remembered = dict(remembered or {})
        self.add(MetricsHandler, checkpointable_name=METRICS)
        self.add(PyTreeHandler)
        self.add(CalledHandler)

    def remembered(self, checkpointable_name: str) -> Remembered | None:
        """See `Remembering`."""
        if checkpointable_name == METRICS:
            return Remembered(_JSON)
        return self._remembered.get(checkpointable_name)


# ---- saving ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Saved:
    """Items, ready to be saved by the core.

    Attributes:
        checkpointables: What the core saves, by name.
        changes: The options to save it with.
    """

    checkpointables: dict[str, Any]
    changes: Sequence[Callable[[Context], None]]


def saved(items: Mapping[str, tuple[Any, Any]]) -> Saved:
    """What the core is to save of items, given with their handlers and arguments.

    Raises:
        ValueError: An item cannot be saved by its handler.
    """
    states: dict[str, tuple[Any, Any]] = {}
    checkpointables: dict[str, Any] = {}
    remembered: dict[str, Remembered] = {}
    chosen: TreeOptions | None = None
    changes: list[Callable[[Context], None]] = []
    for name, (handler, args) in items.items():
        custom = None
        own = _options_of(handler, args)
        if own is not None and (chosen is None or own == chosen):
            if chosen is None:
                changes.append(handler.changes)
                changes.append(own.apply)
            chosen = own
            states[name] = (handler.check(args), args.save_args)
            checkpointables[name] = states[name][0]
            custom = args.custom_metadata
        else:
            checkpointables[name] = Called(handler, args)
        remembered[name] = Remembered(args_lib.name_of(type(handler)), custom)
    if chosen is None:
        changes.append(TreeOptions().apply)
    options = _trees.storage_options(states)
    if options is not None:
        changes.append(options)
    changes.append(_path_class)
    changes.append(lambda context: _set_registry(context, ItemRegistry(remembered)))
    return Saved(checkpointables, changes)


def _options_of(handler: Any, args: Any) -> TreeOptions | None:
    """How a tree is stored that the core itself can save; None of everything else."""
    if not is_tree_handler(handler) or not hasattr(args, "save_args"):
        return None
    options: TreeOptions = handler.tree_options
    target = getattr(args, "ocdbt_target_data_file_size", None)
    return options if target is None else dataclasses.replace(options, target_file_bytes=target)


def is_tree_handler(handler: Any) -> bool:
    """Whether a handler is one whose trees the core saves, and no class of the program's own."""
    from waystation.compat.orbax.handlers import PyTreeCheckpointHandler, StandardCheckpointHandler

    return type(handler) in (PyTreeCheckpointHandler, StandardCheckpointHandler)


def _set_registry(context: Context, registry: Registry) -> None:
    context.checkpointables.registry = registry


def _path_class(context: Context) -> None:
    """Handlers that were written for Orbax may need its kind of path."""
    import sys

    epath = sys.modules.get("etils.epath")
    if epath is not None:
        context.file.path_class = epath.Path


# ---- which handler -----------------------------------------------------------------------------


class Items:
    """The items of one checkpointer or manager, with their handlers.

    Args:
        item_names: Names of items whose handlers follow from their arguments.
        handlers: Items with their handlers.
        registry: What says handlers instead; it may say some of all items.
    """

    def __init__(
        self,
        item_names: Iterable[str] = (),
        handlers: Mapping[str, Any] | None = None,
        registry: Any = None,
    ) -> None:
        self._names = list(item_names)
        self._handlers: dict[str, Any] = dict(handlers or {})
        self._registry = registry
        self._is_closed_set = bool(self._names or self._handlers)

    @property
    def known(self) -> list[str]:
        """The names that are known."""
        return list(dict.fromkeys([*self._names, *self._handlers]))

    def known_handler(self, name: str) -> Any:
        """The handler of an item, as far as that is known; None otherwise."""
        return self._handlers.get(name) or self._of_registry(name)

    def for_save(self, name: str, args: Any) -> Any:
        """The handler that saves an item.

        Raises:
            ValueError: There is none for such arguments.
        """
        if not args_lib.is_args(args):
            raise InvalidInput(
                f"item '{name}' must be saved by arguments such as args.StandardSave, not by {_kind(args)}"
            )
        return self._resolve(name, args, for_save=True)

    def _resolve(self, name: str, args: Any, *, for_save: bool) -> Any:
        if self._registry is not None:
            entries = self._registry.get_all_entries()
            for key in ((name, type(args)), (None, type(args))):
                if key in entries:
                    return self._remember(name, entries[key])
        known = self._handlers.get(name)
        if known is not None:
            self._require(name, known, args)
            return known
        if for_save and self._is_closed_set and name not in self._names:
            raise InvalidInput(f"no item is called '{name}'; there are: {', '.join(self.known)}")
        return self._remember(name, args_lib.get_registered_handler_cls(args)())

    def _remember(self, name: str, handler: Any) -> Any:
        return self._handlers.setdefault(name, handler)

    def _require(self, name: str, handler: Any, args: Any) -> None:
        if not args_lib.has_registered_args(handler):
            return
        kinds = args_lib.get_registered_args_cls(handler)
        if not isinstance(args, kinds) and type(args) not in kinds:
            raise InvalidInput(
                f"item '{name}' has the handler {type(handler).__name__}, which takes "
                f"{' and '.join(kind.__name__ for kind in kinds)}, not {type(args).__name__}"
            )

    def for_restore(self, name: str, args: Any, typestr: str | None) -> tuple[Any, Any] | None:
        """The handler that restores an item, with its arguments; None if no handler is known.

        Args:
            name: The item.
            args: What was given for it; None for what follows from its handler.
            typestr: What the checkpoint remembers of its handler.

        Raises:
            ValueError: There is none for such arguments.
        """
        if args is not None:
            if not args_lib.is_args(args):
                raise InvalidInput(
                    f"item '{name}' must be restored by arguments such as args.StandardRestore, not by "
                    f"{_kind(args)}"
                )
            return self._resolve(name, args, for_save=False), args
        handler = self.known_handler(name)
        if handler is None and typestr is not None:
            cls = args_lib.handler_of_name(typestr) or _of_layout(typestr)
            handler = None if cls is None else cls()
        if handler is None:
            return None
        if not args_lib.has_registered_args(handler):
            return handler, Plain()
        return handler, args_lib.get_registered_args_cls(handler)[1]()

    def _of_registry(self, name: str) -> Any:
        entries = {} if self._registry is None else self._registry.get_all_entries()
        return next((handler for (item, _), handler in entries.items() if item == name), None)

    # ---- of a checkpoint -----------------------------------------------------------------------

    def restore(self, path: str, args: Any, found: Found | None = None) -> Composite:
        """Restores items of a checkpoint.

        Args:
            path: The checkpoint.
            args: Arguments by item; None for all that can be.
            found: What is in the checkpoint, if that is known.

        Raises:
            FileNotFoundError: There is none.
            KeyError: It has no such item.
        """
        found = Found.at(path) if found is None else found
        if args is None or not args:
            wanted: dict[str, Any] = dict.fromkeys(sorted(found.items))
        else:
            wanted = dict(args.items())
        restored = {}
        for name, own in wanted.items():
            if name not in found.items:
                raise ItemNotFound(
                    f"checkpoint '{path}' has no item '{name}'; it has: {', '.join(sorted(found.items))}",
                    path=path,
                )
            pair = self.for_restore(name, own, found.items[name])
            if pair is None:
                if args is not None and args:
                    raise InvalidInput(
                        f"item '{name}' of '{path}' was saved by {found.items[name]}, which the program does "
                        "not have; give arguments for it"
                    )
                continue
            restored[name] = restore_one(found, name, *pair)
        if args is None and METRICS in found.handlers:
            restored[METRICS] = step_records.read(storage.as_path(found.path)).metrics
        return Composite(**restored)

    def metadata(self, path: str) -> StepMetadata:
        """What is known of a checkpoint and its items."""
        found = Found.at(path)
        described = {name: self.metadata_of(found, name) for name in sorted(found.items)}
        if METRICS in found.handlers:
            described[METRICS] = None
        return found.step_metadata(Composite(**described))

    def metadata_of(self, found: Found, name: str) -> Any:
        """What is known of an item; None if its handler says nothing, or there is none."""
        pair = self.for_restore(name, None, found.items[name])
        if pair is None:
            return None
        place = found.place_of(name)
        if is_tree_handler(pair[0]) and name in found.trees:
            return _trees.metadata(place, found.directory_of(name))
        try:
            return pair[0].metadata(storage.as_path(found.directory_of(name)))
        except NotImplementedError:
            return None

    def close(self) -> None:
        """Closes the handlers."""
        for handler in self._handlers.values():
            if callable(getattr(handler, "close", None)):
                handler.close()


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _of_layout(typestr: str) -> type | None:
    """The class of handlers of what the other interface, or another release, has saved."""
    from waystation.compat.orbax import handlers

    name = typestr.rpartition(".")[2]
    known: Any = {
        "PyTreeHandler": handlers.PyTreeCheckpointHandler,
        "JsonHandler": handlers.JsonCheckpointHandler,
        "MetricsHandler": handlers.JsonCheckpointHandler,
    }.get(name)
    if known is None and typestr.startswith("orbax."):
        known = getattr(handlers, name, None)
    return known if isinstance(known, type) else None


def restore_one(found: Found, name: str, handler: Any, args: Any) -> Any:
    """Restores one item of a checkpoint by its handler."""
    place = found.place_of(name)
    # A tree that its handler has written, as options of its own have it, is read by the handler, too.
    if is_tree_handler(handler) and name in found.trees:
        return _trees.restore(place, args, handler.changes)
    called = Called(handler, args)
    with context_with(_path_class, lambda context: _set_registry(context, ItemRegistry())):
        return load_checkpointables(place.path, {place.name: called})[place.name]


@dataclasses.dataclass(frozen=True)
class Found:
    """What is in a checkpoint.

    Attributes:
        path: The checkpoint.
        items: The names of the classes of handlers that have saved its items, None where that is not said.
        handlers: All that the checkpoint says of handlers, of metrics too.
        is_flat: Whether its one item lies in the directory of the checkpoint itself.
        is_native: Whether it is in Waystation's own layout.
        trees: The items that are trees which the core itself has saved, or could have.
        begun_ns: When its save began.
        committed_ns: When it was committed.
        custom_metadata: What was given to the save.
    """

    path: str
    items: Mapping[str, str | None]
    handlers: Mapping[str, str]
    is_flat: bool
    is_native: bool
    trees: frozenset[str]
    begun_ns: int | None
    committed_ns: int | None
    custom_metadata: dict[str, Any]

    @classmethod
    def at(cls, path: Any) -> Found:
        """What is in the checkpoint at a path.

        Raises:
            FileNotFoundError: There is none.
        """
        target = locate(path)
        try:
            layout = opening.recognise(target)
        except WaystationError as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise CheckpointNotFound(
                f"there is no checkpoint at '{target}': {error.message}", path=target
            ) from error
        if layout == "orbax":
            found = orbax.open_checkpoint(target)
            items = {name: item.handler for name, item in found.items.items() if name != METRICS}
            is_flat = any(item.directory == target for item in found.items.values())
            said = found.metadata
            handlers = dict(said.item_handlers) if isinstance(said.item_handlers, dict) else {}
            if isinstance(said.item_handlers, str):
                handlers = dict.fromkeys(items, said.item_handlers)
            return cls(
                target,
                items,
                handlers,
                is_flat,
                False,
                frozenset(name for name, item in found.items.items() if item.is_tree),
                said.init_timestamp_nsecs,
                said.commit_timestamp_nsecs,
                dict(said.custom_metadata),
            )
        opened = opening.open_checkpoint(target, None, current_options())
        items = {name: stored.handler for name, stored in opened.stored.items()}
        known = {name: handler for name, handler in items.items() if handler is not None}
        custom = dict(opened.custom_metadata or {})
        trees = frozenset(name for name, stored in opened.stored.items() if stored.state is not None)
        return cls(target, items, known, False, True, trees, opened.begun_ns, opened.committed_ns, custom)

    def place_of(self, name: str) -> _trees.Place:
        """Where an item is, for a load."""
        return _trees.Place(self.path, STATE if self.is_flat else name)

    def directory_of(self, name: str) -> str:
        """The directory of an item."""
        return self.path if self.is_flat else os.path.join(self.path, name)

    def step_metadata(self, item_metadata: Any) -> StepMetadata:
        """What is known of the checkpoint, with what is known of its items."""
        handlers: Any = dict(self.handlers)
        if self.is_flat:
            handlers = next(iter(handlers.values()), None)
        return StepMetadata(
            handlers,
            item_metadata,
            init_timestamp_nsecs=self.begun_ns,
            commit_timestamp_nsecs=self.committed_ns,
            custom_metadata=self.custom_metadata,
        )
