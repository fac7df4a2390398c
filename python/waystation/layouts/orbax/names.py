"""File and directory names of Orbax's layouts, in one place; and under which name a leaf is stored.

Invariant: no name that a file gives leads out of the checkpointable's directory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from waystation._errors import Corrupt
from waystation.storage.names import COMMIT_OF_ORBAX

# Of a checkpoint.
INDICATOR = "orbax.checkpoint"  # empty, by Orbax; in what the free functions of version 1 save
CHECKPOINT_METADATA = "_CHECKPOINT_METADATA"
COMMIT_SUCCESS = COMMIT_OF_ORBAX
DELETION = "_CHECKPOINT_DELETION"
CHECKSUMS = ".waystation-checksums"  # not Orbax's, which ignores it
TEMPORARY_INFIX = ".orbax-checkpoint-tmp"
METRICS = "metrics"
RESERVED = frozenset({METRICS, "AUTO", DELETION})  # no checkpointables

# Of the directory that holds the steps of a manager.
ROOT_METADATA_DIRECTORY = "metadata"
ROOT_METADATA = "_ROOT_METADATA"

# Of a checkpointable that is a tree.
TREE_METADATA = "_METADATA"
SHARDINGS = "_sharding"
STRINGS = "_strings.json"
ARRAY_METADATAS = "array_metadatas"
MANIFEST = "manifest.ocdbt"
ZARR3 = "zarr.json"
ZARR2 = ".zarray"

# Files of a checkpoint, or of one that is a single tree.
FILES = frozenset({INDICATOR, CHECKPOINT_METADATA, COMMIT_SUCCESS, TREE_METADATA})

_PROCESS_PREFIX = "process_"


def process_file(process: int) -> str:
    """Name of the file in `array_metadatas` that a process writes."""
    return f"{_PROCESS_PREFIX}{process}"


def process_of(file_name: str) -> int | None:
    """The process that wrote a file of `array_metadatas`; None for other files."""
    number = file_name.removeprefix(_PROCESS_PREFIX)
    return int(number) if number != file_name and number.isascii() and number.isdecimal() else None


def ocdbt_process(process: int) -> str:
    """Name of the directory in which a process writes its part of an OCDBT database."""
    return f"ocdbt.{_PROCESS_PREFIX}{process}"


def temporary(name: str) -> str:
    """Name of the directory in which a checkpoint is written before it has its own."""
    return f"{name}{TEMPORARY_INFIX}"


def is_temporary(name: str) -> bool:
    """Whether a directory is, by its name, one that is being written or was left behind."""
    return TEMPORARY_INFIX in name


def parameter(keys: Sequence[str]) -> str:
    """The name under which a leaf is stored: two leaves may get the same."""
    return ".".join(keys)


def check_parameter(name: str, path: str) -> None:
    """Refuses a name, said in the file `path`, that is not that of something inside of its directory.

    Raises:
        Corrupt: It is such a name.
    """
    # A slash in a key is a directory of its own; the leaf without keys is in the directory itself.
    if name and not all(_is_plain(part) for part in name.split("/")):
        raise Corrupt(f"'{path}' names a leaf {name[:200]!r}, which is no place in its directory", path=path)


def check_checkpointable(name: str, path: str) -> None:
    """Refuses a name of a checkpointable, said in the file `path`, that is not that of a directory there.

    Raises:
        Corrupt: It is such a name.
    """
    if not _is_plain(name) or "/" in name:
        raise Corrupt(f"'{path}' names a checkpointable {name[:200]!r}, which is no directory", path=path)


def _is_plain(part: str) -> bool:
    return part not in ("", ".", "..") and not set(part) & {"\0", os.sep}
