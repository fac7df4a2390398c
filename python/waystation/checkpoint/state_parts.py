"""What each process of a save says about its files of each state: written by all, read by the primary.

These files stand beside the data while an attempt lasts, one for each process and state. Invariants: what is
read is what was written, by the digests that are sent in the round; none of them is left in a checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from waystation import _native
from waystation.layouts.native.merge import Part
from waystation.layouts.native.records import Digest, dump_json
from waystation.layouts.native.write import Prepared

_PART_LIMIT_BYTES = 16 << 30


def write(path: str, prepared: Sequence[Prepared], parts: Sequence[Part], process: int) -> bytes:
    """Writes what this process says of each state; returns what the primary needs to read it."""
    encoded = [part.encode() for part in parts]
    paths = [_path(path, entry, process) for entry in prepared]
    _native.write_small_files(list(zip(paths, encoded, strict=True)), sync=False)
    return dump_json([Digest.of(content).to_json() for content in encoded])


def collect(path: str, prepared: Sequence[Prepared], told: Sequence[bytes]) -> list[list[Part]]:
    """Reads and removes what the processes have written: of each state the parts in their order."""
    digests = [json.loads(part) for part in told]
    collected = []
    for number, entry in enumerate(prepared):
        paths = [_path(path, entry, process) for process in range(len(told))]
        contents = _native.read_small_files(paths, limit_bytes=_PART_LIMIT_BYTES)
        parts = []
        for process, content in enumerate(contents):
            digest = Digest.from_json(dump_json(digests[process][number]), paths[process])
            digest.check(content, paths[process])
            parts.append(Part.decode(content))
        for part_path in paths:
            os.unlink(part_path)
        collected.append(parts)
    return collected


def _path(path: str, prepared: Prepared, process: int) -> str:
    return os.path.join(path, prepared.name, f"p{process:05}.part")
