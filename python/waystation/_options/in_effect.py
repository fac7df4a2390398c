"""Which options are in effect here: the frozen ones of the innermost block of a context.

A context variable carries them, so tasks that are started in a block have them, and threads started by hand
do not.
"""

from __future__ import annotations

import contextvars
from typing import NamedTuple

from waystation._options import Options


class _InEffect(NamedTuple):
    options: Options
    before: _InEffect | None


_DEFAULTS = _InEffect(Options().frozen(), None)
_current: contextvars.ContextVar[_InEffect] = contextvars.ContextVar("waystation_options", default=_DEFAULTS)


def current_options() -> Options:
    """The frozen options in effect here."""
    return _current.get().options


def in_block() -> bool:
    """Whether the call comes from a block of a context, so that its options are in effect."""
    return _current.get() is not _DEFAULTS


def enter(options: Options) -> None:
    """Puts frozen options into effect."""
    _current.set(_InEffect(options, _current.get()))


def leave() -> None:
    """Puts those into effect that were before."""
    _current.set(_current.get().before or _DEFAULTS)
