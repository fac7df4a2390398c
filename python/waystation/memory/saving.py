"""One save to memory, step by step, as every process of the program takes it.

The steps are those of `checkpoint/saving.py`, in as many rounds; here is where bytes go: each process copies
its shard into a slot of its host's agent, which verifies and seals it. What can go wrong, in order: a process
refuses its state; there is no agent, or no slot to be had; a process fails or is killed while it copies: its
slot is freed, and the others give up what they have sealed. From the end of the last round on every shard is
sealed and everybody knows it, so the version is whole, whether or not its commit still reaches an agent;
agents of several hosts then bring copies to each other, which is waited for.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable

from waystation import _forks
from waystation._errors import Unavailable, from_os_error
from waystation._options import Options, StorageOptions
from waystation.checkpoint.handlers.types import type_name
from waystation.checkpoint.prepare import Taken
from waystation.checkpoint.saving import Saving
from waystation.layouts.native import engine_job, handler_files
from waystation.memory.loading import primary_of
from waystation.memory.shard import Shard, ShardRecord, lay_out, path_of_file
from waystation.memory.version_store import VersionStore
from waystation.memory.versions import Version, shard_name
from waystation.transfers.handle import Progress


class VersionSaving(Saving):
    """A save of one version that all processes of the program make together.

    Args:
        store: Who keeps it.
        version: The version.
        options: Of the save, see `saving_options`.
        begun_ns: When the call began whose save it is, nanoseconds since 1970.

    Attributes:
        saved_bytes: How many bytes this process has put into its slot.
        shard_count: How many shards the version has.
    """

    def __init__(self, store: VersionStore, version: Version, options: Options, begun_ns: int) -> None:
        deadline_s = options.multiprocessing.deadline_s
        target = f"step {version.step} in memory (epoch {version.epoch})"
        super().__init__(target, options, overwrite=False, deadline_s=deadline_s)
        self.begun_ns = begun_ns
        self._deadline_s = deadline_s
        self._store = store
        self._version = version
        self._shard_name = shard_name(store.sequence, self._writer.process, self._writer.process_count)
        self.saved_bytes = 0
        self.shard_count = self._writer.process_count
        self._owner = _forks.Owner()

    def finish(self, progress: Progress, on_copied_out: Callable[[], None] = lambda: None) -> None:
        """Copies this process's shard and has it sealed; returns once all shards are, and as safe as they are
        to be."""
        with self._undone_on_error():
            self._session.round(lambda: self._write(progress, on_copied_out), lambda _: b"")
        self._store.confirm(self._session, self._version, self.saved_bytes)

    def _check_destination(self) -> None:
        """The agent refuses what it cannot take."""

    def _plan(self, name: str, taken: Taken) -> Taken:
        return taken

    def _start(self) -> None:
        """Makes the directory in which handlers of this process put their files."""
        if self._path is not None:
            return
        self._path = tempfile.mkdtemp(prefix="waystation-memory-")
        try:
            for name in self._handlers:
                os.makedirs(self._files_directory(self._path, name))
        except OSError as error:
            raise from_os_error(error, "create", self._path) from error

    def _write(self, progress: Progress, on_copied_out: Callable[[], None]) -> bytes:
        files = self._files_of_handlers(progress)
        handlers = {name: type_name(type(handler)) for name, handler in self._handlers.items()}
        record = ShardRecord(
            self._writer.process_count,
            dict.fromkeys(self._states) | handlers,
            self._custom_metadata,
            self.begun_ns,
        )
        is_primary = self._writer.process == self._writer.primary
        shard = lay_out(record, self._states, files, is_primary=is_primary)
        if not shard.can_change:
            on_copied_out()
        self._copy(shard, progress, on_copied_out)
        self._check_cancelled(progress)
        self.saved_bytes = shard.data_bytes
        return b""

    def _files_of_handlers(self, progress: Progress) -> dict[str, bytes]:
        """What the handlers have made, by the paths of its entries."""
        if self._calls is None:
            return {}
        assert self._path is not None, "the directory was made before they were called"
        self._calls.start()
        progress.add(self._calls)
        self._calls.finish()
        found: dict[str, bytes] = {}
        for name in self._handlers:
            for file, path in handler_files.listed(self._files_directory(self._path, name)).items():
                try:
                    with open(path, "rb") as opened:
                        found[path_of_file(name, file)] = opened.read()
                except OSError as error:
                    raise from_os_error(error, "read", path) from error
        return found

    def _copy(self, shard: Shard, progress: Progress, on_copied_out: Callable[[], None]) -> None:
        version = self._version
        job = self._store.saver.start_save(
            version.epoch,
            version.step,
            self._shard_name,
            shard.contents,
            shard.segments,
            shard.chunks,
            data_bytes=shard.data_bytes,
            threads=self._options.engine.threads,
        )
        progress.add(job)
        try:
            job.wait_gathered(shard.data_bytes)
            on_copied_out()
            if not job.wait(self._deadline_s):
                raise Unavailable(
                    f"the agent of this host has not sealed {self.target} within {self._deadline_s:g} s"
                )
            job.result()
        except BaseException:
            engine_job.stop(job)
            raise

    def _undo(self) -> None:
        """Gives up what was sealed. Nobody waits for the others: each does the same for its host."""
        if self._calls is not None:
            self._calls.close()
        self._store.give_up(self._version)

    def _close(self) -> None:
        super()._close()
        if self._path is not None and self._owner.is_here:
            shutil.rmtree(self._path, ignore_errors=True)


def saving_options(options: Options, deadline_s: float) -> Options:
    """The options with which memory is written: arrays as they are, whatever is asked for of the disk."""
    own = options.thawed()
    saving = own.array.saving
    saving.storage_options, saving.storage_options_for = StorageOptions(), None
    saving.scoped_storage_options_creator, saving.use_ocdbt = None, None
    own.multiprocessing.primary_host = primary_of(options)
    own.multiprocessing.deadline_s = deadline_s
    return own.frozen()
