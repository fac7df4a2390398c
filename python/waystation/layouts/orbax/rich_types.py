"""Rich types: the member of `_METADATA` that says which containers were tuples and named tuples.

It is JSON in a string: an object is a dict and a list is a list, unless an object has a `category`. Then it
is a leaf (a `ValueMetadataEntry`), a tuple, or a named tuple with its module, class and fields. Named tuples
are tags here as everywhere: a load resolves them among the classes that the program uses, and imports none.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from waystation._errors import InvalidInput
from waystation.layouts.orbax.json_files import parse_object, reading, require, text
from waystation.layouts.orbax.paths import EMPTY_DICT, EMPTY_LIST, EMPTY_NAMED, EMPTY_NONE, EMPTY_TUPLE
from waystation.layouts.orbax.tree_metadata import Value
from waystation.tree import AttributeKey, Structure, unflatten
from waystation.tree._keys import key_name
from waystation.tree._nodes import LEAF, MAPPING_KINDS, NONE, Node, Rebuild
from waystation.tree._registry import resolve

_CATEGORY = "category"
_LEAF_CLASS = "ValueMetadataEntry"
_EMPTY_NODES = {
    EMPTY_NONE: NONE,
    EMPTY_DICT: Node("dict", 0),
    EMPTY_LIST: Node("list", 0),
    EMPTY_TUPLE: Node("tuple", 0),
    EMPTY_NAMED: Node("tuple", 0),  # of which no class is said
}


# ---- writing -----------------------------------------------------------------------------------


def encode(structure: Structure, leaves: Sequence[Value], empties: Sequence[Value]) -> str:
    """The text of the member.

    Args:
        structure: Of the state.
        leaves: What its leaves are.
        empties: What its empty containers are, in preorder.

    Raises:
        InvalidInput: A dict has a key that would make it something else.
    """
    remaining = iter(empties)
    nodes = []
    for node in structure.nodes:
        if node is LEAF:
            nodes.append(LEAF)
        else:
            rebuild = _writer(node) if node.count else _constant(next(remaining))
            nodes.append(Node("named", node.count, rebuild=rebuild))
    tree = unflatten(Structure(nodes, structure.leaf_count), [_leaf_to_json(leaf) for leaf in leaves])
    return json.dumps(tree)


def _leaf_to_json(value: Value) -> dict[str, Any]:
    return {_CATEGORY: "custom", "clazz": _LEAF_CLASS, "data": value.to_json()}


def _constant(value: Value) -> Rebuild:
    encoded = _leaf_to_json(value)
    return lambda _: encoded


def _writer(node: Node) -> Rebuild:
    """What makes the JSON of a container of that of its children."""
    if node.kind == "list":
        return list
    if node.kind == "tuple":
        return lambda children: {_CATEGORY: "custom", "clazz": "tuple", "entries": children}
    names = [key_name(key) for key in node.child_keys()]
    if _is_named_tuple(node):
        module, _, name = node.tag.rpartition(".")
        return lambda children: {
            _CATEGORY: "namedtuple",
            "module": module,
            "clazz": name,
            "entries": [{"key": key, "value": child} for key, child in zip(names, children, strict=True)],
        }
    if _CATEGORY in names:
        raise InvalidInput(f"with rich types a dict cannot have the key {_CATEGORY!r}; rename it")
    return lambda children: dict(zip(names, children, strict=True))


def _is_named_tuple(node: Node) -> bool:
    """Other classes with named children are dicts to Orbax."""
    if node.kind in MAPPING_KINDS or not all(isinstance(key, AttributeKey) for key in node.keys):
        return False
    maker = getattr(node.rebuild, "__self__", None)  # of a named tuple, its class
    return node.rebuild is None or (isinstance(maker, type) and issubclass(maker, tuple))


# ---- reading -----------------------------------------------------------------------------------


def decode(data: str, path: str) -> tuple[Structure, list[Value]]:
    """The structure that the member describes, and what its leaves are.

    Raises:
        Corrupt: It describes none.
    """
    nodes: list[Node] = []
    leaves: list[Value] = []
    with reading(path):
        # A member that is one leaf, a list or a tuple is an object or a list; `parse_object` wants an object.
        pending: list[Any] = [parse_object(f'{{"tree": {data}}}', path)["tree"]]
        while pending:
            item = pending.pop()
            if (
                isinstance(item, dict)
                and item.get(_CATEGORY) == "custom"
                and item.get("clazz") == _LEAF_CLASS
            ):
                value = Value.from_json(item["data"])
                nodes.append(_EMPTY_NODES.get(value.kind, LEAF))
                if not value.is_empty:
                    leaves.append(value)
                continue
            node, children = _container(item)
            nodes.append(node)
            pending.extend(reversed(children))
    return Structure(nodes, len(leaves)), leaves


def _is_leaf(item: Any) -> bool:
    return isinstance(item, dict) and (item.get(_CATEGORY), item.get("clazz")) == ("custom", _LEAF_CLASS)


def _container(item: Any) -> tuple[Node, list[Any]]:
    if isinstance(item, list):
        return Node("list", len(item)), item
    require(isinstance(item, dict), "a tree of rich types holds something that is no container")
    if _CATEGORY not in item:
        return Node("dict", len(item), tuple(item)), list(item.values())
    entries = item["entries"]
    require(isinstance(entries, list), "the children of a container are no list")
    if item[_CATEGORY] == "namedtuple":
        keys = tuple([AttributeKey(text(entry["key"])) for entry in entries])
        require(len(set(keys)) == len(keys), "a named tuple has two fields of one name")
        tag = f"{text(item['module'])}.{text(item['clazz'])}"
        return Node("named", len(keys), keys, tag, rebuild=resolve(tag, keys, has_static=False)), [
            entry["value"] for entry in entries
        ]
    require(item[_CATEGORY] == "custom" and item["clazz"] == "tuple", "a container is of an unknown category")
    return Node("tuple", len(entries)), entries
