"""Opens a checkpointable of any kind: a state, or the files that a handler made."""

from __future__ import annotations

import os

from waystation import _native
from waystation.layouts.native import names, tree_file
from waystation.layouts.native.handler_files import HandlerFiles
from waystation.layouts.native.read import OpenCheckpointable, decode_checkpointable, read_files
from waystation.layouts.native.records import PYTREE, CheckpointRecord


def open_any(
    target: str, record: CheckpointRecord, name: str, root: _native.Directory | None = None
) -> OpenCheckpointable | HandlerFiles:
    """Reads and verifies the metadata of one checkpointable, beneath `root`; looks at no file of a handler.

    Raises:
        CheckpointableNotFound: The checkpoint has no such checkpointable.
        Corrupt: A metadata file is missing, damaged or not the one that was committed.
    """
    directory, digest = record.entry(target, name)
    files = read_files(directory, digest, root, paged_from_bytes=None)
    own = files.decode_record()
    if own.kind == PYTREE:
        return decode_checkpointable(files, root)
    return HandlerFiles(own.files_directory(directory), own, root)


def array_count(target: str, record: CheckpointRecord, name: str) -> int:
    """How many arrays a checkpointable has, by its tree alone: its tables are not read.

    Raises:
        CheckpointableNotFound: The checkpoint has no such checkpointable.
        Corrupt: Its record or tree is missing, damaged or not the one that was committed.
    """
    directory, digest = record.entry(target, name)
    files = read_files(directory, digest, paged_from_bytes=0)
    if files.decode_record().kind != PYTREE:
        return 0
    return len(tree_file.decode(files.contents[0], os.path.join(directory, names.TREE)).arrays)
