"""One load from memory, step by step, as every process of the program takes it.

The steps are those of `checkpoint/loading.py`; here is where metadata and bytes come from. Each process holds
what is in the memory of its host; where that is not all, processes share out who reads the structures, and
the files of handlers, for all; each then reads what it needs of the arrays. What can go wrong, in order: a
shard has gone meanwhile (it is read from the disk, if that has what the same call has saved); its tables, or
the metadata, are damaged; shards do not make up the arrays; blocks do not match their checksums. Whatever
happens to one process, all of them raise.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias

from waystation import _native, storage
from waystation._errors import NotFound, Unavailable, WaystationError
from waystation._options import Options
from waystation.checkpoint import opening
from waystation.checkpoint.handlers.choice import STATE_HANDLER
from waystation.checkpoint.loading import Loading
from waystation.checkpoint.stored import OpenCheckpoint, Stored
from waystation.layouts.native import tree_file
from waystation.layouts.native.read import OpenCheckpointable
from waystation.layouts.native.records import join_strings, split_strings
from waystation.memory.opened import OpenVersion, ShardSource
from waystation.memory.opened_states import open_state
from waystation.memory.shard import FILES, TREE, ShardRecord
from waystation.memory.versions import Whole

# Holds the checkpoint of a step so that nobody removes it, and gives its path. NotFound if there is none.
HoldDisk: TypeAlias = Callable[[], AbstractContextManager[storage.AnyPath]]


class VersionLoading(Loading):
    """A load of one version that all processes of the program make together.

    Args:
        source: Where this process finds shards.
        sequence: The sequence that the version is of.
        whole: The version.
        names: The checkpointables that are wanted; None for all that the user has named.
        options: Of the load.
        disk: Holds the checkpoint of the step on the disk, if there is one; called by all processes.
    """

    def __init__(
        self,
        source: ShardSource,
        sequence: str,
        whole: Whole,
        names: Sequence[str] | None,
        options: Options,
        disk: HoldDisk | None = None,
    ) -> None:
        version = whole.version
        super().__init__(
            f"step {version.step} in memory (epoch {version.epoch})", names, loading_options(options)
        )
        self._source = source
        self._sequence = sequence
        self._whole = whole
        self._version: OpenVersion | None = None
        self._disk = disk
        self._on_disk: OpenCheckpoint | None = None
        self._until_closed = contextlib.ExitStack()

    @property
    def disk_bytes(self) -> int:
        """How many bytes this process has read from the disk."""
        return 0 if self._version is None else self._version.disk_bytes

    @property
    def brought_s(self) -> float:
        """For how long it was waited for shards of other hosts."""
        return 0.0 if self._version is None else self._version.brought_s

    def close(self) -> None:
        """Ends the load; idempotent."""
        super().close()
        if self._version is not None:
            self._version.release()
        self._until_closed.close()

    def _open(self) -> Callable[[], OpenCheckpoint]:
        record_bytes, is_scattered, shares = split_strings(self._session.round(self._hold, self._share_out))
        record = ShardRecord.decode(record_bytes, self.target)
        names = tuple(sorted(record.handlers))
        wanted = opening.choose(names, self._names, self.target, lambda name: record.handlers[name] is None)
        if is_scattered:
            self._open_on_disk(wanted, record)
        entries = self._read_entries(_is_of(wanted), json.loads(shares))
        stored = {name: self._stored(name, record, entries) for name in wanted}
        opened = OpenCheckpoint(self.target, names, stored, record.custom_metadata, begun_ns=record.begun_ns)
        return lambda: opened

    def _hold(self) -> bytes:
        """Holds what is here; returns which shards these are, which of them has the structures, and what they
        say of the version."""
        process, count = self._session.process_index, self._session.process_count
        self._version = OpenVersion.hold(self._source, self._sequence, self._whole, process, count)
        record = self._version.read_record(self._options, brings=self._session.is_primary) or b""
        told = json.dumps([sorted(self._version.here), self._version.shard_with_structures()]).encode()
        return join_strings([told, record])

    def _share_out(self, parts: Sequence[bytes]) -> bytes:
        """Decides which process reads which shards for all; none if each reaches all."""
        told = [split_strings(part) for part in parts]
        record = next((record for _, record in told if record), None)
        if record is None:
            raise NotFound(f"no process reaches any part of {self.target}; its shards have gone")
        reached = [set(json.loads(said)[0]) for said, _ in told]
        structures = [found for said, _ in told if (found := json.loads(said)[1]) is not None]
        every = set(range(self._whole.shard_count))
        if all(shards == every for shards in reached):
            return join_strings([record, b"", b"null"])
        # What no process reaches may be on hosts without any, or nowhere.
        is_scattered = b"" if set().union(*reached) == every else b"yes"
        has_handlers = any(ShardRecord.decode(record, self.target).handlers.values())
        # Handlers may have made files in every process.
        needed = sorted(every) if has_handlers or not structures else structures[:1]
        shares: list[list[int]] = [[] for _ in parts]
        for shard in needed:
            holders = [process for process, shards in enumerate(reached) if shard in shards]
            shares[holders[shard % len(holders)] if holders else shard % len(parts)].append(shard)
        return join_strings([record, is_scattered, json.dumps(shares).encode()])

    def _open_on_disk(self, wanted: Sequence[str], record: ShardRecord) -> None:
        """Opens what the same call has saved to the disk, in all processes or none."""
        if self._disk is None:
            return
        opened: list[OpenCheckpoint] = []

        def work() -> bytes:
            with contextlib.suppress(WaystationError):  # it is damaged, say: memory may do without it
                opened.append(opening.open_checkpoint(os.fspath(path), wanted, self._options))
            return b"yes" if opened and opened[0].begun_ns == record.begun_ns else b""

        try:
            path = self._until_closed.enter_context(self._disk())
        except NotFound:
            return  # it was removed meanwhile, as all have heard
        if self._session.round(work, lambda parts: b"yes" if all(parts) else b""):
            self._on_disk = opened[0]

    def _read_entries(
        self, is_wanted: Callable[[str], bool], shares: list[list[int]] | None
    ) -> dict[str, bytes]:
        """The entries that are wanted, by their paths, of all shards. Where the disk has the step, shards may
        be missing: then there is an entry without a path."""
        version = self._version
        assert version is not None, "the shards are held"
        if shares is None:
            return version.read_entries(range(self._whole.shard_count), is_wanted, self._options)
        own = shares[self._session.process_index]

        def read() -> bytes:
            strings: list[bytes] = []
            for shard in own:
                try:
                    found = version.read_entries([shard], is_wanted, self._options)
                except (NotFound, Unavailable):
                    if self._on_disk is None:
                        raise
                    found = {"": b""}
                for path, content in found.items():
                    strings += str(shard).encode(), path.encode(), content
            return join_strings(strings)

        told = [split_strings(part) for part in split_strings(self._session.round(read, join_strings))]
        found = [entry for strings in told for entry in zip(*[iter(strings)] * 3, strict=True)]
        entries: dict[str, bytes] = {}
        for _, path, content in sorted(found, key=lambda entry: int(entry[0])):
            entries.setdefault(path.decode(), content)
        return entries

    def _stored(self, name: str, record: ShardRecord, entries: dict[str, bytes]) -> Stored:
        assert self._version is not None, "the shards are held"
        handler = record.handlers[name]
        saved = None if self._on_disk is None else self._on_disk.stored[name]
        if handler is None:
            state = saved.state if saved is not None else None
            on_disk = state if isinstance(state, OpenCheckpointable) else None
            if (encoded := entries.get(f"{name}/{TREE}")) is not None:
                tree = tree_file.decode(encoded, f"{name}/{TREE}")
            elif on_disk is not None:
                tree = on_disk.tree
            else:
                raise NotFound(f"the structure of '{name}' in {self.target} has gone with its shard")
            return Stored(name, STATE_HANDLER, self.target, open_state(self._version, name, tree, on_disk))
        if "" in entries:  # files of it may have been in a shard that is missing
            assert saved is not None, "shards may be missing only then"
            return saved
        prefix = f"{name}/{FILES}/"
        files = {
            path.removeprefix(prefix): content for path, content in entries.items() if path.startswith(prefix)
        }
        return Stored(name, handler, self._written(name, files), None)

    def _written(self, name: str, files: dict[str, bytes]) -> str:
        """Puts the files of a handler where it can read them; they were verified when they were read."""
        directory = self._scratch.below(name)
        storage.make_directory(directory, parents=True)
        written = [(self._scratch.below(f"{name}/{path}"), content) for path, content in files.items()]
        for target in sorted({os.path.dirname(path) for path, _ in written}):
            storage.make_directory(target, parents=True)
        _native.write_small_files(written, sync=False)
        return directory


def _is_of(names: Sequence[str]) -> Callable[[str], bool]:
    """Whether an entry is the structure of one of these, or a file that a handler has made of it."""
    wanted = frozenset(names)

    def is_wanted(path: str) -> bool:
        name, _, rest = path.partition("/")
        return name in wanted and (rest == TREE or rest.startswith(f"{FILES}/"))

    return is_wanted


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
