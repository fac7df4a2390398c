"""What a load is told of a checkpoint that was opened, and by whom.

A layout that can be read is a `LayoutReader`: it recognises its checkpoints, reads their metadata in one
process, and makes sense of them in all. Invariants: what is read is verified as far as the layout can; what
is sent between processes is bytes; of a checkpointable that the layout does not read as a state, it says
where the files are, and by what they can be verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from waystation import storage
from waystation._errors import InvalidInput, WrongType
from waystation._options import Options
from waystation.layouts.native import handler_files
from waystation.layouts.native.records import Digest, LocalPart
from waystation.layouts.opened import Opened
from waystation.storage.scratch import ScratchDirectory

AUTO = "AUTO"


def state_name(name: str | None) -> str:
    """The name of a state that a program asks for, `AUTO` by None.

    Raises:
        InvalidInput: It is empty; WrongType: no text.
    """
    if name is None:
        return AUTO
    if not isinstance(name, str):
        raise WrongType(f"the name of a checkpointable must be a string, not {name!r:.60}")
    if not name:
        raise InvalidInput("the name of a checkpointable is not empty; give None for the state")
    return name


@dataclass(frozen=True, slots=True)
class Stored:
    """One checkpointable, as its layout sees it.

    Attributes:
        name: Its name.
        handler: The type of the handler that saved it, by name; None if the checkpoint does not say.
        directory: What a handler is given.
        state: Its metadata, if the layout can read it as a state.
        files: What vouches for the files that a handler reads, by their paths below the directory.
        root: The open directory of the checkpoint, beneath which they are verified.
    """

    name: str
    handler: str | None
    directory: str
    state: Opened | None
    files: dict[str, Digest] = field(default_factory=dict)
    root: storage.Root | None = None

    def downloaded(self, scratch: ScratchDirectory, options: Options) -> str:
        """A directory of this machine with the files that a handler reads, out of a store; verified.

        Raises:
            Corrupt: A file is missing, or is not the one that was committed.
        """
        target = scratch.below(self.name)
        handler_files.download(self.directory, self.files, target, options, self.root)
        return target


@dataclass(frozen=True, slots=True)
class OpenCheckpoint:
    """A checkpoint, opened.

    Attributes:
        target: Where it is.
        names: The names of all of its checkpointables, in order.
        stored: Those that were asked for, by name, in the order in which they were.
        custom_metadata: What the caller of the save gave.
        begun_ns: When the save began, nanoseconds since 1970; None if that is not known.
        committed_ns: When it was committed.
        format_version: Of the layout.
        local: Which part of which save to local storage this is.
        is_model: Whether it is a published model, in safetensors files: one state, a flat dict, of which any
            part may be asked for.
    """

    target: str
    names: tuple[str, ...]
    stored: dict[str, Stored]
    custom_metadata: Any = None
    begun_ns: int | None = None
    committed_ns: int | None = None
    format_version: int | None = None
    local: LocalPart | None = None
    is_model: bool = False


class LayoutReader(Protocol):
    """Reads the checkpoints of one layout. Files are opened beneath the open directory of the checkpoint."""

    def recognises(self, target: str, root: storage.Root | None = None) -> bool:
        """Whether a checkpoint of this layout is at the path, or in the directory."""
        ...

    def read(self, root: storage.Root, wanted: Sequence[str] | None, options: Options) -> bytes:
        """Reads the metadata that a load needs, in one process.

        Args:
            root: The checkpoint.
            wanted: The names of checkpointables; `AUTO` among them is the state that is meant by default.
                None for all that users have named.
            options: How to load.
        """
        ...

    def decode(self, root: storage.Root, data: bytes, options: Options) -> OpenCheckpoint:
        """Makes sense of what `read` has read, in any process."""
        ...

    def is_same(self, root: storage.Root, data: bytes) -> bool:
        """Whether `read` has read, in another process, the version of the checkpoint that is in `root`."""
        ...
