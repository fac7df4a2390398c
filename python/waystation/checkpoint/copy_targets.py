"""Where a copy goes: an attempt on a disk, or in an object store, and what earlier copies have left there.

The record of each checkpointable is written first. So an attempt that has the same record holds files of the
same content, whoever has made it: those of them that are whole are taken over, by a further name on a disk,
by a copy that the store makes on its server. On a disk each is read and verified, as a power cut may have
left anything. In a store an object is there only once it was written whole, and what is written there was
verified before; its length is compared, and trusted, for a while: where a checkpoint is there that is
replaced, it may be because it is damaged. Its objects are not taken over then, and what nothing names may be
of one before it, so it is read and verified.

In a store a copy can also refer to data files of a checkpoint beside it that hold the same (`references`): a
sequence of which most stays equal is copied as it is saved. Files are the same by their names, their lengths
and the checksums of all their blocks.

Nothing is taken away from an attempt, so it does not matter whether its process is alive. The attempts of
dead ones are removed afterwards, as by every save.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from waystation import _native, _plans, storage
from waystation._errors import Corrupt, NotFound, Unsupported, WaystationError
from waystation._options import Options
from waystation.checkpoint.native_saving import publish, replace
from waystation.checkpoint.paths import check_destination
from waystation.layouts.native import commit, handler_files, names, orphans
from waystation.layouts.native.in_store import StoreAttempt
from waystation.layouts.native.read import OpenCheckpointable
from waystation.layouts.native.records import (
    PYTREE,
    RECORD_LIMIT_BYTES,
    CheckpointableRecord,
    CheckpointRecord,
    DataPlace,
    Digest,
)
from waystation.layouts.native.references import References
from waystation.layouts.native.tables import FILE_ENTRY
from waystation.layouts.native.unchanged import Earlier
from waystation.layouts.native.write import SYNC_TOGETHER_BYTES
from waystation.storage import attempts
from waystation.storage.attempts import Attempt

_WINDOW_BYTES = 64 << 20

# The attempts that copies of this process have left, for others to take over.
_left: set[str] = set()


@dataclass(frozen=True, slots=True)
class CopiedFile:
    """A file that the engine copies.

    Attributes:
        name: Below the directory of its checkpointable in the copy, divided by slashes.
        source: Where it is.
        nbytes: Its length.
        checksums: Of its blocks, if they have any.
        digest: Of all of it, if it has one.
    """

    name: str
    source: str
    nbytes: int
    checksums: memoryview | None
    digest: Digest | None = None


@dataclass(frozen=True, slots=True)
class CopiedPart:
    """A checkpointable, as the copy is to have it.

    Attributes:
        name: Its name.
        kind: What it is, as in its record.
        record_name: The name of its record.
        record: The record.
        metadata: The other metadata files, by name.
        files: All else.
    """

    name: str
    kind: str
    record_name: str
    record: bytes
    metadata: dict[str, bytes]
    files: Sequence[CopiedFile]

    def with_places(self, places: Mapping[str, DataPlace]) -> CopiedPart:
        """The same state, some of whose files, by name, are in other places. An index of files says where
        arrays are, so it goes."""
        if not places:
            return self
        own = CheckpointableRecord.decode(self.record, self.record_name)
        (section,) = _native.decode_table("files", self.metadata[names.FILE_TABLE], names.FILE_TABLE)
        table = np.frombuffer(section, FILE_ENTRY).copy()
        used = sorted(set(places.values()), key=lambda place: (place.checkpoint, place.directory))
        locations = {place: number for number, place in enumerate(used, 1)}
        for number, file in enumerate(self.files):
            if file.name in places:
                table["location"][number] = locations[places[file.name]]
        file_table = _native.encode_table("files", [table.tobytes()])
        digests = {**own.tables, names.FILE_TABLE: Digest.of(file_table)}
        metadata = {**self.metadata, names.FILE_TABLE: file_table}
        for entries in (digests, metadata):
            entries.pop(names.INDEX, None)
        record = dataclasses.replace(own, tables=digests, places=tuple(used)).encode()
        files = [file for file in self.files if file.name not in places]
        return dataclasses.replace(self, record=record, metadata=metadata, files=files)

    def contents(self, directory: str) -> list[tuple[str, bytes]]:
        """The metadata files, where they are to be."""
        entries = {**self.metadata, self.record_name: self.record}
        return [(os.path.join(directory, name), content) for name, content in entries.items()]


class Target(Protocol):
    """A copy that is not visible yet.

    Attributes:
        path: The directory of the attempt.
        group: Gets what is not durable yet; None where everything is durable once it is written.
        found_bytes: Bytes of files that were taken over.
        shared_bytes: Bytes of files of another checkpoint that it refers to.
    """

    path: str
    group: _native.SyncGroup | None
    found_bytes: int
    shared_bytes: int

    def share(self, parts: Sequence[CopiedPart]) -> Sequence[CopiedPart]:
        """Refers to what another checkpoint has; returns the checkpointables without these files."""
        ...

    def write_metadata(self, parts: Sequence[CopiedPart]) -> None:
        """Writes the metadata of all checkpointables."""
        ...

    def take_what_is_there(self, parts: Sequence[CopiedPart]) -> None:
        """Takes over what other attempts at the same copy have, and removes those that are dead."""
        ...

    def lacking(self, parts: Sequence[CopiedPart]) -> list[tuple[str, CopiedFile]]:
        """The files that are not there yet, with the paths that they are to have."""
        ...

    def commit(self, record: CheckpointRecord, parts: Sequence[CopiedPart]) -> None:
        """Makes the copy visible. All its files are there."""
        ...

    def leave(self) -> None:
        """Ends without a commit; what is there stays for whoever goes on."""
        ...

    def discard(self) -> None:
        """Ends without a commit, and removes what is there."""
        ...


def open_target(
    target: str,
    options: Options,
    *,
    overwrite: bool,
    replaces: storage.Identity | None = None,
    beside: str | None = None,
) -> Target:
    """Begins a copy to a path.

    Args:
        target: The path.
        options: How.
        overwrite: Whether a checkpoint is replaced that is there.
        replaces: The version of its record that may be; by default whatever is there.
        beside: A checkpoint of the same run in a store, to whose files the copy may refer.

    Raises:
        Conflict: Something is there.
    """
    check_destination(target, overwrite=overwrite)
    if storage.of(target).renames is None:
        return _InStore(target, overwrite=overwrite, replaces=replaces, beside=beside)
    return _OnDisk(target, options, overwrite=overwrite, replaces=replaces)


class _Attempted:
    """What both have in common: files that are there, and those that are lacking."""

    path: str

    def __init__(self) -> None:
        self.found_bytes = self.shared_bytes = 0
        self._present: set[str] = set()

    def share(self, parts: Sequence[CopiedPart]) -> Sequence[CopiedPart]:
        """See `Target`."""
        return parts

    def _directory(self, part: CopiedPart) -> str:
        return names.directory_in(self.path, part.name)

    def _paths(self, part: CopiedPart) -> Iterator[tuple[str, CopiedFile]]:
        directory = self._directory(part)
        return ((os.path.join(directory, *file.name.split("/")), file) for file in part.files)

    def lacking(self, parts: Sequence[CopiedPart]) -> list[tuple[str, CopiedFile]]:
        """See `Target`."""
        return [
            (path, file) for part in parts for path, file in self._paths(part) if path not in self._present
        ]

    def _take(self, part: CopiedPart, other: str, is_whole: Callable[[str, CopiedFile], bool]) -> None:
        """Takes over the whole files of a directory of another attempt, if it is of the same content."""
        try:
            record = os.path.join(other, part.record_name)
            if storage.read_file(record, limit_bytes=RECORD_LIMIT_BYTES) != part.record:
                return
            sizes = storage.files_below(other)
        except WaystationError:
            return  # it has gone, or has no record yet

        def take(entry: tuple[str, CopiedFile]) -> str | None:
            path, file = entry
            with contextlib.suppress(WaystationError):  # it is copied like others then
                storage.of(path).copy(os.path.join(other, *file.name.split("/")), path)
                if is_whole(path, file):
                    return path
                storage.remove_file(path)
            return None

        wanted = [
            (path, file)
            for path, file in self._paths(part)
            if path not in self._present and sizes.get(file.name) == file.nbytes
        ]
        self._present.update(filter(None, storage.side_by_side(other, take, wanted)))
        self.found_bytes += sum(file.nbytes for path, file in wanted if path in self._present)

    def _entries(self, parts: Sequence[CopiedPart]) -> dict[str, tuple[str, Digest]]:
        """What the record of the checkpoint says of them."""
        return {
            part.name: (os.path.basename(self._directory(part)), Digest.of(part.record)) for part in parts
        }


class _OnDisk(_Attempted):
    """See `Target`."""

    def __init__(
        self, target: str, options: Options, *, overwrite: bool, replaces: storage.Identity | None
    ) -> None:
        super().__init__()
        self._overwrite = overwrite
        self._replaces = replaces
        if overwrite:
            orphans.remove_dead(target)
        self._attempt = Attempt(target, options.file.path_permission_mode)
        self.path = self._attempt.path
        try:
            self._group = _native.SyncGroup(self.path)
        except BaseException:
            self._attempt.discard()
            raise
        self._directories: list[str] = []
        self.group: _native.SyncGroup | None = None

    def write_metadata(self, parts: Sequence[CopiedPart]) -> None:
        """See `Target`."""
        for part in parts:
            made = {self._directory(part)}
            made.update(os.path.dirname(path) for path, _ in self._paths(part))
            for directory in sorted(made):
                storage.make_directory(directory, parents=True)
                self._directories.append(directory)
        contents = [entry for part in parts for entry in part.contents(self._directory(part))]
        _native.write_small_files(contents, group=self._group)
        if sum(file.nbytes for part in parts for file in part.files) <= SYNC_TOGETHER_BYTES:
            self.group = self._group

    def take_what_is_there(self, parts: Sequence[CopiedPart]) -> None:
        """See `Target`."""
        place, name = os.path.split(self._attempt.target)
        others = [found for found in attempts.leftovers(place, name) if found.path != self.path]
        for other in others:
            for part in parts:
                self._take(part, os.path.join(other.path, part.name), _is_whole)
        self._group.add(sorted(self._present))
        for other in others:
            if other.path in _left:
                _left.discard(other.path)
                storage.remove_tree(other.path)
        attempts.remove_dead(place, name)

    def commit(self, record: CheckpointRecord, parts: Sequence[CopiedPart]) -> None:
        """See `Target`."""
        own = dataclasses.replace(record, generation=1, checkpointables=self._entries(parts), removed={})
        _native.write_small_files([(os.path.join(self.path, names.RECORD), own.encode())], group=self._group)
        self._attempt.seal()
        # Handlers' files may be in directories of directories.
        above = {directory for path in self._directories for directory in _between(path, self.path)}
        self._group.add(sorted({*self._directories, *above, self.path}))
        self._group.sync()
        publish(self._attempt, partial(replace, judged=self._replaces) if self._overwrite else None)
        self._group.close()

    def leave(self) -> None:
        """See `Target`."""
        self._group.close()
        _left.add(self.path)

    def discard(self) -> None:
        """See `Target`."""
        self._group.close()
        self._attempt.discard()


def _between(path: str, root: str) -> Iterator[str]:
    """The directories above a path, up to a root that they are in."""
    while (path := os.path.dirname(path)) != root:
        yield path


def _is_whole(path: str, file: CopiedFile) -> bool:
    """Whether a file is what its checksums say; all of it is read."""
    try:
        if file.digest is not None:
            handler_files.check(path, file.digest)
            return True
        slab = _native.allocate(min(_WINDOW_BYTES, max(file.nbytes, 1)))
        for begin in range(0, file.nbytes, _WINDOW_BYTES):
            nbytes = min(_WINDOW_BYTES, file.nbytes - begin)
            words = _plans.byte_reads([0], begin, nbytes, slab.address)
            job = _native.start_read(
                [(path, file.nbytes, file.checksums)], words, slab, root=storage.engine_of(path)
            )
            job.wait()
            job.result()
    except (Corrupt, NotFound):
        return False
    return True


class _InStore(_Attempted):
    """See `Target`."""

    def __init__(
        self, target: str, *, overwrite: bool, replaces: storage.Identity | None, beside: str | None
    ) -> None:
        super().__init__()
        self.group: _native.SyncGroup | None = None
        self._beside = beside
        self._attempt = StoreAttempt(target, overwrite=overwrite, removes_dead=False, judged=replaces)
        self.path = self._attempt.path

    def share(self, parts: Sequence[CopiedPart]) -> Sequence[CopiedPart]:
        """See `Target`. The attempt has its lease by now, so the order is that of a save (`references`)."""
        states = [part.name for part in parts if part.kind == PYTREE]
        earlier = Earlier.open(self._beside, states) if self._beside is not None and states else None
        if earlier is None or not earlier.may_share_with(self._attempt.target):
            return parts
        self._attempt.owners = earlier.owners()
        made = []
        for part in parts:
            opened = earlier.states.get(part.name)
            made.append(part if opened is None else self._share(part, earlier, opened))
        return made

    def _share(self, part: CopiedPart, earlier: Earlier, opened: OpenCheckpointable) -> CopiedPart:
        same = _same_files(part, opened)
        if not same:
            return part
        references = References(self._directory(part), 0)
        references.put((place, name) for name, (place, _) in same.items())
        if not earlier.root.is_current():  # whoever removes it may not have seen the references
            references.put(())
            return part
        sizes = {file.name: file.nbytes for file in part.files}
        found = storage.side_by_side(self.path, storage.status, [path for _, path in same.values()])
        kept = {
            name: place
            for (name, (place, path)), status in zip(same.items(), found, strict=True)
            if earlier.is_as_committed(path, sizes[name], status)
        }
        references.put((place, name) for name, place in kept.items())
        self.shared_bytes += sum(sizes[name] for name in kept)
        return part.with_places(kept)

    def write_metadata(self, parts: Sequence[CopiedPart]) -> None:
        """See `Target`."""
        contents = [entry for part in parts for entry in part.contents(self._directory(part))]
        storage.of(self.path).write_files(contents)

    def take_what_is_there(self, parts: Sequence[CopiedPart]) -> None:
        """See `Target`."""
        target = self._attempt.target
        movers = {entry.name: names.mover(entry.name) for entry in storage.entries_or_none(target)}
        others = {name for name, mover in movers.items() if mover not in (None, self._attempt.id)}
        committed = _committed(target) if others else None
        for part in parts:
            for name in sorted(others.difference(committed or ())):
                if name == names.moved_in(part.name, str(movers[name])):
                    is_whole = _is_as_long if committed is None else _is_whole
                    self._take(part, os.path.join(target, name), is_whole)
        if any(mover != self._attempt.id for mover in movers.values()):
            self._attempt.remove_others()

    def commit(self, record: CheckpointRecord, parts: Sequence[CopiedPart]) -> None:
        """See `Target`."""
        own = dataclasses.replace(record, generation=1, checkpointables=self._entries(parts), removed={})
        # A large copy takes long; and who removes what it refers to looks at its lease.
        self._attempt.publish(own)

    def leave(self) -> None:
        """See `Target`."""
        self._attempt.leave()

    def discard(self) -> None:
        """See `Target`."""
        self._attempt.discard()


def _same_files(part: CopiedPart, opened: OpenCheckpointable) -> dict[str, tuple[DataPlace, str]]:
    """Of the files of a state those that an earlier state has, by name: in which place, and at which path."""
    numbers = {os.path.basename(path): number for number, path in enumerate(opened.paths())}
    sizes = opened.tables.files["file_bytes"].tolist()

    def is_same(file: CopiedFile) -> bool:
        number = numbers.get(file.name)
        if number is None or sizes[number] != file.nbytes or file.checksums is None:
            return False
        return bytes(opened.tables.file_checksums(number)) == bytes(file.checksums)

    same = [file.name for file in part.files if is_same(file)]
    paths = opened.paths([numbers[name] for name in same])
    return {name: (opened.place(numbers[name]), path) for name, path in zip(same, paths, strict=True)}


def _committed(target: str) -> Collection[str] | None:
    """The directories that the record of the checkpoint at a path in a store names, none if it is damaged;
    None where there is no checkpoint."""
    try:
        record = commit.read_record(target)
    except NotFound:
        return None
    except (Corrupt, Unsupported):
        return ()
    return [directory for directory, _ in record.checkpointables.values()]


def _is_as_long(path: str, file: CopiedFile) -> bool:
    """Whether what a store has copied is there: some go on after they have answered."""
    found = storage.status(path)
    return found is not None and found.nbytes == file.nbytes
