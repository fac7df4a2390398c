"""`Context`: the mutable front of the options, in effect inside a `with` block.

Entering freezes a copy of the options; every call in the block (and in tasks started from it, since
a context variable carries it) is given that copy. Threads started by hand do not inherit it. Until the block
ends the context itself refuses changes, which would not be seen in it.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Self

from waystation import _forks
from waystation._arguments import require_type
from waystation._errors import InvalidInput, WrongType
from waystation._options import (
    ArrayOptions,
    AsyncOptions,
    AtomicityOptions,
    CheckpointablesOptions,
    CheckpointLayout,
    DeletionOptions,
    EngineOptions,
    FileOptions,
    MemoryOptions,
    MultiprocessingOptions,
    ObjectStoreOptions,
    Options,
    PathwaysOptions,
    PyTreeOptions,
    SafetensorsOptions,
    in_effect,
)


class Context:
    """Options for the calls inside a `with` block.

    Example:
        ```python
        context = waystation.Context()
        context.array.loading.mmap = True
        with context:
            state = waystation.load(path)
        ```

    Args:
        context: Start from a copy of this context's options; else from the defaults, also inside the block of
            another context.
        pytree_options: Take this group instead, as with all that follow.
    """

    def __init__(
        self,
        context: Context | None = None,
        *,
        pytree_options: PyTreeOptions | None = None,
        array_options: ArrayOptions | None = None,
        async_options: AsyncOptions | None = None,
        multiprocessing_options: MultiprocessingOptions | None = None,
        file_options: FileOptions | None = None,
        checkpointables_options: CheckpointablesOptions | None = None,
        pathways_options: PathwaysOptions | None = None,
        checkpoint_layout: CheckpointLayout | str | None = None,
        deletion_options: DeletionOptions | None = None,
        memory_options: MemoryOptions | None = None,
        safetensors_options: SafetensorsOptions | None = None,
        atomicity_options: AtomicityOptions | None = None,
    ) -> None:
        _check_context(context)
        options: Options = Options() if context is None else context._options.thawed()
        groups: dict[str, Any] = {
            "pytree": pytree_options,
            "array": array_options,
            "asynchronous": async_options,
            "multiprocessing": multiprocessing_options,
            "file": file_options,
            "checkpointables": checkpointables_options,
            "pathways": pathways_options,
            "deletion": deletion_options,
            "memory": memory_options,
            "safetensors": safetensors_options,
            "atomicity": atomicity_options,
        }
        for name, group in groups.items():
            if group is not None:
                kind = type(getattr(options, name))
                argument = "async_options" if name == "asynchronous" else f"{name}_options"
                require_type(argument, group, kind, f"{kind.__name__} or None")
                setattr(options, name, group.thawed())
        if checkpoint_layout is not None:
            options.checkpoint_layout = checkpoint_layout  # type: ignore[assignment]  # it is converted
        self._options: Options = options
        self._lock = threading.Lock()
        _forks.watch(self)
        self._blocks = 0

    def __repr__(self) -> str:
        """The options that differ from the defaults, and whether they are in effect."""
        defaults = dict(Options().walk())
        parts = [f"{name}={value!r}" for name, value in self._options.walk() if value != defaults[name]]
        return f"<Context: {', '.join(parts) or 'the defaults'}{'; in use' if self._blocks else ''}>"

    def begin_in_child(self) -> None:
        """See `waystation._forks.Watched`."""
        self._lock = threading.Lock()

    @property
    def array(self) -> ArrayOptions:
        """Options of arrays: `array.saving`, `array.loading`."""
        return self._options.array

    @property
    def memory(self) -> MemoryOptions:
        """Options of memory."""
        return self._options.memory

    @property
    def file(self) -> FileOptions:
        """Options of files."""
        return self._options.file

    @property
    def storage(self) -> ObjectStoreOptions:
        """Options of object stores."""
        return self._options.storage

    @property
    def engine(self) -> EngineOptions:
        """Overrides of the engine's own choices."""
        return self._options.engine

    @property
    def multiprocessing(self) -> MultiprocessingOptions:
        """Options of programs of several processes."""
        return self._options.multiprocessing

    @property
    def asynchronous(self) -> AsyncOptions:
        """Options of what goes on in the background."""
        return self._options.asynchronous

    @property
    def pytree(self) -> PyTreeOptions:
        """Options of trees: `pytree.saving`, `pytree.loading`."""
        return self._options.pytree

    @property
    def checkpointables(self) -> CheckpointablesOptions:
        """Options of checkpointables."""
        return self._options.checkpointables

    @property
    def deletion(self) -> DeletionOptions:
        """Options of deletion."""
        return self._options.deletion

    @property
    def atomicity(self) -> AtomicityOptions:
        """Options of how a checkpoint becomes visible."""
        return self._options.atomicity

    @property
    def safetensors(self) -> SafetensorsOptions:
        """Options of safetensors files of others."""
        return self._options.safetensors

    @property
    def pathways(self) -> PathwaysOptions:
        """Options of programs of one controller."""
        return self._options.pathways

    @property
    def checkpoint_layout(self) -> CheckpointLayout:
        """What kind of files is meant. Takes a `CheckpointLayout` or its value."""
        return self._options.checkpoint_layout

    @checkpoint_layout.setter
    def checkpoint_layout(self, value: CheckpointLayout | str) -> None:
        self._options.checkpoint_layout = value  # type: ignore[assignment]  # it is converted

    # The groups by Orbax's older names.
    pytree_options = pytree
    array_options = array
    async_options = asynchronous
    multiprocessing_options = multiprocessing
    file_options = file
    checkpointables_options = checkpointables
    pathways_options = pathways
    deletion_options = deletion
    memory_options = memory
    safetensors_options = safetensors

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_") and name != "checkpoint_layout":
            raise InvalidInput(f"'{name}' is a group of options or unknown; set an option inside a group")
        object.__setattr__(self, name, value)

    def __enter__(self) -> Self:
        with self._lock:
            in_effect.enter(self._options.frozen())
            self._blocks += 1
            self._options.freeze()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            in_effect.leave()
            self._blocks -= 1
            if not self._blocks:
                self._options.thaw()


def _check_context(given: object) -> None:
    if given is None or isinstance(given, Context):
        return
    shown = f"the class {given.__name__}; call it" if isinstance(given, type) else f"{given!r:.60}"
    raise WrongType(f"a context must be a waystation.Context or None, not {shown}")


def copy_of_current() -> Context:
    """A context of its own with the options in effect here."""
    context = Context()
    context._options = in_effect.current_options().thawed()
    return context
