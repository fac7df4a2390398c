"""Opens a directory of checkpoints: makes it, finds what is there, and cleans up if that is asked for.

The primary does it and tells the others; with local storage each process has a directory of its own.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

from waystation import storage
from waystation._errors import InvalidInput, Unsupported
from waystation._options import Options
from waystation.checkpoint.collect import find_leftovers, remove_leftovers
from waystation.checkpoint.paths import lost_records_in, torch_checkpoints_in
from waystation.coordination import Session
from waystation.layouts.orbax import names as orbax_names
from waystation.training import root_metadata
from waystation.training.collection import remove_remains
from waystation.training.errors import DamagedCheckpointWarning
from waystation.training.listing import take_stock
from waystation.training.place import Place
from waystation.training.step_names import named_in

_ABOVE = 4  # frames of this package between a warning and the program's own call


def check(place: Place, options: Options, *, has_tier: bool, has_remote: bool) -> None:
    """Refuses what no object store can have, or no remote.

    Raises:
        Unsupported: That is asked for.
    """
    if has_remote and options.multiprocessing.primary_host is None:
        raise Unsupported(
            "with multiprocessing.primary_host = None each process has a part of a checkpoint, and a remote "
            "takes whole ones; set primary_host to the process that is to decide, or leave out remote=",
            path=place.root,
        )
    if place.removed_to is not None:
        _check_removed_to(place, place.removed_to)
    if not storage.is_in_store(place.root):
        return
    if options.multiprocessing.primary_host is None:
        raise Unsupported(
            f"with multiprocessing.primary_host = None each process has a directory of its own, and "
            f"'{place.root}' is in an object store, which all share; set primary_host to the process that is "
            "to decide, or give a directory",
            path=place.root,
        )
    if has_tier:
        raise Unsupported(
            f"a memory tier keeps records beside the checkpoints, in a directory, and '{place.root}' is in "
            "an object store; give a directory, or leave out memory=",
            path=place.root,
        )


def _check_apart(root: str, remote: str) -> None:
    """Refuses a remote that is the directory itself, by whatever path, or has to do with it: its policy would
    remove the steps of the directory.

    Raises:
        InvalidInput: It is.
    """
    if storage.is_same_directory(root, remote):
        what = "is the directory of the checkpoints itself"
    elif storage.is_within(remote, root):
        what = "is inside the directory of the checkpoints"
    elif storage.is_within(root, remote):
        what = "has the directory of the checkpoints inside"
    else:
        return
    raise InvalidInput(
        f"the remote '{remote}' {what}, '{root}'; give a place that has nothing to do with it", path=remote
    )


def _check_removed_to(place: Place, removed_to: object) -> None:
    """Refuses what is no directory of the sequence to which steps could be moved."""
    is_name = isinstance(removed_to, str) and not set(removed_to) & {"/", "\0"}
    if not is_name or not removed_to or str(removed_to).startswith("."):
        raise InvalidInput(f"removed_to must be a plain name of a directory, not {removed_to!r:.60}")
    if any(found == removed_to for found in (place.name_format.build_name(0), "metadata")):
        raise InvalidInput(f"removed_to cannot be {removed_to!r}: another directory has this name")
    if storage.is_in_store(place.root):
        raise Unsupported(
            f"'{place.root}' is in an object store, where nothing can be moved; leave out removed_to",
            path=place.root,
        )


def open_directory(
    place: Place,
    options: Options,
    custom_metadata: Any,
    *,
    clean_up: bool,
    with_records: bool,
    remote: str | None = None,
) -> None:
    """Makes the directory ready, and reads what is there into the catalogue.

    Args:
        place: The directory.
        options: Of the call.
        custom_metadata: What to write down of the whole sequence.
        clean_up: Whether to remove what unended saves have left.
        with_records: Whether to read what checkpoints say of themselves.
        remote: Where steps are to be uploaded to, which has to be another place.
    """
    session = place.session("open the checkpoints", options)
    is_mine = session.is_primary or options.multiprocessing.primary_host is None

    def prepare() -> bytes:
        if custom_metadata is not None:
            root_metadata.check(custom_metadata)
        if remote is not None:
            _check_apart(place.root, remote)
        if is_mine:
            mode = options.file.path_permission_mode
            storage.make_directory(place.root, parents=True, permission_mode=mode)
            if custom_metadata is not None:
                root_metadata.write_once(place.root, custom_metadata)
            if clean_up:
                _clean_up(place)
        return b""

    try:
        session.round(prepare, lambda _: b"")
        _read(session, place, options, with_records=with_records)
    finally:
        session.close()


def look_again(place: Place, options: Options, *, with_records: bool) -> None:
    """Reads what is there now into the catalogue."""
    session = place.session("look for checkpoints again", options)
    try:
        _read(session, place, options, with_records=with_records)
    finally:
        session.close()


def _read(session: Session, place: Place, options: Options, *, with_records: bool) -> None:
    listing = take_stock(session, place, options, with_records=with_records)
    place.catalogue.replace(listing)
    if session.is_primary or options.multiprocessing.primary_host is None:
        _tell_of_lost_records(place)
        _tell_of_torch(place)
    if listing.damaged:
        named = ", ".join(f"step {info.step} ('{info.path.name}')" for info in listing.damaged)
        warnings.warn(
            f"the records of checkpoints in '{place.root}' are damaged: {named}; they count as if they were "
            "not there. 'waystation verify' tells what is wrong with them",
            DamagedCheckpointWarning,
            stacklevel=_ABOVE,
        )


def _tell_of_lost_records(place: Place) -> None:
    lost = lost_records_in(place.root)
    if lost:
        warnings.warn(
            f"checkpoints in '{place.root}' have lost their checkpoint.json: {', '.join(lost)}; they count "
            "as if they were not there. Complete them if there is another copy; a save of such a step gives "
            "them another name",
            DamagedCheckpointWarning,
            stacklevel=_ABOVE + 1,
        )


def _tell_of_torch(place: Place) -> None:
    """Tells of checkpoints that torch has written, unless the sequence has gone on since."""
    found = torch_checkpoints_in(place.root)
    if not found:
        return
    committed = place.catalogue.committed()
    newest = committed[-1].step if committed else -1
    steps = {path.name: step for step, path in named_in(place.root, place.name_format)}
    found = [name for name in found if steps.get(name, 0) > newest]
    if found:
        warnings.warn(
            f"in '{place.root}' are checkpoints of torch.distributed.checkpoint: {', '.join(found)}; they "
            "count as if they were not there. waystation.integrations.dcp.load loads one; then save what it "
            "loaded as the next step",
            stacklevel=_ABOVE + 1,
        )


def _clean_up(place: Place) -> None:
    """Removes what unended saves have left: ours if that is certain, Orbax's because it was asked for."""
    if storage.is_in_store(place.root):
        remove_remains(place, of_checkpoints=True)
    else:
        remove_leftovers(find_leftovers(place.root))
    for entry in storage.entries_or_none(place.root):
        if orbax_names.is_temporary(entry.name):
            storage.remove_tree(os.path.join(place.root, entry.name))
