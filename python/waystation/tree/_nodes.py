"""The node: one element of a flattened tree, and how a value is built from it and its children.

Invariants: a node says what its container was and how its children are named, never what they hold. Two
nodes are equal when a file could not tell them apart, so the live constructor in `rebuild` does not count.
Leaves and None are single shared objects and may be compared with `is`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from waystation.tree._keys import DictKey, Key, SequenceKey, key_name
from waystation.tree._named_node import NamedNode

Rebuild: TypeAlias = Callable[[list[Any]], Any]

MAPPING_KINDS = frozenset({"dict", "ordered_dict", "default_dict"})
SEQUENCE_KINDS = frozenset({"list", "tuple"})


class Node:
    """One element of a structure.

    Attributes:
        kind: `leaf`, `none`, a mapping kind, a sequence kind, or `named`.
        count: The number of children.
        keys: Of a mapping its plain keys, of a named node its `Key` objects, else empty.
        tag: Of a named node `module.qualname` of its class.
        has_static: Of a named node, whether it held data that neither its children nor the defaults of
            its class reproduce.
        rebuild: Makes the live value of a list of children; None where the kind alone says how.
    """

    __slots__ = ("kind", "count", "keys", "tag", "has_static", "rebuild")

    def __init__(
        self,
        kind: str,
        count: int,
        keys: tuple[Any, ...] = (),
        tag: str = "",
        has_static: bool = False,
        rebuild: Rebuild | None = None,
    ) -> None:
        self.kind = kind
        self.count = count
        self.keys = keys
        self.tag = tag
        self.has_static = has_static
        self.rebuild = rebuild

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Node):
            return NotImplemented
        return (
            self.kind == other.kind
            and self.count == other.count
            and self.tag == other.tag
            and self.keys == other.keys
        )

    def __hash__(self) -> int:
        return hash((self.kind, self.count, self.tag, self.keys))

    def __repr__(self) -> str:
        return f"<{self.tag or self.kind} of {self.count}>" if self.count else f"<{self.tag or self.kind}>"

    def child_keys(self) -> Sequence[Key]:
        """The keys of the children, in order."""
        if self.kind in MAPPING_KINDS:
            return [DictKey(key) for key in self.keys]
        if self.kind in SEQUENCE_KINDS:
            return [SequenceKey(index) for index in range(self.count)]
        return self.keys

    def child_names(self) -> Sequence[str]:
        """The label components of the children, in order."""
        if self.kind in MAPPING_KINDS:
            return [key if type(key) is str else repr(key) for key in self.keys]
        if self.kind in SEQUENCE_KINDS:
            return list(map(str, range(self.count)))
        return [key_name(key) for key in self.keys]

    def build(self, children: list[Any]) -> Any:
        """The value that this node stands for, with the given children."""
        if self.rebuild is not None:
            return self.rebuild(children)
        if self.kind == "list":
            return children
        if self.kind == "tuple":
            return tuple(children)
        if self.kind == "named":
            return NamedNode(self.tag, dict(zip(self.keys, children, strict=True)), self.has_static)
        pairs = zip(self.keys, children, strict=True)
        return OrderedDict(pairs) if self.kind == "ordered_dict" else dict(pairs)


LEAF = Node("leaf", 0)
NONE = Node("none", 0)
