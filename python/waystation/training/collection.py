"""Garbage collection: removes the checkpoints that the policy does not keep.

Three kinds stay whatever the policy says: those that somebody reads (`leases`), the only good one, and those
that are being overwritten. Good is a checkpoint that this program has committed, or whose records are whole.

The primary decides and removes; with local storage it decides, and every process removes its own part. What
is removed stops being a checkpoint in one rename, or in the removal of its record, before any of its files
goes. Killed in between, it leaves what no list takes for a checkpoint, and the next collection removes.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

from waystation import _forks, storage
from waystation._errors import Conflict, Corrupt, InvalidInput, NotFound, Unsupported, WaystationError
from waystation._options.in_effect import current_options
from waystation.checkpoint.collect import remove_dead_in_store
from waystation.checkpoint.delete import withdraw
from waystation.checkpoint.paths import layout_at
from waystation.storage import attempts
from waystation.training import step_records
from waystation.training.catalogue import Info, described
from waystation.training.place import Place
from waystation.training.preservation_policies import (
    PreservationContext,
    PreservationPolicy,
    may_ask_for_metrics,
)
from waystation.training.step_metadata import Unread, changed, stored_metrics
from waystation.training.step_names import named_in

_log = logging.getLogger("waystation")

# Where nothing may be removed at all, each save tries this many again of all that should have gone.
_TRIED_AGAIN = 8


class Collector:
    """Decides what goes, and removes it.

    Args:
        place: The directory.
        policy: What to keep.
        among: Given the checkpoints by age, those that it is about, in the order that the policy is to see;
            others are not removed.
    """

    def __init__(
        self,
        place: Place,
        policy: PreservationPolicy,
        among: Callable[[list[Info]], list[Info]] = lambda infos: infos,
    ) -> None:
        self._among = among
        self._place = place
        self._catalogue = place.catalogue
        self._leases = place.leases
        self._policy = policy
        self._deciding = threading.Lock()
        # Those that are off the list and could not be removed, by name. Of a step that was saved again since,
        # there is another version, which says itself whether it goes.
        self._refused: dict[str, Info] = {}
        _forks.watch(self)

    def begin_in_child(self) -> None:
        """See `waystation._forks.Watched`."""
        self._deciding = threading.Lock()

    @contextlib.contextmanager
    def chosen(self) -> Iterator[list[Info]]:
        """Within the block, what is to be removed: it is off the list, and nobody begins to read it."""
        marks: list[contextlib.ExitStack] = []
        try:
            with self._deciding:
                unwanted = self._unwanted()
                may_go = storage.side_by_side(
                    self._place.root, lambda info: self._condemn(info, marks), unwanted
                )
                going = [info for info, goes in zip(unwanted, may_go, strict=True) if goes]
                self._catalogue.drop(info.step for info in going)
            yield going
        finally:
            storage.side_by_side(self._place.root, contextlib.ExitStack.close, marks)

    def _condemn(self, info: Info, marks: list[contextlib.ExitStack]) -> bool:
        """Marks a checkpoint as one that goes, unless somebody reads it, or that cannot be told; adds to
        `marks` what takes the mark away."""
        name = info.path.name
        try:
            if self._leases.is_held(name):
                return False  # without a mark, which other readers would give way to
            with contextlib.ExitStack() as mark:
                may_go = mark.enter_context(self._leases.condemned(name))
                if may_go:
                    marks.append(mark.pop_all())
        except WaystationError as error:
            _log.warning("checkpoint '%s' is not removed: %s", info.path, error)
            return False
        return may_go

    def _unwanted(self) -> list[Info]:
        """What the policy does not keep and nothing else protects."""
        try:
            infos = self._among(self.with_records())
        except WaystationError as error:  # the next save looks again
            _log.warning("nothing is removed of '%s' now: %s", self._place.root, error)
            return []
        flags: Any = self._policy.should_preserve(infos, context=PreservationContext())
        answers = len(flags) if isinstance(flags, Sized) else 0
        if answers != len(infos):
            raise InvalidInput(
                f"preservation policy {self._policy!r} was asked about {len(infos)} checkpoints and answered "
                f"for {answers}; it has to say of each whether to keep it"
            )
        kept = [info for info, flag in zip(infos, flags, strict=True) if flag]
        going = [info for info, flag in zip(infos, flags, strict=True) if not flag]
        in_flight = self._catalogue.in_flight()
        spared = self._spared(kept, going)
        return [info for info in going if info.step not in in_flight and info is not spared]

    def with_records(self) -> list[Info]:
        """The committed checkpoints by age, with their times, which a light list lacks, and with the metrics
        that the policy may ask for."""
        infos = self._catalogue.committed_by_age()
        asks = may_ask_for_metrics(self._policy)
        lacking = [
            info
            for info in infos
            if info.commit_timestamp_nsecs is None or (asks and isinstance(stored_metrics(info), Unread))
        ]
        if not lacking:
            return infos
        found = storage.side_by_side(self._place.root, self._described, lacking)
        self._catalogue.describe(info for info in found if info is not None)
        return self._catalogue.committed_by_age()

    def _described(self, info: Info) -> Info | None:
        """A checkpoint with what its record says, and its metrics; None if these are damaged."""
        try:
            if info.commit_timestamp_nsecs is None:
                return described(info)
            return changed(info, metrics=info.metrics)
        except Corrupt as error:
            _log.warning("checkpoint '%s' is damaged: %s", info.path, error)
            self._catalogue.mark_damaged(info.step)
            return None

    def _spared(self, kept: Sequence[Info], going: Sequence[Info]) -> Info | None:
        """The youngest good one of those that would go, if none that stays is good."""
        if not going or any(map(self._is_good, reversed(kept))):
            return None
        return next(filter(self._is_good, reversed(going)), going[-1])

    def _is_good(self, info: Info) -> bool:
        if self._catalogue.is_own(info.step):
            return True
        try:
            step_records.check(info.path)
        except WaystationError:
            return False
        return True

    def remove(self, infos: Sequence[Info]) -> list[Info]:
        """Removes checkpoints, and what earlier removals have not finished.

        What cannot be removed stays, and is told in the log: no save fails by it. Later calls try again.

        Returns:
            Those that are not there any more.
        """
        marks: list[contextlib.ExitStack] = []
        root, refused = self._place.root, self._refused_before()
        try:
            may_go = storage.side_by_side(
                root, lambda info: self._is_as_judged(info) and self._condemn(info, marks), refused
            )
            going = [*infos, *(info for info, goes in zip(refused, may_go, strict=True) if goes)]
            gone = storage.side_by_side(root, self._remove, going)
        finally:
            storage.side_by_side(self._place.root, contextlib.ExitStack.close, marks)
        if infos:
            remove_remains(self._place)
        return [info for info, is_gone in zip(going, gone, strict=True) if is_gone]

    def gives_way(self, step: int) -> bool:
        """Whether what is at the path of a step should be gone, and could not be removed: a save of the step
        replaces it, if the layout and the storage can replace anything."""
        path = os.fspath(self._place.path_of(step))
        info = self._refused.get(os.path.basename(path))
        if info is None or not self._is_as_judged(info):
            return False
        return not storage.is_in_store(path) or layout_at(path) == "native"

    def _refused_before(self) -> list[Info]:
        """What could not be removed, and is tried again now."""
        for name, info in [*self._refused.items()]:
            if self._catalogue.is_known(info.step):
                self._refused.pop(name, None)
        return [*self._refused.values()][:_TRIED_AGAIN]

    def _is_as_judged(self, info: Info) -> bool:
        """Whether what could not be removed is there still. Much may have happened since: another program may
        have saved the step again, in a layout of which a removal does not compare the versions."""
        try:
            if step_records.committed_ns(os.fspath(info.path)) == info.commit_timestamp_nsecs:
                return True
        except (Corrupt, InvalidInput, NotFound, Unsupported):
            pass  # it is gone, or nothing tells what is there now
        except WaystationError:
            return False  # for now
        self._refused.pop(info.path.name, None)
        return False

    def _remove(self, info: Info) -> bool:
        # Of parts in local storage each has been committed by its own process, at its own time.
        is_shared = current_options().multiprocessing.primary_host is not None
        created_ns = info.commit_timestamp_nsecs if is_shared else None
        name = info.path.name
        try:
            remove_step(self._place, info.path, created_ns=created_ns)
        except (Conflict, NotFound) as error:  # somebody else has replaced or removed it
            self._refused.pop(name, None)
            _log.info("checkpoint '%s' was not removed: %s", info.path, error)
            return isinstance(error, NotFound)
        except WaystationError as error:
            if name not in self._refused:
                _log.warning("checkpoint '%s' could not be removed: %s", info.path, error)
            self._refused.pop(name, None)
            if created_ns is not None:  # by which it is told from a later version
                self._refused[name] = info  # as the last one, so that others get their turn
            return False
        else:
            self._refused.pop(name, None)
        return True


def remove_step(place: Place, path: storage.AnyPath, *, created_ns: int | None = None) -> None:
    """Removes the checkpoint of a step in one visible act, or moves it to where the place says.

    Raises:
        NotFound: It is not there.
        Unavailable: The disk refuses.
    """
    if place.removed_to is None:
        withdraw(os.fspath(path), created_ns=created_ns)
        return
    directory = os.path.join(place.root, place.removed_to)
    storage.make_directory(directory, parents=True)
    for number in itertools.count():
        name = path.name if number == 0 else f"{path.name}-{number}"
        try:
            storage.renames(place.root).new(os.fspath(path), os.path.join(directory, name))
        except Conflict:  # an earlier one of the same step
            continue
        break
    for entries in (directory, place.root):
        storage.sync_entries(entries)


def remove_remains(place: Place, *, of_checkpoints: bool = False) -> None:
    """Removes what saves and removals of processes that are gone have left in a directory.

    Args:
        place: The directory.
        of_checkpoints: Whether it is also looked for at steps that have a checkpoint, in a store. Else the
            next save or deletion of that step does so.
    """
    try:
        if storage.is_in_store(place.root):
            named = named_in(place.root, place.name_format)
            wanted = [path for step, path in named if of_checkpoints or not place.catalogue.is_known(step)]
            storage.side_by_side(place.root, lambda path: remove_dead_in_store(os.fspath(path)), wanted)
            return
        for leftover in attempts.leftovers(place.root):
            if leftover.is_over:
                attempts.remove(leftover)
    except WaystationError as error:
        _log.warning("what earlier saves have left in '%s' could not be removed: %s", place.root, error)
