"""What each process of a save says about its files of each state: written by all, read by the primary.

These files stand beside the data while an attempt lasts, one for each process and state. Invariants: what is
read is what was written, by the digests that are sent in the round; none of them is left in a checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from waystation import _native, storage
from waystation.layouts.native import names
from waystation.layouts.native.records import Digest, dump_json, read_vouched

_Decoded = TypeVar("_Decoded")


class _Part(Protocol):
    """What a process says of a state."""

    def encode(self) -> bytes:
        """As bytes."""
        ...


def write(path: str, checkpointables: Sequence[str], parts: Sequence[_Part], process: int) -> bytes:
    """Writes what this process says of each state; returns what the primary needs to read it."""
    encoded = [part.encode() for part in parts]
    paths = [_path(path, name, process) for name in checkpointables]
    contents = list(zip(paths, encoded, strict=True))
    if storage.engine_of(path) is None:
        _native.write_small_files(contents, sync=False)
    else:
        storage.of(path).write_files(contents)
    return dump_json([Digest.of(content).to_json() for content in encoded])


def collect(
    path: str, checkpointables: Sequence[str], told: Sequence[bytes], decode: Callable[[bytes], _Decoded]
) -> list[list[_Decoded]]:
    """Reads and removes what the processes have written: of each state the parts in their order."""
    digests = [json.loads(part) for part in told]
    collected = []
    for number, name in enumerate(checkpointables):
        paths = [_path(path, name, process) for process in range(len(told))]
        vouched = {
            own: Digest.from_json(dump_json(digests[process][number]), own)
            for process, own in enumerate(paths)
        }
        parts = [decode(content) for content in read_vouched(vouched)]
        for part_path in paths:
            storage.remove_file(part_path)
        collected.append(parts)
    return collected


def _path(path: str, name: str, process: int) -> str:
    return os.path.join(names.directory_in(path, name), f"p{process:05}.part")
