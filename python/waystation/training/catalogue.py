"""Which steps have a checkpoint, as this process knows: committed, being saved, or found to be damaged.

`committed` never has a step whose commit is not there, nor one that is known to be damaged. In a program of
several processes the primary finds out what is there and tells the others, so that all have the same list,
though not all learn of a commit in the background at the same instant. Safe to use from several threads.

Each checkpoint has an age: those that were found in the directory are the older, the greater their step the
younger, and those of this program are as old as the calls that saved them. Policies see them by age, for a
program that goes back to an earlier step wants what it has saved since.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from waystation import _forks, storage
from waystation._errors import Corrupt, WaystationError
from waystation.layouts.native.records import Digest
from waystation.training import step_records
from waystation.training.step_metadata import CheckpointMetadata, Unread, changed, stored_metrics
from waystation.training.step_names import NameFormat, named_in

Info = CheckpointMetadata[None]

_LOOKS = 10


@dataclasses.dataclass(frozen=True, slots=True)
class _Aged:
    """A checkpoint, and its place among all of them."""

    age: int
    info: Info


class Catalogue:
    """The checkpoints of one directory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _forks.watch(self)
        self._ages = itertools.count()
        self._committed: dict[int, _Aged] = {}
        self._in_flight: dict[int, _Aged] = {}
        self._damaged: dict[int, Info] = {}
        self._own: set[int] = set()
        self._gone: set[int] = set()

    def begin_in_child(self) -> None:
        """See `waystation._forks.Watched`."""
        self._lock = threading.Lock()

    def committed(self) -> list[Info]:
        """The committed checkpoints, ascending."""
        with self._lock:
            return _ascending(aged.info for aged in self._committed.values())

    def committed_by_age(self) -> list[Info]:
        """The committed checkpoints, the youngest last."""
        with self._lock:
            return _by_age(self._committed.values())

    def known_by_age(self) -> list[Info]:
        """Those, and the ones that are being saved."""
        with self._lock:
            return _by_age((self._committed | self._in_flight).values())

    def damaged(self) -> list[Info]:
        """Those that are known to be damaged, ascending."""
        with self._lock:
            return _ascending(self._damaged.values())

    def find(self, step: int) -> Info | None:
        """The committed checkpoint of a step; or the damaged one."""
        with self._lock:
            aged = self._committed.get(step)
            return self._damaged.get(step) if aged is None else aged.info

    def is_known(self, step: int) -> bool:
        """Whether a step has a checkpoint, or is being saved."""
        with self._lock:
            return step in self._committed or step in self._in_flight

    def is_own(self, step: int) -> bool:
        """Whether this program has committed the checkpoint of a step itself."""
        with self._lock:
            return step in self._own

    def replace(self, listing: Listing) -> None:
        """Takes over what was found in the directory; what is being saved stays so."""
        with self._lock:
            self._committed = {info.step: self._youngest(info) for info in listing.committed}
            self._damaged = {info.step: info for info in listing.damaged}
            self._own &= self._committed.keys()

    def add(self, infos: Iterable[Info]) -> None:
        """Checkpoints were found that other programs have committed since; what is known already stays."""
        with self._lock:
            for info in infos:
                if info.step not in self._committed and info.step not in self._damaged:
                    self._committed[info.step] = self._youngest(info)

    def begin(self, info: Info) -> None:
        """A step is being saved."""
        with self._lock:
            self._in_flight[info.step] = self._youngest(info)

    def abandon(self, step: int) -> None:
        """It is not being saved any more, and was not committed."""
        with self._lock:
            self._in_flight.pop(step, None)

    def in_flight(self) -> set[int]:
        """The steps that are being saved."""
        with self._lock:
            return set(self._in_flight)

    def commit(self, info: Info) -> None:
        """A step has been committed by this program."""
        with self._lock:
            begun = self._in_flight.pop(info.step, None) or self._youngest(info)
            if info.step in self._gone:  # its removal came to be known before its commit
                self._gone.remove(info.step)
                return
            self._damaged.pop(info.step, None)
            self._committed[info.step] = _Aged(begun.age, info)
            self._own.add(info.step)

    def drop(self, steps: Iterable[int]) -> None:
        """Steps have no checkpoint any more."""
        with self._lock:
            for step in steps:
                if step not in self._committed and step in self._in_flight:
                    self._gone.add(step)
                self._committed.pop(step, None)
                self._damaged.pop(step, None)
                self._own.discard(step)

    def mark_damaged(self, step: int) -> None:
        """The checkpoint of a step is not whole."""
        with self._lock:
            aged = self._committed.pop(step, None)
            if aged is not None:
                self._damaged[step] = aged.info
                self._own.discard(step)

    def describe(self, infos: Iterable[Info]) -> None:
        """More is known of checkpoints than before."""
        with self._lock:
            for info in infos:
                if info.step in self._committed:
                    self._committed[info.step] = _Aged(self._committed[info.step].age, info)

    def _youngest(self, info: Info) -> _Aged:
        return _Aged(next(self._ages), info)


@dataclasses.dataclass(frozen=True, slots=True)
class Listing:
    """What was found in a directory.

    Attributes:
        committed: The checkpoints.
        damaged: Those of which not even their own record can be read.
    """

    committed: list[Info]
    damaged: list[Info]

    @classmethod
    def read(cls, root: str, name_format: NameFormat, *, with_records: bool) -> Listing:
        """Looks into a directory; of a step that has two directories the first counts.

        Beside a program that saves a step and removes the one before it, a single look may miss both. So
        where nothing is found, it is looked again, but in a store, whose listing shows one moment.
        """
        for _ in range(_LOOKS):
            named = list(named_in(root, name_format))
            read: dict[str, step_records.StepRecord] = {}
            if storage.is_in_store(root):
                paths = [os.fspath(path) for _, path in named]
                read = step_records.read_many(storage.as_path(root), paths)
            see = functools.partial(_seen, read=read, with_records=with_records)
            found: dict[int, tuple[Info, bool]] = {}
            for info, is_damaged in filter(None, storage.side_by_side(root, see, named)):
                found.setdefault(info.step, (info, is_damaged))
            if found or (storage.is_in_store(root) and not named):
                break
        infos = [found[step] for step in sorted(found)]
        return cls(
            [info for info, is_damaged in infos if not is_damaged],
            [info for info, is_damaged in infos if is_damaged],
        )

    def encode(self) -> bytes:
        """For the other processes."""
        found = [[to_json(info) for info in infos] for infos in (self.committed, self.damaged)]
        return json.dumps(found).encode()  # metrics may be NaN

    @classmethod
    def decode(cls, data: bytes) -> Listing:
        """What another process has found."""
        found = json.loads(data)
        late: dict[str, step_records.LateMetrics] = {}  # of each directory, which read them together
        committed, damaged = ([from_json(entry, late) for entry in entries] for entries in found)
        return cls(committed, damaged)


def _seen(
    found: tuple[int, storage.AnyPath], read: Mapping[str, step_records.StepRecord], *, with_records: bool
) -> tuple[Info, bool] | None:
    """The checkpoint of a step, and whether its record is damaged; None if it has none. Of some it was `read`
    by their paths what they say of themselves."""
    info: Info = CheckpointMetadata(*found, metadata=None)
    if (record := read.get(os.fspath(info.path))) is not None:
        return (_with(info, record) if with_records else info), False
    if not with_records:
        return (info, False) if step_records.is_committed(info.path) else None
    try:
        record = step_records.read_or_none(info.path)
    except WaystationError as error:
        if not step_records.is_committed(info.path):
            return None
        return info, step_records.is_damage(error, info.path)
    return None if record is None else (_with(info, record), False)


def described(info: Info) -> Info:
    """A checkpoint with what its record says.

    Raises:
        Corrupt: The record is damaged.
    """
    try:
        return _with(info, step_records.read(info.path))
    except WaystationError as error:
        if step_records.is_damage(error, info.path):
            raise Corrupt(error.message, path=os.fspath(info.path)) from error
        return info


def _with(info: Info, record: step_records.StepRecord) -> Info:
    return dataclasses.replace(
        info,
        init_timestamp_nsecs=record.init_ns,
        commit_timestamp_nsecs=record.commit_ns,
        custom_metadata=record.custom_metadata,
        metrics=record.metrics,
    )


def relocated(info: Info, root: str) -> Info:
    """The same checkpoint in this process's own storage."""
    return changed(info, path=storage.as_path(os.path.join(root, info.path.name)))


def to_json(info: Info) -> list[Any]:
    """A checkpoint for the other processes; metrics that were not asked for they read themselves."""
    metrics = stored_metrics(info)
    return [
        info.step,
        os.fspath(info.path),
        info.init_timestamp_nsecs,
        info.commit_timestamp_nsecs,
        info.custom_metadata,
        *([None, metrics.place] if isinstance(metrics, Unread) else [metrics, None]),
    ]


def from_json(entry: list[Any], late: dict[str, step_records.LateMetrics] | None = None) -> Info:
    """What another process knows of a checkpoint.

    Args:
        entry: What `to_json` has made.
        late: Those with whose metrics its own are read, if nobody has asked for them yet.
    """
    step, path, init_ns, commit_ns, custom_metadata, metrics, place = entry
    if place is not None:
        root = os.path.dirname(path)
        late = {} if late is None else late
        if root not in late:
            late[root] = step_records.LateMetrics(storage.as_path(root))
        own_ns, directory, nbytes, crc64 = place
        metrics = late[root].add(path, own_ns, directory, Digest(nbytes, crc64))
    return CheckpointMetadata(
        step,
        storage.as_path(path),
        metadata=None,
        init_timestamp_nsecs=init_ns,
        commit_timestamp_nsecs=commit_ns,
        custom_metadata=custom_metadata,
        metrics=metrics,
    )


def _by_age(known: Iterable[_Aged]) -> list[Info]:
    return [aged.info for aged in sorted(known, key=lambda aged: aged.age)]


def _ascending(infos: Iterable[Info]) -> list[Info]:
    return sorted(infos, key=lambda info: info.step)
