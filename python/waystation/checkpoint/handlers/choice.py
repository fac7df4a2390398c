"""Who saves and loads a checkpointable: the layout by itself, or a handler that is called.

What resolves to `PyTreeHandler` is a state, and the layout takes it over: all states of a save are planned,
written and loaded together. Any other handler is called. Importing this registers the handlers that are there
from the start, in the order of Orbax, under the names of which its checkpoints remember theirs.
"""

from __future__ import annotations

from typing import Any

from waystation._errors import NoHandler
from waystation.checkpoint.handlers import registry as registries
from waystation.checkpoint.handlers import resolution
from waystation.checkpoint.handlers.pytree_handler import PyTreeHandler
from waystation.checkpoint.handlers.registry import CheckpointableHandlerRegistry
from waystation.checkpoint.handlers.simple import (
    JsonHandler,
    MetricsHandler,
    ProtoHandler,
    StatefulCheckpointableHandler,
)
from waystation.checkpoint.handlers.types import type_name
from waystation.tree import flatten

STATE = "state"
METRICS = "metrics"


def _names_in_orbax(module: str, name: str, *older: str) -> list[str]:
    """Names under which checkpoints of Orbax remember a type: of its first API and of its second."""
    newer = f"orbax.checkpoint.experimental.v1._src.handlers.{module}_handler.{name}Handler"
    pairs = zip(older[::2], older[1::2], strict=True)
    olders = [f"{part}_checkpoint_handler.{kind}CheckpointHandler" for part, kind in pairs]
    roots = ("orbax.checkpoint._src.handlers", "orbax.checkpoint.v0._src.handlers")
    return [newer, *(f"{root}.{old}" for root in roots for old in olders)]


def _register() -> None:
    shared = registries.global_registry()
    shared.add(ProtoHandler, secondary_typestrs=_names_in_orbax("proto", "Proto", "proto", "Proto"))
    shared.add(JsonHandler, secondary_typestrs=_names_in_orbax("json", "Json", "json", "Json"))
    shared.add(
        StatefulCheckpointableHandler,
        secondary_typestrs=_names_in_orbax("stateful_checkpointable", "StatefulCheckpointable"),
    )
    shared.add(
        MetricsHandler,
        checkpointable_name=METRICS,
        secondary_typestrs=_names_in_orbax("json", "Metrics"),
    )
    of_states = _names_in_orbax("pytree", "PyTree", "pytree", "PyTree", "standard", "Standard")
    shared.add(PyTreeHandler, secondary_typestrs=of_states)
    shared.add(PyTreeHandler, checkpointable_name=STATE)


_register()


def saver(
    registry: CheckpointableHandlerRegistry | None, name: str, checkpointable: Any, *, is_state: bool
) -> Any | None:
    """The handler that is called to save a checkpointable; None if it is a state.

    Args:
        registry: Of the context; None for the global one.
        name: Of the checkpointable.
        checkpointable: What is saved.
        is_state: Whether the caller says that it is one (`save`): then nobody asks whether it can be taken
            apart, which taking it apart tells best.

    Raises:
        NoHandler: No handler can, and it is no tree either.
    """
    if is_state and checkpointable is None:
        return None  # nothing, but a tree all the same
    known = registry if registry is not None else registries.global_registry()
    try:
        handler = resolution.for_save(
            known, name, checkpointable, trusted=PyTreeHandler if is_state else None
        )
    except NoHandler:
        # Of a tree with a leaf that cannot be saved, taking it apart tells best which.
        if flatten(checkpointable)[1].nodes[0].kind == "leaf":
            raise
        return None
    return None if type(handler) is PyTreeHandler else handler


def loader(
    registry: CheckpointableHandlerRegistry | None,
    name: str,
    abstract: Any,
    remembered: str | None,
    *,
    is_state: bool,
) -> Any | None:
    """The handler that is called to load a checkpointable; None if it is loaded as a state.

    Args:
        registry: Of the context; None for the global one.
        name: Of the checkpointable.
        abstract: What is asked for.
        remembered: What the checkpoint calls the type of the handler that saved it.
        is_state: Whether what is stored is a state: it is loaded as one if no handler is known for it, and
            states are not left out of the registry.

    Raises:
        NoHandler: None is known that could.
    """
    known = registry if registry is not None else registries.global_registry()
    try:
        handler = resolution.for_load(known, name, abstract, remembered)
    except NoHandler:
        if is_state and known.has(STATE):
            return None
        raise
    return None if type(handler) is PyTreeHandler else handler


# What a checkpoint that says nothing else remembers of a state.
STATE_HANDLER = type_name(PyTreeHandler)
