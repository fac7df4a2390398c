"""`mirror`: makes a directory of checkpoints have those of another one, each copied as `copy` does.

The newest goes first: where a mirror is cut short, the newest is what one wants to have there. A checkpoint
that is there and equal, by the digests in its records, is passed over, so that a mirror that is begun again
goes on. Nothing at the destination is removed or replaced unless that is asked for.

What can go wrong with one checkpoint does not keep others from being copied: it is damaged, or it is removed
meanwhile, or another writer is faster, or something else is in its place at the destination, or nothing there
can have its name. One that this process may not read is told by an error, once all others are there. Anything
else ends the mirror; what it has copied stays. Where the source has gone by the
end, because it was unmounted for instance, nothing is removed: what cannot be seen is not what was removed.

A symbolic link to a checkpoint of the same directory, such as `latest`, is passed over: as a copy it would be
the same bytes once more, in a store without links, and one that nobody keeps up to date.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from waystation import storage
from waystation._arguments import require_function
from waystation._errors import (
    Conflict,
    Corrupt,
    InvalidInput,
    InvalidLayoutError,
    NotDirectory,
    NotFound,
    PermissionDenied,
    Unavailable,
    Unsupported,
    UnusablePath,
    WaystationError,
    WrongType,
)
from waystation.checkpoint import copy_orbax
from waystation.checkpoint.copy import Copying, CopyStatistics, on_its_own
from waystation.checkpoint.delete import withdraw
from waystation.checkpoint.paths import PathLike, is_checkpoint, layout_at, natural_order, require_not_http
from waystation.layouts.native import commit, names
from waystation.layouts.native.records import (
    PYTREE,
    CheckpointableRecord,
    CheckpointRecord,
    Digest,
    read_vouched,
)
from waystation.storage.bandwidth import Bandwidth
from waystation.storage.leases import Leases
from waystation.storage.store_leases import StoreLeases
from waystation.training import root_metadata, upload_record
from waystation.transfers.handle import Progress

_log = logging.getLogger("waystation")

# That an error names.
_MOST_NAMES = 20
# At a checkpoint that is removed and saved again meanwhile.
_TRIES = 3

OnCheckpoint = Callable[[str], Callable[[int, int], None]]


@dataclass(slots=True)
class MirrorStatistics:
    """What a mirror has done; checkpoints are told by their names.

    Attributes:
        path: The directory that was made like the other one.
        copied: What was copied, in the order in which that was done.
        equal: Those that were there.
        differing: Those that are there with other contents, and were left alone.
        damaged: Those that could not be copied, and why not: they are damaged, or at the destination
            something that is no checkpoint has their name, or nothing can have it; or they would replace a
            checkpoint that cannot be replaced, as those in layouts of Orbax in a store.
        unsupported: Parts of saves to local storage.
        deleted: Those that were removed, as the source does not have them.
    """

    path: str
    copied: dict[str, CopyStatistics] = field(default_factory=dict)
    equal: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    unsupported: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)


def mirror(
    source: PathLike,
    destination: PathLike,
    *,
    overwrite: bool = False,
    delete: bool = False,
    bytes_per_second: int | None = None,
    on_checkpoint: OnCheckpoint = lambda _name: lambda _done, _total: None,
) -> MirrorStatistics:
    """Copies the checkpoints of a directory that another directory lacks, the newest first.

    Each is verified and committed as by `waystation.copy`. Those that are there are passed over. The metadata
    of the whole sequence, and its id, are copied as well, if there are none. One process calls this.

    Args:
        source: The directory of checkpoints, or a location in an object store.
        destination: The directory that is to have them; it is made.
        overwrite: Replace checkpoints at the destination that differ from those of the same name, by their
            records; in layouts of Orbax by their metadata, the lengths of their files, and the checksums that
            Waystation has written. Data are not read, so damage of data is neither found nor repaired.
        delete: Remove checkpoints at the destination whose names the source has not had since the mirror
            began, once all others have been copied. Those that somebody reads stay.
            Nothing is removed where something could not be read.
        bytes_per_second: How much to read in a second at most, on average; None for no bound.
        on_checkpoint: Called with the name of each checkpoint before it is copied; returns what is called
            with `(bytes done, bytes in all)` meanwhile.

    Returns:
        What was done, and what was not. Nothing is raised of damaged checkpoints, nor of differing ones.

    Raises:
        NotFound: There is no directory at `source`.
        InvalidInput: There are no checkpoints there, and `delete` would remove all of those at the
            destination; or a path cannot be one, or both are the same directory.
        PermissionDenied: This process may not read some of the checkpoints, which the message names; all
            others were copied. Or it may not write to `destination`.
        Unavailable: Something cannot be reached, or the source has gone meanwhile, so that nothing was
            removed; call again, and the mirror goes on.
    """
    require_function("on_checkpoint", on_checkpoint)
    for name, value in (("overwrite", overwrite), ("delete", delete)):
        if not isinstance(value, bool):
            raise WrongType(f"{name} must be True or False, not {value!r:.60}")
    origin, target = (storage.resolved(storage.located(path)) for path in (source, destination))
    require_not_http(target)
    if storage.is_same_directory(origin, target):
        raise InvalidInput(f"'{origin}' cannot be a mirror of itself; give another path", path=origin)
    if _is_checkpoint_itself(origin):
        raise InvalidInput(
            f"'{origin}' is a checkpoint itself; copy it by waystation.copy, or 'waystation cp'", path=origin
        )
    with Bandwidth(bytes_per_second) as bandwidth:
        opened = _opened(origin)
        return _Mirror(opened, target, bandwidth, on_checkpoint, overwrite=overwrite).run(delete=delete)


def _is_checkpoint_itself(origin: str) -> bool:
    """Whether the source is a checkpoint; one in it that may not be looked at does not make it one."""
    try:
        return is_checkpoint(origin)
    except PermissionDenied:
        return False  # whoever opens it is told, if it is about the source itself


def _opened(origin: str) -> storage.Root:
    """The source, held open, so that it is known whether it is still the same directory at the end.

    Raises:
        NotFound: There is none.
        NotDirectory: It is a file.
    """
    try:
        opened = storage.of(origin).hold(origin, follow_links_out=True)
    except NotFound as error:
        if "bucket" in error.context:
            raise
        raise NotFound(f"there is no directory '{origin}'", path=origin) from error
    except WaystationError as error:
        if not storage.is_absence(error):
            raise
        raise _is_file(origin) from error
    if storage.is_in_store(origin) and storage.is_file(origin):
        raise _is_file(origin)
    return opened


def _is_file(origin: str) -> NotDirectory:
    return NotDirectory(f"'{origin}' is a file; give a directory that holds checkpoints", path=origin)


class _Mirror:
    def __init__(
        self,
        opened: storage.Root,
        target: str,
        bandwidth: Bandwidth,
        on_checkpoint: OnCheckpoint,
        *,
        overwrite: bool,
    ) -> None:
        self._opened = opened
        self._origin = opened.path
        self._target = target
        self._bandwidth = bandwidth
        self._on_checkpoint = on_checkpoint
        self._overwrite = overwrite
        self._done = MirrorStatistics(target)
        self._denied: dict[str, PermissionDenied] = {}  # by the names of what was not copied

    def run(self, *, delete: bool) -> MirrorStatistics:
        found = _checkpoints_in(self._origin)
        if delete and not found:
            raise InvalidInput(
                f"there are no checkpoints in '{self._origin}', so that all in '{self._target}' would be "
                "removed; if that is meant, remove them yourself",
                path=self._origin,
            )
        storage.make_directory(self._target, parents=True)
        self._copy_metadata()
        links = _links_within(self._origin)
        for name, record in _newest_first(found):
            if name in links:
                _log.info("'%s' is a link to another checkpoint there, and was not copied", name)
            else:
                self._mirror(name, record)
        if self._denied:
            self._raise_denied()
        if delete:
            self._delete(found.keys())
        return self._done

    def _copy_metadata(self) -> None:
        with self._noting_denials(root_metadata.DIRECTORY):
            custom_metadata = root_metadata.read(self._origin)
            if custom_metadata:
                root_metadata.write_once(self._target, custom_metadata)
        with self._noting_denials(upload_record.SEQUENCE):
            sequence = upload_record.read_id(self._origin)
            if sequence is not None:  # so that what is copied back finds its remote again
                upload_record.write_id_once(self._target, sequence)

    @contextlib.contextmanager
    def _noting_denials(self, name: str) -> Iterator[None]:
        """Notes that something may not be read, or that on a disk something may not be written to that has
        its place. If nothing may be written to the destination, that ends the mirror."""
        try:
            yield
        except PermissionDenied as error:
            places = [self._origin] if storage.is_in_store(self._target) else [self._origin, self._target]
            path = str(error.context.get("path"))
            if not any(_is_at(path, os.path.join(place, name)) for place in places):
                raise
            self._denied[name] = error

    def _raise_denied(self) -> NoReturn:
        names_shown = sorted(self._denied, key=natural_order)
        first = self._denied[names_shown[0]]
        more = len(names_shown) - _MOST_NAMES
        shown = ", ".join(f"'{name}'" for name in names_shown[:_MOST_NAMES])
        raise PermissionDenied(
            f"{shown}{f' and {more} more' if more > 0 else ''} in '{self._origin}' could not be copied to "
            f"'{self._target}', though all else is there: {first.message}. Nothing was removed. Call again "
            "as a user who may read all of it",
            path=self._origin,
        ) from first

    def _mirror(self, name: str, record: CheckpointRecord | WaystationError | None) -> None:
        """Copies one checkpoint, if that is not there."""
        if isinstance(record, PermissionDenied):
            self._denied[name] = record
            return
        if isinstance(record, WaystationError):
            self._done.damaged[name] = record.message
            return
        if record is not None and record.local is not None:
            self._done.unsupported.append(name)
            return
        refusals = (Corrupt, InvalidInput, UnusablePath) + ((Unsupported,) if record is None else ())
        source = os.path.join(self._origin, name)
        for number in itertools.count(1):
            try:
                target = storage.located(os.path.join(self._target, name))  # or nobody could load it there
                with self._noting_denials(name):
                    self._copy_unless_there(name, source, target)
                return
            except (NotFound, InvalidLayoutError) as error:
                if not is_checkpoint(source):
                    _log.info("checkpoint '%s' was removed before it was copied", source)
                    return
                if number == _TRIES:  # else another one has come in its place
                    if isinstance(error, NotFound):
                        raise
                    self._done.damaged[name] = str(error)
                    return
            except refusals as error:
                self._done.damaged[name] = str(error)
                return

    def _copy_unless_there(self, name: str, source: str, target: str) -> None:
        for _ in range(2):  # another writer may come at any time
            if is_checkpoint(target):
                if same(source, target):
                    self._done.equal.append(name)
                    return
                if not self._overwrite:
                    break
            try:
                self._done.copied[name] = self._copy(name, source, target)
            except Conflict as error:
                if not is_checkpoint(target):
                    self._done.damaged[name] = error.message
                    return
            else:
                return
        self._done.differing.append(name)

    def _copy(self, name: str, source: str, target: str) -> CopyStatistics:
        copying = Copying(self._bandwidth, Progress(), self._on_checkpoint(name))
        return copying.run(source, target, overwrite=self._overwrite)

    def _delete(self, listed: Collection[str]) -> None:
        """Removes what the source does not have.

        Args:
            listed: What it had at first.
        """
        leases = StoreLeases(self._target) if storage.is_in_store(self._target) else Leases(self._target)
        present = {*listed, *self._present()}
        found = _checkpoints_in(self._target)
        for name in sorted(found, key=natural_order):
            if name not in present and not isinstance(found[name], PermissionDenied):
                with leases.condemned(name) as may_go:
                    if may_go and self._withdraw(name, found[name]):
                        self._done.deleted.append(name)

    def _withdraw(self, name: str, record: CheckpointRecord | WaystationError | None) -> bool:
        """Removes a checkpoint at the destination; returns whether it was still the one that was listed."""
        created_ns = record.created_ns if isinstance(record, CheckpointRecord) else None
        try:
            withdraw(os.path.join(self._target, name), created_ns=created_ns)
        except Conflict as error:
            _log.info("'%s' was not removed: %s", name, error.message)
            return False
        return True

    def _present(self) -> Collection[str]:
        """What the source has by now.

        Raises:
            Unavailable: It is not the directory any more that was opened, or has nothing left.
        """
        found = _checkpoints_in(self._origin)
        if not found or not (storage.is_in_store(self._origin) or self._opened.is_current()):
            what = "is another directory than at first" if found else "has no checkpoints any more"
            raise Unavailable(
                f"'{self._origin}' {what}: was it unmounted, or moved away? So nothing was removed from "
                f"'{self._target}'; call again once it is there",
                path=self._origin,
            )
        return found.keys()


def _is_at(path: str, place: str) -> bool:
    """Whether a path is a place, or lies beneath it."""
    return path == place or path.startswith(os.path.join(place, ""))


def _links_within(directory: str) -> set[str]:
    """The links in a directory that lead to something beside them."""
    return {
        entry.name
        for entry in storage.entries_or_none(directory)
        if entry.kind == "link"
        and os.path.dirname(storage.resolved(os.path.join(directory, entry.name))) == directory
    }


def _checkpoints_in(directory: str) -> dict[str, CheckpointRecord | WaystationError | None]:
    """The checkpoints in a directory by name, each with its record, or what is wrong with that; None for
    those of Orbax. What this process may not look at may be one."""

    def look(name: str) -> tuple[str, CheckpointRecord | WaystationError | None] | None:
        path = os.path.join(directory, name)
        try:
            layout = layout_at(path)
        except PermissionDenied as error:
            return name, error
        if layout is None:
            return None
        if layout == "orbax":
            return name, None
        try:
            return name, commit.read_record(path)
        except (Corrupt, Unsupported, PermissionDenied) as error:
            return name, error
        except NotFound:
            return None

    return dict(filter(None, storage.side_by_side(directory, look, storage.directories(directory))))


def _newest_first(
    found: Mapping[str, CheckpointRecord | WaystationError | None],
) -> Sequence[tuple[str, CheckpointRecord | WaystationError | None]]:
    def age(entry: tuple[str, CheckpointRecord | WaystationError | None]) -> tuple[int, object]:
        name, record = entry
        created_ns = record.created_ns if isinstance(record, CheckpointRecord) else 0
        return created_ns, natural_order(name)

    return sorted(found.items(), key=age, reverse=True)


def same(first: str, second: str) -> bool:
    """Whether two checkpoints have the same contents, in whatever layout. Data are not read.

    Raises:
        Corrupt: What tells of the first is damaged.
    """
    layouts = {layout_at(first), layout_at(second)}
    if layouts == {"orbax"}:
        return copy_orbax.same(first, second)
    return "orbax" not in layouts and _same_records(first, second)


def _same_records(first: str, second: str) -> bool:
    """Whether two checkpoints of the native layout have the same contents, by their records: which names, and
    by the digests of their tables all arrays, and all files of handlers. Data are not read.

    Raises:
        Corrupt: A record of the first is damaged.
    """
    own = commit.read_record(first)
    try:
        other = commit.read_record(second)
    except (Corrupt, NotFound, Unsupported):
        return False
    if own.checkpointables.keys() != other.checkpointables.keys():
        return False
    if own.custom_metadata != other.custom_metadata:
        return False
    return all(
        _same(first, second, own.checkpointables[name], other.checkpointables[name])
        for name in own.checkpointables
    )


def _same(first: str, second: str, own: tuple[str, Digest], other: tuple[str, Digest]) -> bool:
    if own[1] == other[1]:
        return True
    # Records differ of handlers' files, between disks and stores, and of states that share files with others.
    found = _record(first, own)
    try:
        present = _record(second, other)
        if found.kind == present.kind == PYTREE:
            return _tables(first, own[0], found) == _tables(second, other[0], present)
    except (Corrupt, NotFound, Unsupported):
        return False
    if PYTREE in (found.kind, present.kind):
        return False
    return (found.handler, found.files) == (present.handler, present.files)


def _tables(checkpoint: str, directory: str, own: CheckpointableRecord) -> dict[str, Digest]:
    """The digests of the tables of a state, as those of a copy are that has all its files. The index follows
    from them, where there is one."""
    found = own.tables
    if own.places:
        path = os.path.join(checkpoint, directory, names.FILE_TABLE)
        (content,) = read_vouched({path: own.tables[names.FILE_TABLE]})
        found = on_its_own(own, content)[0].tables
    return {name: digest for name, digest in found.items() if name != names.INDEX}


def _record(checkpoint: str, entry: tuple[str, Digest]) -> CheckpointableRecord:
    directory, digest = entry
    path = names.checkpointable_record(os.path.join(checkpoint, directory))
    try:
        (content,) = read_vouched({path: digest})
    except NotFound as error:
        raise Corrupt(f"a committed file is missing: {error.message}", **error.context) from error
    return CheckpointableRecord.decode(content, path)
