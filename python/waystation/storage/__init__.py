"""Storage: where checkpoints are, and the only part of the package that asks the system about their files.

`Storage` is the protocol, `of` the storage of a path: the local file system, or an object store. The
functions here serve call sites that do not care which it is. They take whole paths, which messages name, and
`root`, the directory held open that the path is in; without one they go by the path. Attempts, leases and the
lock of writers have modules of their own. The data of arrays do not pass here: the engine moves them.
"""

from __future__ import annotations

import collections
import contextvars
import os
import re
import threading
import urllib.parse
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from waystation import _native
from waystation._errors import (
    Cancelled,
    InvalidInput,
    NotFound,
    Unsupported,
    UnusablePath,
    WaystationError,
    WrongType,
)
from waystation._threads import is_started
from waystation.storage import names
from waystation.storage.base import (
    SLACK_BYTES,
    Entry,
    Identity,
    OpenFile,
    Parts,
    Reader,
    Renames,
    Root,
    Status,
    Storage,
)
from waystation.storage.local import LocalStorage, in_huge_pages, is_absence, mapped, new_mapped
from waystation.storage.location import AnyPath, Location, as_path, is_in_store

__all__ = [
    "SLACK_BYTES",
    "AnyPath",
    "Entry",
    "Identity",
    "Location",
    "OpenFile",
    "Parts",
    "Reader",
    "Renames",
    "Root",
    "Status",
    "Storage",
    "absolute",
    "as_path",
    "check_links",
    "directories",
    "engine_of",
    "engine_root",
    "entries",
    "entries_or_none",
    "files_below",
    "has_query",
    "in_huge_pages",
    "is_absence",
    "is_directory",
    "is_file",
    "is_in_store",
    "is_same_directory",
    "is_there",
    "is_version",
    "is_within",
    "list_names",
    "located",
    "make_directory",
    "mapped",
    "names",
    "new_mapped",
    "of",
    "opened",
    "read",
    "read_file",
    "read_files",
    "read_version",
    "reader",
    "remove_file",
    "remove_tree",
    "renames",
    "resolved",
    "side_by_side",
    "status",
    "sync_entries",
]

PathLike = str | os.PathLike[str]
T = TypeVar("T")
R = TypeVar("R")

_LOCAL: Storage = LocalStorage()
_SHORTENED = re.compile("(s3a?|gc?s|az|abfss?|https?|file):/?[^/]", re.IGNORECASE)
_FILE_URL = re.compile("file://", re.IGNORECASE)
# Threads that wait for a store.
_SIDE_BY_SIDE = 32


def absolute(path: object) -> str:
    """The absolute form of a path on a mounted file system; symbolic links stay as they are.

    Raises:
        WrongType: It is no string and no `os.PathLike`.
        NotFound: It is relative, and the working directory was removed.
        InvalidInput: It is a URL; UnusablePath: it is empty or bytes, holds a NUL, or is not UTF-8.
    """
    if not isinstance(path, str | os.PathLike):
        advice = "; use os.fsdecode(path)" if isinstance(path, bytes) else ""
        raise WrongType(f"a path must be a string or os.PathLike, not {type(path).__name__}{advice}")
    text: object = os.fspath(path)
    if not isinstance(text, str) or not text or "\0" in text:
        reason = "it is no text" if not isinstance(text, str) else "it has a NUL" if text else "it is empty"
        raise UnusablePath(f"{text!r} is not a usable path: {reason}; give the name of a file or directory")
    if _FILE_URL.match(text):
        text = _path_of_url(text)
    _require_slashes(text)
    if "://" in text:
        from waystation.storage import object_store

        raise InvalidInput(
            f"'{object_store.shown(text)}' is a URL, and this works on paths of mounted file systems only"
        )
    try:
        whole = os.path.abspath(os.path.expanduser(text))
    except FileNotFoundError as error:
        raise NotFound(
            f"the working directory of this process was removed, so '{text}' leads nowhere; give an absolute "
            "path, or change to another directory first",
            path=text,
        ) from error
    try:
        whole.encode()
    except UnicodeEncodeError as error:
        raise UnusablePath(
            f"{whole!r} is not a usable path: it is not UTF-8; rename what has such a name, or give another "
            "path"
        ) from error
    return whole


def _path_of_url(url: str) -> str:
    """The path that a URL of a file stands for.

    Raises:
        InvalidInput: It is a file of another machine, or no URL.
    """
    try:
        _, host, path, query, fragment = urllib.parse.urlsplit(url)
        text = urllib.parse.unquote(path, errors="strict")
    except ValueError:
        host = text = ""
    if host not in ("", "localhost") or not text.startswith("/") or query or fragment or "\0" in text:
        raise InvalidInput(
            f"'{url}' is no URL of a file on this machine; give one like file:///directory/name, with '%3F' "
            "and '%23' for a question mark and a hash, or the path alone",
            path=url,
        )
    return text


def located(path: object) -> str:
    """The absolute form of a path, or the location that it is: in an object store (`s3://bucket/name`), or
    behind HTTP, then without its query (see `object_store`).

    Raises:
        InvalidInput: It is a URL, and no such location; and what `absolute` raises.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if isinstance(text, str) and _FILE_URL.match(text):
        return absolute(text)
    if isinstance(text, str) and "://" in text:
        from waystation.storage import object_store

        return object_store.location(text)
    return absolute(path)


def _require_slashes(text: str) -> None:
    """Refuses what was a location once, and would be a directory named 's3:' now."""
    if _SHORTENED.match(text):
        from waystation.storage import object_store

        raise InvalidInput(
            f"'{object_store.shown(text)}' lacks a slash: pathlib and normpath take one out of 's3://' and "
            "'file://'; give the location as a string that has both (a directory that is named so: './' and "
            "its name, as a string)"
        )


def of(path: PathLike) -> Storage:
    """The storage that a path is in, as `absolute` and `located` give it."""
    if not is_in_store(path):
        return _LOCAL
    from waystation.storage import object_store

    return object_store.of(os.fspath(path))


def has_query(path: PathLike) -> bool:
    """Whether a location is that of a URL with a query."""
    if not is_in_store(path):
        return False
    from waystation.storage import object_store

    return object_store.has_query(os.fspath(path))


def resolved(path: PathLike) -> str:
    """The path without symbolic links."""
    return of(path).resolved(os.fspath(path))


def reader(path: PathLike, root: Root | None = None) -> Reader:
    """What reads a path: the directory held open that it is in, or else its storage."""
    return of(path) if root is None else root


def renames(path: PathLike) -> Renames:
    """Renames in the storage of a path, by which attempts become checkpoints.

    Raises:
        Unsupported: It has none.
    """
    found = of(path).renames
    if found is None:
        raise Unsupported(
            f"'{path}' is in a storage without renames; save to a file system", path=os.fspath(path)
        )
    return found


def engine_root(root: Root | Storage | None) -> _native.Directory | _native.ObjectStore | None:
    """A directory held open, or a storage, as functions of the engine take it."""
    return None if root is None else root.engine


def engine_of(path: PathLike) -> _native.ObjectStore | None:
    """What the engine writes to at a path; None for files of this system."""
    return of(path).engine


def side_by_side(directory: PathLike, call: Callable[[T], R], arguments: Iterable[T]) -> list[R]:
    """What a call gives for each of several things in a directory. In a store, whose answers take long,
    several calls run at a time: as many as the system starts threads for, one of them in this thread. An
    interrupt of this thread ends the waits of the others.

    Raises:
        What a call raises: then no more of them begin.
    """
    given = list(arguments)
    if not is_in_store(directory):
        return [call(argument) for argument in given]
    waits = _native.StoreWaits()
    results: dict[int, R] = {}
    errors: list[BaseException] = []
    pending = collections.deque(range(len(given)))

    def work() -> None:
        while not errors:
            try:
                number = pending.popleft()
            except IndexError:
                return
            try:
                results[number] = call(given[number])
            except BaseException as error:
                errors.append(error)

    helpers: list[threading.Thread] = []
    try:
        _have_help(work, waits, min(len(given), _SIDE_BY_SIDE) - 1, helpers)
        work()
        if any(map(_is_interrupt, errors)):
            waits.end()
        for helper in helpers:
            helper.join()
    except BaseException as error:  # an interrupt of the wait
        errors.append(error)
        waits.end()
        for helper in helpers:
            helper.join()
    if errors:
        raise next(filter(_is_interrupt, errors), errors[0])
    return [results[number] for number in range(len(given))]


def _have_help(
    work: Callable[[], None], waits: _native.StoreWaits, most: int, helpers: list[threading.Thread]
) -> None:
    """Starts threads that do the same work, as many as the system allows; adds them to `helpers`.

    No executor does it: that refuses work once the interpreter waits for its last threads, in one of which a
    save in the background may go on.
    """

    def help_out() -> None:
        waits.join()
        work()

    for _ in range(most):
        run = contextvars.copy_context().run
        thread = threading.Thread(target=run, args=(help_out,), name="waystation: store")
        if not is_started(thread):
            return
        helpers.append(thread)


def _is_interrupt(error: BaseException) -> bool:
    return isinstance(error, Cancelled) or not isinstance(error, Exception)


# ---- looking -----------------------------------------------------------------------------------


def status(path: PathLike, root: Root | None = None, *, follow_links: bool = True) -> Status | None:
    """What is at a path; None where nothing is.

    Raises:
        PermissionDenied, Unavailable: It cannot be told. (UnusablePath: links go in a circle.)
        Unsupported: A symbolic link leads out of `root`.
    """
    return reader(path, root).status(os.fspath(path), follow_links=follow_links)


def is_there(path: PathLike, root: Root | None = None) -> bool:
    """Whether anything is at a path, be it a link to nothing; raises as `status` does."""
    return status(path, root, follow_links=False) is not None


def is_file(path: PathLike, root: Root | None = None) -> bool:
    """Whether a file is at a path, or a link to one; raises as `status` does."""
    found = status(path, root)
    return found is not None and found.kind == "file"


def is_directory(path: PathLike, root: Root | None = None) -> bool:
    """Whether a directory is at a path, or a link to one; raises as `status` does."""
    found = status(path, root)
    return found is not None and found.kind == "directory"


def entries(path: PathLike, root: Root | None = None) -> list[Entry]:
    """What is in a directory, by name.

    Raises:
        NotFound: It is not there.
    """
    return list(reader(path, root).entries(os.fspath(path)))


def entries_or_none(path: PathLike, root: Root | None = None) -> list[Entry]:
    """What is in a directory, none where it is not there.

    Raises:
        NotFound: Not even the bucket is there.
    """
    try:
        return entries(path, root)
    except WaystationError as error:
        if not is_absence(error) or "bucket" in error.context:
            raise
        return []


def list_names(path: PathLike) -> list[str]:
    """The names in a directory, in order; raises as `entries` does."""
    return [entry.name for entry in entries(path)]


def directories(path: PathLike, root: Root | None = None) -> list[str]:
    """The names of the directories in a directory, and of links to such, none where it is not there."""
    found = []
    for entry in entries_or_none(path, root):
        is_meant = entry.kind == "directory"
        if entry.kind == "link":
            try:
                is_meant = is_directory(os.path.join(path, entry.name), root)
            except Unsupported:  # it leads out of the root, as whoever opens it is told
                is_meant = True
            except (InvalidInput, UnusablePath):  # it goes in a circle
                is_meant = False
        if is_meant:
            found.append(entry.name)
    return found


def is_same_directory(first: PathLike, second: PathLike) -> bool:
    """Whether two paths lead to one directory: by the same name, by links, or because it is mounted twice."""
    resolved_first, resolved_second = resolved(first), resolved(second)
    if resolved_first == resolved_second:
        return True
    if is_in_store(first) or is_in_store(second):
        return False
    found, other = status(resolved_first), status(resolved_second)
    if found is None or other is None:
        return False
    return (found.identity.device, found.identity.inode) == (other.identity.device, other.identity.inode)


def is_within(path: PathLike, directory: PathLike) -> bool:
    """Whether a path, which need not be there, leads to a directory or to what is beneath it."""
    inside = resolved(path)
    while not is_same_directory(inside, directory):
        above = os.path.dirname(inside)
        if above == inside or (is_in_store(inside) and not is_in_store(above)):
            return False
        inside = above
    return True


def check_links(path: str, root: Root) -> None:
    """Refuses symbolic links below a directory that lead out of `root`, for readers that follow them all.

    Raises:
        Unsupported: There is one.
    """
    for entry in entries(path, root):
        below = os.path.join(path, entry.name)
        if entry.kind == "link":
            status(below, root)
        elif entry.kind == "directory":
            check_links(below, root)


def files_below(path: str, root: Root | None = None) -> dict[str, int]:
    """The files below a directory with their lengths in bytes, by their paths from there."""
    found = {}
    for entry in entries(path, root):
        below = os.path.join(path, entry.name)
        if entry.kind == "directory":
            for name, nbytes in files_below(below, root).items():
                found[os.path.join(entry.name, name)] = nbytes
        elif entry.nbytes is not None:
            found[entry.name] = entry.nbytes
        elif (seen := status(below, root)) is not None:
            found[entry.name] = seen.nbytes
    return found


def opened(path: PathLike, root: Root | None = None) -> AbstractContextManager[OpenFile]:
    """Opens a file to read from it, as long as the block lasts. Never waits for a named pipe.

    Raises:
        NotFound: Nothing is there.
        Unsupported: A symbolic link leads out of `root`.
    """
    return reader(path, root).opened(os.fspath(path))


def read(path: PathLike, root: Root | None, offset: int, nbytes: int) -> bytes:
    """A range of a file; shorter only where the file ends."""
    with opened(path, root) as file:
        return file.read(offset, nbytes)


def read_files(
    paths: Sequence[str], root: Root | None = None, *, limit_bytes: int | Sequence[int]
) -> list[bytes]:
    """All of several files, read side by side; the limit is of all, or each has its own.

    Raises:
        NotFound: One is not there.
        Corrupt: One is larger than the limit.
    """
    return reader(paths[0], root).read_files(paths, limit_bytes=limit_bytes) if paths else []


def read_file(path: PathLike, root: Root | None = None, *, limit_bytes: int) -> bytes:
    """All of a file; raises as `read_files` does."""
    return read_files([os.fspath(path)], root, limit_bytes=limit_bytes)[0]


def read_version(path: PathLike, *, limit_bytes: int) -> tuple[bytes, Identity]:
    """All of a file, and what tells this version from later ones, for `Storage.replace`.

    Raises:
        NotFound: It is not there.
        Corrupt: It is no file, or larger than the limit.
    """
    return of(path).read_version(os.fspath(path), limit_bytes=limit_bytes)


def is_version(path: PathLike, expected: Identity) -> bool:
    """Whether a file is the version that somebody has read; a further name, or other permissions, make no
    other one."""
    found = status(path)
    return found is not None and found.identity == expected


def remove_file(path: PathLike, *, expected: Identity | None = None) -> None:
    """Removes a file; one that is gone already is no error.

    Raises:
        Conflict: It is not the version `expected` any more; nothing was removed. See `Storage.remove_file`.
    """
    of(path).remove_file(os.fspath(path), expected=expected)


def remove_tree(path: PathLike) -> None:
    """Removes a directory with all that is below it, or a file; what is gone already is no error."""
    of(path).remove_tree(os.fspath(path))


def make_directory(path: PathLike, *, parents: bool = False, permission_mode: int | None = None) -> None:
    """Makes a directory, unless it is there, and those above it, if `parents`.

    The mode is that of the directory, if this makes it.
    """
    of(path).make_directory(os.fspath(path), parents=parents, permission_mode=permission_mode)


def sync_entries(directory: PathLike) -> None:
    """Makes durable which names a directory has. In a store they are."""
    if not is_in_store(directory):
        _native.sync_paths([os.fspath(directory)])
