"""`add_checkpointables`: more checkpointables for a checkpoint that is there.

What it has stays where it is. The new ones are written like a checkpoint of their own, in an attempt beside
it; then they move in, and a new generation of the record names them too. That is the act: killed before it,
the checkpoint is what it was, and data that have moved in are removed like those of any dead overwrite.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from waystation._errors import Conflict, Unsupported
from waystation._options.in_effect import current_options
from waystation.checkpoint.native_saving import FileLayout, NativeLayout, SharedStorage
from waystation.checkpoint.paths import PathLike, require_native_checkpoint, resolve
from waystation.checkpoint.save import check_checkpointables
from waystation.checkpoint.saving import Saving
from waystation.layouts.native import commit, orphans
from waystation.layouts.native.attempts import Attempt
from waystation.transfers.handle import Progress


@dataclass(frozen=True, slots=True)
class _ExistingCheckpoint:
    """A checkpoint that is there, as the place of more checkpointables."""

    target: str
    replaces = True

    def check(self, checkpointables: Collection[str]) -> None:
        """Refuses checkpoints that nothing can be added to, and names that are there."""
        require_native_checkpoint(self.target)
        orphans.remove_dead(self.target)
        record = commit.read_record(self.target)
        if record.local is not None:
            raise Unsupported(
                f"'{self.target}' is a part of a save to local storage, to which nothing can be added",
                path=self.target,
            )
        both = sorted(record.checkpointables.keys() & set(checkpointables))
        if both:
            raise Conflict(
                f"checkpoint '{self.target}' has a checkpointable '{both[0]}' already; delete that first, or "
                "give another name",
                path=self.target,
            )

    def publish(self, attempt: Attempt, layout: FileLayout) -> None:
        """Commits."""
        commit.add_in_place(attempt)
        commit.remove_replaced(attempt)


def add_checkpointables(path: PathLike, checkpointables: dict[str, Any]) -> None:
    """Adds checkpointables to a checkpoint, in one visible act; those that it has are not touched.

    In a program of several processes all call it. What loads the checkpoint meanwhile sees all of them, or
    none.

    Args:
        path: The checkpoint.
        checkpointables: Names that it does not have yet, and what is saved under them, as
            `save_checkpointables` takes it.

    Raises:
        CheckpointNotFound: There is nothing at `path`.
        Conflict: It has a checkpointable of such a name.
        Unsupported: It is a part of a save to local storage, or a leaf cannot be saved.
        NoHandler, HandlerFailed, InvalidInput, DiskFull, PermissionDenied, Unavailable: As
            `save_checkpointables` does; the checkpoint stays as it was.
    """
    check_checkpointables(checkpointables)
    options = current_options()
    if options.multiprocessing.primary_host is None:
        raise Unsupported("nothing can be added to checkpoints in local storage; save all at once")
    target, layout = resolve(path), NativeLayout()
    destination = SharedStorage(_ExistingCheckpoint(target), layout)
    deadline_s = options.multiprocessing.deadline_s
    with Saving(
        target, options, layout, destination, deadline_s=deadline_s, begun_ns=time.time_ns()
    ) as saving:
        saving.begin(checkpointables, None)
        saving.prepare(checkpointables)
        saving.finish(Progress())
