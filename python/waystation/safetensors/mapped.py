"""Tensors that alias a mapping of their file instead of being read.

The mapping is private: a write to an array copies its page and never reaches the file. The file must not
change while an array lives: changes show through, and shrinking it ends the program with SIGBUS. Hence it is
off by default.
"""

from __future__ import annotations

import contextlib
import mmap
from builtins import open as open_file
from typing import Any

import numpy as np
from numpy.typing import NDArray

from waystation._errors import from_os_error
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
        with open_file(header.path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        header.check_unchanged()
        raise from_os_error(OSError(str(error)), "map", header.path) from error
    header.check_unchanged()
    with contextlib.suppress(OSError):  # advice: a kernel without huge pages knows none
        # What is not cached is read in huge pages then, each of which one fault maps.
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped
