"""The two sealed records: `checkpoint.json` (the commit) and `record.json` (of one checkpointable).

`checkpoint.json` names each checkpointable's directory and the checksum of its record; the record
names each table with its size and checksum. So one small file, once valid, vouches for every byte.
Readers accept unknown members (later minor additions) and refuse a newer `format_version`. A checkpointable
is of a kind, and readers refuse kinds that they do not know: those of another one load all the same.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from waystation import _native, storage
from waystation._errors import (
    CheckpointableNotFound,
    Corrupt,
    InvalidInput,
    Unsupported,
    WaystationError,
    WrongType,
)
from waystation.layouts.native import names
from waystation.tree import parse_json

RECORD_LIMIT_BYTES = 256 << 20
_VOUCHED_LIMIT_BYTES = 64 << 30  # of a file whose length a record tells

# Of a checkpointable: a state in the tables and data files of this layout, or files that a handler made.
PYTREE, FILES, HANDLED = "pytree", "files", "handled"

_TRANSACTION = re.compile("[0-9a-f]{16}")

# What a record begins with: `seal_json` writes it, in Rust.
SEALED_START = b'{"crc64":'


@dataclass(frozen=True, slots=True)
class Digest:
    """Size and CRC-64/NVME of a whole file."""

    nbytes: int
    crc64: int

    @classmethod
    def of(cls, data: bytes) -> Digest:
        """The digest of `data`."""
        return cls(len(data), _native.crc64(data))

    def to_json(self) -> dict[str, Any]:
        """As it stands in a record."""
        return {"bytes": self.nbytes, "crc64": f"{self.crc64:016x}"}

    @classmethod
    def from_json(cls, data: bytes, path: str) -> Digest:
        """The digest that another process has sent of its file at `path`."""
        with _Malformed(path):
            return _digest(json.loads(data))

    def check(self, data: bytes, path: str) -> None:
        """Raises Corrupt unless `data` is what was written."""
        if Digest.of(data) == self:
            return
        if len(data) == self.nbytes:
            difference = "its checksum differs"
        else:
            difference = f"it has {len(data)} bytes where {self.nbytes} were written"
        raise Corrupt(
            f"'{path}' is not the file that was committed: {difference}; restore another checkpoint, or see "
            "'waystation verify'",
            path=path,
        )


def read_vouched(digests: Mapping[str, Digest], root: storage.Root | None = None) -> list[bytes]:
    """Reads the files at these paths (beneath `root`), and verifies each. Lengths are compared first, so
    that a file that has grown costs neither memory nor time.

    Raises:
        Corrupt: A file is not what was written.
        NotFound: A file is missing.
    """
    limits = [min(digest.nbytes, _VOUCHED_LIMIT_BYTES) for digest in digests.values()]
    contents = storage.read_files(list(digests), root, limit_bytes=limits)
    for (path, digest), content in zip(digests.items(), contents, strict=True):
        digest.check(content, path)
    return contents


@dataclass(frozen=True, slots=True)
class LocalPart:
    """What a checkpoint says of itself that is one process's part of a save to local storage.

    Attributes:
        transaction: The id that all parts of the save share: 16 hexadecimal digits.
        process: The process that wrote this part.
        process_count: How many parts there are.
        replaces: Digest of the `checkpoint.json` in whose place this one was prepared to come; None if there
            was none.
    """

    transaction: str
    process: int
    process_count: int
    replaces: Digest | None = None

    def to_json(self) -> dict[str, Any]:
        """As it stands in the record."""
        return {
            "transaction": self.transaction,
            "process": self.process,
            "process_count": self.process_count,
            "replaces": None if self.replaces is None else self.replaces.to_json(),
        }

    @classmethod
    def from_json(cls, entry: Any) -> LocalPart:
        """What a record says; anything else raises what reading a malformed record raises."""
        transaction, replaces = entry["transaction"], entry["replaces"]
        _require(isinstance(transaction, str) and _TRANSACTION.fullmatch(transaction) is not None)
        process, process_count = _natural(entry["process"]), _natural(entry["process_count"])
        _require(process < process_count)
        return cls(transaction, process, process_count, None if replaces is None else _digest(replaces))


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """The body of `checkpoint.json`.

    Attributes:
        generation: Grows by one each time the record of this checkpoint is replaced.
        checkpointables: Name to `(directory, digest of its record.json)`.
        created_ns: Wall-clock time of the commit's preparation, nanoseconds since 1970.
        custom_metadata: The caller's own JSON value.
        local: Of a part of a save to local storage; None for a checkpoint that is complete in itself.
        begun_ns: When the save began, in the same clock; None if that was not written down.
        removed: Directories that this record, or one before it, names no more, with the id of the attempt
            that takes them away. Readers need not look at it.
    """

    generation: int
    checkpointables: dict[str, tuple[str, Digest]]
    created_ns: int
    custom_metadata: Any = None
    local: LocalPart | None = None
    begun_ns: int | None = None
    removed: dict[str, str] = field(default_factory=dict)

    def entry(self, target: str, name: str) -> tuple[str, Digest]:
        """Where a checkpointable of the checkpoint at `target` is, and the digest of its record.

        Raises:
            CheckpointableNotFound: The checkpoint has no such checkpointable.
        """
        entry = self.checkpointables.get(name)
        if entry is None:
            present = ", ".join(sorted(self.checkpointables)) or "none"
            raise CheckpointableNotFound(
                f"checkpoint '{target}' has no checkpointable '{name}'; it has: {present}", path=target
            )
        return os.path.join(target, entry[0]), entry[1]

    def present(self, target: str, root: storage.Root | None = None) -> tuple[str, ...]:
        """The checkpointables of the checkpoint at `target` whose directories are there (beneath `root`), in
        order. A store has no directories that could be missing, and is not asked."""
        if storage.of(target).renames is None:
            return tuple(sorted(self.checkpointables))
        return tuple(
            name
            for name, (directory, _) in sorted(self.checkpointables.items())
            if storage.is_there(os.path.join(target, directory), root)
        )

    def encode(self) -> bytes:
        """The bytes of the file."""
        body = {
            "format_version": names.FORMAT_VERSION,
            "generation": self.generation,
            "created_ns": self.created_ns,
            "checkpointables": {
                name: {"directory": directory, "record": digest.to_json()}
                for name, (directory, digest) in self.checkpointables.items()
            },
            "custom_metadata": self.custom_metadata,
        }
        if self.begun_ns is not None:
            body["begun_ns"] = self.begun_ns
        if self.local is not None:
            body["local"] = self.local.to_json()
        if self.removed:
            body["removed"] = self.removed
        return seal(body)

    @classmethod
    def decode(cls, data: bytes, path: str) -> CheckpointRecord:
        """Reads and checks the bytes of the file."""
        body = unseal(data, path)
        version = body.get("format_version")
        if isinstance(version, int) and version > names.FORMAT_VERSION:
            raise Unsupported(
                f"'{path}' has format version {version}; this Waystation reads up to {names.FORMAT_VERSION}: "
                "upgrade it",
                path=path,
            )
        with _Malformed(path):
            _require(version == names.FORMAT_VERSION)
            entries: dict[str, tuple[str, Digest]] = {}
            for name, entry in body["checkpointables"].items():
                directory = entry["directory"]
                _require(_is_plain_name(directory))
                entries[name] = (directory, _digest(entry["record"]))
            local, begun_ns, removed = body.get("local"), body.get("begun_ns"), body.get("removed", {})
            _require(all(_is_plain_name(name) for pair in removed.items() for name in pair))
            return cls(
                _natural(body["generation"]),
                entries,
                _natural(body["created_ns"]),
                body["custom_metadata"],
                None if local is None else LocalPart.from_json(local),
                None if begun_ns is None else _natural(begun_ns),
                removed,
            )


@dataclass(frozen=True, slots=True)
class DataPlace:
    """Where data files of a state are that were written for another checkpoint, in an object store.

    Attributes:
        checkpoint: The name of that checkpoint, which lies beside this one, or is this one.
        directory: The directory beneath it.
    """

    checkpoint: str
    directory: str

    def to_json(self) -> dict[str, Any]:
        """As it stands in a record."""
        return {"checkpoint": self.checkpoint, "directory": self.directory}

    @classmethod
    def from_json(cls, entry: Any) -> DataPlace:
        """What a record says; anything else raises what reading a malformed record raises."""
        checkpoint, directory = entry["checkpoint"], entry["directory"]
        _require(_is_plain_name(checkpoint) and _is_plain_name(directory))
        return cls(checkpoint, directory)


@dataclass(frozen=True, slots=True)
class CheckpointableRecord:
    """The body of `record.json`.

    Attributes:
        process_count: Processes that wrote data.
        tables: File name to digest, for every metadata file beside the record.
        kind: What it vouches for: `PYTREE`; `HANDLED`, files that a handler made beside the record; `FILES`,
            such files in the directory `names.FILES`, which earlier saves wrote.
        handler: Of files: the name of the type of their handler.
        files: Path to digest, for every file; paths count from the directory that the handler was given, and
            have their parts divided by slashes.
        places: Of a state in a store: where data files are that it shares with others. The location of a file
            in the table counts them from 1.
        extra: Unknown members, kept for display.
    """

    process_count: int
    tables: dict[str, Digest]
    kind: str = PYTREE
    handler: str | None = None
    files: dict[str, Digest] = field(default_factory=dict)
    places: tuple[DataPlace, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    def files_directory(self, directory: str) -> str:
        """Where the files of a handler are whose record is in this directory."""
        return os.path.join(directory, names.FILES) if self.kind == FILES else directory

    def encode(self) -> bytes:
        """The bytes of the file."""
        body = {"kind": self.kind, "process_count": self.process_count, "tables": _digests_json(self.tables)}
        if self.kind != PYTREE:
            body |= {"handler": self.handler, "files": _digests_json(self.files)}
        if self.places:
            body["places"] = [place.to_json() for place in self.places]
        return seal(body)

    @classmethod
    def decode(cls, data: bytes, path: str) -> CheckpointableRecord:
        """Reads and checks the bytes of the file."""
        body = unseal(data, path)
        with _Malformed(path):
            kind = body["kind"]
            if kind not in (PYTREE, FILES, HANDLED):
                raise Unsupported(
                    f"'{path}' is of kind {kind!r}, which this Waystation does not know: upgrade it",
                    path=path,
                )
            process_count, tables = _natural(body["process_count"]), _digests(body["tables"], _is_plain_name)
            places = tuple(map(DataPlace.from_json, body.get("places", ())))
            known = {"kind", "process_count", "tables", "places"}
            handler, files = None, {}
            if kind != PYTREE:
                known |= {"handler", "files"}
                handler, files = body["handler"], _digests(body["files"], _is_plain_path)
                _require(isinstance(handler, str))
            extra = {key: value for key, value in body.items() if key not in known}
            return cls(process_count, tables, kind, handler, files, places, extra)


def load_json(body: bytes, path: str) -> Any:
    """Parses the body of a sealed file; anything that is not strict JSON is Corrupt."""
    return parse_json(body, path)


def dump_json(value: Any) -> bytes:
    """Compact JSON; keys keep their order, every character outside ASCII is escaped."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def callers_json(value: Any, what: str, *, allow_nan: bool = False) -> Any:
    """A copy of a JSON value of the caller, as JSON gives it back: with lists in the place of tuples.

    Args:
        value: The value.
        what: What it is, for the error.
        allow_nan: Whether it may have NaN and infinities.

    Raises:
        InvalidInput: JSON does not have it, or would give keys back as text, of which two could be one.
    """
    try:
        text = json.dumps(value, allow_nan=allow_nan)
    except (TypeError, ValueError, RecursionError) as error:
        cls = WrongType if isinstance(error, TypeError) else InvalidInput
        advice = "; give text or None in its place" if isinstance(error, ValueError) else ""
        raise cls(f"{what} must be a JSON value: {error}{advice}") from error
    inside = [value]
    while inside:
        each = inside.pop()
        if isinstance(each, dict):
            for key in each:
                if not isinstance(key, str):
                    raise InvalidInput(
                        f"{what} must be a JSON value, with text as keys, and has the key {key!r:.60}; "
                        f"use {str(key)!r:.60}"
                    )
            inside.extend(each.values())
        elif isinstance(each, list | tuple):
            inside.extend(each)
    return json.loads(text)


def seal(body: dict[str, Any]) -> bytes:
    """A sealed file with this body."""
    return _native.seal_json(dump_json(body))


def unseal(data: bytes, path: str) -> dict[str, Any]:
    """The body of a sealed file; anything else is Corrupt."""
    body = load_json(_native.open_sealed_json(data, path), path)
    if not isinstance(body, dict):
        raise Corrupt(f"'{path}' does not hold a JSON object", path=path)
    return body


def _digests_json(digests: dict[str, Digest]) -> dict[str, Any]:
    return {name: digest.to_json() for name, digest in digests.items()}


def _digests(entries: Any, is_name: Callable[[Any], bool]) -> dict[str, Digest]:
    digests = {}
    for name, entry in entries.items():
        _require(is_name(name))
        digests[name] = _digest(entry)
    return digests


def _digest(entry: Any) -> Digest:
    text = entry["crc64"]
    _require(isinstance(text, str) and len(text) == 16)
    return Digest(_natural(entry["bytes"]), int(text, 16))


def _natural(value: Any) -> int:
    _require(isinstance(value, int) and not isinstance(value, bool) and value >= 0)
    return int(value)


def _is_plain_name(value: Any) -> bool:
    """A single path component that stays inside its directory."""
    return isinstance(value, str) and value not in ("", ".", "..") and not set(value) & {"/", "\\", "\0"}


def _is_plain_path(value: Any) -> bool:
    """Plain names, divided by slashes."""
    return isinstance(value, str) and all(map(_is_plain_name, value.split("/")))


def _require(condition: bool) -> None:
    if not condition:
        raise ValueError("a member is missing or out of range")


class _Malformed:
    """Turns what a malformed record raises while it is read into Corrupt."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        expected = (KeyError, TypeError, ValueError, AttributeError)
        if isinstance(error, expected) and not isinstance(error, WaystationError):
            raise Corrupt(f"'{self._path}' is malformed: {error}", path=self._path) from error


def join_strings(parts: Sequence[bytes]) -> bytes:
    """Strings of bytes as one."""
    head = np.array([len(parts), *(len(part) for part in parts)], "<i8")
    return b"".join([head.tobytes(), *parts])


def split_strings(data: bytes) -> list[bytes]:
    """The strings that `join_strings` has made one of."""
    count = int.from_bytes(data[:8], "little")
    parts, begin = [], 8 * (1 + count)
    for length in np.frombuffer(data[8:begin], "<i8").tolist():
        parts.append(data[begin : begin + length])
        begin += length
    return parts
