"""Files that a handler makes of a checkpointable: found, made durable, vouched for, and verified again.

The layout knows nothing of what is in them. Handlers read and write files of this machine, so files go to a
store, and come from it, by way of these. Invariants: only plain files and directories below the directory
that the handler was given are ever taken; each file is vouched for by the digest of its whole content; what
is not vouched for (a file that came later) is neither verified nor removed. A file is digested, uploaded and
downloaded through a mapping, so that its size does not matter to memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from typing_extensions import Buffer

from waystation import _native, _plans, storage
from waystation._errors import Corrupt, InvalidInput, NotFound, Unsupported
from waystation._options import Options
from waystation._options.in_effect import current_options
from waystation.layouts.native import engine_job, names, read_job
from waystation.layouts.native.records import CheckpointableRecord, Digest
from waystation.layouts.opened import ReadStatistics
from waystation.storage.scratch import ScratchDirectory


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


# What is mapped at a time.
_MOST_FILES = 64

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


def made(directory: str, checkpointable: str) -> dict[str, Digest]:
    """What vouches for the files that a handler has made of a checkpointable.

    Raises:
        InvalidInput: One has the name of the record that is to vouch for them.
        Unsupported: As for `listed`.
    """
    place = os.path.join(directory, names.HANDLED_RECORD)
    if storage.is_there(place):
        raise InvalidInput(
            f"the handler of '{checkpointable}' has written a file '{names.HANDLED_RECORD}', a name that is "
            "reserved for what Waystation says of its files; have it give that file another name",
            path=place,
        )
    return digests(directory)


def digests(directory: str, root: storage.Root | None = None) -> dict[str, Digest]:
    """What vouches for the files below a directory (beneath `root`)."""
    return {name: digest(path, root) for name, path in sorted(listed(directory, root).items())}


def digest(path: str, root: storage.Root | None = None) -> Digest:
    """The digest of a whole file."""
    with storage.opened(path, root) as file, _content(file, root) as content:
        return _digest(content)


def _digest(content: Buffer) -> Digest:
    with memoryview(content) as view:
        return Digest(view.nbytes, _native.crc64(view))


@contextlib.contextmanager
def _content(file: storage.OpenFile, root: storage.Root | None) -> Iterator[Buffer]:
    """All of a file, which the system may drop from memory."""
    if file.status.nbytes == 0:
        yield b""
    elif file.descriptor is not None:
        with storage.mapped(file) as content:
            yield content
    else:
        scratch = ScratchDirectory()
        try:
            filled = storage.new_mapped(scratch.below("content"), file.status.nbytes)
            _fill({file.path: filled}, root, current_options())
            yield filled
        finally:
            scratch.remove()


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
        with _content(file, root) as content:
            _compare(content, expected, path)


def _compare(content: Buffer, expected: Digest, path: str) -> None:
    if _digest(content) != expected:
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


# ---- to and from a store -----------------------------------------------------------------------


def upload(files: Mapping[str, str], options: Options, on_job: Callable[[_native.Job], None]) -> None:
    """Uploads files of this machine to a store.

    Args:
        files: Where each is, by where it is to be.
        options: Of the save.
        on_job: Called with each engine job when it starts.
    """
    for batch in _batches(list(files)):
        contents = {}
        for target in batch:
            with storage.opened(files[target]) as file:
                contents[target] = storage.mapped(file) if file.status.nbytes else b""
        storage.of(batch[0]).write_files([(path, b"") for path, content in contents.items() if not content])
        arrays = {path: np.frombuffer(content, np.uint8) for path, content in contents.items() if content}
        written = [
            (path, b"", array.nbytes, _plans.byte_segments(0, [array.nbytes], [array.ctypes.data]))
            for path, array in arrays.items()
        ]
        if written:
            engine_job.run(written, arrays, options, (), on_job, lambda: None, lambda: None)


def download(
    directory: str,
    expected: Mapping[str, Digest],
    target: str,
    options: Options,
    root: storage.Root | None = None,
) -> None:
    """Downloads files of a handler from a store to this machine, and verifies them, unless the options say
    otherwise.

    Args:
        directory: Where they are (beneath `root`).
        expected: What vouches for all; without any, all files that are there are downloaded.
        target: The directory to which they go; it is made.
        options: Of the load.
        root: The checkpoint.

    Raises:
        Corrupt: A file is missing, or is not the one that was committed.
    """
    storage.make_directory(target, parents=True)
    lengths = {name: digest.nbytes for name, digest in expected.items()} or _lengths_below(directory, root)
    for batch in _batches(list(lengths)):
        contents = {}
        for name in batch:
            path = os.path.join(target, *name.split("/"))
            storage.make_directory(os.path.dirname(path), parents=True)
            contents[os.path.join(directory, name)] = storage.new_mapped(path, lengths[name])
        _fill(contents, root, options)
        if expected and options.array.loading.verify is not False:
            for (path, content), name in zip(contents.items(), batch, strict=True):
                _compare(content, expected[name], path)


def _lengths_below(directory: str, root: storage.Root | None) -> dict[str, int]:
    try:
        return storage.files_below(directory, root)
    except NotFound:  # a handler has written nothing
        return {}


def _batches(files: Sequence[str]) -> Iterator[Sequence[str]]:
    for begin in range(0, len(files), _MOST_FILES):
        yield files[begin : begin + _MOST_FILES]


def _fill(contents: Mapping[str, memoryview], root: storage.Root | None, options: Options) -> None:
    """Reads whole files into memory of their lengths."""
    arrays = {path: np.frombuffer(view, np.uint8) for path, view in contents.items() if len(view)}
    if not arrays:
        return
    files = [(path, array.nbytes, None) for path, array in arrays.items()]
    words = _plans.byte_reads(
        np.arange(len(files)),
        0,
        [array.nbytes for array in arrays.values()],
        [array.ctypes.data for array in arrays.values()],
    )
    read_job.finish(read_job.start(files, words, arrays, options, root=root), ReadStatistics())
