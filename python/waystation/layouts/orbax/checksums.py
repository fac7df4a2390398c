"""`.waystation-checksums`: what vouches for every file of a checkpoint in one of Orbax's layouts.

Orbax writes no checksums of data, and ignores files at the top of a checkpoint that it does not know. So a
save puts one there, and loads verify by it what they read. It consists of

1. a sealed record in one line: the layout of the rest, and what `_CHECKPOINT_METADATA` says;
2. of each checkpointable a list of its files, as JSON: small files and files of handlers with a digest of the
   whole, data files with their length and a checksum of their block checksums; and after it
3. the CRC-64/NVME of every block of these data files, little-endian, file after file.

The record vouches for the lists, and a list for the block checksums of each file. So a process that loads a
part reads the record, one list, and the checksums of the files that it reads.

`orbax.checkpoint`, of which Orbax asks only whether it is there, says that this file was written.

Invariants: nothing of the file is used before it has been verified. A checkpoint without the file is one that
Orbax has written, or `orbax.checkpoint` says that it has been removed. A checkpointable that it does not name
has been put there by somebody else; one that it names may have been deleted. Orbax changes nothing that was
saved but `_CHECKPOINT_METADATA`, which then has fewer handlers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from waystation import _native, storage
from waystation._errors import Corrupt, NotFound, Unsupported
from waystation.layouts.native.records import Digest
from waystation.layouts.orbax import names
from waystation.layouts.orbax.json_files import parse_object, reading, require

BLOCK_BYTES: int = _native.BLOCK_BYTES
_VERSION = 1
_SUM_BYTES = 8
_GAP_BYTES = 64 << 10  # reading so many bytes that nobody needs takes no longer than asking twice
_CALL_BYTES = 16 << 20
_RECORD_LIMIT_BYTES = 256 << 20
_RECORD_PART_BYTES = 256 << 10  # read at a time
_HANDLERS = "item_handlers"
_ADVICE = "restore another checkpoint, or see 'waystation verify'"
INDICATOR = f"The checksums of all files of this checkpoint are in {names.CHECKSUMS}\n".encode()


@dataclass(frozen=True, slots=True)
class SummedFile:
    """A file whose blocks have checksums.

    Attributes:
        name: Its path from the directory of the checkpointable, divided by slashes.
        nbytes: Its length.
        blocks: The checksum of each block, as little-endian 64-bit integers.
    """

    name: str
    nbytes: int
    blocks: bytes

    @classmethod
    def of(cls, name: str, content: bytes) -> SummedFile:
        """A file with this content."""
        view = memoryview(content)
        blocks = [view[begin : begin + BLOCK_BYTES] for begin in range(0, len(content), BLOCK_BYTES)]
        sums = b"".join(_native.crc64(block).to_bytes(_SUM_BYTES, "little") for block in blocks)
        return cls(name, len(content), sums)


@dataclass(frozen=True, slots=True)
class Listed:
    """The files of a checkpointable, of a save.

    Attributes:
        is_tree: Whether it is a tree in Orbax's own files.
        whole: Digests of files that are read as a whole.
        data: The files of which parts are read.
    """

    is_tree: bool
    whole: Mapping[str, Digest]
    data: Sequence[SummedFile] = ()


def encode(metadata: bytes, top: Mapping[str, Digest], checkpointables: Mapping[str, Listed]) -> bytes:
    """The bytes of the file.

    Args:
        metadata: The content of `_CHECKPOINT_METADATA`.
        top: The other files at the top of the checkpoint.
        checkpointables: The files of each checkpointable.
    """
    sections: dict[str, list[Any]] = {}
    body: list[bytes] = []
    end = 0
    for name, listed in checkpointables.items():
        entries = {
            "whole": {file: _digest_to_json(digest) for file, digest in listed.whole.items()},
            "data": [
                [file.name, file.nbytes, _hexadecimal(_native.crc64(file.blocks))] for file in listed.data
            ],
        }
        files = json.dumps(entries, separators=(",", ":")).encode()
        sections[name] = [end, len(files), _hexadecimal(_native.crc64(files)), listed.is_tree]
        own = [files, *(file.blocks for file in listed.data)]
        end += sum(map(len, own))
        body += own
    said, handlers = _without_handlers(json.loads(metadata))
    record = {
        "version": _VERSION,
        "block_bytes": BLOCK_BYTES,
        "bytes_after": end,
        "metadata": _digest_to_json(said),
        "handlers": handlers,
        "top": {file: _digest_to_json(digest) for file, digest in top.items()},
        "checkpointables": sections,
    }
    return _native.seal_json(json.dumps(record, separators=(",", ":")).encode()) + b"".join(body)


def with_commit_file(content: bytes, committed: bytes, path: str) -> bytes:
    """The bytes of the file for a copy that another file commits.

    Args:
        content: The bytes of the file, of the checkpoint that is copied.
        committed: The content of the file that commits the copy.
        path: Where the file is to be, for errors.

    Raises:
        Corrupt: The file is damaged.
    """
    line, newline, rest = content.partition(b"\n")
    record = parse_object(_native.open_sealed_json(line + newline, path), path)
    record["top"] = {**record["top"], names.COMMIT_SUCCESS: _digest_to_json(Digest.of(committed))}
    return _native.seal_json(json.dumps(record, separators=(",", ":")).encode()) + rest


def _without_handlers(metadata: dict[str, Any]) -> tuple[Digest, Any]:
    """A digest of what metadata say but for the handlers, and these."""
    rest = {name: value for name, value in metadata.items() if name != _HANDLERS}
    return Digest.of(json.dumps(rest, sort_keys=True).encode()), metadata.get(_HANDLERS)


def _digest_to_json(digest: Digest) -> list[Any]:
    return [digest.nbytes, _hexadecimal(digest.crc64)]


def _hexadecimal(checksum: int) -> str:
    return f"{checksum:016x}"


# ---- reading -----------------------------------------------------------------------------------


def is_removed(checkpoint: str, root: storage.Root | None = None) -> bool:
    """Whether a checkpoint lacks the file although it was saved with one."""
    indicator = os.path.join(checkpoint, names.INDICATOR)
    if storage.is_there(os.path.join(checkpoint, names.CHECKSUMS), root):
        return False
    return storage.is_there(indicator, root) and (
        names.CHECKSUMS.encode() in storage.read(indicator, root, 0, len(INDICATOR))
    )


@dataclass(frozen=True, slots=True)
class _Section:
    """Where the list of the files of a checkpointable is, and its checksum."""

    begin: int
    nbytes: int
    crc64: int
    is_tree: bool


@dataclass(frozen=True, slots=True)
class Checksums:
    """The sealed record of the file.

    Attributes:
        path: Of the file.
        record: Its bytes, as other processes are sent them.
        file_bytes: The length of the file.
        top: Digests of the files at the top of the checkpoint, but for `_CHECKPOINT_METADATA`.
    """

    path: str
    record: bytes
    file_bytes: int
    top: dict[str, Digest]
    _metadata: Digest
    _handlers: Any
    _sections: dict[str, _Section]
    _root: storage.Root | None
    _root_of_files: storage.Root | None

    @classmethod
    def read(cls, checkpoint: str, root: storage.Root | None = None) -> Checksums | None:
        """The record in a checkpoint; None if it has none.

        Args:
            checkpoint: The checkpoint.
            root: The directory beneath which its files are opened: that of the checkpoint, or, where only a
                part of it is read, that of the part.

        Raises:
            Corrupt: It is damaged.
            Unsupported: It is of a newer version.
        """
        path = os.path.join(checkpoint, names.CHECKSUMS)
        try:
            with storage.opened(path, _root_of(path, root)) as file:
                record = _first_line(file)
                file_bytes = file.status.nbytes
        except NotFound:
            return None
        found = cls.decode(record, path, root)
        if file_bytes != found.file_bytes:
            raise Corrupt(
                f"'{path}' has {file_bytes} bytes where {found.file_bytes} were written; {_ADVICE}", path=path
            )
        return found

    @classmethod
    def decode(cls, record: bytes, path: str, root: storage.Root | None = None) -> Checksums:
        """Makes sense of a record.

        Raises:
            Corrupt: It is damaged.
            Unsupported: It is of a newer version.
        """
        body = parse_object(_native.open_sealed_json(record, path), path)
        with reading(path):
            if body["version"] != _VERSION:
                raise Unsupported(
                    f"'{path}' is of version {body['version']!r:.20}, and this release of Waystation reads "
                    f"version {_VERSION}; load with a newer release",
                    path=path,
                )
            require(body["block_bytes"] == BLOCK_BYTES, "its blocks are of another size")
            sections = {
                name: _Section(
                    _natural(begin) + len(record), _natural(nbytes), _checksum(crc64), bool(is_tree)
                )
                for name, (begin, nbytes, crc64, is_tree) in body["checkpointables"].items()
            }
            top = {name: _digest(entry) for name, entry in body["top"].items()}
            file_bytes = len(record) + _natural(body["bytes_after"])
            metadata = _digest(body["metadata"])
            own = _root_of(path, root)
            return cls(path, record, file_bytes, top, metadata, body["handlers"], sections, own, root)

    @property
    def checkpointables(self) -> list[str]:
        """The checkpointables that were saved."""
        return list(self._sections)

    def contents(self) -> object:
        """What it vouches for: equal of two checkpoints whose files are equal, but for those by which they
        are committed."""
        top = {name: digest for name, digest in self.top.items() if name != names.COMMIT_SUCCESS}
        sections = {name: (each.nbytes, each.crc64, each.is_tree) for name, each in self._sections.items()}
        return self._metadata, top, sections

    def is_tree(self, name: str) -> bool:
        """Whether a checkpointable was saved, as a tree in Orbax's own files."""
        return name in self._sections and self._sections[name].is_tree

    def check_metadata(self, content: bytes | None, path: str) -> None:
        """Compares the content of `_CHECKPOINT_METADATA`, None where it is missing, with what was written.
        It may have lost handlers, as it does when checkpointables are deleted.

        Raises:
            Corrupt: It says something else.
        """
        if content is None:
            raise Corrupt(f"a committed file is missing: '{path}'; {_ADVICE}", path=path)
        said, handlers = _without_handlers(parse_object(content, path))
        known = self._handlers
        is_same = handlers == known or (
            isinstance(handlers, dict)
            and isinstance(known, dict)
            and all(known.get(name, handler) == handler for name, handler in handlers.items())
            and handlers.keys() <= known.keys()
        )
        if said != self._metadata or not is_same:
            raise Corrupt(f"'{path}' is not the file that was committed; {_ADVICE}", path=path)

    def _is_replaced(self, directory: str) -> bool:
        """Whether a tree is a checkpoint of its own, which somebody has saved in the place of ours since."""
        own = os.path.join(directory, names.CHECKPOINT_METADATA)
        return storage.is_there(own, self._root_of_files)

    def of(self, directory: str) -> FileChecksums | None:
        """What vouches for the files of the checkpointable in a directory; None for one that was not saved
        with the others.

        Raises:
            Corrupt: The file is damaged.
        """
        is_whole = directory == os.path.dirname(self.path)  # of a flat checkpoint
        section = self._sections.get("" if is_whole else os.path.basename(directory))
        if section is None or (section.is_tree and not is_whole and self._is_replaced(directory)):
            return None
        content = _read_range(self.path, self._root, section.begin, section.nbytes)
        if _native.crc64(content) != section.crc64:
            raise _damaged(self.path)
        body = parse_object(content, self.path)
        whole: dict[str, Digest] = {}
        data: dict[str, _Blocks] = {}
        begin = section.begin + section.nbytes
        with reading(self.path):
            for file, entry in body["whole"].items():
                whole[file] = _digest(entry)
            for file, nbytes, crc64 in body["data"]:
                sums = -(-_natural(nbytes) // BLOCK_BYTES) * _SUM_BYTES
                data[file] = _Blocks(nbytes, begin, sums, _checksum(crc64))
                begin += sums
        return FileChecksums(self.path, directory, whole, data, self._root, self._root_of_files)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """A data file: its length, where its block checksums are, and the checksum of these."""

    nbytes: int
    begin: int
    sum_bytes: int
    crc64: int


@dataclass(slots=True)
class FileChecksums:
    """What vouches for the files of a checkpointable.

    Attributes:
        path: Of the file that says so.
        directory: Of the checkpointable.
        whole: Digests of files that are read as a whole, by their paths from there, divided by slashes.
    """

    path: str
    directory: str
    whole: dict[str, Digest]
    _data: dict[str, _Blocks]
    _root: storage.Root | None
    _root_of_files: storage.Root | None
    _known: dict[str, bytes] = field(default_factory=dict)

    @property
    def data(self) -> dict[str, int]:
        """The lengths of data files."""
        return {name: entry.nbytes for name, entry in self._data.items()}

    def check(self, path: str, content: bytes) -> None:
        """Compares the content of a small file with what was written.

        Raises:
            Corrupt: It is not the same.
        """
        name = self._name(path)
        if name not in self.whole:
            raise self._unknown(path)
        self.whole[name].check(content, path)

    def blocks(self, files: Sequence[tuple[str, int]]) -> list[bytes]:
        """The block checksums of data files, given with the lengths that they have.

        Raises:
            Corrupt: A file was not written, or with another length.
        """
        for path, nbytes in files:
            if path not in self._known and self._name(path) in self.whole:
                self._known[path] = self._blocks_of_whole(path, nbytes)
        entries = {path: self._entry(path, nbytes) for path, nbytes in files if path not in self._known}
        unknown = [(entry.begin, path) for path, entry in entries.items() if path not in self._known]
        for group in _grouped(sorted(unknown), entries):
            begin, last = entries[group[0]].begin, entries[group[-1]]
            content = _read_range(self.path, self._root, begin, last.begin + last.sum_bytes - begin)
            for path in group:
                entry = entries[path]
                found = content[entry.begin - begin : entry.begin - begin + entry.sum_bytes]
                if _native.crc64(found) != entry.crc64:
                    raise _damaged(self.path)
                self._known[path] = found
        return [self._known[path] for path, _ in files]

    def _blocks_of_whole(self, path: str, nbytes: int) -> bytes:
        """The block checksums of a file that is vouched for as a whole, as those of handlers are."""
        content = _read_range(path, self._root_of_files, 0, nbytes)
        self.check(path, content)
        return SummedFile.of(path, content).blocks

    def _entry(self, path: str, nbytes: int) -> _Blocks:
        entry = self._data.get(self._name(path))
        if entry is None:
            raise self._unknown(path)
        if nbytes != entry.nbytes:
            raise Corrupt(
                f"'{path}' has {nbytes} bytes where {entry.nbytes} were written; {_ADVICE}", path=path
            )
        return entry

    def read(self, path: str, offset: int, nbytes: int, file_bytes: int) -> bytes:
        """Reads a part of a data file of this length, and verifies the blocks that it is in.

        Raises:
            Corrupt: They are damaged.
        """
        (sums,) = self.blocks([(path, file_bytes)])
        first, last = offset // BLOCK_BYTES, -(-(offset + nbytes) // BLOCK_BYTES)
        begin = first * BLOCK_BYTES
        content = memoryview(
            _read_range(path, self._root_of_files, begin, min(last * BLOCK_BYTES, file_bytes) - begin)
        )
        for block in range(first, last):
            at = (block - first) * BLOCK_BYTES
            expected = int.from_bytes(sums[block * _SUM_BYTES : (block + 1) * _SUM_BYTES], "little")
            if _native.crc64(content[at : at + BLOCK_BYTES]) != expected:
                raise Corrupt(
                    f"'{path}' is damaged: the checksum of the block at {begin + at} differs; {_ADVICE}",
                    path=path,
                )
        return bytes(content[offset - begin : offset - begin + nbytes])

    def _name(self, path: str) -> str:
        return path.removeprefix(self.directory + os.sep)

    def _unknown(self, path: str) -> Corrupt:
        return Corrupt(
            f"'{path}' is not among the files that '{self.path}' vouches for: it was not saved with this "
            f"checkpoint; {_ADVICE}",
            path=path,
        )


def _grouped(begins: Sequence[tuple[int, str]], entries: Mapping[str, _Blocks]) -> Iterator[list[str]]:
    """Divides files, given with where their checksums begin, into those that are read in one call."""
    group: list[str] = []
    first = end = 0
    for begin, path in begins:
        if group and (begin > end + _GAP_BYTES or begin - first > _CALL_BYTES):
            yield group
            group = []
        if not group:
            first = begin
        group.append(path)
        end = begin + entries[path].sum_bytes
    if group:
        yield group


def _root_of(path: str, root: storage.Root | None) -> storage.Root | None:
    """The directory that is held open, where the file of checksums is in it."""
    return root if root is not None and os.path.dirname(path) == root.path else None


def _first_line(file: storage.OpenFile) -> bytes:
    """The first line of a file; of one that is longer than a record can be, so much of it."""
    parts = []
    for offset in range(0, _RECORD_LIMIT_BYTES, _RECORD_PART_BYTES):
        part = file.read(offset, _RECORD_PART_BYTES)
        line, newline, _ = part.partition(b"\n")
        parts.append(line + newline)
        if newline or len(part) < _RECORD_PART_BYTES:
            break
    return b"".join(parts)


def _read_range(path: str, root: storage.Root | None, begin: int, nbytes: int) -> bytes:
    content = storage.read(path, root, begin, nbytes)
    if len(content) != nbytes:
        raise Corrupt(f"'{path}' is truncated; {_ADVICE}", path=path)
    return content


def _natural(value: Any) -> int:
    require(type(value) is int and 0 <= value < 1 << 62, "something is no number that should be")
    return int(value)


def _checksum(value: Any) -> int:
    require(isinstance(value, str) and len(value) == 2 * _SUM_BYTES, "a checksum is none")
    return int(value, 16)


def _digest(entry: Any) -> Digest:
    nbytes, crc64 = entry
    return Digest(_natural(nbytes), _checksum(crc64))


def _damaged(path: str) -> Corrupt:
    return Corrupt(f"'{path}' is damaged: its checksum differs; {_ADVICE}", path=path)
