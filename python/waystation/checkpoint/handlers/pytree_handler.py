"""The handler of states: trees of arrays, numbers and strings.

A save or load takes over what resolves to it: the layout then writes all states together, in files that other
programs can open. Its methods are for handlers that keep a tree among their own files: they write the same
files of the native layout into the directory of the handler. Invariant: an object that saves itself is no
state, whatever it could be taken apart into.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from waystation._errors import WaystationError
from waystation.checkpoint import nested_state, prepare, wanted
from waystation.checkpoint.handlers.types import PathAwaitingCreation, StatefulCheckpointable
from waystation.frameworks import registry
from waystation.frameworks.described import is_described
from waystation.tree import flatten


class PyTreeHandler:
    """Handles states."""

    async def save(self, directory: PathAwaitingCreation, checkpointable: Any) -> Awaitable[None]:
        """Makes the state safe from later changes; what it returns writes it."""
        saving = nested_state.NestedSaving(str(directory.path))
        saving.prepare(checkpointable)

        async def write() -> None:
            await directory.await_creation()
            await asyncio.to_thread(saving.finish)

        return write()

    async def load(self, directory: Path, abstract_checkpointable: Any = None) -> Awaitable[Any]:
        """Loads a state that `save` has put there."""

        async def load() -> Any:
            return nested_state.load(str(directory), abstract_checkpointable)

        return load()

    async def metadata(self, directory: Path) -> Any:
        """The abstract state of what `save` has put there."""
        return nested_state.metadata(str(directory))

    def is_handleable(self, checkpointable: Any) -> bool:
        """Whether every leaf can be saved."""
        if isinstance(checkpointable, StatefulCheckpointable):
            return False
        try:
            return prepare.can_save(checkpointable)
        except WaystationError:
            return False

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        """Whether every leaf is an abstract one: of an array, a scalar, or the type of one."""
        if isinstance(abstract_checkpointable, StatefulCheckpointable):
            return False
        try:
            return all(map(_is_abstract, flatten(abstract_checkpointable, is_described)[0]))
        except WaystationError:
            return False


def _is_abstract(leaf: Any) -> bool:
    if leaf is ... or wanted.is_scalar(leaf) or is_described(leaf):
        return True
    return registry.codec_for(leaf) is not None
