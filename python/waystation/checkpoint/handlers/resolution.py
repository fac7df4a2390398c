"""Which handler saves or loads a checkpointable.

To save: an object that saves itself (`StatefulCheckpointable`) goes to the last handler that can take it;
else a name goes to the handler that is bound to it; else the last registered handler that can is taken.

To load: an object that loads itself goes to the handler that the checkpoint remembers, if that can take it.
Then come, each if it can load what is asked for: the handler that is bound to the name, the one that the
checkpoint remembers, the last registered one that can. If none can, the one that is bound to the name has to.
What is asked for by None every handler can load. These are the rules of Orbax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from waystation._errors import HandlerFailed, InvalidInput, NoHandler
from waystation.checkpoint.handlers.registry import CheckpointableHandlerRegistry, Handler
from waystation.checkpoint.handlers.types import StatefulCheckpointable, type_name


def for_save(
    registry: CheckpointableHandlerRegistry,
    name: str,
    checkpointable: Any,
    *,
    trusted: Handler | None = None,
) -> Any:
    """The handler that saves a checkpointable.

    Args:
        registry: Where to look.
        name: Of the checkpointable.
        checkpointable: What is saved.
        trusted: A type that is taken in its turn without being asked whether it can.

    Raises:
        InvalidInput: It is None.
        NoHandler: No handler can.
    """
    if checkpointable is None:
        raise InvalidInput(f"checkpointable '{name}' is None, which nothing saves; leave it out")
    is_stateful = isinstance(checkpointable, StatefulCheckpointable)
    if registry.has(name) and not is_stateful:
        return _made(registry.get(name), name)
    last = _last_capable(
        registry,
        name,
        lambda handler: type(handler) is trusted or handler.is_handleable(checkpointable),
    )
    if last is not None:
        return last
    if registry.has(name):
        return _made(registry.get(name), name)
    kind = type(checkpointable)
    raise NoHandler(
        f"no handler can save checkpointable '{name}', a {kind.__module__}.{kind.__qualname__}: register one "
        f"(waystation.handlers.register_handler) whose is_handleable says so; registered: {_shown(registry)}"
    )


def for_load(
    registry: CheckpointableHandlerRegistry, name: str, abstract: Any, remembered: str | None
) -> Any:
    """The handler that loads a checkpointable.

    Args:
        registry: Where to look.
        name: Of the checkpointable.
        abstract: What is asked for; None for anything.
        remembered: What the checkpoint calls the type that saved it; None if it does not say.

    Raises:
        NoHandler: None is known that could.
    """
    bound = _made(registry.get(name), name) if registry.has(name) else None
    saver = _remembered(registry, name, remembered)
    if (
        saver is not None
        and isinstance(abstract, StatefulCheckpointable)
        and _can_load(saver, name, abstract)
    ):
        return saver
    for handler in (bound, saver):
        if handler is not None and (abstract is None or _can_load(handler, name, abstract)):
            return handler
    if abstract is not None:
        last = _last_capable(registry, name, lambda handler: handler.is_abstract_handleable(abstract))
        if last is not None:
            return last
    if bound is not None:
        return bound
    wanted = "" if abstract is None else f" as a {type(abstract).__module__}.{type(abstract).__qualname__}"
    raise NoHandler(
        f"no handler can load checkpointable '{name}'{wanted}: it was saved by "
        f"{remembered or 'an unknown one'}; register that (waystation.handlers.register_handler). "
        f"Registered: {_shown(registry)}"
    )


def _remembered(registry: CheckpointableHandlerRegistry, name: str, remembered: str | None) -> Any:
    if remembered is None:
        return None
    for handler_type, _ in reversed(registry.get_all_entries()):
        if remembered == type_name(handler_type) or remembered in registry.get_secondary_typestrs(
            handler_type
        ):
            return _made(handler_type, name)
    return None


def _can_load(handler: Any, name: str, abstract: Any) -> bool:
    return _asked(handler, name, lambda asked: asked.is_abstract_handleable(abstract))


def _last_capable(
    registry: CheckpointableHandlerRegistry, name: str, can: Callable[[Any], bool | None]
) -> Any | None:
    """The last registered handler, of those bound to no name, that can."""
    for handler_type, bound_to in reversed(registry.get_all_entries()):
        if bound_to is None:
            handler = _made(handler_type, name)
            if _asked(handler, name, can):
                return handler
    return None


def _asked(handler: Any, name: str, can: Callable[[Any], bool | None]) -> bool:
    try:
        return bool(can(handler))
    except Exception as error:
        raise HandlerFailed(
            f"{type_name(type(handler))} raised {type(error).__name__} when it was asked whether it handles "
            f"checkpointable '{name}': {error}",
            checkpointable=name,
        ) from error


def _made(handler_type: Handler, name: str) -> Any:
    try:
        return handler_type()
    except TypeError as error:
        raise InvalidInput(
            f"{type_name(handler_type)}, for checkpointable '{name}', cannot be made without arguments: "
            f"{error}",
            checkpointable=name,
        ) from error


def _shown(registry: CheckpointableHandlerRegistry) -> str:
    entries = registry.get_all_entries()
    return (
        ", ".join(handler.__name__ + (f" for '{name}'" if name else "") for handler, name in entries)
        or "none"
    )
