"""Which sequence of checkpoints is uploaded to a remote, and which of its steps: a record in the remote.

The directory of a sequence has its id, in `.waystation-sequence.json`; the remote has that id and what was
uploaded, in `.waystation-uploads.json`. Who uploads first makes both. Another sequence that is given the same
remote gets Conflict, before it has replaced anything. Each step is written down before its upload begins,
with the time of its commit, which is that of no other save. So a step that somebody else has put there is
known as such, and is neither replaced nor collected, nor loaded for a step of this sequence.

Several directories may be of one sequence: one on a new disk, a copy. The record names the one that uploads,
and the one that has uploaded each step. The first upload of a program takes the remote over, and a program
that it was taken from gets Conflict from then on. What another directory has uploaded is replaced only where
the program has asked for that. So two programs that were given one remote by mistake replace nothing of each
other.

A directory without an id takes that of the remote if it is empty, as a new disk is, or if it holds a step
that was uploaded there, as what was restored from a copy does. A directory that was copied with its id is the
same sequence.

What can go wrong, in order: killed before the step is written down, nothing was uploaded; after it, the
record has a step that is not there, which does no harm. Another process of the same sequence writes at the
same time: the record is replaced on condition that it is the one that was read, and else read again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import secrets
import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from waystation import storage
from waystation._errors import Conflict, Corrupt, NotFound, Unsupported, WaystationError
from waystation.layouts.native import commit
from waystation.storage import write_lock
from waystation.storage.attempts import new_attempt_id
from waystation.training.catalogue import Info

SEQUENCE, UPLOADS = ".waystation-sequence.json", ".waystation-uploads.json"

_VERSION = 1
_LIMIT_BYTES = 64 << 20
_TRIES = 20
_KEPT_TIMES = 2  # of a step: the one that is there, and the one that takes its place


@dataclass(frozen=True, slots=True)
class _Uploads:
    """The record of a remote.

    Attributes:
        sequence: The id of the sequence.
        origin: Who has uploaded first: the directory, and the machine.
        steps: Of each step that was uploaded, by its name, the times of commit that it may have, in
            nanoseconds since 1970, the last one last.
        owner: The id of the directory that uploads.
        owner_name: That directory, and its machine.
        uploaders: The id of the directory that has uploaded each step.
    """

    sequence: str
    origin: str
    steps: Mapping[str, list[int]] = field(default_factory=dict)
    owner: str = ""
    owner_name: str = ""
    uploaders: Mapping[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The bytes of the file; a nonce tells it from one of the same content."""
        body = {"format_version": _VERSION, **dataclasses.asdict(self), "nonce": secrets.token_hex(8)}
        return json.dumps(body, indent=1).encode()

    @classmethod
    def decode(cls, content: bytes, path: str) -> _Uploads:
        """Reads the bytes of the file."""
        body = _decoded(content, path)
        try:
            steps = {str(name): [int(time) for time in times] for name, times in body["steps"].items()}
            uploaders = {str(name): str(by) for name, by in body["uploaders"].items()}
            owner, owner_name = str(body["owner"]), str(body["owner_name"])
            return cls(str(body["sequence"]), str(body["origin"]), steps, owner, owner_name, uploaders)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _malformed(path) from error


def _decoded(content: bytes, path: str) -> dict[str, Any]:
    try:
        body = json.loads(content)
    except ValueError as error:
        raise _malformed(path) from error
    if not isinstance(body, dict) or not isinstance(body.get("format_version"), int):
        raise _malformed(path)
    if body["format_version"] > _VERSION:
        raise Unsupported(f"'{path}' was written by a newer Waystation; upgrade this one", path=path)
    return body


def _malformed(path: str) -> Corrupt:
    return Corrupt(
        f"'{path}', which says whose steps are uploaded, is malformed; restore it from another copy, or "
        "remove it: what was uploaded until now then counts as that of others, and stays as it is",
        path=path,
    )


class UploadRecord:
    """The record of the remote of one `Checkpointer`; for one thread at a time.

    Args:
        local: The directory that steps are uploaded from.
        remote: Where to.
    """

    def __init__(self, local: str, remote: str) -> None:
        self._local = local
        self._remote = remote
        self._path = os.path.join(remote, UPLOADS)
        self._uploads: _Uploads | None = None
        self._gone: set[str] = set()
        self._has_begun = False  # to upload

    @property
    def is_there(self) -> bool:
        """Whether a sequence uploads there, as far as it was looked."""
        return self._uploads is not None

    def has(self, name: str, committed_ns: int | None = None) -> bool:
        """Whether this sequence has uploaded a checkpoint.

        Args:
            name: Its name.
            committed_ns: When it was committed; None where that is not known, as it is damaged.
        """
        times = () if self._uploads is None else self._uploads.steps.get(name, ())
        return bool(times) if committed_ns is None else committed_ns in times

    def is_of_another_directory(self, name: str) -> bool:
        """Whether another directory of the sequence has uploaded a checkpoint."""
        uploader = None if self._uploads is None else self._uploads.uploaders.get(name)
        return uploader is not None and uploader != _directory_id(self._local)

    def look(self, present: Collection[Info]) -> None:
        """Reads the record.

        Args:
            present: The checkpoints of the directory.

        Raises:
            Conflict: It is that of another sequence; `sequence` in its context has the id of that.
        """
        try:
            uploads = _Uploads.decode(
                storage.read_file(self._path, limit_bytes=_LIMIT_BYTES), os.fspath(self._path)
            )
        except NotFound as error:
            if "bucket" in error.context:
                raise
            self._uploads = None
            return
        self._require_ours(uploads, present)
        self._uploads = uploads

    def _require_ours(self, uploads: _Uploads, present: Collection[Info]) -> None:
        own = read_id(self._local)
        if own is None and (not present or any(_was_uploaded(info, uploads) for info in present)):
            own = write_id_once(self._local, uploads.sequence)
        if own != uploads.sequence:
            raise Conflict(
                f"'{self._remote}' is the remote of another sequence of checkpoints, which was begun in "
                f"{uploads.origin}, and '{self._local}' is not that one: each would replace the other's "
                "steps. Give this one a remote of its own. To go on with the other one, open it from an "
                "empty directory, or from a copy of its own",
                path=self._remote,
                directory=self._local,
                sequence=uploads.sequence,
            )

    def begin(self, name: str, committed_ns: int, present: Collection[Info]) -> None:
        """Writes down that a step is uploaded, before that begins.

        Args:
            name: Of the step.
            committed_ns: When it was committed.
            present: The checkpoints of the directory.

        Raises:
            Conflict: The remote is that of another sequence.
        """

        def added(directory: str, uploads: _Uploads) -> _Uploads:
            others = [time for time in uploads.steps.get(name, []) if time != committed_ns]
            times = [*others, committed_ns][-_KEPT_TIMES:]
            return dataclasses.replace(
                uploads,
                steps={**uploads.steps, name: times},
                owner=directory,
                owner_name=self._local_name,
                uploaders={**uploads.uploaders, name: directory},
            )

        self._gone.discard(name)
        self._change(added, present)
        self._has_begun = True

    def forget(self, names: Collection[str]) -> None:
        """Steps have been removed there; this is written with the next one that is uploaded."""
        self._gone.update(names)

    @property
    def _local_name(self) -> str:
        return f"'{self._local}' on {socket.gethostname()}"

    def _require_turn(self, uploads: _Uploads, directory: str) -> None:
        if self._has_begun and uploads.owner != directory:
            raise Conflict(
                f"{uploads.owner_name} has taken over the remote '{self._remote}', so nothing more is "
                f"uploaded from '{self._local}': each would replace the other's steps. End one of the two "
                "programs. To go on with this one, start it again; to go on with both, give each a remote",
                path=self._remote,
                directory=self._local,
                sequence=uploads.sequence,
            )

    def _change(self, change: Callable[[str, _Uploads], _Uploads], present: Collection[Info]) -> None:
        storage.make_directory(self._remote, parents=True)
        # Elsewhere than in a store, replacements on a condition exclude each other by this.
        is_in_store = storage.is_in_store(self._remote)
        with contextlib.nullcontext() if is_in_store else write_lock.held(self._remote):
            for _ in range(_TRIES):
                found = self._read(present)
                directory = _directory_id(self._local)
                self._require_turn(found[0], directory)
                with contextlib.suppress(Conflict):  # another process was faster
                    self._write(functools.partial(change, directory), *found)
                    return
        raise Conflict(
            f"'{self._path}' is changed by others all the time; let one program at a time upload to it",
            path=self._path,
        )

    def _read(self, present: Collection[Info]) -> tuple[_Uploads, storage.Identity | None]:
        try:
            content, version = storage.read_version(self._path, limit_bytes=_LIMIT_BYTES)
        except NotFound as error:
            if "bucket" in error.context:
                raise
            own = read_id(self._local) or write_id_once(self._local, secrets.token_hex(16))
            return _Uploads(own, self._local_name, owner=_directory_id(self._local)), None
        uploads = _Uploads.decode(content, self._path)
        self._require_ours(uploads, present)
        return uploads, version

    def _write(
        self,
        change: Callable[[_Uploads], _Uploads],
        uploads: _Uploads,
        version: storage.Identity | None,
    ) -> None:
        steps = {name: times for name, times in uploads.steps.items() if name not in self._gone}
        uploaders = {name: by for name, by in uploads.uploaders.items() if name not in self._gone}
        changed = change(dataclasses.replace(uploads, steps=steps, uploaders=uploaders))
        if version is None:
            storage.of(self._path).create(self._path, changed.encode(), new_attempt_id())
        elif changed != uploads:
            storage.of(self._path).replace(self._path, changed.encode(), new_attempt_id(), expected=version)
        self._uploads = changed
        self._gone.clear()


def _was_uploaded(info: Info, uploads: _Uploads) -> bool:
    times = uploads.steps.get(info.path.name)
    if times is None:
        return False
    try:
        return commit.read_record(os.fspath(info.path)).created_ns in times
    except WaystationError:
        return False


def read_id(root: str) -> str | None:
    """The id of the sequence in a directory; None if it has none yet.

    Raises:
        Corrupt: It is malformed.
    """
    found = _ids_of(root)
    return None if found is None else found[0]


def _directory_id(root: str) -> str:
    """The id of a directory whose sequence has one; it tells the directory from others of the sequence."""
    found = _ids_of(root)
    return "" if found is None else found[1]


def _ids_of(root: str) -> tuple[str, str] | None:
    path = os.path.join(root, SEQUENCE)
    try:
        content = storage.read_file(path, limit_bytes=_LIMIT_BYTES)
    except NotFound:
        return None
    body = _decoded(content, path)
    sequence, directory = body.get("sequence"), body.get("directory")
    if not isinstance(sequence, str) or not isinstance(directory, str):
        raise Corrupt(
            f"'{path}', which says which sequence this is, is malformed; restore it from another copy, or "
            "remove it",
            path=path,
        )
    return sequence, directory


def write_id_once(root: str, sequence: str) -> str:
    """Gives the sequence in a directory an id, unless it has one; returns the one that it has."""
    path = os.path.join(root, SEQUENCE)
    body = {"format_version": _VERSION, "sequence": sequence, "directory": secrets.token_hex(16)}
    content = json.dumps(body, indent=1).encode()
    with contextlib.suppress(Conflict):
        storage.of(path).create(path, content, new_attempt_id())
        return sequence
    return read_id(root) or sequence
