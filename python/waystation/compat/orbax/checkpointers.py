"""Checkpointers: save one item, or several, as a checkpoint at a path, and restore it.

A checkpoint of one item without a name is that item in the directory of the checkpoint itself, as Orbax has
it. Saves commit by a rename, whether they run in the background or not.
"""

from __future__ import annotations

import abc
import os
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from waystation._errors import Conflict, InvalidInput
from waystation.checkpoint.context import Context
from waystation.checkpoint.handlers.choice import STATE
from waystation.checkpoint.paths import is_absent, locate
from waystation.checkpoint.save import check_names, write, write_async
from waystation.compat.orbax import _items
from waystation.compat.orbax import args as args_lib
from waystation.compat.orbax.handlers import (
    CompositeCheckpointHandler,
    PyTreeCheckpointHandler,
    StandardCheckpointHandler,
)
from waystation.compat.orbax.metadata import StepMetadata
from waystation.compat.orbax.options import (
    AsyncOptions,
    AtomicityOptions,
    FileOptions,
    MultiprocessingOptions,
    apply_async,
    apply_files,
    apply_multiprocessing,
    context_with,
)
from waystation.transfers.handle import AsyncResponse

__all__ = [
    "AbstractCheckpointer",
    "AsyncCheckpointer",
    "Checkpointer",
    "PyTreeCheckpointer",
    "StandardCheckpointer",
]

PathLike = str | os.PathLike[str]


class AbstractCheckpointer(abc.ABC):
    """Saves and restores checkpoints at paths."""

    @abc.abstractmethod
    def save(self, directory: PathLike, *args: Any, **kwargs: Any) -> None:
        """Saves a checkpoint."""

    @abc.abstractmethod
    def restore(self, directory: PathLike, *args: Any, **kwargs: Any) -> Any:
        """Restores it."""

    def structure(self, directory: PathLike) -> Any:
        """Nothing; `metadata` says more."""
        return None

    @abc.abstractmethod
    def metadata(self, directory: PathLike) -> Any:
        """What is known of a checkpoint."""

    @abc.abstractmethod
    def close(self) -> None:
        """Lets go of everything."""


class Checkpointer(AbstractCheckpointer):
    """Saves an item by its handler, and waits for that.

    Args:
        handler: The handler of the item, or a `CompositeCheckpointHandler` of several.
        multiprocessing_options: The processes that take part.
        file_options: Files.
        atomicity_options: How a checkpoint becomes visible.
        checkpoint_metadata_store: Has no effect.
        temporary_path_class: Refused but for None.
    """

    def __init__(
        self,
        handler: Any,
        *,
        multiprocessing_options: MultiprocessingOptions | None = None,
        file_options: FileOptions | None = None,
        atomicity_options: AtomicityOptions | None = None,
        checkpoint_metadata_store: Any = None,
        temporary_path_class: Any = None,
    ) -> None:
        self._handler = handler
        self._multiprocessing = multiprocessing_options
        self._files = file_options
        self._atomicity = atomicity_options
        self._async_options: AsyncOptions | None = None
        apply_files(file_options, atomicity_options, temporary_path_class, Context())

    @property
    def handler(self) -> Any:
        """The handler."""
        return self._handler

    def _changes(self, context: Context) -> None:
        apply_multiprocessing(self._multiprocessing, context)
        apply_files(self._files, self._atomicity, None, context)
        apply_async(self._async_options, context)

    def save(
        self,
        directory: PathLike,
        *args: Any,
        force: bool = False,
        custom_metadata: dict[str, Any] | None = None,
        save_context: Any = None,
        **kwargs: Any,
    ) -> None:
        """Saves a checkpoint.

        Args:
            directory: Its path.
            args: What the handler saves, in older programs: the arguments of its class.
            force: Replace a checkpoint that is there. It stays whole until the new one is committed.
            custom_metadata: JSON values to keep with it.
            save_context: Has no effect.
            kwargs: `args`, the arguments of the handler; or more of those of its class.

        Raises:
            ValueError: There is one, and `force` is False; or the handler cannot save that.
        """
        self._save(write, directory, args, force, custom_metadata, kwargs)

    def _save(
        self,
        act: Callable[..., Any],
        directory: PathLike,
        args: tuple[Any, ...],
        force: bool,
        custom_metadata: dict[str, Any] | None,
        kwargs: Mapping[str, Any],
    ) -> Any:
        target = locate(directory)
        own = self._arguments(args, kwargs, for_save=True)
        if not force and not is_absent(target):
            raise Conflict(f"'{target}' exists already; give force=True to replace it", path=target)
        if isinstance(self._handler, CompositeCheckpointHandler):
            check_names(list(own))
            items = {name: (self._handler.items.for_save(name, value), value) for name, value in own.items()}
        else:
            items = {STATE: (self._handler, own)}
        saved = _items.saved(items)
        is_flat = not isinstance(self._handler, CompositeCheckpointHandler)
        with context_with(self._changes, *saved.changes):
            return act(target, saved.checkpointables, force, custom_metadata, is_flat=is_flat)

    def _arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, for_save: bool) -> Any:
        """The arguments of the handler, given as such or as those of their class."""
        if "args" in kwargs or (len(args) == 1 and args_lib.is_args(args[0]) and not kwargs):
            own = kwargs["args"] if "args" in kwargs else args[0]
            if own is not None:
                if not args_lib.is_args(own):
                    raise InvalidInput(
                        f"args must be arguments such as args.StandardSave, not a {type(own).__name__}"
                    )
                self._require(own)
                return own
            kwargs = {}
        if not args_lib.has_registered_args(self._handler):
            return _items.Plain(*args, **kwargs)
        kinds = args_lib.get_registered_args_cls(self._handler)
        return kinds[0 if for_save else 1](*args, **kwargs)

    def _require(self, own: Any) -> None:
        if args_lib.has_registered_args(self._handler):
            kinds = args_lib.get_registered_args_cls(self._handler)
            if not isinstance(own, kinds) and type(own) not in kinds:
                raise InvalidInput(
                    f"{type(self._handler).__name__} takes {' and '.join(kind.__name__ for kind in kinds)}, "
                    f"not {type(own).__name__}"
                )

    def restore(self, directory: PathLike, *args: Any, **kwargs: Any) -> Any:
        """Restores a checkpoint.

        Args:
            directory: Its path.
            args: What the handler restores, in older programs: the arguments of its class.
            kwargs: `args`, the arguments of the handler; or more of those of its class.

        Raises:
            FileNotFoundError: There is none.
            ValueError: It is not what is asked for.
        """
        self._before_restore()
        with context_with(self._changes):
            found = _items.Found.at(directory)
            own = self._arguments(args, kwargs, for_save=False)
            if isinstance(self._handler, CompositeCheckpointHandler):
                return self._handler.items.restore(found.path, own, found)
            return _items.restore_one(found, self._one(found), self._handler, own)

    def _one(self, found: _items.Found) -> str:
        """The one item of a checkpoint."""
        if len(found.items) != 1:
            raise InvalidInput(
                f"'{found.path}' has the items {', '.join(sorted(found.items))}, and this checkpointer is "
                "for one; use a CompositeCheckpointHandler"
            )
        return next(iter(found.items))

    def _before_restore(self) -> None:
        """What a save in the background has to do before."""

    def structure(self, directory: PathLike) -> Any:
        """Nothing; `metadata` says more."""

    def metadata(self, directory: PathLike) -> StepMetadata:
        """What is known of a checkpoint; of one that is not there nothing is."""
        with context_with(self._changes):
            try:
                found = _items.Found.at(directory)
            except FileNotFoundError:
                return StepMetadata()
            if isinstance(self._handler, CompositeCheckpointHandler):
                return self._handler.items.metadata(found.path)
            items = _items.Items(handlers=dict.fromkeys(found.items, self._handler))
            return found.step_metadata(items.metadata_of(found, self._one(found)))

    def close(self) -> None:
        """Closes the handler."""
        close = getattr(self._handler, "close", None)
        if callable(close):
            close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncCheckpointer(Checkpointer):
    """Saves in the background; one save at a time.

    Args:
        handler: The handler of the item.
        timeout_secs: As in `async_options`.
        async_options: Saves in the background.
        multiprocessing_options: The processes that take part.
        file_options: Files.
        atomicity_options: How a checkpoint becomes visible.
        checkpoint_metadata_store: Has no effect.
        temporary_path_class: Refused but for None.
    """

    def __init__(
        self,
        handler: Any,
        timeout_secs: int | None = None,
        *,
        async_options: AsyncOptions | None = None,
        multiprocessing_options: MultiprocessingOptions | None = None,
        file_options: FileOptions | None = None,
        atomicity_options: AtomicityOptions | None = None,
        checkpoint_metadata_store: Any = None,
        temporary_path_class: Any = None,
    ) -> None:
        super().__init__(
            handler,
            multiprocessing_options=multiprocessing_options,
            file_options=file_options,
            atomicity_options=atomicity_options,
            checkpoint_metadata_store=checkpoint_metadata_store,
            temporary_path_class=temporary_path_class,
        )
        options = async_options or AsyncOptions()
        if timeout_secs is not None:
            options = AsyncOptions(timeout_secs, options.barrier_sync_fn, options.post_finalization_callback)
        self._async_options = options
        apply_async(options, Context())
        self._lock = threading.Lock()
        self._response: AsyncResponse[None] | None = None

    def save(
        self,
        directory: PathLike,
        *args: Any,
        force: bool = False,
        custom_metadata: dict[str, Any] | None = None,
        save_context: Any = None,
        **kwargs: Any,
    ) -> None:
        """Saves a checkpoint in the background, once an earlier save has ended; takes what that of
        `Checkpointer` does. Arrays may change when it returns.

        Raises:
            ValueError: There is one, and `force` is False; or the handler cannot save that.
            WaystationError: What an earlier save has failed with.
        """
        self.wait_until_finished()
        response = self._save(write_async, directory, args, force, custom_metadata, kwargs)
        with self._lock:
            self._response = response

    def check_for_errors(self) -> None:
        """Raises what a save that has ended has failed with."""
        with self._lock:
            response = self._response
            if response is None or not response.done():
                return
            self._response = None
        response.result()

    def wait_until_finished(self) -> None:
        """Waits for the save in the background.

        Raises:
            WaystationError: What it has failed with.
        """
        with self._lock:
            response, self._response = self._response, None
        if response is not None:
            response.result()

    def cancel(self) -> None:
        """Stops the save in the background; nothing of it stays."""
        with self._lock:
            response, self._response = self._response, None
        if response is not None:
            response.cancel()
            response.exception()

    def _before_restore(self) -> None:
        self.wait_until_finished()

    def close(self) -> None:
        """Waits for the save in the background, and closes the handler."""
        self.wait_until_finished()
        super().close()


class StandardCheckpointer(AsyncCheckpointer):
    """Saves trees of arrays and numbers in the background, and restores them by abstract trees.

    Example:
        ```python
        with StandardCheckpointer() as checkpointer:
            checkpointer.save(path, state)
            checkpointer.wait_until_finished()
            state = checkpointer.restore(path, abstract_state)
        ```

    Args:
        async_options: Saves in the background.
        multiprocessing_options: The processes that take part.
        file_options: Files.
        atomicity_options: How a checkpoint becomes visible.
        checkpoint_metadata_store: Has no effect.
        temporary_path_class: Refused but for None.
        kwargs: What `StandardCheckpointHandler` takes.
    """

    def __init__(
        self,
        *,
        async_options: AsyncOptions | None = None,
        multiprocessing_options: MultiprocessingOptions | None = None,
        file_options: FileOptions | None = None,
        atomicity_options: AtomicityOptions | None = None,
        checkpoint_metadata_store: Any = None,
        temporary_path_class: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            StandardCheckpointHandler(multiprocessing_options=multiprocessing_options, **kwargs),
            async_options=async_options,
            multiprocessing_options=multiprocessing_options,
            file_options=file_options,
            atomicity_options=atomicity_options,
            checkpoint_metadata_store=checkpoint_metadata_store,
            temporary_path_class=temporary_path_class,
        )

    def save(  # type: ignore[override]
        self,
        directory: PathLike,
        state: Any,
        *,
        save_args: Any = None,
        force: bool = False,
        custom_metadata: dict[str, Any] | None = None,
    ) -> None:
        """Saves a tree in the background.

        Args:
            directory: The path of the checkpoint.
            state: The tree.
            save_args: The same tree with `SaveArgs` in the place of leaves.
            force: Replace a checkpoint that is there.
            custom_metadata: JSON values to keep with it.

        Raises:
            ValueError: There is one, and `force` is False; or the tree cannot be saved.
        """
        own = args_lib.StandardSave(state, save_args)
        super().save(directory, args=own, force=force, custom_metadata=custom_metadata)

    def restore(self, directory: PathLike, target: Any = None, *, strict: bool = True) -> Any:
        """Restores a tree.

        Args:
            directory: The path of the checkpoint.
            target: The abstract tree; None for what was saved.
            strict: Refuse arrays of another shape; else they are cut, or filled with zeros.

        Raises:
            FileNotFoundError: There is none.
            ValueError: It is not what is asked for.
        """
        return super().restore(directory, args=args_lib.StandardRestore(target, strict=strict))


class PyTreeCheckpointer(Checkpointer):
    """Saves trees and waits for that.

    Args:
        primary_host: The process that decides.
        use_ocdbt: Store arrays in a database; else in files.
        use_zarr3: In zarr of version 3; else 2.
        use_compression: Compressed.
    """

    def __init__(
        self,
        primary_host: int | None = 0,
        use_ocdbt: bool = True,
        use_zarr3: bool = False,
        use_compression: bool = True,
    ) -> None:
        options = MultiprocessingOptions(primary_host=primary_host)
        handler = PyTreeCheckpointHandler(
            use_ocdbt=use_ocdbt,
            use_zarr3=use_zarr3,
            use_compression=use_compression,
            multiprocessing_options=options,
        )
        super().__init__(handler, multiprocessing_options=options)
