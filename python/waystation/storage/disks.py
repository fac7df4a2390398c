"""Several disks of one machine: which disk a directory is on, and links from one to files on another.

Only for mounted file systems. A disk is told by the device number of its file system; partitions of one disk,
which the kernel lists, count as that disk.
"""

from __future__ import annotations

import contextlib
import os
import stat

from waystation import storage
from waystation._errors import from_os_error

# A directory of the kernel for each block device, by its number; that of a partition is below its disk's.
_BLOCK_DEVICES = "/sys/dev/block"


def disk_of(directory: str) -> str:
    """The disk that a directory is on, by a name that is equal for directories on the same one.

    Raises:
        NotFound, PermissionDenied: The directory cannot be looked at.
    """
    try:
        device = os.stat(directory).st_dev
    except OSError as error:
        raise from_os_error(error, "look at", directory) from error
    number = f"{os.major(device)}:{os.minor(device)}"
    place = os.path.realpath(os.path.join(_BLOCK_DEVICES, number))
    with contextlib.suppress(OSError):
        if os.path.exists(os.path.join(place, "partition")):
            return os.path.basename(os.path.dirname(place))
        if os.path.exists(place):
            return os.path.basename(place)
    return number


def nearest_directory(path: str) -> str:
    """The path, or that of the nearest directory above that exists."""
    while not storage.is_directory(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return path


def is_mount_point(path: str) -> bool:
    """Whether a file system is mounted there, so that the directory itself cannot be renamed."""
    return os.path.ismount(path)


def make_link(path: str, target: str) -> None:
    """Makes a symbolic link.

    Raises:
        Conflict: Something is at the path.
    """
    try:
        os.symlink(target, path)
    except OSError as error:
        raise from_os_error(error, "make the link", path) from error


def link_target(path: str) -> str | None:
    """The absolute path that a symbolic link has; None where there is no link, or it cannot be read."""
    try:
        return os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
    except OSError:
        return None


def copy_permissions(source: str, target: str) -> None:
    """Gives a file of this user the permissions of another one, and at least that its owner reads it. Their
    special bits, such as set-user-ID, are not meant.

    Raises:
        NotFound, PermissionDenied, Unsupported: It cannot be done.
    """
    try:
        os.chmod(target, os.stat(source).st_mode & 0o777 | stat.S_IRUSR)
    except OSError as error:
        raise from_os_error(error, "set the permissions of", target) from error


def forget_cached(path: str) -> None:
    """Has the system drop what it caches of a durable file, so that the next read comes from the disk."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def remove_if_empty(directory: str) -> None:
    """Removes a directory, unless something is in it."""
    with contextlib.suppress(OSError):
        os.rmdir(directory)
