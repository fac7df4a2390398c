"""Opening a checkpoint of any layout: what stands there, read once, for all processes of a load."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

from waystation import storage
from waystation._errors import CheckpointableNotFound, NotState
from waystation._options import CheckpointLayout, Options
from waystation.checkpoint.handlers.choice import METRICS, STATE, STATE_HANDLER
from waystation.checkpoint.orbax_reading import OrbaxReader
from waystation.checkpoint.paths import PathLike, require_checkpoint, resolved_or_none
from waystation.checkpoint.published import SafetensorsReader, refuse_other_than_model
from waystation.checkpoint.replaced import Held, Replaced, read_what_is_there
from waystation.checkpoint.stored import AUTO, LayoutReader, OpenCheckpoint, Stored
from waystation.layouts.native import commit, names
from waystation.layouts.native.read import MetadataFiles, decode_checkpointable, read_files
from waystation.layouts.native.records import PYTREE, CheckpointRecord, join_strings, split_strings
from waystation.layouts.opened import Opened

_log = logging.getLogger("waystation")


class NativeReader:
    """Reads the native layout.

    A checkpointable whose directory has been removed as a whole counts as not there, so that the others can
    be loaded; `verify` reports it. One that lacks a file is damaged.
    """

    def recognises(self, target: str, root: storage.Root | None = None) -> bool:
        """Whether the record of a checkpoint is there."""
        return storage.is_there(os.path.join(target, names.RECORD), root)

    def read(self, root: storage.Root, wanted: Sequence[str] | None, options: Options) -> bytes:
        """Reads the record, and the metadata files of what is wanted."""
        target = root.path
        content = commit.read_record_file(target, root)
        record = _decode_record(content, target)
        present = record.present(target, root)
        if len(present) < len(record.checkpointables) and not self._is_current(root, content):
            raise Replaced  # and what the record names was removed for that reason
        _check_removed(target, record, present, wanted)
        chosen = choose(present, wanted, target, lambda name: _is_state(root, record, name))
        parts = [content, join_strings([name.encode() for name in present])]
        for name in chosen:
            directory, digest = record.checkpointables[name]
            parts += [name.encode(), read_files(os.path.join(target, directory), digest, root).pack()]
        return join_strings(parts)

    def is_same(self, root: storage.Root, data: bytes) -> bool:
        """Whether the record in this directory is the one that was read."""
        head, *_ = split_strings(data)
        return commit.read_record_file(root.path, root) == head

    def _is_current(self, root: storage.Root, record: bytes) -> bool:
        """Whether the path still leads to this directory, and the directory still has this record."""
        return root.is_current() and commit.read_record_file(root.path, root) == record

    def decode(self, root: storage.Root, data: bytes, options: Options) -> OpenCheckpoint:
        """Makes sense of these."""
        head, present, *parts = split_strings(data)
        target = root.path
        record = _decode_record(head, target)
        stored = {}
        for name_bytes, packed in zip(parts[::2], parts[1::2], strict=True):
            name = name_bytes.decode()
            stored[name] = _stored(name, MetadataFiles.unpack(packed), root)
        return OpenCheckpoint(
            target,
            tuple(name.decode() for name in split_strings(present)),
            stored,
            record.custom_metadata,
            record.begun_ns,
            record.created_ns,
            names.FORMAT_VERSION,
            record.local,
        )


# The layouts of checkpoints, in the order in which they are tried.
READERS: dict[str, LayoutReader] = {"native": NativeReader(), "orbax": OrbaxReader()}
MODEL = "safetensors"
_MODELS = SafetensorsReader()


def _decode_record(content: bytes, target: str) -> CheckpointRecord:
    return CheckpointRecord.decode(content, os.path.join(target, names.RECORD))


def recognise(
    target: str,
    layout: CheckpointLayout = CheckpointLayout.ORBAX,
    root: storage.Root | None = None,
) -> str:
    """The layout of the checkpoint at a path, or in a directory: as `READERS` calls it, or `MODEL`.

    Args:
        target: The checkpoint.
        layout: Which layouts are meant.
        root: The directory, where it is held open.

    Raises:
        NotFound, InvalidInput: There is no checkpoint of these.
        Replaced: The directory that is held is none, and by now one is at the path.
    """
    found = None
    is_file = root is None and storage.is_file(target)  # beneath which a store may refuse to look
    if layout is not CheckpointLayout.SAFETENSORS and not is_file:
        found = next((name for name, reader in READERS.items() if reader.recognises(target, root)), None)
    if found is None and layout is not CheckpointLayout.ORBAX and _MODELS.recognises(target):
        return MODEL
    if layout is CheckpointLayout.SAFETENSORS:
        refuse_other_than_model(target)
    if found is None or storage.names.attempt_target(os.path.basename(target)) is not None:
        require_checkpoint(target)  # which tells best what is there instead
        if root is not None:
            raise Replaced  # a checkpoint has come to the path since the directory was opened
    return found or "native"


def read(held: Held, wanted: Sequence[str] | None, options: Options) -> bytes:
    """Reads what a load needs of a checkpoint, whatever its layout.

    Raises:
        NotFound, InvalidInput: There is no checkpoint.
        CheckpointableNotFound: It has no such checkpointable.
        Corrupt: Its metadata is damaged.
        Unsupported: It is of a newer format version.
    """
    layout = recognise(held.target, options.checkpoint_layout, held.root_if_directory)
    if layout == MODEL:
        return join_strings([layout.encode(), _MODELS.read(held.target, wanted)])
    found = READERS[layout].read(held.root, wanted, options)
    # What is in a checkpoint of Orbax's, a listing tells, also of one whose files are being deleted.
    if layout != "native" and not held.root.is_current():
        raise Replaced
    return join_strings([layout.encode(), found])


def is_same(held: Held, data: bytes) -> bool:
    """Whether `read` has read, in another process, the version of the checkpoint that is held."""
    layout, content = split_strings(data)
    if layout.decode() == MODEL:
        return True  # its files are compared one by one
    return READERS[layout.decode()].is_same(held.root, content)


def decode(held: Held, data: bytes, options: Options) -> OpenCheckpoint:
    """Makes sense of what `read` has read."""
    layout, content = split_strings(data)
    if layout.decode() == MODEL:
        return _MODELS.decode(held.target, content)
    return READERS[layout.decode()].decode(held.root, content, options)


def open_held(held: Held, wanted: Sequence[str] | None, options: Options) -> OpenCheckpoint:
    """Opens a checkpoint that is held, in one process."""
    return decode(held, read(held, wanted, options), options)


def open_checkpoint(target: str, wanted: Sequence[str] | None, options: Options) -> OpenCheckpoint:
    """Opens a checkpoint in one process. Whoever reads more than its metadata takes `read_what_is_there` and
    `open_held`, so as to begin again where the checkpoint was replaced meanwhile."""
    return read_what_is_there(target, options, lambda held: open_held(held, wanted, options))


def choose(
    present: Sequence[str], wanted: Sequence[str] | None, target: str, is_state: Callable[[str], bool]
) -> list[str]:
    """Which checkpointables are meant.

    Args:
        present: The names of all.
        wanted: As `LayoutReader.read` takes it.
        target: The checkpoint, for errors.
        is_state: Says of a name whether it is that of a state; asked only where `state` is not there.

    Raises:
        CheckpointableNotFound: There is none of that name, or no state.
    """
    if wanted is None:
        return sorted(name for name in present if name != METRICS)
    shown = ", ".join(sorted(present)) or "none"
    chosen = []
    for name in wanted:
        if name != AUTO and name not in present:
            raise CheckpointableNotFound(
                f"checkpoint '{target}' has no checkpointable '{name}'; it has: {shown}", path=target
            )
        candidates = [name] if name != AUTO else [STATE] if STATE in present else sorted(present)
        found = next((candidate for candidate in candidates if name != AUTO or is_state(candidate)), None)
        if found is None:
            raise CheckpointableNotFound(
                f"checkpoint '{target}' holds no state; it has: {shown}; these load_checkpointables loads",
                path=target,
            )
        chosen.append(found)
    return chosen


def require_state(stored: Stored, target: str) -> Opened:
    """The metadata of a checkpointable that has to be a state.

    Raises:
        NotState: It is something else.
    """
    if stored.state is None:
        raise NotState(
            f"checkpointable '{stored.name}' of '{target}' is no state: {stored.handler} has saved it, and "
            "loads it with load_checkpointables, where that is registered and can load what is asked for",
            path=target,
        )
    return stored.state


def _check_removed(
    target: str, record: CheckpointRecord, present: Sequence[str], wanted: Sequence[str] | None
) -> None:
    """Refuses to load what has been removed from a checkpoint; warns where the others are loaded."""
    removed = sorted(record.checkpointables.keys() - present)
    asked = {STATE if name == AUTO else name for name in wanted or ()}
    missing = [name for name in removed if name in asked]
    if missing:
        directory, _ = record.checkpointables[missing[0]]
        shown = ", ".join(present) or "none"
        raise CheckpointableNotFound(
            f"checkpoint '{target}' has no checkpointable '{missing[0]}' any more: its directory has been "
            f"removed; it has: {shown}",
            path=os.path.join(target, directory),
        )
    if removed and (wanted is None or AUTO in wanted):
        _log.warning(
            "checkpoint '%s': the directories of %s have been removed; the others are loaded",
            target,
            ", ".join(removed),
        )


def _is_state(root: storage.Root, record: CheckpointRecord, name: str) -> bool:
    if name == STATE:
        return True  # or an error says what it is
    directory, digest = record.checkpointables[name]
    files = read_files(os.path.join(root.path, directory), digest, root, record_only=True)
    return files.decode_record().kind == PYTREE


def _stored(name: str, files: MetadataFiles, root: storage.Root) -> Stored:
    own = files.decode_record()
    if own.kind == PYTREE:
        return Stored(name, STATE_HANDLER, files.directory, decode_checkpointable(files, root))
    return Stored(name, own.handler, own.files_directory(files.directory), None, own.files, root)


def is_orbax_checkpoint(path: PathLike) -> bool:
    """Whether a checkpoint is at a path that can be loaded: one of Orbax's layouts, or a native one.

    Programs ask this of what they have saved, so a checkpoint in the layout that saves write counts.
    """
    target = resolved_or_none(path)
    return (
        target is not None
        and storage.names.attempt_target(os.path.basename(target)) is None
        and any(reader.recognises(target) for reader in READERS.values())
    )
