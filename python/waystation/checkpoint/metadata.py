"""`metadata` and `checkpointables_metadata`: what a checkpoint holds, without reading arrays."""

from __future__ import annotations

import datetime
import logging
import warnings
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from waystation import storage
from waystation._errors import WaystationError
from waystation._options.in_effect import current_options
from waystation.checkpoint import opening
from waystation.checkpoint.handlers import choice
from waystation.checkpoint.handlers.calls import HandlerCalls
from waystation.checkpoint.nested_state import abstract_state
from waystation.checkpoint.paths import PathLike, locate
from waystation.checkpoint.published import abstract_model, require_checkpointables
from waystation.checkpoint.replaced import Held, read_what_is_there
from waystation.checkpoint.stored import AUTO, OpenCheckpoint, Stored, state_name
from waystation.layouts.native.records import LocalPart
from waystation.storage.scratch import ScratchDirectory
from waystation.tree import flatten, format_key_path

_log = logging.getLogger("waystation")

M = TypeVar("M")

_SHOWN_LEAVES = 50
_SHOWN_CHARACTERS = 60

# What metadata show of a state: its tree, with an abstract array for each array.
PyTreeMetadata: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class CheckpointMetadata(Generic[M]):
    """What a checkpoint says about one of its checkpointables, or about all.

    Attributes:
        path: The checkpoint.
        metadata: Of a state the abstract state: the saved tree with an abstract array for each array and the
            value of each scalar. It can be given to `load` as it is, or changed first. Of all, such by name.
        custom_metadata: What was given to `save`; an empty dict if nothing was.
        checkpointable_name: Which one this is; None if it is about all.
        checkpointable_names: All that the checkpoint has.
        begin_timestamp_ns: When the save began, nanoseconds since 1970; None if that is not known.
        commit_timestamp_ns: When it was committed.
        format_version: Of the layout.
        local: Which part of which save to local storage this is; None for a checkpoint that is complete.
    """

    path: str
    metadata: M
    custom_metadata: Any = None
    checkpointable_name: str | None = None
    checkpointable_names: tuple[str, ...] = ()
    begin_timestamp_ns: int | None = None
    commit_timestamp_ns: int | None = None
    format_version: int | None = None
    local: LocalPart | None = None

    def __repr__(self) -> str:
        """One line, however large the tree is; `str` shows the tree."""
        about = self.checkpointable_name or ", ".join(self.checkpointable_names)
        count = len(flatten(self.metadata)[0])
        return f"<CheckpointMetadata: '{self.path}' ({about}), {count} {'leaf' if count == 1 else 'leaves'}>"

    def __str__(self) -> str:
        """The first leaves of the tree, one in a line."""
        leaves, structure = flatten(self.metadata)
        shown = leaves[:_SHOWN_LEAVES]
        paths = structure.key_paths()[: len(shown)]
        lines = [repr(self)[1:-1]]
        lines += [
            f"  {format_key_path(path)}: {_leaf_text(leaf)}" for path, leaf in zip(paths, shown, strict=True)
        ]
        if len(leaves) > len(shown):
            lines.append(
                f"  … and {len(leaves) - len(shown)} more; 'waystation inspect {self.path}' shows all"
            )
        return "\n".join(lines)

    @property
    def init_timestamp_nsecs(self) -> int | None:
        """`begin_timestamp_ns`, as Orbax calls it."""
        return self.begin_timestamp_ns

    @property
    def commit_timestamp_nsecs(self) -> int | None:
        """`commit_timestamp_ns`, as Orbax calls it."""
        return self.commit_timestamp_ns

    @property
    def init_timestamp(self) -> datetime.datetime | None:
        """When the save began."""
        return _moment(self.begin_timestamp_ns)

    @property
    def commit_timestamp(self) -> datetime.datetime | None:
        """When it was committed."""
        return _moment(self.commit_timestamp_ns)


def _leaf_text(leaf: Any) -> str:
    """An abstract array by dtype, shape and placement; anything else as Python writes it, on one line."""
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is None or dtype is None:
        return f"{leaf!r:.{_SHOWN_CHARACTERS}}"
    sharding = getattr(leaf, "sharding", None)
    placed = "" if sharding is None else f", {getattr(sharding, 'spec', sharding)}"
    return f"{dtype} {tuple(shape)}{placed}"


def metadata(path: PathLike, checkpointable_name: str | None = AUTO) -> CheckpointMetadata[Any]:
    """Reads what one checkpointable of a checkpoint holds; no data file is opened.

    Args:
        path: The checkpoint.
        checkpointable_name: Which checkpointable; by default `state`, or the first state by name where there
            is none of that name.

    Raises:
        CheckpointNotFound: There is no checkpoint.
        CheckpointableNotFound: It has no such checkpointable.
        InvalidInput: The path is no checkpoint.
        Corrupt: Its metadata is damaged.
        Unsupported: It is of a newer format version.
        NoHandler, HandlerFailed: It is no state, and its handler is not there, or fails.
    """

    def read(held: Held) -> CheckpointMetadata[Any]:
        opened = opening.open_held(held, [state_name(checkpointable_name)], current_options())
        (stored,) = opened.stored.values()
        described = abstract_model(stored) if opened.is_model else _describe(stored, held)
        return _made(opened, stored.name, described)

    return read_what_is_there(locate(path), current_options(), read)


def checkpointables_metadata(path: PathLike) -> CheckpointMetadata[dict[str, Any]]:
    """Reads what all checkpointables of a checkpoint hold; no data file of a state is opened.

    What `metadata` of the result has of each, by name, can be given to `load_checkpointables`. It is None
    where a handler has none to tell, or cannot.

    Args:
        path: The checkpoint.

    Raises:
        CheckpointNotFound: There is no checkpoint.
        InvalidInput: The path is no checkpoint.
        Corrupt: Its metadata is damaged.
        Unsupported: It is of a newer format version.
    """

    def read(held: Held) -> CheckpointMetadata[dict[str, Any]]:
        opened = opening.open_held(held, None, current_options())
        require_checkpointables(opened)
        described: dict[str, Any] = {}
        for name, stored in opened.stored.items():
            try:
                described[name] = _describe(stored, held)
            except WaystationError as error:
                if stored.state is not None or held.was_replaced():
                    raise
                _log.warning("the metadata of checkpointable '%s' of '%s' is left out: %s", name, path, error)
                described[name] = None
        return _made(opened, None, described)

    return read_what_is_there(locate(path), current_options(), read)


def pytree_metadata(*args: Any, **kwargs: Any) -> CheckpointMetadata[Any]:
    """Deprecated: use `metadata`."""
    warnings.warn("pytree_metadata is deprecated: use metadata", DeprecationWarning, stacklevel=2)
    return metadata(*args, **kwargs)


def _describe(stored: Stored, held: Held) -> Any:
    options = current_options()
    registry, is_state = options.checkpointables.registry, stored.state is not None
    handler = choice.loader(registry, stored.name, None, stored.handler, is_state=is_state)
    if handler is None:
        return abstract_state(opening.require_state(stored, stored.directory))
    scratch, calls = ScratchDirectory(), HandlerCalls("read the metadata of")
    try:
        is_remote = storage.is_in_store(stored.directory)
        place = stored.downloaded(scratch, options) if is_remote else stored.directory
        directory = options.file.path_class(place)
        described = calls.ask({stored.name: lambda: handler.metadata(directory)})[stored.name]
    finally:
        calls.close()
        scratch.remove()
    held.require_current()  # handlers go by paths, which may have led to another version
    return described


def _made(opened: OpenCheckpoint, name: str | None, described: Any) -> CheckpointMetadata[Any]:
    return CheckpointMetadata(
        opened.target,
        described,
        {} if opened.custom_metadata is None else opened.custom_metadata,
        name,
        opened.names,
        opened.begun_ns,
        opened.committed_ns,
        opened.format_version,
        opened.local,
    )


def _moment(nanoseconds: int | None) -> datetime.datetime | None:
    if nanoseconds is None:
        return None
    return datetime.datetime.fromtimestamp(nanoseconds / 1e9, tz=datetime.UTC)
