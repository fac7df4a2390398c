"""`tree.json`: the structure of a state and what is known of each leaf.

Arrays are numbered in the order of their leaves; the number is the index into the chunk table. They
stand in columns, one list per property, with sharding descriptions stored once. Scalars stand in the
tree itself, spelled so that every value survives: integers in decimal (in hexadecimal beyond 64
bits), floats in hexadecimal, bytes in base 64.
"""

from __future__ import annotations

import base64
import binascii
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from waystation import _native
from waystation._collection import paused_collection
from waystation._distinct import distinct_objects
from waystation._errors import Corrupt, WaystationError
from waystation.frameworks.base import StoredArray
from waystation.layouts.native.records import dump_json, load_json
from waystation.layouts.opened import ArrayLeaf, Leaf, Scalar, StoredTree
from waystation.tree import Structure

_EXTENT_LIMIT = 1 << 62

_DECIMAL_LIMIT = 1 << 64

_COLUMNS = ("label", "shape", "dtype", "framework", "storage_dtype", "storage_shape", "sharding")


def encode(tree: StoredTree) -> bytes:
    """The bytes of the file."""
    shardings = _Interned()
    kinds, numbers = distinct_objects(tree.arrays)
    which = numbers.tolist()
    columns: dict[str, list[Any]] = {
        "shape": [kind.shape for kind in kinds],
        "dtype": [kind.dtype for kind in kinds],
        "framework": [kind.framework for kind in kinds],
        "storage_dtype": [kind.storage_dtype for kind in kinds],
        "storage_shape": [None if kind.storage_shape == kind.shape else kind.storage_shape for kind in kinds],
        "sharding": shardings.numbers([kind.sharding for kind in kinds]),
    }
    extras = [kind.extra for kind in kinds]
    body = {
        "structure": tree.structure.to_json(),
        "leaves": [
            leaf.array if type(leaf) is ArrayLeaf else _encode_scalar(leaf)  # type: ignore[arg-type]
            for leaf in tree.leaves
        ],
        "arrays": {
            "count": len(which),
            "label": tree.labels,
            **{name: _column(values, which) for name, values in columns.items()},
            "extra": {str(number): extras[kind] for number, kind in enumerate(which) if extras[kind]},
        },
        "shardings": shardings.values,
        "meshes": shardings.meshes.values if shardings.meshes else [],
    }
    return _native.seal_json(dump_json(body))


@paused_collection()
def decode(data: bytes, path: str) -> StoredTree:
    """Reads and checks the bytes of the file."""
    body = load_json(_native.open_sealed_json(data, path), path)
    try:
        structure = Structure.from_json(body["structure"], path=path)
        arrays, labels = _decode_arrays(body)
        encoded = body["leaves"]
        numbers = [leaf for leaf in encoded if type(leaf) is int]
        _require(numbers == list(range(len(arrays))), "array leaves are not numbered in order")
        leaves: list[Leaf]
        if len(numbers) == len(encoded):
            leaves = list(map(ArrayLeaf, numbers))
        else:
            leaves = [ArrayLeaf(leaf) if type(leaf) is int else _decode_scalar(leaf) for leaf in encoded]
        _require(len(leaves) == structure.leaf_count, "leaves and structure differ in number")
    except WaystationError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise Corrupt(f"'{path}' is malformed: {error}", path=path) from error
    return StoredTree(structure, leaves, arrays, labels)


class _Interned:
    """Sharding descriptions by number, and inside them meshes by number; each stored once."""

    def __init__(self, *, with_meshes: bool = True) -> None:
        self.values: list[dict[str, Any]] = []
        self.meshes = _Interned(with_meshes=False) if with_meshes else None
        self._by_identity: dict[int, int] = {}
        self._by_text: dict[bytes, int] = {}

    def numbers(self, values: Sequence[dict[str, Any] | None]) -> list[int | None]:
        """The number of each; None has none."""
        # Equal shardings are usually one object: each is looked up once.
        distinct = {id(value): value for value in values}
        known = {key: None if value is None else self.number(value) for key, value in distinct.items()}
        return [known[id(value)] for value in values]

    def number(self, value: dict[str, Any]) -> int:
        """The number of one."""
        known = self._by_identity.get(id(value))
        if known is not None:
            return known
        number = self._by_text.setdefault(dump_json(value), len(self.values))
        if number == len(self.values):
            self.values.append(self._with_mesh_number(value))
        self._by_identity[id(value)] = number
        return number

    def _with_mesh_number(self, value: dict[str, Any]) -> dict[str, Any]:
        mesh = value.get("mesh")
        if self.meshes is None or not isinstance(mesh, dict):
            return value
        return {**value, "mesh": self.meshes.number(mesh)}


def _decode_arrays(body: dict[str, Any]) -> tuple[list[StoredArray], list[str]]:
    count = body["arrays"]["count"]
    _require(type(count) is int and 0 <= count <= len(body["leaves"]), "the number of arrays is out of range")
    labels, *columns = [_values(body["arrays"][name], count) for name in _COLUMNS]
    shardings = _decode_shardings(body["shardings"], body["meshes"])
    shapes, dtypes, frameworks, storage_dtypes, storage_shapes, numbers = columns
    for names in (labels, dtypes, frameworks, storage_dtypes):
        _require(set(map(type, names)) <= {str}, "a name is no string")
    _require(set(map(type, numbers)) <= {int, type(None)}, "a sharding number is no number")
    given = [shape for shape in storage_shapes if shape is not None]
    extents = itertools.chain(itertools.chain.from_iterable(shapes), itertools.chain.from_iterable(given))
    _require(set(map(type, extents)) <= {int}, "a shape holds something that is no extent")
    # Arrays are many and of few kinds: each kind is looked at once, and is one object. Kinds that compare
    # equal are the same, as True and 1.0 have been refused. What all arrays have in common tells none apart.
    columns[0] = list(map(tuple, shapes))
    columns[4] = [None if shape is None else tuple(shape) for shape in storage_shapes]
    varying = [place for place, column in enumerate(columns) if len(column) > 1]
    kinds = list(zip(*(columns[place] for place in varying), strict=True)) if varying else [()] * count
    common = [column[0] if column else None for column in columns]
    known: dict[tuple[Any, ...], StoredArray] = {}
    for kind in dict.fromkeys(kinds):
        described = common.copy()
        for place, value in zip(varying, kind, strict=True):
            described[place] = value
        known[kind] = _decode_kind(described, shardings)
    arrays = list(map(known.__getitem__, kinds))
    _add_extras(arrays, body["arrays"]["extra"])
    return arrays, labels * count if len(labels) == 1 else labels


def _add_extras(arrays: list[StoredArray], extras: dict[str, dict[str, Any]]) -> None:
    """Adds what is said of single arrays; those that are alike stay one object."""
    _require(type(extras) is dict, "what is said of single arrays is no object")
    known: dict[tuple[int, str], StoredArray] = {}
    for text, extra in extras.items():
        _require(type(extra) is dict, "what is said of an array is no object")
        number = int(text)
        _require(0 <= number < len(arrays), "something is said of an array that is not there")
        kind = id(arrays[number]), repr(extra)
        if kind not in known:
            known[kind] = replace(arrays[number], extra=extra)
        arrays[number] = known[kind]


def _decode_kind(kind: Sequence[Any], shardings: Sequence[dict[str, Any]]) -> StoredArray:
    """What is said of all arrays that are alike."""
    shape, dtype, framework, storage_dtype, storage_shape, sharding = kind
    _require(sharding is None or sharding >= 0, "a sharding number is negative")
    shape = _shape(shape)
    return StoredArray(
        shape,
        dtype,
        framework,
        storage_dtype,
        shape if storage_shape is None else _shape(storage_shape),
        None if sharding is None else shardings[sharding],
        {},
    )


def _column(values: list[Any], which: list[int]) -> Any:
    """A column as files have it, of the values of the kinds and the kind of each array: one that holds the
    same value everywhere says it once."""
    if len(which) > 1 and values.count(values[0]) == len(values):
        return {"all": values[0]}
    return list(map(values.__getitem__, which))


def _values(column: Any, count: int) -> list[Any]:
    """The values of a column; a single one where all arrays have the same."""
    if isinstance(column, dict):
        return [column["all"]] if count else []
    _require(type(column) is list and len(column) == count, "a column has another length than the others")
    return list(column)


def _decode_shardings(shardings: list[dict[str, Any]], meshes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    decoded = []
    for sharding in shardings:
        number = sharding.get("mesh")
        if number is None:
            decoded.append(sharding)
        else:
            _require(type(number) is int and 0 <= number < len(meshes), "a mesh number is out of range")
            decoded.append({**sharding, "mesh": meshes[number]})
    return decoded


def _shape(shape: tuple[Any, ...]) -> tuple[int, ...]:
    for extent in shape:
        if not 0 <= extent < _EXTENT_LIMIT:
            raise ValueError("a shape holds something that is no extent")
    return shape


def _encode_scalar(value: Scalar) -> list[str]:
    kind = type(value)
    if kind is bool:
        return ["bool", str(value)]
    if kind is int:
        # Python refuses decimal text of more than 4,300 digits; hexadecimal has no such limit.
        small = -_DECIMAL_LIMIT < value < _DECIMAL_LIMIT  # type: ignore[operator]
        return ["int", str(value) if small else hex(value)]  # type: ignore[arg-type]
    if kind is float:
        return ["float", value.hex()]  # type: ignore[union-attr]
    if kind is complex:
        return ["complex", value.real.hex(), value.imag.hex()]  # type: ignore[union-attr]
    if kind is bytes:
        return ["bytes", base64.b64encode(value).decode()]  # type: ignore[arg-type]
    return ["str", value]  # type: ignore[list-item]


def _decode_scalar(leaf: Any) -> Scalar:
    kind, *parts = leaf
    decode = _SCALARS.get(kind)
    _require(
        decode is not None and all(type(part) is str for part in parts), f"unknown kind of scalar {kind!r}"
    )
    return decode(*parts)  # type: ignore[misc,no-any-return]


def _decode_bool(text: str) -> bool:
    _require(text in ("True", "False"), "a bool is neither True nor False")
    return text == "True"


def _decode_int(text: str) -> int:
    # int() alone would also take spaces and underscores.
    digits = text.removeprefix("-").removeprefix("0x")
    _require(digits.isascii() and digits.isalnum(), "an int holds something that is no digit")
    return int(text, 16 if "0x" in text else 10)


def _decode_complex(real: str, imaginary: str) -> complex:
    return complex(float.fromhex(real), float.fromhex(imaginary))


def _decode_bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"bytes are not in base 64: {error}") from error


_SCALARS: dict[str, Any] = {
    "bool": _decode_bool,
    "int": _decode_int,
    "float": float.fromhex,
    "complex": _decode_complex,
    "str": str,
    "bytes": _decode_bytes,
}


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)
