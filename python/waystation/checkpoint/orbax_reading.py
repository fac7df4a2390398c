"""Reads the checkpoints of Orbax, for `opening.py`: which are such, and what is in them.

The primary reads what small files say; all processes make the same of it. A tree in Orbax's own files is a
state; whatever else there is, a handler has to read.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence

from waystation import storage
from waystation._errors import Corrupt, InvalidLayoutError
from waystation._options import AtomicityMode, Options
from waystation.checkpoint.handlers.choice import METRICS, STATE_HANDLER
from waystation.checkpoint.replaced import Replaced
from waystation.checkpoint.stored import AUTO, OpenCheckpoint, Stored
from waystation.layouts.native.records import join_strings, split_strings
from waystation.layouts.orbax import checkpoint as orbax
from waystation.layouts.orbax.checksums import Checksums, is_removed
from waystation.layouts.orbax.names import CHECKSUMS, COMMIT_SUCCESS
from waystation.layouts.orbax.open import TreeFiles, decode_tree_files, read_tree_files

_log = logging.getLogger("waystation")


class OrbaxReader:
    """Reads Orbax's layouts, of version 0 and 1."""

    def recognises(self, target: str, root: storage.Root | None = None) -> bool:
        """Whether what is there looks like a checkpoint of Orbax."""
        return orbax.is_checkpoint(target, root)

    def read(self, root: storage.Root, wanted: Sequence[str] | None, options: Options) -> bytes:
        """Reads what a checkpoint says of itself, and the metadata of the trees that are wanted."""
        target = root.path
        _require_commit_file(root, options)
        found = orbax.open_checkpoint(target, root)
        if found.checksums is None and (wanted is None or not {METRICS}.issuperset(wanted)):
            _check_removed_checksums(root, options)
        if wanted is None:
            chosen = sorted(name for name in found.items if name != METRICS)
        else:
            chosen = [found.default_tree() if name == AUTO else name for name in wanted]
        head = {
            "names": sorted(found.items),
            "custom_metadata": found.metadata.custom_metadata,
            "begun_ns": found.metadata.init_timestamp_nsecs,
            "committed_ns": found.metadata.commit_timestamp_nsecs,
            "chosen": [[name, found.item(name).handler] for name in chosen],
        }
        record, file = b"", ""
        if found.checksums is not None:
            record, file = found.checksums.record, found.checksums.path
        parts = [json.dumps(head).encode(), orbax.read_identity(target, root), record, os.fsencode(file)]
        for name in chosen:
            item = found.item(name)
            files = b""
            if item.is_tree:
                files = read_tree_files(item.directory, options, found.checksums_of(name), root).pack()
            parts += [os.fsencode(item.directory), files]
        return join_strings(parts)

    def is_same(self, root: storage.Root, data: bytes) -> bool:
        """Whether the checkpoint in this directory says the same of itself as the one that was read."""
        _, identity, *_ = split_strings(data)
        return orbax.read_identity(root.path, root) == identity

    def decode(self, root: storage.Root, data: bytes, options: Options) -> OpenCheckpoint:
        """Makes sense of these."""
        encoded, _, record, file, *parts = split_strings(data)
        head = json.loads(encoded)
        checksums = Checksums.decode(record, os.fsdecode(file), root) if record else None
        stored: dict[str, Stored] = {}
        for (name, saver), encoded_path, files in zip(head["chosen"], parts[::2], parts[1::2], strict=True):
            directory = os.fsdecode(encoded_path)
            own = None if checksums is None else checksums.of(directory)
            if files:
                state = decode_tree_files(TreeFiles.unpack(files), options, own, root)
                handler = STATE_HANDLER if saver is None else saver
                stored[name] = Stored(name, handler, directory, state, root=root)
            else:
                whole = {} if own is None else own.whole
                stored[name] = Stored(name, saver, directory, None, whole, root)
        return OpenCheckpoint(
            root.path,
            tuple(head["names"]),
            stored,
            head["custom_metadata"],
            head["begun_ns"],
            head["committed_ns"],
        )


def _check_removed_checksums(root: storage.Root, options: Options) -> None:
    """Warns where a checkpoint, or the one that it is a part of, has lost its file of checksums; refuses that
    where it is to be verified.

    Raises:
        Corrupt: It is to be verified.
        Replaced: The whole checkpoint is being removed.
    """
    whole = os.path.dirname(root.path)
    if is_removed(root.path, root):
        whole = root.path
    elif not is_removed(whole):
        return
    if not root.is_current():
        raise Replaced
    file = os.path.join(whole, CHECKSUMS)
    if options.array.loading.verify:
        raise Corrupt(
            f"a committed file is missing: '{file}', by which everything else is verified; restore another "
            "checkpoint, or leave the option array.loading.verify at None",
            path=file,
        )
    if options.array.loading.verify is None:
        _log.warning(
            "checkpoint '%s' has lost its file %s: what is loaded is not verified by it",
            whole,
            CHECKSUMS,
        )


def _require_commit_file(root: storage.Root, options: Options) -> None:
    """Refuses a checkpoint whose save has not ended, where the program says that saves end with a file."""
    if options.atomicity.mode is AtomicityMode.COMMIT_FILE and not orbax.has_commit_file(root.path, root):
        raise InvalidLayoutError(
            f"'{root.path}' has no {COMMIT_SUCCESS}, so with atomicity.mode = COMMIT_FILE its save has "
            "not ended; load it with AUTO if another mode saved it",
            path=root.path,
        )
