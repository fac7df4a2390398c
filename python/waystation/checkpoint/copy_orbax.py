"""Copies of checkpoints in Orbax's layouts: all files of a directory, committed by the rule of its new place.

On a disk that is one rename, in a store `commit_success.txt`, which is written last (`orbax.in_store`). All
other files are copied as they are, whoever has written them. Those that Waystation has written are compared
with their checksums on the way; what Orbax itself has written has none, and only its lengths are compared.

What can go wrong is as for every copy, but for these: a copy that did not end begins from its beginning,
because nothing tells which of its files are whole. In a store nothing replaces a checkpoint of Orbax's.
Invariant: the source was one version from the first look to the commit. On a disk its directory is held open.
In a store every replacement begins with the removal of the file that commits, so that is looked at again.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from waystation import _native, storage
from waystation._errors import Corrupt, NotFound, Unsupported, WaystationError
from waystation._options import Options
from waystation.checkpoint.copy_targets import CopiedFile
from waystation.checkpoint.native_saving import publish
from waystation.checkpoint.paths import check_destination
from waystation.checkpoint.replaced import Held, Replaced
from waystation.layouts.native import commit
from waystation.layouts.native.write import SYNC_TOGETHER_BYTES
from waystation.layouts.orbax import checkpoint as orbax
from waystation.layouts.orbax import checksums, names
from waystation.layouts.orbax.checkpoint_metadata import CheckpointMetadata
from waystation.layouts.orbax.checksums import Checksums, FileChecksums
from waystation.layouts.orbax.in_store import OrbaxStoreAttempt, require_none_of_ours
from waystation.storage import attempts
from waystation.storage.attempts import Attempt
from waystation.storage.leases import without_marks

_LIMIT_BYTES = 256 << 20
_NOTHING_SAID = CheckpointMetadata().encode()
# Written when everything else is there.
_LAST = (names.CHECKPOINT_METADATA, names.CHECKSUMS, names.COMMIT_SUCCESS)


@dataclass(frozen=True, slots=True)
class Tree:
    """A checkpoint that is copied, as it was opened.

    Attributes:
        root: Its directory.
        files: What the engine copies; names are paths from there.
        last: The content of the files that are written last, by their names.
        committed: The version of the file that commits it in a store.
    """

    root: storage.Root
    files: Sequence[CopiedFile]
    last: Mapping[str, bytes]
    committed: storage.Identity | None

    def require_unchanged(self) -> None:
        """Has the copy begin again if another checkpoint has the place of this one by now.

        Raises:
            Replaced: It has.
        """
        if not self.root.is_current() or _committed(self.root) != self.committed:
            raise Replaced


def open_tree(held: Held) -> Tree:
    """Looks at all files of a checkpoint.

    Raises:
        Corrupt: Its metadata are damaged, or a file is missing.
        Replaced: It was replaced, or deleted, meanwhile.
        Unsupported: It is a part of a checkpoint, or something is being deleted from it.
    """
    root, target = held.root, held.target
    if orbax.is_checkpointable(target):
        raise Unsupported(
            f"'{target}' is a part of checkpoint '{os.path.dirname(target)}'; copy that, or load the part "
            "and save it",
            path=target,
        )
    committed = _committed(root)
    try:
        return _opened(root, target, committed)
    except WaystationError as error:
        if _committed(root) != committed:
            raise Replaced from error
        raise


def _opened(root: storage.Root, target: str, committed: storage.Identity | None) -> Tree:
    opened = orbax.open_checkpoint(target, root)
    if opened.deleting is not None:
        raise Unsupported(
            f"checkpointable '{opened.deleting}' of '{target}' is being deleted; delete it again to end "
            "that, and copy the checkpoint then",
            path=target,
        )
    if opened.checksums is None and checksums.is_removed(target, root):
        raise _missing(os.path.join(target, names.CHECKSUMS))
    sizes = _files_of(target, root)
    last = {
        name: storage.read_file(os.path.join(target, name), root, limit_bytes=_LIMIT_BYTES)
        for name in _LAST
        if name in sizes
    }
    vouched = _vouched(opened, sizes)
    files = [
        vouched.get(name) or CopiedFile(name, _joined(target, name), nbytes, None)
        for name, nbytes in sorted(sizes.items())
        if name not in last
    ]
    return Tree(root, files, last, committed)


def _committed(root: storage.Root) -> storage.Identity | None:
    if storage.of(root.path).renames is not None:
        return None
    # Not by the root, which has read other things before.
    found = storage.status(os.path.join(root.path, names.COMMIT_SUCCESS))
    return None if found is None else found.identity


def _files_of(target: str, root: storage.Root | None = None) -> dict[str, int]:
    """The lengths of the files of a checkpoint by their paths from there, without what readers and writers
    have there for a while."""
    found = storage.files_below(target, root)
    tops = {name.split("/", 1)[0] for name in found}
    own = {name for name in without_marks(sorted(tops)) if storage.names.attempt_id(name) is None}
    return {name: nbytes for name, nbytes in found.items() if name.split("/", 1)[0] in own}


def _vouched(opened: orbax.OrbaxCheckpoint, sizes: Mapping[str, int]) -> dict[str, CopiedFile]:
    """The files that have checksums, by their paths from the checkpoint.

    Raises:
        Corrupt: One is missing, or has another length; or what vouches for them is damaged.
    """
    found: dict[str, CopiedFile] = {}
    if opened.checksums is None:
        return found
    handlers = opened.metadata.item_handlers
    tops = {name.split("/", 1)[0] for name in sizes}
    for name in opened.checksums.checkpointables:
        if name and name not in tops:
            if isinstance(handlers, dict) and name in handlers:
                raise _missing(os.path.join(opened.path, name))
            continue  # it was deleted
        own = opened.checksums.of(os.path.join(opened.path, name) if name else opened.path)
        if own is not None:
            found.update(_files_with_sums(own, f"{name}/" if name else ""))
    for name, digest in opened.checksums.top.items():
        if name not in _LAST:
            path = os.path.join(opened.path, name)
            found[name] = CopiedFile(name, path, digest.nbytes, None, digest)
    for name, file in found.items():
        if name not in sizes:
            raise _missing(file.source)
        if sizes[name] != file.nbytes:
            raise Corrupt(
                f"'{file.source}' has {sizes[name]} bytes where {file.nbytes} were written", path=file.source
            )
    return found


def _missing(path: str) -> Corrupt:
    return Corrupt(f"a committed file is missing: '{path}'", path=path)


def _files_with_sums(own: FileChecksums, prefix: str) -> Iterator[tuple[str, CopiedFile]]:
    for name, digest in own.whole.items():
        path = _joined(own.directory, name)
        yield prefix + name, CopiedFile(prefix + name, path, digest.nbytes, None, digest)
    data = [(_joined(own.directory, name), nbytes) for name, nbytes in own.data.items()]
    for name, (path, nbytes), blocks in zip(own.data, data, own.blocks(data), strict=True):
        yield prefix + name, CopiedFile(prefix + name, path, nbytes, memoryview(blocks))


def _joined(directory: str, name: str) -> str:
    return os.path.join(directory, *name.split("/"))


def same(first: str, second: str) -> bool:
    """Whether two checkpoints of Orbax's have the same contents, by what tells of them: their metadata, the
    names and lengths of their files, and their checksums where both have any. Data are not read.

    Raises:
        Corrupt: The metadata of the first are damaged.
    """
    own = _told_of(first)
    try:
        return own == _told_of(second)
    except (Corrupt, NotFound, Unsupported):
        return False


def _told_of(path: str) -> object:
    sizes = _files_of(path)
    metadata = None
    if names.CHECKPOINT_METADATA in sizes:
        file = os.path.join(path, names.CHECKPOINT_METADATA)
        metadata = storage.read_file(file, limit_bytes=_LIMIT_BYTES)
    found = Checksums.read(path)
    if metadata in (None, _NOTHING_SAID):
        metadata = b""
    return (
        metadata,
        {name: nbytes for name, nbytes in sizes.items() if name not in _LAST},
        None if found is None else found.contents(),
    )


# ---- the destination ---------------------------------------------------------------------------


class TreeTarget:
    """A copy that is not visible yet: on a disk in a directory beside its place, in a store in its place.

    Args:
        target: The path.
        tree: What is copied.
        options: How.
        overwrite: Whether a checkpoint is replaced that is there.

    Attributes:
        path: The directory that the files are written to.
        group: Gets what is not durable yet; None where everything is durable once it is written.

    Raises:
        Conflict, Unsupported: Something is there.
    """

    def __init__(self, target: str, tree: Tree, options: Options, *, overwrite: bool) -> None:
        check_destination(target, overwrite=overwrite)
        self._tree = tree
        self._overwrite = overwrite
        self._on_disk: Attempt | None = None
        self._in_store: OrbaxStoreAttempt | None = None
        self._sync: _native.SyncGroup | None = None
        self.group: _native.SyncGroup | None = None
        if storage.of(target).renames is None:
            if overwrite:
                require_none_of_ours(target)
            self._in_store = OrbaxStoreAttempt(target, _claim())
            self.path: str = self._in_store.path
            return
        attempts.remove_dead(*os.path.split(target))
        self._on_disk = Attempt(target, options.file.path_permission_mode)
        self.path = self._on_disk.path
        try:
            self._sync = _native.SyncGroup(self.path)
            for directory in self._directories():
                storage.make_directory(directory, parents=True)
        except BaseException:
            self.discard()
            raise
        if sum(file.nbytes for file in tree.files) <= SYNC_TOGETHER_BYTES:
            self.group = self._sync

    def _directories(self) -> list[str]:
        """Those of all files, in which each comes after the one that it is in."""
        found = set()
        for file in self._tree.files:
            above = os.path.dirname(file.name)
            while above:
                found.add(os.path.join(self.path, above))
                above = os.path.dirname(above)
        return sorted(found)

    def lacking(self) -> list[tuple[str, CopiedFile]]:
        """All files, with the paths that they are to have."""
        return [(_joined(self.path, file.name), file) for file in self._tree.files]

    def commit(self) -> None:
        """Makes the copy visible. All its files are there."""
        last = {os.path.join(self.path, name): content for name, content in self._tree.last.items()}
        if self._in_store is not None:
            self._commit_in_store(self._in_store, last)
        else:
            assert self._on_disk is not None, "a copy is on a disk or in a store"
            self._commit_on_disk(self._on_disk, last)

    def _commit_on_disk(self, attempt: Attempt, last: Mapping[str, bytes]) -> None:
        assert self._sync is not None, "it is made with the attempt"
        _native.write_small_files(list(last.items()), group=self._sync)
        attempt.seal()
        self._sync.add([*self._directories(), self.path])
        self._sync.sync()
        self._tree.require_unchanged()
        publish(attempt, _replace if self._overwrite else None)
        self._sync.close()

    def _commit_in_store(self, attempt: OrbaxStoreAttempt, last: Mapping[str, bytes]) -> None:
        # It tells this attempt from others, and what vouches for all files vouches for it, too.
        committed = f"Checkpoint commit was successful to {attempt.path} {attempt.id}".encode()
        sums = os.path.join(self.path, names.CHECKSUMS)
        said = {
            path: content for path, content in last.items() if os.path.basename(path) != names.COMMIT_SUCCESS
        }
        if sums in said:
            said[sums] = checksums.with_commit_file(said[sums], committed, sums)
        # Without metadata of its own, the copy has empty ones: as Orbax takes those that are missing.
        said.setdefault(os.path.join(self.path, names.CHECKPOINT_METADATA), _NOTHING_SAID)
        attempt.write_last(list(said.items()))
        self._tree.require_unchanged()
        attempt.publish(committed)

    def discard(self) -> None:
        """Ends without a commit, and removes what is there."""
        if self._sync is not None:
            self._sync.close()
        for attempt in (self._on_disk, self._in_store):
            if attempt is not None:
                attempt.discard()


def _claim() -> bytes:
    """The first content of the file by which writers exclude each other: no two have the same."""
    return CheckpointMetadata(custom_metadata={"copied by": secrets.token_hex(16)}).encode()


def _replace(attempt: Attempt) -> None:
    commit.swap_and_remove(attempt, "copy")
