"""What JAX and others have called at the end of an interpreter, as the server of `programs` imports them.

The processes of `multiprocessing` begin without it. A program that is to end as one of a fresh Python has to
register it again (`warm_python`): without JAX's shutdown, for one, process 0 does not wait for the others.
"""

import atexit
from collections.abc import Callable
from typing import Any

_registered: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
_register = atexit.register


def _noted(function: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[..., Any]:
    _registered.append((function, arguments, options))
    return _register(function, *arguments, **options)


atexit.register = _noted


def end() -> None:
    """Notes nothing more."""
    atexit.register = _register


def register_again() -> None:
    """Registers what was noted, in the same order."""
    for function, arguments, options in _registered:
        _register(function, *arguments, **options)
