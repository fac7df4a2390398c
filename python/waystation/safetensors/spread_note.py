"""The note in the first folder of a model that was spread over several disks: what belongs to that model.

Invariants: a file in another folder is removed only if a note lists it, and inode, length and time still are
what the note says. So neither a file that others have put there is removed, nor one of a later model. And it
is removed only for the directory that the note was written into, whatever the name of that is now: a copy,
as `cp -r`, a backup or a move to another file system makes, lists files that the original may still use.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from waystation import _native, storage
from waystation._errors import Conflict, Corrupt, NotFound, WaystationError
from waystation.layouts.native.records import dump_json
from waystation.storage.attempts import new_attempt_id

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

    def at(self, path: str) -> Part:
        """The same file, with another path for it."""
        return replace(self, path=path)

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
        names: Paths of all that is in the first folder, from there.
        parts: The files in the others. Those from the first folder are relative; `read_note` resolves them.
        folder: What the first folder is told by, see `_told_by`.
    """

    names: frozenset[str]
    parts: tuple[Part, ...]
    folder: tuple[int, int | None]

    @classmethod
    def of(cls, directory: str, parts: Sequence[Part]) -> Note:
        """The note that is to be written into a directory where all else is."""
        return cls(frozenset([*paths_below(directory), NOTE]), tuple(parts), _told_by(directory))

    def owned_parts(self, directory: str) -> tuple[Part, ...]:
        """The files in other folders that only the model in this directory uses; none in a copy of it."""
        return self.parts if _told_by(directory) == self.folder else ()

    def encoded(self) -> bytes:
        """The content of its file."""
        inode, created_ns = self.folder
        parts = [
            {"path": part.path, "inode": part.inode, "nbytes": part.nbytes, "modified_ns": part.modified_ns}
            for part in self.parts
        ]
        folder = {"inode": inode, "created_ns": created_ns}
        body = {"version": _VERSION, "folder": folder, "names": sorted(self.names), "parts": parts}
        return _native.seal_json(dump_json(body))


def paths_below(directory: str) -> Iterator[str]:
    """The paths of all that is below a directory, from there. Links are not followed."""
    for entry in storage.entries_or_none(directory):
        yield entry.name
        if entry.kind == "directory":
            below = paths_below(os.path.join(directory, entry.name))
            yield from (os.path.join(entry.name, path) for path in below)


def _told_by(directory: str) -> tuple[int, int | None]:
    """What stays where a directory is renamed, and no copy of it has: its inode, and when it was created.

    The inode alone is too little: new file systems number their first directories alike. Where the file
    system does not tell the time, the inode has to do.
    """
    real = storage.resolved(directory)
    found = storage.status(real)
    if found is None:
        raise NotFound(f"'{directory}' is not there any more", path=directory)
    return found.identity.inode, _native.created_ns(real)


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
        real = storage.resolved(directory)
        parts = tuple(
            Part(
                os.path.normpath(os.path.join(real, str(part["path"]))),
                int(part["inode"]),
                int(part["nbytes"]),
                int(part["modified_ns"]),
            )
            for part in body["parts"]
        )
        other = next((part for part in parts if not part.path.endswith(".safetensors")), None)
        if other is not None:
            raise Corrupt(f"the note lists '{other.path}', which is no file of a model", path=path)
        created_ns = body["folder"]["created_ns"]
        folder = int(body["folder"]["inode"]), None if created_ns is None else int(created_ns)
        return Note(frozenset(map(str, body["names"])), parts, folder)
    except WaystationError:
        raise
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise Corrupt(
            "the note of a model that was spread says something else than it should", path=path
        ) from error


def forget_parts(directory: str, replaced: Collection[str], saved: Collection[str]) -> None:
    """Removes the files in other folders to which a directory has no links any more, once another model has
    taken the place of one that was spread there. The note then says what the new one consists of, so that it
    can be replaced as well.

    Args:
        directory: The first folder.
        replaced: The names of the files that the new model has replaced.
        saved: Those of its own.
    """
    try:
        note = read_note(directory)
        if note is None or note.names.isdisjoint(replaced):
            return
        # Not by the text of links: another way to the same file may have been given to make it.
        present = [storage.status(os.path.join(directory, name)) for name in storage.list_names(directory)]
        used = {key_of(found.identity) for found in present if found is not None}
        unused = [part for part in note.parts if part.key not in used]
        _remove(directory, note, unused)
        if len(unused) == len(note.parts):
            kept = note.names.intersection(paths_below(directory))
            later = Note(kept.union(saved, [NOTE]), (), _told_by(directory))
            path = os.path.join(directory, NOTE)
            storage.of(path).replace(path, later.encoded(), new_attempt_id())
    except WaystationError as error:
        _log.warning("files of a model that was spread could not be removed: %s", error)


def discard(directory: str) -> None:
    """Removes a directory that no reader uses, after the files in other folders that its note lists."""
    try:
        note = read_note(directory)
        if note is not None:
            _remove(directory, note, note.parts)
        storage.remove_tree(directory)
    except WaystationError as error:
        _log.warning("what a model that was spread has left could not be removed: %s", error)


def _remove(directory: str, note: Note, parts: Sequence[Part]) -> None:
    """Removes files in other folders that a note lists, unless its directory is a copy of the original."""
    present = [part for part in parts if part.is_there()]
    if not note.owned_parts(directory):
        if present:
            _log.warning(
                "'%s' and other files that were spread with it stay: the model that was replaced is a copy "
                "of the first folder, or was moved to another file system. If no other model uses these "
                "files, remove them",
                present[0].path,
            )
        return
    for part in present:
        storage.remove_file(part.path)
