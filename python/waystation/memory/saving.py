"""One save to memory, step by step, as every process of the program takes it.

The stages are those of `checkpoint/saving.py`, in as many rounds; here is where bytes go: each process copies
its shard into a slot of its host's agent, which verifies and seals it. What can go wrong, in order: a process
refuses its state; there is no agent, or no slot to be had; a process fails or is killed while it copies: its
slot is freed, and the others give up what they have sealed. From the end of the last round on every shard is
sealed and everybody knows it, so the version is whole, whether or not its commit still reaches an agent;
agents of several hosts then bring copies to each other, which is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from waystation import storage
from waystation._errors import Unavailable
from waystation._options import Options, StorageOptions
from waystation.checkpoint.native_saving import CutStates
from waystation.checkpoint.saving import Save, undone_on_error
from waystation.layouts.native import engine_job, handler_files
from waystation.memory.loading import primary_of
from waystation.memory.shard import Shard, ShardRecord, lay_out, path_of_file
from waystation.memory.version_store import VersionStore
from waystation.memory.versions import Version, shard_name
from waystation.storage.scratch import ScratchDirectory
from waystation.transfers.handle import Progress


class AgentSlots:
    """The slots of agents, each with the shard of one process; a `Destination`.

    Args:
        store: Who keeps the version.
        version: The version.
        layout: The states, once they are cut.

    Attributes:
        saved_bytes: How many bytes this process has put into its slot.
    """

    def __init__(self, store: VersionStore, version: Version, layout: CutStates) -> None:
        self._store = store
        self._version = version
        self._layout = layout
        self._scratch = ScratchDirectory()  # in which handlers of this process put their files
        self.saved_bytes: int = 0

    def begin(self, save: Save, checkpointables: Collection[str], check: Callable[[], None]) -> None:
        """Refuses wrong arguments; the agent refuses what it cannot take."""
        save.begin(check)

    def start(self, save: Save) -> str:
        """Makes the directory in which handlers of this process put their files."""
        for name in save.handlers:
            storage.make_directory(self._scratch.below(name), parents=True)
        return self._scratch.path

    def finish(self, save: Save, progress: Progress, on_copied_out: Callable[[], None]) -> None:
        """Copies this process's shard and has it sealed; returns once all shards are, and as safe as they are
        to be."""
        with undone_on_error(self, save):
            save.session.round(lambda: self._write(save, progress, on_copied_out), lambda _: b"")
        self._store.confirm(save.session, self._version, self.saved_bytes)

    def _write(self, save: Save, progress: Progress, on_copied_out: Callable[[], None]) -> bytes:
        files = self._files_of_handlers(save, progress)
        record = ShardRecord(
            save.writer.process_count,
            dict.fromkeys(self._layout.taken) | save.handler_names,
            save.custom_metadata,
            save.begun_ns,
        )
        is_primary = save.writer.process == save.writer.primary
        shard = lay_out(record, self._layout.taken, files, is_primary=is_primary)
        if not shard.can_change:
            on_copied_out()
        self._copy(save, shard, progress, on_copied_out)
        save.wrote()
        save.check_cancelled(progress)
        self.saved_bytes = shard.data_bytes
        return b""

    def _files_of_handlers(self, save: Save, progress: Progress) -> dict[str, bytes]:
        """What the handlers have made, by the paths of its entries."""
        if save.calls is None:
            return {}
        save.calls.start()
        progress.add(save.calls)
        save.calls.finish()
        found: dict[str, bytes] = {}
        for name in save.handlers:
            for file, path in handler_files.listed(self._scratch.below(name)).items():
                with storage.opened(path) as opened:
                    found[path_of_file(name, file)] = opened.read(0, opened.status.nbytes)
        return found

    def _copy(self, save: Save, shard: Shard, progress: Progress, on_copied_out: Callable[[], None]) -> None:
        version, deadline_s = self._version, save.options.multiprocessing.deadline_s
        job = self._store.saver.start_save(
            version.epoch,
            version.step,
            shard_name(self._store.sequence, save.writer.process, save.writer.process_count),
            shard.contents,
            shard.segments,
            shard.chunks,
            data_bytes=shard.data_bytes,
            threads=save.options.engine.threads,
        )
        progress.add(job)
        try:
            job.wait_gathered(shard.data_bytes)
            on_copied_out()
            if not job.wait(deadline_s):
                raise Unavailable(
                    f"the agent of this host has not sealed {save.target} within {deadline_s:g} s"
                )
            job.result()
        except BaseException:
            engine_job.stop(job)
            raise

    def undo(self, save: Save) -> None:
        """Gives up what was sealed. Nobody waits for the others: each does the same for its host."""
        self._store.give_up(self._version)

    def close(self) -> None:
        """Removes what handlers have put down."""
        self._scratch.remove()


def saving_options(options: Options, deadline_s: float) -> Options:
    """The options with which memory is written: arrays as they are, whatever is asked for of the disk."""
    own = options.thawed()
    saving = own.array.saving
    saving.storage_options, saving.storage_options_for = StorageOptions(), None
    saving.scoped_storage_options_creator, saving.use_ocdbt = None, None
    own.multiprocessing.primary_host = primary_of(options)
    own.multiprocessing.deadline_s = deadline_s
    return own.frozen()
