"""`array_metadatas/process_<n>`: what a process says of the JAX arrays that it wrote.

It is the only place that knows the implementation of PRNG keys, whose words are stored as plain numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from waystation.layouts.orbax.json_files import dump, parse_object, reading, require, shape, text

_KEY_IMPLEMENTATION = "random_key_impl"


@dataclass(frozen=True, slots=True)
class ArrayMetadata:
    """What is said of one array.

    Attributes:
        name: Under which it is stored.
        write_shape: Of what one device wrote of it.
        chunk_shape: Of the parts in which it can be read.
        key_implementation: Of PRNG keys; None for other arrays.
    """

    name: str
    write_shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    key_implementation: str | None = None


def encode(arrays: Sequence[ArrayMetadata]) -> bytes:
    """The bytes of a file."""
    return dump({"array_metadatas": [{"array_metadata": _to_json(array)} for array in arrays]})


def _to_json(array: ArrayMetadata) -> dict[str, object]:
    implementation = array.key_implementation
    return {
        "param_name": array.name,
        "write_shape": array.write_shape,
        "chunk_shape": array.chunk_shape,
        "ext_metadata": None if implementation is None else {_KEY_IMPLEMENTATION: implementation},
    }


def decode(data: bytes, path: str) -> list[ArrayMetadata]:
    """Reads the bytes of a file.

    Raises:
        Corrupt: They are not such a file.
    """
    body = parse_object(data, path)
    with reading(path):
        entries = body.get("array_metadatas", [])
        require(isinstance(entries, list), "the arrays are no list")
        return [_from_json(entry["array_metadata"]) for entry in entries]


def _from_json(entry: dict[str, object]) -> ArrayMetadata:
    extension = entry.get("ext_metadata") or {}
    require(isinstance(extension, dict), "the extension of an array is no object")
    assert isinstance(extension, dict)
    implementation = extension.get(_KEY_IMPLEMENTATION)
    return ArrayMetadata(
        text(entry["param_name"]),
        shape(entry["write_shape"]),
        shape(entry["chunk_shape"]),
        None if implementation is None else text(implementation),
    )
