"""`metadata`: what a checkpoint holds, without reading arrays."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from waystation._errors import NotFound
from waystation.checkpoint.paths import PathLike, require_checkpoint, resolve
from waystation.frameworks import dtypes, registry
from waystation.layouts.native.read import open_checkpoint, open_checkpointable
from waystation.layouts.native.records import CheckpointRecord, LocalPart
from waystation.layouts.native.tree_file import ArrayLeaf
from waystation.layouts.opened import Opened
from waystation.tree import unflatten

_AUTO = "AUTO"
_DEFAULT_NAME = "state"


@dataclass(frozen=True, slots=True)
class CheckpointMetadata:
    """What a checkpoint says about one of its checkpointables.

    Attributes:
        path: The checkpoint.
        metadata: The abstract state: the saved tree with an abstract array for each array and the
            value of each scalar. It can be given to `load` as it is, or changed first.
        custom_metadata: What was given to `save`.
        checkpointable_name: Which one this is.
        checkpointable_names: All that the checkpoint has.
        commit_timestamp_ns: When it was committed, nanoseconds since 1970.
        format_version: Of the layout.
        local: Which part of which save to local storage this is; None for a checkpoint that is complete.
    """

    path: str
    metadata: Any
    custom_metadata: Any
    checkpointable_name: str
    checkpointable_names: tuple[str, ...]
    commit_timestamp_ns: int
    format_version: int
    local: LocalPart | None = None


def metadata(path: PathLike, checkpointable_name: str = _AUTO) -> CheckpointMetadata:
    """Reads what a checkpoint holds; no data file is opened.

    Args:
        path: The checkpoint.
        checkpointable_name: Which checkpointable; by default the only one, or `state`.

    Raises:
        NotFound: There is no checkpoint, or no such checkpointable.
        InvalidInput: The path is no checkpoint.
        Corrupt: Its metadata is damaged.
        Unsupported: It is of a newer format version.
    """
    target = resolve(path)
    require_checkpoint(target)
    record = open_checkpoint(target)
    name = choose_checkpointable(record, checkpointable_name, target)
    opened = open_checkpointable(target, record, name)
    return CheckpointMetadata(
        target,
        abstract_state(opened),
        record.custom_metadata,
        name,
        tuple(sorted(record.checkpointables)),
        record.created_ns,
        1,
        record.local,
    )


def abstract_state(opened: Opened) -> Any:
    """The saved tree with abstract arrays."""
    tree = opened.tree
    return unflatten(tree.structure, [_abstract_leaf(opened, leaf) for leaf in tree.leaves])


def _abstract_leaf(opened: Opened, leaf: Any) -> Any:
    if type(leaf) is not ArrayLeaf:
        return leaf
    stored = opened.tree.arrays[leaf.array]
    if stored.framework in ("bytes", "str"):
        return bytes if stored.framework == "bytes" else str
    if stored.framework == "python":
        return dtypes.of_stored(stored).host.type(0).item()  # as Orbax has it: data is not read here
    codec = registry.available_codec(stored.framework)
    storage = functools.partial(opened.storage_metadata, leaf.array)
    return codec.with_storage(codec.abstract(stored), storage)


def choose_checkpointable(record: CheckpointRecord, name: str, path: str) -> str:
    """The checkpointable that is meant.

    Raises:
        NotFound: There is none of that name, or it is not clear which one is meant.
    """
    present = sorted(record.checkpointables)
    if name != _AUTO:
        if name in record.checkpointables:
            return name
        raise NotFound(
            f"checkpoint '{path}' has no checkpointable '{name}'; it has: {', '.join(present) or 'none'}",
            path=path,
        )
    if _DEFAULT_NAME in record.checkpointables:
        return _DEFAULT_NAME
    if len(present) == 1:
        return present[0]
    raise NotFound(
        f"checkpoint '{path}' has no checkpointable '{_DEFAULT_NAME}' and several others; give "
        f"checkpointable_name, one of: {', '.join(present) or 'none'}",
        path=path,
    )
