"""File and directory names of the native layout, in one place."""

from __future__ import annotations

import os

from waystation import storage
from waystation.storage.leases import is_mark
from waystation.storage.names import ATTEMPT_ID

RECORD = storage.names.COMMIT
CHECKPOINTABLE_RECORD = "record.json"
HANDLED_RECORD = ".waystation-record.json"  # the same, among files of a handler, which may have any names
TREE = "tree.json"
FILE_TABLE = "files.bin"
CHUNK_TABLE = "chunks.bin"
CHECKSUM_TABLE = "checksums.bin"
INDEX = "model.safetensors.index.json"
FILES = "files"  # in it, what a handler made of a checkpointable, where the record is beside that

PARTIAL_SUFFIX = ".partial_save"  # as Orbax has it
ASIDE_INFIX = ".waystation-aside-"
FORMAT_VERSION = 1


def checkpointable_record(directory: str) -> str:
    """Where the record of the checkpointable in a directory is. What was saved to a store has the id of its
    attempt in its name, and files of handlers have a directory of their own there (`FILES`), so that nobody
    has to look; what was copied there from a disk is as it was."""
    if storage.is_in_store(directory) and mover(os.path.basename(directory)) is not None:
        return os.path.join(directory, CHECKPOINTABLE_RECORD)
    handled = os.path.join(directory, HANDLED_RECORD)
    return handled if storage.is_there(handled) else os.path.join(directory, CHECKPOINTABLE_RECORD)


def data_file(process: int, sequence: int) -> str:
    """Name of one data file of a process."""
    return f"p{process:05}-{sequence:03}.safetensors"


def is_passing(name: str) -> bool:
    """Whether an attempt, a reader or a collector has given something inside a checkpoint this name: it is
    there for a while, unless the record names it, or another checkpoint refers to it."""
    is_of_others = is_mark(name) or name.startswith(storage.names.REFERENCE)
    return is_of_others or storage.names.attempt_id(name) is not None or mover(name) is not None


def partial(target: str) -> str:
    """The directory beside a checkpoint in which its parts are, until they become one."""
    return f"{target}{PARTIAL_SUFFIX}"


def whole(path: str) -> str | None:
    """The checkpoint whose parts are in a directory; None for other directories."""
    return path.removesuffix(PARTIAL_SUFFIX) if path.endswith(PARTIAL_SUFFIX) else None


def aside(target: str, number: int) -> str:
    """Where a save that replaces no strangers puts what is at its path, if the number is not taken."""
    return f"{target}{ASIDE_INFIX}{number}"


def is_aside(name: str) -> bool:
    """Whether something was put aside under this name."""
    return ASIDE_INFIX in name


def moved_in(directory: str, attempt_id: str) -> str:
    """Name of a checkpointable's directory that an attempt moves into a checkpoint that is there already."""
    return f"{directory}-{attempt_id}"


def directory_in(attempt_path: str, name: str) -> str:
    """Where an attempt writes a checkpointable. Without renames that is where it stays, in the checkpoint
    itself."""
    if storage.of(attempt_path).renames is not None:
        return os.path.join(attempt_path, name)
    target, own = os.path.split(attempt_path)
    attempt_id = storage.names.attempt_id(own)
    if attempt_id is None:  # Orbax's layouts, which have names of their own
        return os.path.join(attempt_path, name)
    return os.path.join(target, moved_in(name, attempt_id))


def mover(directory: str) -> str | None:
    """The id of the attempt that moved in a directory of this name; None for the names of others."""
    attempt_id = "-".join(directory.rsplit("-", 4)[1:])
    return attempt_id if ATTEMPT_ID.fullmatch(attempt_id) else None
