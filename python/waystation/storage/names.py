"""The names of what processes put beside checkpoints, and into their directories, for a while."""

from __future__ import annotations

import re

COMMIT = "checkpoint.json"  # what makes a directory a checkpoint, in a storage without renames as well
COMMIT_OF_ORBAX = "commit_success.txt"  # what does so in a storage without renames, in Orbax's layouts
OWNER = "owner.json"
WRITER = ".waystation-writer"  # of the process that replaces what is in a directory
WRITER_REMOVAL = ".waystation-writer-removal"

ATTEMPT_INFIX = ".waystation-tmp-"
REFERENCE = ".waystation-reference."  # of the attempt that follows, on data of a checkpoint in a store
EXPORT_INFIX = ".waystation-export-"

# The last part is random, or the id of the transaction that the attempt is part of.
ATTEMPT_ID = re.compile(
    r"(?P<scope>[0-9a-f]{12})-(?P<process>\d+)-(?P<start>\d+)-"
    r"((?P<random>[0-9a-f]{8})|(?P<transaction>[0-9a-f]{16}))"
)


def attempt(name: str, attempt_id: str) -> str:
    """Name of the directory in which one attempt at checkpoint `name` is written."""
    return f"{name}{ATTEMPT_INFIX}{attempt_id}"


def attempt_target(directory_name: str) -> str | None:
    """The checkpoint name that an attempt's directory belongs to; None for other directories."""
    target, infix, attempt_id = directory_name.rpartition(ATTEMPT_INFIX)
    return target if infix and attempt_id else None


def attempt_id(directory_name: str) -> str | None:
    """The id of the attempt that a directory belongs to; None for other directories."""
    _, infix, found = directory_name.rpartition(ATTEMPT_INFIX)
    return found if infix and found else None


def transaction(attempt_id: str) -> str | None:
    """The transaction that an attempt is part of; None for one that commits alone."""
    match = ATTEMPT_ID.fullmatch(attempt_id)
    return match["transaction"] if match else None


def export_stage(stem: str, attempt_id: str) -> str:
    """Name of the hidden directory in which one attempt at an export is written."""
    return f".{stem}{EXPORT_INFIX}{attempt_id}"


def export_stem(directory_name: str) -> str | None:
    """What the files of an export begin with, by the name of its hidden directory; None for others."""
    stem, infix, attempt_id = directory_name.rpartition(EXPORT_INFIX)
    return stem[1:] if infix and attempt_id and stem.startswith(".") else None
