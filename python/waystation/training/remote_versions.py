"""Which versions of steps a remote has, and which of them are outdated.

A step may be saved again while an earlier version of it is in the remote, which is never loaded in the place
of the later one. So this knows of each step when the version was committed that the program has saved last,
or that the directory has. The record of uploads tells what in the remote is of this sequence, and in which
order it was saved: neither uploads nor clocks tell that. Nothing here changes what is there. Safe to use from
several threads.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable

from waystation import _forks, storage
from waystation._errors import Corrupt, InvalidInput, NotFound, Unsupported, WaystationError
from waystation.layouts.native import names, records
from waystation.layouts.orbax.names import CHECKPOINT_METADATA, COMMIT_SUCCESS
from waystation.training import step_records
from waystation.training.catalogue import Info, Listing, described
from waystation.training.place import Place
from waystation.training.upload_record import UploadRecord


def committed_at(info: Info) -> int:
    """When a checkpoint was committed; 0 where that is not known."""
    return info.commit_timestamp_nsecs or 0


class RemoteVersions:
    """The versions of steps in one remote.

    Args:
        local: The directory that steps are uploaded from.
        place: Where they go.
        record: Of what was uploaded there.
    """

    def __init__(self, local: Place, place: Place, record: UploadRecord) -> None:
        self._local = local
        self._place = place
        self._record = record
        self._lock = threading.Lock()
        _forks.watch(self)
        # The steps that this program has saved, with what grows from save to save.
        self._saved: dict[int, int] = {}
        # When the version of a step was committed that this program has saved, or the directory has.
        self._newest: dict[int, int] = {}

    def begin_in_child(self) -> None:
        """See `waystation._forks.Watched`."""
        self._lock = threading.Lock()

    # ---- what is known ---------------------------------------------------------------------------

    def saved(self, step: int, number: int, time: int | None) -> None:
        """This program has saved a step, as the save of that number, and when, if that is known."""
        with self._lock:
            self._saved[step] = number
            if time is not None:
                self._newest[step] = time

    def told(self, info: Info) -> None:
        """A step is committed in the directory; called in the other processes. What the remote has of it is
        an earlier version, which they list no more, as the primary does not."""
        with self._lock:
            if (time := info.commit_timestamp_nsecs) is not None:
                self._newest[info.step] = time

    def forget(self, step: int) -> None:
        """What is there of a step was removed."""
        with self._lock:
            self._newest.pop(step, None)

    def take_over(self, listing: Listing) -> None:
        """Knows what the primary knows, which has left out earlier versions."""
        with self._lock:
            self._newest.clear()
        self._place.catalogue.replace(listing)

    def note_listed(self, listed: Iterable[Info], *, was_listed: bool) -> None:
        """Notes which versions the directory has of the steps that were listed there. A version there that
        has come since it was listed before was uploaded by another program of this sequence, and counts."""
        noted = {} if was_listed else self._record.noted_versions()
        for info in listed:
            local, known = self._local.catalogue.find(info.step), self._place.catalogue.find(info.step)
            time = None if local is None else self.time_here(local)
            is_new = known is None or committed_at(known) != committed_at(info)
            with self._lock:
                if time is not None:
                    self._newest[info.step] = time
                elif info.path.name in noted and local is None:
                    self._newest.setdefault(info.step, noted[info.path.name])
                elif local is None and was_listed and is_new:
                    self._newest.pop(info.step, None)

    # ---- which count -----------------------------------------------------------------------------

    def that_counts(self, listing: Listing) -> Listing:
        """What this sequence has uploaded, and what is the same as in the directory. All else would be taken
        for steps of this sequence. Where the directory is empty, and nobody has uploaded yet, it is what the
        program is to go on with."""
        if not self._record.is_there and not self._local.catalogue.committed():
            return listing
        ours = {info.step for info in self.ours(listing.committed)}
        return Listing(
            [info for info in listing.committed if info.step in ours or self._is_here(info)],
            [info for info in listing.damaged if self._record.has(info.path.name)],
        )

    def _is_here(self, info: Info) -> bool:
        """Whether the directory has the same checkpoint."""
        local = self._local.catalogue.find(info.step)
        if local is None or local.path.name != info.path.name:
            return False
        return self.time_here(local) == info.commit_timestamp_nsecs

    def is_outdated(self, info: Info) -> bool:
        """Whether a checkpoint there is another version of a step than the one that this program has saved,
        or the directory has. It is never loaded in the place of that, be that damaged or collected."""
        time = committed_at(info)
        return time != 0 and self._newest.get(info.step, time) != time

    def current(self) -> list[Info]:
        """The checkpoints that can be loaded from there, ascending, as far as this process knows."""
        return [info for info in self._place.catalogue.committed() if not self.is_outdated(info)]

    def time_here(self, local: Info) -> int | None:
        """When a checkpoint of the directory was committed; None where it does not say."""
        if local.commit_timestamp_nsecs is None:
            with contextlib.suppress(Corrupt):
                local = described(local)
        return local.commit_timestamp_nsecs

    def ours(self, infos: Iterable[Info]) -> list[Info]:
        """Those of the checkpoints there that this sequence has uploaded, in the order in which they were
        saved: they are not uploaded in that order."""
        found = [
            info
            for info in infos
            if (time := info.commit_timestamp_nsecs) is not None and self._record.has(info.path.name, time)
        ]
        return sorted(found, key=self.age)

    def current_of_ours(self, infos: Iterable[Info]) -> list[Info]:
        """The same without those that a newer version has replaced, which take no other's place."""
        return [info for info in self.ours(infos) if not self.is_outdated(info)]

    def age(self, info: Info) -> tuple[int, int, int]:
        """By what checkpoints are sorted by age. What this program has saved itself is younger than all else,
        whatever the clock says: it may have been put back. Of all else the record has the order."""
        saved = self._saved.get(info.step)
        return (3, saved, 0) if saved is not None else (*self._record.age(info.step, committed_at(info)), 0)

    def order(self) -> list[tuple[int, int]]:
        """The steps that are known, with their times of commit, the youngest last."""
        here = self._local.catalogue.committed()
        for info in here:
            if info.commit_timestamp_nsecs is None:
                with contextlib.suppress(WaystationError):  # it is damaged, or has gone
                    self._local.catalogue.describe([described(info)])
        known = [*self.ours(self._place.catalogue.committed()), *self._local.catalogue.committed()]
        steps = {(info.step, committed_at(info)): self.age(info) for info in known if committed_at(info)}
        return sorted(steps, key=lambda entry: steps[entry])

    def is_begun(self, name: str, committed_ns: int) -> bool:
        """Whether the record has a step, but not this version, which is that of the directory: a program was
        killed right after it had copied what was saved again meanwhile."""
        return self._record.has(name) and not self._record.has(name, committed_ns)

    def version_of_ours(self, target: str) -> storage.Identity | None:
        """The version of the checkpoint at a path there, if this sequence has uploaded it."""
        name, path = os.path.basename(target), os.path.join(target, names.RECORD)
        try:
            content, version = storage.read_version(path, limit_bytes=records.RECORD_LIMIT_BYTES)
        except NotFound:
            return self._version_of_orbax(target)
        try:
            created_ns = records.CheckpointRecord.decode(content, path).created_ns
        except Corrupt:
            return version if self._record.has(name) else None
        except Unsupported:  # of a newer version
            return None
        return version if self._record.has(name, created_ns) else None

    def _version_of_orbax(self, target: str) -> storage.Identity | None:
        """The same of one in a layout of Orbax: the version of the file that commits it, or on a disk of the
        one that says when it was committed."""
        name = os.path.basename(target)
        file = COMMIT_SUCCESS if storage.is_in_store(target) else CHECKPOINT_METADATA
        found = storage.status(os.path.join(target, file))
        if found is None:
            return None
        try:
            committed_ns = step_records.committed_ns(target)
            is_ours = committed_ns is not None and self._record.has(name, committed_ns)
        except Corrupt:
            is_ours = self._record.has(name)
        except (InvalidInput, NotFound, Unsupported):
            return None
        return found.identity if is_ours else None
