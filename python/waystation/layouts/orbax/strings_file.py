"""`_strings.json`: the leaves that are strings, by the JSON pointer that `/` and their name are.

A pointer goes into one object for each part of a name between slashes, and in it `~1` is a slash and `~0` a
tilde: so a leaf named `a/b` is the member `b` of the member `a`.
"""

from __future__ import annotations

from typing import Any

from waystation._errors import Corrupt, InvalidInput
from waystation.layouts.orbax.json_files import dump, parse_object


def encode(strings: dict[str, str]) -> bytes:
    """The bytes of the file.

    Raises:
        InvalidInput: Two leaves would be at the same place.
    """
    body: dict[str, Any] = {}
    for name, value in strings.items():
        *parents, last = _pointer(name)
        place = body
        for parent in parents:
            inner = place.setdefault(parent, {})
            if not isinstance(inner, dict):
                raise _clash(name)
            place = inner
        if last in place:
            raise _clash(name)
        place[last] = value
    return dump(body)


def _clash(name: str) -> InvalidInput:
    return InvalidInput(
        f"the string {name!r} would be stored in the place of another; rename one of the two", array=name
    )


def decode(data: bytes, path: str) -> dict[str, Any]:
    """Reads the bytes of the file; `find` then finds strings in it.

    Raises:
        Corrupt: They are not such a file.
    """
    return parse_object(data, path)


def find(body: dict[str, Any], name: str, path: str) -> str:
    """The string of a name.

    Raises:
        Corrupt: There is none.
    """
    place: Any = body
    for part in _pointer(name):
        if not isinstance(place, dict) or part not in place:
            raise Corrupt(f"'{path}' lacks the string {name!r}", path=path, array=name)
        place = place[part]
    if not isinstance(place, str):
        raise Corrupt(f"'{path}' holds no string for {name!r}", path=path, array=name)
    return place


def _pointer(name: str) -> list[str]:
    return [part.replace("~1", "/").replace("~0", "~") for part in name.split("/")]
