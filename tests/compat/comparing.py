"""What two libraries do with the same call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def outcome(function: Callable[[], Any]) -> Any:
    """What a function returns, or the error that it raises."""
    try:
        return function()
    except Exception as error:
        return error
