"""The note in the first folder of a model that was spread over several disks: what belongs to that model.

Invariant: a file in another folder is removed only if a note lists it, and inode, length and time still are
what the note says. So neither a file that others have put there is removed, nor one of a later model.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from typing import TypeAlias

from waystation import _native, storage
from waystation._errors import Conflict, Corrupt, NotFound, WaystationError
from waystation.layouts.native.records import dump_json
from waystation.storage import disks

NOTE = "spread.waystation.json"

_VERSION = 1
_LIMIT_BYTES = 64 << 20

Key: TypeAlias = tuple[int, int, int]

_log = logging.getLogger("waystation")


@dataclass(frozen=True, slots=True)
class Part:
    """A file of a model in another folder than the first.

    Attributes:
        path: Where it is.
        inode: Its number there; with length and time it tells the file from any other of that name.
        nbytes: Its length.
        modified_ns: When it was written.
    """

    path: str
    inode: int
    nbytes: int
    modified_ns: int

    @classmethod
    def of(cls, path: str, written: str) -> Part:
        """A file that is to be at a path, and was written to another on that file system."""
        found = storage.status(written)
        if found is None:
            raise Conflict(f"'{written}' was removed by others while the model was spread", path=written)
        identity = found.identity
        return cls(path, identity.inode, identity.nbytes, identity.modified_ns)

    def is_there(self) -> bool:
        """Whether that file, and no other, is at its path."""
        found = storage.status(self.path, follow_links=False)
        return found is not None and self.key == key_of(found.identity)

    @property
    def key(self) -> Key:
        """What tells it from other files of its name."""
        return self.inode, self.nbytes, self.modified_ns


def key_of(identity: storage.Identity) -> Key:
    """What tells a file from others, as notes have it."""
    return identity.inode, identity.nbytes, identity.modified_ns


@dataclass(frozen=True, slots=True)
class Note:
    """What belongs to a model that was spread.

    Attributes:
        names: What is in the first folder.
        parts: The files in the others.
    """

    names: frozenset[str]
    parts: tuple[Part, ...]

    def encoded(self) -> bytes:
        """The content of its file."""
        parts = [
            {"path": part.path, "inode": part.inode, "nbytes": part.nbytes, "modified_ns": part.modified_ns}
            for part in self.parts
        ]
        body = {"version": _VERSION, "names": sorted(self.names), "parts": parts}
        return _native.seal_json(dump_json(body))


def read_note(directory: str) -> Note | None:
    """The note in a directory; None if it has none.

    Raises:
        Corrupt: It is damaged, or of a newer version.
    """
    path = os.path.join(directory, NOTE)
    try:
        content = storage.read_file(path, limit_bytes=_LIMIT_BYTES)
    except NotFound:
        return None
    try:
        body = json.loads(_native.open_sealed_json(content, path))
        if body["version"] != _VERSION:
            raise Corrupt(
                f"the note is of version {body['version']}, which this release cannot read", path=path
            )
        parts = tuple(
            Part(str(part["path"]), int(part["inode"]), int(part["nbytes"]), int(part["modified_ns"]))
            for part in body["parts"]
        )
        other = next((part for part in parts if not part.path.endswith(".safetensors")), None)
        if other is not None:
            raise Corrupt(f"the note lists '{other.path}', which is no file of a model", path=path)
        return Note(frozenset(map(str, body["names"])), parts)
    except (KeyError, TypeError, RecursionError) as error:
        raise Corrupt(
            "the note of a model that was spread says something else than it should", path=path
        ) from error


def forget_parts(directory: str) -> None:
    """Removes the files in other folders to which a directory has no links any more, once another model has
    taken the place of one that was spread there; and the note, if it lists no others."""
    try:
        note = read_note(directory)
        if note is None:
            return
        linked = {disks.link_target(os.path.join(directory, name)) for name in storage.list_names(directory)}
        unused = [part for part in note.parts if os.path.normpath(part.path) not in linked]
        for part in unused:
            if part.is_there():
                storage.remove_file(part.path)
        if len(unused) == len(note.parts):
            storage.remove_file(os.path.join(directory, NOTE))
    except WaystationError as error:
        _log.warning("files of a model that was spread could not be removed: %s", error)


def discard(directory: str) -> None:
    """Removes a directory that no reader uses, after the files in other folders that its note lists."""
    try:
        note = read_note(directory)
        for part in () if note is None else note.parts:
            if part.is_there():
                storage.remove_file(part.path)
        storage.remove_tree(directory)
    except WaystationError as error:
        _log.warning("what a model that was spread has left could not be removed: %s", error)
