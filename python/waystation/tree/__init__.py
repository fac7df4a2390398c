"""Trees: key paths, structures, and what is a node. Pure Python, no framework.

`flatten` takes a state apart into leaves and a `Structure`; `unflatten` is its inverse; a structure becomes
JSON and comes back; `match` pairs the leaves of two structures; `merge` makes one tree of several. `plain` is
for processes that have none of the classes of a tree, and `iterate_leaves` for those who only look for a
leaf. Which classes are nodes, and when a load gives back a class rather than a `NamedNode`, is said in
`_registry`.
"""

from waystation.tree._difference import describe_difference
from waystation.tree._flatten import flatten, iterate_leaves, plain, unflatten
from waystation.tree._json import parse_json
from waystation.tree._keys import (
    AbstractLeaf,
    AttributeKey,
    ChildKey,
    DictKey,
    JsonType,
    JsonValue,
    Key,
    KeyPath,
    Leaf,
    PyTree,
    PyTreeKey,
    PyTreeKeyPath,
    PyTreeOf,
    SequenceKey,
    format_key_path,
    label,
)
from waystation.tree._match import Mismatch, Tolerance, match
from waystation.tree._merge import merge, union
from waystation.tree._named_node import NamedNode
from waystation.tree._registry import is_registered, register_fallback, register_leaf, register_node
from waystation.tree._structure import Structure

__all__ = [
    "AbstractLeaf",
    "AttributeKey",
    "ChildKey",
    "DictKey",
    "JsonType",
    "JsonValue",
    "Key",
    "KeyPath",
    "Leaf",
    "Mismatch",
    "NamedNode",
    "PyTree",
    "PyTreeKey",
    "PyTreeKeyPath",
    "PyTreeOf",
    "SequenceKey",
    "Structure",
    "Tolerance",
    "describe_difference",
    "flatten",
    "format_key_path",
    "is_registered",
    "iterate_leaves",
    "label",
    "match",
    "merge",
    "parse_json",
    "plain",
    "register_fallback",
    "register_leaf",
    "register_node",
    "unflatten",
    "union",
]
