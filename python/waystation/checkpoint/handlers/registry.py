"""Which types of handlers there are: a global registry, and local ones that a context is given.

Invariants: a type stands in a registry once for all names, and once for each name that it is bound to; the
order of registration stays, since the last one that fits is taken (`resolution` has the rules).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from waystation._errors import Conflict, InvalidInput, NoHandler, Unsupported

Handler = type[Any]
Entry = tuple[Handler, str | None]

_Type = TypeVar("_Type", bound=Handler)


class CheckpointableHandlerRegistry(Protocol):
    """Types of handlers, some of them bound to the name of a checkpointable."""

    def add(
        self,
        handler_type: Handler,
        *,
        checkpointable_name: str | None = None,
        secondary_typestrs: Sequence[str] | None = None,
    ) -> CheckpointableHandlerRegistry:
        """Adds a type of handlers.

        Args:
            handler_type: A class that can be made without arguments.
            checkpointable_name: Use it for the checkpointable of this name, and no other; None for any.
            secondary_typestrs: Other names of types under which checkpoints may remember it.

        Returns:
            The registry.

        Raises:
            Conflict: Something is bound to the name already; or, without a name, the type is there.
            InvalidInput: It is no class.
        """
        ...

    def get(self, checkpointable_name: str) -> Handler:
        """The type that is bound to a name.

        Raises:
            NoHandler: There is none.
        """
        ...

    def has(self, checkpointable_name: str) -> bool:
        """Whether a type is bound to the name."""
        ...

    def get_all_entries(self) -> Sequence[Entry]:
        """All types in the order of their registration, with the names that they are bound to."""
        ...

    def get_secondary_typestrs(self, handler_type: Handler) -> Sequence[str]:
        """Other names of a type under which checkpoints may remember it."""
        ...


@dataclass(frozen=True, slots=True)
class Remembered:
    """What a checkpoint in one of Orbax's layouts is to remember of a checkpointable.

    Attributes:
        handler: The name of the type of handlers that loads it.
        custom_metadata: JSON values that the metadata of a tree have.
    """

    handler: str
    custom_metadata: Any = None


@runtime_checkable
class Remembering(Protocol):
    """A registry that says what checkpoints in Orbax's layouts are to remember."""

    def remembered(self, checkpointable_name: str) -> Remembered | None:
        """What is to be remembered of a checkpointable; None for what its handler says."""
        ...


class Registry:
    """The registry that `local_registry` makes."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._secondary: dict[Handler, tuple[str, ...]] = {}

    def add(
        self,
        handler_type: Handler,
        *,
        checkpointable_name: str | None = None,
        secondary_typestrs: Sequence[str] | None = None,
    ) -> Registry:
        """Adds a type of handlers; see `CheckpointableHandlerRegistry.add`."""
        if not isinstance(handler_type, type):
            raise InvalidInput(f"a handler is registered by its class; {handler_type!r} is none")
        if checkpointable_name:
            if self.has(checkpointable_name):
                raise Conflict(
                    f"the name '{checkpointable_name}' is bound to {self.get(checkpointable_name).__name__} "
                    "in this registry already; use another registry"
                )
        elif any(handler_type is present for present, _ in self._entries):
            raise Conflict(f"{handler_type.__name__} is in this registry already")
        self._entries.append((handler_type, checkpointable_name or None))
        if secondary_typestrs is not None:
            self._secondary[handler_type] = tuple(secondary_typestrs)
        return self

    def get(self, checkpointable_name: str) -> Handler:
        """The type that is bound to a name."""
        for handler_type, name in self._entries:
            if name == checkpointable_name:
                return handler_type
        raise NoHandler(f"no handler is bound to the name '{checkpointable_name}' in this registry")

    def has(self, checkpointable_name: str) -> bool:
        """Whether a type is bound to the name."""
        return any(name == checkpointable_name for _, name in self._entries)

    def get_all_entries(self) -> list[Entry]:
        """All types in the order of their registration, with the names that they are bound to."""
        return list(self._entries)

    def get_secondary_typestrs(self, handler_type: Handler) -> tuple[str, ...]:
        """Other names of a type under which checkpoints may remember it."""
        return self._secondary.get(handler_type, ())

    def __repr__(self) -> str:
        shown = (handler.__name__ + (f" for '{name}'" if name else "") for handler, name in self._entries)
        return f"<registry of handlers: {', '.join(shown)}>"


class ReadOnlyRegistry:
    """A view of a registry that takes nothing new."""

    def __init__(self, registry: CheckpointableHandlerRegistry) -> None:
        self._registry = registry

    def add(
        self,
        handler_type: Handler,
        *,
        checkpointable_name: str | None = None,
        secondary_typestrs: Sequence[str] | None = None,
    ) -> CheckpointableHandlerRegistry:
        """Refuses."""
        raise Unsupported(
            f"{handler_type.__name__} cannot be added to a registry that is in use; add it to a local one, "
            "and give that to a context: context.checkpointables.registry = …"
        )

    def get(self, checkpointable_name: str) -> Handler:
        """The type that is bound to a name."""
        return self._registry.get(checkpointable_name)

    def has(self, checkpointable_name: str) -> bool:
        """Whether a type is bound to the name."""
        return self._registry.has(checkpointable_name)

    def get_all_entries(self) -> Sequence[Entry]:
        """All types in the order of their registration, with the names that they are bound to."""
        return self._registry.get_all_entries()

    def get_secondary_typestrs(self, handler_type: Handler) -> Sequence[str]:
        """Other names of a type under which checkpoints may remember it."""
        return self._registry.get_secondary_typestrs(handler_type)


_global = Registry()


def global_registry() -> CheckpointableHandlerRegistry:
    """The registry that holds where a context has no other: the handlers of this library, and those that
    the program has registered."""
    return _global


def local_registry(
    other_registry: CheckpointableHandlerRegistry | None = None, *, include_global_registry: bool = True
) -> CheckpointableHandlerRegistry:
    """A new registry, to be given to a context as `checkpointables.registry`.

    Args:
        other_registry: Its entries are taken over, after the global ones.
        include_global_registry: Take over what the global registry holds now.
    """
    registry = Registry()
    for source in (_global if include_global_registry else None, other_registry):
        for handler_type, name in source.get_all_entries() if source is not None else ():
            registry.add(
                handler_type,
                checkpointable_name=name,
                secondary_typestrs=source.get_secondary_typestrs(handler_type)
                if source is not None
                else None,
            )
    return registry


def register_handler(
    cls: _Type,
    *,
    checkpointable_name: str | None = None,
    secondary_typestrs: Sequence[str] | None = None,
) -> _Type:
    """Registers a type of handlers for the whole program; also a decorator of the class.

    Of several that can handle something, the one that was registered last is taken.

    Args:
        cls: A class that can be made without arguments; see `CheckpointableHandler`.
        checkpointable_name: Use it for the checkpointable of this name, and no other; None for any.
        secondary_typestrs: Other names of types under which checkpoints may remember it.

    Returns:
        The class.

    Raises:
        Conflict: It is registered already, or something else is bound to the name.
    """
    _global.add(cls, checkpointable_name=checkpointable_name, secondary_typestrs=secondary_typestrs)
    return cls
