"""What the checkpoint of one step says of itself, in whatever layout it is.

It counts as one if it has been committed. That its data are whole is not looked at here.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from waystation import _forks, storage
from waystation._errors import Corrupt, InvalidInput, NotFound, Unsupported, WaystationError
from waystation._options.in_effect import current_options
from waystation.checkpoint import opening
from waystation.checkpoint.context import copy_of_current
from waystation.checkpoint.handlers.choice import METRICS
from waystation.checkpoint.handlers.simple import with_floats
from waystation.checkpoint.paths import is_checkpoint, layout_in
from waystation.checkpoint.replaced import Held, read_what_is_there
from waystation.checkpoint.stored import OpenCheckpoint
from waystation.layouts.native import commit
from waystation.layouts.native import names as native_names
from waystation.layouts.native.records import (
    RECORD_LIMIT_BYTES,
    CheckpointableRecord,
    CheckpointRecord,
    Digest,
    read_vouched,
)
from waystation.layouts.orbax.checksums import Checksums
from waystation.training.step_metadata import Unread
from waystation.tree import parse_json

_METRICS_LIMIT_BYTES = 64 << 20
# Threads that read many records. A call that finds a file missing is made again for its halves, down to so
# few files, and unless many have failed: then they are of another layout.
_READERS, _LEAST_AT_A_TIME, _MOST_FAILURES = 4, 8, 16


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What is written down about one checkpoint.

    Attributes:
        init_ns: When its save began, nanoseconds since 1970; None if that is not known.
        commit_ns: When it was committed.
        custom_metadata: What was given to the save.
        metrics: Likewise; None if nothing was, `Unread` if they are read once they are asked for.
    """

    init_ns: int | None
    commit_ns: int
    custom_metadata: Any
    metrics: Any


def is_committed(path: storage.AnyPath) -> bool:
    """Whether a committed checkpoint is at `path`."""
    return is_checkpoint(path)


def read(path: storage.AnyPath) -> StepRecord:
    """Reads what the checkpoint at `path` says of itself.

    Raises:
        Corrupt: That is damaged.
        NotFound, InvalidInput: There is none.
        Unsupported: It is of a newer format version.
    """
    return read_what_is_there(os.fspath(path), current_options(), _read)


def committed_ns(path: str) -> int | None:
    """When the checkpoint at `path` was committed, nanoseconds since 1970, by its own word; None where Orbax
    has not written that down. Raises as `read` does."""
    options = current_options()
    return read_what_is_there(path, options, lambda held: opening.open_held(held, (), options).committed_ns)


def read_or_none(path: storage.AnyPath) -> StepRecord | None:
    """The same; None if no committed checkpoint is in the directory at `path`."""

    def read_if_there(held: Held) -> StepRecord | None:
        if layout_in(held.root) is not None:
            return _read(held)
        held.require_current()
        return None

    return read_what_is_there(os.fspath(path), current_options(), read_if_there)


def _read(held: Held) -> StepRecord:
    target = held.target
    opened = opening.open_held(held, (), current_options())
    commit_ns = opened.committed_ns
    if commit_ns is None:
        found = storage.status(target)
        if found is None:
            raise NotFound(f"checkpoint '{target}' has gone", path=target)
        commit_ns = found.identity.modified_ns
    return StepRecord(opened.begun_ns, commit_ns, opened.custom_metadata, _metrics(held, opened))


def _metrics(held: Held, opened: OpenCheckpoint) -> Any:
    """The metrics: a checkpointable of their own in every layout, which is in one small file."""
    root = held.root_if_directory
    file = os.path.join(held.target, METRICS, METRICS)
    is_recorded = opened.format_version is not None
    digest = None
    if METRICS in opened.names:
        stored = opening.open_held(held, (METRICS,), current_options()).stored[METRICS]
        file = os.path.join(stored.directory, METRICS)
        digest = stored.files.get(METRICS)
    elif (is_recorded and storage.is_in_store(file)) or not storage.is_file(file, root):
        return None  # in a store a record names all that there is
    elif (checksums := Checksums.read(held.target, root)) is not None:
        own = checksums.of(os.path.dirname(file))
        digest = None if own is None else own.whole.get(METRICS)
    content = storage.read_file(file, root, limit_bytes=_METRICS_LIMIT_BYTES)
    if digest is not None:
        digest.check(content, file)
    return with_floats(parse_json(content, file, allow_nan=True))


def read_many(root: storage.AnyPath, paths: Sequence[str]) -> dict[str, StepRecord]:
    """What native checkpoints in an object store say of themselves, by few calls of the engine, each of which
    has many requests in flight. Their metrics, which take two more requests each, are read once they are
    asked for.

    Args:
        root: The directory that they are in.
        paths: The checkpoints, or what may be some.

    Returns:
        What was read, by the path. All that takes a closer look is not among it: what is not there, is of
        another layout, or damaged.
    """
    contents = _contents(
        root, [(os.path.join(path, native_names.RECORD), RECORD_LIMIT_BYTES) for path in paths]
    )
    found: dict[str, StepRecord] = {}
    metrics = LateMetrics(root)
    for path in paths:
        file = os.path.join(path, native_names.RECORD)
        if file not in contents:
            continue
        with contextlib.suppress(Corrupt, Unsupported):
            own = CheckpointRecord.decode(contents[file], file)
            unread = None
            if METRICS in own.checkpointables:
                directory, digest = own.checkpointables[METRICS]
                unread = metrics.add(path, own.created_ns, directory, digest)
            found[path] = StepRecord(own.begun_ns, own.created_ns, own.custom_metadata, unread)
    return found


class LateMetrics:
    """The metrics of the checkpoints that one look at an object store has found. Those of the checkpoint are
    read that is asked for first, as of the newest; who asks for a second one is about to ask for all.

    Args:
        root: The directory of the checkpoints.
    """

    def __init__(self, root: storage.AnyPath) -> None:
        self._root = root
        self._context = copy_of_current()  # whoever asks may be in another one
        self._places: dict[str, tuple[int, str, Digest]] = {}
        self._known: dict[str, Any] = {}
        self._has_been_asked = False
        self._lock = threading.Lock()
        _forks.watch(self)

    def begin_in_child(self) -> None:
        """See `waystation._forks.Watched`."""
        self._lock = threading.Lock()

    def add(self, path: str, commit_ns: int, directory: str, digest: Digest) -> Unread:
        """Those of one more checkpoint.

        Args:
            path: The checkpoint.
            commit_ns: When it was committed.
            directory: In which its metrics are, by its record.
            digest: Of the record there.
        """
        self._places[path] = commit_ns, directory, digest
        place = commit_ns, directory, digest.nbytes, digest.crc64
        return Unread(functools.partial(self._read, path), place)

    def _read(self, path: str) -> Any:
        with self._lock:
            if path not in self._known:
                wanted = [other for other in self._places if other not in self._known]
                with self._context:
                    self._known |= self._metrics_of(wanted if self._has_been_asked else [path])
                    self._has_been_asked = True
                    if path not in self._known:
                        self._known[path] = self._looked_at_closely(path)
            return self._known[path]

    def _metrics_of(self, paths: Sequence[str]) -> dict[str, Any]:
        """Those of several; without those that take a closer look."""
        places = {}
        for path in paths:
            _, directory, digest = self._places[path]
            whole = os.path.join(path, directory)
            record = os.path.join(whole, native_names.CHECKPOINTABLE_RECORD)
            places[path] = record, os.path.join(whole, native_names.FILES, METRICS), digest
        wanted = [file for record, file, _ in places.values() for file in (record, file)]
        contents = _contents(self._root, [(file, _METRICS_LIMIT_BYTES) for file in wanted])
        metrics: dict[str, Any] = {}
        for path, (record, file, digest) in places.items():
            with contextlib.suppress(Corrupt, Unsupported, KeyError):
                digest.check(contents[record], record)
                own = CheckpointableRecord.decode(contents[record], record)
                own.files[METRICS].check(contents[file], file)
                metrics[path] = with_floats(parse_json(contents[file], file, allow_nan=True))
        return metrics

    def _looked_at_closely(self, path: str) -> Any:
        """Those of one; None where another checkpoint has its place, or none."""
        try:
            found = read(storage.as_path(path))
        except WaystationError as error:
            if is_damage(error, storage.as_path(path)):
                raise Corrupt(error.message, path=path) from error
            if isinstance(error, NotFound | InvalidInput) and "bucket" not in error.context:
                return None
            raise
        return found.metrics if found.commit_ns == self._places[path][0] else None


def _contents(root: storage.AnyPath, wanted: Sequence[tuple[str, int]]) -> dict[str, bytes]:
    """The contents of files with their limits, by their paths; without some of those that stand near one that
    is not there. Few threads wait, as each call of the engine has many requests in flight."""
    failures = 0

    def read(batch: Sequence[tuple[str, int]]) -> dict[str, bytes]:
        nonlocal failures
        paths, limits = [path for path, _ in batch], [limit for _, limit in batch]
        try:
            return dict(zip(paths, storage.read_files(paths, limit_bytes=limits), strict=True))
        except (Corrupt, NotFound) as error:
            if "bucket" in error.context:
                raise
        failures += 1
        middle = len(batch) // 2
        if middle < _LEAST_AT_A_TIME or failures > _MOST_FAILURES:
            return {}
        return read(batch[:middle]) | read(batch[middle:])

    size = max(_LEAST_AT_A_TIME, -(-len(wanted) // _READERS))
    batches = [wanted[begin : begin + size] for begin in range(0, len(wanted), size)]
    parts = storage.side_by_side(root, read, batches)
    return {path: content for part in parts for path, content in part.items()}


def check(path: storage.AnyPath) -> None:
    """Looks whether the records of the checkpoint at `path` are whole, those of its parts too.

    Raises:
        Corrupt: They are not.
        NotFound, InvalidInput: There is none.
        Unsupported: It is of a newer format version.
    """
    if not storage.is_file(os.path.join(path, native_names.RECORD)):
        read(path)
        return
    record = commit.read_record(os.fspath(path))
    # Of what has been removed as a whole the others do not depend; a load of it says that it has gone.
    present = [record.checkpointables[name] for name in record.present(os.fspath(path))]
    read_vouched(
        {
            native_names.checkpointable_record(os.path.join(path, directory)): digest
            for directory, digest in present or record.checkpointables.values()
        }
    )


def is_damage(error: WaystationError, path: storage.AnyPath) -> bool:
    """Whether an error says that the checkpoint at `path` is not whole, rather than that a call was wrong."""
    if isinstance(error, Corrupt):
        return True
    # A file that the checkpoint vouches for is not there; the checkpoint itself would have another path.
    where = str(error.context.get("path", ""))
    return isinstance(error, NotFound) and where.startswith(os.path.join(path, ""))
