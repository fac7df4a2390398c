"""The errors of Waystation: one shallow tree, named for what the caller does next.

Each class has a stable `kind`, shared with the Rust engine, and inherits the built-in that a program
written without Waystation would catch. Leaf classes only add such a built-in.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno as _errno
from collections.abc import Iterator
from typing import Any, ClassVar


class WaystationError(Exception):
    """Base of every error that Waystation raises on purpose.

    Attributes:
        kind: The stable name of what the caller can do about it.
        message: What failed and why, for people.
        context: Where it happened: `path`, `array`, `step`, `process`, `offset`, `errno`, …
    """

    kind: ClassVar[str] = "Internal"

    def __new__(cls, message: str = "", **context: Any) -> WaystationError:
        # OSError's own __new__ would read the arguments as (errno, text), and the class that is next in
        # line may not be the one whose memory layout counts.
        base: Any = OSError if OSError in cls.__mro__ else Exception
        created: WaystationError = base.__new__(cls, message)
        return created

    def __init__(self, message: str = "", **context: Any) -> None:
        super().__init__(message)
        self.message = message
        self.context: dict[str, Any] = {key: value for key, value in context.items() if value is not None}
        # What programs written for OSError look at; errors of other kinds just carry the two as well.
        code = self.context.get("errno")
        vars_of_os_error = {
            "errno": None if code is None else int(code),
            "filename": self.context.get("path"),
        }
        for name, value in vars_of_os_error.items():
            if value is not None:
                setattr(self, name, value)

    def __str__(self) -> str:
        shown = ", ".join(f"{key}: {value}" for key, value in self.context.items() if key != "errno")
        return f"{self.message} ({shown})" if shown else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.context))

    def where(self, **context: Any) -> WaystationError:
        """Adds context that only a caller further up knows; the first value of a key stays."""
        for key, value in context.items():
            if value is not None:
                self.context.setdefault(key, value)
        return self


def _rebuild(cls: type[WaystationError], message: str, context: dict[str, Any]) -> WaystationError:
    return cls(message, **context)


class InvalidInput(WaystationError, ValueError):
    """The call itself is wrong: mend it."""

    kind = "InvalidInput"


class NotFound(WaystationError, FileNotFoundError):
    """What was asked for is not there."""

    kind = "NotFound"


class Conflict(WaystationError, FileExistsError, ValueError):
    """Something is already there, or changed meanwhile."""

    kind = "Conflict"


class Unavailable(WaystationError, OSError):
    """A resource is lacking for now (space, memory, a device): retry when it is there."""

    kind = "Unavailable"


class Fenced(WaystationError, RuntimeError):
    """A newer writer has taken over: stop."""

    kind = "Fenced"


class Corrupt(WaystationError, ValueError):
    """Stored bytes are not what was written: use another copy."""

    kind = "Corrupt"


class Unsupported(WaystationError, TypeError, NotImplementedError):
    """Valid, but not something that this build or system can do."""

    kind = "Unsupported"


class UnsupportedLeaf(Unsupported, ValueError):
    """A leaf of a state is nothing that can be saved."""


class Cancelled(WaystationError, concurrent.futures.CancelledError):
    """The caller asked for it to stop."""

    kind = "Cancelled"


class Internal(WaystationError, RuntimeError):
    """A defect of Waystation: please report it."""

    kind = "Internal"


class ProcessFailed(Internal):
    """Another process failed with an error that is none of these: see its traceback, which is a note."""


class PermissionDenied(InvalidInput, PermissionError):
    """The operating system refuses access to a path."""


class ContextInUse(InvalidInput, RuntimeError):
    """Options were to be changed while their context is in use."""


class StructureMismatch(InvalidInput, KeyError, TypeError):
    """The checkpoint's tree and the abstract state differ; the message shows the difference."""

    def __str__(self) -> str:  # KeyError would show the representation of the message
        return WaystationError.__str__(self)


class InvalidLayoutError(InvalidInput):
    """What is at a path is no checkpoint of a layout that this version reads."""


class NotDirectory(InvalidLayoutError, NotADirectoryError):
    """A file is where a directory has to be: at a checkpoint's path, or above it."""


class UnusablePath(InvalidLayoutError, OSError):
    """The operating system takes no such path: it is empty, too long, or goes in a circle."""


class DeletionInProgressError(Conflict, RuntimeError):
    """What is to be read or written is being deleted."""


class DeletionRecoveryError(Conflict, RuntimeError):
    """A deletion that was interrupted cannot be completed."""


class StepAlreadyExistsError(Conflict):
    """The step has a checkpoint already; the context has `step` and `path`."""


class CommittedStepsLost(NotFound, ValueError):
    """Memory had committed steps, and none of the sequence can be loaded any more; the context has `step`."""


class MemoryTooSmall(InvalidInput):
    """An agent has too few slots for the versions that it is to keep; the context has `needed_bytes` and
    `found_bytes`."""


class WrongType(InvalidInput, TypeError):
    """An argument is of a type that it cannot be of."""


class LossyCast(InvalidInput):
    """A value would be lost by a cast, by more than rounding; the context has `array`."""


class CheckpointNotFound(NotFound, InvalidLayoutError):
    """There is no checkpoint at a path."""


class StepNotFoundError(CheckpointNotFound):
    """The step, or any step at all, has no checkpoint; the context has `step` and `path`."""


class CheckpointableNotFound(NotFound, InvalidLayoutError, KeyError):
    """The checkpoint has no checkpointable of that name."""

    def __str__(self) -> str:
        return WaystationError.__str__(self)


class TensorNotFound(NotFound, KeyError):
    """There is no tensor of that name."""

    def __str__(self) -> str:
        return WaystationError.__str__(self)


class NoHandler(InvalidInput, KeyError):
    """No handler is registered that can save or load a checkpointable."""

    def __str__(self) -> str:
        return WaystationError.__str__(self)


class NotState(NoHandler, InvalidLayoutError):
    """A checkpointable that is to be loaded as a state is something else."""


class HandlerFailed(InvalidInput, KeyError, RuntimeError):
    """The handler of a checkpointable raised something; that is the cause (`__cause__`)."""

    def __str__(self) -> str:
        return WaystationError.__str__(self)


class DiskFull(Unavailable):
    """The file system, or the object store, has no room left."""


class OutOfMemory(Unavailable, MemoryError):
    """The system has no memory for what is loaded or saved."""


def _with_subclasses(cls: type[WaystationError]) -> list[type[WaystationError]]:
    return [cls, *(found for child in cls.__subclasses__() for found in _with_subclasses(child))]


# Where users find them, and what a traceback should show.
for _class in _with_subclasses(WaystationError):
    _class.__module__ = "waystation.errors"

KINDS: dict[str, type[WaystationError]] = {
    cls.kind: cls
    for cls in (
        InvalidInput,
        NotFound,
        Conflict,
        Unavailable,
        Fenced,
        Corrupt,
        Unsupported,
        Cancelled,
        Internal,
    )
}

_BY_ERRNO: dict[int, type[WaystationError]] = {
    _errno.EACCES: PermissionDenied,
    _errno.EPERM: PermissionDenied,
    _errno.EROFS: PermissionDenied,
    _errno.ENOSPC: DiskFull,
    _errno.EDQUOT: DiskFull,
    _errno.ENOMEM: OutOfMemory,
}

# What is wrong with a path. The engine's kind decides first: in a stored file the same is damage.
_PATH_BY_ERRNO: dict[int, type[WaystationError]] = {
    _errno.ENOTDIR: NotDirectory,
    _errno.ENAMETOOLONG: UnusablePath,
    _errno.ELOOP: UnusablePath,
}


def from_native(kind: str, message: str, context: dict[str, Any]) -> WaystationError:
    """Makes the Python error of an engine error. Called by the native module."""
    code = int(context.get("errno") or 0)
    cls = _BY_ERRNO.get(code)
    if cls is None and kind == InvalidInput.kind:
        cls = _PATH_BY_ERRNO.get(code)
    return (cls or KINDS[kind])(message, **context)


_KIND_BY_ERRNO: dict[int, type[WaystationError]] = {
    _errno.ENOENT: NotFound,
    _errno.EEXIST: Conflict,
    _errno.ENOTEMPTY: Conflict,
    _errno.EISDIR: UnusablePath,
    _errno.EINVAL: UnusablePath,
    **_PATH_BY_ERRNO,
    **_BY_ERRNO,
}


def from_os_error(error: OSError, action: str, path: str) -> WaystationError:
    """Makes the typed error of a failed system call; `action` completes "could not …"."""
    cls = _KIND_BY_ERRNO.get(error.errno or 0, Unavailable)
    return cls(f"could not {action} '{path}': {error.strerror or error}", path=path, errno=error.errno)


@contextlib.contextmanager
def naming_memory(what: str, path: str, advice: str) -> Iterator[None]:
    """Adds to an error of lacking memory what that was for, and what to do."""
    try:
        yield
    except OutOfMemory as error:
        if "path" in error.context:  # it is named, be it by another process
            raise
        told = OutOfMemory(f"{error.message} {what} '{path}'; {advice}", **error.context, path=path)
        raise told.with_traceback(error.__traceback__) from error.__cause__
