"""The handler of states: trees of arrays, numbers and strings.

A save or load takes over what resolves to it: the layout then writes all states together, in files that other
programs can open. Its methods are for handlers that keep a tree among their own files: they write the same
files of the native layout into the directory of the handler. Invariant: an object that saves itself is no
state, whatever it could be taken apart into.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from waystation._arguments import require_type
from waystation._errors import Unsupported, WaystationError
from waystation.checkpoint import nested_state, prepare, wanted
from waystation.checkpoint.context import Context
from waystation.checkpoint.handlers.types import PathAwaitingCreation, StatefulCheckpointable
from waystation.frameworks import registry
from waystation.frameworks.described import is_described
from waystation.tree import flatten


class PyTreeHandler:
    """Handles states.

    Args:
        context: The options with which its methods save and load; None for those in effect when they are
            called. A handler that a save or load takes over has the options of that.
        array_metadata_validator: Accepted for compatibility with Orbax, and without effect: every load
            verifies what it reads.
        leaf_handler_registry: Must be None; `register_node` and the codecs of frameworks handle leaves.
        partial_save_mode: Must be False; `waystation.partial` saves a state in parts.

    Raises:
        Unsupported: An argument has a value that cannot be honoured.
    """

    def __init__(
        self,
        *,
        context: Context | None = None,
        array_metadata_validator: object = None,
        leaf_handler_registry: None = None,
        partial_save_mode: bool = False,
    ) -> None:
        require_type("context", context, (Context, type(None)), "a Context, or None")
        if leaf_handler_registry is not None:
            raise Unsupported("frameworks handle leaves, so leaf_handler_registry must be None")
        if partial_save_mode:
            raise Unsupported("partial_save_mode must be False; waystation.partial saves a state in parts")
        self._context = context

    def _options(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._context is None else self._context

    async def save(self, directory: PathAwaitingCreation, checkpointable: Any) -> Awaitable[None]:
        """Makes the state safe from later changes; what it returns writes it."""
        with self._options():
            saving = nested_state.NestedSaving(str(directory.path))
            saving.prepare(checkpointable)

        async def write() -> None:
            await directory.await_creation()
            await asyncio.to_thread(saving.finish)

        return write()

    async def load(self, directory: Path, abstract_checkpointable: Any = None) -> Awaitable[Any]:
        """Loads a state that `save` has put there."""

        async def load() -> Any:
            with self._options():
                return nested_state.load(str(directory), abstract_checkpointable)

        return load()

    async def metadata(self, directory: Path) -> Any:
        """The abstract state of what `save` has put there."""
        with self._options():
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
