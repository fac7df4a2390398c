"""Files that a handler makes of a checkpointable: found, made durable, vouched for, and verified again.

The layout knows nothing of what is in them. Invariants: only plain files and directories below the directory
that the handler was given are ever taken; each file is vouched for by the digest of its whole content; what
is not vouched for (a file that came later) is neither verified nor removed. A file is digested through a
mapping, so that its size does not matter to memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from waystation import _native, storage
from waystation._errors import Corrupt, NotFound, Unsupported
from waystation.layouts.native import names
from waystation.layouts.native.records import CheckpointableRecord, Digest


@dataclass(frozen=True, slots=True)
class HandlerFiles:
    """A checkpointable that consists of files that a handler made.

    Attributes:
        directory: Where they are.
        record: Its record.
        root: The directory beneath which they are opened; without it, they are by their paths.
    """

    directory: str
    record: CheckpointableRecord
    root: storage.Root | None = None

    def paths(self) -> list[tuple[str, Digest]]:
        """Where each file is, and what vouches for it."""
        return [
            (os.path.join(self.directory, *name.split("/")), expected)
            for name, expected in self.record.files.items()
        ]

    def strays(self) -> list[str]:
        """Files in the directory that the record does not name."""
        if not storage.is_there(self.directory, self.root):
            return []
        files = listed(self.directory, self.root)
        return [path for name, path in files.items() if name not in self.record.files]


_ADVICE = "restore another checkpoint, or see 'waystation verify'"


def listed(directory: str, root: storage.Root | None = None) -> dict[str, str]:
    """The files below a directory (beneath `root`): their paths from there, divided by slashes, to where they
    are. The record that vouches for them is none of them.

    Raises:
        Unsupported: There is something that cannot be vouched for: a symbolic link, a device, a name that
            is no text.
    """
    walked = _walked(directory, root)
    files = {_name(path, directory): path for path, is_directory in walked if not is_directory}
    files.pop(names.HANDLED_RECORD, None)
    return files


def below(directory: str) -> list[str]:
    """The paths of the files below a directory, whatever their names.

    Raises:
        Unsupported: There is something that cannot be vouched for, as for `listed`, but for names.
    """
    return [path for path, is_directory in _walked(directory) if not is_directory]


def to_sync(directory: str) -> list[str]:
    """All that has to be made durable for the files below a directory to be so: they and the directories."""
    return [*(path for path, _ in _walked(directory)), directory]


def sync_present(directory: str) -> None:
    """Makes what is below a directory durable, while others may still write, rename and remove there. What
    whoever calls this has written is among it."""
    for path in [path for path, _ in _walked(directory, may_vanish=True)]:
        with contextlib.suppress(NotFound):
            _native.sync_paths([path])
    _native.sync_paths([directory])


def digests(directory: str, root: storage.Root | None = None) -> dict[str, Digest]:
    """What vouches for the files below a directory (beneath `root`)."""
    return {name: digest(path, root) for name, path in sorted(listed(directory, root).items())}


def digest(path: str, root: storage.Root | None = None) -> Digest:
    """The digest of a whole file."""
    with storage.opened(path, root) as file:
        return _digest(file)


def _digest(file: storage.OpenFile) -> Digest:
    if file.status.nbytes == 0:
        return Digest.of(b"")
    with storage.mapped(file) as content:
        return Digest(len(content), _native.crc64(content))


def verify(
    directory: str,
    expected: Mapping[str, Digest],
    files: Iterable[str] | None = None,
    root: storage.Root | None = None,
) -> None:
    """Compares files with what vouches for them.

    Args:
        directory: Where they are.
        expected: What vouches for all.
        files: Those to look at; by default all.
        root: The directory beneath which they are opened.

    Raises:
        Corrupt: A file is missing, or is not the one that was committed.
    """
    for name in expected if files is None else files:
        check(os.path.join(directory, *name.split("/")), expected[name], root)


def check(path: str, expected: Digest, root: storage.Root | None = None) -> None:
    """Compares a file (opened beneath `root`) with what vouches for it.

    Raises:
        Corrupt: It is missing, or is not the one that was committed.
    """
    status = storage.status(path, root)
    if status is None:
        raise Corrupt(f"a committed file is missing: '{path}'; {_ADVICE}", path=path)
    if status.kind != "file":
        raise Corrupt(f"'{path}' is no regular file, as was committed; {_ADVICE}", path=path)
    with storage.opened(path, root) as file:
        nbytes = file.status.nbytes
        if nbytes != expected.nbytes:
            raise Corrupt(
                f"'{path}' has {nbytes} bytes where {expected.nbytes} were written; {_ADVICE}", path=path
            )
        found = _digest(file)
    if found != expected:
        raise Corrupt(
            f"'{path}' is not the file that was committed: its checksum differs; {_ADVICE}", path=path
        )


def _walked(
    directory: str, root: storage.Root | None = None, *, may_vanish: bool = False
) -> Iterator[tuple[str, bool]]:
    """Paths below a directory, each directory after what is in it; and whether each is a directory."""
    try:
        entries = storage.entries(directory, root)
    except NotFound:
        if may_vanish:
            return
        raise
    for entry in entries:
        path = os.path.join(directory, entry.name)
        if entry.kind == "directory":
            yield from _walked(path, root, may_vanish=may_vanish)
            yield path, True
        elif entry.kind == "file":
            yield path, False
        else:
            raise Unsupported(
                f"'{path}' is neither a file nor a directory, so no checkpoint can vouch for it; "
                "a handler has to write files",
                path=path,
            )


def _name(path: str, directory: str) -> str:
    name = os.path.relpath(path, directory)
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise Unsupported(
            f"the name of {path!r} is no text, so that no record can hold it; a handler has to give other "
            "names to its files"
        ) from error
    if "\\" in name:
        raise Unsupported(
            f"the name of '{path}' has a backslash, which a record does not take; a handler has to give "
            "other names to its files",
            path=path,
        )
    return name
