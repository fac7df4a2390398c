"""The removal of one checkpointable of a checkpoint of Orbax's, and the record that is kept of it meanwhile.

`_CHECKPOINT_DELETION` says which checkpointable goes, and what `_CHECKPOINT_METADATA` said before and is to
say afterwards. From the moment it is there, readers leave the checkpointable out, and whoever is asked to
delete it again, Orbax or this package, goes on where the first one stopped. What happens, in order:

1. Killed before the record is there: nothing has happened.
2. Killed after it: the checkpointable counts as gone, though its directory is there.
3. The directory is moved out of the checkpoint in one act, to the name of an attempt that is dead as soon as
   its process is.
4. `_CHECKPOINT_METADATA` is replaced by one that does not name it, in one act.
5. The record is removed, and then what was moved out.

A checkpointable of which the metadata say nothing goes in step 3 alone.

Invariants: at every moment the other checkpointables are whole, and so are the metadata; a record that does
not fit to its checkpoint is not acted upon.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from typing import Any

from waystation import _native, storage
from waystation._errors import Corrupt, DeletionRecoveryError, NotFound
from waystation.layouts.native import commit
from waystation.layouts.orbax import names
from waystation.layouts.orbax.json_files import dump, parse_object, reading, require, text
from waystation.storage.attempts import remove_dead

_LIMIT_BYTES = 256 << 20
_HANDLERS = "item_handlers"
_ID_CHARACTERS = 32


@dataclass(frozen=True, slots=True)
class DeletionRecord:
    """What the record says.

    Attributes:
        operation_id: Names the deletion.
        checkpointable_name: What is deleted.
        original_metadata: What the checkpoint said of itself.
        updated_metadata: What it is to say.
        destination: Where the directory is moved to; None where it is removed.
    """

    operation_id: str
    checkpointable_name: str
    original_metadata: dict[str, Any]
    updated_metadata: dict[str, Any]
    destination: str | None = None

    def encode(self) -> bytes:
        """The bytes of the file."""
        return dump(dataclasses.asdict(self))

    @classmethod
    def decode(cls, data: bytes, path: str) -> DeletionRecord:
        """Reads the bytes of the file.

        Raises:
            Corrupt: They are no such file.
        """
        body = parse_object(data, path)
        with reading(path):
            destination = body.get("destination")
            found = cls(
                text(body["operation_id"]),
                text(body["checkpointable_name"]),
                body["original_metadata"],
                body["updated_metadata"],
                None if destination is None else text(destination),
            )
            names.check_checkpointable(found.checkpointable_name, path)
            without = _without(found.original_metadata, found.checkpointable_name)
            require(_same(without, found.updated_metadata), "what it makes of the metadata is something else")
            return found


def read_record(path: str, root: storage.Root | None = None) -> DeletionRecord | None:
    """The record in a checkpoint (beneath `root`); None where there is none.

    Raises:
        DeletionRecoveryError: It makes no sense, or not in this checkpoint.
    """
    file = os.path.join(path, names.DELETION)
    content = _read(file, root)
    if content is None:
        return None
    try:
        record = DeletionRecord.decode(content, file)
        present = _metadata(path, root)
    except Corrupt as error:
        raise _unusable(path, error.message) from error
    if not any(_same(present, known) for known in (record.original_metadata, record.updated_metadata)):
        raise _unusable(path, f"{names.CHECKPOINT_METADATA} is neither what it was nor what it is to be")
    return record


def delete(path: str, name: str, attempt_id: str) -> None:
    """Removes a checkpointable that is there and is not the last, or ends its removal.

    Args:
        path: The checkpoint.
        name: Of the checkpointable.
        attempt_id: Of the attempt of this process.

    Raises:
        DeletionRecoveryError: Another deletion has begun and has not ended, or cannot be gone on with.
    """
    with commit.locked(path):
        for file in (names.DELETION, names.CHECKPOINT_METADATA):
            remove_dead(path, file)
        record = read_record(path)
        if record is not None:
            require_deletion_of(record, name, path)
        else:
            record = _begin(path, name, attempt_id)
        grave = _move_out(path, name, attempt_id)
        if record is not None:
            metadata = os.path.join(path, names.CHECKPOINT_METADATA)
            storage.of(path).replace(metadata, dump(record.updated_metadata), attempt_id)
            storage.remove_file(os.path.join(path, names.DELETION))
            _native.sync_paths([path])
    storage.remove_tree(grave)
    remove_dead(*os.path.split(path))  # of one that was killed before it could


def require_deletion_of(record: DeletionRecord, name: str, path: str) -> None:
    """Refuses a record that this package cannot go on with in order to delete a checkpointable.

    Raises:
        DeletionRecoveryError: It is of another one, or wants it to be kept elsewhere.
    """
    if record.checkpointable_name != name:
        raise DeletionRecoveryError(
            f"the deletion of checkpointable '{record.checkpointable_name}' of '{path}' has begun and not "
            f"ended; delete it again, and '{name}' afterwards",
            path=path,
        )
    if record.destination is not None:
        raise DeletionRecoveryError(
            f"checkpointable '{name}' of '{path}' is being moved to '{record.destination}' by Orbax; delete "
            "it again with Orbax",
            path=path,
        )


def _begin(path: str, name: str, attempt_id: str) -> DeletionRecord | None:
    """Publishes the record; None where the metadata do not say anything that would have to be changed."""
    present = _metadata(path)
    handlers = present.get(_HANDLERS)
    if not isinstance(handlers, dict) or name not in handlers:
        return None
    operation_id = os.urandom(_ID_CHARACTERS // 2).hex()
    record = DeletionRecord(operation_id, name, present, _without(present, name))
    storage.of(path).replace(os.path.join(path, names.DELETION), record.encode(), attempt_id)
    return record


def _move_out(path: str, name: str, attempt_id: str) -> str:
    """Moves the directory of a checkpointable out of the checkpoint; returns to where."""
    parent, checkpoint = os.path.split(path)
    grave = os.path.join(parent, storage.names.attempt(checkpoint, attempt_id))
    source = os.path.join(path, name)
    try:
        storage.renames(path).over(source, grave, "remove", source)
    except NotFound:
        return grave  # whoever began has done it
    _native.sync_paths([path, parent])
    return grave


def _without(metadata: dict[str, Any], name: str) -> dict[str, Any]:
    """Metadata that do not name a checkpointable any more."""
    handlers = metadata[_HANDLERS]
    require(isinstance(handlers, dict) and name in handlers, f"the metadata do not name '{name}'")
    return {**metadata, _HANDLERS: {other: handler for other, handler in handlers.items() if other != name}}


def _same(one: Any, other: Any) -> bool:
    """Whether two values are the same JSON: NaN, too, which is not equal to itself."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _metadata(path: str, root: storage.Root | None = None) -> dict[str, Any]:
    """What a checkpoint says of itself, as it stands in the file; nothing if there is none."""
    file = os.path.join(path, names.CHECKPOINT_METADATA)
    content = _read(file, root)
    return parse_object(content, file) if content else {}


def _read(path: str, root: storage.Root | None = None) -> bytes | None:
    if not storage.is_there(path, root):
        return None
    return storage.read_file(path, root, limit_bytes=_LIMIT_BYTES)


def _unusable(path: str, problem: str) -> DeletionRecoveryError:
    return DeletionRecoveryError(
        f"'{path}' has a record of a deletion that has not ended, and nobody can go on with it: {problem}; "
        f"look at {names.DELETION} there, and remove it if every checkpointable is whole",
        path=path,
    )
