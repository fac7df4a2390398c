"""The protocol of a storage: what the package asks of the place where checkpoints are.

The core suits object stores as well as file systems. It reads, lists, creates and replaces small files whole,
and has no rename, no append and no times. An implementation raises the errors of `waystation.errors` only.
What only some storages can do is an attribute that is None in the others. The data of arrays do not pass
here: the engine reads and writes them (`crates/waystation-io`). Design 7 explains the seam.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import IO, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from waystation import _native

SLACK_BYTES = 64
"""What memory for a part has more than the part, so that the part can begin at a multiple of this."""

Kind = Literal["file", "directory", "link", "other"]


class Identity(NamedTuple):
    """What tells whether a file is still the same, with the same content.

    The time of the last change of a file's status (`ctime`) is no part of it: a further link, as a save with
    `unchanged_from` makes, one link less, other permissions or another owner change it, and no content. What
    is given up: a program that writes into a file, leaves its length, and puts the modification time back is
    not noticed.

    Attributes:
        device: The device that it is on.
        inode: Its number there.
        nbytes: Its length.
        modified_ns: When its content changed last, by the clock of the storage.
        tag: What a store calls the version; None in a file system.
        generation: How often it was written, where a store counts that.
    """

    device: int
    inode: int
    nbytes: int
    modified_ns: int
    tag: str | None = None
    generation: str | None = None

    def change_to(self, present: Identity) -> str:
        """What happened to a file that had this identity and has another one at present."""
        if (present.device, present.inode) != (self.device, self.inode):
            return "another file has taken its place"
        if present.nbytes != self.nbytes:
            return f"it had {self.nbytes} bytes, and has {present.nbytes}"
        return "it was written to"


class Status(NamedTuple):
    """What is at a path.

    Attributes:
        kind: What it is; `link` only where links are not followed.
        identity: What tells it from its later versions.
    """

    kind: Kind
    identity: Identity

    @property
    def nbytes(self) -> int:
        """Its length."""
        return self.identity.nbytes


class Entry(NamedTuple):
    """A name in a directory, and what it stood for when the directory was listed.

    Attributes:
        name: The name.
        kind: What it is itself, not what a link leads to.
        nbytes: How long it is, where a listing says that.
    """

    name: str
    kind: Kind
    nbytes: int | None = None


class OpenFile(Protocol):
    """One version of a file, open to be read."""

    @property
    def path(self) -> str:
        """Where it is."""
        ...

    @property
    def status(self) -> Status:
        """What it was when it was opened."""
        ...

    @property
    def descriptor(self) -> int | None:
        """By which this system reads and maps it; None where it is not of this system."""
        ...

    def read(self, offset: int, nbytes: int) -> bytes:
        """A range of it; shorter only where it ends."""
        ...

    def parts(self) -> Parts:
        """What reads small parts of it, also once it is closed."""
        ...


class Parts(Protocol):
    """Reads small parts of one version of a file, each on the thread of the caller; of any threads."""

    def read(self, offset: int, nbytes: int, memory: NDArray[np.uint8]) -> int:
        """Reads a part that is there into new memory, which has `SLACK_BYTES` more than the part.

        Returns:
            Where in the memory the part begins, at an address that is a multiple of 64.

        Raises:
            Conflict: The file is not what it was when it was opened.
        """
        ...


class Reader(Protocol):
    """What can be read by absolute paths."""

    def status(self, path: str, *, follow_links: bool = True) -> Status | None:
        """What is at a path; None where nothing is.

        Raises:
            PermissionDenied, Unavailable: It cannot be told. (UnusablePath: links go in a circle.)
        """
        ...

    def entries(self, path: str) -> Iterable[Entry]:
        """What is in a directory, by name; a storage may give it page by page.

        Raises:
            NotFound: It is not there.
        """
        ...

    def opened(self, path: str, *, seen: Identity | None = None) -> AbstractContextManager[OpenFile]:
        """Opens a file to read from it, as long as the block lasts. Never waits for a named pipe.

        Args:
            path: The file.
            seen: What it was when the caller looked at it last. A store asks no more then: it reads that
                version, or raises Conflict. Elsewhere the caller compares.

        Raises:
            NotFound: Nothing is there.
            Unsupported: A symbolic link leads out of the root.
        """
        ...

    def read_files(self, paths: Sequence[str], *, limit_bytes: int | Sequence[int]) -> list[bytes]:
        """Reads whole files, several at a time.

        Raises:
            NotFound: One is not there.
            Corrupt: One is larger than the limit, of all or its own; no memory is taken for it.
        """
        ...


class Root(Reader, Protocol):
    """A directory that is held open: what is read beneath it is of one version, whatever has its path by now.

    It takes the whole path of a file, which messages name, and which begins with the root's own.
    """

    @property
    def path(self) -> str:
        """The path by which it was opened."""
        ...

    @property
    def engine(self) -> _native.Directory | _native.ObjectStore:
        """The same directory, as the engine takes it."""
        ...

    def is_current(self) -> bool:
        """Whether its path still leads to it."""
        ...


class Storage(Reader, Protocol):
    """Where checkpoints are."""

    def hold(self, path: str, *, follow_links_out: bool = False) -> Root:
        """Opens a directory, and keeps its version.

        Args:
            path: The directory.
            follow_links_out: Whether links beneath it may lead out of it.

        Raises:
            NotFound: There is none.
        """
        ...

    def resolved(self, path: str) -> str:
        """The path without symbolic links."""
        ...

    def is_writable(self, directory: str) -> bool:
        """Whether this process may create something in a directory, as far as can be told before it tries."""
        ...

    def free_bytes(self, directory: str) -> int | None:
        """What this process may still write to a directory that is there; None where nobody knows."""
        ...

    def use_of(self, directory: str) -> str | None:
        """What else an empty directory is, which therefore must keep its place; None if nothing."""
        ...

    def read_version(self, path: str, *, limit_bytes: int) -> tuple[bytes, Identity]:
        """All of a file, and what tells this version from later ones, for `replace`.

        Raises:
            NotFound: It is not there.
            Corrupt: It is no file, or larger than the limit.
        """
        ...

    def create(self, path: str, content: bytes, attempt_id: str) -> None:
        """Creates a file, whole and durable, in one act; takes what `replace` takes.

        Raises:
            Conflict: There is one.
        """
        ...

    def replace(
        self, path: str, content: bytes, attempt_id: str, *, expected: Identity | None = None
    ) -> None:
        """Puts a file in the place of what is there, in one act, durably.

        A storage that cannot compare and replace in one act compares first. There, callers exclude each other
        by `write_lock`.

        Args:
            path: The file.
            content: All of it.
            attempt_id: Who does it: what is left of a process that is killed has this in its name.
            expected: The version that is replaced, as the caller has read it (`storage.read_version`); None
                is whatever is there.

        Raises:
            Conflict: The file is not `expected` any more; nothing was changed.
        """
        ...

    def write_files(self, contents: Sequence[tuple[str, bytes]]) -> None:
        """Writes new files, several at a time, durably. Their names are nobody else's."""
        ...

    def new_file(self, path: str) -> AbstractContextManager[IO[bytes]]:
        """A new file, which is written within the block, and is durable once the block is left.

        It need not be seekable. Where the block raises, some of it may be left, for whoever removes the
        attempt.

        Raises:
            Conflict: There is one.
        """
        ...

    def make_directory(self, path: str, *, parents: bool = False, permission_mode: int | None = None) -> None:
        """Makes a directory, unless it is there, and those above it, if that is asked for.

        The mode is that of the directory, if this makes it.
        """
        ...

    def copy(self, source: str, target: str) -> None:
        """Makes a file that holds what another one holds, durably; if possible as a further name of that."""
        ...

    def remove_file(self, path: str, *, expected: Identity | None = None) -> None:
        """Removes a file; one that is gone already is no error.

        Args:
            path: The file.
            expected: The version that goes, as the caller has read it; None is whatever is there. A storage
                that cannot compare and remove in one act (`removes_in_one_act`) compares first, and callers
                exclude others.

        Raises:
            Conflict: The file is not `expected` any more; nothing was removed.
        """
        ...

    def removes_in_one_act(self, path: str) -> bool:
        """Whether `remove_file` compares a version and removes it in one act there. The first call of a
        process tries that, by an object of a random name beside the path."""
        ...

    def remove_tree(self, path: str) -> None:
        """Removes a directory with all that is below it, or a file; what is gone already is no error."""
        ...

    @property
    def is_listable(self) -> bool:
        """Whether it tells what is in a directory; behind HTTP nothing does."""
        ...

    @property
    def engine(self) -> _native.ObjectStore | None:
        """What the engine takes as the root of whole paths; None for files of this system."""
        ...

    @property
    def renames(self) -> Renames | None:
        """Renames of files and directories; None where there are none."""
        ...


class Renames(Protocol):
    """Renames of files and whole directories within one file system."""

    def new(self, source: str, target: str) -> None:
        """Gives something a name that nothing has.

        Raises:
            Conflict: Something has it; nothing was changed.
        """
        ...

    def exchange(self, first: str, second: str) -> None:
        """Swaps two names in one act.

        Raises:
            Unsupported: The file system cannot do that.
        """
        ...

    def over(
        self,
        source: str,
        target: str,
        action: str = "replace",
        path: str | None = None,
        *,
        root: Root | None = None,
    ) -> None:
        """Gives something the name of another file, or of an empty directory, in one act.

        Args:
            source: What is renamed.
            target: Its new name.
            action: What that does, for messages: "could not …".
            path: To what; by default the target.
            root: The directory held open that the source is in.

        Raises:
            Conflict, NotDirectory: A directory has the name that is not empty, or something of another kind.
        """
        ...

    def share(self, source: str, target: str, *, root: Root) -> bool:
        """Gives a file a further name, or makes another file of the same blocks. What is at one name stays
        whatever happens to the other, unless somebody writes to the file itself.

        Args:
            source: The file.
            target: The name, which nothing has.
            root: The directory held open that the source is in.

        Returns:
            Whether that is possible; else nothing was changed.
        """
        ...
