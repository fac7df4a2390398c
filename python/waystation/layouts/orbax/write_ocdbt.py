"""OCDBT databases made in one piece: the manifest and the B+tree over values that are in data files already.

OCDBT (an Orbax checkpoint's default) is a manifest that names the root of a B+tree, whose nodes and values
lie in files of any layout, by offset and length. A checkpoint is written once and by us alone, so there is
nothing to stage, merge or commit here: data files are the engine's, and this makes the tree over them from
a finished list. The format is specified by TensorStore's documentation of its driver `ocdbt`.

Invariants: keys stand in the order of their bytes; small values are inside of nodes; nodes are cut at a
size, so that the tree of any number of keys is readable; every node and the manifest carry a CRC-32C.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from waystation import _native

# Larger values go to a data file; readers accept up to a megabyte.
INLINE_BYTES = 1024
NODE_BYTES = 8 << 20
_NODE_ENTRIES = 1 << 18  # a reader accepts four times as many
_DECODED_NODE_BYTES = 100_000_000  # what Orbax configures

_DATA_DIRECTORY = "d/"

_MANIFEST_MAGIC = 0x0CDB3A2A
_NODE_MAGIC = 0x0CDB20DE
_UUID_BYTES = 16
_ARITY_LOG2 = 4
_UNCOMPRESSED = b"\0"
_INLINE, _INDIRECT = b"\0", b"\1"


class DataFile(NamedTuple):
    """A data file, by its path from the manifest: what nodes in it build on, and the rest."""

    base: str
    relative: str


class Reference(NamedTuple):
    """A value that stands in a data file."""

    file: DataFile
    offset: int
    nbytes: int


Value = bytes | Reference


def new_data_file(base: str = "") -> DataFile:
    """A data file that there is not yet; `base` is the directory of a process, with a slash, or empty."""
    return DataFile(base, f"{_DATA_DIRECTORY}{secrets.token_hex(16)}")


def is_data_file(path: str) -> bool:
    """Whether a file of a database, by its path from the manifest, is a data file of no process's own."""
    return path.startswith(_DATA_DIRECTORY)


@dataclass(frozen=True, slots=True)
class Database:
    """A database but for its values.

    Attributes:
        manifest: The bytes of `manifest.ocdbt`.
        nodes: The bytes of the data file that was named for them.
    """

    manifest: bytes
    nodes: bytes


def encode(
    values: Mapping[bytes, Value],
    node_file: DataFile,
    commit_ns: int,
    *,
    before: bytes = b"",
    node_bytes: int = NODE_BYTES,
) -> Database:
    """The database of some values, at least one.

    Args:
        values: By their keys.
        node_file: Where the nodes are to stand.
        commit_ns: When it is written, nanoseconds since 1970.
        before: What stands in that file before them.
        node_bytes: About the largest size of a node.
    """
    nodes = bytearray(before)
    children = _leaves(sorted(values.items()), nodes, node_file, node_bytes)
    height = 0
    while len(children) > 1:
        height += 1
        children = _interior(children, nodes, node_file, height, node_bytes)
    return Database(_manifest(children[0], height, commit_ns), bytes(nodes))


class _Child(NamedTuple):
    """A node that has been encoded: its first key, where it is, and what is below it."""

    key: bytes
    place: Reference
    keys: int
    tree_bytes: int
    value_bytes: int


def _leaves(
    entries: Sequence[tuple[bytes, Value]], nodes: bytearray, node_file: DataFile, node_bytes: int
) -> list[_Child]:
    sizes = [len(key) + (len(value) if isinstance(value, bytes) else 8) for key, value in entries]
    children = []
    for part in _parts(sizes, node_bytes):
        own = entries[part]
        indirect = [value for _, value in own if isinstance(value, Reference)]
        table, numbers = _file_table([value.file for value in indirect])
        values = [value for _, value in own]
        body = [
            bytes([0]),
            table,
            _varint(len(own)),
            *_keys([key for key, _ in own]),
            *(_varint(len(value) if isinstance(value, bytes) else value.nbytes) for value in values),
            *(_INLINE if isinstance(value, bytes) else _INDIRECT for value in values),
            *(_varint(numbers[value.file]) for value in indirect),
            *(_varint(value.offset) for value in indirect),
            *(value for value in values if isinstance(value, bytes)),
        ]
        place = _append(nodes, node_file, body)
        value_bytes = sum(value.nbytes for value in indirect)
        children.append(_Child(own[0][0], place, len(own), place.nbytes, value_bytes))
    return children


def _interior(
    children: Sequence[_Child], nodes: bytearray, node_file: DataFile, height: int, node_bytes: int
) -> list[_Child]:
    parents = []
    for part in _parts([len(child.key) + 32 for child in children], node_bytes, least=2):
        own = children[part]
        table, numbers = _file_table([child.place.file for child in own])
        prefixes, suffixes, keys = _keys([child.key for child in own])
        body = [
            bytes([height]),
            table,
            _varint(len(own)),
            prefixes,
            suffixes,
            bytes(len(own)),  # children say their keys in full
            keys,
            *_references([child.place for child in own], numbers),
            *_counts(own),
        ]
        place = _append(nodes, node_file, body)
        parents.append(
            _Child(
                own[0].key,
                place,
                sum(child.keys for child in own),
                place.nbytes + sum(child.tree_bytes for child in own),
                sum(child.value_bytes for child in own),
            )
        )
    return parents


def _manifest(root: _Child, height: int, commit_ns: int) -> bytes:
    table, numbers = _file_table([root.place.file])
    configuration = [
        secrets.token_bytes(_UUID_BYTES),
        _varint(0),  # one manifest
        _varint(INLINE_BYTES),
        _varint(_DECODED_NODE_BYTES),
        bytes([_ARITY_LOG2]),
        _UNCOMPRESSED,
    ]
    version = [
        _varint(1),  # of them
        _varint(1),  # its generation
        bytes([height]),
        *_references([root.place], numbers),
        *_counts([root]),
        commit_ns.to_bytes(8, "little"),
    ]
    older_versions = _varint(0)
    return _framed(_MANIFEST_MAGIC, [*configuration, table, *version, older_versions])


def _parts(sizes: Sequence[int], most_bytes: int, least: int = 1) -> Iterator[slice]:
    """Divides entries into nodes of about so many bytes, with at least so many entries but for the last."""
    start = held = 0
    for number, size in enumerate(sizes):
        is_full = held + size > most_bytes or number - start == _NODE_ENTRIES
        if is_full and number - start >= least:
            yield slice(start, number)
            start, held = number, 0
        held += size
    yield slice(start, len(sizes))


def _append(nodes: bytearray, node_file: DataFile, body: Sequence[bytes]) -> Reference:
    node = _framed(_NODE_MAGIC, body)
    place = Reference(node_file, len(nodes), len(node))
    nodes += node
    return place


def _framed(magic: int, body: Sequence[bytes]) -> bytes:
    """A header with the length of all, the body, and their checksum."""
    version = _varint(0)
    content = b"".join(body)
    nbytes = 4 + 8 + len(version) + len(_UNCOMPRESSED) + len(content) + 4
    framed = b"".join(
        [magic.to_bytes(4, "big"), nbytes.to_bytes(8, "little"), version, _UNCOMPRESSED, content]
    )
    return framed + _native.crc32c(framed).to_bytes(4, "little")


def _file_table(files: Sequence[DataFile]) -> tuple[bytes, dict[DataFile, int]]:
    """The table of data files of a node, and the number of each."""
    known = sorted(set(files))
    paths = [(file.base + file.relative).encode() for file in known]
    bases = [len(file.base.encode()) for file in known]
    prefixes = [
        # What two paths have in common may only reach beyond their bases where these are the same.
        _shared_bytes(paths[i], paths[i + 1])
        if known[i].base == known[i + 1].base
        else _shared_bytes(paths[i][: bases[i]], paths[i + 1][: bases[i + 1]])
        for i in range(len(known) - 1)
    ]
    suffixes = [path[prefix:] for path, prefix in zip(paths, [0, *prefixes], strict=False)]
    table = [
        _varint(len(known)),
        *map(_varint, prefixes),
        *(_varint(len(suffix)) for suffix in suffixes),
        *map(_varint, bases),
        *suffixes,
    ]
    return b"".join(table), {file: number for number, file in enumerate(known)}


def _keys(keys: Sequence[bytes]) -> tuple[bytes, bytes, bytes]:
    """Keys in order: how much of each is that of the one before, how long the rest is, and the rest."""
    prefixes = list(itertools.starmap(_shared_bytes, itertools.pairwise(keys)))
    suffixes = [key[prefix:] for key, prefix in zip(keys, [0, *prefixes], strict=True)]
    lengths = b"".join(_varint(len(suffix)) for suffix in suffixes)
    return b"".join(map(_varint, prefixes)), lengths, b"".join(suffixes)


def _shared_bytes(one: bytes, two: bytes) -> int:
    """How many bytes two of them begin with alike."""
    pairs = zip(one, two, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(two)))


def _references(places: Sequence[Reference], numbers: Mapping[DataFile, int]) -> Iterator[bytes]:
    yield from (_varint(numbers[place.file]) for place in places)
    yield from (_varint(place.offset) for place in places)
    yield from (_varint(place.nbytes) for place in places)


def _counts(children: Sequence[_Child]) -> Iterator[bytes]:
    yield from (_varint(child.keys) for child in children)
    yield from (_varint(child.tree_bytes) for child in children)
    yield from (_varint(child.value_bytes) for child in children)


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first."""
    if number < 0x80:
        return bytes([number])
    found = bytearray()
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)
