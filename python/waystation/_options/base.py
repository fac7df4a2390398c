"""What a group of options is: values that are checked on assignment, can be frozen, and may have two names.

Groups are plain dataclasses of keywords. Invariants: unknown names and values out of range are errors at
the moment of assignment; a frozen group refuses every change, by either name; a second name is no value of
its own, so that both always say the same.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Generic, Self, TypeVar, overload

from waystation._errors import ContextInUse, InvalidInput

T = TypeVar("T")


class Alias(Generic[T]):
    """A second name of an option, of this group or (`group.name`) of a group in it.

    Written as the default of a field, so that the constructor takes the name as well. Given both names, the
    constructor heeds the one whose field comes later, unless that has its default.

    Attributes:
        target: The option that is meant.
        default: What the constructor takes as not given.
    """

    def __init__(self, target: str, default: T) -> None:
        self.target = target
        self.default = default

    @overload
    def __get__(self, group: None, owner: type) -> T: ...
    @overload
    def __get__(self, group: OptionGroup, owner: type) -> T: ...
    def __get__(self, group: OptionGroup | None, owner: type) -> T:
        if group is None:
            return self.default
        holder, name = self._place(group)
        return self.read(getattr(holder, name))

    def __set__(self, group: OptionGroup, value: T) -> None:
        if group.is_made or value != self.default:
            holder, name = self._place(group)
            setattr(holder, name, self.written(value))

    def _place(self, group: OptionGroup) -> tuple[Any, str]:
        *groups, name = self.target.split(".")
        return functools.reduce(getattr, groups, group), name

    def read(self, value: Any) -> T:
        """The value of the option under this name."""
        found: T = value
        return found

    def written(self, value: T) -> Any:
        """The value of the option for one that is given under this name."""
        return value


class Opposite(Alias[bool]):
    """A name that says the opposite of the option that is meant."""

    def read(self, value: Any) -> bool:
        """True where the option is False."""
        return not value

    def written(self, value: Any) -> Any:
        """False for True; what is neither is left to the check of the option."""
        return not value if isinstance(value, bool) else value


def without_numpy_scalars(value: Any) -> Any:
    """A value with Python's numbers in the place of NumPy's, which configurations compute."""
    kind = type(value)
    if kind in (tuple, list, set, frozenset):
        return kind(map(without_numpy_scalars, value))
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.bool_ | numpy.integer | numpy.floating):
        return value.item()
    return value


class OptionGroup:
    """Base of option groups."""

    _frozen: ClassVar[bool] = False
    _is_made: ClassVar[bool] = False
    _checks: ClassVar[dict[str, Callable[[Any], str | None]]] = {}
    _conversions: ClassVar[dict[str, Callable[[Any], Any]]] = {}

    def __post_init__(self) -> None:
        object.__setattr__(self, "_is_made", True)

    @property
    def is_made(self) -> bool:
        """Whether the constructor has ended."""
        return self._is_made

    def __setattr__(self, name: str, value: Any) -> None:
        if self._frozen:
            raise ContextInUse(
                f"option '{name}' cannot be changed while its context is in use; "
                "change a copy: Context(context)"
            )
        names = _names(type(self))
        if name in names.aliases:
            object.__setattr__(self, name, value)
            return
        if name not in names.options:
            known = sorted({*names.options, *names.aliases})
            raise InvalidInput(f"unknown option '{name}'; this group has: {', '.join(known)}")
        value = without_numpy_scalars(value)
        convert = self._conversions.get(name)
        if convert is not None:
            value = convert(value)
        check = self._checks.get(name)
        problem = check(value) if check else self._wrong_group(name, value)
        if problem:
            raise InvalidInput(f"option '{name}' must be {problem}, not {value!r}")
        object.__setattr__(self, name, value)

    def _wrong_group(self, name: str, value: Any) -> str | None:
        """A group can be replaced by one of its kind only."""
        present = self.__dict__.get(name)
        if isinstance(present, OptionGroup) and not isinstance(value, type(present)):
            return f"of the type {type(present).__name__}"
        return None

    def walk(self, prefix: str = "") -> Iterator[tuple[str, Any]]:
        """Names and values of all options, also those of groups in it (`group.name`)."""
        for name in sorted(_names(type(self)).options):
            value = getattr(self, name)
            if isinstance(value, OptionGroup):
                yield from value.walk(f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", value

    def frozen(self) -> Self:
        """A deep copy that refuses changes."""
        duplicate = copy.deepcopy(self)
        duplicate.freeze()
        return duplicate

    def thawed(self) -> Self:
        """A deep copy that can be changed."""
        return copy.deepcopy(self)

    def freeze(self) -> None:
        """Refuses changes from now on."""
        self._set_frozen(True)

    def thaw(self) -> None:
        """Allows changes again."""
        self._set_frozen(False)

    def _set_frozen(self, value: bool) -> None:
        for name in _names(type(self)).options:
            child = getattr(self, name)
            if isinstance(child, OptionGroup):
                child._set_frozen(value)
        object.__setattr__(self, "_frozen", value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Made without its constructor: every load copies options, and these have been checked.
        duplicate = object.__new__(type(self))
        for name in _names(type(self)).options:
            child = getattr(self, name)
            value = child.__deepcopy__(memo) if isinstance(child, OptionGroup) else child
            object.__setattr__(duplicate, name, value)
        duplicate.__post_init__()
        return duplicate


@dataclasses.dataclass(frozen=True, slots=True)
class _Names:
    options: frozenset[str]
    aliases: frozenset[str]


_known: dict[type, _Names] = {}


def _names(group: type) -> _Names:
    found = _known.get(group)
    if found is None:
        every = {entry.name for entry in dataclasses.fields(group)}
        aliases = {name for name in every if isinstance(vars(group).get(name), Alias)}
        found = _known[group] = _Names(frozenset(every - aliases), frozenset(aliases))
    return found
