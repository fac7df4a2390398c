"""Arrays that alias a mapping of their data file instead of being read.

Only arrays stored whole, in one chunk, at an address that frameworks can alias. The mapping is
private: a write to an array copies its page and never reaches the file. The file must not change
while arrays live, and shrinking it would end the program with SIGBUS; hence this is off by default.
"""

from __future__ import annotations

import math
import mmap
import os
from typing import Any

import numpy as np

from waystation._errors import Corrupt, from_os_error
from waystation.frameworks import dtypes
from waystation.layouts.native import tables
from waystation.layouts.native.read import OpenCheckpointable, Request

ALIGN_BYTES = 64


class Mappings:
    """The mappings of one load: one per data file, alive as long as an array aliases it."""

    def __init__(self, opened: OpenCheckpointable) -> None:
        self._opened = opened
        self._paths = opened.paths()
        self._maps: dict[int, mmap.mmap] = {}

    def array(self, request: Request) -> np.ndarray[Any, Any] | None:
        """The requested array over its mapping, None where it has to be read."""
        decoded, stored = self._opened.tables, self._opened.tree.arrays[request.array]
        entry = decoded.arrays[request.array]
        whole = [((0,) * len(stored.shape), stored.shape)]
        if request.boxes != whole or entry["kind"] != tables.REGULAR or entry["chunk_count"] != 1:
            return None
        chunk = decoded.chunks[int(entry["first_chunk"])]
        form = dtypes.of_stored(stored)
        shape = stored.shape + form.host_trailing
        nbytes = math.prod(shape) * form.host.itemsize
        if int(chunk["offset"]) % ALIGN_BYTES or int(chunk["length"]) != nbytes:
            return None
        return np.ndarray(shape, form.host, self._map(int(chunk["file"])), int(chunk["offset"]))

    def _map(self, file: int) -> mmap.mmap:
        if file not in self._maps:
            expected = int(self._opened.tables.files["file_bytes"][file])
            self._maps[file] = _map_file(self._paths[file], expected)
        return self._maps[file]


def _map_file(path: str, expected_bytes: int) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            present = os.fstat(file.fileno()).st_size
            if present < expected_bytes:
                raise Corrupt(f"truncated: {present} of {expected_bytes} bytes are there", path=path)
            return mmap.mmap(file.fileno(), expected_bytes, access=mmap.ACCESS_COPY)
    except FileNotFoundError as error:
        raise Corrupt("a committed file is missing", path=path) from error
    except OSError as error:
        raise from_os_error(error, "map", path) from error
