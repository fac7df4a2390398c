"""A checkpoint of Orbax's: how one is recognised, and what is in it.

Version 1 has a directory for each checkpointable, and in what its free functions save an empty file
`orbax.checkpoint`. Step directories and what version 0 saved lack that file. Version 0 could also save a tree
to the directory of the checkpoint itself (*flat*). `_CHECKPOINT_METADATA` may be missing. Invariants: a
directory whose name says that it is unfinished is no checkpoint; nothing is read but small files of metadata.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from waystation import storage
from waystation._errors import (
    CheckpointableNotFound,
    DeletionInProgressError,
    InvalidLayoutError,
    PermissionDenied,
)
from waystation.layouts.orbax import deletion, names
from waystation.layouts.orbax.checkpoint_metadata import CheckpointMetadata
from waystation.layouts.orbax.checksums import Checksums, FileChecksums, is_removed

STATE = "state"  # what a load means by default; the tree of a flat checkpoint is called so, too
_MARKERS = (names.INDICATOR, names.CHECKPOINT_METADATA, names.TREE_METADATA)
_LIMIT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Item:
    """A checkpointable.

    Attributes:
        directory: Where it is.
        handler: The class of the handler that wrote it, if the checkpoint says so.
        is_tree: Whether it is a tree in Orbax's own files.
    """

    directory: str
    handler: str | None
    is_tree: bool


@dataclass(frozen=True, slots=True)
class OrbaxCheckpoint:
    """What is in a checkpoint.

    Attributes:
        path: Where it is.
        items: Its checkpointables by name.
        metadata: What it says of itself.
        deleting: The checkpointable whose deletion has begun, which is not among the items.
        checksums: What vouches for its files; None where Orbax has written it.
    """

    path: str
    items: Mapping[str, Item]
    metadata: CheckpointMetadata
    deleting: str | None = None
    checksums: Checksums | None = None

    def item(self, name: str) -> Item:
        """The checkpointable of a name.

        Raises:
            CheckpointableNotFound: There is none.
            DeletionInProgressError: It is being deleted.
        """
        if name == self.deleting:
            raise DeletionInProgressError(
                f"checkpointable '{name}' of '{self.path}' is being deleted; delete it again to end that",
                path=self.path,
            )
        if name not in self.items:
            raise CheckpointableNotFound(
                f"checkpoint '{self.path}' has no checkpointable '{name}'; it has: {_shown(self.items)}",
                path=self.path,
            )
        return self.items[name]

    def checksums_of(self, name: str) -> FileChecksums | None:
        """What vouches for the files of one of the items; None where Orbax has written it.

        Raises:
            Corrupt: The file of checksums is damaged.
        """
        return None if self.checksums is None else self.checksums.of(self.items[name].directory)

    def default_tree(self) -> str:
        """The name of the tree that is meant where none is said: `state`, or else the first of all trees.

        Raises:
            CheckpointableNotFound: There is no tree.
        """
        trees = sorted(name for name, item in self.items.items() if item.is_tree)
        if not trees:
            raise CheckpointableNotFound(
                f"checkpoint '{self.path}' holds no state; it has: {_shown(self.items)}", path=self.path
            )
        return STATE if STATE in trees else trees[0]


def _shown(items: Mapping[str, Item]) -> str:
    return ", ".join(sorted(items)) or "none"


def is_checkpoint(path: str, root: storage.Root | None = None) -> bool:
    """Whether a checkpoint of Orbax's is at a path (beneath `root`), by what is there; nothing of it is
    verified."""
    if names.is_temporary(os.path.basename(path)) or not _may_be_committed(path, root):
        return False
    if any(_has(path, marker, root) for marker in _MARKERS):
        return True
    return any(_is_part(directory, root) for directory in _below(path, root))


def _is_part(directory: str, root: storage.Root | None) -> bool:
    """Whether a directory is a checkpointable, and no checkpoint itself. One that must not be looked into, as
    `lost+found`, makes none of what it is in."""
    try:
        return _has(directory, names.TREE_METADATA, root) and not _is_own(directory, root)
    except PermissionDenied:
        return False


def _may_be_committed(path: str, root: storage.Root | None) -> bool:
    """Whether a directory, or the checkpoint that it is a part of, has the file that commits it, where
    nothing else does: in a store it cannot be renamed."""
    found = storage.of(path)
    return found.renames is not None or not found.is_listable or has_commit_file(path, root)


def has_commit_file(path: str, root: storage.Root | None = None) -> bool:
    """Whether a directory, or the checkpoint that it is a part of, has the file that Orbax writes last of a
    save that it does not rename."""
    return _has(path, names.COMMIT_SUCCESS, root) or _has(os.path.dirname(path), names.COMMIT_SUCCESS)


def is_checkpointable(path: str) -> bool:
    """Whether a path is that of a part of a checkpoint."""
    whole = os.path.dirname(path)
    return _is_own(whole) or _has(whole, names.DELETION)


def _is_own(directory: str, root: storage.Root | None = None) -> bool:
    """Whether a directory is a checkpoint itself, not a checkpointable of one."""
    return _has(directory, names.CHECKPOINT_METADATA, root) or _has(directory, names.INDICATOR, root)


def had_checksums(path: str) -> bool:
    """Whether a checkpoint was saved with a file of checksums, as those are that Waystation has written."""
    return _has(path, names.CHECKSUMS) or is_removed(path)


def open_checkpoint(path: str, root: storage.Root | None = None) -> OrbaxCheckpoint:
    """Looks at a checkpoint (beneath `root`).

    Raises:
        InvalidLayoutError: There is none of Orbax's.
        Corrupt: What it says of itself makes no sense, or is not what was saved.
        DeletionRecoveryError: Nor does what it says of a deletion that has begun.
    """
    if not is_checkpoint(path, root):
        raise InvalidLayoutError(f"'{path}' is not a checkpoint of Orbax", path=path)
    checksums = Checksums.read(path, root)
    metadata = _read_metadata(path, checksums, root)
    if isinstance(metadata.item_handlers, str) or _has(path, names.TREE_METADATA, root):
        handler = metadata.item_handlers if isinstance(metadata.item_handlers, str) else None
        # It may be a part of a checkpoint that Waystation has written, which vouches for it.
        if checksums is None:
            checksums = Checksums.read(os.path.dirname(path), root)
            # What a handler has written there has been verified as a whole, by who called the handler.
            if checksums is not None and not checksums.is_tree(os.path.basename(path)):
                checksums = None
        elif "" not in checksums.checkpointables:  # it is of another checkpoint, which was here before
            checksums = None
        item = Item(path, handler, is_tree=_has(path, names.TREE_METADATA, root))
        return OrbaxCheckpoint(path, {STATE: item}, metadata, None, checksums)
    record = deletion.read_record(path, root)
    deleting = None if record is None else record.checkpointable_name
    items = {
        name: Item(directory, metadata.handler_of(name), _is_tree(directory, name, checksums, root))
        for directory in _below(path, root)
        for name in (os.path.basename(directory),)
        if name not in names.RESERVED and name != deleting
    }
    return OrbaxCheckpoint(path, items, metadata, deleting, checksums)


def read_identity(path: str, root: storage.Root) -> bytes:
    """What tells one version of a checkpoint from another: what it says of itself, which has the times of its
    save; nothing where it says nothing."""
    return _read(os.path.join(path, names.CHECKPOINT_METADATA), root) or b""


def _is_tree(directory: str, name: str, checksums: Checksums | None, root: storage.Root | None) -> bool:
    """Whether a checkpointable is a tree: what the save has said of it, or else its files. A handler may give
    any name to a file of its own."""
    if checksums is not None and name in checksums.checkpointables:
        return checksums.is_tree(name)
    return _has(directory, names.TREE_METADATA, root)


def _read_metadata(path: str, checksums: Checksums | None, root: storage.Root | None) -> CheckpointMetadata:
    file = os.path.join(path, names.CHECKPOINT_METADATA)
    content = _read(file, root)
    if checksums is not None:
        checksums.check_metadata(content, file)
    # Orbax does not sync this file, and finds empty ones.
    if not content:
        return CheckpointMetadata()
    return CheckpointMetadata.decode(content, file)


def _read(path: str, root: storage.Root | None) -> bytes | None:
    if not storage.is_there(path, root):
        return None
    return storage.read_file(path, root, limit_bytes=_LIMIT_BYTES)


def _has(directory: str, name: str, root: storage.Root | None = None) -> bool:
    found = storage.status(os.path.join(directory, name), root, follow_links=False)
    # A directory called `orbax.checkpoint` is a user's own, such as one that holds the checkpoints of a run.
    return found is not None and not (name == names.INDICATOR and found.kind == "directory")


def _below(path: str, root: storage.Root | None = None) -> Sequence[str]:
    """The directories below a path that could be checkpointables; behind HTTP nothing tells of any."""
    if not storage.of(path).is_listable:
        return []
    return [
        os.path.join(path, name)
        for name in storage.directories(path, root)
        if not names.is_temporary(name) and not name.startswith(".")
    ]
