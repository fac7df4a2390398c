"""File and directory names of the native layout, in one place."""

from __future__ import annotations

RECORD = "checkpoint.json"
CHECKPOINTABLE_RECORD = "record.json"
TREE = "tree.json"
FILE_TABLE = "files.bin"
CHUNK_TABLE = "chunks.bin"
CHECKSUM_TABLE = "checksums.bin"
INDEX = "model.safetensors.index.json"
OWNER = "owner.json"

ATTEMPT_INFIX = ".waystation-tmp-"

FORMAT_VERSION = 1


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
