"""A tree in one of Orbax's layouts among the files of a handler: saved to a directory that is there.

As in `nested_state`, the caller is a handler, and the save around it vouches for the files and commits them.
Invariant: the directory gets what that of a checkpointable has in Orbax's layouts, and no file of a
checkpoint; `waystation.load` takes it for one, as Orbax does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from waystation import _native, storage
from waystation._errors import Unsupported
from waystation._options.in_effect import current_options
from waystation.checkpoint import prepare, snapshot
from waystation.checkpoint.handlers.choice import STATE
from waystation.checkpoint.native_saving import Writing
from waystation.checkpoint.orbax_saving import OrbaxLayout
from waystation.checkpoint.saving import Save
from waystation.checkpoint.sessions import are_all, open_session
from waystation.checkpoint.snapshot import WriteShares, bound_engine
from waystation.layouts.native.chunks import Writer
from waystation.transfers.handle import Progress


class NestedTree:
    """One tree, saved by all processes to a directory that is there by the time of `finish`.

    Args:
        directory: Where.
    """

    def __init__(self, directory: str) -> None:
        options = current_options()
        if options.multiprocessing.primary_host is None:
            raise Unsupported(
                "a handler saves trees in Orbax's layouts to storage that all processes share; set "
                "multiprocessing.primary_host to a process"
            )
        session = open_session(f"save the tree '{directory}'", options)
        writer = Writer(session.process_index, session.process_count, session.primary)
        self._layout = OrbaxLayout()
        self._save = Save(directory, options, session, writer, time.time_ns(), is_flat=True)

    def prepare(self, state: Any) -> None:
        """Takes the tree apart and copies what could change."""
        try:
            prepare.agree(self._save.session, lambda: self._prepare(state))
        except BaseException:
            self.close()
            raise

    def _prepare(self, state: Any) -> list[str]:
        save, layout = self._save, self._layout
        layout.check(save, [STATE])
        save.options = layout.bounded(save.options)
        described = prepare.describe(state)
        prepare.limit_to(described, save.session.processes, are_all=are_all(save.options))
        save.options = prepare.with_scoped_options(save.options, {STATE: state}, {STATE: described})
        lines: list[str] = []
        if save.writer.process_count > 1:
            lines = prepare.fingerprint_of_save({STATE: described}, {}, save.options.array.saving)
        cut = layout.cut(STATE, described, save)
        if lines:
            lines += layout.fingerprint(STATE)
        shares = WriteShares.of(save.options.memory, with_snapshot=True)
        waited_for = snapshot.take(cut.chunks, cut.sources, save.options.memory, shares, cut.cast)
        save.options = bound_engine(save.options, shares)
        layout.plan(save, {STATE: waited_for} if waited_for else {})
        return lines

    def finish(self) -> None:
        """Writes, durably: the save around it has no descriptors of what is written here."""
        save, layout, path = self._save, self._layout, self._save.target

        def make(_: Sequence[bytes]) -> bytes:
            for own in filter(None, layout.directories()):
                storage.make_directory(os.path.join(path, own), parents=True)
            return b""

        def write() -> bytes:
            group = _native.SyncGroup(path)
            try:
                told = layout.write(save, Writing(path, group, Progress(), lambda: None, lambda: None))
                group.sync()
            finally:
                group.close()
            return told

        def complete(told: Sequence[bytes]) -> bytes:
            layout.complete_tree(save, path, told)
            return b""

        try:
            save.session.round(lambda: b"", make)
            save.session.round(write, complete)
        finally:
            self.close()

    def close(self) -> None:
        """Lets go of everything."""
        self._layout.release()
        self._save.session.close()
