"""Object stores: S3 and what speaks its protocol, Google Cloud Storage, Azure Blob Storage.

A path is a whole location, `s3://bucket/run/1200`. What stands for a directory is the beginning of names.
Requests, signatures and retries are the engine's (`crates/waystation-store`), and each ends within the
deadline of the options.
Failure sequence of a write: a client that is killed before a request arrives has changed nothing; after it,
the whole object is there. A small object is put in one request, on condition that it is new, or unchanged,
where that counts.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
from collections.abc import Iterator, Sequence
from typing import IO, TypeAlias

from waystation import _native
from waystation._errors import Conflict, Corrupt, InvalidInput, NotFound
from waystation._options import StoreSettings
from waystation._options.in_effect import current_options
from waystation.storage import names
from waystation.storage.base import Entry, Identity, Status

_Version: TypeAlias = tuple[int, int, str | None, str | None]

_LOCATION = re.compile(r"(?P<root>(?:s3|s3a|gs|az|abfs|abfss)://[^/]+)(?P<key>/.*)?", re.DOTALL)
_COMMIT_LIMIT_BYTES = 256 << 20
# Stores that are reached in different ways at a time.
_MOST_STORES = 64


def location(text: str) -> str:
    """A location in its one form.

    Raises:
        InvalidInput: It is none.
    """
    found = _LOCATION.fullmatch(text)
    if found is None:
        raise InvalidInput(
            f"'{_without_password(text)}' is no location of a store that is known; give one like "
            "s3://bucket/name, gs://bucket/name or az://container/name, or a path",
        )
    root, key = found["root"], (found["key"] or "").strip("/")
    if "@" in root and not root.startswith("abfs"):
        raise InvalidInput("a location may not hold credentials; give them in the environment, or as options")
    parts = key.split("/") if key else []
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise InvalidInput(f"'{text}' has an empty part, or '.' or '..', which name no object", path=text)
    return "/".join([root, *parts])


def _without_password(text: str) -> str:
    return re.sub(r"//[^/]*@", "//…@", text)


def of(path: str) -> ObjectStorage:
    """The store of a location, as the options in effect say it is reached."""
    found = _LOCATION.fullmatch(path)
    if found is None:
        raise InvalidInput(f"'{_without_password(path)}' is no location of an object store")
    options = current_options().storage
    settings = StoreSettings(options.settings)
    return _store(
        found["root"], settings, options.deadline_s, allow_unconditional=options.allow_unconditional
    )


@functools.lru_cache(_MOST_STORES)
def _store(
    root: str, settings: StoreSettings, deadline_s: float, *, allow_unconditional: bool
) -> ObjectStorage:
    given = list(settings.items())
    return ObjectStorage(
        _native.ObjectStore(
            root, options=given, deadline_s=deadline_s, allow_unconditional=allow_unconditional
        )
    )


class ObjectFile:
    """See `base.OpenFile`."""

    descriptor = None

    def __init__(self, store: _native.ObjectStore, path: str, status: Status) -> None:
        self.path = path
        self.status = status
        self._store = store

    def read(self, offset: int, nbytes: int) -> bytes:
        """See `base.OpenFile`."""
        end = min(offset + nbytes, self.status.nbytes)
        if end <= offset:
            return b""
        return self._store.get_range(self.path, offset, end, _version(self.status.identity))

    def fill(self, offset: int, view: memoryview) -> None:
        """See `base.OpenFile`."""
        content = self.read(offset, len(view))
        if len(content) != len(view):
            raise Conflict("the object ends before the range; open it again", path=self.path)
        view[:] = content


class ObjectReader:
    """What reads by locations."""

    def __init__(self, store: _native.ObjectStore) -> None:
        self.engine = store

    def status(self, path: str, *, follow_links: bool = True) -> Status | None:
        """See `base.Reader`."""
        try:
            found = self.engine.status(path)
        except NotFound:  # not even a bucket
            return None
        if found is None:
            return None
        is_directory, version = found
        return Status("directory" if is_directory else "file", _identity(version))

    def entries(self, path: str) -> list[Entry]:
        """See `base.Reader`."""
        objects, directories = self.engine.list(path)
        if not objects and not directories:
            raise NotFound(f"nothing is at '{path}'", path=path)
        found = [Entry(name, "file") for name, _ in objects]
        return sorted([*found, *(Entry(name, "directory") for name in directories)])

    @contextlib.contextmanager
    def opened(self, path: str) -> Iterator[ObjectFile]:
        """See `base.Reader`."""
        status = self.status(path)
        if status is None:
            raise NotFound(f"there is no object '{path}'", path=path)
        yield ObjectFile(self.engine, path, status)

    def read_files(self, paths: Sequence[str], *, limit_bytes: int | Sequence[int]) -> list[bytes]:
        """See `base.Reader`."""
        limits = [limit_bytes] * len(paths) if isinstance(limit_bytes, int) else limit_bytes
        return [content for content, _ in self.engine.get(list(zip(paths, limits, strict=True)))]


class ObjectRoot(ObjectReader):
    """See `base.Root`. The commit of the directory is read once; all else has names that are never used
    again."""

    def __init__(self, store: _native.ObjectStore, path: str) -> None:
        super().__init__(store)
        self.path = path
        self._commit_path = os.path.join(path, names.COMMIT)
        self._commit: tuple[bytes, _Version] | None = None
        try:
            (self._commit,) = store.get([(self._commit_path, _COMMIT_LIMIT_BYTES)])
        except NotFound as error:
            if "bucket" in error.context or super().status(path) is None:
                raise

    def is_current(self) -> bool:
        """See `base.Root`."""
        present, held = super().status(self._commit_path), self._commit
        return (None if present is None else present.identity) == (
            None if held is None else _identity(held[1])
        )

    def status(self, path: str, *, follow_links: bool = True) -> Status | None:
        """See `base.Reader`."""
        if path == self._commit_path:
            return None if self._commit is None else Status("file", _identity(self._commit[1]))
        return super().status(path)

    def read_files(self, paths: Sequence[str], *, limit_bytes: int | Sequence[int]) -> list[bytes]:
        """See `base.Reader`."""
        if self._commit is None or list(paths) != [self._commit_path]:
            return super().read_files(paths, limit_bytes=limit_bytes)
        content = self._commit[0]
        limit = limit_bytes if isinstance(limit_bytes, int) else limit_bytes[0]
        if len(content) > limit:
            raise Corrupt(
                f"'{paths[0]}' has {len(content)} bytes, more than {limit}, which is the most it may",
                path=paths[0],
            )
        return [content]


class ObjectStorage(ObjectReader):
    """See `base.Storage`."""

    renames = None

    def hold(self, path: str, *, follow_links_out: bool = False) -> ObjectRoot:
        """See `base.Storage`."""
        return ObjectRoot(self.engine, path)

    def resolved(self, path: str) -> str:
        """See `base.Storage`: there are no links."""
        return path

    def is_writable(self, directory: str) -> bool:
        """See `base.Storage`: only a write tells."""
        return True

    def free_bytes(self, directory: str) -> int | None:
        """See `base.Storage`: nobody knows."""
        return None

    def use_of(self, directory: str) -> str | None:
        """See `base.Storage`."""
        return None

    def read_version(self, path: str, *, limit_bytes: int) -> tuple[bytes, Identity]:
        """See `base.Storage`."""
        try:
            ((content, version),) = self.engine.get([(path, limit_bytes)])
        except NotFound as error:
            if "bucket" not in error.context and self.status(path) is not None:
                raise Corrupt(f"'{path}' is no file, as was expected", path=path) from error
            raise
        return content, _identity(version)

    def create(self, path: str, content: bytes, attempt_id: str) -> None:
        """See `base.Storage`."""
        self.engine.put(path, content, new=True)

    def replace(
        self, path: str, content: bytes, attempt_id: str, *, expected: Identity | None = None
    ) -> None:
        """See `base.Storage`."""
        try:
            self.engine.put(path, content, unchanged=None if expected is None else _version(expected))
        except Conflict as error:
            change = "was left alone: another file has taken its place"
            if self.status(path) is None:
                change = "was removed meanwhile"
            raise Conflict(f"'{path}' {change}; look at it again", path=path) from error

    def write_files(self, contents: Sequence[tuple[str, bytes]]) -> None:
        """See `base.Storage`."""
        self.engine.put_all(contents)

    @contextlib.contextmanager
    def new_file(self, path: str) -> Iterator[IO[bytes]]:
        """See `base.Storage`. It is put at the end, and is in memory until then."""
        if self.status(path) is not None:
            raise Conflict(f"could not create '{path}': it exists", path=path)
        content = io.BytesIO()
        yield content
        self.engine.put(path, content.getvalue(), new=True)

    def make_directory(self, path: str, *, parents: bool = False, permission_mode: int | None = None) -> None:
        """See `base.Storage`: they come with what is in them."""

    def copy(self, source: str, target: str) -> None:
        """See `base.Storage`."""
        self.engine.copy(source, target)

    def remove_file(self, path: str) -> None:
        """See `base.Storage`."""
        self.engine.remove(path)

    def remove_tree(self, path: str) -> None:
        """See `base.Storage`."""
        if not self.engine.remove_all(path):
            self.engine.remove(path)


def _identity(version: _Version) -> Identity:
    nbytes, modified_ns, tag, generation = version
    return Identity(0, 0, nbytes, modified_ns, modified_ns, tag, generation)


def _version(identity: Identity) -> _Version:
    return identity.nbytes, identity.modified_ns, identity.tag, identity.generation
