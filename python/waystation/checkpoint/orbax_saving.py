"""One save in one of Orbax's layouts, which Orbax loads as if it had written it.

The stages are those of `saving`; here is what these layouts decide: how states are cut and planned, what is
written of them, and which files make all of it a checkpoint. It is made in an attempt and becomes visible by
one rename, as every checkpoint of ours, although Orbax itself would write some of these files afterwards and
make few of them durable. Handlers write their files into the directories of their checkpointables.

Invariants: what the layout cannot hold is refused before anything is written; no two processes write to one
file; every file and directory is durable before the rename.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from waystation import _native, storage
from waystation._collection import paused_collection
from waystation._errors import InvalidInput, Unsupported
from waystation._options import Options
from waystation.checkpoint import cast, prepare, state_parts
from waystation.checkpoint.handlers import registry as registries
from waystation.checkpoint.handlers.registry import CheckpointableHandlerRegistry, Remembered, Remembering
from waystation.checkpoint.handlers.types import type_name
from waystation.checkpoint.native_saving import Writing, check_no_file
from waystation.checkpoint.prepare import Described
from waystation.checkpoint.saving import Ranges, Save
from waystation.checkpoint.snapshot import divided_with_frames
from waystation.frameworks import dtypes
from waystation.frameworks.base import ArraySource
from waystation.layouts.native import commit, handler_files
from waystation.layouts.native.chunks import Chunk
from waystation.layouts.native.records import Digest, LocalPart
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
from waystation.layouts.orbax.in_store import OrbaxStoreAttempt, require_none_of_ours
from waystation.layouts.orbax.write_data import Prepared
from waystation.layouts.orbax.write_parts import Part, check_complete
from waystation.storage.attempts import Attempt


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


class OrbaxLayout:
    """One of Orbax's layouts; a `FileLayout`."""

    def __init__(self) -> None:
        self._limits = FrameLimits()
        self._cut: dict[str, Taken] = {}
        self._planned: dict[str, Planned] = {}
        self._written: Sequence[Part] = ()  # by a program of one process
        self._places: dict[str, str] = {}  # of the checkpointables, from the directory of the checkpoint

    def check(self, save: Save, checkpointables: Collection[str]) -> None:
        """Refuses storage of each process's own, and the names of files of the layout."""
        if save.writer.is_local:
            raise Unsupported(
                "Orbax's layouts are written to storage that all processes share; set "
                "multiprocessing.primary_host to a process, or array.saving.use_ocdbt to None"
            )
        check_no_file(checkpointables)
        self._places = {name: save.place_of(name) for name in checkpointables}
        for name in checkpointables:
            if name in names.FILES or names.is_temporary(name):
                raise InvalidInput(
                    f"'{name}' cannot be the name of a checkpointable: Orbax's layout has such files"
                )

    def bounded(self, options: Options) -> Options:
        """The options, with half of the bound where the other is for what is compressed."""
        bound = options.memory.write_limit_bytes()
        if options.array.saving.use_compression and bound is not None:
            options, self._limits = divided_with_frames(options, bound)
        return options

    @paused_collection()
    def cut(self, name: str, described: Described, save: Save) -> Taken:
        """See `Layout`."""
        saving = save.options.array.saving
        described.expand()
        leaves = write_tree.leaves_of(described.structure, described.leaves, described.sources)
        wanted = cast.wanted_dtypes(leaves.arrays, leaves.names, saving)
        sizes = {number: dtypes.of_name(dtype).host.itemsize for number, dtype in wanted.items()}
        arrays = write_plan.cut(leaves.names, leaves.arrays, saving, save.writer, sizes, self._limits)
        chunks = [value.chunk for value in arrays.values]
        for source in leaves.arrays:
            source.blocks = []  # what others write may be changed or freed at once
        cast.apply(chunks, leaves.arrays, leaves.names, wanted, cast.rule_of(saving))
        arrays.describe()
        write_plan.check_paths(arrays)
        taken = self._cut[name] = Taken(leaves, arrays, chunks, leaves.arrays, wanted)
        return taken

    def fingerprint(self, name: str) -> list[str]:
        """See `Layout`. Processes that cut arrays into other chunks would not write the same ones."""
        taken = self._cut[name]
        labels, arrays = taken.leaves.names, taken.arrays
        return [
            *prepare.fingerprint_of_casts(name, labels, taken.cast),
            *(
                f"checkpointable '{name}', {label}: in chunks of shape {cut.grid.chunk_shape}"
                for label, cut in zip(labels, arrays.cuts, strict=True)
            ),
            f"checkpointable '{name}': stored as {arrays.storage}",
            f"chunks of up to {self._limits.chunk_bytes} bytes",
        ]

    @paused_collection()
    def plan(self, save: Save, waited_for: Ranges) -> None:
        """See `Layout`."""
        for name, taken in self._cut.items():
            arrays, ranges = taken.arrays, list(waited_for.get(name, []))
            planned, positions = None, []
            if arrays.storage.level is None:
                planned = write_plan.plan(arrays, save.writer.process)
                positions = planned.positions_of(ranges, arrays.values)
            self._planned[name] = Planned(
                self._places[name], arrays, planned, positions, bool(ranges), taken.leaves
            )

    def release(self) -> None:
        """See `Layout`."""
        self._cut, self._planned = {}, {}

    def directories(self) -> list[str]:
        """One for each state, and those of its arrays."""
        return [
            os.path.join(planned.name, own)
            for planned in self._planned.values()
            for own in ("", *planned.arrays.directories())
        ]

    def write(self, save: Save, writing: Writing) -> bytes:
        """See `FileLayout`."""
        is_alone = save.writer.process_count == 1
        observer = Observer(writing.progress.add, writing.on_copied_out, {}, writing.heartbeat, is_alone)
        if writing.group is not None:
            self._make_own_directories(save, writing.path, writing.group)
        parts = write_data.write(
            writing.path,
            list(self._planned.values()),
            save.writer.process,
            save.options,
            self._limits,
            observer,
            lambda: writing.progress.cancelled,
            writing.group,
        )
        if is_alone:
            self._written = parts
            return b""
        return state_parts.write(writing.path, self._state_places(), parts, save.writer.process)

    def _state_places(self) -> list[str]:
        return [planned.name for planned in self._planned.values()]

    def _make_own_directories(self, save: Save, path: str, group: _native.SyncGroup) -> None:
        """Makes the directories of this process's part of databases."""
        for planned in self._planned.values():
            if not planned.arrays.storage.use_ocdbt or not planned.arrays.values:
                continue
            own = os.path.join(path, planned.name, names.ocdbt_process(save.writer.process))
            directory = os.path.join(own, "d")
            storage.make_directory(own)
            storage.make_directory(directory)
            group.add([directory, own])

    def complete(
        self,
        save: Save,
        attempt: Attempt,
        group: _native.SyncGroup,
        told: Sequence[bytes],
        local: LocalPart | None = None,
    ) -> None:
        """See `FileLayout`."""
        assert local is None, "it was refused before"
        path, states = attempt.path, list(self._planned.values())
        places = map(save.place_of, save.handlers)
        owner = {os.path.join(path, storage.names.OWNER)}
        handled = {
            place: _listed_of_handler(os.path.join(path, place) if place else path, owner) for place in places
        }
        files = self._metadata_files(save, path, told, handled)
        present = {
            os.path.join(path, planned.name, own)
            for planned in states
            for own in planned.arrays.directories()
        }
        directories = {os.path.dirname(file) for file in files} - present
        for directory in sorted(directories):
            storage.make_directory(directory)
        _native.write_small_files(list(files.items()), group=group)
        attempt.seal()
        named = [os.path.join(path, self._places[name]) for name in (*self._planned, *save.handlers)]
        group.add(list({*map(os.path.normpath, (*present, *directories, *named)), path}))
        group.sync()

    def begin_in_store(self, save: Save, *, overwrite: bool) -> OrbaxStoreAttempt:
        """See `StoreLayout`."""
        if overwrite:
            require_none_of_ours(save.target)
        metadata = CheckpointMetadata(init_timestamp_nsecs=save.begun_ns)
        return OrbaxStoreAttempt(save.target, metadata.encode())

    def files_in_store(self, attempt_path: str, name: str) -> str:
        """See `StoreLayout`."""
        return os.path.join(attempt_path, self._places[name])

    def publish_in_store(
        self,
        save: Save,
        attempt: OrbaxStoreAttempt,
        told: Sequence[bytes],
        made: Mapping[str, Mapping[str, Digest]],
        check: Callable[[], None],
    ) -> None:
        """See `StoreLayout`."""
        handled = {self._places[name]: checksums.Listed(False, dict(files)) for name, files in made.items()}
        files = self._metadata_files(save, attempt.path, told, handled, attempt.id)
        committed = files.pop(os.path.join(attempt.path, names.COMMIT_SUCCESS))
        attempt.write_last(list(files.items()))
        check()
        attempt.publish(committed)

    def _metadata_files(
        self,
        save: Save,
        path: str,
        told: Sequence[bytes],
        handled: Mapping[str, checksums.Listed],
        attempt_id: str = "",
    ) -> dict[str, bytes]:
        """What is written last of the checkpoint at a path: what its files of data mean, and what vouches for
        all files. The file that commits names the attempt, where that tells it from others."""
        files: dict[str, bytes] = {}
        listed = dict(handled)
        for planned, own, made in self._tree_files(save, path, told):
            files |= {os.path.join(path, planned.name, file): content for file, content in made.items()}
            listed[planned.name] = _listed(planned, own, made)
        of_all = self._files_of_all(save, listed, attempt_id)
        return files | {os.path.join(path, file): content for file, content in of_all.items()}

    def _tree_files(
        self, save: Save, path: str, told: Sequence[bytes]
    ) -> Iterator[tuple[Planned, Sequence[Part], dict[str, bytes]]]:
        """Of each state what the processes have written, and the files that make that a tree."""
        parts = [[part] for part in self._written]
        if save.writer.process_count > 1:
            parts = state_parts.collect(path, self._state_places(), told, Part.decode)
        for (name, planned), own in zip(self._planned.items(), parts, strict=True):
            check_complete(own, planned.arrays)
            yield planned, own, _files_of(save, planned, own, name)

    def complete_tree(self, save: Save, path: str, told: Sequence[bytes]) -> None:
        """Makes what has been written to a directory a tree, durably; it is no checkpoint of its own."""
        files = {
            os.path.join(path, planned.name, file): content
            for planned, _, made in self._tree_files(save, path, told)
            for file, content in made.items()
        }
        for directory in sorted({os.path.dirname(file) for file in files}):
            storage.make_directory(directory, parents=True)
        _native.write_small_files(list(files.items()))

    def _files_of_all(
        self, save: Save, listed: Mapping[str, checksums.Listed], attempt_id: str
    ) -> dict[str, bytes]:
        """The files of the checkpoint itself, of which one vouches for all others."""
        handlers = dict.fromkeys(self._planned, PYTREE_HANDLER)
        registry = save.options.checkpointables.registry
        handlers |= {name: _name_in_orbax(type(handler), registry) for name, handler in save.handlers.items()}
        for name in handlers:
            remembered = _remembered(save, name)
            if remembered is not None:
                handlers[name] = remembered.handler
        metadata = CheckpointMetadata(
            next(iter(handlers.values())) if save.is_flat else handlers,
            init_timestamp_nsecs=save.begun_ns,
            commit_timestamp_nsecs=time.time_ns(),
            custom_metadata=save.custom_metadata or {},
        )
        committed = f"Checkpoint commit was successful to {save.target} {attempt_id}".rstrip()
        top = {
            names.COMMIT_SUCCESS: committed.encode(),
            names.INDICATOR: checksums.INDICATOR,
        }
        digests = {name: Digest.of(content) for name, content in top.items()}
        said = metadata.encode()
        return {
            names.CHECKPOINT_METADATA: said,
            names.CHECKSUMS: checksums.encode(said, digests, listed),
            **top,
        }

    def replace(self, attempt: Attempt) -> None:
        """See `FileLayout`."""
        commit.swap_and_remove(attempt, "save")


def _remembered(save: Save, name: str) -> Remembered | None:
    registry = save.options.checkpointables.registry
    return registry.remembered(name) if isinstance(registry, Remembering) else None


def _files_of(save: Save, planned: Planned, parts: Sequence[Part], name: str) -> dict[str, bytes]:
    remembered = _remembered(save, name)
    return write_metadata.of_state(
        planned.leaves,
        planned.arrays,
        parts,
        save.writer.primary,
        time.time_ns(),
        with_shardings=save.options.array.saving.enable_write_sharding_file,
        with_rich_types=save.options.pytree.saving.pytree_metadata_options.support_rich_types,
        custom_metadata=None if remembered is None else remembered.custom_metadata,
    )


def _listed_of_handler(directory: str, without: Collection[str]) -> checksums.Listed:
    """The files that the handler of a checkpointable has written."""
    # In a flat checkpoint the owner of the attempt stands beside them.
    below = [file for file in handler_files.below(directory) if file not in without]
    return checksums.Listed(
        False, {os.path.relpath(file, directory): handler_files.digest(file) for file in below}
    )


def _name_in_orbax(handler: type, registry: CheckpointableHandlerRegistry | None) -> str:
    """The name under which Orbax knows a type of handlers; its own if Orbax knows none."""
    shared = registries.global_registry()
    known = registry or shared
    others = [*known.get_secondary_typestrs(handler), *shared.get_secondary_typestrs(handler)]
    return next((name for name in others if name.startswith("orbax.")), type_name(handler))


def _listed(planned: Planned, parts: Sequence[Part], made: Mapping[str, bytes]) -> checksums.Listed:
    """The files of a state: what processes have written, and what is made of that."""
    nodes = {name for name in made if planned.arrays.storage.use_ocdbt and write_ocdbt.is_data_file(name)}
    data = [file for part in parts for file in part.files]
    data += [checksums.SummedFile.of(name, made[name]) for name in sorted(nodes)]
    whole = {name: Digest.of(content) for name, content in made.items() if name not in nodes}
    return checksums.Listed(True, whole, data)
