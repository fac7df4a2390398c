"""What a handler is: it saves, loads and describes checkpointables of some types, in files of its own.

Both directions have two phases. The coroutine `save` or `load` runs while the caller waits: there a handler
takes what may change afterwards. What it returns is awaited in the background. The protocols are structural,
and the same as those of Orbax, so that what was written for it is a handler here; nothing has to be imported
from this library to be one.
"""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

# What is saved, and what stands for it where it is to be loaded; named for readers of signatures.
Checkpointable = Any
AbstractCheckpointable = Any

_Saved = TypeVar("_Saved")
_Abstract = TypeVar("_Abstract")


@runtime_checkable
class PathAwaitingCreation(Protocol):
    """A directory that a save makes. Its path may be used at once, what is at the path after
    `await_creation`."""

    def __truediv__(self, other: Any) -> PathAwaitingCreation:
        """A path below it."""
        ...

    @property
    def path(self) -> Any:
        """The path."""
        ...

    async def await_creation(self) -> Any:
        """Waits until the directory is there; returns the path."""
        ...


@runtime_checkable
class StatefulCheckpointable(Protocol):
    """An object that saves and loads itself, such as an iterator over a data set."""

    async def save(self, directory: PathAwaitingCreation) -> Awaitable[None]:
        """Takes what is to be saved; what it returns writes that into the directory, in the background."""
        ...

    async def load(self, directory: Path) -> Awaitable[None]:
        """Begins to load; what it returns changes the object into what was saved in the directory."""
        ...


class CheckpointableHandler(Protocol[_Saved, _Abstract]):
    """Saves, loads and describes checkpointables of some types. Handlers are made without arguments.

    Example:
        ```python
        class CounterHandler:
            async def save(self, directory, counter):
                value = counter.value  # now: it may count on while the rest is written

                async def write():
                    path = await directory.await_creation()
                    (path / "value.txt").write_text(str(value))

                return write()

            async def load(self, directory, abstract=None):
                async def read():
                    return Counter(int((directory / "value.txt").read_text()))

                return read()

            async def metadata(self, directory):
                return None

            def is_handleable(self, checkpointable):
                return isinstance(checkpointable, Counter)

            def is_abstract_handleable(self, abstract):
                return None
        ```
    """

    async def save(self, directory: PathAwaitingCreation, checkpointable: _Saved) -> Awaitable[None]:
        """Takes what is to be saved while the caller waits; what it returns writes it, in the background.

        In a program of several processes every process calls it with the same directory; if the checkpoint
        goes to an object store, each with a temporary one of its own. Which process writes what is up to the
        handler; two of them must not write the same file.

        Args:
            directory: Where the files go; wait for it before touching it.
            checkpointable: What is saved.
        """
        ...

    async def load(
        self, directory: Path, abstract_checkpointable: _Abstract | None = None
    ) -> Awaitable[_Saved]:
        """Begins to load; what it returns gives what was loaded.

        Args:
            directory: Where the files are. They have been verified.
            abstract_checkpointable: What is wanted; None for what was saved, as it was.
        """
        ...

    async def metadata(self, directory: Path) -> _Abstract:
        """What is in the directory, as an abstract checkpointable; reads little."""
        ...

    def is_handleable(self, checkpointable: Any) -> bool:
        """Whether it can save this."""
        ...

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        """Whether it can load what this stands for; None leaves it to who saved. It is never asked about
        None, which stands for anything."""
        ...


def type_name(handler: type) -> str:
    """The name under which checkpoints remember a type of handlers."""
    return f"{handler.__module__}.{handler.__qualname__}"
