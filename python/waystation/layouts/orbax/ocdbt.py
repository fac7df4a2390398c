"""OCDBT databases, read: which extents of which files the values of keys are.

`manifest.ocdbt` names the root of a B+tree, whose nodes lie in data files; leaves name values, or hold them
themselves if they are small. Only nodes on the way to the keys that are wanted are read, each once. The
format is specified by TensorStore's documentation of its driver `ocdbt`. Invariants: every node was verified
by its CRC-32C; no path leads out of the directory; a tree is no higher than its root says, so that nodes that
refer to each other are no endless way.
"""

from __future__ import annotations

import itertools
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from waystation import _native, storage
from waystation._errors import Corrupt, NotFound, Unsupported
from waystation.layouts.orbax.checksums import FileChecksums
from waystation.layouts.orbax.json_files import reading, require
from waystation.layouts.orbax.names import MANIFEST
from waystation.layouts.orbax.values import Value

_MANIFEST_MAGIC, _NODE_MAGIC = 0x0CDB3A2A, 0x0CDB20DE
_HEADER_BYTES, _CHECKSUM_BYTES, _UUID_BYTES, _TIME_BYTES = 12, 4, 16, 8
_UNCOMPRESSED, _ZSTD = 0, 1
_INLINE, _INDIRECT = 0, 1
_NODE_LIMIT_BYTES = 1 << 30
_HIGHEST_TREE = 64
_LIMIT_BYTES = 256 << 20  # of the manifest


class _DataFile(NamedTuple):
    """A data file, by its path from the directory of the database, and what paths in its nodes count from."""

    path: str
    base: str


class _Extent(NamedTuple):
    """Part of a data file."""

    file: _DataFile
    offset: int
    nbytes: int


_NO_FILE = _DataFile("", "")  # where the root of an empty tree is
_NOWHERE = (1 << 64) - 1  # its offset and length, or nothing


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A node with values: extents, or the bytes themselves."""

    values: dict[bytes, _Extent | bytes]


@dataclass(frozen=True, slots=True)
class _Interior:
    """A node with nodes: the first key of each, and how many bytes of all keys below it are said here."""

    keys: list[bytes]
    prefixes: list[bytes]
    children: list[_Extent]


class OcdbtValues:
    """The values of a database that will not change.

    Args:
        directory: Where its manifest is.
        checksums: What vouches for its files; None where Orbax has written it.
        root: The directory beneath which its files are opened; without it, they are by their paths.

    Raises:
        Corrupt: The manifest is missing or damaged.
        Unsupported: It is of a kind that Orbax does not write.
    """

    def __init__(
        self,
        directory: str,
        checksums: FileChecksums | None = None,
        root: storage.Root | None = None,
    ) -> None:
        self._directory = directory
        self._checksums = checksums
        self._held = root
        self._nodes: dict[tuple[_Extent, bytes, int], _Leaf | _Interior] = {}
        self._files: dict[str, int] = {}
        path = os.path.join(directory, MANIFEST)
        try:
            data = storage.read_file(path, root, limit_bytes=_LIMIT_BYTES)
        except NotFound as error:
            raise Corrupt(f"a file of the checkpoint is missing: {error.message}", **error.context) from error
        if checksums is not None:
            checksums.check(path, data)
        with reading(path):
            self._root = _decode_manifest(data, path)

    def find(self, keys: Sequence[str]) -> list[Value | None]:
        """Where the values of keys are.

        Raises:
            Corrupt: A node is missing or damaged, or a value is in a node where it cannot be read in part.
        """
        found = self._look_up([key.encode() for key in keys])
        return [None if value is None else self._value(value) for value in found]

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values of keys themselves, which are small."""
        return [
            value if value is None or isinstance(value, bytes) else self._read(value)
            for value in self._look_up([key.encode() for key in keys])
        ]

    def where(self, key: str) -> str:
        """What to call the place of a key in messages."""
        return os.path.join(self._directory, MANIFEST) + f"|{key}"

    # ---- the tree ------------------------------------------------------------------------------

    def _look_up(self, keys: Sequence[bytes]) -> list[_Extent | bytes | None]:
        found: dict[bytes, _Extent | bytes] = {}
        if self._root is not None:
            extent, height = self._root
            self._descend(extent, b"", height, sorted(set(keys)), found)
        return [found.get(key) for key in keys]

    def _descend(
        self,
        extent: _Extent,
        prefix: bytes,
        height: int,
        keys: list[bytes],
        found: dict[bytes, _Extent | bytes],
    ) -> None:
        """Finds keys, which all begin with `prefix`, below a node."""
        node = self._node(extent, prefix, height)
        if isinstance(node, _Leaf):
            found.update((key, node.values[key]) for key in keys if key in node.values)
            return
        start = 0
        while start < len(keys):
            number = bisect_right(node.keys, keys[start]) - 1
            end = len(keys)
            if number + 1 < len(node.keys):
                end = next((at for at in range(start, end) if keys[at] >= node.keys[number + 1]), end)
            if number >= 0:
                own = [key for key in keys[start:end] if key.startswith(node.prefixes[number])]
                if own:
                    self._descend(node.children[number], node.prefixes[number], height - 1, own, found)
            start = end

    def _node(self, extent: _Extent, prefix: bytes, height: int) -> _Leaf | _Interior:
        known = self._nodes.get((extent, prefix, height))
        if known is None:
            path = os.path.join(self._directory, extent.file.path)
            data = self._read(extent)
            with reading(path):
                known = _decode_node(data, extent.file.base, prefix, height, path)
            self._nodes[extent, prefix, height] = known
        return known

    # ---- files ---------------------------------------------------------------------------------

    def _value(self, value: _Extent | bytes) -> Value:
        if isinstance(value, bytes):
            return Value.of_content(value)
        path, file_bytes = self._file(value)
        return Value(path, value.offset, value.nbytes, file_bytes)

    def _file(self, extent: _Extent) -> tuple[str, int]:
        if extent.file == _NO_FILE:
            raise Corrupt(f"'{self._directory}' is damaged: a part of it is in no file", path=self._directory)
        path = os.path.join(self._directory, extent.file.path)
        if path not in self._files:
            status = storage.status(path, self._held)
            if status is None:
                raise Corrupt(f"a file of the checkpoint is missing: '{path}'", path=path)
            self._files[path] = status.nbytes
        file_bytes = self._files[path]
        if extent.offset + extent.nbytes > file_bytes:
            raise Corrupt(
                f"'{path}' is truncated: it has {file_bytes} bytes, and {extent.nbytes} were written at "
                f"{extent.offset}",
                path=path,
            )
        return path, file_bytes

    def _read(self, extent: _Extent) -> bytes:
        path, file_bytes = self._file(extent)
        if extent.nbytes > _NODE_LIMIT_BYTES:
            raise Corrupt(f"'{path}' is said to hold a node of {extent.nbytes} bytes", path=path)
        if self._checksums is not None:
            return self._checksums.read(path, extent.offset, extent.nbytes, file_bytes)
        return storage.read(path, self._held, extent.offset, extent.nbytes)


# ---- decoding ----------------------------------------------------------------------------------


class _Bytes:
    """Takes numbers and strings off the front of a node."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        require(0 <= count <= len(self._data) - self._at, "it ends too early")
        self._at += count
        return self._data[self._at - count : self._at]

    def byte(self) -> int:
        return self.take(1)[0]

    def number(self) -> int:
        """Seven bits a byte, the lowest first."""
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
            require(shift < 64, "a number is too long")
        require(value <= _NOWHERE, "a number is too large")
        return value

    def numbers(self, count: int) -> list[int]:
        # Every number takes a byte: so a count is known to be possible before anything is made of it.
        require(count <= len(self._data) - self._at, "it ends too early")
        return [self.number() for _ in range(count)]

    def strings(self, lengths: Sequence[int]) -> list[bytes]:
        return [self.take(length) for length in lengths]

    def finish(self) -> None:
        require(self._at == len(self._data), "it goes on after its end")


def _unframed(data: bytes, magic: int, path: str) -> _Bytes:
    """Checks a header and checksum, and gives what is between, decompressed."""
    require(len(data) > _HEADER_BYTES + _CHECKSUM_BYTES, "it is too short")
    require(int.from_bytes(data[:4], "big") == magic, "it is something else")
    require(int.from_bytes(data[4:_HEADER_BYTES], "little") == len(data), "it says another length")
    content, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if _native.crc32c(content) != int.from_bytes(checksum, "little"):
        raise Corrupt(f"'{path}' is damaged: its checksum differs", path=path)
    head = _Bytes(content[_HEADER_BYTES:])
    version, compression = head.number(), head.number()
    if version != 0 or compression not in (_UNCOMPRESSED, _ZSTD):
        raise Unsupported(
            f"'{path}' is OCDBT of version {version}, or compressed in an unknown way", path=path
        )
    body = content[_HEADER_BYTES + 2 :]
    if compression == _ZSTD:
        body = _native.decompress_zstd_frame(body, limit_bytes=_NODE_LIMIT_BYTES)
    return _Bytes(body)


def _decode_manifest(data: bytes, path: str) -> tuple[_Extent, int] | None:
    """The root of the newest version and its height; None if it is empty."""
    body = _unframed(data, _MANIFEST_MAGIC, path)
    body.take(_UUID_BYTES)
    kind, _inline_bytes, _node_bytes = body.numbers(3)
    if kind != 0:
        raise Unsupported(f"'{path}' is a manifest in several files, which Orbax does not write", path=path)
    body.byte()
    if body.number() == _ZSTD:
        body.take(4)
    files = _file_table(body, "")
    count = body.number()
    require(count > 0, "it has no version")
    body.numbers(count)  # generations, ascending
    heights = [body.byte() for _ in range(count)]
    extents = _extents(body, count, files)
    # What follows counts keys and bytes, says when versions were made, and where older ones are.
    require(heights[-1] <= _HIGHEST_TREE, "its tree is too high")
    return None if extents[-1].nbytes in (0, _NOWHERE) else (extents[-1], heights[-1])


def _decode_node(data: bytes, base: str, prefix: bytes, height: int, path: str) -> _Leaf | _Interior:
    body = _unframed(data, _NODE_MAGIC, path)
    require(body.byte() == height, "a node is at another height than its tree says")
    files = _file_table(body, base)
    count = body.number()
    require(count > 0, "a node has no entries")
    shared, lengths = [0, *body.numbers(count - 1)], body.numbers(count)
    if height:
        said = body.numbers(count)
        keys = _keys(shared, body.strings(lengths))
        require(all(length <= len(key) for length, key in zip(said, keys, strict=True)), "a key is too short")
        children = _extents(body, count, files)
        body.numbers(3 * count)  # keys and bytes below
        body.finish()
        prefixes = [prefix + key[:length] for key, length in zip(keys, said, strict=True)]
        return _Interior([prefix + key for key in keys], prefixes, children)
    keys = _keys(shared, body.strings(lengths))
    values = _values(body, count, files)
    body.finish()
    return _Leaf({prefix + key: value for key, value in zip(keys, values, strict=True)})


def _keys(shared: Sequence[int], suffixes: Sequence[bytes]) -> list[bytes]:
    found = _with_prefixes(shared, suffixes)
    require(all(one < two for one, two in itertools.pairwise(found)), "keys are not in order")
    return found


def _with_prefixes(shared: Sequence[int], suffixes: Sequence[bytes]) -> list[bytes]:
    """Strings, of each of which the first bytes are those of the one before."""
    found: list[bytes] = []
    previous = b""
    for length, suffix in zip(shared, suffixes, strict=True):
        require(length <= len(previous), "a name has more in common with another than that has")
        previous = previous[:length] + suffix
        found.append(previous)
    return found


def _values(body: _Bytes, count: int, files: Sequence[_DataFile]) -> list[_Extent | bytes]:
    lengths = body.numbers(count)
    kinds = [body.byte() for _ in range(count)]
    require(set(kinds) <= {_INLINE, _INDIRECT}, "a value is neither here nor elsewhere")
    elsewhere = sum(kinds)
    numbers, offsets = body.numbers(elsewhere), body.numbers(elsewhere)
    places = iter(_made_extents(numbers, offsets, _chosen(lengths, kinds, _INDIRECT), files))
    here = iter(body.strings(_chosen(lengths, kinds, _INLINE)))
    return [next(places) if kind == _INDIRECT else next(here) for kind in kinds]


def _chosen(lengths: Sequence[int], kinds: Sequence[int], kind: int) -> list[int]:
    return [length for length, own in zip(lengths, kinds, strict=True) if own == kind]


def _extents(body: _Bytes, count: int, files: Sequence[_DataFile]) -> list[_Extent]:
    return list(_made_extents(body.numbers(count), body.numbers(count), body.numbers(count), files))


def _made_extents(
    numbers: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], files: Sequence[_DataFile]
) -> Iterator[_Extent]:
    for number, offset, length in zip(numbers, offsets, lengths, strict=True):
        # The root of an empty tree is in no file, and may be without bytes.
        require(number < len(files) or length == 0, "it names a data file that it does not list")
        yield _Extent(files[number] if number < len(files) else _NO_FILE, offset, length)


def _file_table(body: _Bytes, base: str) -> list[_DataFile]:
    """The data files that a node names; their paths count from `base`."""
    count = body.number()
    if not count:
        return []
    shared, lengths = [0, *body.numbers(count - 1)], body.numbers(count)
    bases = body.numbers(count)
    paths = _with_prefixes(shared, body.strings(lengths))
    found = []
    for path, length in zip(paths, bases, strict=True):
        require(length <= len(path), "the base of a path is longer than the path")
        if not path:
            found.append(_NO_FILE)
            continue
        text = base + path.decode()
        require("\0" not in text, "a data file is elsewhere")
        require(all(part not in ("", ".", "..") for part in text.split("/")), "a data file is elsewhere")
        found.append(_DataFile(text, base + path[:length].decode()))
    return found
