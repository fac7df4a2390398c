"""Structures and keys as JSON values, and strict parsing of JSON that a file holds.

A structure is the flat list of its nodes in preorder: `0` is a leaf, `null` is None, `{"list": n}` and
`{"tuple": n}` have n children, `{"dict": keys}`, `{"ordered_dict": keys}` and `{"default_dict": keys}` one
child a key, `{"named": tag, "keys": keys}` likewise, with `"static": true` where the value held data that a
file does not keep. Keys of mappings that are strings stay strings; others are objects of one member:
`{"int": "7"}`, `{"float": "0x1.8p+0"}`, `{"complex": [re, im]}`, `{"bool": true}`, `{"none": true}`,
`{"bytes": hex}`, `{"tuple": [key, …]}`, and `{"surrogates": hex}` for strings that UTF-8 cannot hold. Of a
named node, a string is an attribute, `{"index": i}` a position in a sequence, `{"child": i}` a numbered
child and `{"key": key}` a mapping's key.

Invariants: decoding trusts nothing; memory use is bounded by the size of the input; every defect is Corrupt.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from waystation._errors import Corrupt, Unsupported
from waystation.tree._keys import AttributeKey, ChildKey, DictKey, Key, SequenceKey, check_dict_keys
from waystation.tree._nodes import LEAF, MAPPING_KINDS, NONE, SEQUENCE_KINDS, Node
from waystation.tree._registry import resolve

_INTEGER_DIGITS = 4096  # of an integer key; the bits that a key may have need fewer


def parse_json(text: str | bytes, path: str, *, allow_nan: bool = False) -> Any:
    """Parses JSON from the file `path`.

    Args:
        text: What it holds.
        path: The file, for messages.
        allow_nan: Take NaN and infinities, which are no JSON, but what Python's `json` writes.

    Raises:
        Corrupt: It is not UTF-8 or not JSON, an object repeats a name, a number is not finite or not
            representable, or values nest too deeply.
    """
    strict: dict[str, Any] = {"parse_constant": _refuse_constant, "parse_float": _finite_float}
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        return json.loads(text, object_pairs_hook=_unique, **({} if allow_nan else strict))
    except RecursionError:
        raise Corrupt("JSON values nest too deeply", path=path) from None
    except ValueError as error:  # also UnicodeDecodeError, JSONDecodeError and integers past Python's limit
        raise Corrupt(f"not valid JSON: {error}", path=path) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("an object has two members of the same name")
    return members


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is out of range")
    return value


# ---- encoding ----------------------------------------------------------------------------------


def encode_nodes(nodes: Sequence[Node]) -> list[Any]:
    """The JSON value of a structure."""
    return [0 if node is LEAF else _encode_node(node) for node in nodes]


def _encode_node(node: Node) -> Any:
    if node is NONE:
        return None
    if node.kind in SEQUENCE_KINDS:
        return {node.kind: node.count}
    if node.kind in MAPPING_KINDS:
        return {node.kind: _encode_dict_keys(node.keys)}
    encoded = {"named": _encode_text(node.tag), "keys": [_encode_key(key) for key in node.keys]}
    return encoded | {"static": True} if node.has_static else encoded


def _encode_dict_keys(keys: Sequence[Any]) -> list[Any]:
    if set(map(type, keys)) <= {str} and "".join(keys).isascii():
        return list(keys)
    return [_encode_dict_key(key) for key in keys]


def _encode_key(key: Key) -> Any:
    if isinstance(key, AttributeKey):
        return _encode_text(key.name)
    if isinstance(key, SequenceKey):
        return {"index": key.index}
    if isinstance(key, ChildKey):
        return {"child": key.index}
    return {"key": _encode_dict_key(key.key)}


def _encode_text(text: str) -> Any:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return {"surrogates": text.encode("utf-8", "surrogatepass").hex()}
    return text


def _encode_dict_key(key: Any) -> Any:
    if key is None:
        return {"none": True}
    return _ENCODE_KEY[type(key)](key)


_ENCODE_KEY: dict[type, Callable[[Any], Any]] = {
    str: _encode_text,
    int: lambda key: {"int": str(key)},
    bool: lambda key: {"bool": key},
    float: lambda key: {"float": key.hex()},
    complex: lambda key: {"complex": [key.real.hex(), key.imag.hex()]},
    bytes: lambda key: {"bytes": key.hex()},
    tuple: lambda key: {"tuple": [_encode_dict_key(part) for part in key]},
}


# ---- decoding ----------------------------------------------------------------------------------


def decode_nodes(value: Any, path: str) -> list[Node]:
    """The nodes of a JSON value from the file `path`, checked to form exactly one tree."""
    if type(value) is not list or not value:
        raise Corrupt("a tree structure is not a list of nodes", path=path)
    nodes: list[Node] = []
    awaited, last = 1, len(value) - 1  # nodes that must still come; the number of the last one
    for number, item in enumerate(value):
        if number < len(nodes):  # one of several leaves that were taken together
            continue
        if awaited == 0:
            raise Corrupt(f"a tree structure ends at node {number} but goes on", path=path, node=number)
        if type(item) is int and item == 0:
            nodes.append(LEAF)
            awaited -= 1
            continue
        try:
            node = _decode_node(item, last - number)
        except Corrupt as error:
            raise error.where(path=path, node=number) from None
        nodes.append(node)
        awaited += node.count - 1
        children = value[number + 1 : number + 1 + node.count]
        if children and not any(children) and set(map(type, children)) == {int}:
            nodes += [LEAF] * node.count
            awaited -= node.count
    if awaited:
        raise Corrupt(f"a tree structure lacks {awaited} of its nodes", path=path)
    return nodes


def _decode_node(item: Any, following: int) -> Node:
    if item is None:
        return NONE
    if type(item) is not dict:
        raise Corrupt(f"a tree node is a JSON value of type {type(item).__name__}")
    if "named" in item:
        return _decode_named(item, following)
    if len(item) != 1:
        raise Corrupt("a tree node has not exactly one kind")
    ((kind, content),) = item.items()
    if kind in SEQUENCE_KINDS:
        if type(content) is not int or not 0 <= content <= following:
            raise Corrupt(f"a {kind} has an impossible number of children")
        return Node(kind, content)
    if kind in MAPPING_KINDS:
        keys = _decode_keys(content, following, _decode_dict_key)
        return Node(kind, len(keys), keys)
    raise Corrupt(f"unknown kind of tree node {kind[:40]!r}")


def _decode_named(item: dict[str, Any], following: int) -> Node:
    if not item.keys() <= {"named", "keys", "static"} or item.get("static", True) is not True:
        raise Corrupt("a named tree node has unknown members")
    tag = _decode_text(item["named"])
    keys = _decode_keys(item.get("keys"), following, _decode_key)
    has_static = "static" in item
    return Node("named", len(keys), keys, tag, has_static, resolve(tag, keys, has_static))


def _decode_keys(value: Any, following: int, decode: Callable[[Any], Any]) -> tuple[Any, ...]:
    if type(value) is not list or len(value) > following:
        raise Corrupt("a tree node has more keys than nodes follow, or no list of keys")
    if decode is _decode_dict_key and set(map(type, value)) <= {str}:
        keys = tuple(value)
    else:
        keys = tuple(decode(key) for key in value)
    if len(set(keys)) != len(keys):
        raise Corrupt("a tree node has two children with the same key")
    return keys


def _decode_key(value: Any) -> Key:
    if type(value) is str or (type(value) is dict and "surrogates" in value):
        return AttributeKey(_decode_text(value))
    kind, content = _only_member(value)
    if kind == "key":
        return DictKey(_decode_dict_key(content))
    if kind not in ("index", "child") or type(content) is not int or content < 0:
        raise Corrupt("malformed key of a named tree node")
    return SequenceKey(content) if kind == "index" else ChildKey(content)


def _decode_text(value: Any) -> str:
    if type(value) is str:
        return value
    kind, content = _only_member(value)
    if kind != "surrogates":
        raise Corrupt("a name in a tree is not text")
    return _decode_surrogates(content)


def _decode_dict_key(value: Any) -> Any:
    if type(value) is str:
        return value
    kind, content = _only_member(value)
    if kind not in _DECODE_KEY:
        raise Corrupt(f"unknown type of key {kind[:40]!r}")
    try:
        key = _DECODE_KEY[kind](content)
        check_dict_keys((key,))
    except Unsupported as error:
        raise Corrupt(f"impossible key of type {kind}: {error.message}") from None
    except (TypeError, ValueError, OverflowError, RecursionError):
        raise Corrupt(f"malformed key of type {kind}") from None
    return key


def _only_member(value: Any) -> tuple[str, Any]:
    if type(value) is not dict or len(value) != 1:
        raise Corrupt("malformed key in a tree")
    ((kind, content),) = value.items()
    return kind, content


def _decode_int(content: Any) -> int:
    if type(content) is not str or len(content) > _INTEGER_DIGITS:
        raise ValueError
    value = int(content)
    if str(value) != content:  # int() also reads spaces, underscores and a plus sign
        raise ValueError
    return value


def _decode_float(content: Any) -> float:
    value = float.fromhex(content)
    if value.hex() != content:
        raise ValueError
    return value


def _decode_complex(content: Any) -> complex:
    if type(content) is not list:
        raise TypeError
    real, imaginary = map(_decode_float, content)
    return complex(real, imaginary)


def _decode_bytes(content: Any) -> bytes:
    value = bytes.fromhex(content)
    if value.hex() != content:
        raise ValueError
    return value


def _decode_surrogates(content: Any) -> str:
    try:
        return _decode_bytes(content).decode("utf-8", "surrogatepass")
    except (TypeError, ValueError):
        raise Corrupt("malformed text in a tree") from None


def _decode_tuple(content: Any) -> tuple[Any, ...]:
    if type(content) is not list:
        raise TypeError
    return tuple(_decode_dict_key(part) for part in content)


def _decode_flag(content: Any) -> bool:
    if type(content) is not bool:
        raise TypeError
    return content


def _decode_none(content: Any) -> None:
    if content is not True:
        raise TypeError


_DECODE_KEY: dict[str, Callable[[Any], Any]] = {
    "int": _decode_int,
    "float": _decode_float,
    "complex": _decode_complex,
    "bool": _decode_flag,
    "none": _decode_none,
    "bytes": _decode_bytes,
    "tuple": _decode_tuple,
    "surrogates": _decode_surrogates,
}
