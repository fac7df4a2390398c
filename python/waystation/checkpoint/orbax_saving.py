"""One save in one of Orbax's layouts, which Orbax loads as if it had written it.

The steps are those of `saving`; here is what these layouts decide: how states are cut and planned, what is
written of them, and which files make all of it a checkpoint. It is made in an attempt and becomes visible by
one rename, as every checkpoint of ours, although Orbax itself would write some of these files afterwards and
make few of them durable. Handlers write their files into the directories of their checkpointables.

Invariants: what the layout cannot hold is refused before anything is written; no two processes write to one
file; every file and directory is durable before the rename.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from waystation import _native
from waystation._collection import paused_collection
from waystation._errors import InvalidInput, Unsupported, from_os_error
from waystation.checkpoint import cast, fingerprints, prepare, state_parts
from waystation.checkpoint.handlers import registry as registries
from waystation.checkpoint.handlers.types import type_name
from waystation.checkpoint.paths import is_checkpoint
from waystation.checkpoint.saving import Saving, naming
from waystation.checkpoint.write_limits import divided_with_frames
from waystation.frameworks import dtypes
from waystation.frameworks.base import ArraySource
from waystation.layouts.native import commit, handler_files
from waystation.layouts.native.attempts import Attempt
from waystation.layouts.native.chunks import Chunk
from waystation.layouts.native.records import Digest
from waystation.layouts.native.write import Observer
from waystation.layouts.orbax import (
    checksums,
    names,
    write_data,
    write_metadata,
    write_ocdbt,
    write_plan,
    write_tree,
)
from waystation.layouts.orbax.checkpoint_metadata import PYTREE_HANDLER, CheckpointMetadata
from waystation.layouts.orbax.frame_limits import FrameLimits
from waystation.layouts.orbax.write_data import Prepared
from waystation.layouts.orbax.write_parts import Part, check_complete
from waystation.transfers.handle import Progress


@dataclass(slots=True)
class Taken:
    """A state that has been cut.

    Attributes:
        leaves: Its leaves.
        arrays: Its arrays, in chunks.
        chunks: The chunks of this process.
        sources: The arrays.
        cast: Those that have been cast: their chunks are copies.
    """

    leaves: write_tree.Leaves
    arrays: write_plan.Arrays
    chunks: list[Chunk]
    sources: Sequence[ArraySource]
    cast: dict[int, str]


@dataclass(slots=True)
class Planned(Prepared):
    """A state that is ready to be written.

    Attributes:
        leaves: Its leaves.
    """

    leaves: write_tree.Leaves


class OrbaxSaving(Saving):
    """A save in one of Orbax's layouts that all processes of the program make together."""

    _limits = FrameLimits()
    _written: Sequence[Part] = ()  # by a program of one process

    def _check_call(
        self, checkpointables: Mapping[str, Any], custom_metadata: Any, *, is_state: bool
    ) -> None:
        if self._is_local:
            raise Unsupported(
                "Orbax's layouts are written to storage that all processes share; set "
                "multiprocessing.primary_host to a process, or array.saving.use_ocdbt to None"
            )
        super()._check_call(checkpointables, custom_metadata, is_state=is_state)

    def _check_place_of(self, name: str) -> None:
        super()._check_place_of(name)
        if name in names.FILES or names.is_temporary(name):
            raise InvalidInput(
                f"'{name}' cannot be the name of a checkpointable: Orbax's layout has such files"
            )

    def _prepare(self, checkpointables: Mapping[str, Any], *, with_snapshot: bool) -> list[str]:
        bound = self._options.memory.write_limit_bytes()
        if self._options.array.saving.use_compression and bound is not None:
            self._options, self._limits = divided_with_frames(self._options, bound)
        lines = super()._prepare(checkpointables, with_snapshot=with_snapshot)
        # Processes that cut arrays into other chunks would not write the same ones.
        return [*lines, f"chunks of up to {self._limits.chunk_bytes} bytes"] if lines else []

    @paused_collection()
    def _take(self, name: str, described: prepare.Described, *, is_only: bool) -> Any:
        saving = self._options.array.saving
        with naming(None if is_only else name):
            leaves = write_tree.leaves_of(described.structure, described.leaves, described.sources)
            wanted = cast.wanted_dtypes(leaves.arrays, leaves.names, saving)
            sizes = {number: dtypes.of_name(dtype).host.itemsize for number, dtype in wanted.items()}
            arrays = write_plan.cut(leaves.names, leaves.arrays, saving, self._writer, sizes, self._limits)
            chunks = [value.chunk for value in arrays.values]
            for source in leaves.arrays:
                source.blocks = []  # what others write may be changed or freed at once
            cast.apply(chunks, leaves.arrays, leaves.names, wanted, cast.rule_of(saving))
            arrays.describe()
            write_plan.check_paths(arrays)
        return Taken(leaves, arrays, chunks, leaves.arrays, wanted)

    def _fingerprint(self, name: str, taken: Any) -> list[str]:
        labels, arrays = taken.leaves.names, taken.arrays
        return [
            *fingerprints.of_casts(name, labels, taken.cast),
            *(
                f"checkpointable '{name}', {label}: in chunks of shape {cut.grid.chunk_shape}"
                for label, cut in zip(labels, arrays.cuts, strict=True)
            ),
            f"checkpointable '{name}': stored as {arrays.storage}",
        ]

    @paused_collection()
    def _plan(self, name: str, taken: Any) -> Planned:
        arrays, waited_for = taken.arrays, self._waited_for.get(name, [])
        if arrays.storage.level is not None:
            return Planned(name, arrays, None, [], bool(waited_for), taken.leaves)
        planned = write_plan.plan(arrays, self._writer.process)
        positions = planned.positions_of(waited_for, arrays.values)
        return Planned(name, arrays, planned, positions, bool(waited_for), taken.leaves)

    def _new_attempt(self, transaction: str | None = None) -> Attempt:
        attempt = super()._new_attempt(transaction)
        try:
            for name, planned in self._states.items():
                for own in planned.arrays.directories():
                    _make_directory(os.path.join(attempt.path, name, own))
        except BaseException:
            self._close_group()
            attempt.discard()
            raise
        return attempt

    def _files_directory(self, path: str, name: str) -> str:
        return os.path.join(path, name)

    def _write_states(self, path: str, progress: Progress, on_copied_out: Callable[[], None]) -> bytes:
        observer = Observer(
            progress.add,
            on_copied_out,
            {},
            self._attempt.heartbeat if self._attempt else lambda: None,
            self._writer.process_count == 1,
        )
        self._make_own_directories(path)
        parts = write_data.write(
            path,
            list(self._states.values()),
            self._writer.process,
            self._options,
            self._limits,
            observer,
            lambda: progress.cancelled,
            self._group,
        )
        if self._writer.process_count == 1:
            self._written = parts
            return b""
        return state_parts.write(path, list(self._states), parts, self._writer.process)

    def _make_own_directories(self, path: str) -> None:
        """Makes the directories of this process's part of databases."""
        for name, planned in self._states.items():
            if not planned.arrays.storage.use_ocdbt or not planned.arrays.values:
                continue
            own = os.path.join(path, name, names.ocdbt_process(self._writer.process))
            directory = os.path.join(own, "d")
            _make_directory(own)
            _make_directory(directory)
            self._group.add([directory, own])

    def _write_metadata(self, told: Sequence[bytes]) -> None:
        path, states = self._attempt.path, list(self._states.values())
        parts = [[part] for part in self._written]
        if self._writer.process_count > 1:
            parts = state_parts.collect(path, list(self._states), told, Part.decode)
        files: dict[str, bytes] = {}
        listed = {name: self._listed_of_handler(path, name) for name in self._handlers}
        for planned, own in zip(states, parts, strict=True):
            check_complete(own, planned.arrays)
            made = self._files_of(planned, own)
            files |= {os.path.join(path, planned.name, file): content for file, content in made.items()}
            listed[planned.name] = _listed(planned, own, made)
        files |= {os.path.join(path, file): content for file, content in self._files_of_all(listed).items()}
        present = {
            os.path.join(path, planned.name, own)
            for planned in states
            for own in planned.arrays.directories()
        }
        directories = {os.path.dirname(file) for file in files} - present
        for directory in sorted(directories):
            _make_directory(directory)
        _native.write_small_files(list(files.items()), group=self._group)
        self._attempt.seal()
        named = [os.path.join(path, name) for name in (*self._states, *self._handlers)]
        self._group.add(list({*present, *directories, *named, path}))
        self._group.sync()

    def _files_of(self, planned: Planned, parts: Sequence[Part]) -> dict[str, bytes]:
        return write_metadata.of_state(
            planned.leaves,
            planned.arrays,
            parts,
            self._writer.primary,
            time.time_ns(),
            with_shardings=self._options.array.saving.enable_write_sharding_file,
            with_rich_types=self._options.pytree.saving.pytree_metadata_options.support_rich_types,
        )

    def _listed_of_handler(self, path: str, name: str) -> checksums.Listed:
        """The files that the handler of a checkpointable has written."""
        directory = self._files_directory(path, name)
        below = handler_files.below(directory)
        return checksums.Listed(
            False, {os.path.relpath(file, directory): handler_files.digest(file) for file in below}
        )

    def _files_of_all(self, listed: Mapping[str, checksums.Listed]) -> dict[str, bytes]:
        """The files of the checkpoint itself, of which one vouches for all others."""
        handlers = dict.fromkeys(self._states, PYTREE_HANDLER)
        handlers |= {name: self._name_in_orbax(type(handler)) for name, handler in self._handlers.items()}
        metadata = CheckpointMetadata(
            handlers,
            init_timestamp_nsecs=self.begun_ns,
            commit_timestamp_nsecs=time.time_ns(),
            custom_metadata=self._custom_metadata or {},
        )
        top = {
            names.COMMIT_SUCCESS: f"Checkpoint commit was successful to {self.target}".encode(),
            names.INDICATOR: checksums.INDICATOR,
        }
        digests = {name: Digest.of(content) for name, content in top.items()}
        said = metadata.encode()
        return {
            names.CHECKPOINT_METADATA: said,
            names.CHECKSUMS: checksums.encode(said, digests, listed),
            **top,
        }

    def _name_in_orbax(self, handler: type) -> str:
        """The name under which Orbax knows a type of handlers; its own if Orbax knows none."""
        shared = registries.global_registry()
        known = self._options.checkpointables.registry or shared
        others = [*known.get_secondary_typestrs(handler), *shared.get_secondary_typestrs(handler)]
        return next((name for name in others if name.startswith("orbax.")), type_name(handler))

    def _publish(self) -> None:
        if not self._overwrite or not is_checkpoint(self.target):
            commit.publish_new(self._attempt)
            return
        try:
            commit.swap(self._attempt)
        except Unsupported as error:
            raise Unsupported(
                f"this file system cannot swap '{self.target}' with a new checkpoint in one act; save to a "
                "new path, and delete the old one",
                path=self.target,
            ) from error
        commit.remove_replaced(self._attempt)


def _listed(planned: Planned, parts: Sequence[Part], made: Mapping[str, bytes]) -> checksums.Listed:
    """The files of a state: what processes have written, and what is made of that."""
    nodes = {name for name in made if planned.arrays.storage.use_ocdbt and write_ocdbt.is_data_file(name)}
    data = [file for part in parts for file in part.files]
    data += [checksums.SummedFile.of(name, made[name]) for name in sorted(nodes)]
    whole = {name: Digest.of(content) for name, content in made.items() if name not in nodes}
    return checksums.Listed(True, whole, data)


def _make_directory(path: str) -> None:
    """Makes a directory in the attempt, unless it is there."""
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
    except OSError as error:
        raise from_os_error(error, "create", path) from error
