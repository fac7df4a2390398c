"""The headers of safetensors files, read and checked before anything is allocated for what they claim.

Invariants: no more of a file is read than its own length allows, however long its header says it is; a
header that is returned has been checked whole (spans without hole or overlap, sizes that fit shapes, names
that occur once); what identifies the file is taken before its first byte is read, so that any later change
shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NoReturn

from waystation import _native, storage
from waystation._collection import paused_collection
from waystation._errors import Conflict, Corrupt
from waystation.storage.foreign import described_bytes

LENGTH_BYTES = 8
LIMIT_BYTES = 100_000_000  # of the text of a header, as in the reference implementation

# Name, safetensors dtype, shape, and where in the file the data begin and end.
Tensor = tuple[str, str, tuple[int, ...], int, int]

# A small header comes with the first request; on a network file system each waits for an answer.
_FIRST_BYTES = 64 << 10
_THREADS = 8


@dataclass(frozen=True, slots=True)
class Header:
    """The header of one file.

    Attributes:
        path: The file.
        identity: Of the file as it was when its header was read.
        metadata: Text for people, if there is any.
        tensors: What it holds, in the order of the data.
        data_start: Where the data begin.
    """

    path: str
    identity: storage.Identity
    metadata: dict[str, str] | None
    tensors: list[Tensor]
    data_start: int

    def read(self, begin: int, nbytes: int) -> bytes:
        """Reads a part of the file.

        Raises:
            Conflict: The file has become shorter.
        """
        with storage.opened(self.path) as file:
            return _read_range(file, begin, nbytes)

    def check_unchanged(self) -> None:
        """Raises Conflict if the file is not what it was when its header was read."""
        found = storage.status(self.path)
        if found is None:
            raise Conflict("the file was removed while it was in use", path=self.path)
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
        Corrupt: A file is no safetensors file, damaged or cut off; names the tensor where it is one's fault.
    """
    if len(paths) < 2:
        return [read_header(path) for path in paths]
    with ThreadPoolExecutor(min(_THREADS, len(paths)), thread_name_prefix="waystation: headers") as readers:
        return list(readers.map(read_header, paths))


def read_header(path: str) -> Header:
    """Reads the header of one file, see `read_headers`."""
    with storage.opened(path) as file:
        return _read(file, path)


@paused_collection()
def _read(file: storage.OpenFile, path: str) -> Header:
    if file.status.kind != "file":
        raise Corrupt("a regular file was expected here", path=path)
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
    return Header(path, identity, metadata, tensors, data_start)


def _read_range(file: storage.OpenFile, begin: int, nbytes: int) -> bytes:
    content = file.read(begin, nbytes)
    if len(content) < nbytes:
        raise Conflict("the file became shorter while it was read; open it again", path=file.path)
    return content


def check_unchanged(headers: Iterable[Header]) -> None:
    """Raises Conflict if one of the files is not what it was when its header was read."""
    for header in headers:
        header.check_unchanged()
