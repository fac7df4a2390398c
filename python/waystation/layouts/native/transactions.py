"""Transactions: saves to local storage, in which each process commits a directory of its own.

No rename can make several directories visible at once, so there are two phases. *Prepare*: every process
writes its part into an attempt and makes all of it durable: data, record, and the name of the attempt.
When all have said so, the save is decided. *Commit*: every process renames its attempt into place. A part is
*prepared* while it stands under the name of an attempt, and both the name and the record inside of it have
the id of the transaction. The record also has the digest of the record that it is to replace.

What can go wrong, in order. Killed while a part is written: it has no record, so it is a dead attempt like
any other. Killed when parts are prepared, before the decision or after it: that cannot be told from one part
alone, so nobody removes it who has not asked all processes (`checkpoint/local_storage.py`). One of them has
committed: then all had prepared, and every part that is still prepared is committed as well. None has: all
parts are removed. Killed after the rename of an overwrite: what was replaced stands under the attempt's name
then, but its record has another id, so it is a dead attempt; it is removed only after all have committed.
Killed in the midst of an overwrite without a swap of names: the record in the attempt stays until the end,
so the part counts as prepared until the record of the checkpoint is replaced, and the moves go on from where
they stopped.

Of checkpoints that are overwritten again: a save first settles what is left at its path, so at most one
transaction there is undecided on the disks of the processes that take part. A part whose process was absent
from later saves is told by its digest: as soon as what it was to replace is not what stands at the path, it
is over, and can never come back in place of something newer.
"""

from __future__ import annotations

import errno
import os
import secrets
from dataclasses import dataclass

from waystation import storage
from waystation._errors import Corrupt, WaystationError
from waystation.layouts.native import names
from waystation.layouts.native.records import RECORD_LIMIT_BYTES, CheckpointRecord, Digest, LocalPart
from waystation.storage import attempts


@dataclass(frozen=True, slots=True)
class Found:
    """What stands in the directory of a checkpoint or an attempt.

    Attributes:
        digest: Of its record.
        part: What the record says of a transaction; None if nothing, or if it cannot be read.
    """

    digest: Digest
    part: LocalPart | None


def new_transaction() -> str:
    """An id that no other transaction has."""
    return secrets.token_hex(8)


def look(directory: str) -> Found | None:
    """What stands in a directory; None where there is no record.

    Raises:
        PermissionDenied, Unavailable: The record is there and cannot be read.
        Unsupported: It is of a newer version.
    """
    path = os.path.join(directory, names.RECORD)
    try:
        data = storage.read_file(path, limit_bytes=RECORD_LIMIT_BYTES)
    except WaystationError as error:
        if int(error.context.get("errno", 0)) in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise
    try:
        return Found(Digest.of(data), CheckpointRecord.decode(data, path).local)
    except Corrupt:
        return Found(Digest.of(data), None)


def prepared_part(target: str, attempt_id: str) -> LocalPart | None:
    """The part that an attempt holds prepared for the checkpoint at `target`, if it may yet be committed."""
    transaction = storage.names.transaction(attempt_id)
    if transaction is None:
        return None
    prepared = look(storage.names.attempt(target, attempt_id))
    if prepared is None or prepared.part is None or prepared.part.transaction != transaction:
        return None
    present = look(target)
    replaces = prepared.part.replaces
    return prepared.part if replaces == (None if present is None else present.digest) else None


def is_undecided(target: str, attempt_id: str) -> bool:
    """Whether an attempt holds a prepared part, or may do so: what cannot be read is not taken for dead."""
    try:
        return prepared_part(target, attempt_id) is not None
    except WaystationError:
        return True


attempts.is_undecided = is_undecided
