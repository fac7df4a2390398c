"""A state among the files of a handler: saved to and loaded from a directory of its own.

Here the caller is a handler, which the save or load around it has called: that vouches for the files and
commits them. So all that is copied is copied while the caller waits, and the processes agree in a session of
its own about what each writes. Invariant: the directory has what that of a state in
the native layout has, and is read the same way, by any number of processes.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from typing import Any

from waystation import _native, storage
from waystation._collection import paused_collection
from waystation._errors import InvalidInput, WaystationError
from waystation._options.in_effect import current_options
from waystation.checkpoint import fill, prepare, snapshot, state_parts, wanted
from waystation.checkpoint.sessions import are_all, open_session
from waystation.checkpoint.snapshot import WriteShares, bound_engine
from waystation.frameworks import dtypes, registry
from waystation.layouts.native import names
from waystation.layouts.native.chunks import Writer
from waystation.layouts.native.merge import Part
from waystation.layouts.native.read import OpenCheckpointable, decode_checkpointable, read_files
from waystation.layouts.native.records import Digest
from waystation.layouts.native.write import Observer, Prepared, metadata_files, write_data
from waystation.layouts.opened import ArrayLeaf, Opened
from waystation.transfers.handle import Progress
from waystation.transfers.statistics import tell
from waystation.tree import unflatten

_RECORD_LIMIT_BYTES = 256 << 20


class NestedSaving:
    """One state, saved by all processes to a directory that is there by the time of `finish`."""

    def __init__(self, directory: str) -> None:
        self._options = current_options()
        self._is_local = self._options.multiprocessing.primary_host is None
        self._parent, self._name = os.path.split(directory)
        what = "save a state to local storage" if self._is_local else f"save the state '{directory}'"
        self._session = open_session(what, self._options)
        self._writer = Writer(
            self._session.process_index, self._session.process_count, self._session.primary, self._is_local
        )
        self._prepared: Prepared | None = None

    def prepare(self, state: Any) -> None:
        """Takes the state apart and copies what could change."""
        try:
            prepare.agree(self._session, lambda: self._prepare(state))
        except BaseException:
            self._session.close()
            raise

    def _prepare(self, state: Any) -> list[str]:
        described = prepare.describe(state)
        prepare.limit_to(described, self._session.processes, are_all=are_all(self._options))
        lines: list[str] = []
        if self._writer.process_count > 1:
            lines = prepare.fingerprint_of_save({self._name: described}, {}, self._options.array.saving)
        taken = prepare.take(described, self._options, self._writer)
        if lines:
            lines += prepare.fingerprint_of_casts(self._name, taken.labels, taken.cast)
        shares = WriteShares(None, sys.maxsize, is_bounded=False)
        snapshot.take(taken.chunks, taken.sources, self._options.memory, shares, taken.cast)
        self._options = bound_engine(self._options, WriteShares.of(self._options.memory, with_snapshot=False))
        self._prepared = prepare.plan(self._name, taken, self._options, self._writer.process)
        return lines

    def finish(self) -> None:
        """Writes, durably: the save around it has no descriptors of what is written here."""
        assert self._prepared is not None, "the state has been prepared"
        prepared = [self._prepared]

        def work() -> bytes:
            observer = Observer(lambda _: None, lambda: None, {}, alone=self._writer.process_count == 1)
            parts = write_data(self._parent, prepared, self._options, observer)
            if self._is_local:
                self._write_metadata(parts, is_partial=True)
                return b""
            return state_parts.write(self._parent, [prepared[0].name], parts, self._writer.process)

        def decide(told: Sequence[bytes]) -> bytes:
            if not self._is_local:
                (parts,) = state_parts.collect(self._parent, [prepared[0].name], told, Part.decode)
                self._write_metadata(parts, is_partial=False)
            return b""

        try:
            self._session.round(work, decide)
        finally:
            self._session.close()

    def _write_metadata(self, parts: Sequence[Any], *, is_partial: bool) -> None:
        assert self._prepared is not None, "the state has been prepared"
        contents = metadata_files(self._prepared, parts, partial=is_partial)
        directory = os.path.join(self._parent, self._name)
        files = [(os.path.join(directory, name), data) for name, data in contents.items()]
        _native.write_small_files(files)


def load(directory: str, abstract: Any) -> Any:
    """Loads a state from a directory; every process reads what it needs.

    Raises:
        InvalidInput: There is none, or a leaf cannot be had as wanted.
        StructureMismatch: It is another one than is asked for.
        Corrupt: Its files are not what was written.
    """
    opened = _open(directory)
    options = current_options()
    loading = options.pytree.loading
    if abstract is None:
        decided = wanted.as_saved(opened.tree, loading)
    else:
        decided = wanted.as_asked(opened.tree, abstract, loading)
    filling = fill.Filling(opened, decided, options, Progress(), directory)
    leaves = filling.finish(0)
    tell([filling.statistics], options.array.loading.on_statistics, "array.loading.on_statistics")
    return unflatten(decided.structure, leaves)


def metadata(directory: str) -> Any:
    """The abstract state of what is in a directory."""
    return abstract_state(_open(directory))


def _open(directory: str) -> OpenCheckpointable:
    path = os.path.join(directory, names.CHECKPOINTABLE_RECORD)
    try:
        record = storage.read_file(path, limit_bytes=_RECORD_LIMIT_BYTES)
    except WaystationError as error:
        raise InvalidInput(
            f"no state is in '{directory}': it has no {names.CHECKPOINTABLE_RECORD}", path=directory
        ) from error
    return decode_checkpointable(read_files(directory, Digest.of(record)))


@paused_collection()
def abstract_state(opened: Opened) -> Any:
    """A saved tree with abstract arrays."""
    tree = opened.tree
    leaves = [_abstract(opened, leaf) if type(leaf) is ArrayLeaf else leaf for leaf in tree.leaves]
    return unflatten(tree.structure, leaves)


def _abstract(opened: Opened, leaf: ArrayLeaf) -> Any:
    stored = opened.tree.arrays[leaf.array]
    if stored.framework in ("bytes", "str"):
        return bytes if stored.framework == "bytes" else str
    if stored.framework == "python":
        return dtypes.of_stored(stored).host.type(0).item()  # as Orbax has it: data is not read here
    codec = registry.available_codec(stored.framework)
    storage = functools.partial(opened.storage_metadata, leaf.array)
    return codec.shown(stored, storage)
