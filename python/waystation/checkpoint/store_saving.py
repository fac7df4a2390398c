"""Saves to an object store: the primary makes one attempt there, and commits it.

What can go wrong is as in `native_saving`, and what a killed primary leaves the next save to the same path
removes. There is nothing to sync: what a store has taken is durable.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Sequence

from waystation._errors import Unsupported, WaystationError
from waystation.checkpoint.native_saving import NativeLayout, Writing
from waystation.checkpoint.paths import check_destination
from waystation.checkpoint.saving import Save, undone_on_error
from waystation.layouts.native import in_store
from waystation.layouts.native.in_store import StoreAttempt
from waystation.transfers.handle import Progress


class SharedStore:
    """A store that all processes share.

    Args:
        layout: What is written there.
        overwrite: Whether a checkpoint there is replaced.
    """

    def __init__(self, layout: NativeLayout, *, overwrite: bool) -> None:
        self._layout = layout
        self._overwrite = overwrite
        self._path = ""  # of the attempt, once that is there
        self._attempt: StoreAttempt | None = None  # in the process that has made it

    def begin(self, save: Save, checkpointables: Collection[str], check: Callable[[], None]) -> None:
        """See `Destination`."""

        def check_all() -> None:
            check()
            if save.handlers:
                raise Unsupported(
                    f"'{next(iter(save.handlers))}' is saved by a handler, and handlers write to file "
                    f"systems only; save states to '{save.target}'",
                    path=save.target,
                )

        save.begin(check_all, lambda: check_destination(save.target, overwrite=self._overwrite))

    def start(self, save: Save) -> str:
        """See `Destination`."""

        def make(_: Sequence[bytes]) -> bytes:
            in_store.remove_dead(save.target)
            self._attempt = StoreAttempt(save.target, overwrite=self._overwrite)
            return os.fsencode(self._attempt.path)

        self._path = self._path or os.fsdecode(save.session.round(lambda: b"", make))
        return self._path

    def finish(self, save: Save, progress: Progress, on_copied_out: Callable[[], None]) -> None:
        """See `Destination`."""

        def write() -> bytes:
            told = self._layout.write(save, Writing(self._path, None, progress, on_copied_out, lambda: None))
            save.clock.written_s = save.clock.synced_s = save.clock.now_s()
            save.check_cancelled(progress)
            return told

        def complete(told: Sequence[bytes]) -> bytes:
            assert self._attempt is not None, "the primary has started the attempt"
            record = self._layout.complete_in_store(save, self._attempt, told)
            save.check_cancelled(progress)
            self._attempt.publish(record)
            return b""

        self.start(save)
        with undone_on_error(self, save):
            save.session.round(write, complete)

    def undo(self, save: Save) -> None:
        """Removes the attempt once every process has stopped writing to it, or cannot be waited for."""
        if save.writer.process_count > 1:
            with contextlib.suppress(WaystationError):
                save.ending.barrier()
        if self._attempt is not None:
            self._attempt.discard()

    def close(self) -> None:
        """See `Destination`."""
