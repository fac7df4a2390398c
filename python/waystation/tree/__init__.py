"""Trees: key paths, structures, and what is a node. Pure Python, no framework.

`flatten` takes a state apart into leaves and a `Structure`; `unflatten` is its inverse; a structure becomes
JSON and comes back; `match` pairs the leaves of two structures. Which classes are nodes, and when a load
gives back a class rather than a `NamedNode`, is said in `_registry`.
"""

from waystation.tree._flatten import flatten, unflatten
from waystation.tree._json import parse_json
from waystation.tree._keys import (
    AttributeKey,
    ChildKey,
    DictKey,
    Key,
    KeyPath,
    SequenceKey,
    format_key_path,
    label,
)
from waystation.tree._match import Mismatch, describe_difference, match
from waystation.tree._named_node import NamedNode
from waystation.tree._registry import register_fallback, register_leaf, register_node
from waystation.tree._structure import Structure

__all__ = [
    "AttributeKey",
    "ChildKey",
    "DictKey",
    "Key",
    "KeyPath",
    "Mismatch",
    "NamedNode",
    "SequenceKey",
    "Structure",
    "describe_difference",
    "flatten",
    "format_key_path",
    "label",
    "match",
    "parse_json",
    "register_fallback",
    "register_leaf",
    "register_node",
    "unflatten",
]
