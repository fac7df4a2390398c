"""Where checkpoints are: paths as users give them, and whether something is a checkpoint."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from collections.abc import Callable, Iterator

from waystation import _native
from waystation._errors import (
    CheckpointNotFound,
    Conflict,
    Corrupt,
    InvalidInput,
    InvalidLayoutError,
    NotDirectory,
    NotFound,
    PermissionDenied,
    Unsupported,
    WrongType,
    from_os_error,
)
from waystation._foreign import described, hub_advice
from waystation._paths import (
    absolute,
    is_directory,
    is_file,
    is_there,
    list_directory,
    scan_directory,
    status,
)
from waystation.layouts.native import names
from waystation.layouts.native.attempts import leftovers
from waystation.layouts.native.commit import has_record
from waystation.layouts.orbax import checkpoint as orbax
from waystation.layouts.orbax import names as orbax_names

PathLike = str | os.PathLike[str]


def resolve(path: PathLike) -> str:
    """The absolute form of a checkpoint's path; symbolic links in its parents are followed.

    Raises:
        InvalidInput: It is no path on a mounted file system, or names no directory; WrongType: no path.
    """
    parent, name = os.path.split(absolute(path))
    if not name:
        raise InvalidInput(f"'{path}' names no directory that could be a checkpoint", path=os.fspath(path))
    return os.path.join(os.path.realpath(parent), name)


def resolved_or_none(path: PathLike) -> str | None:
    """What `resolve` gives; None for text at which no file system has anything."""
    try:
        return resolve(path)
    except WrongType:
        raise
    except InvalidInput:
        return None


@contextlib.contextmanager
def naming_checkpoint(target: str) -> Iterator[None]:
    """Adds the checkpoint to what is raised of damage in it."""
    try:
        yield
    except Corrupt as error:
        raise error.where(checkpoint=target)


def is_checkpoint(path: PathLike) -> bool:
    """Whether a committed checkpoint is at `path`, of ours or of Orbax (its record or metadata are there; its
    data is not verified)."""
    target = resolved_or_none(path)
    if target is None:
        return False
    return is_native_checkpoint(target) or is_orbax_layout(target)


def is_native_checkpoint(target: str) -> bool:
    """Whether a committed checkpoint of the native layout is at a path."""
    return names.attempt_target(os.path.basename(target)) is None and is_file(
        os.path.join(target, names.RECORD)
    )


def lost_record(target: str) -> bool:
    """Whether a directory has what a native checkpoint has, but for its record: it was copied in part, or
    somebody has removed that. One that a save has set aside is not meant."""
    name = os.path.basename(target)
    if names.attempt_target(name) is not None or names.is_aside(name) or is_checkpoint(target):
        return False
    try:
        with scan_directory(target) as entries:
            has_parts = any(is_file(names.checkpointable_record(entry.path)) for entry in entries)
    except OSError:
        return False
    return has_parts and not is_checkpoint(target)  # a save may have ended meanwhile


def is_orbax_layout(target: str) -> bool:
    """Whether a checkpoint of one of Orbax's layouts is at a path."""
    return not is_native_checkpoint(target) and orbax.is_checkpoint(target)


def check_destination(
    target: str, *, overwrite: bool, on_set_aside: Callable[[str], None] | None = None
) -> None:
    """Raises Conflict if a save to `target` must not go ahead, PermissionDenied if it cannot.

    A save replaces a checkpoint, if told to, and an empty directory; it replaces nothing else. It goes to no
    path inside a checkpoint: who replaces or deletes that one would delete what was saved there, too.

    Args:
        target: Where the save goes.
        overwrite: Whether it is to replace a checkpoint.
        on_set_aside: If given, what is there and is no checkpoint is renamed, as it may be somebody's data;
            called with its new path.
    """
    if names.attempt_target(os.path.basename(target)) is not None:
        raise InvalidInput(f"'{target}' is the name of an unfinished attempt; choose another", path=target)
    _check_outside(target)
    if is_checkpoint(target):
        if not overwrite:
            raise Conflict(
                f"'{target}' exists already; give overwrite=True to replace it, or another path", path=target
            )
    else:
        try:
            _check_free(target)
        except Conflict:
            if on_set_aside is None:
                raise
            on_set_aside(_set_aside(target))
    _check_writable(os.path.dirname(target))


def _check_outside(target: str) -> None:
    """Raises Conflict if a path is inside a checkpoint."""
    inside = target
    while (whole := os.path.dirname(inside)) != inside:
        name = os.path.basename(whole)
        if names.attempt_target(name) is not None or orbax_names.TEMPORARY_INFIX in name:
            return  # what a handler of a save that is under way writes with another save
        if has_record(whole) or orbax.is_checkpointable(inside):
            raise Conflict(
                f"'{target}' is inside the checkpoint '{whole}', and would be deleted with it; save to a "
                "path beside it",
                path=target,
                checkpoint=whole,
            )
        inside = whole


def _check_free(target: str) -> None:
    """Raises Conflict unless a path is free or that of an empty directory, whose place a rename can take."""
    found = status(target, follow_symlinks=False)
    if found is None:
        return
    try:
        if not stat.S_ISDIR(found.st_mode):
            reason, advice = "not a checkpoint and no directory", "remove it"
        elif lost_record(target):
            reason = f"a checkpoint that has lost its {names.RECORD}"
            advice = "copy that to it if there is another copy, remove it if there is none"
        elif list_directory(target):
            reason, advice = "not a checkpoint and not empty", "remove it, save to a path inside it"
        elif os.path.ismount(target):
            reason, advice = "a mount point", "save to a path inside it"
        elif _is_working_directory(target):
            reason, advice = "the working directory of this process", "save to a path inside it"
        else:
            return
    except OSError as error:
        raise from_os_error(error, "look at", target) from error
    raise Conflict(
        f"'{target}' is {reason}, so no save replaces it; {advice}, or choose another path", path=target
    )


def _set_aside(target: str) -> str:
    """Renames what is at a path; returns where it is now."""
    for number in itertools.count():
        place = names.aside(target, number)
        try:
            _native.rename_new(target, place)
        except Conflict:
            continue
        except Unsupported:
            if is_there(place):
                continue
            try:
                os.rename(target, place)
            except OSError as error:
                raise from_os_error(error, "rename", target) from error
        break
    _native.sync_paths([os.path.dirname(target)])
    return place


def _is_working_directory(path: str) -> bool:
    with contextlib.suppress(FileNotFoundError):  # it has been removed
        return os.path.samefile(path, os.curdir)
    return False


def _check_writable(directory: str) -> None:
    while not is_there(directory):
        directory = os.path.dirname(directory)
    if not is_directory(directory):
        raise NotDirectory(
            f"'{directory}' is not a directory, so no checkpoint can be under it", path=directory
        )
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionDenied(f"directory '{directory}' is not writable", path=directory)


def require_checkpoint(target: str) -> None:
    """Raises what tells best why there is no checkpoint to read at `target`."""
    present = is_there(target)
    holds_names = is_directory(target)
    committed = is_there(os.path.join(target, names.RECORD))
    unfinished = names.attempt_target(os.path.basename(target))
    if unfinished is not None:
        raise InvalidLayoutError(
            f"'{target}' is an unfinished attempt at checkpoint '{unfinished}', not a checkpoint; "
            "'waystation gc' removes it",
            path=target,
        )
    if committed:
        return
    if orbax_names.is_temporary(os.path.basename(target)):
        raise InvalidLayoutError(f"'{target}' is an unfinished checkpoint of Orbax", path=target)
    whole = os.path.dirname(target)
    if present and is_native_checkpoint(whole):
        raise InvalidLayoutError(
            f"'{target}' is not a checkpoint, but a part of the checkpoint '{whole}'; give the path of that",
            path=target,
        )
    inside = _checkpoints_in(target) if holds_names else []
    if inside:
        raise InvalidLayoutError(
            f"'{target}' is not a checkpoint, but a directory of them: {', '.join(inside[-5:])}; give the "
            "path of one",
            path=target,
        )
    foreign = described(target)
    if foreign is not None:
        raise InvalidLayoutError(
            f"'{target}' is not a checkpoint of Waystation or Orbax, but {foreign}", path=target
        )
    if holds_names:
        problem = "it has the files of one, and has lost" if lost_record(target) else "it has no"
        raise InvalidLayoutError(
            f"'{target}' is not a checkpoint: {problem} {names.RECORD}{_beside(target)}", path=target
        )
    if present:
        raise NotDirectory(f"'{target}' is a file, not a checkpoint directory", path=target)
    raise CheckpointNotFound(
        f"there is no checkpoint '{target}'{_beside(target)}{hub_advice(target)}", path=target
    )


def require_native_checkpoint(target: str) -> None:
    """Raises what tells best why there is no checkpoint of the native layout at `target`.

    Raises:
        Unsupported: There is one of Orbax's.
        NotFound, InvalidInput: There is none.
    """
    if is_orbax_layout(target):
        raise Unsupported(
            f"'{target}' is a checkpoint in Orbax's layout, and this works on Waystation's own only; load it "
            "and save it again in that (array.saving.use_ocdbt = None)",
            path=target,
        )
    require_checkpoint(target)


def _beside(target: str) -> str:
    """Tells of unfinished attempts at this checkpoint and of committed neighbours."""
    parent, name = os.path.split(target)
    try:
        attempts = len(leftovers(parent, name))
    except (OSError, NotFound, PermissionDenied):
        return ""
    near = _checkpoints_in(parent)
    told = []
    if attempts:
        told.append(f"{attempts} unfinished attempt(s) at it stand beside it: the save did not end")
    if near:
        told.append(f"checkpoints there: {', '.join(near[-5:])}")
    return f" ({'; '.join(told)})" if told else ""


def lost_records_in(directory: PathLike) -> list[str]:
    """The names of the checkpoints in a directory that have lost their record."""
    return _names_in(directory, lost_record)


def _checkpoints_in(directory: str) -> list[str]:
    return _names_in(directory, is_checkpoint)


def _names_in(directory: PathLike, is_meant: Callable[[str], bool]) -> list[str]:
    """The names of the directories in a directory that are meant; none if it cannot be looked at."""
    try:
        with scan_directory(directory) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir() and is_meant(entry.path))
    except (OSError, NotFound, PermissionDenied):
        return []
