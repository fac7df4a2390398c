"""One save to local storage: every process has a directory of its own, and all of them become one checkpoint.

The stages are those of `saving`, but for where things go: each process writes all that it holds, with tables
of that alone, and commits by itself when all have prepared. `layouts/native/transactions.py` says what each
part looks like on the disk at every moment, and how a later program goes on with what is left.

What can go wrong, in order: a process refuses its state, or its destination: nothing has been made. Two
processes have one directory: that is seen as soon as both have made their attempts in it, before any data. A
process fails or dies while parts are prepared: every other removes its own; those that do not hear of it
cannot get any further, as the next round needs everybody. From the end of that round on all parts are
prepared, and each process knows it: whatever fails then, in the round that decides or in the commit, a
process cannot tell whether others have committed, so its part stays as it is, and the error says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence

from waystation import storage
from waystation._errors import Conflict
from waystation.checkpoint import local_storage
from waystation.checkpoint.native_saving import FileLayout, Files
from waystation.checkpoint.paths import check_destination
from waystation.checkpoint.saving import Save, undone_on_error
from waystation.layouts.native import commit, transactions
from waystation.layouts.native.records import LocalPart, dump_json, load_json
from waystation.storage.attempts import leftovers
from waystation.transfers.handle import Progress

_IN_DOUBT = (
    "All parts of this save were prepared when this happened. The next load, save or delete there by all "
    "processes completes the checkpoint if any process has committed its part, and else removes the parts."
)


class OwnStorage:
    """Storage of each process's own: each makes an attempt there, and commits it.

    Args:
        layout: What is written there.
        overwrite: Whether a checkpoint there is replaced.
    """

    def __init__(self, layout: FileLayout, *, overwrite: bool) -> None:
        self._files = Files(layout)
        self._overwrite = overwrite
        self._transaction = ""

    def begin(self, save: Save, checkpointables: Collection[str], check: Callable[[], None]) -> None:
        """Settles what earlier saves have left, and refuses what can be refused without the state."""
        local_storage.settle(save.session, save.target)

        def work() -> bytes:
            check()
            check_destination(save.target, overwrite=self._overwrite)
            return b""

        decided = save.session.round(work, lambda _: transactions.new_transaction().encode())
        self._transaction = decided.decode()

    def start(self, save: Save) -> str:
        """Makes the attempt of this process, if that has not been done."""
        if self._files.path:
            return self._files.path
        local_storage.in_progress.add(self._transaction)

        def make() -> bytes:
            self._files.make(save, overwrite=self._overwrite, transaction=self._transaction)
            return b""

        with undone_on_error(self, save):
            save.session.round(make, local_storage.nothing)
            save.session.round(
                lambda: self._attempts_beside(save), lambda parts: _refuse_shared_directories(save, parts)
            )
        self._files.path = self._files.own_attempt.path
        return self._files.path

    def _attempts_beside(self, save: Save) -> bytes:
        """This process's attempt and those of the same save in the same directory, and where that is."""
        beside = [
            leftover.attempt_id
            for leftover in leftovers(*os.path.split(save.target))
            if storage.names.transaction(leftover.attempt_id) == self._transaction
        ]
        return dump_json([self._files.own_attempt.id, save.target, beside])

    def finish(self, save: Save, progress: Progress, on_copied_out: Callable[[], None]) -> None:
        """Prepares this process's part, and commits it once all are prepared."""
        prepared: list[LocalPart] = []

        def prepare() -> bytes:
            self._files.write(save, progress, on_copied_out)
            prepared.append(self._part(save))
            self._files.complete(save, [], prepared[0])
            save.check_cancelled(progress)
            return b""

        def publish() -> bytes:
            commit.publish_part(self._files.own_attempt, prepared[0])
            return b""

        self.start(save)
        with undone_on_error(self, save):
            save.session.round(prepare, local_storage.nothing)
        self._files.close()
        try:
            save.session.barrier()  # the decision: whoever is here will not undo its part any more
            save.session.round(publish, local_storage.nothing)
        except BaseException as error:
            error.add_note(_IN_DOUBT)
            raise
        commit.remove_replaced(self._files.own_attempt)

    def _part(self, save: Save) -> LocalPart:
        replaced = transactions.look(save.target)
        digest = None if replaced is None else replaced.digest
        return LocalPart(self._transaction, save.writer.process, save.writer.process_count, digest)

    def undo(self, save: Save) -> None:
        """Nobody else writes to this process's attempt, so that nobody has to be waited for."""
        self._files.close()
        self._files.discard()

    def close(self) -> None:
        """See `Destination`."""
        local_storage.in_progress.discard(self._transaction)


def _refuse_shared_directories(save: Save, parts: Sequence[bytes]) -> bytes:
    told = [load_json(part, "the attempt of another process") for part in parts]
    owners = {own: process for process, (own, _, _) in enumerate(told)}
    for process, (own, target, beside) in enumerate(told):
        other = next((owners[attempt] for attempt in beside if attempt in owners.keys() - {own}), None)
        if other is not None:
            one, two = (save.session.processes[number] for number in (process, other))
            raise Conflict(
                f"processes {one} and {two} both have '{target}' on the same file system; with "
                "multiprocessing.primary_host = None every process needs a directory of its own: give "
                "each another path, or set primary_host to a process to save one checkpoint to storage "
                "that all processes share",
                path=target,
            )
    return b""
