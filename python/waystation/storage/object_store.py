"""Object stores: S3 and what speaks its protocol, Google Cloud Storage, Azure Blob Storage; servers of HTTP.

A path is a whole location, `s3://bucket/run/1200`. What stands for a directory is the beginning of names.
Requests, signatures and retries are the engine's (`crates/waystation-store`), and each ends within the
deadline of the options.
Failure sequence of a write: a client that is killed before a request arrives has changed nothing; after it,
the whole object is there. A small object is put in one request, on condition that it is new, or unchanged,
where that counts.

A URL of HTTP is a location as well. Its query may be a signature, which nobody is to see, so the location of
`https://host/a?query` is `https+query-1a2b3c4d://host/a`: what stands for the query is looked up here, in
this process. Whatever lies beside it is asked for with the same query.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import re
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import IO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from waystation import _native
from waystation._errors import Conflict, Corrupt, InvalidInput, NotFound
from waystation._options import StoreSettings
from waystation._options.in_effect import current_options
from waystation.storage import names, side_by_side
from waystation.storage.base import SLACK_BYTES, Entry, Identity, Status

_Version: TypeAlias = tuple[int, int, str | None, str | None]

_LOCATION = re.compile(
    r"(?P<root>(?:s3|s3a|gs|az|abfs|abfss|https?(?:\+query-(?P<query>[0-9a-f]+))?)://[^/]+)(?P<key>/.*)?",
    re.DOTALL,
)
_URL = re.compile("https?://", re.IGNORECASE)
# Other writings of schemes. Queries are those of HTTP; a mark of a question alone may be in a name.
_SCHEME = re.compile("(s3a?|gc?s|az|abfss?)(?=://)", re.IGNORECASE)
_ONE_NAME = {"gcs": "gs", "s3a": "s3"}
_QUERY = re.compile(r"\?[^/]*=")
# By what stands for them, the oldest first. Whoever opens signed files for weeks does not keep them all.
_queries: dict[str, str] = {}
_MOST_QUERIES = 10_000
_LEAST_DIGITS = 8
_COMMIT_LIMIT_BYTES = 256 << 20
# What comes with the first request: most headers. So many bytes cost less than a second request.
_BEGINNING_BYTES = 256 << 10
# Stores that are reached in different ways at a time.
_MOST_STORES = 64


def location(text: str) -> str:
    """A location in its one form: whatever scheme a program writes, one object has one location, so that
    records, leases and caches know it again.

    Raises:
        InvalidInput: It is none.
    """
    if _URL.match(text):
        text = _location_of_url(text)
    elif (scheme := _SCHEME.match(text)) is not None:
        text = _one_scheme(scheme[0].lower(), text) + text[scheme.end() :]
        if _QUERY.search(text):
            raise InvalidInput(
                f"'{shown(text)}' has a query, which only URLs of HTTP have; leave it out, and give what it "
                "says as Context.storage.settings"
            )
    found = _LOCATION.fullmatch(text)
    if found is None:
        raise InvalidInput(
            f"'{shown(text)}' is no location of a store that is known; give one like s3://bucket/name, "
            "gs://bucket/name or az://container/name, the https:// URL of a file, or a path",
        )
    root, key = found["root"], (found["key"] or "").strip("/")
    if "@" in root and not root.startswith("abfs"):
        raise InvalidInput("a location may not hold credentials; give them in the environment, or as options")
    parts = key.split("/") if key else []
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise InvalidInput(
            f"'{shown(text)}' has an empty part, or '.' or '..', which name no object", path=shown(text)
        )
    return "/".join([root, *parts])


def _one_scheme(scheme: str, text: str) -> str:
    """The scheme of all that mean the same. Azure's `abfs` and `abfss` may have the account in the location,
    which `az` has not."""
    if scheme.startswith("abfs"):
        return "abfss" if "@" in text.partition("://")[2].partition("/")[0] else "az"
    return _ONE_NAME.get(scheme, scheme)


def shown(text: str) -> str:
    """A URL without what may be a credential: a password, or the query, which may be a signature."""
    return re.sub(r"//[^/]*@", "//…@", re.sub(r"[?#].*", "?…", text, flags=re.DOTALL))


def _location_of_url(url: str) -> str:
    """The location of a URL of HTTP, whose query is kept apart.

    Raises:
        InvalidInput: It is none.
    """
    try:
        scheme, host, path, query, _ = urllib.parse.urlsplit(url)
        name = urllib.parse.unquote(path, errors="strict")
    except ValueError:
        host = name = ""
    if not host or "%2f" in path.lower():
        raise InvalidInput(f"'{shown(url)}' is no URL of a file that can be read")
    return f"{scheme}{f'+query-{_kept(query)}' if query else ''}://{host}{name}"


def _kept(query: str) -> str:
    """What stands for a query; the same in all processes of a program, unless two queries are alike."""
    digest = hashlib.sha256(query.encode()).hexdigest()
    digits = _LEAST_DIGITS
    while _queries.setdefault(digest[:digits], query) != query:
        digits += 1
    with contextlib.suppress(KeyError, RuntimeError, StopIteration):  # another thread has done it
        while len(_queries) > _MOST_QUERIES:
            del _queries[next(iter(_queries))]
    return digest[:digits]


def has_query(path: str) -> bool:
    """Whether a location is that of a URL with a query, which often is a signature for one file."""
    found = _LOCATION.fullmatch(path)
    return found is not None and found["query"] is not None


def of(path: str) -> ObjectStorage:
    """The store of a location, as the options in effect say it is reached."""
    found = _LOCATION.fullmatch(path)
    if found is None:
        raise InvalidInput(f"'{shown(path)}' is no location of an object store")
    query = None if found["query"] is None else _queries.get(found["query"])
    if query is None and found["query"] is not None:
        raise InvalidInput(
            f"this process has not seen the query of '{path}'; give the URL itself, with its query", path=path
        )
    options = current_options().storage
    directory = options.cache_directory
    return _store(
        found["root"],
        StoreSettings({name: str(value) for name, value in options.settings.items()}),
        options.deadline_s,
        allow_unconditional=options.allow_unconditional,
        query=query,
        cache_directory=None if directory is None else os.path.abspath(os.path.expanduser(directory)),
        cache_bytes=options.cache_bytes,
    )


@functools.lru_cache(_MOST_STORES)
def _store(
    root: str,
    settings: StoreSettings,
    deadline_s: float,
    *,
    allow_unconditional: bool,
    query: str | None,
    cache_directory: str | None,
    cache_bytes: int,
) -> ObjectStorage:
    made = _native.ObjectStore(
        root,
        options=list(settings.items()),
        deadline_s=deadline_s,
        allow_unconditional=allow_unconditional,
        query=query,
        cache_directory=cache_directory,
        cache_bytes=cache_bytes,
    )
    return ObjectStorage(made, is_listable=not root.startswith("http"))


class ObjectFile:
    """See `base.OpenFile`."""

    descriptor = None

    def __init__(self, store: _native.ObjectStore, path: str, status: Status, beginning: bytes = b"") -> None:
        self.path = path
        self.status = status
        self._store = store
        self._beginning = beginning

    def read(self, offset: int, nbytes: int) -> bytes:
        """See `base.OpenFile`."""
        end = min(offset + nbytes, self.status.nbytes)
        if end <= offset:
            return b""
        if end <= len(self._beginning):
            return self._beginning[offset:end]
        return self._store.get_range(self.path, offset, end, _version(self.status.identity))

    def check_unchanged(self) -> None:
        """Raises Conflict if the object is another one by now, but where every read tells that."""
        if self.status.identity.tag is None and ObjectReader(self._store).status(self.path) != self.status:
            raise Conflict("the object changed while it was in use; open it again", path=self.path)

    def parts(self) -> ObjectParts:
        """See `base.OpenFile`."""
        return ObjectParts(self)


class ObjectParts:
    """See `base.Parts`."""

    def __init__(self, file: ObjectFile) -> None:
        self._file = file

    def read(self, offset: int, nbytes: int, memory: NDArray[np.uint8]) -> int:
        """See `base.Parts`."""
        content = self._file.read(offset, nbytes)
        if len(content) != nbytes:
            raise Conflict("the object ends before the range; open it again", path=self._file.path)
        self._file.check_unchanged()
        first = -memory.ctypes.data % SLACK_BYTES
        memory[first : first + nbytes] = np.frombuffer(content, np.uint8)
        return first


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
        found = [Entry(name, "file", nbytes) for name, (nbytes, *_) in objects]
        return sorted([*found, *(Entry(name, "directory") for name in directories)])

    @contextlib.contextmanager
    def opened(self, path: str, *, seen: Identity | None = None) -> Iterator[ObjectFile]:
        """See `base.Reader`."""
        if seen is not None:
            yield ObjectFile(self.engine, path, Status("file", seen))
        else:
            yield self._open(path)

    def _open(self, path: str) -> ObjectFile:
        try:
            beginning, version = self.engine.get_beginning(path, _BEGINNING_BYTES)
        except NotFound as error:
            status = None if "bucket" in error.context else self.status(path)
            if status is None:
                raise
            return ObjectFile(self.engine, path, status)
        return ObjectFile(self.engine, path, Status("file", _identity(version)), beginning)

    def read_files(self, paths: Sequence[str], *, limit_bytes: int | Sequence[int]) -> list[bytes]:
        """See `base.Reader`."""
        limits = [limit_bytes] * len(paths) if isinstance(limit_bytes, int) else limit_bytes
        return [content for content, _ in self.engine.get(list(zip(paths, limits, strict=True)))]


class ObjectRoot(ObjectReader):
    """See `base.Root`. The commit of the directory is looked at once: its record, or else the file that
    commits Orbax's layouts. That there is none is a version, too, so nothing is read of what is committed
    later. All else has names that are never used again, but for files of Orbax's layouts."""

    def __init__(self, store: _native.ObjectStore, path: str) -> None:
        super().__init__(store)
        self.path = path
        self._commit_path = os.path.join(path, names.COMMIT)
        self._commit: tuple[bytes, _Version] | None = None
        self._commit_of_orbax_path = os.path.join(path, names.COMMIT_OF_ORBAX)
        self._commit_of_orbax: Status | None = None
        try:
            (self._commit,) = store.get([(self._commit_path, _COMMIT_LIMIT_BYTES)])
        except NotFound as error:
            if "bucket" in error.context:
                raise
            look = super().status
            found = side_by_side(path, look, [path, self._commit_of_orbax_path])
            if found == [None, None]:
                raise
            self._commit_of_orbax = found[1]

    def is_current(self) -> bool:
        """See `base.Root`."""
        look = super().status
        if self._commit is not None:
            return look(self._commit_path) == self.status(self._commit_path)
        if self._commit_of_orbax is not None:
            return look(self._commit_of_orbax_path) == self._commit_of_orbax
        paths = [self._commit_path, self._commit_of_orbax_path]
        return side_by_side(self.path, look, paths) == [None, None]

    def status(self, path: str, *, follow_links: bool = True) -> Status | None:
        """See `base.Reader`."""
        if path == self._commit_path:
            return None if self._commit is None else Status("file", _identity(self._commit[1]))
        if path == self._commit_of_orbax_path and self._commit is None:
            return self._commit_of_orbax
        return super().status(path)

    def read_files(self, paths: Sequence[str], *, limit_bytes: int | Sequence[int]) -> list[bytes]:
        """See `base.Reader`."""
        if list(paths) != [self._commit_path]:
            return super().read_files(paths, limit_bytes=limit_bytes)
        if self._commit is None:
            raise NotFound(f"there is no '{self._commit_path}'", path=self._commit_path)
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

    def __init__(self, store: _native.ObjectStore, *, is_listable: bool) -> None:
        super().__init__(store)
        self.is_listable = is_listable

    def hold(self, path: str, *, follow_links_out: bool = False) -> ObjectRoot:
        """See `base.Storage`."""
        return ObjectRoot(self.engine, path)

    def resolved(self, path: str) -> str:
        """See `base.Storage`: there are no links."""
        return path

    def is_writable(self, directory: str) -> bool:
        """See `base.Storage`: behind HTTP nothing is; elsewhere only a write tells."""
        return self.is_listable

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

    def remove_file(self, path: str, *, expected: Identity | None = None) -> None:
        """See `base.Storage`."""
        if expected is None:
            self.engine.remove(path)
            return
        try:
            if self.removes_in_one_act(path):
                self.engine.remove(path, unchanged=_version(expected))
                return
            present = self.status(path)
            if present is None:
                return
            if present.identity != expected:
                raise Conflict("it is another version")
        except Conflict as error:
            raise Conflict(
                f"'{path}' was left alone: another file has taken its place; look at it again", path=path
            ) from error
        self.engine.remove(path)

    def removes_in_one_act(self, path: str) -> bool:
        """See `base.Storage`."""
        # In what looks like an attempt that is over: whoever is killed meanwhile leaves it in nobody's way.
        beside = os.path.join(os.path.dirname(path), names.attempt("", "probe"))
        return self.is_listable and self.engine.removes_versions(beside)

    def remove_tree(self, path: str) -> None:
        """See `base.Storage`."""
        if not self.engine.remove_all(path):
            self.engine.remove(path)


def _identity(version: _Version) -> Identity:
    nbytes, modified_ns, tag, generation = version
    return Identity(0, 0, nbytes, modified_ns, tag, generation)


def _version(identity: Identity) -> _Version:
    return identity.nbytes, identity.modified_ns, identity.tag, identity.generation
