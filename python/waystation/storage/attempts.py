"""Attempts: the temporary directories in which checkpoints are written, and whose they are.

An attempt's name says which process of which machine makes it, so that a process that was killed
leaves something that others can prove to be dead (`_processes` has the rules). A record inside adds what
people want to know and, by its modification time, a heartbeat. Nothing here ever removes what is not proven
dead.

What can go wrong, in order: killed after the directory was made (proof is in the name); killed while
files are written; killed after an overwrite swapped names (the old checkpoint then stands under the
attempt's name and is as dead as its owner); killed while leftovers are removed (the next save goes on).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import logging
import os
import secrets
import stat
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from waystation import _forks, _processes, storage
from waystation._errors import (
    NotDirectory,
    NotFound,
    PermissionDenied,
    UnusablePath,
    WaystationError,
    from_os_error,
)
from waystation.storage import names, signs_of_life

_log = logging.getLogger("waystation")

LeftoverKind = Literal["save", "overwrite", "export"]

# Of this process: tells its records from those of a copy of its machine.
_TOKEN = secrets.token_hex(8)

# Whether an attempt in a transaction holds a part that only all its processes can end: asked with the path of
# the checkpoint and the id of the attempt. The layout whose transactions these are answers
# (`layouts/native/transactions`); until it is imported, every such attempt counts as one that does.
is_undecided: Callable[[str, str], bool] | None = None


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something that a process has not finished: it still runs, or was killed.

    Attributes:
        path: Where it is.
        target: Name of the checkpoint or export that it was for.
        kind: `save`: the directory of an attempt, or a record that was to replace another; `overwrite`:
            data inside of a checkpoint whose record does not name them; `export`: files of an export.
        attempt_id: Of the attempt whose end decides about it.
        dead: Whether the process of that attempt provably no longer runs.
        age_s: Seconds since its last sign of life.
        owner: The owner record, empty if there is none.
        undecided: Whether it is a prepared part of a transaction, which only all its processes can end.
    """

    path: str
    target: str
    kind: LeftoverKind
    attempt_id: str
    dead: bool
    age_s: float
    owner: dict[str, Any]
    undecided: bool = False

    @property
    def is_over(self) -> bool:
        """Whether nobody will go on with it, so that whoever finds it may remove it."""
        return self.dead and not self.undecided

    @property
    def is_running(self) -> bool:
        """Whether its process runs, as far as this system can see. That of another may, or may not."""
        match = names.ATTEMPT_ID.fullmatch(self.attempt_id)
        if match is None or not is_of_this_system(self.attempt_id):
            return False
        return _processes.may_run(int(match["process"]), match["start"])

    @property
    def has_run_out(self) -> bool:
        """Whether it has shown no sign of life for longer than its owner leaves it without."""
        return _has_run_out(self.path)


class Attempt:
    """One try at writing the checkpoint at `target`, in a sibling directory of its own.

    An attempt that is part of a transaction has the id of that in its name.

    Raises (on creation): PermissionDenied, DiskFull, InvalidInput, Unavailable: nothing is left behind then.
    """

    def __init__(
        self, target: str, permission_mode: int | None = None, transaction: str | None = None
    ) -> None:
        self.target = target
        self._owner = _forks.Owner()
        self._renewal: weakref.finalize[..., Attempt] | None = None
        self.id: str = new_attempt_id(transaction)
        parent, name = os.path.split(target)
        self.parent = parent
        self.created_parents: list[str] = _make_parents(parent, permission_mode)
        self.path: str = os.path.join(parent, names.attempt(name, self.id))
        try:
            self._create(permission_mode)
        except OSError as error:
            self.discard()
            if error.errno == errno.ENAMETOOLONG and len(os.fsencode(os.path.basename(self.path))) > 255:
                added = len(os.path.basename(self.path)) - len(name)
                raise UnusablePath(
                    f"the name of '{target}' is too long: {added} bytes are added while it is written; "
                    f"choose a name of up to {255 - added} bytes",
                    path=target,
                ) from error
            raise from_os_error(error, "create the directory of an attempt", self.path) from error
        except BaseException:  # also Ctrl-C: this process lives on, so no later save would remove it
            self.discard()
            raise

    @classmethod
    def reopened(cls, target: str, leftover: Leftover) -> Attempt:
        """An attempt that another process has left, to go on with it."""
        attempt = cls.__new__(cls)
        attempt.target, attempt.id, attempt.path = target, leftover.attempt_id, leftover.path
        attempt._owner, attempt._renewal = _forks.Owner(), None
        attempt.parent = os.path.dirname(target)
        attempt.created_parents = []
        return attempt

    def _create(self, permission_mode: int | None) -> None:
        os.mkdir(self.path)
        mode = _mode_of_empty(self.target) if permission_mode is None else permission_mode
        if mode is not None:
            os.chmod(self.path, mode)
        record = os.path.join(self.path, names.OWNER)
        with open(record, "x", encoding="utf-8") as file:
            json.dump(owner_record(), file)
        # Also that of an attempt which nobody ends: what is left of it is to run out.
        self._renewal = weakref.finalize(self, signs_of_life.HEARTBEAT.end, record)
        self._renewal.atexit = False
        signs_of_life.HEARTBEAT.begin(record, functools.partial(os.utime, record))

    def heartbeat(self) -> None:
        """Shows observers on other hosts that the attempt is alive."""
        with contextlib.suppress(OSError):
            os.utime(os.path.join(self.path, names.OWNER))

    def seal(self) -> None:
        """Removes the owner record, which is no part of a checkpoint. The proof is in the name."""
        self._end_renewal()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.path, names.OWNER))

    def _end_renewal(self) -> None:
        if self._renewal is not None:
            self._renewal()

    def directories_to_sync(self) -> list[str]:
        """Directories whose entries this attempt changed outside of its own: innermost first."""
        return [self.parent, *(os.path.dirname(path) for path in self.created_parents)]

    def discard(self) -> None:
        """Removes the attempt, and the parents that it created if they are empty again.

        In a child that was forked meanwhile it does nothing: the parent goes on with the attempt.
        """
        if not self._owner.is_here:
            return
        self._end_renewal()
        storage.remove_tree(self.path)
        for directory in self.created_parents:
            with contextlib.suppress(OSError):
                os.rmdir(directory)


def leftovers(parent: str, target_name: str | None = None) -> list[Leftover]:
    """The attempts in `parent` (of one checkpoint, if named), this process's own running ones too."""
    found = []
    for name in _listed(parent, names.ATTEMPT_INFIX):
        target = names.attempt_target(name)
        if target is not None and target_name in (None, target):
            attempt_id = name.rpartition(names.ATTEMPT_INFIX)[2]
            found.append(describe(os.path.join(parent, name), target, "save", attempt_id))
    return found


def export_stages(parent: str) -> list[Leftover]:
    """The hidden directories in `parent` in which exports are written."""
    found = []
    for name in _listed(parent, names.EXPORT_INFIX):
        stem, path = names.export_stem(name), os.path.join(parent, name)
        if stem is not None and os.path.isdir(path) and not os.path.islink(path):
            found.append(describe(path, stem, "export", name.rpartition(names.EXPORT_INFIX)[2]))
    return found


def _listed(parent: str, infix: str) -> list[str]:
    try:
        return [name for name in storage.list_names(parent) if infix in name]
    except NotFound:
        return []


def remove_dead(parent: str, target_name: str) -> list[str]:
    """Removes the provably dead attempts at one checkpoint; returns their paths.

    Parts of a transaction whose outcome has to be asked for stay.
    """
    return _remove_dead(leftovers(parent, target_name))


def remove_dead_exports(parent: str, stem: str) -> None:
    """Removes what provably dead processes have left of exports to files of one name."""
    _remove_dead([stage for stage in export_stages(parent) if stage.target == stem])


def _remove_dead(found: Sequence[Leftover]) -> list[str]:
    removed = []
    for leftover in found:
        if leftover.is_over:
            try:
                remove(leftover)
            except WaystationError as error:
                _log.warning("a dead attempt could not be removed: %s", error)
            else:
                removed.append(leftover.path)
    return removed


def remove(leftover: Leftover, discard: Callable[[str], object] = storage.remove_tree) -> None:
    """Removes what a process has left.

    Its process loses it in one act: one that was only stopped for long, or cut off from the file system, must
    not commit an attempt of which half has been removed.

    Args:
        leftover: It.
        discard: Removes the directory, and what belongs to it, once its process has lost it.
    """
    parent = os.path.dirname(leftover.path)
    name = names.export_stage if leftover.kind == "export" else names.attempt
    grave = os.path.join(parent, name(leftover.target, new_attempt_id()))
    try:
        os.rename(leftover.path, grave)
    except FileNotFoundError:
        return
    except OSError as error:
        raise from_os_error(error, "remove", leftover.path) from error
    discard(grave)


def describe(
    path: str, target: str, kind: LeftoverKind, attempt_id: str, *, signs: Sequence[str] = ()
) -> Leftover:
    """What can be told of a leftover now; `signs` are more paths whose changes are signs of life."""
    owner_path = os.path.join(path, names.OWNER)
    owner: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(Path(owner_path).read_bytes())
        owner = content if isinstance(content, dict) else {}
    newest = 0.0
    for candidate in (path, owner_path, *signs):
        with contextlib.suppress(OSError):
            newest = max(newest, os.stat(candidate).st_mtime)
    dead = is_dead(attempt_id, path, owner)
    # An orphan is inside of the checkpoint, an attempt stands beside it.
    place = os.path.dirname(path)
    checkpoint = place if kind == "overwrite" else os.path.join(place, target)
    is_part = names.transaction(attempt_id) is not None
    undecided = is_part and (is_undecided is None or is_undecided(checkpoint, attempt_id))
    age_s = max(0.0, time.time() - newest)
    return Leftover(path, target, kind, attempt_id, dead, age_s, owner, undecided)


def is_dead(attempt_id: str, path: str, owner: dict[str, Any]) -> bool:
    """Whether the process that made an attempt, or anything else of such an id, provably no longer runs.

    In a file system that several machines may share, what it has made must also have run out
    (`signs_of_life`), as this machine may be a copy of the one that the process is on; what says that it is
    renewed is dead when it has run out, wherever its process was.

    Args:
        attempt_id: The id.
        path: What it has made.
        owner: The owner record, empty if there is none.
    """
    match = names.ATTEMPT_ID.fullmatch(attempt_id)
    if match is None:
        return False
    is_ours = match["scope"] == _scope()
    if is_ours and _processes.may_run(int(match["process"]), match["start"]):
        return False
    if signs_of_life.is_shared(path):
        return (is_ours or "token" in owner) and _has_run_out(path)
    if is_ours:
        return True
    boot, own_boot = owner.get("boot_id"), _boot_id()
    if not isinstance(boot, str) or own_boot is None or boot == own_boot:
        return False  # another namespace of this machine, of which nothing is known
    # An earlier boot of this machine, or a machine that has the file system from this one (NFS, virtiofs).
    is_earlier = owner.get("host") == _processes.host_name()
    return is_earlier or ("token" in owner and _has_run_out(path))


def _has_run_out(path: str) -> bool:
    """Whether what an owner renews has not been renewed for too long. Of what must not be looked into nothing
    is proven."""
    try:
        return signs_of_life.has_run_out(_sign(path))
    except PermissionDenied:
        return False


def _sign(path: str) -> str:
    """What an owner renews of something that it has made."""
    record = os.path.join(path, names.OWNER)
    return record if storage.is_there(record) else path


def new_attempt_id(transaction: str | None = None) -> str:
    """A name for an attempt that says which process of which system makes it, and is never given twice.

    A process makes one attempt in a transaction.
    """
    return f"{_scope()}-{os.getpid()}-{_start_time()}-{transaction or secrets.token_hex(4)}"


def is_of_this_process(attempt_id: str) -> bool:
    """Whether an attempt is this process's own."""
    return attempt_id.rpartition("-")[0] == new_attempt_id().rpartition("-")[0]


def is_of_this_system(attempt_id: str) -> bool:
    """Whether the process of an attempt is, or was, one of those that can be seen from here."""
    return attempt_id.partition("-")[0] == _scope()


def is_gone(attempt_id: str) -> bool:
    """Whether the process of an attempt was of this system, as far as names tell, and runs no more."""
    match = names.ATTEMPT_ID.fullmatch(attempt_id)
    if match is None or match["scope"] != _scope():
        return False
    return not _processes.may_run(int(match["process"]), match["start"])


def owner_record() -> dict[str, Any]:
    """What this process says of itself, for people and for other systems."""
    return {
        "host": _processes.host_name(),
        "boot_id": _boot_id(),
        "process": os.getpid(),
        "process_start": _start_time(),
        "started_at": time.time(),
        "token": _TOKEN,
    }


def _scope() -> str:
    """Identifies the set of processes among which a process id and start time mean one process.

    Where the kernel does not tell, that is a set of this process alone, which nobody can call dead.
    """
    try:
        system = _processes.system()
    except OSError:
        system = _TOKEN
    return hashlib.sha256(system.encode()).hexdigest()[:12]


def _start_time() -> str:
    """When this process began; 0 where the kernel does not tell."""
    try:
        return _processes.start_time(os.getpid())
    except (OSError, IndexError):
        return "0"


def _boot_id() -> str | None:
    try:
        return _processes.boot_id()
    except OSError:
        return None


def _mode_of_empty(target: str) -> int | None:
    """The permissions of an empty directory, which the checkpoint in its place keeps: it may be private."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        mode = os.lstat(target).st_mode
        if stat.S_ISDIR(mode) and not storage.list_names(target):
            return stat.S_IMODE(mode)
    return None


def _make_parents(parent: str, permission_mode: int | None) -> list[str]:
    """Creates the missing parents; returns those that it created, innermost first."""
    missing = []
    directory = parent
    while not storage.is_there(directory):
        missing.append(directory)
        directory = os.path.dirname(directory)
    if not storage.is_directory(directory):
        raise NotDirectory(f"'{directory}' is not a directory, so no checkpoint can be under it", path=parent)
    created: list[str] = []
    try:
        for directory in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory)
                created.insert(0, directory)
            if permission_mode is not None:
                os.chmod(directory, permission_mode)
    except OSError as error:
        for made in created:
            with contextlib.suppress(OSError):
                os.rmdir(made)
        raise from_os_error(error, "create", directory) from error
    return created
