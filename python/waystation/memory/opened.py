"""The shards of a version, opened for a load: what they hold, and reading from the slots in place.

A `ShardSource` gives shards as files, which the engine reads and verifies like any other. Those that are here
are held for the whole load. What a process needs besides is brought from other hosts, shard by shard,
beginning with those where it is most likely: what is here is then read, and the slot let go again, so that
few free slots are enough for any number of shards. Invariants: a slot is held from before its tables are read
until nothing reads it any more; every block is verified whatever the options say, since memory has no file
system beneath that would; what cannot be reached is Unavailable, never filled with anything else; no element
is read twice.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from waystation import _native, grid
from waystation._errors import Corrupt, NotFound, Unavailable
from waystation._options import Options
from waystation.frameworks import dtypes
from waystation.layouts.native import read_job
from waystation.layouts.native.destinations import Destinations
from waystation.layouts.native.read import Box, OpenCheckpointable, Request
from waystation.layouts.native.read_job import ReadStatistics
from waystation.layouts.native.records import CheckpointableRecord
from waystation.layouts.native.tree_file import TreeFile
from waystation.memory import tables
from waystation.memory.shard import ARRAYS, RECORD, TREE
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
    """

    whole: Whole
    here: dict[int, HeldShard]
    _source: ShardSource
    _names: list[str]
    _likely: int  # the number of the shard that is likeliest to have what this process needs
    _entries: dict[int, list[tables.Entry]] = field(default_factory=dict)
    brought_s: float = 0.0

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
        return version

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

    def state(self, name: str, tree: bytes) -> OpenShards:
        """A state of the version, to be loaded.

        Raises:
            Corrupt: The shards that are here do not make up its arrays.
        """
        decoded = TreeFile.decode(tree, f"{name}/{TREE}")
        prefix = f"{name}/{ARRAYS}/"
        here = _Slots.of(name, decoded, prefix, list(self.here.values()), are_all=self.has_all)
        opened = OpenShards(here.directory, here.record, decoded, here.tables)
        opened.version, opened.here, opened.prefix, opened.name = self, here, prefix, name
        return opened


def is_structure(path: str) -> bool:
    """Whether an entry is the structure of a state."""
    return path.endswith(f"/{TREE}") and path.count("/") == 1


def _read(held: HeldShard, wanted: Sequence[tuple[str, int, int]], options: Options) -> dict[str, bytes]:
    """Reads parts of a slot, each given by its path, offset and length."""
    buffers = {path: np.empty(nbytes, np.uint8) for path, _, nbytes in wanted}
    words: list[int] = []
    for path, offset, nbytes in wanted:
        if nbytes:
            words += [0, offset, nbytes, 0, buffers[path].ctypes.data]
    if words:
        job = read_job.start([held.file], np.asarray(words, np.int64), (buffers, held), options)
        read_job.finish(job, ReadStatistics())
    return {path: buffer.tobytes() for path, buffer in buffers.items()}


class _Slots(OpenCheckpointable):
    """What some slots have of the arrays of a state."""

    files: list[tables.File]

    @classmethod
    def of(
        cls, name: str, tree: TreeFile, prefix: str, held: Sequence[HeldShard], *, are_all: bool
    ) -> _Slots:
        """What these have of it; `are_all`: nothing else has any."""
        files, entries = [one.file for one in held], [one.entries for one in held]
        made = tables.make(tree, prefix, files, entries, are_all=are_all)
        opened = cls(f"{name} in memory", CheckpointableRecord(len(files), {}), tree, made)
        opened.files = files
        return opened

    def paths(self, files: Sequence[int] | None = None) -> list[str]:
        """The slots."""
        return [self.files[file][0] for file in (range(len(self.files)) if files is None else files)]

    def fill(
        self,
        requests: Sequence[Request],
        destinations: Destinations,
        options: Options,
        on_job: Callable[[_native.Job], None],
        statistics: ReadStatistics,
        found: list[list[Box]] | None = None,
    ) -> None:
        """Reads what is here of the boxes."""
        # Slots have no headers of safetensors that would have to be verified with the data.
        statistics.headers = set(range(len(self.files)))
        super().fill(requests, destinations, options, on_job, statistics, found)


class OpenShards(OpenCheckpointable):
    """A state whose arrays are in slots, here and elsewhere."""

    version: OpenVersion
    here: _Slots
    prefix: str
    name: str

    def paths(self, files: Sequence[int] | None = None) -> list[str]:
        """The slots that are here."""
        return self.here.paths(files)

    def fill(
        self,
        requests: Sequence[Request],
        destinations: Destinations,
        options: Options,
        on_job: Callable[[_native.Job], None],
        statistics: ReadStatistics,
        found: list[list[Box]] | None = None,
    ) -> None:
        """Reads every requested box, from where its parts are.

        Raises:
            Unavailable: A part can be had from no host now.
        """
        if self.version.has_all:
            self.here.fill(requests, destinations, options, on_job, statistics, found)
            return
        boxes = _storage_boxes(self.tree, requests)
        found = [[] for _ in boxes] if found is None else found
        fill = functools.partial(
            _Slots.fill,
            requests=requests,
            destinations=destinations,
            options=options,
            on_job=on_job,
            statistics=statistics,
            found=found,
        )
        fill(self.here)
        if not _is_covered(boxes, found):
            self._fill_from_elsewhere(boxes, found, fill)
        statistics.bytes_needed += sum(
            grid.volume(box) * dtypes.of_stored(self.tree.arrays[array]).storage_item_bytes
            for array, box in boxes
        )

    def _fill_from_elsewhere(
        self,
        boxes: Sequence[tuple[int, Box]],
        found: Sequence[Sequence[Box]],
        fill: Callable[[_Slots], None],
    ) -> None:
        missing: dict[str, list[Box]] = {}
        for (array, box), parts in zip(boxes, found, strict=True):
            if sum(map(grid.volume, parts)) != grid.volume(box):
                missing.setdefault(self.prefix + self.tree.labels[array], []).append(box)
        for shard in self.version.elsewhere(missing):
            with contextlib.suppress(NotFound), self.version.held(shard) as held:
                fill(_Slots.of(self.name, self.tree, self.prefix, [held], are_all=False))
            if _is_covered(boxes, found):
                return
        raise Unavailable(
            "a part of an array is in the memory of no host that can be reached; load it from the disk",
            array=next(iter(missing)).removeprefix(self.prefix),
        )


def _storage_boxes(tree: TreeFile, requests: Sequence[Request]) -> list[tuple[int, Box]]:
    """The boxes that are requested, in terms of the storage of their arrays, which are given by number."""
    found: list[tuple[int, Box]] = []
    for request in requests:
        trailing = dtypes.of_stored(tree.arrays[request.array]).trailing
        zeros = (0,) * len(trailing)
        found += ((request.array, (offset + zeros, shape + trailing)) for offset, shape in request.boxes)
    return found


def _is_covered(boxes: Sequence[tuple[int, Box]], found: Sequence[Sequence[Box]]) -> bool:
    """Whether boxes have all their parts.

    Raises:
        Corrupt: Parts overlap, so that it cannot be said which counts.
    """
    for (_, box), parts in zip(boxes, found, strict=True):
        if sum(map(grid.volume, parts)) < grid.volume(box):
            return False
    for (array, box), parts in zip(boxes, found, strict=True):
        if len(parts) < 2:
            continue
        relative = [grid.relative_to(part, box[0]) for part in parts]
        if grid.find_cover_defect(box[1], relative) is not None:
            raise Corrupt(f"shards in memory overlap in array {array}")
    return True
