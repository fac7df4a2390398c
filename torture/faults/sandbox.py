"""Environments in which less is allowed or there is less of something than usual.

A profile is put on a process right before it acts. Some only take away what a program can do without: there
the operation has to succeed. Others may make it fail, in which case it has to say so and leave what was
there.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torture import filters
from torture.faults.base import Done, Fault
from torture.operations import OPERATIONS, Operation, Workspace
from torture.outcomes import Outcome, Verdict
from torture.processes import in_child
from torture.systems import System, Waystation, WaystationZarr2

_RING = {"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427}
# What containers refuse by default (Docker, containerd) and a program might try.
_DOCKER = [*_RING.values(), 323, 298, 321, 310, 311, 250, 248, 249, 256, 279, 237, 238, 239, 212, 312, 304]
_OPENAT, _DIRECT = 257, os.O_DIRECT

# Calls that are younger, or optional: without any of them a program has another way.
_OPTIONAL = {
    **_RING,
    "renameat2": 316,
    "syncfs": 306,
    "sync_file_range": 277,
    "statx": 332,
    "openat2": 437,
    "faccessat2": 439,
    "fallocate": 285,
    "copy_file_range": 326,
    "fadvise64": 221,
    "madvise": 28,
    "mlock": 149,
    "mbind": 237,
    "sched_setaffinity": 203,
    "sched_getaffinity": 204,
    "pidfd_open": 434,
    "pidfd_send_signal": 424,
    "memfd_create": 319,
    "userfaultfd": 323,
    "process_vm_readv": 310,
    "preadv2": 327,
    "pwritev2": 328,
    "close_range": 436,
    "getcpu": 309,
    "ioprio_set": 251,
    "statfs": 137,
    "fstatfs": 138,
    "flock": 73,
}
_CLONES = {56: errno.EAGAIN, 435: errno.EAGAIN}
_NEW_MOUNTS = 0x00020000
_PRIVATE, _READ_ONLY, _BIND, _REMOUNT, _RECURSIVE = 1 << 18, 1, 4096, 32, 16384


@dataclass(frozen=True)
class _Profile:
    """An environment.

    Attributes:
        name: As the names of faults end.
        enter: Puts it on the calling process, which works below the directory; given the seed, too.
        may_fail: Whether the operation may.
        variants: How many seeds are different.
    """

    name: str
    enter: Callable[[Path, int], None]
    may_fail: bool = True
    variants: int = 1


def _refuse_one(_: Path, seed: int) -> None:
    filters.refuse({_OPTIONAL[_refused_by(seed)]: (errno.ENOSYS, errno.EPERM)[seed % 2]})


def _refused_by(seed: int) -> str:
    """The call that is refused."""
    return list(_OPTIONAL)[seed // 2 % len(_OPTIONAL)]


def _read_only_root(root: Path, _: int) -> None:
    """Nothing but the directory itself can be written."""
    _unshare_mounts()
    _mount(str(root), str(root), _BIND)
    _mount(None, "/", _REMOUNT | _BIND | _READ_ONLY)


def _read_only_data(root: Path, _: int) -> None:
    _unshare_mounts()
    _mount(str(root), str(root), _BIND)
    _mount(None, str(root), _REMOUNT | _BIND | _READ_ONLY)


def _unshare_mounts() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    _mount(None, "/", _PRIVATE | _RECURSIVE)


def _mount(source: str | None, target: str, flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    from_ = None if source is None else source.encode()
    if libc.mount(from_, target.encode(), None, ctypes.c_ulong(flags), None) != 0:
        raise OSError(ctypes.get_errno(), f"mount {target}")


def _memory(_: Path, seed: int) -> None:
    """So many MiB of addresses more than are taken already."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    more = (0, 1, 4, 16, 64, 160)[seed % 6] << 20
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _descriptors(_: Path, seed: int) -> None:
    """So many descriptors more than are open already."""
    limit = len(os.listdir("/proc/self/fd")) + (0, 1, 2, 3, 4, 6, 8, 12, 20)[seed % 9]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def _file_size(_: Path, seed: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = (0, 100, 4096, 300_000, 700_000)[seed % 5]
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def _locked_memory(_: Path, __: int) -> None:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))


_PROFILES = [
    _Profile("docker", lambda *_: filters.refuse(dict.fromkeys(_DOCKER, errno.EPERM)), may_fail=False),
    _Profile(
        "no io_uring", lambda *_: filters.refuse(dict.fromkeys(_RING.values(), errno.ENOSYS)), may_fail=False
    ),
    _Profile(
        "io_uring_enter refused",
        lambda *_: filters.refuse({_RING["io_uring_enter"]: errno.EPERM}),
        may_fail=False,
    ),
    _Profile(
        "no O_DIRECT", lambda *_: filters.refuse_flags(_OPENAT, 2, _DIRECT, errno.EINVAL), may_fail=False
    ),
    _Profile("one call refused", _refuse_one, may_fail=False, variants=2 * len(_OPTIONAL)),
    _Profile("read-only root", _read_only_root, may_fail=False),
    _Profile("no locked memory", _locked_memory, may_fail=False),
    _Profile("no new threads", lambda *_: filters.refuse(_CLONES)),
    _Profile("little memory", _memory, variants=6),
    _Profile("few descriptors", _descriptors, variants=9),
    _Profile("small files only", _file_size, variants=5),
]
_READING = [_Profile("read-only data", _read_only_data, may_fail=False)]


class Sandboxed:
    """One operation in one environment."""

    def __init__(self, profile: _Profile, operation: Operation) -> None:
        self.name = f"sandbox/{profile.name}/{operation.name}"
        self._profile, self._operation = profile, operation

    def applies(self, system: System) -> bool:
        return system.has_files

    def seeds(self, system: System, workspace: Workspace) -> int:
        del system, workspace
        return self._profile.variants

    def run(self, system: System, seed: int, workspace: Workspace) -> Done:
        root = workspace.prepare(system, self._operation)

        def act() -> int | None:
            self._profile.enter(root, seed)
            return self._operation.act(system, root)

        ended = in_child(act)
        at = f"variant {seed % self._profile.variants}"
        if ended.how == "killed":
            return Done(Verdict(Outcome.REFUSED_WRONGLY, "the process ended without a word"), at)
        # A way of writing that was demanded is not given up for another.
        is_demanded = isinstance(system, Waystation) and system.mode is not None
        # Nor can what others lay down be overwritten in one act where names cannot be swapped.
        is_overwritten = isinstance(system, WaystationZarr2) and self._operation.name == "overwrite"
        cannot_swap = (
            is_overwritten and self._profile.enter is _refuse_one and _refused_by(seed) == "renameat2"
        )
        may_fail = self._profile.may_fail or is_demanded or cannot_swap
        return Done(self._operation.judge(system, root, ended, may_fail), at)


class FullDisk:
    """A file system that has room for the version that is there, and for a part of the next."""

    def __init__(self, operation: Operation) -> None:
        self.name = f"sandbox/full disk/{operation.name}"
        self._operation = operation

    def applies(self, system: System) -> bool:
        return system.has_files

    def seeds(self, system: System, workspace: Workspace) -> int:
        del system, workspace
        return 12

    def run(self, system: System, seed: int, workspace: Workspace) -> Done:
        kilobytes = 800 * (self._operation.name != "save") + (seed % 12) * 100 + 40
        workspace.clear()
        workspace.root.mkdir()
        options = f"size={kilobytes}k"
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", os.fspath(workspace.root)]
        if subprocess.run(command, check=False, capture_output=True).returncode != 0:
            return Done(Verdict(Outcome.MISSED, "this user mounts no file system"), options)
        try:
            prepared = in_child(lambda: self._operation.prepare(system, workspace.root))
            if prepared.how != "returned":
                return Done(Verdict(Outcome.MISSED, "no room for what was to be there before"), options)
            ended = in_child(lambda: self._operation.act(system, workspace.root))
            larger = f"remount,size={64 << 10}k"
            subprocess.run(["mount", "-o", larger, workspace.root], check=True)
            return Done(self._operation.judge(system, workspace.root, ended, True), options)
        finally:
            subprocess.run(["umount", "--lazy", workspace.root], check=True)


_OPERATIONS = [OPERATIONS[name] for name in ("save", "overwrite", "load")]
SANDBOXES: list[Fault] = [
    *(Sandboxed(profile, operation) for profile in _PROFILES for operation in _OPERATIONS),
    *(Sandboxed(profile, OPERATIONS["load"]) for profile in _READING),
    *(FullDisk(OPERATIONS[name]) for name in ("save", "overwrite")),
]
