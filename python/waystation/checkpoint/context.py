"""`Context`: the mutable front of the options, in effect inside a `with` block.

Entering freezes a copy of the options; every call in the block (and in tasks started from it, since
a context variable carries it) is given that copy. Threads started by hand do not inherit it.
"""

from __future__ import annotations

import contextvars
from types import TracebackType
from typing import Self

from waystation._errors import InvalidInput
from waystation._options import (
    ArrayOptions,
    EngineOptions,
    FileOptions,
    MemoryOptions,
    MultiprocessingOptions,
    Options,
)

_DEFAULTS = Options().frozen()
_current: contextvars.ContextVar[Options] = contextvars.ContextVar("waystation_options", default=_DEFAULTS)


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
        context: Start from a copy of this context's options; else from the options in effect.
    """

    def __init__(self, context: Context | None = None) -> None:
        self._options: Options = (context._options if context is not None else _current.get()).thawed()
        self._tokens: list[contextvars.Token[Options]] = []

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
    def engine(self) -> EngineOptions:
        """Overrides of the engine's own choices."""
        return self._options.engine

    @property
    def multiprocessing(self) -> MultiprocessingOptions:
        """Options of programs of several processes."""
        return self._options.multiprocessing

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_"):
            raise InvalidInput(f"'{name}' is a group of options or unknown; set an option inside a group")
        object.__setattr__(self, name, value)

    def __enter__(self) -> Self:
        self._tokens.append(_current.set(self._options.frozen()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _current.reset(self._tokens.pop())


def current_options() -> Options:
    """The frozen options in effect here."""
    return _current.get()
