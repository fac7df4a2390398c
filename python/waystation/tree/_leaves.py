"""The leaves of a tree, also of one that cannot be taken apart: for those who only look for something."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from waystation.tree._registry import open_unknown, openers

_UNKNOWN = object()


def iterate_leaves(tree: Any) -> Iterator[Any]:
    """The leaves, in the order of `flatten`.

    A container is gone into once, so the tree may contain itself; what cannot be taken apart, which `flatten`
    refuses with its key path, counts as a leaf. Without recursion: a tree may be deeper than Python's stack.
    """
    waiting: list[Any] = [tree]
    seen: dict[int, Any] = {}  # containers by identity; kept, since some are made by taking others apart
    while waiting:
        value = waiting.pop()
        children = _children(value)
        if children is None:
            yield value
        elif id(value) not in seen:
            seen[id(value)] = value
            waiting.extend(reversed(list(children)))


def _children(value: Any) -> Iterable[Any] | None:
    opener = openers.get(type(value), _UNKNOWN)
    if opener is None:
        return None
    try:
        opened = open_unknown(value) if opener is _UNKNOWN else opener(value)  # type: ignore[operator]
    except Exception:  # of a class's own function, which may raise anything
        return None
    return None if opened is None else opened[1]
