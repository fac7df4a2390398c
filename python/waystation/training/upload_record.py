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

A copy of a directory, of its disk or of its machine has the id of its original. What tells them apart is what
each has done since: whoever changes the record gives that change a token, which the record keeps of each
directory, and the directory as well. A directory that does not know the last token with its id is not where
that change was made: a copy, or an older state that was restored. It gets an id of its own.

A directory without an id takes that of the remote if it is empty, as a new disk is, or if it holds a step
that was uploaded there, as what was restored from a copy does. A directory that was copied with its id is the
same sequence.

What can go wrong, in order: killed before the step is written down, nothing was uploaded, and the directory
knows a token more, which does no harm; after it, the record has a step that is not there, which does none
either. Another process of the same sequence writes at the same time: the record is replaced on condition that
it is the one that was read, and else read again; so is the file in the directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
# That a directory knows. One that is not of the last change was meant for one that has failed.
_KEPT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class _Order:
    """Steps in the order of their saves.

    Attributes:
        places: Of each step and its time of commit, from the oldest on.
        greatest_step: The greatest of the steps.
        last_ns: The last of the times.
    """

    places: Mapping[tuple[int, int], int] = field(default_factory=dict)
    greatest_step: int = -1
    last_ns: int = -1

    @classmethod
    def of(cls, entries: Iterable[tuple[int, int]]) -> _Order:
        """The order of these, the oldest first."""
        places = {entry: place for place, entry in enumerate(entries)}
        greatest_step = max((step for step, _ in places), default=-1)
        return cls(places, greatest_step, max((time for _, time in places), default=-1))


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
        tokens: Of the last change that was made from each directory, by the id of that, if it has uploaded
            any of the steps.
        order: The steps that were known at the last change, each with its time of commit, in the order in
            which they were saved, whatever the clock said.
    """

    sequence: str
    origin: str
    steps: Mapping[str, list[int]] = field(default_factory=dict)
    owner: str = ""
    owner_name: str = ""
    uploaders: Mapping[str, str] = field(default_factory=dict)
    tokens: Mapping[str, str] = field(default_factory=dict)
    order: _Order = field(default_factory=_Order)

    def encode(self) -> bytes:
        """The bytes of the file; a nonce tells it from one of the same content."""
        own = {**dataclasses.asdict(self), "order": [*self.order.places]}
        body = {"format_version": _VERSION, **own, "nonce": secrets.token_hex(8)}
        return json.dumps(body, indent=1).encode()

    @classmethod
    def decode(cls, content: bytes, path: str) -> _Uploads:
        """Reads the bytes of the file."""
        body = _decoded(content, path)
        try:
            steps = {str(name): [int(time) for time in times] for name, times in body["steps"].items()}
            uploaders = {str(name): str(by) for name, by in body["uploaders"].items()}
            tokens = {str(directory): str(token) for directory, token in body.get("tokens", {}).items()}
            owner, owner_name = str(body["owner"]), str(body["owner_name"])
            sequence, origin = str(body["sequence"]), str(body["origin"])
            order = _Order.of((int(step), int(time)) for step, time in body.get("order", []))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise _malformed(path) from error
        return cls(sequence, origin, steps, owner, owner_name, uploaders, tokens, order)


@dataclass(frozen=True, slots=True)
class _Directory:
    """What a directory says of itself.

    Attributes:
        sequence: The id of its sequence.
        id: Its own.
        tokens: Of changes that were made from it, or were to be, the last one last.
        versions: When steps were committed, by name, that were saved again, and whose earlier version may be
            in the remote.
    """

    sequence: str
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    tokens: Sequence[str] = ()
    versions: Mapping[str, int] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The bytes of the file."""
        own: dict[str, Any] = {
            "sequence": self.sequence,
            "directory": self.id,
            "tokens": [*self.tokens],
            "versions": self.versions,
        }
        return json.dumps({"format_version": _VERSION, **own}, indent=1).encode()

    @classmethod
    def decode(cls, content: bytes, path: str) -> _Directory:
        """Reads the bytes of the file."""
        body = _decoded(content, path)
        sequence, directory, tokens = body.get("sequence"), body.get("directory"), body.get("tokens", [])
        versions = body.get("versions", {})
        if not (
            isinstance(sequence, str)
            and isinstance(directory, str)
            and isinstance(tokens, list)
            and isinstance(versions, dict)
            and all(isinstance(time, int) for time in versions.values())
        ):
            raise Corrupt(
                f"'{path}', which says which sequence this is, is malformed; restore it from another copy, "
                "or remove it",
                path=path,
            )
        return cls(sequence, directory, [str(token) for token in tokens], versions)

    def made_last_of(self, uploads: _Uploads) -> bool:
        """Whether the last change of a record with the id of this directory was made from it."""
        token = uploads.tokens.get(self.id)
        return token is None or token in self.tokens


def _decoded(content: bytes, path: str) -> dict[str, Any]:
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
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

    Attributes:
        gone_on_from: The directory, and its machine, whose sequence an empty directory of another path goes
            on with since the last look; None if that was not so.
    """

    def __init__(self, local: str, remote: str) -> None:
        self._local = local
        self._remote = remote
        self._path = os.path.join(remote, UPLOADS)
        self._uploads: _Uploads | None = None
        self._gone: dict[str, set[int]] = {}  # versions that were removed there, by name and time
        self._has_begun = False  # to upload
        self.gone_on_from: str | None = None

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

    def age(self, step: int, committed_ns: int) -> tuple[int, int]:
        """By what steps that no program has saved since are sorted by age.

        Those of which the record has the order are in that order. What it lacks was saved after it, by a
        program that was killed before it could write that down, if its number or its time is greater than
        all of them; else somebody has put it there, and it counts as the oldest. Among those of a kind the
        time decides.

        Args:
            step: The step.
            committed_ns: When it was committed.
        """
        order = _Order() if self._uploads is None else self._uploads.order
        if (step, committed_ns) in order.places:
            return 1, order.places[step, committed_ns]
        is_after = step > order.greatest_step or committed_ns > order.last_ns
        return (2 if is_after else 0), committed_ns

    def is_of_another_directory(self, name: str) -> bool:
        """Whether another directory of the sequence has uploaded a checkpoint."""
        uploads = self._uploads
        uploader = None if uploads is None else uploads.uploaders.get(name)
        if uploads is None or uploader is None:
            return False
        own = _read_directory(self._local)
        return own is None or uploader != own.id or not own.made_last_of(uploads)

    def note_version(self, name: str, committed_ns: int) -> None:
        """Writes down in the directory which version of a step is the last. So the next program takes no
        earlier one from the remote for it, if this one is collected and the program killed before its upload.
        """
        path = os.path.join(self._local, SEQUENCE)
        for _ in range(_TRIES):
            try:
                own, version = _require_directory(self._local)
            except NotFound:  # nothing was uploaded from here
                return
            noted = dataclasses.replace(own, versions={**own.versions, name: committed_ns})
            if own.versions.get(name) == committed_ns or _put(path, noted.encode(), version):
                return

    def noted_versions(self) -> Mapping[str, int]:
        """When steps were committed, by name, of which this directory has uploaded an earlier version."""
        own = _read_directory(self._local)
        if own is None:
            return {}
        return {name: time for name, time in own.versions.items() if not self.is_of_another_directory(name)}

    def is_about(self, error: WaystationError) -> bool:
        """Whether an error is about the record, or the file in the directory, and so about no single step."""
        return error.context.get("path") in (self._path, os.path.join(self._local, SEQUENCE))

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
            uploader = uploads.owner_name or uploads.origin
            # The same path on a new disk, or on another machine, is a restart, as far as can be told.
            if not present and not uploader.startswith(f"'{self._local}' on "):
                self.gone_on_from = uploader
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

    def begin(
        self,
        name: str,
        committed_ns: int,
        present: Collection[Info],
        *,
        replaced_ns: int | None = None,
        order: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Writes down that a step is uploaded, before that begins.

        Args:
            name: Of the step.
            committed_ns: When it was committed.
            present: The checkpoints of the directory.
            replaced_ns: When the one was committed that it is to replace; None if that is not known.
            order: All steps that are known, with their times of commit, in the order of their saves.

        Raises:
            Conflict: The remote is that of another sequence.
        """

        def added(directory: str, uploads: _Uploads) -> _Uploads:
            # The one that is there stays, however many have not come to take its place.
            others = [time for time in uploads.steps.get(name, []) if time != committed_ns]
            times = [*([replaced_ns] if replaced_ns in others else others[-1:]), committed_ns]
            return dataclasses.replace(
                uploads,
                steps={**uploads.steps, name: times},
                owner=directory,
                owner_name=self._local_name,
                uploaders={**uploads.uploaders, name: directory},
                order=_Order.of(order),
            )

        self._gone.pop(name, None)
        self._change(added, present, name)
        self._has_begun = True

    def forget(self, names: Collection[str]) -> None:
        """The versions of steps that are known have been removed there; this is written with the next one
        that is uploaded. What another program uploads meanwhile stays in the record."""
        if self._uploads is not None:
            for name in names:
                self._gone.setdefault(name, set()).update(self._uploads.steps.get(name, ()))

    @property
    def _local_name(self) -> str:
        return f"'{self._local}' on {socket.gethostname()}"

    def _require_turn(self, uploads: _Uploads, own: _Directory) -> None:
        if self._has_begun and (uploads.owner != own.id or not own.made_last_of(uploads)):
            raise Conflict(
                f"{uploads.owner_name} has taken over the remote '{self._remote}', so nothing more is "
                f"uploaded from '{self._local}': each would replace the other's steps. End one of the two "
                "programs. To go on with this one, start it again; to go on with both, give each a remote",
                path=self._remote,
                directory=self._local,
                sequence=uploads.sequence,
            )

    def _change(
        self, change: Callable[[str, _Uploads], _Uploads], present: Collection[Info], uploaded: str
    ) -> None:
        storage.make_directory(self._remote, parents=True)
        for _ in range(_TRIES):
            uploads, version = self._read(present)
            own, own_version = _require_directory(self._local)
            self._require_turn(uploads, own)
            if not own.made_last_of(uploads):
                own = _Directory(own.sequence, versions=own.versions)
            changed = change(own.id, self._without_those_gone(uploads))
            if version is not None and changed == uploads and uploaded not in own.versions:
                self._uploads = uploads
                return
            token = secrets.token_hex(8)
            needed = {*changed.uploaders.values()}
            tokens = {directory: last for directory, last in uploads.tokens.items() if directory in needed}
            changed = dataclasses.replace(changed, tokens={**tokens, own.id: token})
            own = dataclasses.replace(
                own,
                tokens=[*own.tokens, token][-_KEPT_TOKENS:],
                versions={
                    name: time
                    for name, time in own.versions.items()
                    if name != uploaded and name in changed.steps
                },
            )
            path = os.path.join(self._local, SEQUENCE)
            if _put(path, own.encode(), own_version) and _put(self._path, changed.encode(), version):
                self._uploads = changed
                self._gone.clear()
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
            return _Uploads(own, self._local_name, owner=_require_directory(self._local)[0].id), None
        uploads = _Uploads.decode(content, self._path)
        self._require_ours(uploads, present)
        return uploads, version

    def _without_those_gone(self, uploads: _Uploads) -> _Uploads:
        steps = {}
        for name, times in uploads.steps.items():
            if left := [time for time in times if time not in self._gone.get(name, ())]:
                steps[name] = left
        uploaders = {name: by for name, by in uploads.uploaders.items() if name in steps}
        return dataclasses.replace(uploads, steps=steps, uploaders=uploaders)


def _put(path: str, content: bytes, expected: storage.Identity | None) -> bool:
    """Replaces this version of a file; makes it where there is to be none. Returns False where another
    process was faster."""
    directory = os.path.dirname(path)
    # Elsewhere than in a store, replacements on a condition exclude each other by this.
    with contextlib.nullcontext() if storage.is_in_store(path) else write_lock.held(directory):
        try:
            if expected is None:
                storage.of(path).create(path, content, new_attempt_id())
            else:
                storage.of(path).replace(path, content, new_attempt_id(), expected=expected)
        except Conflict:
            return False
    return True


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
    found = _read_directory(root)
    return None if found is None else found.sequence


def _read_directory(root: str) -> _Directory | None:
    with contextlib.suppress(NotFound):
        return _require_directory(root)[0]
    return None


def _require_directory(root: str) -> tuple[_Directory, storage.Identity]:
    """What a directory says of itself, and which version of the file that is.

    Raises:
        NotFound: It says nothing yet.
    """
    path = os.path.join(root, SEQUENCE)
    content, version = storage.read_version(path, limit_bytes=_LIMIT_BYTES)
    return _Directory.decode(content, path), version


def write_id_once(root: str, sequence: str) -> str:
    """Gives the sequence in a directory an id, unless it has one; returns the one that it has."""
    path = os.path.join(root, SEQUENCE)
    with contextlib.suppress(Conflict):
        storage.of(path).create(path, _Directory(sequence).encode(), new_attempt_id())
        return sequence
    return read_id(root) or sequence
