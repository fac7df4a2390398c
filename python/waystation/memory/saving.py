"""One save to memory, step by step, as every process of the program takes it.

The stages are those of `checkpoint/saving.py`, in as many rounds; here is where bytes go: each process copies
its shard into a slot of its host's agent, which verifies and seals it. What can go wrong, in order: a process
refuses its state; there is no agent, or no slot to be had; a process fails or is killed while it copies: its
slot is freed, and the others give up what they have sealed. From the end of the last round on every shard is
sealed and everybody knows it, so the version is whole, whether or not its commit still reaches an agent;
agents of several hosts then bring copies to each other, which is waited for.

The program waits until its state has been copied. If it does not want to wait for agents as well, it leaves a
save of which nothing has been read yet (`AgentSlots.leave`), and that save fails in all processes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from waystation import _native, storage
from waystation._errors import Cancelled, Unavailable
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
        step: The step.
        layout: The states, once they are cut.
        waits: Whether the program waits for agents, which have then agreed on the epoch already. Otherwise
            they are asked for it in the background, and the save fails with Cancelled if they do not agree at
            once.

    Attributes:
        version: The version; None until its epoch is agreed upon.
        saved_bytes: How many bytes this process has put into its slot.
    """

    def __init__(self, store: VersionStore, step: int, layout: CutStates, *, waits: bool) -> None:
        self._store = store
        self._step = step
        self._layout = layout
        self._waits = waits
        self._scratch = ScratchDirectory()  # in which handlers of this process put their files
        self.version: Version | None = Version(store.epoch, step) if waits else None
        self.saved_bytes: int = 0
        self._lock = threading.Lock()
        self._asked_s: float | None = None  # since when agents are waited for
        self._job: _native.Job | None = None  # that copies, once the slot is granted
        self._reads = self._was_left = False

    # ---- in the thread of the program ----------------------------------------------------------

    def awaits_agents_s(self) -> float:
        """For how long agents have kept it from copying, up to now; 0 if they do not."""
        asked_s, job = self._asked_s, self._job
        if asked_s is None or (job is not None and job.progress()[0] > 0):
            return 0.0
        return time.monotonic() - asked_s

    def leave(self) -> bool:
        """Has it fail instead of reading the state; returns False if it reads that already."""
        with self._lock:
            self._was_left = not self._reads
            return self._was_left

    # ---- the stages ----------------------------------------------------------------------------

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
            version = self.version or self._agreed_version(save)
            save.session.round(lambda: self._write(save, version, progress, on_copied_out), lambda _: b"")
        self._store.confirm(save.session, version, self.saved_bytes, is_awaited=self._waits)

    def _agreed_version(self, save: Save) -> Version:
        """The version, once all processes have found their agents ready for it."""
        self._asked_s = time.monotonic()
        if not self._store.before_save(save.session, goes_back=False, waits=False):
            raise Cancelled(f"the agents of the hosts are recovering, and {save.target} is left out")
        self._asked_s = None
        self.version = Version(self._store.epoch, self._step)
        return self.version

    def _write(
        self, save: Save, version: Version, progress: Progress, on_copied_out: Callable[[], None]
    ) -> bytes:
        self._begin_to_read(save)
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
        self._copy(save, version, shard, progress, on_copied_out)
        save.wrote()
        save.check_cancelled(progress)
        self.saved_bytes = shard.data_bytes
        return b""

    def _begin_to_read(self, save: Save) -> None:
        """From here on the program waits for the end of the copy, unless it has gone on before."""
        with self._lock:
            if self._was_left:
                raise Cancelled(f"agents were too slow to take {save.target}, which is left out")
            self._reads = True

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

    def _copy(
        self,
        save: Save,
        version: Version,
        shard: Shard,
        progress: Progress,
        on_copied_out: Callable[[], None],
    ) -> None:
        deadline_s = save.options.multiprocessing.deadline_s
        self._asked_s = time.monotonic()
        job = self._job = self._store.saver.start_save(
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
            self._asked_s = None
            on_copied_out()
            if not job.wait(deadline_s):
                raise Unavailable(
                    f"the agent of this host has not sealed {save.target} within {deadline_s:g} s"
                )
            job.result()
        except BaseException:
            engine_job.stop(job)
            raise
        finally:
            self._job = None  # it keeps the state alive

    def undo(self, save: Save) -> None:
        """Gives up what was sealed. Nobody waits for the others: each does the same for its host."""
        if self.version is not None:
            self._store.give_up(self.version)

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
