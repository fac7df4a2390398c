"""`find_leftovers` and `remove_leftovers`: what saves and exports left behind when they were killed.

Removed is what provably belongs to no running process: attempts of processes of this machine that are gone.
Whether a process of another machine (or of another container) still runs cannot be told from here, so its
attempts are removed only when they have shown no sign of life for long. What a checkpoint's record names is
never touched. In an object store leases tell who is alive (`layouts/native/in_store.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from waystation import storage
from waystation._errors import InvalidInput, NotDirectory, NotFound, PermissionDenied
from waystation.checkpoint.paths import PathLike, is_native_checkpoint
from waystation.layouts.native import in_store, names, orphans
from waystation.layouts.orbax import in_store as orbax_in_store
from waystation.safetensors.spread_note import discard
from waystation.storage.attempts import (
    Leftover,
    export_stages,
    leftovers,
    remove,
)
from waystation.storage.signs_of_life import EXPIRES_S

DAY_S = 86_400.0

Verdict = Literal["dead", "abandoned", "running", "leased", "unknown", "undecided"]


@dataclass(frozen=True, slots=True)
class FoundLeftover:
    """An unfinished attempt and what may be done with it.

    Attributes:
        leftover: The attempt.
        nbytes: Bytes of its files.
        verdict: `dead` (its process provably no longer runs), `abandoned` (of another machine, without a
            sign of life for as long as was asked), `running` (its process does), `leased` (in an object
            store: its lease has not run out), `unknown` (of another machine, and recent), `undecided` (a
            prepared part of a save to local storage: the next load, save or delete there by all processes of
            the program finds out whether it belongs to a checkpoint).
    """

    leftover: Leftover
    nbytes: int
    verdict: Verdict

    @property
    def removable(self) -> bool:
        """Whether `remove_leftovers` removes it."""
        return self.verdict in ("dead", "abandoned")


def find_leftovers(directory: PathLike, *, older_than_s: float = DAY_S) -> list[FoundLeftover]:
    """Finds the unfinished attempts in a directory of checkpoints or exports, and inside of checkpoints.

    Directories in it that must not be looked into, such as `lost+found`, are passed over.

    Args:
        directory: Where checkpoints or exports are; in an object store also one checkpoint.
        older_than_s: From which age on attempts of other machines count as abandoned.

    Raises:
        NotFound: There is no such directory.
        InvalidInput: It is no directory, or the age is negative.
    """
    if not older_than_s >= 0:
        raise InvalidInput(f"an age cannot be {older_than_s} seconds")
    parent = storage.resolved(storage.located(directory))

    def look_into(place: str) -> list[FoundLeftover]:
        try:
            found = _leftovers_in(place)
        except PermissionDenied:
            if place == parent:
                raise
            return []
        return [FoundLeftover(each, _nbytes(each), _judge(each, older_than_s)) for each in found]

    return list(itertools.chain(*storage.side_by_side(parent, look_into, _places(parent))))


def remove_leftovers(
    found: Sequence[FoundLeftover],
    *,
    older_than_s: float = DAY_S,
    on_removed: Callable[[FoundLeftover], None] = lambda _found: None,
) -> list[FoundLeftover]:
    """Removes those that may be removed, judged once more: a process elsewhere may have shown up again.

    Returns:
        What was removed.
    """
    one_at_a_time = threading.Lock()
    of_place: dict[str, list[FoundLeftover]] = {}
    for entry in found:
        of_place.setdefault(os.path.dirname(entry.leftover.path), []).append(entry)

    def remove_from(entries: Sequence[FoundLeftover]) -> list[FoundLeftover]:
        removed = []
        for entry in entries:
            if _remove(entry.leftover, older_than_s):
                removed.append(entry)
                with one_at_a_time:
                    on_removed(entry)
        return removed

    places = list(of_place.values())
    directory = next(iter(of_place), "")
    return list(itertools.chain(*storage.side_by_side(directory, remove_from, places)))


def remove_dead_in_store(path: str) -> None:
    """Removes what saves to a path in a store have left whose processes are gone, whatever their layout."""
    if not orbax_in_store.remove_unfinished(path):
        in_store.remove_dead(path)


def tree_bytes(path: str) -> int:
    """Bytes of the files at or below a path; what vanishes meanwhile, or must not be looked into, counts as
    nothing."""
    if (store := storage.engine_of(path)) is not None:
        return store.bytes_beneath(path)
    try:
        found = storage.status(path, follow_links=False)
        if found is None:
            return 0
        if found.kind != "directory":
            return found.nbytes
        entries = storage.entries_or_none(path)
    except PermissionDenied:
        return 0
    return sum(
        tree_bytes(os.path.join(path, entry.name)) if entry.nbytes is None else entry.nbytes
        for entry in entries
    )


def _nbytes(leftover: Leftover) -> int:
    place = os.path.dirname(leftover.path)
    if storage.of(place).renames is None:
        return sum(map(tree_bytes, in_store.directories_of(place, leftover.attempt_id)))
    return tree_bytes(leftover.path)


def entries_of(parent: str) -> Sequence[storage.Entry]:
    """What lies in a directory of checkpoints.

    Raises:
        NotFound: There is no such directory, or no such bucket.
        NotDirectory: It is a file.
    """
    try:
        return storage.entries(parent)
    except (NotFound, NotDirectory) as error:
        if "bucket" in error.context:
            raise
        if isinstance(error, NotFound) and not storage.is_file(parent):
            raise NotFound(f"there is no directory '{parent}'", path=parent) from error
        raise NotDirectory(
            f"'{parent}' is a file; give a directory that holds checkpoints", path=parent
        ) from error


def _places(parent: str) -> Iterator[str]:
    """The directory, and the checkpoints in it: a record that is being replaced stands inside of one, and in
    an object store all that a save writes."""
    found = entries_of(parent)
    children = [os.path.join(parent, entry.name) for entry in found if entry.kind == "directory"]
    yield parent
    if storage.of(parent).renames is None:
        yield from (child for child in children if not names.is_passing(os.path.basename(child)))
        return
    for child in children:
        with contextlib.suppress(PermissionDenied):
            if is_native_checkpoint(child):
                yield child


def _leftovers_in(place: str) -> list[Leftover]:
    if storage.of(place).renames is None:
        return orbax_in_store.leftovers(place) or in_store.leftovers(place)
    return [*leftovers(place), *export_stages(place), *orphans.orphans(place)]


def _remove(leftover: Leftover, older_than_s: float) -> bool:
    def is_removable(present: Leftover) -> bool:
        return present.path == leftover.path and _judge(present, older_than_s) in ("dead", "abandoned")

    place = os.path.dirname(leftover.path)
    if storage.of(place).renames is None:
        if not (may_go := {each.attempt_id for each in _leftovers_in(place) if is_removable(each)}):
            return False
        return orbax_in_store.remove_unfinished(place) or bool(in_store.remove_dead(place, may_go))
    if leftover.kind == "overwrite":
        return bool(orphans.remove(place, is_removable))
    if not any(is_removable(present) for present in _leftovers_in(place)):
        return False
    # That of a model that was being spread may have moved files to other disks.
    remove(leftover, discard if leftover.kind == "export" else storage.remove_tree)
    return True


def _judge(leftover: Leftover, older_than_s: float) -> Verdict:
    if storage.of(leftover.path).renames is None and (leftover.dead or leftover.age_s <= EXPIRES_S):
        return "dead" if leftover.dead else "leased"  # a process that has committed may run on
    if leftover.is_running:
        return "running"
    if leftover.undecided:
        return "undecided"
    if leftover.dead:
        return "dead"
    return "abandoned" if leftover.age_s >= older_than_s else "unknown"
