"""Reads the checkpoints of Orbax, for `opening.py`: which are such, and what is in them.

The primary reads what small files say; all processes make the same of it. A tree in Orbax's own files is a
state; whatever else there is, a handler has to read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from waystation._options import Options
from waystation.checkpoint.handlers.choice import METRICS, STATE_HANDLER
from waystation.checkpoint.stored import AUTO, OpenCheckpoint, Stored
from waystation.layouts.native.strings import join_strings, split_strings
from waystation.layouts.orbax import checkpoint as orbax
from waystation.layouts.orbax.checksums import Checksums
from waystation.layouts.orbax.names import CHECKSUMS
from waystation.layouts.orbax.open import TreeFiles, decode_tree_files, read_tree_files


class OrbaxReader:
    """Reads Orbax's layouts, of version 0 and 1."""

    def recognises(self, target: str) -> bool:
        """Whether what is there looks like a checkpoint of Orbax."""
        return orbax.is_checkpoint(target)

    def read(self, target: str, wanted: Sequence[str] | None, options: Options) -> bytes:
        """Reads what a checkpoint says of itself, and the metadata of the trees that are wanted."""
        found = orbax.open_checkpoint(target)
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
        parts = [json.dumps(head).encode(), b"" if found.checksums is None else found.checksums.record]
        for name in chosen:
            item = found.item(name)
            files = b""
            if item.is_tree:
                files = read_tree_files(item.directory, options, found.checksums_of(name)).pack()
            parts += [os.fsencode(item.directory), files]
        return join_strings(parts)

    def decode(self, target: str, data: bytes, options: Options) -> OpenCheckpoint:
        """Makes sense of these."""
        encoded, record, *parts = split_strings(data)
        head = json.loads(encoded)
        checksums = Checksums.decode(record, os.path.join(target, CHECKSUMS)) if record else None
        stored: dict[str, Stored] = {}
        for (name, saver), encoded_path, files in zip(head["chosen"], parts[::2], parts[1::2], strict=True):
            directory = os.fsdecode(encoded_path)
            own = None if checksums is None else checksums.of(name, directory)
            if files:
                state = decode_tree_files(TreeFiles.unpack(files), options, own)
                stored[name] = Stored(name, STATE_HANDLER if saver is None else saver, directory, state)
            else:
                stored[name] = Stored(name, saver, directory, None, {} if own is None else own.whole)
        return OpenCheckpoint(
            target,
            tuple(head["names"]),
            stored,
            head["custom_metadata"],
            head["begun_ns"],
            head["committed_ns"],
        )
