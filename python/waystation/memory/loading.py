"""One load from memory, step by step, as every process of the program takes it.

The steps are those of `checkpoint/loading.py`; here is where metadata and bytes come from. Whoever reaches
the shard that has the structures reads them for all; each process then reads what it needs from the slots
that it reaches. What can go wrong, in order: a shard has gone meanwhile; its tables, or the metadata, are
damaged; shards do not make up the arrays; blocks do not match their checksums. Whatever happens to one
process, all of them raise.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence

from waystation._errors import NotFound, from_os_error
from waystation._options import Options
from waystation.checkpoint import opening
from waystation.checkpoint.handlers.choice import STATE_HANDLER
from waystation.checkpoint.loading import Loading
from waystation.checkpoint.stored import OpenCheckpoint, Stored
from waystation.layouts.native.strings import join_strings, split_strings
from waystation.memory.opened import OpenVersion, ShardSource
from waystation.memory.shard import ShardRecord
from waystation.memory.versions import Whole


class VersionLoading(Loading):
    """A load of one version that all processes of the program make together.

    Args:
        source: Where this process finds shards.
        sequence: The sequence that the version is of.
        whole: The version.
        names: The checkpointables that are wanted; None for all that the user has named.
        options: Of the load.
    """

    def __init__(
        self, source: ShardSource, sequence: str, whole: Whole, names: Sequence[str] | None, options: Options
    ) -> None:
        version = whole.version
        super().__init__(
            f"step {version.step} in memory (epoch {version.epoch})", names, loading_options(options)
        )
        self._source = source
        self._sequence = sequence
        self._whole = whole
        self._version: OpenVersion | None = None
        self._files_directory: str | None = None

    def close(self) -> None:
        """Ends the load; idempotent."""
        super().close()
        if self._version is not None:
            self._version.release()
        if self._files_directory is not None:
            shutil.rmtree(self._files_directory, ignore_errors=True)

    def _open(self) -> OpenCheckpoint:
        told = self._session.round(self._hold, self._choose_metadata)
        record_bytes, *rest = split_strings(told)
        record = ShardRecord.decode(record_bytes, self.target)
        trees = {name.decode(): tree for name, tree in zip(rest[::2], rest[1::2], strict=True)}
        names = tuple(sorted(record.handlers))
        wanted = opening.choose(names, self._names, self.target, lambda name: record.handlers[name] is None)
        stored = {name: self._stored(name, record, trees) for name in wanted}
        return OpenCheckpoint(self.target, names, stored, record.custom_metadata, begun_ns=record.begun_ns)

    def _hold(self) -> bytes:
        """Holds what is here; returns the metadata, if this process reaches them."""
        self._version = OpenVersion.hold(self._source, self._sequence, self._whole)
        record, trees = self._version.read_metadata(self._options)
        if record is None:
            return b""
        said = ShardRecord.decode(record, self.target)
        if {name for name, handler in said.handlers.items() if handler is None} != trees.keys():
            return b""  # they are in the shard of the primary, on another host
        return join_strings([record, *(part for name in trees for part in (name.encode(), trees[name]))])

    def _choose_metadata(self, parts: Sequence[bytes]) -> bytes:
        found = next((part for part in parts if part), None)
        if found is None:
            raise NotFound(f"no process reaches the structure of {self.target}; its shard has gone")
        return found

    def _stored(self, name: str, record: ShardRecord, trees: dict[str, bytes]) -> Stored:
        assert self._version is not None, "the shards are held"
        if name in trees:
            return Stored(name, STATE_HANDLER, self.target, self._version.state(name, trees[name]))
        files = self._version.read_files(name, self._options)
        return Stored(name, record.handlers[name], self._written(name, files), None)

    def _written(self, name: str, files: dict[str, bytes]) -> str:
        """Puts the files of a handler where it can read them; they were verified when they were read."""
        if self._files_directory is None:
            self._files_directory = tempfile.mkdtemp(prefix="waystation-memory-")
        directory = os.path.join(self._files_directory, name)
        try:
            os.mkdir(directory)
            for path, content in files.items():
                target = os.path.join(directory, *path.split("/"))
                os.makedirs(os.path.dirname(target), exist_ok=True)
                with open(target, "wb") as file:
                    file.write(content)
        except OSError as error:
            raise from_os_error(error, "write", directory) from error
        return directory


def loading_options(options: Options) -> Options:
    """The options with which memory is read: all of it is verified, nothing is mapped, and nothing sent that
    each process can read at the speed of memory."""
    own = options.thawed()
    own.array.loading.verify, own.array.loading.mmap = True, False
    own.array.loading.load_and_broadcast = False
    own.multiprocessing.primary_host = primary_of(options)
    return own.frozen()


def primary_of(options: Options) -> int:
    """The process that decides; where each has a storage of its own, the first that takes part."""
    primary, active = options.multiprocessing.primary_host, options.multiprocessing.active_processes
    if primary is not None:
        return primary
    return min(active) if active else 0
