"""What a load returns for a node whose class this program has not registered.

Invariants: a named node keeps everything that the file says of the node, so that saving it again writes the
same; nothing is imported or called on behalf of its tag.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any, ClassVar

from waystation.tree._keys import AttributeKey, ChildKey, DictKey, Key, SequenceKey


class NamedNode:
    """A stand-in for a class, with its children under their keys.

    Children are reached as attributes (`node.mu`) or as items (`node['mu']`, `node[0]`); the latter also
    where a child is called like an attribute of this class. Two nodes are equal when their tags and
    children are.

    Attributes:
        tag: `module.qualname` of the class that was saved.
        fields: The children by key, in order.
        has_static: Whether the saved value held static data, which files do not keep.
    """

    __slots__ = ("tag", "fields", "has_static")
    __hash__: ClassVar[None] = None  # type: ignore[assignment]  # children are arrays and lists

    def __init__(self, tag: str, fields: Mapping[Key, Any], has_static: bool = False) -> None:
        self.tag: str = tag
        self.fields: dict[Key, Any] = dict(fields)
        self.has_static: bool = has_static

    def __getattr__(self, name: str) -> Any:
        # Reached only for names that are no attribute; an unset slot means that the object is being made.
        if name not in NamedNode.__slots__:
            for key in (AttributeKey(name), DictKey(name)):
                if key in self.fields:
                    return self.fields[key]
        raise AttributeError(name)

    def __getitem__(self, key: Hashable) -> Any:
        for candidate in _item_keys(key):
            if candidate in self.fields:
                return self.fields[candidate]
        raise KeyError(key)

    def __len__(self) -> int:
        return len(self.fields)

    def __iter__(self) -> Iterator[Key]:
        return iter(self.fields)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NamedNode):
            return NotImplemented
        return self.tag == other.tag and self.fields == other.fields

    def __repr__(self) -> str:
        fields = ", ".join(f"{key}: {value!r}" for key, value in self.fields.items())
        return f"NamedNode({self.tag!r}, {{{fields}}})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (NamedNode, (self.tag, self.fields, self.has_static))


def _item_keys(key: Hashable) -> Iterator[Hashable]:
    yield DictKey(key)
    if isinstance(key, str):
        yield AttributeKey(key)
    elif isinstance(key, int):
        yield SequenceKey(key)
        yield ChildKey(key)
    else:
        yield key  # a Key object itself
