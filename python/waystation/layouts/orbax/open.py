"""Opens a checkpointable of Orbax that is a tree: what its metadata say becomes what a load works with.

The files are read by one process and sent to the others, which make the same of them. Invariants: whatever
the files say is checked before it is used; the tree names no leaf twice; arrays are numbered in the order of
their leaves.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from waystation import storage
from waystation._collection import paused_collection
from waystation._errors import Corrupt, NotFound, Unsupported
from waystation._options import Options
from waystation.frameworks import dtypes
from waystation.frameworks.base import StoredArray
from waystation.layouts.native.records import join_strings, split_strings
from waystation.layouts.opened import ArrayLeaf, Leaf
from waystation.layouts.orbax import array_metadatas, names, rich_types, shardings_file, strings_file, zarr
from waystation.layouts.orbax.checksums import FileChecksums
from waystation.layouts.orbax.chunk_places import NamedArray
from waystation.layouts.orbax.json_files import reading
from waystation.layouts.orbax.ocdbt import OcdbtValues
from waystation.layouts.orbax.paths import places_of, structure_of
from waystation.layouts.orbax.read import OpenOrbax, OrbaxTree
from waystation.layouts.orbax.tensor_store import TensorStore
from waystation.layouts.orbax.tree_metadata import (
    JAX_ARRAY,
    NUMPY_ARRAY,
    SCALAR,
    STRING,
    TreeMetadata,
    Value,
    check_distinct,
)
from waystation.layouts.orbax.values import FileValues, Values
from waystation.tree import Structure

_LIMIT_BYTES = 4 << 30  # of a file of metadata

# How the kinds of leaves come back; a scalar comes back as a number of Python.
_FRAMEWORKS = {JAX_ARRAY: "jax", NUMPY_ARRAY: "numpy", SCALAR: "python"}


@dataclass(frozen=True, slots=True)
class TreeFiles:
    """The files of metadata of a tree, as they are.

    Attributes:
        directory: Where they are.
        is_ocdbt: Whether arrays are in an OCDBT database.
        contents: By their names; those of arrays are called after their keys.
    """

    directory: str
    is_ocdbt: bool
    contents: dict[str, bytes]

    def pack(self) -> bytes:
        """As one string of bytes, for other processes."""
        flag = b"1" if self.is_ocdbt else b"0"
        parts = [os.fsencode(self.directory), flag]
        for name, content in self.contents.items():
            parts += [name.encode("utf-8", "surrogatepass"), content]
        return join_strings(parts)

    @classmethod
    def unpack(cls, data: bytes) -> TreeFiles:
        """What `pack` made."""
        directory, flag, *parts = split_strings(data)
        found = [name.decode("utf-8", "surrogatepass") for name in parts[::2]]
        return cls(os.fsdecode(directory), flag == b"1", dict(zip(found, parts[1::2], strict=True)))


# ---- reading -----------------------------------------------------------------------------------


def read_tree_files(
    directory: str,
    options: Options,
    checksums: FileChecksums | None,
    root: storage.Root | None = None,
) -> TreeFiles:
    """Reads all metadata of a tree (beneath `root`).

    Args:
        directory: Where it is.
        options: Of the load.
        checksums: What vouches for its files; None where Orbax has written it.

    Raises:
        Corrupt: Something is missing, damaged or makes no sense.
        Unsupported: It is stored in a way that needs TensorStore, which is not installed.
    """
    present = _listed(directory, root) if checksums is None else _first_names(checksums)
    if names.TREE_METADATA not in present:
        raise Corrupt(
            f"'{directory}' is no tree that Orbax saved: it has no {names.TREE_METADATA}", path=directory
        )
    known = (names.TREE_METADATA, names.SHARDINGS, names.STRINGS)
    found = [name for name in known if name in present]
    if names.ARRAY_METADATAS in present:
        own = os.path.join(directory, names.ARRAY_METADATAS)
        listed = _listed(own, root) if checksums is None else _names_below(names.ARRAY_METADATAS, checksums)
        processes = [process for name in listed if (process := names.process_of(name)) is not None]
        if processes:  # all say the same of keys, and there may be thousands
            found.append(os.path.join(names.ARRAY_METADATAS, names.process_file(min(processes))))
    paths = [os.path.join(directory, name) for name in found]
    contents = dict(zip(found, _read_files(paths, checksums, root), strict=True))
    path = os.path.join(directory, names.TREE_METADATA)
    metadata = TreeMetadata.decode(contents[names.TREE_METADATA], path)
    is_ocdbt = names.MANIFEST in present if metadata.use_ocdbt is None else metadata.use_ocdbt
    leaves = _leaves_of(metadata, path, options)
    keys = [_metadata_key(leaf.name, metadata) for leaf in leaves.arrays]
    found_metadata = _read_array_metadata(directory, keys, metadata, checksums, root, is_ocdbt=is_ocdbt)
    contents.update(zip(keys, found_metadata, strict=True))
    return TreeFiles(directory, is_ocdbt, contents)


def _first_names(checksums: FileChecksums) -> set[str]:
    """What was saved to the directory itself."""
    return {name.partition("/")[0] for name in checksums.whole}


def _names_below(directory: str, checksums: FileChecksums) -> set[str]:
    """The files that were saved to a directory in that of the tree."""
    begin = directory + "/"
    return {name.removeprefix(begin) for name in checksums.whole if name.startswith(begin)}


def _listed(directory: str, root: storage.Root | None) -> set[str]:
    return {entry.name for entry in storage.entries(directory, root)}


def _read_files(
    paths: Sequence[str], checksums: FileChecksums | None, root: storage.Root | None
) -> list[bytes]:
    try:
        contents = storage.read_files(paths, root, limit_bytes=_LIMIT_BYTES)
    except NotFound as error:
        raise Corrupt(f"a file of the checkpoint is missing: {error.message}", **error.context) from error
    if checksums is not None:
        for path, content in zip(paths, contents, strict=True):
            checksums.check(path, content)
    return contents


def _read_array_metadata(
    directory: str,
    keys: Sequence[str],
    metadata: TreeMetadata,
    checksums: FileChecksums | None,
    root: storage.Root | None,
    *,
    is_ocdbt: bool,
) -> list[bytes]:
    if not keys:
        return []
    if not is_ocdbt:
        return _read_files([os.path.join(directory, key) for key in keys], checksums, root)
    values = _values(directory, checksums, root, is_ocdbt=True)
    if isinstance(values, OcdbtValues):
        contents = values.read(keys)
    else:
        store = TensorStore(
            directory,
            is_ocdbt=True,
            version=_version(metadata),
            absent_is_damage=metadata.has_every_chunk,
            root=root,
        )
        contents = store.values(keys)
    found = []
    for key, value in zip(keys, contents, strict=True):
        if value is None:
            raise Corrupt(f"the OCDBT database in '{directory}' has no {key!r}", path=directory)
        found.append(value)
    return found


def _values(
    directory: str, checksums: FileChecksums | None, root: storage.Root | None, *, is_ocdbt: bool
) -> Values | None:
    """Where the values of keys are; None of a database that only TensorStore can read."""
    if not is_ocdbt:
        return FileValues(directory, root)
    try:
        return OcdbtValues(directory, checksums, root)
    except Unsupported:
        return None


def _version(metadata: TreeMetadata) -> Literal[2, 3]:
    return 3 if metadata.use_zarr3 else 2


def _metadata_key(name: str, metadata: TreeMetadata) -> str:
    own = names.ZARR3 if metadata.use_zarr3 else names.ZARR2
    return f"{name}/{own}" if name else own


# ---- what the files mean -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _NamedValue:
    name: str
    value: Value


@dataclass(frozen=True, slots=True)
class _Leaves:
    """The leaves of a tree.

    Attributes:
        structure: Of the tree.
        leaves: In its order.
    """

    structure: Structure
    leaves: list[_NamedValue]

    @property
    def arrays(self) -> list[_NamedValue]:
        """Those that are stored as arrays."""
        return [leaf for leaf in self.leaves if leaf.value.kind != STRING]


def _leaves_of(metadata: TreeMetadata, path: str, options: Options) -> _Leaves:
    structure, values = _structure(metadata, path, options)
    found = [
        _NamedValue(names.parameter(place.keys), values[place.leaf])
        for place in places_of(structure)
        if place.leaf is not None
    ]
    leaves = _Leaves(structure, found)
    for leaf in leaves.arrays:
        names.check_parameter(leaf.name, path)
        if leaf.value.kind not in _FRAMEWORKS:
            raise Unsupported(
                f"'{path}' has a leaf of the kind {leaf.value.kind[:60]!r}, which only the program knows "
                "that saved it",
                path=path,
                array=leaf.name,
            )
    check_distinct([leaf.name for leaf in leaves.arrays], path)
    return leaves


def _structure(metadata: TreeMetadata, path: str, options: Options) -> tuple[Structure, list[Value]]:
    if metadata.rich_tree is not None and _are_rich(options):
        return rich_types.decode(metadata.rich_tree, path)
    with reading(path):
        entries = metadata.entries
        structure, order = structure_of(
            [(entry.path, entry.value.kind if entry.value.is_empty else "") for entry in entries]
        )
    return structure, [entries[number].value for number in order]


def _are_rich(options: Options) -> bool:
    return bool(options.pytree.saving.pytree_metadata_options.support_rich_types)


@paused_collection()
def decode_tree_files(
    files: TreeFiles,
    options: Options,
    checksums: FileChecksums | None,
    root: storage.Root | None = None,
) -> OpenOrbax:
    """Makes sense of the metadata of a tree; the other files will be opened beneath `root`.

    Args:
        files: The metadata.
        options: Of the load.
        checksums: What vouches for its files; None where Orbax has written it.

    Raises:
        Corrupt: They contradict each other or the format.
        Unsupported: An array is of a dtype that is not known here.
    """
    directory = files.directory
    path = os.path.join(directory, names.TREE_METADATA)
    metadata = TreeMetadata.decode(files.contents[names.TREE_METADATA], path)
    leaves = _leaves_of(metadata, path, options)
    arrays = [_named_array(files, leaf.name, metadata) for leaf in leaves.arrays]
    stored = _stored_arrays(files, leaves.arrays, arrays)
    tree = OrbaxTree(
        leaves.structure, _tree_leaves(files, leaves), stored, [leaf.name for leaf in leaves.arrays]
    )
    absent_is_damage = metadata.has_every_chunk and options.array.loading.raise_array_data_missing_error
    return OpenOrbax(
        directory,
        tree,
        arrays,
        is_ocdbt=files.is_ocdbt,
        absent_is_damage=absent_is_damage,
        # Without arrays there may be no database.
        values=_values(directory, checksums, root, is_ocdbt=files.is_ocdbt and bool(arrays)),
        checksums=checksums,
        root=root,
    )


def _named_array(files: TreeFiles, name: str, metadata: TreeMetadata) -> NamedArray:
    key = _metadata_key(name, metadata)
    path = os.path.join(files.directory, key)
    array = zarr.decode(files.contents[key], path, _version(metadata))
    zarr.check_size(array, path)
    return NamedArray(name, array)


def _tree_leaves(files: TreeFiles, leaves: _Leaves) -> list[Leaf]:
    path = os.path.join(files.directory, names.STRINGS)
    strings: dict[str, object] | None = None
    found: list[Leaf] = []
    arrays = 0
    for leaf in leaves.leaves:
        if leaf.value.kind != STRING:
            found.append(ArrayLeaf(arrays))
            arrays += 1
            continue
        if strings is None:
            if names.STRINGS not in files.contents:
                raise Corrupt(f"a file of the checkpoint is missing: '{path}'", path=path)
            strings = strings_file.decode(files.contents[names.STRINGS], path)
        found.append(strings_file.find(strings, leaf.name, path))
    return found


def _stored_arrays(
    files: TreeFiles, leaves: Sequence[_NamedValue], arrays: Sequence[NamedArray]
) -> list[StoredArray]:
    path = os.path.join(files.directory, names.SHARDINGS)
    content = files.contents.get(names.SHARDINGS)
    shardings = {} if content is None else shardings_file.decode(content, path)
    implementations = _key_implementations(files)
    found = []
    for leaf, array in zip(leaves, arrays, strict=True):
        stored = _stored_array(leaf, array.zarr, implementations.get(leaf.name))
        if stored.framework == "jax":
            stored.sharding = shardings_file.fitting(shardings.get(leaf.name), len(stored.shape), path)
        found.append(stored)
    return found


def _key_implementations(files: TreeFiles) -> dict[str, str]:
    """The implementations of PRNG keys, by the names of arrays."""
    found: dict[str, str] = {}
    for name, content in files.contents.items():
        if os.path.dirname(name) == names.ARRAY_METADATAS:
            for array in array_metadatas.decode(content, os.path.join(files.directory, name)):
                if array.key_implementation is not None:
                    found[array.name] = array.key_implementation
    return found


def _stored_array(leaf: _NamedValue, array: zarr.ZarrArray, key_implementation: str | None) -> StoredArray:
    form, shape = dtypes.of_name(array.dtype), array.shape
    if leaf.value.kind == JAX_ARRAY and key_implementation is not None:
        if array.dtype != "uint32" or not shape:
            raise Corrupt(
                f"PRNG keys of {key_implementation!r} are stored as {array.dtype} of shape {shape}",
                array=leaf.name,
            )
        form, shape = dtypes.key_dtype(key_implementation, shape[-1:]), shape[:-1]
    if leaf.value.kind == SCALAR and shape:
        raise Corrupt(f"a number is stored as an array of shape {shape}", array=leaf.name)
    framework = _FRAMEWORKS[leaf.value.kind]
    return StoredArray(shape, form.name, framework, form.storage, form.storage_shape(shape), None, {})
