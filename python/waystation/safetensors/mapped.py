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


class Mappings:
    """The mappings of one load, one per file, each alive as long as an array aliases it.

    Args:
        opened: The files.
        align_bytes: What addresses have to be multiples of, at least; others are read. None: the size of an
            element.
    """

    def __init__(self, opened: OpenFiles, align_bytes: int | None) -> None:
        self._opened = opened
        self._align_bytes = align_bytes
        self._maps: dict[str, mmap.mmap] = {}

    def array(self, request: Request) -> NDArray[Any] | None:
        """The requested tensor over its mapping, None where it has to be read."""
        stored = self._opened.array(request.array)
        header, begin, end = self._opened.extent(request.array)
        host = dtypes.of_stored(stored).host
        if request.boxes != [whole(stored.shape)] or begin == end:
            return None
        if begin % (self._align_bytes or host.itemsize):
            return None
        return np.ndarray(stored.shape, host, self._map(header), begin)

    def _map(self, header: Header) -> mmap.mmap:
        found = self._maps.get(header.path)
        if found is None:
            found = self._maps[header.path] = _map_file(header)
        return found


def _map_file(header: Header) -> mmap.mmap:
    try:
        with header.opened() as file:
            mapped = storage.mapped(file, writable=True)
    except WaystationError:
        header.check_unchanged()
        raise
    header.check_unchanged()
    return mapped
