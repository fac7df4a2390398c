"""Walks the public names of Orbax's v1 and says what of them is not the same in a module of ours.

A difference has a name of its own: `x.y` is missing, `x.f(p)` has no parameter `p` of that kind or place,
`x.f(p=)` has another default.
"""

from __future__ import annotations

import enum
import inspect
import types
from collections.abc import Iterator
from typing import Any

PACKAGE = "orbax.checkpoint.experimental.v1"
_NOTHING = inspect.Parameter.empty
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def differences(theirs: types.ModuleType, ours: Any, prefix: str = "") -> Iterator[str]:
    """The names of all differences, below a module."""
    for name, value in public(theirs):
        dotted = f"{prefix}{name}"
        if not hasattr(ours, name):
            yield dotted
        elif inspect.ismodule(value):
            yield from differences(value, getattr(ours, name), f"{dotted}.")
        else:
            yield from _of_value(value, getattr(ours, name), dotted)


def public(module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    """What a module offers; of a module of implementation that a public one offers, what is of Orbax."""
    is_front = "._src" not in module.__name__
    for name in sorted(dir(module)):
        value = getattr(module, name)
        if name.startswith("_") or isinstance(value, type(annotations)):
            continue
        if inspect.ismodule(value):
            if value.__name__.startswith(PACKAGE) and is_front:
                yield name, value
        elif is_front or str(getattr(value, "__module__", "")).startswith("orbax"):
            yield name, value


def _of_value(theirs: Any, ours: Any, dotted: str) -> Iterator[str]:
    if inspect.isclass(theirs):
        yield from _of_class(theirs, ours, dotted)
    elif inspect.isroutine(theirs):
        yield from _of_call(theirs, ours, dotted)


def _of_class(theirs: type, ours: Any, dotted: str) -> Iterator[str]:
    if not theirs.__module__.startswith("orbax"):
        return  # a class of another library under a name of Orbax's
    if not inspect.isclass(ours):
        yield dotted
        return
    if not getattr(theirs, "_is_protocol", False) and not issubclass(theirs, enum.Enum | BaseException):
        yield from _of_call(theirs, ours, dotted)
    for name in sorted(dir(theirs)):
        value = inspect.getattr_static(theirs, name)
        if name.startswith("_") or getattr(value, "__objclass__", None) is object:
            continue
        if isinstance(value, classmethod | staticmethod):
            value = value.__func__
        if not _has(ours, name):
            yield f"{dotted}.{name}"
        elif inspect.isclass(value):
            yield from _of_class(value, getattr(ours, name), f"{dotted}.{name}")
        elif inspect.isfunction(value):
            yield from _of_call(value, inspect.getattr_static(ours, name), f"{dotted}.{name}")


def _has(ours: type, name: str) -> bool:
    annotated = {known for base in ours.__mro__ for known in getattr(base, "__annotations__", {})}
    return hasattr(ours, name) or name in annotated or name in getattr(ours, "__dataclass_fields__", {})


def _of_call(theirs: Any, ours: Any, dotted: str) -> Iterator[str]:
    if isinstance(ours, classmethod | staticmethod):
        ours = ours.__func__
    if not callable(ours):
        yield dotted
        return
    wanted, given = (inspect.signature(function).parameters for function in (theirs, ours))
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in given.values())
    places = [name for name, parameter in given.items() if parameter.kind in _POSITIONAL]
    for place, parameter in enumerate(wanted.values()):
        if parameter.kind in _VARIADIC or parameter.name == "self":
            continue
        own = given.get(parameter.name)
        if own is None:
            if not takes_any:
                yield f"{dotted}({parameter.name})"
        elif parameter.kind in _POSITIONAL and places[place : place + 1] != [parameter.name]:
            yield f"{dotted}({parameter.name})"
        elif not same_default(parameter.default, own.default):
            yield f"{dotted}({parameter.name}=)"
    for parameter in given.values():
        is_demanded = parameter.default is _NOTHING and parameter.kind not in _VARIADIC
        if is_demanded and parameter.name not in wanted and parameter.name != "self":
            yield f"{dotted}({parameter.name})"


def same_default(theirs: Any, ours: Any) -> bool:
    """Whether two defaults mean the same."""
    if isinstance(theirs, enum.Enum) and isinstance(ours, enum.Enum):
        return theirs.value == ours.value
    if repr(theirs) == repr(ours) == "<factory>":  # groups of options, which are compared by themselves
        return True
    return theirs is ours or (type(theirs) is type(ours) and theirs == ours)
