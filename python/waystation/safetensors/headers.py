"""The headers of safetensors files, read and checked before anything is allocated for what they claim.

Invariants: no more of a file is read than its own length allows, however long its header says it is; a
header that is returned has been checked whole (spans without hole or overlap, sizes that fit shapes, names
that occur once); what identifies the file is taken before its first byte is read, so that any later change
shows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from waystation import _native, storage
from waystation._collection import paused_collection
from waystation._errors import Conflict, Corrupt, InvalidInput, NotFound
from waystation._threads import Threads
from waystation.storage.foreign import described_bytes

LENGTH_BYTES = 8
LIMIT_BYTES = 100_000_000  # of the text of a header, as in the reference implementation

# Name, safetensors dtype, shape, and where in the file the data begin and end.
Tensor = tuple[str, str, tuple[int, ...], int, int]

# A small header comes with the first request; on a network file system each waits for an answer.
_FIRST_BYTES = 64 << 10
_THREADS = 8
_THREADS_OF_STORES = 32  # which wait for answers, and do nothing else


@dataclass(frozen=True, slots=True)
class Header:
    """The header of one file.

    Attributes:
        path: The file.
        identity: Of the file as it was when its header was read.
        metadata: Text for people, if there is any.
        tensors: What it holds, in the order of the data.
        data_start: Where the data begin.
        source: The storage that it was read from: that of the options in effect then.
    """

    path: str
    identity: storage.Identity
    metadata: dict[str, str] | None
    tensors: list[Tensor]
    data_start: int
    source: storage.Storage

    @property
    def is_tagged(self) -> bool:
        """Whether every read of the file tells its version, so that none can be of another one."""
        return self.identity.tag is not None

    @contextlib.contextmanager
    def opened(self) -> Iterator[storage.OpenFile]:
        """The file, as it was when its header was read.

        Raises:
            Conflict: It has changed.
        """
        if not self.is_tagged:
            self.check_unchanged()
        with self._present() as file:
            if file.status.identity != self.identity:
                self.refuse_change_to(file.status.identity)
            yield file

    def read(self, begin: int, nbytes: int) -> bytes:
        """Reads a part of the file, whatever that is by now; `check_unchanged` tells.

        Raises:
            Conflict: The file was removed, has become shorter, or is another version, as the store tells.
        """
        with self._present() as file:
            return _read_range(file, begin, nbytes)

    @contextlib.contextmanager
    def _present(self) -> Iterator[storage.OpenFile]:
        """The file that is at the path now; it was there when its header was read."""
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(
                    self.source.opened(self.path, seen=self.identity if self.is_tagged else None)
                )
            except NotFound as error:
                raise self._removed() from error
            yield file

    def _removed(self) -> Conflict:
        return Conflict(
            "the file was removed while it was in use; open the model again once it is there", path=self.path
        )

    def check_unchanged(self) -> None:
        """Raises Conflict if the file is not what it was when its header was read."""
        found = self.source.status(self.path)
        if found is None:
            raise self._removed()
        if found.identity != self.identity:
            self.refuse_change_to(found.identity)

    def refuse_change_to(self, present: storage.Identity) -> NoReturn:
        """Raises Conflict for the identity that the file has in place of its own."""
        how = self.identity.change_to(present)
        raise Conflict(
            f"the file changed while it was in use: {how}; what was read of it is not used. Open it again",
            path=self.path,
        )


def read_headers(paths: Sequence[str]) -> list[Header]:
    """Reads the headers of files, several at a time.

    Raises:
        NotFound: A file is not there.
        InvalidInput: A directory, a pipe or a device is where a file was expected.
        Corrupt: A file is no safetensors file, damaged or cut off; names the tensor where it is one's fault.
        Unsupported: A file has more tensors than are read of one.
    """
    # Chosen here, as other threads do not know the options in effect.
    sources = [storage.of(path) for path in paths]
    if len(paths) < 2:
        return list(map(_read_from, paths, sources))
    most = _THREADS if all(source.engine is None for source in sources) else _THREADS_OF_STORES
    with Threads(min(most, len(paths)), "headers") as readers:
        return list(readers.map(_read_from, paths, sources))


def read_header(path: str) -> Header:
    """Reads the header of one file, see `read_headers`."""
    return _read_from(path, storage.of(path))


def _read_from(path: str, source: storage.Storage) -> Header:
    with source.opened(path) as file:
        return _read(file, path, source)


@paused_collection()
def _read(file: storage.OpenFile, path: str, source: storage.Storage) -> Header:
    if file.status.kind != "file":
        what = "a directory" if file.status.kind == "directory" else "a pipe, a socket or a device"
        raise InvalidInput(f"'{path}' is {what}, and a regular file was expected here", path=path)
    identity = file.status.identity
    data = _read_range(file, 0, min(_FIRST_BYTES, identity.nbytes))
    if len(data) >= LENGTH_BYTES:
        end = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
        # What is too long for the file or the format is refused by the parser, from the length alone.
        if len(data) < end <= min(identity.nbytes, LENGTH_BYTES + LIMIT_BYTES):
            data = _read_range(file, 0, end)  # appended, it would be held twice
    try:
        metadata, tensors, data_start = _native.parse_safetensors_header(data, identity.nbytes, path)
    except Corrupt as error:
        foreign = described_bytes(data, path)
        if foreign is None or foreign.startswith("a safetensors file"):
            raise
        # As any other content that cannot be parsed: damage may begin like a file of another format, too.
        raise Corrupt(f"'{path}' is not a safetensors file, but {foreign}", path=path) from error
    return Header(path, identity, metadata, tensors, data_start, source)


def _read_range(file: storage.OpenFile, begin: int, nbytes: int) -> bytes:
    content = file.read(begin, nbytes)
    if len(content) < nbytes:
        raise Conflict("the file became shorter while it was read; open it again", path=file.path)
    return content


def check_unchanged(headers: Iterable[Header]) -> None:
    """Raises Conflict if one of the files is not what it was when its header was read, but for those of which
    every read tells."""
    for header in headers:
        if not header.is_tagged:
            header.check_unchanged()
