"""The shards of a version, opened for a load: what they hold, and reading from the slots in place.

A `ShardSource` gives shards; that of this host gives slots as files, which the engine reads and verifies like
any other. Invariants: a slot is held from before its tables are read until nothing reads it any more; every
block is verified whatever the options say, since memory has no file system beneath that would; what cannot be
reached is Unavailable, never filled with anything else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from waystation import _native
from waystation._errors import Corrupt, NotFound, Unavailable
from waystation._options import Options
from waystation.layouts.native import memory, read_job
from waystation.layouts.native.boxes import MissingBox
from waystation.layouts.native.destinations import Destinations
from waystation.layouts.native.read import Allocate, OpenCheckpointable, Request
from waystation.layouts.native.read_job import ReadStatistics
from waystation.layouts.native.records import CheckpointableRecord
from waystation.layouts.native.tree_file import TreeFile
from waystation.memory import tables
from waystation.memory.shard import ARRAYS, FILES, RECORD, TREE
from waystation.memory.versions import Whole


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


@dataclass
class OpenVersion:
    """The shards of a version that this process can reach.

    Attributes:
        files: Where they are.
        entries: What is in each.
        are_all: Whether these are all that the version has.
    """

    files: list[tables.File]
    entries: list[list[tables.Entry]]
    are_all: bool
    _held: list[HeldShard]

    @classmethod
    def hold(cls, source: ShardSource, sequence: str, whole: Whole) -> OpenVersion:
        """Holds what is here of a version."""
        held: list[HeldShard] = []
        try:
            for shard in whole.shards(sequence):
                with contextlib.suppress(NotFound):
                    held.append(source.hold(whole.version.epoch, whole.version.step, shard))
            return cls(
                [one.file for one in held],
                [one.entries for one in held],
                len(held) == whole.shard_count,
                held,
            )
        except BaseException:
            _release(held)
            raise

    def release(self) -> None:
        """Lets the shards go; idempotent."""
        _release(self._held)

    def read_metadata(self, options: Options) -> tuple[bytes | None, dict[str, bytes]]:
        """What the shards that are here say of the version, and the structures of its states by name, which
        one shard has."""
        trees = {
            path.removesuffix(f"/{TREE}"): (file, path)
            for file, listed in enumerate(self.entries)
            for path, *_ in listed
            if path.endswith(f"/{TREE}") and path.count("/") == 1
        }
        wanted = [(file, RECORD) for file in range(len(self.files))][:1] + list(trees.values())
        contents = self._read(wanted, options)
        record = contents.pop(0) if self.files else None
        return record, dict(zip(trees, contents, strict=True))

    def read_files(self, name: str, options: Options) -> dict[str, bytes]:
        """The files that a handler made of a checkpointable, by their paths; of several that processes made
        under one path, that of the first."""
        prefix = f"{name}/{FILES}/"
        found: dict[str, int] = {}
        for file, listed in enumerate(self.entries):
            for path, *_ in listed:
                if path.startswith(prefix):
                    found.setdefault(path, file)
        contents = self._read([(file, path) for path, file in found.items()], options)
        return {path.removeprefix(prefix): content for path, content in zip(found, contents, strict=True)}

    def state(self, name: str, tree: bytes) -> OpenShards:
        """A state of the version, to be loaded.

        Raises:
            Corrupt: The shards do not make up its arrays.
        """
        decoded = TreeFile.decode(tree, f"{name}/{TREE}")
        made = tables.make(decoded, f"{name}/{ARRAYS}/", self.files, self.entries, are_all=self.are_all)
        record = CheckpointableRecord(len(self.files), {})
        opened = OpenShards(f"{name} in memory", record, decoded, made)
        opened.version = self
        return opened

    def _read(self, wanted: Sequence[tuple[int, str]], options: Options) -> list[bytes]:
        """Reads whole entries, each given by its file and path."""
        buffers: list[np.ndarray[Any, Any]] = []
        words: list[int] = []
        for file, path in wanted:
            offset, nbytes = self._place(file, path)
            buffers.append(np.empty(nbytes, np.uint8))
            if nbytes:
                words += [file, offset, nbytes, 0, buffers[-1].ctypes.data]
        if words:
            job = read_job.start(self.files, np.asarray(words, np.int64), (buffers, self), options)
            read_job.finish(job, ReadStatistics())
        return [buffer.tobytes() for buffer in buffers]

    def _place(self, file: int, path: str) -> tuple[int, int]:
        for listed, _, _, _, _, offset, nbytes in self.entries[file]:
            if listed == path:
                return offset, nbytes
        raise Corrupt(f"a slot of the memory tier lacks '{path}'", path=self.files[file][0])


class OpenShards(OpenCheckpointable):
    """A state whose arrays are in slots."""

    version: OpenVersion

    def paths(self, files: Sequence[int] | None = None) -> list[str]:
        """The slots."""
        own = self.version.files
        return [own[file][0] for file in (range(len(own)) if files is None else files)]

    def read_boxes(
        self,
        requests: Sequence[Request],
        options: Options,
        on_job: Callable[[_native.Job], None],
        statistics: ReadStatistics,
        allocate: Allocate = memory.allocate,
    ) -> list[list[np.ndarray[Any, Any]]]:
        """Reads every requested box into memory of its own."""
        self._has_no_headers(statistics)
        try:
            return super().read_boxes(requests, options, on_job, statistics, allocate)
        except MissingBox as error:
            raise _unreachable(error) from error

    def read_to_devices(
        self,
        requests: Sequence[Request],
        destinations: Destinations,
        options: Options,
        on_job: Callable[[_native.Job], None],
        statistics: ReadStatistics,
    ) -> None:
        """Reads every requested box to given memory."""
        self._has_no_headers(statistics)
        try:
            super().read_to_devices(requests, destinations, options, on_job, statistics)
        except MissingBox as error:
            raise _unreachable(error) from error

    def _has_no_headers(self, statistics: ReadStatistics) -> None:
        """Slots have no headers of safetensors that would have to be verified with the data."""
        statistics.headers.update(range(len(self.version.files)))


def _release(held: Sequence[HeldShard]) -> None:
    for one in held:
        one.release()


def _unreachable(error: MissingBox) -> Unavailable:
    return Unavailable(
        "a part of an array is in the memory of another host, which this one cannot reach; load it from the "
        "disk, or with the same processes on the same hosts as it was saved",
        **error.context,
    )
