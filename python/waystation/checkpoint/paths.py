"""Where checkpoints are: paths as users give them, and whether something is a checkpoint."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal

from waystation import _native, storage
from waystation._errors import (
    CheckpointNotFound,
    Conflict,
    Corrupt,
    InvalidInput,
    InvalidLayoutError,
    NotDirectory,
    NotFound,
    PermissionDenied,
    Unavailable,
    Unsupported,
    UnusablePath,
    WaystationError,
    WrongType,
)
from waystation.layouts.native import in_store, names, records
from waystation.layouts.native.commit import has_record
from waystation.layouts.orbax import checkpoint as orbax
from waystation.layouts.orbax import in_store as orbax_in_store
from waystation.layouts.orbax import names as orbax_names
from waystation.storage import write_lock
from waystation.storage.attempts import leftovers
from waystation.storage.foreign import described, hub_advice, is_of_torch, is_torch_checkpoint

PathLike = str | os.PathLike[str]
Layout = Literal["native", "orbax"]

MOST_ATTEMPTS = 50  # at what is replaced meanwhile
_MOST_ABOVE = 2
_LAST = 5  # names of checkpoints that a message has


def resolve(path: PathLike) -> str:
    """The absolute form of a checkpoint's path; symbolic links in its parents are followed.

    Raises:
        InvalidInput: It is no path on a mounted file system, or names no directory; WrongType: no path.
    """
    return _resolved(storage.absolute(path))


def locate(path: PathLike) -> str:
    """What `resolve` gives, or the location in an object store that a path is.

    Raises:
        InvalidInput: It is neither, or names no directory; WrongType: no path.
    """
    return _resolved(storage.located(path))


def _resolved(whole: str) -> str:
    parent, name = os.path.split(whole)
    if parent.endswith(":"):
        raise InvalidInput(
            f"'{whole}' is a whole bucket, and a checkpoint is a directory in one; give a location such as "
            f"{whole}/name ('waystation ls {whole}' lists what is there)",
            path=whole,
        )
    if not name:
        raise InvalidInput(
            f"'{whole}' names no directory that could be a checkpoint; give the path of one", path=whole
        )
    return os.path.join(storage.resolved(parent), name)


def resolved_or_none(path: PathLike) -> str | None:
    """What `locate` gives; None for text at which no storage has anything."""
    try:
        return locate(path)
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
    try:
        return target is not None and layout_at(target) is not None
    except UnusablePath as error:
        if error.context.get("errno") in (errno.ENAMETOOLONG, str(errno.ENAMETOOLONG)):
            return False  # no file system has anything of such a name
        raise


def is_absent(target: PathLike) -> bool:
    """Whether nothing is at a path; in a store, but for what attempts and readers have there.

    There the record tells, before a listing does.
    """
    if storage.is_in_store(target) and is_native_checkpoint(os.fspath(target)):
        return False
    found = storage.status(target, follow_links=False)
    if found is None or found.kind != "directory" or not storage.is_in_store(target):
        return found is None
    return in_store.is_vacant(os.fspath(target))


def layout_at(target: str) -> Layout | None:
    """The layout of the checkpoint at a path; None if there is none.

    Raises:
        Unavailable: What is there was replaced during every look.
    """
    return _look_at(target)[1]


def _look_at(target: str) -> tuple[storage.Root | None, Layout | None]:
    """The directory at a path, held open, None if there is none, and the layout of the checkpoint that it is.

    An overwrite may swap a checkpoint of another layout in at any time. All questions are asked of one
    directory, therefore, and one that has lost its place says nothing of what is there.
    """
    for _ in range(MOST_ATTEMPTS):
        try:
            root = storage.of(target).hold(target, follow_links_out=True)
            layout = layout_in(root)
        except WaystationError as error:
            if not storage.is_absence(error):
                raise
            if not storage.is_directory(target):
                return None, None
            continue
        if layout is not None or root.is_current():
            return root, layout
    raise always_replaced(target)


def layout_in(root: storage.Root) -> Layout | None:
    """The layout of the checkpoint that a directory held open is; None if it is none."""
    path = root.path
    is_attempt = storage.names.attempt_target(os.path.basename(path)) is not None
    if not is_attempt and storage.is_file(os.path.join(path, names.RECORD), root):
        return "native"
    return "orbax" if orbax.is_checkpoint(path, root) else None


def always_replaced(target: str) -> Unavailable:
    """The error of a checkpoint that was replaced during every attempt to read it."""
    return Unavailable(
        f"checkpoint '{target}' was replaced during each of {MOST_ATTEMPTS} attempts to read it; save to it "
        "less often, or save each step to a path of its own",
        path=target,
    )


def is_native_checkpoint(target: str) -> bool:
    """Whether a committed checkpoint of the native layout is at a path."""
    return storage.names.attempt_target(os.path.basename(target)) is None and storage.is_file(
        os.path.join(target, names.RECORD)
    )


def lost_record(target: str) -> bool:
    """Whether a directory has what a native checkpoint has, but for its record: it was copied in part, or
    somebody has removed that. One that a save has set aside is not meant."""
    root, layout = _look_at(target)
    return root is not None and layout is None and _has_lost_record(root)


def _has_lost_record(root: storage.Root) -> bool:
    """Whether a directory that is no checkpoint has the parts of one."""
    name = os.path.basename(root.path)
    if storage.names.attempt_target(name) is not None or names.is_aside(name):
        return False
    if storage.of(root.path).renames is None:
        return False  # so does what a killed save has left
    try:
        parts = [os.path.join(root.path, entry.name) for entry in storage.entries(root.path, root)]
        return any(storage.is_file(names.checkpointable_record(part), root) for part in parts)
    except OSError:
        return False


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
            called with its new path. Without renames it stays where it is, and is in nobody's way.
    """
    if storage.names.attempt_target(os.path.basename(target)) is not None:
        raise InvalidInput(f"'{target}' is the name of an unfinished attempt; choose another", path=target)
    if storage.of(target).renames is None:
        _check_room_in_store(target, overwrite=overwrite, is_shared=on_set_aside is not None)
        return
    _check_outside(target)
    for _ in range(MOST_ATTEMPTS):
        if _has_room(target, overwrite, on_set_aside):
            break
    else:
        raise always_replaced(target)
    _check_writable(os.path.dirname(target))


def require_not_http(target: str) -> None:
    """Refuses a destination where nothing can be written.

    Raises:
        Unsupported: It is behind HTTP.
    """
    if "://" in target and not storage.of(target).is_listable:
        raise Unsupported(
            f"'{target}' is behind HTTP, where nothing can be written; save to a path, or to s3://, gs:// or az://",
            path=target,
        )


def _check_room_in_store(target: str, *, overwrite: bool, is_shared: bool) -> None:
    """`check_destination` for a storage without renames, where a listing tells all that can be told
    beforehand.

    What a killed save or a reader has left is not in the way. Whether the path is inside a checkpoint is
    asked at the same time, of the nearest two above it.
    """
    require_not_http(target)
    _check_name_in_store(target)
    present: set[str] = set()

    def look() -> None:
        present.update(entry.name for entry in storage.entries_or_none(target))

    above = _above(target)[:_MOST_ABOVE]
    calls: list[Callable[[], None]] = [look]
    calls += [partial(_check_outside_in_store, target, whole) for whole in above]
    storage.side_by_side(target, lambda call: call(), calls)
    if names.RECORD in present:
        if not overwrite:
            raise _exists(target)
    elif orbax_names.COMMIT_SUCCESS in present:
        if not overwrite:
            raise _exists(target)
        raise Unsupported(
            f"'{target}' is a checkpoint in Orbax's layout, which nothing replaces in one act in a store; "
            "delete it first, or save to another path",
            path=target,
        )
    elif orbax_in_store.is_unfinished(present):
        if not orbax_in_store.remove_unfinished(target):
            raise orbax_in_store.taken(target)
    elif not is_shared and is_of_torch(present):
        raise Conflict(
            f"'{target}' is a checkpoint of torch.distributed.checkpoint, and none of Waystation, so no save "
            "replaces it; move it away, or choose another path",
            path=target,
        )
    elif not is_shared and not all(map(names.is_passing, present)):
        raise Conflict(
            f"'{target}' is not a checkpoint and not empty, so no save replaces it; remove it, save to a "
            "path inside it, or choose another path",
            path=target,
        )


# What tells that a checkpoint is there, or a whole sequence. In a store `name/…` and `name` look alike.
_RESERVED_IN_STORES = frozenset({names.RECORD, *orbax_names.FILES})
_RESERVED_START = ".waystation-"
# Listings are documents of XML, in which these cannot be.
_UNLISTED = frozenset("\ufffe\uffff")


def _check_name_in_store(target: str) -> None:
    """Refuses a location with a name in it that this package or Orbax gives to objects of theirs: what is
    above it would look like a checkpoint, or it would be removed as what a killed save has left.

    Raises:
        InvalidInput: It has one.
    """
    _, _, key = target.partition("://")[2].partition("/")
    if _UNLISTED.intersection(key):
        raise InvalidInput(
            f"{target!r} cannot be saved to: stores cannot list names with U+FFFE or U+FFFF; choose another "
            "name",
            path=target,
        )
    for name in key.split("/"):
        if name in _RESERVED_IN_STORES or name.startswith(_RESERVED_START) or names.is_passing(name):
            raise InvalidInput(
                f"'{target}' cannot be saved to: '{name}' is reserved in object stores, for what Waystation "
                "or Orbax puts beside data; choose another name",
                path=target,
            )


def _above(target: str) -> list[str]:
    """The locations above one, the nearest first, up to the bucket, which is no checkpoint."""
    found = []
    while not (target := os.path.dirname(target)).partition("://")[2].count("/") < 1:
        found.append(target)
    return found


def _check_outside_in_store(target: str, whole: str) -> None:
    """Raises Conflict if a location, which is beneath another one, is inside a checkpoint there."""
    try:
        found = storage.read_file(os.path.join(whole, names.RECORD), limit_bytes=records.RECORD_LIMIT_BYTES)
    except (NotFound, Corrupt, PermissionDenied):
        return
    if found.startswith(records.SEALED_START):
        raise _inside(target, whole)


def _inside(target: str, whole: str) -> Conflict:
    return Conflict(
        f"'{target}' is inside the checkpoint '{whole}', and would be deleted with it; save to a path "
        "beside it",
        path=target,
        checkpoint=whole,
    )


def _exists(target: str) -> Conflict:
    return Conflict(
        f"'{target}' exists already; give overwrite=True to replace it, or another path", path=target
    )


def _has_room(target: str, overwrite: bool, on_set_aside: Callable[[str], None] | None) -> bool:
    """Whether a save can go ahead, as far as what is there says; False if that has changed meanwhile.

    Raises:
        Conflict: It must not.
    """
    root, layout = _look_at(target)
    if layout is not None:
        if not overwrite:
            raise _exists(target)
        return True
    try:
        _check_free(target, root)
    except Conflict:
        if on_set_aside is None:
            raise
        place = _set_aside(target, root)
        if place is None:
            return False
        on_set_aside(place)
    return True


def _check_outside(target: str) -> None:
    """Raises Conflict if a path is inside a checkpoint."""
    inside = target
    while (whole := os.path.dirname(inside)) != inside:
        name = os.path.basename(whole)
        if storage.names.attempt_target(name) is not None or orbax_names.TEMPORARY_INFIX in name:
            return  # what a handler of a save that is under way writes with another save
        if has_record(whole) or orbax.is_checkpointable(inside):
            raise _inside(target, whole)
        inside = whole


def _check_free(target: str, root: storage.Root | None) -> None:
    """Raises Conflict unless a path is free or that of an empty directory, whose place a rename can take.

    `root` is the directory that was there, and was no checkpoint.
    """
    found = storage.status(target, follow_links=False)
    if found is None or (root is None and found.kind == "directory"):
        return  # what has come meanwhile the commit meets
    if root is None or found.kind != "directory":
        reason, advice = "not a checkpoint and no directory", "remove it"
    elif _has_lost_record(root):
        reason = f"a checkpoint that has lost its {names.RECORD}"
        advice = "copy that to it if there is another copy, remove it if there is none"
    elif entries := storage.entries(target, root):
        reason, advice = "not a checkpoint and not empty", "remove it, save to a path inside it"
        if is_of_torch([entry.name for entry in entries]):
            reason = "a checkpoint of torch.distributed.checkpoint, and none of Waystation"
            advice = "move it away"
    elif (use := storage.of(target).use_of(target)) is not None:
        reason, advice = use, "save to a path inside it"
    else:
        return
    raise Conflict(
        f"'{target}' is {reason}, so no save replaces it; {advice}, or choose another path", path=target
    )


def _set_aside(target: str, root: storage.Root | None) -> str | None:
    """Renames what is at a path; returns where it is now, None if it is not what was seen there any more."""
    with contextlib.ExitStack() as stack:
        if root is not None:
            try:
                stack.enter_context(write_lock.held(target))
            except (NotFound, NotDirectory):
                return None
            if not root.is_current():
                return None
        for number in itertools.count():
            place = names.aside(target, number)
            try:
                storage.renames(target).new(target, place)
            except Conflict:
                continue
            except NotFound:
                return None
            break
    _native.sync_paths([os.path.dirname(target)])
    return place


def _check_writable(directory: str) -> None:
    while not storage.is_there(directory):
        directory = os.path.dirname(directory)
    if not storage.is_directory(directory):
        raise _beneath_file(directory)
    if not storage.of(directory).is_writable(directory):
        raise PermissionDenied(f"directory '{directory}' is not writable", path=directory)


def _beneath_file(file: str) -> NotDirectory:
    return NotDirectory(
        f"'{file}' is not a directory, so no checkpoint can be under it", path=file, errno=errno.ENOTDIR
    )


def refuse_signed(target: str) -> None:
    """Raises InvalidLayoutError for the URL of one file, where a checkpoint was not found."""
    if storage.has_query(target):
        raise InvalidLayoutError(
            f"'{target}' is a URL with a query, which is the signature of one file as a rule, and a "
            "checkpoint is a directory of several; load a model that is one file with checkpoint_layout = "
            "SAFETENSORS, or by waystation.safetensors.load, and a checkpoint from a location such as "
            "s3://bucket/name",
            path=target,
        )


def require_checkpoint(target: str) -> None:
    """Raises what tells best why there is no checkpoint to read at `target`, of any layout. Returns if there
    is one, which may have come only now."""
    _refuse_attempt(target)
    if layout_at(target) is not None or storage.is_there(os.path.join(target, names.RECORD)):
        return
    refuse_signed(target)
    present = not is_absent(target)
    holds_names = present and storage.is_directory(target)
    if holds_names and storage.is_in_store(target):
        found = {entry.name for entry in storage.entries_or_none(target)}
        if not found.isdisjoint((names.RECORD, orbax_names.COMMIT_SUCCESS)):
            return  # it was committed between the looks
        present = holds_names = not all(map(names.is_passing, found))  # or was, and is being deleted
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
            f"'{target}' is not a checkpoint, but a directory of them: {_last_of(inside)}; give the path "
            "of one",
            path=target,
        )
    foreign = None if storage.of(target).renames is None else described(target)
    if foreign is not None:
        raise InvalidLayoutError(
            f"'{target}' is not a checkpoint of Waystation or Orbax, but {foreign}", path=target
        )
    if holds_names and _lacks_commit(target):
        raise InvalidLayoutError(
            f"'{target}' is a checkpoint of Orbax without {orbax_names.COMMIT_SUCCESS}, which makes one "
            "whole in a store: its save has not ended, or it was copied there without that file. If you know "
            "that all of it is there, put an empty file of this name to it",
            path=target,
        )
    if holds_names:
        problem = "it has the files of one, and has lost" if lost_record(target) else "it has no"
        raise InvalidLayoutError(
            f"'{target}' is not a checkpoint: {problem} {names.RECORD}{_beside(target)}", path=target
        )
    if present:
        if (link := dead_link(target)) is not None:
            raise CheckpointNotFound(f"'{target}' is {link}", path=target)
        raise NotDirectory(f"'{target}' is a file, not a checkpoint directory", path=target)
    raise _absent(target)


def _refuse_attempt(target: str) -> None:
    unfinished = storage.names.attempt_target(os.path.basename(target))
    if unfinished is not None:
        raise InvalidLayoutError(
            f"'{target}' is an unfinished attempt at checkpoint '{unfinished}', not a checkpoint; "
            "'waystation gc' removes it",
            path=target,
        )


def dead_link(target: str) -> str | None:
    """What a symbolic link is that leads nowhere; None for everything else."""
    found = storage.status(target, follow_links=False)
    if found is None or found.kind != "link":
        return None
    try:
        leads_nowhere = storage.status(target) is None
    except UnusablePath:
        return "a symbolic link that leads back to itself"
    return f"a symbolic link to '{storage.resolved(target)}', where nothing is" if leads_nowhere else None


def _absent(target: str) -> CheckpointNotFound | NotDirectory:
    """The error of a path at which nothing is, or in a store data that no checkpoint has."""
    try:
        storage.of(target).hold(target)
    except NotDirectory:
        above = os.path.dirname(target)
        while not storage.is_there(above) and above != os.path.dirname(above):
            above = os.path.dirname(above)
        return _beneath_file(above)
    except NotFound as error:
        if "bucket" in error.context:
            return CheckpointNotFound(error.message, **error.context)
    whole = os.path.dirname(target)
    is_within = False
    with contextlib.suppress(PermissionDenied, InvalidInput):
        is_within = is_native_checkpoint(whole)
    if is_within:
        hint = f"; '{whole}' is one, so give its path"
    elif storage.is_in_store(target) and any(map(names.mover, storage.directories(target))):
        hint = (
            f": what is there lacks {names.RECORD}. Its save or deletion has not ended, or it was copied "
            "without that file; copy that to it, too, or save again"
        )
    else:
        hint = f"{_beside(target)}{hub_advice(target)}"
    return CheckpointNotFound(f"there is no checkpoint '{target}'{hint}", path=target)


def _lacks_commit(target: str) -> bool:
    """Whether what is in a store is a checkpoint of Orbax that is not committed."""
    if storage.of(target).renames is not None:
        return False
    present = {entry.name for entry in storage.entries_or_none(target)}
    marks = {orbax_names.CHECKPOINT_METADATA, orbax_names.TREE_METADATA, orbax_names.INDICATOR}
    return not marks.isdisjoint(present) and orbax_names.COMMIT_SUCCESS not in present


def require_native_checkpoint(target: str) -> None:
    """Raises what tells best why there is no checkpoint of the native layout at `target`.

    Raises:
        Unsupported: There is one of Orbax's.
        NotFound, InvalidInput: There is none.
    """
    layout = layout_at(target)
    if layout == "orbax":
        raise Unsupported(
            f"'{target}' is a checkpoint in Orbax's layout, and this works on Waystation's own only; load it "
            "and save it again in that (array.saving.use_ocdbt = None)",
            path=target,
        )
    if layout is None:
        require_checkpoint(target)


def _beside(target: str) -> str:
    """Tells of unfinished attempts at this checkpoint and of committed neighbours."""
    parent, name = os.path.split(target)
    try:
        attempts = leftovers(parent, name)
    except (OSError, NotFound, PermissionDenied):
        return ""
    near = _checkpoints_in(parent)
    told = []
    if attempts:
        running = sum(attempt.is_running for attempt in attempts)
        dead = sum(attempt.dead for attempt in attempts)
        if running:
            told.append(f"{running} save{'s are' if running > 1 else ' is'} still writing it; wait for that")
        if dead:
            told.append(f"{dead} unfinished attempt(s) at it stand beside it: the save did not end")
        if elsewhere := len(attempts) - running - dead:
            told.append(f"{elsewhere} unfinished attempt(s) at it stand beside it, of another machine")
    if near:
        told.append(f"checkpoints there: {_last_of(near)}")
    return f" ({'; '.join(told)})" if told else ""


def lost_records_in(directory: PathLike) -> list[str]:
    """The names of the checkpoints in a directory that have lost their record."""
    return _names_in(directory, lost_record)


def torch_checkpoints_in(directory: PathLike) -> list[str]:
    """Those in a directory that `torch.distributed.checkpoint` has written, but for those set aside."""
    return [name for name in _names_in(directory, is_torch_checkpoint) if not names.is_aside(name)]


def _checkpoints_in(directory: str) -> list[str]:
    """The names of the checkpoints in a directory; in a store, where each takes a request, the last few."""
    if storage.of(directory).renames is not None:
        return _names_in(directory, is_checkpoint)
    last = sorted(storage.directories(directory), key=natural_order)[-_LAST:]
    found = storage.side_by_side(directory, lambda name: is_checkpoint(os.path.join(directory, name)), last)
    return [name for name, is_one in zip(last, found, strict=True) if is_one]


def _names_in(directory: PathLike, is_meant: Callable[[str], bool]) -> list[str]:
    """The names of the directories in a directory that are meant, sorted; none if it cannot be looked at.

    In a store none are looked for, as each would take a request.
    """
    if storage.of(directory).renames is None:
        return []
    try:
        found = [name for name in storage.directories(directory) if is_meant(os.path.join(directory, name))]
    except (OSError, NotFound, PermissionDenied):
        return []
    return sorted(found, key=natural_order)


def natural_order(name: str) -> list[tuple[int, int, str]]:
    """Sorts digits as numbers: `step_9` before `step_10`."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(part[:400]), part) if part.isdecimal() else (1, 0, part) for part in parts]


def _last_of(found: list[str], limit: int = _LAST) -> str:
    more = len(found) - limit
    return ", ".join(found[-limit:]) + (f" and {more} more" if more > 0 else "")
