"""The error class of the safetensors package, and ours under it.

A program written for that package catches `SafetensorError`, or a built-in such as `FileNotFoundError`. What
is raised here is caught by both, and by the classes of `waystation.errors`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from waystation._errors import InvalidInput, Unsupported, WaystationError, WrongType


class SafetensorError(WaystationError):
    """Something is wrong with a file, or with what was asked of it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self).__mro__[2], self.message, self.context)


class NotAnArray(WrongType, AttributeError):
    """Something is no array, where one belongs."""


class NotPositive(InvalidInput, OverflowError):
    """A number below 0, where none can be."""


class Directory(InvalidInput, IsADirectoryError):
    """A directory, where a file belongs."""


class SharedMemory(InvalidInput, RuntimeError):
    """Tensors share memory, and a file would hold it several times."""


class NoSuchDevice(InvalidInput, RuntimeError):
    """A device that is not here."""


class NoData(InvalidInput, NotImplementedError):
    """A tensor without data."""


class NoSuchDtype(Unsupported, KeyError):
    """A dtype that files cannot have."""

    def __str__(self) -> str:  # KeyError would show the representation of the message
        return WaystationError.__str__(self)


class NotLoaded(InvalidInput, RuntimeError):
    """A model could not take what was loaded."""


_under_safetensor_error: dict[type[WaystationError], type[SafetensorError]] = {}


def _rebuilt(kind: type[WaystationError], message: str, context: dict[str, Any]) -> SafetensorError:
    cls = _under_safetensor_error.get(kind)
    if cls is None:
        members = {"__doc__": kind.__doc__, "__module__": __name__}
        cls = _under_safetensor_error[kind] = type(kind.__name__, (SafetensorError, kind), members)
    return cls(message, **context)


@contextlib.contextmanager
def translated(path: str | None = None) -> Iterator[None]:
    """Raises errors of Waystation as such that `SafetensorError` catches, too, and names the file in them."""
    try:
        yield
    except WaystationError as error:
        raise translation(error, path) from error.__cause__


def translation(error: WaystationError, path: str | None) -> WaystationError:
    """An error as one that `SafetensorError` catches, too, which names the file; raised from its cause."""
    error.where(path=path)
    if isinstance(error, SafetensorError):
        return error
    own = _rebuilt(type(error), error.message, error.context)
    return own.with_traceback(error.__traceback__)
