"""One save to local storage: every process has a directory of its own, and all of them become one checkpoint.

The steps are those of `saving`, but for where things go: each process writes all that it holds, with tables
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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from waystation._errors import Conflict
from waystation.checkpoint import local_storage
from waystation.checkpoint.saving import Saving
from waystation.layouts.native import commit, names, transactions
from waystation.layouts.native.attempts import Attempt, leftovers
from waystation.layouts.native.records import LocalPart, dump_json, load_json
from waystation.transfers.handle import Progress

_IN_DOUBT = (
    "All parts of this save were prepared when this happened. The next load, save or delete there by all "
    "processes completes the checkpoint if any process has committed its part, and else removes the parts."
)


class LocalSaving(Saving):
    """A save that all processes of the program make together, each to a storage of its own."""

    _transaction = ""
    _part: LocalPart | None = None

    def begin(
        self, checkpointables: Mapping[str, Any], custom_metadata: Any, *, is_state: bool = False
    ) -> None:
        """Settles what earlier saves have left, and refuses what can be refused without the state."""
        local_storage.settle(self._session, self.target)

        def work() -> bytes:
            self._check_call(checkpointables, custom_metadata, is_state=is_state)
            self._check_destination()
            return b""

        decided = self._session.round(work, lambda _: transactions.new_transaction().encode())
        self._transaction = decided.decode()

    def _close(self) -> None:
        local_storage.in_progress.discard(self._transaction)
        super()._close()

    def _start(self) -> None:
        """Makes the attempt of this process, if that has not been done."""
        if self._path is not None:
            return
        local_storage.in_progress.add(self._transaction)
        with self._undone_on_error():
            self._session.round(self._start_attempt, local_storage.nothing)
            self._session.round(self._attempts_beside, self._refuse_shared_directories)
        self._path = self._started().path

    def finish(self, progress: Progress, on_copied_out: Callable[[], None] = lambda: None) -> None:
        """Prepares this process's part, and commits it once all are prepared."""
        self._start()
        with self._undone_on_error():
            self._session.round(lambda: self._prepare_part(progress, on_copied_out), local_storage.nothing)
        self._close_group()
        try:
            self._session.barrier()  # the decision: whoever is here will not undo its part any more
            self._session.round(self._commit_part, local_storage.nothing)
        except BaseException as error:
            error.add_note(_IN_DOUBT)
            raise
        commit.remove_replaced(self._started())

    def _attempts_beside(self) -> bytes:
        """This process's attempt and those of the same save in the same directory, and where that is."""
        beside = [
            leftover.attempt_id
            for leftover in leftovers(*os.path.split(self.target))
            if names.transaction(leftover.attempt_id) == self._transaction
        ]
        return dump_json([self._started().id, self.target, beside])

    def _refuse_shared_directories(self, parts: Sequence[bytes]) -> bytes:
        told = [load_json(part, "the attempt of another process") for part in parts]
        owners = {own: process for process, (own, _, _) in enumerate(told)}
        for process, (own, target, beside) in enumerate(told):
            other = next((owners[attempt] for attempt in beside if attempt in owners.keys() - {own}), None)
            if other is not None:
                one, two = (self._session.processes[number] for number in (process, other))
                raise Conflict(
                    f"processes {one} and {two} both have '{target}' on the same file system; with "
                    "multiprocessing.primary_host = None every process needs a directory of its own: give "
                    "each another path, or set primary_host to a process to save one checkpoint to storage "
                    "that all processes share",
                    path=target,
                )
        return b""

    def _start_attempt(self) -> bytes:
        self._attempt = self._new_attempt(self._transaction)
        return b""

    def _write_states(self, path: str, progress: Progress, on_copied_out: Callable[[], None]) -> bytes:
        self._own_parts = self._write_data(path, progress, on_copied_out)
        return b""

    def _prepare_part(self, progress: Progress, on_copied_out: Callable[[], None]) -> bytes:
        self._write(progress, on_copied_out)
        replaced = transactions.look(self.target)
        self._part = LocalPart(
            self._transaction,
            self._writer.process,
            self._writer.process_count,
            None if replaced is None else replaced.digest,
        )
        states = [(entry, [part]) for entry, part in zip(self._prepared(), self._own_parts, strict=True)]
        self._write_records(states, self._part)
        self._check_cancelled(progress)
        return b""

    def _commit_part(self) -> bytes:
        assert self._part is not None, "the part has been prepared"
        commit.publish_part(self._started(), self._part)
        return b""

    def _undo(self) -> None:
        """Nobody else writes to this process's attempt, so that nobody has to be waited for."""
        if self._calls is not None:
            self._calls.close()
        if self._attempt is not None:
            self._attempt.discard()

    def _started(self) -> Attempt:
        attempt: Attempt | None = self._attempt
        assert attempt is not None, "this process has started its attempt"
        return attempt
