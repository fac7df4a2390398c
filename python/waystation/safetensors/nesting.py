"""Flat names as a tree of dicts: `layers.0.weight` becomes `["layers"]["0"]["weight"]`.

Invariant: every array is in the tree at the place that its name says; names that allow no such tree are
refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from waystation._errors import InvalidInput

SEPARATOR = "."


def separator_of(nested: object) -> str | None:
    """What separates the parts of names; None where arrays come back by their whole names."""
    if isinstance(nested, bool):
        return SEPARATOR if nested else None
    if not isinstance(nested, str) or not nested:
        raise InvalidInput(f"nested must be True, False or what separates the parts of names, not {nested!r}")
    return nested


def check_names(names: list[str], separator: str) -> None:
    """Raises InvalidInput if one name is a part of the way to another."""
    nest(dict.fromkeys(names), separator)


def nest(arrays: Mapping[str, Any], separator: str) -> dict[str, Any]:
    """The arrays as a tree of dicts.

    Raises:
        InvalidInput: One name is a part of the way to another.
    """
    tree: dict[str, Any] = {}
    branches: dict[str, dict[str, Any]] = {"": tree}
    for name, array in arrays.items():
        *above, last = name.split(separator)
        branch = tree
        way = ""
        for part in above:
            way += part + separator
            found = branches.get(way)
            if found is None:
                if part in branch:
                    raise _both(way.removesuffix(separator), name)
                found = branches[way] = branch[part] = {}
            branch = found
        if last in branch:
            raise _both(name, f"{name}{separator}…")
        branch[last] = array
    return tree


def _both(name: str, longer: str) -> InvalidInput:
    return InvalidInput(
        f"{name!r} is the name of an array and a part of the name {longer!r}, so there is no tree of them; "
        "rename one, or load without nested",
        tensor=name,
    )
