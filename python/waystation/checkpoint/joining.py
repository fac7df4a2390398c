"""One checkpoint of parts that are saved by programs of their own, which know nothing of each other.

Each part is a checkpoint inside of an attempt at the whole, saved as any other. `commit` joins them, in the
attempt, by further names of their data files, and makes that the checkpoint: no array is read or written.

What can go wrong, in order: a part is not saved, or the process that has begun it all is killed: the attempt
is as dead as that, whatever parts are whole in it, and the next save to its place, or `waystation gc`,
removes it. Killed after the commit: the whole is there. At no time is there half of anything at the path.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import Any

from waystation import _native, storage
from waystation._errors import WaystationError
from waystation._options.in_effect import current_options
from waystation.checkpoint.handlers.choice import STATE
from waystation.checkpoint.native_saving import publish, replace
from waystation.checkpoint.paths import PathLike, check_destination, resolve
from waystation.layouts.native import names, orphans
from waystation.layouts.native.assemble import assemble
from waystation.layouts.native.read import OpenCheckpointable, open_checkpoint, open_checkpointable
from waystation.layouts.native.records import CheckpointRecord
from waystation.storage.attempts import Attempt, remove_dead

# Its name has a character that that of a checkpointable cannot begin with.
_PARTS = ".parts"


class Joining:
    """An attempt at a checkpoint that others save the parts of.

    Args:
        path: Where the checkpoint will be.
        overwrite: Replace a checkpoint that is there.

    Raises:
        Conflict, PermissionDenied, InvalidInput: As `waystation.save`.
    """

    def __init__(self, path: PathLike, *, overwrite: bool = False) -> None:
        target = resolve(path)
        check_destination(target, overwrite=overwrite)
        remove_dead(*os.path.split(target))
        if overwrite:
            orphans.remove_dead(target)
        self._begun_ns = time.time_ns()
        self._overwrite = overwrite
        self._attempt = Attempt(target, current_options().file.path_permission_mode)
        self.directory: str = os.path.join(self._attempt.path, _PARTS)
        try:
            storage.make_directory(self.directory)
        except WaystationError:
            self.discard()
            raise

    def commit(self, count: int, owners: Sequence[int] | None = None) -> None:
        """Makes the parts that have been saved the checkpoint, or removes everything.

        Args:
            count: How many there are.
            owners: Of which part each leaf is, where all parts have the whole structure; None where each has
                only what is its own.

        Raises:
            Conflict: Two parts have something at the same place, or are not of one state, or the path was
                taken meanwhile.
            NotFound: A part is missing.
        """
        try:
            parts = [open_part(part_path(self.directory, number)) for number in range(count)]
            write_whole(self._attempt, parts, owners, begun_ns=self._begun_ns)
            publish(self._attempt, replace if self._overwrite else None)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Removes everything."""
        self._attempt.discard()


def part_path(directory: str, number: int) -> str:
    """Where a part is saved, in the `directory` of a joining."""
    return os.path.join(directory, f"{number:06}")


Part = tuple[CheckpointRecord, OpenCheckpointable]


def open_part(place: str) -> Part:
    """A part that has been saved."""
    record = open_checkpoint(place)
    return record, open_checkpointable(place, record, STATE)


def write_whole(
    attempt: Attempt, parts: Sequence[Part], owners: Sequence[int] | None = None, *, begun_ns: int | None
) -> None:
    """Makes an attempt the whole of parts, durable and ready to be published; `owners` as `Joining.commit`.

    Raises:
        Conflict: Two parts have something at the same place, or are not of one state.
    """
    directory = os.path.join(attempt.path, STATE)
    storage.make_directory(directory)
    custom_metadata: Any = None
    for record, _ in parts:
        if custom_metadata is None:
            custom_metadata = record.custom_metadata
        elif record.custom_metadata is not None:
            custom_metadata = {**custom_metadata, **record.custom_metadata}
    with contextlib.closing(_native.SyncGroup(attempt.path)) as group:
        digest = assemble(directory, [opened for _, opened in parts], owners, group)
        entries = {STATE: (STATE, digest)}
        record = CheckpointRecord(1, entries, time.time_ns(), custom_metadata, begun_ns=begun_ns)
        _native.write_small_files([(os.path.join(attempt.path, names.RECORD), record.encode())], group=group)
        storage.remove_tree(os.path.join(attempt.path, _PARTS))
        attempt.seal()
        group.add([attempt.path])
        group.sync()
