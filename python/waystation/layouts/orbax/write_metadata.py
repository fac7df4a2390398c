"""The files that make what has been written a checkpoint to Orbax, of one checkpointable and of all.

Pure: bytes by relative paths. Invariants: what Orbax itself would say of the same state is said here; the
database of OCDBT has exactly the chunks that the parts speak of, and the metadata of every array.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from waystation.frameworks import dtypes
from waystation.layouts.orbax import (
    array_metadatas,
    names,
    rich_types,
    shardings_file,
    strings_file,
    write_ocdbt,
)
from waystation.layouts.orbax.array_metadatas import ArrayMetadata
from waystation.layouts.orbax.tree_metadata import JAX_ARRAY, STRING, Entry, TreeMetadata, Value
from waystation.layouts.orbax.write_parts import ARRAY, FILE, LENGTH, NUMBER, OFFSET, Part
from waystation.layouts.orbax.write_plan import Arrays
from waystation.layouts.orbax.write_tree import Leaves


def of_state(
    leaves: Leaves,
    arrays: Arrays,
    parts: Sequence[Part],
    primary: int,
    commit_ns: int,
    *,
    with_shardings: bool,
    with_rich_types: bool,
    custom_metadata: Any = None,
) -> dict[str, bytes]:
    """The files of a state besides its data, by their paths in its directory.

    Args:
        leaves: The leaves of the state.
        arrays: Its arrays.
        parts: What the processes have written.
        primary: The process that writes this.
        commit_ns: When, nanoseconds since 1970.
        with_shardings: Whether to write how arrays were sharded.
        with_rich_types: Whether to say which containers are tuples and named tuples.
        custom_metadata: JSON values that stand with the metadata of the tree.
    """
    tree = _tree(leaves, arrays, with_rich_types=with_rich_types)
    tree = dataclasses.replace(tree, custom_metadata=custom_metadata)
    files = {names.TREE_METADATA: tree.encode()}
    if leaves.strings:
        files[names.STRINGS] = strings_file.encode(leaves.strings)
    is_jax = [kind == JAX_ARRAY for kind in leaves.kinds if kind != STRING]
    own = [number for number, is_own in enumerate(is_jax) if is_own]
    if own:
        path = f"{names.ARRAY_METADATAS}/{names.process_file(primary)}"
        files[path] = array_metadatas.encode([_array_metadata(arrays, number) for number in own])
        if with_shardings:
            descriptions = {arrays.names[number]: arrays.sources[number].sharding for number in own}
            files[names.SHARDINGS] = shardings_file.encode(descriptions)
    if not arrays.names:
        return files
    return files | (_database(arrays, parts, commit_ns) if arrays.storage.use_ocdbt else arrays.metadata())


def _tree(leaves: Leaves, arrays: Arrays, *, with_rich_types: bool) -> TreeMetadata:
    numbers = iter(range(len(arrays.names)))
    values = []
    for kind in leaves.kinds:
        shape = None if kind == STRING else arrays.zarr[next(numbers)].read_shape
        values.append(Value(kind, shape if kind == JAX_ARRAY else None))
    entries = [
        Entry(place.path, Value(place.empty) if place.leaf is None else values[place.leaf])
        for place in leaves.places
    ]
    rich = None
    if with_rich_types:
        rich = rich_types.encode(
            leaves.structure, values, [entry.value for entry in entries if entry.value.is_empty]
        )
    return TreeMetadata(entries, arrays.storage.use_ocdbt, arrays.storage.use_zarr3, rich_tree=rich)


def _array_metadata(arrays: Arrays, number: int) -> ArrayMetadata:
    zarr, dtype = arrays.zarr[number], arrays.sources[number].dtype
    implementation = dtypes.key_implementation(dtype) if dtypes.is_key(dtype) else None
    return ArrayMetadata(arrays.names[number], zarr.read_shape, zarr.read_shape, implementation)


def _database(arrays: Arrays, parts: Sequence[Part], commit_ns: int) -> dict[str, bytes]:
    values: dict[bytes, write_ocdbt.Value] = {}
    for part in parts:
        for row in part.rows.tolist():
            place = write_ocdbt.Reference(part.data_files[row[FILE]], row[OFFSET], row[LENGTH])
            values[arrays.key(row[ARRAY], row[NUMBER]).encode()] = place
    node_file = write_ocdbt.new_data_file()
    appended = bytearray()
    for key, content in arrays.metadata().items():
        value: write_ocdbt.Value = content
        if len(content) > write_ocdbt.INLINE_BYTES:
            value = write_ocdbt.Reference(node_file, len(appended), len(content))
            appended += content
        values[key.encode()] = value
    database = write_ocdbt.encode(values, node_file, commit_ns, before=bytes(appended))
    return {names.MANIFEST: database.manifest, "".join(node_file): database.nodes}
