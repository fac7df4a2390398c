"""Checks of what callers give. They name the argument, which an error from deep inside would not."""

from __future__ import annotations

import numbers
from typing import Any

from waystation._errors import WrongType

INTEGER, NUMBER = numbers.Integral, numbers.Real  # NumPy's too


def require_type(name: str, value: object, types: type[Any] | tuple[type[Any], ...], wanted: str) -> None:
    """Refuses an argument of another type; no boolean is a number.

    Args:
        name: Of the argument.
        value: What was given.
        types: Of which it may be.
        wanted: These, for people.

    Raises:
        WrongType: It is of none of them.
    """
    if not isinstance(value, types) or isinstance(value, bool):
        raise WrongType(f"{name} must be {wanted}, not {value!r:.60}")


def require_boolean(name: str, value: object) -> None:
    """Refuses what is taken for True or False, and is neither.

    Raises:
        WrongType: It is something else.
    """
    if not isinstance(value, bool):
        raise WrongType(f"{name} must be True or False, not {value!r:.60}")


def require_boolean_or_none(name: str, value: object) -> None:
    """Refuses what is taken for True or False, and is neither; None leaves the choice to Waystation.

    Raises:
        WrongType: It is something else.
    """
    if value is not None and not isinstance(value, bool):
        raise WrongType(f"{name} must be True, False or None, not {value!r:.60}")


def require_function(name: str, value: object) -> None:
    """Refuses an argument that cannot be called.

    Raises:
        WrongType: It cannot.
    """
    if not callable(value):
        raise WrongType(f"{name} must be a function, not {value!r:.60}")
