"""The local file system, and whatever else is mounted as one.

Files are read by their paths, or beneath a directory that is held open: an overwrite gives the path of a
checkpoint to another directory, and what is opened beneath the directory that was opened first is of one
checkpoint. Small files are created and replaced by rename. Failure sequence of a replacement: killed before
the rename, the file is as it was, and the new content stands beside it under the name of an attempt; killed
after it, the new file is there. What a call has made durable survives a loss of power.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, TypeVar

import numpy as np
from numpy.typing import NDArray

from waystation import _native
from waystation._errors import (
    Conflict,
    Corrupt,
    InvalidInput,
    NotFound,
    OutOfMemory,
    Unsupported,
    WaystationError,
    from_os_error,
)
from waystation.storage import names
from waystation.storage.base import Entry, Identity, Kind, OpenFile, Root, Status

T = TypeVar("T")

_READING = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_ABSENT = (errno.ENOENT, errno.ENOTDIR)
# Of a link: another file system or subvolume, no links at all, a file of another user, too many links.
_NO_LINKS = (errno.EXDEV, errno.EOPNOTSUPP, errno.EPERM, errno.EMLINK)
_FICLONE = 0x40049409  # of linux/fs.h; the module fcntl has it from Python 3.14 on
_COPIED_BYTES = 1 << 20  # at a time
_HUGE_BYTES = 2 << 20  # of a huge page, or a part of one
_MAP_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)  # of mman.h; Python has it from 3.11.2 on
# How often a directory is emptied that others put something into at the same time.
_REMOVAL_TRIES = 100


@dataclass(frozen=True, slots=True)
class LocalFile:
    """See `base.OpenFile`."""

    path: str
    status: Status
    descriptor: int

    def read(self, offset: int, nbytes: int) -> bytes:
        """See `base.OpenFile`."""
        parts = []
        while nbytes:  # the system may return less than there is
            try:
                part = os.pread(self.descriptor, nbytes, offset)
            except OSError as error:
                raise from_os_error(error, "read", self.path) from error
            if not part:
                break
            parts.append(part)
            offset, nbytes = offset + len(part), nbytes - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def parts(self) -> LocalParts:
        """See `base.OpenFile`."""
        return LocalParts(self)


class LocalParts:
    """See `base.Parts`."""

    def __init__(self, file: LocalFile) -> None:
        identity = file.status.identity
        self._path, self._identity = file.path, identity
        self._reader = _native.PartReader(file.path, file.descriptor, identity[:4])

    def read(self, offset: int, nbytes: int, memory: NDArray[np.uint8]) -> int:
        """See `base.Parts`."""
        first = self._reader.read(offset, nbytes, memory)
        if first is None:
            raise self._changed()
        return first

    def _changed(self) -> Conflict:
        """That a path no longer has what was opened there."""
        try:
            present = os.stat(self._path)
        except OSError:
            how = "it is not there any more"
        else:
            how = self._identity.change_to(_status(present).identity)
        return Conflict(f"the file changed while it was in use: {how}. Open it again", path=self._path)


class LocalReader:
    """What reads by paths, or beneath a directory that is held open.

    Args:
        directory: That directory.
    """

    def __init__(self, directory: _native.Directory | None) -> None:
        self._directory = directory

    def entries(self, path: str) -> list[Entry]:
        """See `base.Reader`."""
        with self._open(path, os.O_DIRECTORY) as descriptor:
            try:
                # The descriptor has to stay open until then: by it the system looks names up.
                with os.scandir(descriptor) as found:
                    listed = [_entry(entry) for entry in found]
            except OSError as error:
                raise from_os_error(error, "list", path) from error
        return sorted(listed, key=lambda entry: entry.name)

    @contextlib.contextmanager
    def opened(self, path: str, *, seen: Identity | None = None) -> Iterator[LocalFile]:
        """See `base.Reader`."""
        with self._open(path) as descriptor:
            try:
                status = _status(os.fstat(descriptor))
            except OSError as error:
                raise from_os_error(error, "look at", path) from error
            yield LocalFile(path, status, descriptor)

    def read_files(self, paths: Sequence[str], *, limit_bytes: int | Sequence[int]) -> list[bytes]:
        """See `base.Reader`."""
        return _native.read_small_files(paths, limit_bytes=limit_bytes, root=self._directory)

    @contextlib.contextmanager
    def _open(self, path: str, flags: int = 0) -> Iterator[int]:
        if self._directory is not None:
            descriptor = self._directory.open(path, flags=flags)
        else:
            try:
                # Without O_NONBLOCK, opening a named pipe that somebody put there would wait for ever.
                descriptor = os.open(path, _READING | flags)
            except OSError as error:
                raise from_os_error(error, "open", path) from error
        try:
            yield descriptor
        finally:
            os.close(descriptor)


class LocalRoot(LocalReader):
    """See `base.Root`."""

    def __init__(self, directory: _native.Directory) -> None:
        super().__init__(directory)
        self.engine = directory
        self.path: str = directory.path

    def is_current(self) -> bool:
        """See `base.Root`."""
        return self.engine.is_current()

    def status(self, path: str, *, follow_links: bool = True) -> Status | None:
        """See `base.Reader`."""
        try:
            with self._open(path, os.O_PATH | (0 if follow_links else os.O_NOFOLLOW)) as descriptor:
                return _status(os.fstat(descriptor))
        except WaystationError as error:  # some of which are errors of the system, too
            if not is_absence(error):
                raise
            return None
        except OSError as error:
            raise from_os_error(error, "look at", path) from error


class LocalStorage(LocalReader):
    """See `base.Storage`; it is also what it can do besides."""

    engine = None
    is_listable = True

    def __init__(self) -> None:
        super().__init__(None)

    @property
    def renames(self) -> LocalStorage:
        """Every mounted file system has them."""
        return self

    def hold(self, path: str, *, follow_links_out: bool = False) -> LocalRoot:
        """See `base.Storage`."""
        return LocalRoot(_native.Directory(path, follow_links_out=follow_links_out))

    def resolved(self, path: str) -> str:
        """See `base.Storage`."""
        return os.path.realpath(path)

    def is_writable(self, directory: str) -> bool:
        """See `base.Storage`."""
        return os.access(directory, os.W_OK | os.X_OK)

    def free_bytes(self, directory: str) -> int | None:
        """See `base.Storage`."""
        try:
            return shutil.disk_usage(directory).free
        except OSError as error:
            raise from_os_error(error, "look at", directory) from error

    def use_of(self, directory: str) -> str | None:
        """See `base.Storage`."""
        try:
            if os.path.ismount(directory):
                return "a mount point"
            with contextlib.suppress(FileNotFoundError):  # this process is in one that has been removed
                if os.path.samefile(directory, os.curdir):
                    return "the working directory of this process"
        except OSError as error:
            raise from_os_error(error, "look at", directory) from error
        return None

    # ---- looking -------------------------------------------------------------------------------

    def status(self, path: str, *, follow_links: bool = True) -> Status | None:
        """See `base.Reader`.

        `os.path.exists` and the like take any error for absence: also that of a file system that does not
        answer, or of a directory that must not be looked into.
        """
        try:
            return _status(os.stat(path, follow_symlinks=follow_links))
        except OSError as error:
            # Of a name that is too long no file system has anything.
            if error.errno in (*_ABSENT, errno.ENAMETOOLONG):
                return None
            raise from_os_error(error, "look at", path) from error

    def read_version(self, path: str, *, limit_bytes: int) -> tuple[bytes, Identity]:
        """See `base.Storage`."""
        with self.opened(path) as file:
            if file.status.kind != "file" or file.status.nbytes > limit_bytes:
                raise Corrupt(
                    f"'{path}' is not a regular file of at most {limit_bytes} bytes, as was expected",
                    path=path,
                )
            return file.read(0, limit_bytes), file.status.identity

    # ---- writing -------------------------------------------------------------------------------

    def create(self, path: str, content: bytes, attempt_id: str) -> None:
        """See `base.Storage`."""
        with self._aside(path, content, attempt_id) as aside:
            self.new(aside, path)

    def replace(
        self, path: str, content: bytes, attempt_id: str, *, expected: Identity | None = None
    ) -> None:
        """See `base.Storage`. A further name, or other permissions, make no other version."""
        with self._aside(path, content, attempt_id) as aside:
            if expected is not None:
                present = self.status(path)
                if present is None:
                    raise Conflict(f"'{path}' was removed meanwhile; look at it again", path=path)
                _require_same(path, present.identity, expected)
            self.over(aside, path)

    @contextlib.contextmanager
    def _aside(self, path: str, content: bytes, attempt_id: str) -> Iterator[str]:
        """A durable file beside the one at a path, which is to get its name within the block."""
        directory, name = os.path.split(path)
        aside = os.path.join(directory, names.attempt(name, attempt_id))
        _native.write_small_files([(aside, content)])
        try:
            yield aside
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(aside)
            raise
        _native.sync_paths([directory])

    def write_files(self, contents: Sequence[tuple[str, bytes]]) -> None:
        """See `base.Storage`."""
        _native.write_small_files(contents)

    @contextlib.contextmanager
    def new_file(self, path: str) -> Iterator[IO[bytes]]:
        """See `base.Storage`."""
        try:
            file = open(path, "xb")  # noqa: SIM115 -- closed below, where its errors are told apart
        except OSError as error:
            raise from_os_error(error, "create", path) from error
        try:
            yield file
        except BaseException:
            with contextlib.suppress(OSError):  # the failure within the block is the one to report
                file.close()
            raise
        try:
            with file:
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise from_os_error(error, "write", path) from error

    def make_directory(self, path: str, *, parents: bool = False, permission_mode: int | None = None) -> None:
        """See `base.Storage`."""
        if parents and (found := self.status(path)) is not None and found.kind == "directory":
            return
        try:
            if parents:
                os.makedirs(os.path.dirname(path), exist_ok=True)
            try:
                os.mkdir(path)
            except FileExistsError:
                if os.path.isdir(path):
                    return
                raise
            if permission_mode is not None:
                os.chmod(path, permission_mode)
        except OSError as error:
            raise from_os_error(error, "create", path) from error
        except RecursionError:  # os.makedirs calls itself for each part of the path
            raise InvalidInput(f"could not create '{path[:200]}…': the path is too long", path=path) from None

    def copy(self, source: str, target: str) -> None:
        """See `base.Storage`."""
        try:
            os.link(source, target)
        except OSError:
            try:
                with open(source, "rb") as origin, open(target, "xb") as copied:
                    shutil.copyfileobj(origin, copied, _COPIED_BYTES)
                    copied.flush()
                    os.fsync(copied.fileno())
            except OSError as error:
                raise from_os_error(error, "copy to", target) from error

    def remove_file(self, path: str, *, expected: Identity | None = None) -> None:
        """See `base.Storage`."""
        if expected is not None:
            present = self.status(path)
            if present is not None:
                _require_same(path, present.identity, expected)
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise from_os_error(error, "remove", path) from error

    def removes_in_one_act(self, path: str) -> bool:
        """See `base.Storage`: no system call does both."""
        return False

    def remove_tree(self, path: str) -> None:
        """See `base.Storage`.

        Symbolic links are removed, never followed. Where others put something into a directory at the same
        time, as readers do that take a lease, that is removed as well. The owner record of an attempt goes
        last.
        """
        try:
            mode = os.lstat(path).st_mode
        except OSError as error:
            # Of a longer name there is nothing either, and nothing below what has become a file.
            if error.errno in (errno.ENOENT, errno.ENAMETOOLONG, errno.ENOTDIR):
                return
            raise from_os_error(error, "remove", path) from error
        try:
            if not stat.S_ISDIR(mode):
                os.unlink(path)
                return
            for tries_left in reversed(range(_REMOVAL_TRIES)):
                children = sorted(_uninterrupted(lambda: os.listdir(path)), key=_owner_last)
                for child in children:
                    self.remove_tree(os.path.join(path, child))
                try:
                    os.rmdir(path)
                except OSError as error:
                    if error.errno != errno.ENOTEMPTY or not tries_left:
                        raise
                else:
                    return
        except FileNotFoundError:
            return
        except OSError as error:
            if isinstance(error, WaystationError):  # of what is below
                raise
            raise from_os_error(error, "remove", path) from error

    # ---- renames -------------------------------------------------------------------------------

    def new(self, source: str, target: str) -> None:
        """See `base.Renames`. A file system that cannot tell is asked first, and renames then."""
        try:
            _native.rename_new(source, target)
        except Unsupported:
            if self.status(target, follow_links=False) is not None:
                raise Conflict(f"could not rename to '{target}': it exists", path=target) from None
            self.over(source, target, "rename to")

    def exchange(self, first: str, second: str) -> None:
        """See `base.Renames`."""
        _native.rename_exchange(first, second)

    def over(
        self,
        source: str,
        target: str,
        action: str = "replace",
        path: str | None = None,
        *,
        root: Root | None = None,
    ) -> None:
        """See `base.Renames`. rename(2) of a directory replaces an empty one in one act, but no file and none
        that holds anything."""
        try:
            if root is None:
                os.rename(source, target)
            else:
                assert isinstance(root.engine, _native.Directory), "it is a directory of this system"
                os.rename(os.path.relpath(source, root.path), target, src_dir_fd=root.engine.fileno())
        except OSError as error:
            raise from_os_error(error, action, path or target) from error

    def share(self, source: str, target: str, *, root: Root) -> bool:
        """See `base.Renames`. Where there are no links between two directories, as between subvolumes, or
        none to files of other users, some file systems have copies that share their blocks until one is
        written to."""
        assert isinstance(root.engine, _native.Directory), "it is a directory of this system"
        try:
            relative = os.path.relpath(source, root.path)
            os.link(relative, target, src_dir_fd=root.engine.fileno(), follow_symlinks=False)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                return False
        else:
            return True
        try:
            with root.opened(source) as file, open(target, "xb") as copy:
                assert file.descriptor is not None, "it is a file of this system"
                try:
                    fcntl.ioctl(copy.fileno(), _FICLONE, file.descriptor)
                    modified_ns = file.status.identity.modified_ns
                    os.utime(copy.fileno(), ns=(modified_ns, modified_ns))
                    os.fsync(copy.fileno())
                except OSError:
                    os.unlink(target)
                    return False
        except (OSError, WaystationError):
            return False
        return True


def is_absence(error: WaystationError) -> bool:
    """Whether nothing is at a path, or a file has the place of one of its directories."""
    return isinstance(error, NotFound) or error.context.get("errno") in (errno.ENOTDIR, str(errno.ENOTDIR))


def mapped(file: OpenFile, *, writable: bool = False, huge_pages: bool = True) -> mmap.mmap:
    """A mapping of a whole file.

    Args:
        file: The file.
        writable: Whether it can be written to. A write changes a copy of the page, and never the file.
        huge_pages: Whether to have it in huge pages, where the system can: each is read whole.

    Raises:
        Unsupported: It is not of this system.
    """
    if file.descriptor is None:
        raise Unsupported("files of this storage cannot be mapped; load without mapping", path=file.path)
    # Without MAP_NORESERVE the system wants to have memory for copies of all pages, so that files larger than
    # the memory could not be mapped.
    kept = mmap.MAP_PRIVATE | _MAP_NORESERVE if writable else mmap.MAP_SHARED
    allowed = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    try:
        if sys.version_info >= (3, 13):  # before, each mapping had a descriptor of its own
            content = mmap.mmap(file.descriptor, file.status.nbytes, kept, allowed, trackfd=False)
        else:
            content = mmap.mmap(file.descriptor, file.status.nbytes, kept, allowed)
    except (OSError, ValueError) as error:
        failure = error if isinstance(error, OSError) else OSError(str(error))
        told = from_os_error(failure, "map", file.path)
        if isinstance(told, OutOfMemory):
            advice = "load without mmap, or allow the process more memory (ulimit -v, vm.overcommit_memory)"
            told = OutOfMemory(f"{told.message}; {advice}", **told.context)
        raise told from error
    if huge_pages:
        in_huge_pages(content, 0, len(content))
    return content


def in_huge_pages(content: mmap.mmap, begin: int, end: int) -> None:
    """Has a part of a mapping in huge pages: what is not cached is read in such, each of which one fault
    maps. Advice: a kernel without them takes none."""
    begin -= begin % _HUGE_BYTES
    end = min(-(-end // _HUGE_BYTES) * _HUGE_BYTES, len(content))
    with contextlib.suppress(OSError):
        content.madvise(mmap.MADV_HUGEPAGE, begin, end - begin)


def new_mapped(path: str, nbytes: int) -> memoryview:
    """A new file of so many bytes, mapped to be filled: its room is there already.

    Raises:
        DiskFull, PermissionDenied, Unavailable: It cannot be made.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if not nbytes:
                return memoryview(b"")
            os.posix_fallocate(descriptor, 0, nbytes)
            return memoryview(mmap.mmap(descriptor, nbytes))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise from_os_error(error, "make", path) from error


def _require_same(path: str, present: Identity, expected: Identity) -> None:
    if present != expected:
        change = expected.change_to(present)
        raise Conflict(f"'{path}' was left alone: {change}; look at it again", path=path)


def _status(found: os.stat_result) -> Status:
    mode = found.st_mode
    kind: Kind = (
        "file"
        if stat.S_ISREG(mode)
        else "directory"
        if stat.S_ISDIR(mode)
        else "link"
        if stat.S_ISLNK(mode)
        else "other"
    )
    identity = Identity(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
    return Status(kind, identity)


def _entry(entry: os.DirEntry[str]) -> Entry:
    kind: Kind = "other"
    if entry.is_symlink():
        kind = "link"
    elif entry.is_dir(follow_symlinks=False):
        kind = "directory"
    elif entry.is_file(follow_symlinks=False):
        kind = "file"
    return Entry(entry.name, kind)


def _owner_last(name: str) -> tuple[bool, str]:
    return name == names.OWNER, name


def _uninterrupted(call: Callable[[], T]) -> T:
    # Python tries calls again that a signal has interrupted, but for those that open directories.
    while True:
        try:
            return call()
        except InterruptedError:
            continue
