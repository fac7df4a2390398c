"""The states of an open version: their arrays, read from the slots in place.

What is here is read first, then what other hosts have; what no host has any more comes last, from what the
same call has saved to the disk. Invariants: no element is read twice; what cannot be reached is Unavailable,
never filled with anything else; of the disk only those arrays are taken that are there as they are in memory.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

from waystation import _native, grid
from waystation._errors import Corrupt, NotFound, Unavailable
from waystation._options import Options
from waystation.frameworks import dtypes
from waystation.grid import Box
from waystation.layouts.native.read import OpenCheckpointable
from waystation.layouts.native.records import CheckpointableRecord
from waystation.layouts.opened import Destinations, ReadStatistics, Request, StoredTree
from waystation.memory import tables
from waystation.memory.opened import HeldShard, OpenVersion
from waystation.memory.shard import ARRAYS


def open_state(
    version: OpenVersion, name: str, tree: StoredTree, on_disk: OpenCheckpointable | None
) -> OpenShards:
    """A state of a version, to be loaded.

    Args:
        version: The version.
        name: The name of the state.
        tree: Its structure.
        on_disk: The same on the disk, if it is there.

    Raises:
        Corrupt: The shards that are here do not make up its arrays.
    """
    prefix = f"{name}/{ARRAYS}/"
    here = _Slots.of(name, tree, prefix, list(version.here.values()), are_all=version.has_all)
    opened = OpenShards(here.directory, here.record, tree, here.tables)
    opened.version, opened.here, opened.prefix, opened.name = version, here, prefix, name
    opened.on_disk = on_disk
    return opened


class _Slots(OpenCheckpointable):
    """What some slots have of the arrays of a state."""

    files: list[tables.File]

    @classmethod
    def of(
        cls, name: str, tree: StoredTree, prefix: str, held: Sequence[HeldShard], *, are_all: bool
    ) -> _Slots:
        """What these have of it; `are_all`: nothing else has any."""
        files, entries = [one.file for one in held], [one.entries for one in held]
        made = tables.make(tree, prefix, files, entries, are_all=are_all)
        # A slot goes on after its data.
        opened = cls(
            f"{name} in memory", CheckpointableRecord(len(files), {}), tree, made, may_be_longer=True
        )
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
    """A state whose arrays are in slots, here and elsewhere, and on the disk."""

    version: OpenVersion
    here: _Slots
    prefix: str
    name: str
    on_disk: OpenCheckpointable | None

    @property
    def read_over(self) -> None:
        """Nothing: what is made before it is known where all parts are would have to wait for them."""
        return None

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
        if not _is_covered(boxes, found) and not self._fill_from_elsewhere(boxes, found, fill):
            self._fill_from_disk(boxes, found, requests, destinations, options, on_job, statistics)
        statistics.bytes_needed += sum(
            grid.volume(box) * dtypes.of_stored(self.tree.arrays[array]).storage_item_bytes
            for array, box in boxes
        )

    def _fill_from_elsewhere(
        self,
        boxes: Sequence[tuple[int, Box]],
        found: Sequence[Sequence[Box]],
        fill: Callable[[_Slots], None],
    ) -> bool:
        """Reads what other hosts have; returns whether that was all that was missing."""
        passes = (NotFound,) if self.on_disk is None else (NotFound, Unavailable)
        missing: dict[str, list[Box]] = {}
        for (array, box), parts in zip(boxes, found, strict=True):
            if sum(map(grid.volume, parts)) != grid.volume(box):
                missing.setdefault(self.prefix + self.tree.labels[array], []).append(box)
        for shard in self.version.elsewhere(missing):
            with contextlib.suppress(*passes), self.version.held(shard) as held:
                fill(_Slots.of(self.name, self.tree, self.prefix, [held], are_all=False))
            if _is_covered(boxes, found):
                return True
        return False

    def _fill_from_disk(
        self,
        boxes: Sequence[tuple[int, Box]],
        found: Sequence[Sequence[Box]],
        requests: Sequence[Request],
        destinations: Destinations,
        options: Options,
        on_job: Callable[[_native.Job], None],
        statistics: ReadStatistics,
    ) -> None:
        """Reads what is still missing from what the same call has saved to the disk."""
        missing = [grid.subtract(box, parts) for (_, box), parts in zip(boxes, found, strict=True)]
        lacking = sorted({array for (array, _), parts in zip(boxes, missing, strict=True) if parts})
        if self.on_disk is None or not all(self._is_on_disk(array) for array in lacking):
            raise Unavailable(
                "a part of an array is in the memory of no host that can be reached; load it from the disk",
                array=self.tree.labels[lacking[0]],
            )
        # The blocks of its own headers are verified with the data, whatever slots have been read before.
        own, parts = ReadStatistics(), iter(missing)
        wanted = [replace(request, missing=[next(parts) for _ in request.boxes]) for request in requests]
        self.on_disk.fill(wanted, destinations, options, on_job, own)
        statistics.bytes_read += own.bytes_read
        statistics.cached_bytes += own.cached_bytes
        statistics.repeated_requests += own.repeated_requests
        self.version.disk_bytes += own.bytes_read

    def _is_on_disk(self, array: int) -> bool:
        """Whether the disk has an array as it is in memory, and not in another form."""
        assert self.on_disk is not None, "the disk has the checkpoint"
        saved, in_memory = self.on_disk.tree, self.tree
        return (
            array < len(saved.arrays)
            and saved.labels[array] == in_memory.labels[array]
            and saved.arrays[array] == in_memory.arrays[array]
        )


def _storage_boxes(tree: StoredTree, requests: Sequence[Request]) -> list[tuple[int, Box]]:
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
