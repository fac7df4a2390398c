"""How methods of actors answer: with a value, or with an error that arrives as it was raised.

Ray gives an exception of an actor a class of its own making. So the methods return their errors instead, and
who has called raises them: of the same class, with the same context, and the traceback of the other process
as a note.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

# Ray passes classes by name only if the module that they say they are of has been imported.
from waystation.errors import Internal, WaystationError

T = TypeVar("T")
P = ParamSpec("P")

_MOST_CHARACTERS = 20_000  # of a traceback; its end says most


@dataclass(frozen=True, slots=True)
class Value(Generic[T]):
    """The method has returned this."""

    value: T


@dataclass(frozen=True, slots=True)
class Failure:
    """The method has raised.

    Attributes:
        error: What.
        place: Whose method it was, for people.
        traceback: That of the process of the method.
    """

    error: WaystationError
    place: str
    traceback: str


def failure(error: Exception, place: str) -> Failure:
    """What stands for an error; those of other libraries arrive as Internal that names their type."""
    told: WaystationError = Internal(f"{place} raised {type(error).__name__}: {error}")
    if isinstance(error, WaystationError):
        told = error
    return Failure(told, place, "".join(traceback.format_exception(error))[-_MOST_CHARACTERS:])


def answering(
    method: Callable[P, Awaitable[T]],
) -> Callable[P, Awaitable[Value[T] | Failure]]:
    """Makes a coroutine of an actor, which has a `name`, answer."""

    @functools.wraps(method)
    async def answered(*arguments: P.args, **options: P.kwargs) -> Value[T] | Failure:
        try:
            return Value(await method(*arguments, **options))
        except Exception as error:
            return failure(error, str(getattr(arguments[0], "name", type(arguments[0]).__name__)))

    return answered


def unwrap(answer: Any) -> Any:
    """What a method has returned.

    Raises:
        WaystationError: What it has raised.
    """
    if isinstance(answer, Failure):
        answer.error.add_note(f"In {answer.place}:\n{answer.traceback.rstrip()}")
        raise answer.error
    return answer.value
