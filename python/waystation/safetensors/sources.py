"""Which files a model consists of: what a user gives, as headers that belong together.

A file, several files, an index, a directory that holds one of these, or a model in a cache of Hugging Face
(whose files are symbolic links). Invariants of what is returned: no tensor is in two files; files of a
numbered set are all there; files that an index names hold what it says, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import re
import urllib.parse
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from waystation import storage
from waystation._errors import (
    Conflict,
    Corrupt,
    InvalidInput,
    NotFound,
    PermissionDenied,
    Unavailable,
    Unsupported,
    WaystationError,
    WrongType,
)
from waystation.layouts.native.names import RECORD
from waystation.layouts.orbax import checkpoint as orbax
from waystation.safetensors.headers import Header, read_headers
from waystation.safetensors.index import SUFFIX, Index, read_index, require_no_index
from waystation.storage import disks
from waystation.storage.foreign import described, hub_advice

PathLike: TypeAlias = str | os.PathLike[str]
Files: TypeAlias = PathLike | Sequence[PathLike]

_EXTENSION = ".safetensors"
WHOLE_FILE = "model.safetensors"
_INDEX_FILE = f"model{SUFFIX}"
_NUMBERED = re.compile(r"(?P<stem>.*)-(?P<number>\d{5,})-of-(?P<count>\d{5,})\.safetensors", re.DOTALL)
_ATTEMPTS = 5  # while a model is being replaced

_REVISION = re.compile(r"[0-9a-f]{40}")


def find(files: Files) -> list[Header]:
    """The headers of the files that are meant, those of an index or directory in the order of their names.

    Raises:
        NotFound: There is nothing at a path, or no safetensors file in a directory.
        InvalidInput: It cannot be told what is meant.
        Corrupt: A file is damaged, missing, or not what its index says.
        Unavailable: A file is a link to a disk that is missing.
        Conflict: Somebody replaces them all the time.
    """
    if not isinstance(files, str | os.PathLike):
        return _read(_paths(files), None)
    resolved = resolve(files)
    for _ in range(_ATTEMPTS):
        paths, index = resolved
        try:
            headers = _read(paths, index)
        except WaystationError:
            again = resolve(files)
            if again == resolved:
                raise
        else:
            if index is None or index.is_current():
                return headers
            again = resolve(files)
        resolved = again
    raise Conflict(
        "the files were replaced again and again while their headers were read; open them once nobody saves "
        "there",
        path=resolved[0][0],
    )


def files_of_checkpoint(path: str) -> list[str]:
    """The files that a path is as a checkpoint, by Orbax's rule: the file that it is, or all in a directory.

    Returns:
        The paths in the order of their names; none where no safetensors file is there.
    """
    if storage.is_directory(path):
        return [os.path.join(path, name) for name in storage.list_names(path) if name.endswith(_EXTENSION)]
    return [path] if path.endswith(_EXTENSION) and storage.is_file(path) else []


def find_in_checkpoint(path: str) -> list[Header]:
    """The headers of `files_of_checkpoint`; unlike `find`, files that an index leaves out are among them.

    Raises:
        Corrupt: A file is damaged, or one of a numbered set or of an index is missing.
    """
    paths = files_of_checkpoint(path)
    if storage.is_directory(path):
        names = storage.list_names(path)
        _check_numbers(path, [name for name in names if name.endswith(_EXTENSION)])
        for name in names:
            if name.endswith(SUFFIX):
                read_index(os.path.join(path, name)).check_present(names)
    return _read(paths, None)


def _read(paths: Sequence[str], index: Index | None) -> list[Header]:
    """The headers, held against the index and each other."""
    try:
        headers = read_headers(paths)
    except NotFound:
        for path in paths:
            _require_disk(path)
        if index is not None:
            index.check_present()  # which says that the model is there in part
        for path in paths:
            _require_target(path)
        for path in paths if index is None else ():
            require_no_index(path)
        raise
    except PermissionDenied as error:
        raise error.where(target=disks.link_target(str(error.context.get("path", ""))))
    if index is not None:
        index.check(headers)
    _check_unique(headers)
    return headers


def _require_disk(path: str) -> None:
    """Raises Unavailable if a path is a link into a directory that is not there: its disk is missing."""
    target = disks.link_target(path)
    directory = "" if target is None else os.path.dirname(target)
    if target is not None and storage.status(path) is None and not storage.is_directory(directory):
        raise Unavailable(
            f"'{path}' is a link to '{target}', and there is no directory '{directory}'; mount the disk "
            "that has it, then open the model again",
            path=path,
            target=target,
        )


def _require_target(path: str) -> None:
    """Raises NotFound if a path is a link to a file that is not there."""
    target = disks.link_target(path)
    if target is not None and storage.status(path) is None:
        raise NotFound(
            f"'{path}' is a link to '{target}', and there is no such file; restore it, or get the model "
            "again",
            path=path,
            target=target,
        )


def _paths(files: Sequence[PathLike] | bytes) -> list[str]:
    if isinstance(files, bytes):
        storage.located(files)  # which refuses it, and says what to do
    if not isinstance(files, Iterable):
        raise WrongType(f"files must be a path or several paths, not {type(files).__name__}")
    paths = [storage.located(path) for path in files]
    if not paths:
        raise InvalidInput("no files were given")
    directories = {directory: storage.resolved(directory) for directory in map(os.path.dirname, paths)}
    return [os.path.join(directories[os.path.dirname(path)], os.path.basename(path)) for path in paths]


def resolve(files: PathLike) -> tuple[list[str], Index | None]:
    """The files that a path means now, and the index that names them, if that is what tells.

    Their directory is no link: one that is moved to another model meanwhile would lead to files of both.
    """
    path = storage.located(files)
    if storage.of(path).is_listable:
        found = storage.status(path)
        if found is not None and found.kind == "directory":
            return _in_directory(storage.resolved(path))
        advice = hub_advice(path) if found is None else ""
        if advice:
            raise NotFound(f"there is no file or directory '{path}'{advice}", path=path)
    elif urllib.parse.urlsplit(os.fspath(files)).path.endswith("/"):
        raise Unsupported(
            f"'{path}' is a directory behind HTTP, where nothing can be listed; give its index "
            f"({_INDEX_FILE}), or its files",
            path=path,
        )
    if path.endswith(".json"):
        directory, name = os.path.split(path)
        index = read_index(os.path.join(storage.resolved(directory), name))
        return index.files(), index
    return [path], None


def _in_directory(directory: str) -> tuple[list[str], Index | None]:
    """What a directory holds, sought in the order in which tools of Hugging Face do."""
    names = storage.list_names(directory)
    if WHOLE_FILE in names:
        return [os.path.join(directory, WHOLE_FILE)], None
    indexes = [name for name in names if name.endswith(SUFFIX)]
    if _INDEX_FILE in indexes or len(indexes) == 1:
        index = read_index(os.path.join(directory, _INDEX_FILE if _INDEX_FILE in indexes else indexes[0]))
        return index.files(), index
    if indexes:
        raise InvalidInput(
            f"there are several indexes: {', '.join(indexes)}; give one of them", path=directory
        )
    found = [name for name in names if name.endswith(_EXTENSION)]
    if found:
        _check_numbers(directory, found)
        return [os.path.join(directory, name) for name in found], None
    revision = _cached_revision(directory, names)
    if revision is not None:
        return _in_directory(revision)
    checkpoint = checkpoint_of(directory)
    if checkpoint is not None:
        raise NotFound(
            f"there is no safetensors file in '{directory}', which is (in) a checkpoint; "
            f"waystation.load('{checkpoint}') reads that, and 'waystation export' makes safetensors files "
            "of it",
            path=directory,
        )
    foreign = described(directory)
    raise NotFound(
        f"there is no safetensors file in '{directory}'"
        + (
            f", which is {foreign}"
            if foreign
            else "; give the directory of a model, its index, or one of its files"
        ),
        path=directory,
    )


def checkpoint_of(directory: str) -> str | None:
    """The checkpoint, of ours or of Orbax, that a directory is or is a checkpointable of; None if none."""
    if not storage.of(directory).is_listable:
        return None
    for each in (directory, os.path.dirname(directory)):
        # Who may not look into a directory beside it, such as lost+found, may use this one all the same.
        with contextlib.suppress(PermissionDenied):
            if storage.is_file(os.path.join(each, RECORD)) or orbax.is_checkpoint(each):
                return each
    return None


def _check_numbers(directory: str, names: Sequence[str]) -> None:
    """Refuses a set of files `stem-00001-of-00003.safetensors`, … of which some are missing."""
    sets: dict[tuple[str, str], set[int]] = {}
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match is not None:
            sets.setdefault((match["stem"], match["count"]), set()).add(int(match["number"]))
    for (stem, count), present in sets.items():
        if len(present) < int(count):
            first = next(number for number in range(1, int(count) + 1) if number not in present)
            missing = f"{stem}-{first:05}-of-{count}.safetensors"
            raise Corrupt(
                f"{len(present)} of {int(count)} files are there, {missing!r} is not; the model was "
                "downloaded in part",
                path=os.path.join(directory, missing),
            )


def _cached_revision(directory: str, names: Sequence[str]) -> str | None:
    """The directory of the revision that a model's directory in a cache of Hugging Face holds."""
    if "snapshots" not in names:
        return None
    held = storage.list_names(os.path.join(directory, "snapshots"))
    revisions = [name for name in held if _REVISION.fullmatch(name)]
    main = _main_revision(directory)
    if main:
        if main not in held:
            others = ", ".join(f"snapshots/{revision}" for revision in revisions) or "none"
            raise NotFound(
                f"the model is at revision {main} (refs/main), of which the cache has no snapshot; it has "
                f"{others}. Download the model again, or give the directory of a revision that is there",
                path=directory,
            )
        return os.path.join(directory, "snapshots", main)
    if len(revisions) > 1:
        raise InvalidInput(
            f"the cache holds {len(revisions)} revisions of the model, and does not say which is meant; give "
            f"the directory of one, for example snapshots/{revisions[0]}",
            path=directory,
        )
    return os.path.join(directory, "snapshots", revisions[0]) if revisions else None


def _main_revision(directory: str) -> str:
    try:
        return (
            storage.read(os.path.join(directory, "refs", "main"), None, 0, 64)
            .decode(errors="replace")
            .strip()
        )
    except OSError:
        return ""


def _check_unique(headers: Sequence[Header]) -> None:
    """Refuses a tensor that is in two files: two readers could take different ones."""
    if len(headers) < 2:
        return
    seen: dict[str, str] = {}
    for header in headers:
        for tensor, *_ in header.tensors:
            other = seen.setdefault(tensor, header.path)
            if other != header.path:
                raise Corrupt(f"a tensor is in this file and in '{other}'", path=header.path, tensor=tensor)
        # A file that is given twice has all of its tensors in one place, but each of them twice.
    if len({header.path for header in headers}) < len(headers):
        raise InvalidInput("a file was given twice")
