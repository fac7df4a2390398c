"""`metadata/_ROOT_METADATA`: what a whole sequence of checkpoints says of itself, in a file that Orbax reads.

It is written once, by the first `Checkpointer` that is given something to write, and never changed. It
appears whole: written aside, made durable, and then given its name, unless another process was faster.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from waystation import storage
from waystation._errors import Conflict, InvalidInput, WrongType
from waystation.layouts.native.records import callers_json, dump_json
from waystation.layouts.orbax import names
from waystation.layouts.orbax.json_files import parse_object
from waystation.storage.attempts import new_attempt_id

DIRECTORY = names.ROOT_METADATA_DIRECTORY
_LEGACY_NAME = "metadata"  # of the file, in what Orbax wrote long ago
_LIMIT_BYTES = 256 << 20
_KNOWN = ("internal_metadata", "custom_metadata")


def check(custom_metadata: Any) -> None:
    """Refuses what cannot be written.

    Raises:
        InvalidInput: It is no dict of JSON values.
    """
    if not isinstance(custom_metadata, dict):
        raise WrongType(f"custom_metadata must be a dict, not {type(custom_metadata).__name__}")
    if not all(isinstance(key, str) for key in custom_metadata):
        raise InvalidInput(f"custom_metadata has strings as keys, not {custom_metadata!r:.60}")
    callers_json(custom_metadata, "custom_metadata")


def write_once(root: str, custom_metadata: dict[str, Any]) -> None:
    """Writes the file, unless there is one."""
    directory = os.path.join(root, names.ROOT_METADATA_DIRECTORY)
    path = os.path.join(directory, names.ROOT_METADATA)
    if storage.is_there(path):
        return
    body = {"internal_metadata": {}, "custom_metadata": custom_metadata}
    storage.make_directory(directory, parents=True)
    with contextlib.suppress(Conflict):  # another process was faster
        storage.of(path).create(path, dump_json(body), new_attempt_id())
    storage.sync_entries(root)


def read(root: str) -> dict[str, Any]:
    """The custom metadata of a sequence of checkpoints; empty if there are none.

    Raises:
        Corrupt: The file is malformed.
    """
    directory = os.path.join(root, names.ROOT_METADATA_DIRECTORY)
    for name in (names.ROOT_METADATA, _LEGACY_NAME):
        path = os.path.join(directory, name)
        if not storage.is_file(path):
            continue
        data = storage.read_file(path, limit_bytes=_LIMIT_BYTES)
        body = parse_object(data, path)
        # Orbax takes what it does not know for the caller's own, as it once wrote that.
        others = {key: value for key, value in body.items() if key not in _KNOWN}
        return {**(body.get("custom_metadata") or {}), **others}
    return {}
