"""The shards of a version, opened for a load: what they hold, and reading from the slots in place.

A `ShardSource` gives shards as files, which the engine reads and verifies like any other. Those that are here
are held for the whole load. What a process needs besides is brought from other hosts, shard by shard,
beginning with those where it is most likely: what is here is then read, and the slot let go again, so that
few free slots are enough for any number of shards. Invariants: a slot is held from before its tables are read
until nothing reads it any more; every block is verified whatever the options say, since memory has no file
system beneath that would.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from waystation import _forks, _plans, grid
from waystation._errors import Corrupt, NotFound, Unavailable
from waystation._options import Options
from waystation.grid import Box
from waystation.layouts.native import read_job
from waystation.layouts.opened import ReadStatistics
from waystation.memory import tables
from waystation.memory.shard import RECORD, TREE
from waystation.memory.versions import Whole

# How long it is tried to bring a shard: slots that others read from are free again soon.
ROOM_S = 10.0
_ROOM_PAUSE_S = 0.05


class HeldShard(Protocol):
    """A shard that stays as it is until it is released."""

    @property
    def file(self) -> tables.File:
        """Where it is: path, length and checksums, for `_native.start_read`."""
        ...

    @property
    def entries(self) -> list[tables.Entry]:
        """What is in it."""
        ...

    def release(self) -> None:
        """Lets it go."""
        ...


class ShardSource(Protocol):
    """Where shards come from: the agent of this host."""

    def hold(self, epoch: int, step: int, shard: str, /) -> HeldShard:
        """Keeps a shard from being overwritten.

        Raises:
            NotFound: It is not here.
            Corrupt: Its tables are damaged.
        """
        ...

    def bring(self, epoch: int, step: int, shard: str, /) -> HeldShard:
        """The same, of one that may be on another host.

        Raises:
            NotFound: No host has it.
            Unavailable: There is no free slot for it, or it has not arrived in time.
            Corrupt: Its tables are damaged.
        """
        ...


@dataclass
class OpenVersion:
    """The shards of a version.

    Attributes:
        whole: The version.
        here: Those that were here when the load began, by their numbers; held.
        brought_s: For how long it was waited for others to come here.
        disk_bytes: What was read from the disk, since it is in the memory of no host.
    """

    whole: Whole
    here: dict[int, HeldShard]
    _source: ShardSource
    _names: list[str]
    _likely: int  # the number of the shard that is likeliest to have what this process needs
    _entries: dict[int, list[tables.Entry]] = field(default_factory=dict)
    brought_s: float = 0.0
    disk_bytes: int = 0

    @classmethod
    def hold(
        cls, source: ShardSource, sequence: str, whole: Whole, process: int, process_count: int
    ) -> OpenVersion:
        """Holds what is here of a version.

        Args:
            source: Where shards come from.
            sequence: The sequence that the version is of.
            whole: The version.
            process: This process.
            process_count: How many load it.
        """
        likely = process * whole.shard_count // process_count
        version = cls(whole, {}, source, whole.shards(sequence), likely)
        try:
            for shard, name in enumerate(version._names):
                with contextlib.suppress(NotFound):
                    held = source.hold(whole.version.epoch, whole.version.step, name)
                    version.here[shard] = held
                    version._entries[shard] = held.entries
        except BaseException:
            version.release()
            raise
        _forks.watch(version)
        return version

    def begin_in_child(self) -> None:
        """See `waystation._forks.Watched`: a child that lives on keeps no slot from being used again."""
        self.release()

    @property
    def has_all(self) -> bool:
        """Whether all shards are here."""
        return len(self.here) == self.whole.shard_count

    def release(self) -> None:
        """Lets the shards go; idempotent."""
        for held in self.here.values():
            held.release()

    @contextlib.contextmanager
    def held(self, shard: int) -> Iterator[HeldShard]:
        """A shard, brought here if need be, for as long as the block goes on.

        Raises:
            NotFound: No host has it.
            Unavailable: It cannot be brought now.
        """
        if shard in self.here:
            yield self.here[shard]
            return
        held = self._bring(shard)
        try:
            self._entries.setdefault(shard, held.entries)
            yield held
        finally:
            held.release()

    def _bring(self, shard: int) -> HeldShard:
        begun = time.monotonic()
        try:
            return self._brought(shard, begun + ROOM_S)
        finally:
            self.brought_s += time.monotonic() - begun

    def _brought(self, shard: int, until: float) -> HeldShard:
        version = self.whole.version
        while True:
            try:
                return self._source.bring(version.epoch, version.step, self._names[shard])
            except Unavailable:
                if time.monotonic() >= until:
                    raise
                time.sleep(_ROOM_PAUSE_S)

    def elsewhere(self, boxes: Mapping[str, Sequence[Box]]) -> Iterator[int]:
        """The shards that are not here, the likeliest to have any of these boxes first; those whose contents
        are known not to are left out.

        Args:
            boxes: Of each array, by its path.
        """
        count = self.whole.shard_count
        for shard in sorted(range(count), key=lambda shard: abs(shard - self._likely)):
            if shard not in self.here and self._may_have(shard, boxes):
                yield shard

    def _may_have(self, shard: int, boxes: Mapping[str, Sequence[Box]]) -> bool:
        entries = self._entries.get(shard)
        return entries is None or any(
            grid.intersect((entry[3], entry[4]), box) is not None
            for entry in entries
            for box in boxes.get(entry[0], ())
        )

    def read_record(self, options: Options, *, brings: bool) -> bytes | None:
        """What any shard says of the version, as all of them do; None if none is here.

        Args:
            options: Of the load.
            brings: Whether one is brought if none is here.
        """
        for shard in list(self.here)[:1] or [self._likely] * brings:
            with contextlib.suppress(NotFound):
                found = self.read_entries([shard], lambda path: path == RECORD, options)
                if RECORD not in found:
                    raise Corrupt(f"a slot of the memory tier lacks '{RECORD}'", shard=self._names[shard])
                return found[RECORD]
        return None

    def shard_with_structures(self) -> int | None:
        """The shard that has the structures of states, if it is known which that is."""
        for shard, entries in self._entries.items():
            if any(is_structure(path) for path, *_ in entries):
                return shard
        return None

    def read_entries(
        self, shards: Sequence[int], is_wanted: Callable[[str], bool], options: Options
    ) -> dict[str, bytes]:
        """Whole entries of some shards by their paths; of several under one path, that of the first."""
        found: dict[str, bytes] = {}
        for shard in shards:
            with self.held(shard) as held:
                wanted = [
                    (path, offset, nbytes)
                    for path, _, _, _, _, offset, nbytes in held.entries
                    if is_wanted(path) and path not in found
                ]
                found |= _read(held, wanted, options)
        return found


def is_structure(path: str) -> bool:
    """Whether an entry is the structure of a state."""
    return path.endswith(f"/{TREE}") and path.count("/") == 1


def _read(held: HeldShard, wanted: Sequence[tuple[str, int, int]], options: Options) -> dict[str, bytes]:
    """Reads parts of a slot, each given by its path, offset and length."""
    buffers = {path: np.empty(nbytes, np.uint8) for path, _, nbytes in wanted}
    extents = [(offset, nbytes, buffers[path].ctypes.data) for path, offset, nbytes in wanted if nbytes]
    if extents:
        offsets, lengths, addresses = np.array(extents, np.int64).T
        reads = _plans.byte_reads(np.zeros_like(offsets), offsets, lengths, addresses)
        # A slot goes on after its data.
        job = read_job.start([held.file], reads, (buffers, held), options, may_be_longer=True)
        read_job.finish(job, ReadStatistics())
    return {path: buffer.tobytes() for path, buffer in buffers.items()}
