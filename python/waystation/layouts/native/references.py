"""Data of checkpoints in an object store to which other checkpoints refer, and their removal.

The *owner* is the checkpoint beneath whose path an object lies, the *referrer* a sibling whose tables name
it. A reference is a small object beneath the owner, at `.waystation-reference.<attempt>/`, one for each
directory and process of the attempt: it names the referrer, and the files that it refers to. It is put before
the attempt commits, and stays as long as the referrer does.

Invariant: data are removed only while no record names them, no reference of a committed checkpoint names
them, and no attempt under way has a reference at their owner. Once that is so, it stays so, as names of data
are never used again: a request to remove them is right however late it comes.

Failure sequence: a saver is killed before its commit: its references run out with its lease, and whoever
looks next removes them (`protected`). A deleter is killed: the data have no name any more, so whoever removes
leftovers there goes on; their `record.json`, which tells what they refer to elsewhere, is removed after those
references. `docs/design/0007-storage.md` goes through the races.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from waystation import storage
from waystation._errors import Corrupt, NotFound, Unsupported
from waystation.layouts.native import names, records
from waystation.layouts.native.records import DataPlace
from waystation.storage.store_leases import end_if_dead

# By the name of an owner: directories beneath it.
Owners = dict[str, set[str]]

# How often references that come meanwhile are judged before nothing is removed.
_MOST_LOOKS = 100

_log = logging.getLogger("waystation")


class References:
    """Those of one process, for one state of an attempt.

    Args:
        directory: Where the attempt writes the state.
        process: The process.
    """

    def __init__(self, directory: str, process: int) -> None:
        self._target, self._directory = os.path.split(directory)
        self._name = f"{self._directory}.p{process:05}.json"
        self._present: dict[str, bytes] = {}  # by their paths; also what may be there

    def put(self, files: Iterable[tuple[DataPlace, str]]) -> None:
        """Refers to these files, by their places and names, and to no others any more."""
        wanted: dict[str, dict[str, list[str]]] = {}
        for place, file in files:
            wanted.setdefault(place.checkpoint, {}).setdefault(place.directory, []).append(file)
        run, checkpoint = os.path.split(self._target)
        attempt_id = names.mover(self._directory)
        assert attempt_id is not None, "attempts in a store have directories of their own"
        contents = {
            os.path.join(run, owner, f"{storage.names.REFERENCE}{attempt_id}", self._name): (
                records.seal({"checkpoint": checkpoint, "files": own})
            )
            for owner, own in wanted.items()
        }
        new = {path: content for path, content in contents.items() if self._present.get(path) != content}
        gone = [path for path in self._present if path not in contents]
        self._present |= new
        if new:
            storage.of(self._target).write_files(list(new.items()))
        storage.side_by_side(self._target, storage.remove_file, gone)
        self._present = contents


@dataclass(frozen=True, slots=True)
class Protected:
    """What of the data beneath a path must stay, whatever the record there says.

    Attributes:
        has_all: Whether all of it must, because an attempt is under way that refers to some.
        files: Else, by directory: the files that committed checkpoints refer to.
        dead: References that nobody stands behind: the attempt of each, and its path.
    """

    has_all: bool
    files: Mapping[str, set[str]] = field(default_factory=dict)
    dead: Sequence[tuple[str, str]] = ()


def are_among(present: Iterable[str]) -> bool:
    """Whether there are references among what is beneath a path."""
    return any(name.startswith(storage.names.REFERENCE) for name in present)


def protected(target: str) -> Protected:
    """What of the data beneath a path must stay. Call it once no record names them.

    Between the listing and the judgement of what it has, a reference may have come, and the one by way of
    which it came may have gone. So the listing is repeated until it has nothing new.
    """
    judged: dict[str, Protected] = {}
    for _ in range(_MOST_LOOKS):
        entries = storage.entries_or_none(target)
        present = [entry.name for entry in entries if entry.name.startswith(storage.names.REFERENCE)]
        new = [name for name in present if name not in judged]
        if not new:
            return _together([judged[name] for name in present])
        judged |= zip(new, storage.side_by_side(target, partial(_judge, target), new), strict=True)
        if any(each.has_all for each in judged.values()):
            break
    return Protected(has_all=True)


def _together(found: Sequence[Protected]) -> Protected:
    files: dict[str, set[str]] = {}
    for each in found:
        for directory, own in each.files.items():
            files.setdefault(directory, set()).update(own)
    return Protected(has_all=False, files=files, dead=[path for each in found for path in each.dead])


def _judge(target: str, name: str) -> Protected:
    """What the references of one attempt protect.

    Its lease is looked at before the record of the referrer: an attempt gives it up after its commit.
    """
    place, attempt_id = os.path.join(target, name), name.removeprefix(storage.names.REFERENCE)
    paths = [os.path.join(place, entry.name) for entry in storage.entries_or_none(place)]
    try:
        contents = storage.read_files(paths, limit_bytes=records.RECORD_LIMIT_BYTES)
        found = [_decode(content, path) for content, path in zip(contents, paths, strict=True)]
    except NotFound:
        return Protected(has_all=True)  # the attempt changes them
    except Corrupt as error:
        _log.warning("nothing is removed from '%s': %s", target, error)
        return Protected(has_all=True)
    files: dict[str, set[str]] = {}
    dead = []
    for checkpoint in sorted({checkpoint for checkpoint, _ in found}):
        referrer = os.path.join(os.path.dirname(target), checkpoint)
        if not end_if_dead(os.path.join(referrer, storage.names.attempt("", attempt_id))):
            return Protected(has_all=True)
        is_named = _naming(referrer)
        for path, (own, its_files) in zip(paths, found, strict=True):
            if own != checkpoint:
                continue
            if not is_named(os.path.basename(path).rpartition(".p")[0]):
                dead.append((attempt_id, path))
                continue
            for directory, its_names in its_files.items():
                files.setdefault(directory, set()).update(its_names)
    return Protected(has_all=False, files=files, dead=dead)


def _decode(content: bytes, path: str) -> tuple[str, dict[str, list[str]]]:
    """The referrer, and the files by their directories."""
    body = records.unseal(content, path)
    checkpoint, files = body.get("checkpoint"), body.get("files")
    if not isinstance(checkpoint, str) or not isinstance(files, dict):
        raise Corrupt(f"'{path}' does not say who refers to what", path=path)
    return checkpoint, files


def _naming(target: str) -> Callable[[str], bool]:
    """Whether the record of a checkpoint names a directory; of one that is damaged, or of a newer version,
    nobody can tell, so it counts as naming all."""
    try:
        return named(target).__contains__
    except (Corrupt, Unsupported) as error:
        _log.warning("what '%s' refers to stays, for its record cannot be read: %s", target, error)
        return lambda _: True


def named(target: str) -> set[str]:
    """The directories that the record of a checkpoint names; none where there is no record.

    Raises:
        Corrupt, Unsupported: It is damaged, or of a newer version, so that nothing tells what it names.
    """
    path = os.path.join(target, names.RECORD)
    try:
        content = storage.read_file(path, limit_bytes=records.RECORD_LIMIT_BYTES)
    except NotFound:
        return set()
    found = records.CheckpointRecord.decode(content, path)
    return {directory for directory, _ in found.checkpointables.values()}


# ---- removal -----------------------------------------------------------------------------------


def remove(target: str, directories: Iterable[str]) -> list[str]:
    """Removes what is beneath a path without a name, but for what others refer to.

    Args:
        target: The path.
        directories: What to remove: data, which no record names, or leases.

    Returns:
        Those of the directories of which something was removed.
    """
    wanted = list(directories)
    data = [name for name in wanted if storage.names.attempt_id(name) is None]
    owners: Owners = {}
    for found in storage.side_by_side(target, partial(_give_up, target), data):
        for owner, own in found.items():
            owners.setdefault(owner, set()).update(own)
    sweep(os.path.dirname(target), owners)
    present = protected(target) if data else Protected(has_all=False)

    def take(name: str) -> bool:
        path = os.path.join(target, name)
        if name in data and (present.has_all or present.files.get(name)):
            return not present.has_all and _remove_but(path, present.files[name])
        storage.remove_tree(path)
        return True

    taken = storage.side_by_side(target, take, wanted)
    storage.side_by_side(target, storage.remove_file, [path for _, path in present.dead])
    return [name for name, is_taken in zip(wanted, taken, strict=True) if is_taken]


def _remove_but(path: str, kept: Collection[str]) -> bool:
    """Removes the files of a directory but for some; returns whether there were others."""
    gone = [os.path.join(path, file) for file in _files_in(path) if file not in kept]
    storage.side_by_side(path, storage.remove_file, gone)
    return bool(gone)


def _files_in(path: str) -> Collection[str]:
    try:
        return storage.files_below(path).keys()
    except NotFound:  # gone meanwhile
        return ()


def _give_up(target: str, directory: str) -> Owners:
    """Removes the references of a directory elsewhere, as its record tells them; returns what it referred
    to."""
    path = os.path.join(target, directory, names.CHECKPOINTABLE_RECORD)
    try:
        content = storage.read_file(path, limit_bytes=records.RECORD_LIMIT_BYTES)
        places = records.CheckpointableRecord.decode(content, path).places
    except (NotFound, Corrupt, Unsupported):
        return {}  # whoever looks at the owners finds that nobody stands behind the references
    attempt_id = names.mover(directory)
    owners: Owners = {}
    for place in places:
        owners.setdefault(place.checkpoint, set()).add(place.directory)
    for owner in owners:
        of_attempt = os.path.join(os.path.dirname(target), owner, f"{storage.names.REFERENCE}{attempt_id}")
        own = [
            os.path.join(of_attempt, entry.name)
            for entry in storage.entries_or_none(of_attempt)
            if entry.name.rpartition(".p")[0] == directory
        ]
        storage.side_by_side(target, storage.remove_file, own)
    return owners


def sweep(run: str, owners: Mapping[str, Iterable[str]]) -> None:
    """Removes directories beneath checkpoints of a run that have been referred to, and are not needed now.

    They have been committed once, as they were referred to. So without a name they will never have one.
    """

    def look(owner: str) -> None:
        target = os.path.join(run, owner)
        try:
            unnamed = set(owners[owner]) - named(target)
        except (Corrupt, Unsupported):
            return  # nothing tells what is its own
        if unnamed:
            remove(target, sorted(unnamed))

    storage.side_by_side(run, look, owners)


def withdraw(run: str, attempt_id: str, owners: Mapping[str, Iterable[str]]) -> None:
    """Removes the references of an attempt that has failed, at all owners that it may have any at."""
    own = [os.path.join(run, owner, f"{storage.names.REFERENCE}{attempt_id}") for owner in owners]
    storage.side_by_side(run, storage.remove_tree, own)


def unprotected(target: str, directories: Iterable[str]) -> tuple[list[str], Sequence[tuple[str, str]]]:
    """Of data without a name those directories of which something may go, and the references that nobody
    stands behind."""
    present = protected(target)
    if present.has_all:
        return [], ()
    may_go = [
        name
        for name in directories
        if not (kept := present.files.get(name)) or not kept.issuperset(_files_in(os.path.join(target, name)))
    ]
    return may_go, present.dead
