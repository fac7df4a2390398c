"""Sections of table files whose pages are read when they are first needed.

The tables of a large job are far larger than what one process needs of them. A section behaves like the NumPy
array of all its entries; indexing it reads the pages that are not there yet, in one call of the engine,
which verifies each. `prefetch` reads many at once.

Invariants: memory is taken only for pages that were read; an index beyond the section is Corrupt, because it
comes from another entry of the same tables; two threads may use a section (both then read the same bytes).
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from waystation import _native, storage
from waystation._distinct import distinct
from waystation._errors import Corrupt, NotFound

PAGE_BYTES = 4096
PAYLOAD_BYTES = PAGE_BYTES - 8

Integers = npt.NDArray[np.int64]


class PagedTable:
    """A table file.

    Attributes:
        path: Where it is.
        counts: The number of entries of each section.
        bytes_read: So far.
    """

    def __init__(
        self,
        path: str,
        kind: Literal["files", "chunks", "checksums"],
        file_bytes: int,
        root: storage.Root | None = None,
    ) -> None:
        self.path = path
        self._root = root
        self._kind = kind
        self._file_bytes = file_bytes
        try:
            self.counts: list[int] = _native.table_counts(
                path, kind, file_bytes, root=storage.engine_root(root)
            )
        except NotFound as error:
            raise _missing(error) from error
        self.bytes_read = PAGE_BYTES

    def section(self, number: int, entry: np.dtype[Any]) -> PagedSection:
        """One of its sections."""
        return PagedSection(self, number, entry)

    def read(self, section: int, ranges: list[tuple[int, int]]) -> list[bytes]:
        """The raw entries of ranges of a section that begin with a page."""
        wanted = [(section, begin, end) for begin, end in ranges]
        try:
            return _native.read_table_entries(
                self.path,
                self._kind,
                self._file_bytes,
                wanted,
                root=storage.engine_root(self._root),
            )
        except NotFound as error:
            raise _missing(error) from error


class PagedSection:
    """The entries of a section, read as they are needed.

    Attributes:
        table: The table of which it is a section.
    """

    def __init__(self, table: PagedTable, number: int, entry: np.dtype[Any]) -> None:
        self.table = table
        self._number = number
        self._count = table.counts[number]
        self._page_entries = PAYLOAD_BYTES // entry.itemsize
        # The system gives memory to the pages of these zeros that are written to, and to no others.
        self._entries = np.zeros(self._count, entry)
        self._is_present = np.zeros(-(-self._count // self._page_entries), bool)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, key: Any) -> Any:
        """What the array of all entries gives for this key: an index, a slice, an array of indices, or the
        name of a field, of which all are read."""
        if isinstance(key, str):
            self.prefetch(np.zeros(1, np.int64), np.array([self._count], np.int64))
        elif isinstance(key, slice):
            begin, end, _ = key.indices(self._count)
            self.prefetch(np.array([begin], np.int64), np.array([end], np.int64))
        else:
            places = np.atleast_1d(np.asarray(key, np.int64))
            self.prefetch(places, places + 1)
        return self._entries[key]

    def tobytes(self) -> bytes:
        """All entries."""
        entries: npt.NDArray[Any] = self[:]
        return entries.tobytes()

    def prefetch(self, begins: Integers, ends: Integers) -> None:
        """Reads what is missing of these ranges of entries, all of it in one call."""
        begins, ends = begins[begins < ends], ends[begins < ends]
        if not len(begins):
            return
        lowest, highest = int(np.min(begins)), int(np.max(ends))
        if lowest < 0 or highest > self._count:
            raise Corrupt(
                f"an entry of the table refers to {highest} entries where there are {self._count}",
                path=self.table.path,
            )
        firsts, lasts = begins // self._page_entries, (ends - 1) // self._page_entries
        lengths = lasts - firsts + 1
        before = np.cumsum(lengths) - lengths
        pages = distinct(np.repeat(firsts - before, lengths) + np.arange(int(lengths.sum())))
        self._read(pages[~self._is_present[pages]])

    def _read(self, pages: Integers) -> None:
        if not len(pages):
            return
        breaks = np.flatnonzero(np.diff(pages) != 1) + 1
        begins = pages[np.concatenate([[0], breaks])] * self._page_entries
        ends = (pages[np.concatenate([breaks - 1, [len(pages) - 1]])] + 1) * self._page_entries
        ranges = list(zip(begins.tolist(), np.minimum(ends, self._count).tolist(), strict=True))
        found = self.table.read(self._number, ranges)
        for (begin, end), entries in zip(ranges, found, strict=True):
            self._entries[begin:end] = np.frombuffer(entries, self._entries.dtype)
        self._is_present[pages] = True
        self.table.bytes_read += PAGE_BYTES * (1 + len(pages))


def _missing(error: NotFound) -> Corrupt:
    return Corrupt(f"a committed file is missing: {error.message}", **error.context)
