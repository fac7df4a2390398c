"""What is saved and restored, and how: the arguments of `save` and `restore`, and which handler takes them.

A class of arguments is registered with the class of its handler (`register_with_handler`); an object of it
then says by its type who handles it. `Composite` names several.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any, TypeVar

from waystation._errors import InvalidInput

__all__ = [
    "ArrayRestore",
    "ArraySave",
    "CheckpointArgs",
    "Composite",
    "JaxRandomKeyRestore",
    "JaxRandomKeySave",
    "JsonRestore",
    "JsonSave",
    "NumpyRandomKeyRestore",
    "NumpyRandomKeySave",
    "ProtoRestore",
    "ProtoSave",
    "PyTreeRestore",
    "PyTreeSave",
    "StandardRestore",
    "StandardSave",
    "get_registered_args_cls",
    "get_registered_handler_cls",
    "has_registered_args",
    "register_with_handler",
]

_Class = TypeVar("_Class", bound=type)


@dataclasses.dataclass
class CheckpointArgs:
    """What all arguments are: subclasses are registered with a handler."""


# ---- which handler takes what ------------------------------------------------------------------

_handlers: dict[type, type] = {}  # of classes of arguments
_for_save: dict[type, type] = {}  # of classes of handlers
_for_restore: dict[type, type] = {}


def register_with_handler(
    handler_cls: type, for_save: bool = False, for_restore: bool = False
) -> Callable[[_Class], _Class]:
    """A decorator that registers a class of arguments with the handler that takes them.

    Args:
        handler_cls: The class of the handler.
        for_save: They are arguments of a save.
        for_restore: They are arguments of a restore.

    Raises:
        ValueError: They are for neither, or the class is no `CheckpointArgs`.
    """
    if not for_save and not for_restore:
        raise InvalidInput("arguments are for a save, a restore or both: set for_save or for_restore")

    def register(cls: _Class) -> _Class:
        if not issubclass(cls, CheckpointArgs) and not _is_of_orbax(cls):
            raise InvalidInput(f"{cls.__name__} must be a subclass of CheckpointArgs")
        _handlers[cls] = handler_cls
        if for_save:
            _for_save[handler_cls] = cls
        if for_restore:
            _for_restore[handler_cls] = cls
        return cls

    return register


def get_registered_handler_cls(arg: Any) -> type:
    """The class of handlers that takes arguments of a class, or of the class of an object.

    What a library has registered with Orbax itself, where the program has imported that, is found as well.

    Raises:
        ValueError: None is registered.
    """
    cls = arg if isinstance(arg, type) else type(arg)
    if cls in _handlers:
        return _handlers[cls]
    genuine = _genuine()
    if genuine is not None and issubclass(cls, genuine.CheckpointArgs):
        found: type = genuine.get_registered_handler_cls(cls)
        return found
    raise InvalidInput(
        f"no handler is registered for {cls.__module__}.{cls.__qualname__}; use args.register_with_handler"
    )


def get_registered_args_cls(handler: Any) -> tuple[type, type]:
    """The classes of arguments of a handler, or of its class: those of saves, and of restores.

    Raises:
        ValueError: One is not registered.
    """
    cls = handler if isinstance(handler, type) else type(handler)
    genuine = _genuine()
    if cls not in _for_save and genuine is not None and genuine.has_registered_args(cls):
        pair: tuple[type, type] = genuine.get_registered_args_cls(cls)
        return pair
    for known, what in ((_for_save, "save"), (_for_restore, "restore")):
        if cls not in known:
            raise InvalidInput(
                f"no arguments to {what} are registered for {cls.__module__}.{cls.__qualname__}; use "
                "args.register_with_handler"
            )
    return _for_save[cls], _for_restore[cls]


def has_registered_args(handler: Any) -> bool:
    """Whether both classes of arguments of a handler are registered."""
    try:
        get_registered_args_cls(handler)
    except ValueError:
        return False
    return True


def handler_of_name(typestr: str) -> type | None:
    """The class of handlers that a checkpoint remembers by this name; None if the program has none."""
    for cls in {*_for_save, *_for_restore}:
        if name_of(cls) == typestr:
            return cls
    module, _, name = typestr.rpartition(".")
    found: object = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) and has_registered_args(found) else None


def name_of(handler: type) -> str:
    """The name under which checkpoints remember a class of handlers."""
    typestr = getattr(handler, "typestr", None)
    return str(typestr()) if callable(typestr) else f"{handler.__module__}.{handler.__qualname__}"


def is_args(value: object) -> bool:
    """Whether a value is an object of arguments."""
    return isinstance(value, CheckpointArgs) or _is_of_orbax(type(value))


def _is_of_orbax(cls: type) -> bool:
    genuine = _genuine()
    return genuine is not None and issubclass(cls, genuine.CheckpointArgs)


def _genuine() -> Any:
    """Orbax's own module of arguments, where the program has imported it and this one has not replaced it."""
    found = sys.modules.get("orbax.checkpoint.checkpoint_args")
    return None if found is None or getattr(found, "CheckpointArgs", None) is CheckpointArgs else found


# ---- the arguments -----------------------------------------------------------------------------


@dataclasses.dataclass
class StandardSave(CheckpointArgs):
    """Saves a tree of arrays and numbers.

    Attributes:
        item: The tree.
        save_args: The same tree with `SaveArgs` in the place of leaves; None for none.
        custom_metadata: JSON values to keep with the metadata of the tree.
    """

    item: Any
    save_args: Any = None
    custom_metadata: Any = None


@dataclasses.dataclass
class StandardRestore(CheckpointArgs):
    """Restores a tree.

    Attributes:
        item: The abstract tree: shapes, dtypes and shardings of arrays; None for what was saved.
        strict: Refuse arrays of another shape; else they are cut, or filled with zeros.
        support_layout: Restore arrays with the layout in memory that the abstract ones have.
        fallback_sharding: Of arrays that were saved on devices that are not here.
    """

    item: Any = None
    strict: bool = True
    support_layout: bool = False
    fallback_sharding: Any = None


@dataclasses.dataclass
class PyTreeSave(CheckpointArgs):
    """Saves a tree of arrays, numbers and strings.

    Attributes:
        item: The tree.
        save_args: The same tree with `SaveArgs` in the place of leaves; None for none.
        ocdbt_target_data_file_size: How large a data file may become, in bytes; None for Orbax's default.
        custom_metadata: JSON values to keep with the metadata of the tree.
    """

    item: Any
    save_args: Any = None
    ocdbt_target_data_file_size: int | None = None
    custom_metadata: Any = None


@dataclasses.dataclass
class PyTreeRestore(CheckpointArgs):
    """Restores a tree.

    Attributes:
        item: A tree whose containers are those of the result; None for those that were saved.
        restore_args: The same tree with `RestoreArgs` in the place of leaves; None restores as it was saved.
        transforms: From which saved leaves those of `item` are made, see `apply_transformations`.
        transforms_default_to_original: Whether leaves without a transformation are the saved ones.
        legacy_transform_fn: Refused.
        partial_restore: Whether the checkpoint may have more than `item`.
    """

    item: Any = None
    restore_args: Any = None
    transforms: Any = None
    transforms_default_to_original: bool = True
    legacy_transform_fn: Any = None
    partial_restore: bool = False


@dataclasses.dataclass
class JsonSave(CheckpointArgs):
    """Saves a JSON value.

    Attributes:
        item: The value.
    """

    item: Any


@dataclasses.dataclass
class JsonRestore(CheckpointArgs):
    """Restores a JSON value.

    Attributes:
        item: Has no effect.
    """

    item: Any = None


@dataclasses.dataclass
class ProtoSave(CheckpointArgs):
    """Saves a message of protocol buffers.

    Attributes:
        item: The message.
    """

    item: Any


@dataclasses.dataclass
class ProtoRestore(CheckpointArgs):
    """Restores a message of protocol buffers.

    Attributes:
        item: Its class.
    """

    item: Any


@dataclasses.dataclass
class ArraySave(CheckpointArgs):
    """Saves one array or number.

    Attributes:
        item: The array.
        save_args: How it is stored.
    """

    item: Any
    save_args: Any = None


@dataclasses.dataclass
class ArrayRestore(CheckpointArgs):
    """Restores one array or number.

    Attributes:
        item: Has no effect beyond its type.
        restore_args: How it is restored.
    """

    item: Any = None
    restore_args: Any = None


@dataclasses.dataclass
class JaxRandomKeySave(CheckpointArgs):
    """Saves a PRNG key of JAX, typed or not.

    Attributes:
        item: The key.
        save_args: How its data is stored.
    """

    item: Any
    save_args: Any = None


@dataclasses.dataclass
class JaxRandomKeyRestore(CheckpointArgs):
    """Restores a PRNG key of JAX.

    Attributes:
        restore_args: How its data is restored.
    """

    restore_args: Any = None


@dataclasses.dataclass
class NumpyRandomKeySave(CheckpointArgs):
    """Saves a state of NumPy's random numbers.

    Attributes:
        item: What `numpy.random.get_state` returns.
    """

    item: Any


@dataclasses.dataclass
class NumpyRandomKeyRestore(CheckpointArgs):
    """Restores a state of NumPy's random numbers."""


class NoItem(KeyError, AttributeError):
    """A `Composite` has no item of that name."""


class Composite(CheckpointArgs, Mapping[str, Any]):
    """Several items by name; also attributes of the object. It cannot be changed.

    Example:
        ```python
        args = Composite(state=StandardSave(state), config=JsonSave(config))
        args.state is args["state"]
        ```
    """

    __items__: Mapping[str, Any]

    def __init__(self, **items: Any) -> None:
        super().__setattr__("__items__", dict(items))

    def __setattr__(self, name: str, value: Any) -> None:
        raise InvalidInput("a Composite cannot be changed; make another one")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self.__items__[name]
        except KeyError:
            raise self._absent(name) from None

    def __getitem__(self, key: str) -> Any:
        if key not in self.__items__:
            raise self._absent(key)
        return self.__items__[key]

    def _absent(self, name: str) -> NoItem:
        return NoItem(f"no item is called '{name}'; there are: {', '.join(self)}")

    def __contains__(self, key: object) -> bool:
        return key in self.__items__

    def __iter__(self) -> Iterator[str]:
        return iter(self.__items__)

    def __len__(self) -> int:
        return len(self.__items__)

    def __or__(self, other: Mapping[str, Any]) -> Composite:
        return Composite(**{**self.__items__, **other})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Composite) and self.__items__ == other.__items__

    def __hash__(self) -> int:
        return hash(tuple(self.__items__))

    def __repr__(self) -> str:
        return f"Composite({dict(self.__items__)!r})"

    def __reduce__(self) -> Any:
        return _composite, (dict(self.__items__),)

    def get(self, key: str, default: Any = None) -> Any:
        """The item of a name, or something else if there is none."""
        return self.__items__.get(key, default)

    def keys(self) -> KeysView[str]:
        """The names."""
        return self.__items__.keys()

    def values(self) -> ValuesView[Any]:
        """The items."""
        return self.__items__.values()

    def items(self) -> ItemsView[str, Any]:
        """The names with the items."""
        return self.__items__.items()


def _composite(items: dict[str, Any]) -> Composite:
    return Composite(**items)
