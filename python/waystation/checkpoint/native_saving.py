"""Saves to files: the native layout, the attempt that processes write to, and storage that they share.

What can go wrong, in order: a process refuses its state: nothing has been made. A handler fails, or a process
fails or dies while data are written: the primary removes the attempt once nobody writes to it any more, or
the next save does if the primary itself is gone. The primary fails to merge or commit: likewise. Killed after
the commit: the checkpoint is whole, whatever the other processes are told.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from waystation import _native, storage
from waystation._errors import Conflict, InvalidInput
from waystation._options import Options
from waystation.checkpoint import prepare, state_parts
from waystation.checkpoint.paths import (
    MOST_ATTEMPTS,
    PathLike,
    always_replaced,
    check_destination,
    is_checkpoint,
    locate,
    require_native_checkpoint,
)
from waystation.checkpoint.prepare import Described, Taken
from waystation.checkpoint.saving import Layout, Ranges, Save, undone_on_error
from waystation.layouts.native import commit, handler_files, names, orphans, unchanged, write_plan
from waystation.layouts.native.chunks import Chunks
from waystation.layouts.native.in_store import StoreAttempt
from waystation.layouts.native.merge import Part
from waystation.layouts.native.records import FILES, CheckpointableRecord, CheckpointRecord, Digest, LocalPart
from waystation.layouts.native.write import (
    Handled,
    Observer,
    Prepared,
    write_data,
    write_metadata,
    write_metadata_to_store,
)
from waystation.storage.attempts import Attempt, remove_dead
from waystation.transfers.handle import Progress
from waystation.tree import Structure


@dataclass(frozen=True, slots=True)
class Writing:
    """What a layout writes to, and reports to.

    Attributes:
        path: The directory of the attempt.
        group: Gets what is not durable yet; None in a store, where everything is once it is written.
        progress: Is told about jobs, and may cancel.
        on_copied_out: Is called once the states may be changed.
        heartbeat: Is called from time to time.
    """

    path: str
    group: _native.SyncGroup | None
    progress: Progress
    on_copied_out: Callable[[], None]
    heartbeat: Callable[[], None]


class FileLayout(Layout, Protocol):
    """A layout of files in an attempt."""

    def directories(self) -> list[str]:
        """The directories that are made in the attempt first, those above others before them."""
        ...

    def write(self, save: Save, writing: Writing) -> bytes:
        """Writes what this process has of the states; returns what the primary has to know of it."""
        ...

    def complete(
        self,
        save: Save,
        attempt: Attempt,
        group: _native.SyncGroup,
        told: Sequence[bytes],
        local: LocalPart | None = None,
    ) -> None:
        """Makes what has been written a checkpoint, and all of it durable.

        Args:
            save: The save.
            attempt: The attempt.
            group: What is not durable yet.
            told: What `write` has returned in each process; ignored in a program of one.
            local: Which part it is of a save to local storage.
        """
        ...

    def replace(self, attempt: Attempt) -> None:
        """Commits in the place of another checkpoint, and removes that."""
        ...


def check_no_file(checkpointables: Collection[str]) -> None:
    """Refuses the names of files that every attempt has."""
    for name in checkpointables:
        if name in (names.RECORD, storage.names.OWNER):
            raise InvalidInput(f"'{name}' cannot be the name of a checkpointable: the layout has such a file")


class CutStates:
    """States cut as they are, in the chunks that their devices hold.

    Args:
        check: Refuses states that have a structure for which there is no place.
    """

    def __init__(self, check: Callable[[Structure], object] = lambda _: None) -> None:
        self._check = check
        self.taken: dict[str, Taken] = {}

    def check(self, save: Save, checkpointables: Collection[str]) -> None:
        """Refuses the names of files of the layout."""
        check_no_file(checkpointables)

    def bounded(self, options: Options) -> Options:
        """The same options."""
        return options

    def cut(self, name: str, described: Described, save: Save) -> Taken:
        """See `Layout`."""
        self._check(described.structure)
        taken = self.taken[name] = prepare.take(described, save.options, save.writer)
        return taken

    def fingerprint(self, name: str) -> list[str]:
        """See `Layout`."""
        return prepare.fingerprint_of_casts(name, self.taken[name].labels, self.taken[name].cast)

    def plan(self, save: Save, waited_for: Ranges) -> None:
        """Nothing: others place the chunks."""

    def release(self) -> None:
        """See `Layout`."""
        self.taken = {}


@dataclass(frozen=True, slots=True)
class EarlierCheckpoint:
    """A checkpoint with which a save may share data files.

    Attributes:
        path: Where it is.
        is_required: Whether it is an error if no checkpoint is there.
    """

    path: str
    is_required: bool = False

    @classmethod
    def given(cls, path: PathLike | None) -> Self | None:
        """The one that the caller of a save has given."""
        return None if path is None else cls(locate(path), is_required=True)


class NativeLayout(CutStates):
    """The native layout.

    Args:
        check: Refuses states that have a structure for which there is no place.
        earlier: A checkpoint with which data files may be shared.
    """

    def __init__(
        self, check: Callable[[Structure], object] = lambda _: None, earlier: EarlierCheckpoint | None = None
    ) -> None:
        super().__init__(check)
        self._earlier = earlier
        self._prepared: list[Prepared] = []
        self._waited_for: Ranges = {}
        self._parts: list[Part] = []  # where no other process has any
        self._attempt: StoreAttempt | None = None  # in the process that has made it

    def check(self, save: Save, checkpointables: Collection[str]) -> None:
        """Refuses the names of files of the layout, and an earlier checkpoint that is not there."""
        super().check(save, checkpointables)
        if self._earlier is not None and self._earlier.is_required:
            require_native_checkpoint(self._earlier.path)

    def plan(self, save: Save, waited_for: Ranges) -> None:
        """See `Layout`."""
        self._waited_for = waited_for
        if self._earlier is None:  # else once the attempt is there
            is_in_store = storage.is_in_store(save.target)
            self._prepared = [
                prepare.plan(name, taken, save.options, save.writer.process, is_in_store=is_in_store)
                for name, taken in self.taken.items()
            ]

    def directories(self) -> list[str]:
        """One for each state."""
        return list(self.taken)

    def _plan_beside(self, earlier: str, save: Save, writing: Writing) -> None:
        """Plans the files, and shares those of an earlier checkpoint that need not be written again."""
        found = unchanged.Earlier.open(earlier, list(self.taken))
        if found is not None and not found.may_share_with(save.target):
            found = None
        if found is not None and self._attempt is not None:
            self._attempt.owners = found.owners()
        process, waited_for = save.writer.process, dict(self._waited_for)
        for name, taken in self.taken.items():
            shared = None
            if found is not None:
                place = unchanged.Place(
                    names.directory_in(writing.path, name),
                    process,
                    save.options,
                    writing.progress.watch,
                    writing.heartbeat,
                )
                chunks = Chunks.of(taken.chunks)
                shared = unchanged.share(found, name, chunks, taken.sources, taken.labels, place)
            is_in_store = storage.is_in_store(save.target)
            entry = prepare.plan(name, taken, save.options, process, shared, is_in_store=is_in_store)
            self._prepared.append(entry)
            if shared is not None:
                save.shared_bytes += int(chunks.lengths.sum()) - entry.plan.data_bytes
                if name in waited_for:
                    waited_for[name] = write_plan.moved(waited_for[name], chunks, entry.plan.order)
        self._waited_for = waited_for

    def write(self, save: Save, writing: Writing) -> bytes:
        """See `FileLayout`."""
        if self._earlier is not None:
            self._plan_beside(self._earlier.path, save, writing)
        observer = Observer(
            writing.progress.add,
            writing.on_copied_out,
            dict(self._waited_for),
            writing.heartbeat,
            save.writer.process_count == 1,
        )
        parts = write_data(writing.path, self._prepared, save.options, observer, writing.group)
        if save.writer.process_count == 1 or save.writer.is_local:
            self._parts = parts
            return b""
        return state_parts.write(writing.path, self.directories(), parts, save.writer.process)

    def complete(
        self,
        save: Save,
        attempt: Attempt,
        group: _native.SyncGroup,
        told: Sequence[bytes],
        local: LocalPart | None = None,
    ) -> None:
        """See `FileLayout`."""
        states = self._written(save, attempt.path, told, local)
        callers = 1 if local is not None else save.writer.process_count
        handled = [Handled(name, handler, callers) for name, handler in save.handler_names.items()]
        write_metadata(attempt, states, group, _record(save, local), handled)

    def begin_in_store(self, save: Save, *, overwrite: bool) -> StoreAttempt:
        """See `StoreLayout`."""
        self._attempt = StoreAttempt(save.target, overwrite=overwrite)
        return self._attempt

    def files_in_store(self, attempt_path: str, name: str) -> str:
        """See `StoreLayout`."""
        return os.path.join(names.directory_in(attempt_path, name), names.FILES)

    def publish_in_store(
        self,
        save: Save,
        attempt: StoreAttempt,
        told: Sequence[bytes],
        made: Mapping[str, Mapping[str, Digest]],
        check: Callable[[], None],
    ) -> None:
        """See `StoreLayout`."""
        handled = {
            name: CheckpointableRecord(
                save.writer.process_count, {}, FILES, save.handler_names[name], dict(files)
            )
            for name, files in made.items()
        }
        states = self._written(save, attempt.path, told)
        record = write_metadata_to_store(attempt, states, _record(save), handled)
        check()
        attempt.publish(record)

    def _written(
        self, save: Save, path: str, told: Sequence[bytes], local: LocalPart | None = None
    ) -> list[tuple[Prepared, Sequence[Part]]]:
        """The states, each with what the processes have written of it to the attempt at a path."""
        if save.writer.process_count == 1 or local is not None:
            parts = [[part] for part in self._parts]
        else:
            parts = state_parts.collect(path, self.directories(), told, Part.decode)
        return list(zip(self._prepared, parts, strict=True))

    def replace(self, attempt: Attempt) -> None:
        """See `FileLayout`."""
        replace(attempt)

    def release(self) -> None:
        """See `Layout`."""
        super().release()
        self._prepared = []


def _record(save: Save, local: LocalPart | None = None) -> CheckpointRecord:
    """The record of a save, without its checkpointables."""
    return CheckpointRecord(1, {}, time.time_ns(), save.custom_metadata, local, begun_ns=save.begun_ns)


class Files:
    """The files of an attempt, as this process has them.

    Attributes:
        layout: What writes them.
        path: The directory of the attempt; empty until that is there.
        attempt: In the process that has made it.
    """

    def __init__(self, layout: FileLayout) -> None:
        self.layout = layout
        self.path = ""
        self.attempt: Attempt | None = None
        # Of what this process has written and not made durable; from before its first file on.
        self._group: _native.SyncGroup | None = None

    @property
    def own_attempt(self) -> Attempt:
        """The attempt, in the process that has made it."""
        assert self.attempt is not None, "this process has started the attempt"
        return self.attempt

    def make(self, save: Save, *, overwrite: bool, transaction: str | None = None) -> Attempt:
        """Makes the attempt, with a directory for each checkpointable."""
        remove_dead(*os.path.split(save.target))
        if overwrite:
            orphans.remove_dead(save.target)
        attempt = Attempt(save.target, save.options.file.path_permission_mode, transaction)
        try:
            self._group = _native.SyncGroup(attempt.path)
            for own in filter(None, (*self.layout.directories(), *map(save.place_of, save.handlers))):
                storage.make_directory(os.path.join(attempt.path, own), parents=True)
        except BaseException:
            self.close()
            attempt.discard()
            raise
        self.attempt = attempt
        return attempt

    def write(self, save: Save, progress: Progress, on_copied_out: Callable[[], None]) -> bytes:
        """Writes what this process has of all checkpointables; returns what the primary is told of it."""
        if self._group is None:
            self._group = _native.SyncGroup(self.path)
        group, attempt = self._group, self.attempt
        if save.calls is not None:
            save.calls.start()
            progress.add(save.calls)
        heartbeat = (lambda: None) if attempt is None else attempt.heartbeat
        told = self.layout.write(save, Writing(self.path, group, progress, on_copied_out, heartbeat))
        if save.calls is not None:
            save.calls.finish()
        save.wrote()
        save.check_cancelled(progress)
        directories = [
            os.path.normpath(os.path.join(self.path, save.place_of(name))) for name in save.handlers
        ]
        if save.writer.process_count == 1 or save.writer.is_local:
            for directory in directories:
                to_sync = handler_files.to_sync(directory)
                # Of a flat checkpoint that is the directory of the attempt, whose owner goes before that.
                owner = os.path.join(self.path, storage.names.OWNER)
                group.add([path for path in to_sync if path != owner])
            return told
        for directory in directories:
            handler_files.sync_present(directory)
        group.sync()
        save.clock.synced_s = save.clock.now_s()
        return told

    def complete(self, save: Save, told: Sequence[bytes], local: LocalPart | None = None) -> Attempt:
        """Makes them a checkpoint that is not committed yet."""
        assert self._group is not None, "this process has written files"
        self.layout.complete(save, self.own_attempt, self._group, told, local)
        save.clock.synced_s = save.clock.now_s()
        return self.own_attempt

    def close(self) -> None:
        """Closes them; some file systems keep a file that is open."""
        if self._group is not None:
            self._group.close()

    def discard(self) -> None:
        """Removes the attempt."""
        if self.attempt is not None:
            self.attempt.discard()


class Place(Protocol):
    """A place in storage that all processes share; only the primary looks at it."""

    @property
    def replaces(self) -> bool:
        """Whether something may be there."""
        ...

    def check(self, checkpointables: Collection[str]) -> str | None:
        """Refuses checkpointables for what is there. Returns the target if that is decided only now."""
        ...

    def publish(self, attempt: Attempt, layout: FileLayout) -> None:
        """Commits."""
        ...


@dataclass(frozen=True, slots=True)
class NewPlace:
    """A checkpoint of its own.

    Attributes:
        target: Its path.
        replaces: Whether a checkpoint there is replaced.
        on_set_aside: See `paths.check_destination`.
    """

    target: str
    replaces: bool
    on_set_aside: Callable[[str], None] | None = None

    def check(self, checkpointables: Collection[str]) -> None:
        """Refuses what is there."""
        check_destination(self.target, overwrite=self.replaces, on_set_aside=self.on_set_aside)

    def publish(self, attempt: Attempt, layout: FileLayout) -> None:
        """Commits."""
        publish(attempt, layout.replace if self.replaces else None)


def replace(attempt: Attempt, *, judged: storage.Identity | None = None) -> None:
    """Commits an attempt of the native layout in place of a checkpoint, and removes that.

    Args:
        attempt: The attempt.
        judged: The version of the record that may be replaced; by default whatever is there.

    Raises:
        Conflict: Another version is there.
    """
    commit.publish_over(attempt, judged)
    commit.remove_replaced(attempt)


def publish(attempt: Attempt, replace: Callable[[Attempt], None] | None) -> None:
    """Commits an attempt, with `replace` in place of a checkpoint that is there."""
    for _ in range(MOST_ATTEMPTS):
        if replace is not None and is_checkpoint(attempt.target):
            replace(attempt)
            return
        try:
            commit.publish_new(attempt)
            return
        except Conflict:
            if replace is None or not is_checkpoint(attempt.target):
                raise
    raise always_replaced(attempt.target)


class SharedStorage:
    """Storage that all processes share: the primary makes one attempt there, and commits it.

    Args:
        place: Where.
        layout: What is written there.
    """

    def __init__(self, place: Place, layout: FileLayout) -> None:
        self._place = place
        self._files = Files(layout)

    def begin(self, save: Save, checkpointables: Collection[str], check: Callable[[], None]) -> None:
        """See `Destination`."""
        save.begin(check, lambda: self._place.check(checkpointables))

    def start(self, save: Save) -> str:
        """See `Destination`."""

        def make(_: Sequence[bytes]) -> bytes:
            return os.fsencode(self._files.make(save, overwrite=self._place.replaces).path)

        self._files.path = self._files.path or os.fsdecode(save.session.round(lambda: b"", make))
        return self._files.path

    def finish(self, save: Save, progress: Progress, on_copied_out: Callable[[], None]) -> None:
        """See `Destination`."""

        def complete(told: Sequence[bytes]) -> bytes:
            attempt = self._files.complete(save, told)
            save.check_cancelled(progress)
            self._place.publish(attempt, self._files.layout)
            return b""

        self.start(save)
        with undone_on_error(self, save):
            save.session.round(lambda: self._files.write(save, progress, on_copied_out), complete)
        self._files.close()

    def undo(self, save: Save) -> None:
        """Removes the attempt once every process has stopped writing to it, or cannot be waited for."""
        self._files.close()
        save.session.close_together()
        self._files.discard()

    def close(self) -> None:
        """See `Destination`."""
