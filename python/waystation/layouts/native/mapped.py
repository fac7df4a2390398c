"""Arrays that alias a mapping of their data file instead of being read.

Only arrays stored whole, in one chunk, at an address that frameworks can alias. The mapping is
private: a write to an array copies its page and never reaches the file. The file must not change
while arrays live, and shrinking it would end the program with SIGBUS; hence this is off by default.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from typing import Any

import numpy as np

from waystation import _native
from waystation._errors import Corrupt, NotFound, from_os_error
from waystation.frameworks import dtypes
from waystation.layouts import beneath
from waystation.layouts.native import tables
from waystation.layouts.native.read import OpenCheckpointable
from waystation.layouts.opened import Request

ALIGN_BYTES = 64


class Mappings:
    """The mappings of one load: one per data file, alive as long as an array aliases it."""

    def __init__(self, opened: OpenCheckpointable) -> None:
        self._opened = opened
        self._maps: dict[int, mmap.mmap] = {}
        # Plain lists: one conversion of a column instead of one for every access.
        decoded = opened.tables
        single = (decoded.arrays["kind"] == tables.REGULAR) & (decoded.arrays["chunk_count"] == 1)
        self._is_single: list[bool] = single.tolist()
        first = np.where(single, decoded.arrays["first_chunk"], 0)
        self._first_chunks: list[Any] = decoded.chunks[first].tolist() if single.any() else []

    def array(self, request: Request) -> np.ndarray[Any, Any] | None:
        """The requested array over its mapping, None where it has to be read."""
        if not self._is_single[request.array]:
            return None
        stored = self._opened.tree.arrays[request.array]
        if request.boxes != [((0,) * len(stored.shape), stored.shape)]:
            return None
        file, _, offset, length = self._first_chunks[request.array]
        form = dtypes.of_stored(stored)
        shape = stored.shape + form.host_trailing
        if offset % ALIGN_BYTES or length != math.prod(shape) * form.host.itemsize:
            return None
        return np.ndarray(shape, form.host, self._map(file), offset)

    def _map(self, file: int) -> mmap.mmap:
        mapped = self._maps.get(file)
        if mapped is None:
            expected = int(self._opened.tables.files[file]["file_bytes"])
            (path,) = self._opened.paths([file])
            mapped = self._maps[file] = _map_file(path, expected, self._opened.root)
        return mapped


def _map_file(path: str, expected_bytes: int, root: _native.Directory | None) -> mmap.mmap:
    try:
        with beneath.opened(path, root) as descriptor:
            present = os.fstat(descriptor).st_size
            if present != expected_bytes:
                raise Corrupt(f"the file has {present} bytes where {expected_bytes} were written", path=path)
            mapped = mmap.mmap(descriptor, expected_bytes, access=mmap.ACCESS_COPY)
    except NotFound as error:
        raise Corrupt("a committed file is missing", path=path) from error
    except OSError as error:
        raise from_os_error(error, "map", path) from error
    with contextlib.suppress(OSError):  # advice: a kernel without huge pages knows none
        # What is not cached is read in huge pages then, each of which one fault maps.
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped
