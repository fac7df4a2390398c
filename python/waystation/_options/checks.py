"""What values an option takes: each check returns None, or what the value must be.

The sentences complete "option '…' must be …".
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

from waystation._errors import Unsupported

Check = Callable[[Any], "str | None"]


def is_int(value: Any) -> bool:
    """Whether it is an integer, and no boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether it is a real number, and no boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def positive(value: Any) -> str | None:
    """An integer from 1."""
    return None if is_int(value) and value > 0 else "a positive integer"


def positive_or_none(value: Any) -> str | None:
    """An integer from 1, or None."""
    return None if value is None or (is_int(value) and value > 0) else "a positive integer or None"


def bytes_or_none(value: Any) -> str | None:
    """An integer from 0, or None."""
    return None if value is None or (is_int(value) and value >= 0) else "a number of bytes or None"


def boolean(value: Any) -> str | None:
    """A boolean."""
    return None if isinstance(value, bool) else "True or False"


def boolean_or_none(value: Any) -> str | None:
    """A boolean, or None."""
    return None if value is None or isinstance(value, bool) else "True, False or None"


def dtype_name_or_none(value: Any) -> str | None:
    """The name of a dtype (what else stands for one has been converted), or None."""
    return None if value is None or isinstance(value, str) else "a dtype, its name, or None"


def path_or_none(value: Any) -> str | None:
    """A path as a string, or None."""
    return None if value is None or isinstance(value, str) else "a path as a string or None"


def axes_or_none(value: Any) -> str | None:
    """A tuple of integers, or None."""
    fits = value is None or (isinstance(value, tuple) and all(is_int(axis) for axis in value))
    return None if fits else "a tuple of axes or None"


def axis_or_none(value: Any) -> str | None:
    """The name or number of an axis, or None."""
    fits = value is None or isinstance(value, str) or is_int(value)
    return None if fits else "the name or the number of an axis, or None"


def callable_or_none(value: Any) -> str | None:
    """A function, or None."""
    return None if value is None or callable(value) else "a function or None"


def seconds(value: Any) -> str | None:
    """A positive number."""
    return None if is_number(value) and value > 0 else "a positive number of seconds"


def fraction_or_none(value: Any) -> str | None:
    """A number above 0, up to 1, or None."""
    return None if value is None or (is_number(value) and 0 < value <= 1) else "above 0, up to 1, or None"


def ratio_or_none(value: Any) -> str | None:
    """A number from 1, or None."""
    return None if value is None or (is_number(value) and value >= 1) else "a number from 1 or None"


def natural_or_none(value: Any) -> str | None:
    """An integer from 0, or None."""
    return None if value is None or (is_int(value) and value >= 0) else "an integer from 0 or None"


def processes_or_none(value: Any) -> str | None:
    """A set of process indices with one at least, or None."""
    fits = isinstance(value, set | frozenset) and value and all(is_int(one) and one >= 0 for one in value)
    return None if value is None or fits else "a set of process indices or None"


def text_or_none(value: Any) -> str | None:
    """A string, or None."""
    return None if value is None or isinstance(value, str) else "a string or None"


def member_of(kind: type[enum.Enum]) -> Check:
    """A member of an enumeration (its values have been converted)."""
    known = ", ".join(repr(member.value) for member in kind)

    def check(value: Any) -> str | None:
        return None if isinstance(value, kind) else f"a {kind.__name__} or one of {known}"

    return check


def only(*honoured: Any, because: str) -> Check:
    """One of the values that can be honoured; others raise Unsupported, which says why."""

    def check(value: Any) -> str | None:
        if not any(value is one for one in honoured):
            shown = " or ".join(map(repr, honoured))
            raise Unsupported(f"this option can be {shown}, not {value!r}: {because}")
        return None

    return check
