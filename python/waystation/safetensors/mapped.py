"""Tensors that alias a mapping of their file instead of being read.

The mapping is private: a write to an array copies its page and never reaches the file. The file must not
change while an array lives: changes show through, and shrinking it ends the program with SIGBUS. Hence it is
off by default.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from waystation import storage
from waystation._errors import WaystationError
from waystation.frameworks import dtypes
from waystation.grid import whole
from waystation.layouts.opened import Request
from waystation.safetensors.headers import Header
from waystation.safetensors.open_files import OpenFiles

# A smaller tensor that is asked for alone does not pay for the huge pages that it is in.
_LEAST_HUGE_BYTES = 4 << 20


class Mappings:
    """The mappings of one load, each alive as long as an array aliases it.

    Args:
        opened: The files.
        align_bytes: What addresses have to be multiples of, at least; others are read. None: the size of an
            element.
        one_by_one: Whether tensors are asked for one by one, and maybe few of them.
    """

    def __init__(self, opened: OpenFiles, align_bytes: int | None, *, one_by_one: bool = False) -> None:
        self._opened = opened
        self._align_bytes = align_bytes
        self._one_by_one = one_by_one
        self._maps: dict[str, mmap.mmap] = {}  # by path

    def array(self, request: Request) -> NDArray[Any] | None:
        """The requested tensor over its mapping, None where it has to be read."""
        stored = self._opened.array(request.array)
        return self.tensor(request.array) if request.boxes == [whole(stored.shape)] else None

    def tensor(self, number: int) -> NDArray[Any] | None:
        """A whole tensor over its mapping, None where it has to be read."""
        opened = self._opened
        stored = opened.array(number)
        header, begin, end = opened.extent(number)
        host = dtypes.of_stored(stored).host
        if begin == end or begin % (self._align_bytes or host.itemsize):
            return None
        mapped = self._maps.get(header.path) or self._map(header)
        if self._one_by_one and end - begin >= _LEAST_HUGE_BYTES:
            storage.in_huge_pages(mapped, begin, end)
        return np.ndarray(stored.shape, host, mapped, begin)

    def _map(self, header: Header) -> mmap.mmap:
        mapped = self._maps[header.path] = _map_file(header, huge_pages=not self._one_by_one)
        return mapped


def _map_file(header: Header, *, huge_pages: bool) -> mmap.mmap:
    try:
        with header.opened() as file:
            mapped = storage.mapped(file, writable=True, huge_pages=huge_pages)
    except WaystationError:
        header.check_unchanged()
        raise
    header.check_unchanged()
    return mapped
