"""File and directory names of the native layout, in one place."""

from __future__ import annotations

import os
import re

from waystation._paths import is_there

RECORD = "checkpoint.json"
CHECKPOINTABLE_RECORD = "record.json"
HANDLED_RECORD = ".waystation-record.json"  # the same, among files of a handler, which may have any names
TREE = "tree.json"
FILE_TABLE = "files.bin"
CHUNK_TABLE = "chunks.bin"
CHECKSUM_TABLE = "checksums.bin"
INDEX = "model.safetensors.index.json"
OWNER = "owner.json"
FILES = "files"  # in it, what a handler made of a checkpointable, where the record is not among that

WRITER = ".waystation-writer"  # of the process that replaces what is in a directory
WRITER_REMOVAL = ".waystation-writer-removal"

PARTIAL_SUFFIX = ".partial_save"  # as Orbax has it
ATTEMPT_INFIX = ".waystation-tmp-"
ASIDE_INFIX = ".waystation-aside-"
EXPORT_INFIX = ".waystation-export-"

# The last part is random, or the id of the transaction that the attempt is part of.
ATTEMPT_ID = re.compile(
    r"(?P<scope>[0-9a-f]{12})-(?P<process>\d+)-(?P<start>\d+)-"
    r"((?P<random>[0-9a-f]{8})|(?P<transaction>[0-9a-f]{16}))"
)

FORMAT_VERSION = 1


def checkpointable_record(directory: str) -> str:
    """Where the record of the checkpointable in a directory is."""
    handled = os.path.join(directory, HANDLED_RECORD)
    return handled if is_there(handled) else os.path.join(directory, CHECKPOINTABLE_RECORD)


def data_file(process: int, sequence: int) -> str:
    """Name of one data file of a process."""
    return f"p{process:05}-{sequence:03}.safetensors"


def attempt(name: str, attempt_id: str) -> str:
    """Name of the directory in which one attempt at checkpoint `name` is written."""
    return f"{name}{ATTEMPT_INFIX}{attempt_id}"


def attempt_target(directory_name: str) -> str | None:
    """The checkpoint name that an attempt's directory belongs to; None for other directories."""
    target, infix, attempt_id = directory_name.rpartition(ATTEMPT_INFIX)
    return target if infix and attempt_id else None


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


def transaction(attempt_id: str) -> str | None:
    """The transaction that an attempt is part of; None for one that commits alone."""
    match = ATTEMPT_ID.fullmatch(attempt_id)
    return match["transaction"] if match else None


def moved_in(directory: str, attempt_id: str) -> str:
    """Name of a checkpointable's directory that an attempt moves into a checkpoint that is there already."""
    return f"{directory}-{attempt_id}"


def mover(directory: str) -> str | None:
    """The id of the attempt that moved in a directory of this name; None for the names of others."""
    attempt_id = "-".join(directory.rsplit("-", 4)[1:])
    return attempt_id if ATTEMPT_ID.fullmatch(attempt_id) else None


def export_stage(stem: str, attempt_id: str) -> str:
    """Name of the hidden directory in which one attempt at an export is written."""
    return f".{stem}{EXPORT_INFIX}{attempt_id}"


def export_stem(directory_name: str) -> str | None:
    """What the files of an export begin with, by the name of its hidden directory; None for others."""
    stem, infix, attempt_id = directory_name.rpartition(EXPORT_INFIX)
    return stem[1:] if infix and attempt_id and stem.startswith(".") else None
