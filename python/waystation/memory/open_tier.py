"""The memory tier of one `Checkpointer`, at work.

What can go wrong in a save, in a load, or with the agent is a `MemoryTierWarning`, told once until it works
again, and a number in the statistics; it is never raised into the program. Two things are raised, when the
tier is opened: that the agent has too few slots, and that the program would begin from nothing although
memory once had committed steps.

One thing at a time runs in the background (`InFlight`): the end of a save, or what makes the tier ready for
the next one (it is opened, goes back to an earlier step, or asks agents that have failed). A save that does
not wait leaves its step out while something does. It has the tier made ready in the background only, and
gives agents `AGENTS_S` to take the state: it waits for no more than that, its own copy, and the other
processes.

Invariants: all processes take the same steps, for all of them decide by what a round has told; a step that is
not newer than the last one is saved in a new epoch; a version is listed only once it is whole, and not any
more once it may be overwritten.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from waystation import _forks, _native, storage
from waystation._errors import (
    Cancelled,
    CommittedStepsLost,
    Corrupt,
    InvalidInput,
    MemoryTooSmall,
    NotFound,
    Unavailable,
    Unsupported,
    WaystationError,
)
from waystation._options import Options
from waystation.checkpoint.loading import Loading
from waystation.checkpoint.native_saving import CutStates
from waystation.checkpoint.saving import Saving
from waystation.checkpoint.sessions import open_session, process_count
from waystation.coordination import Session
from waystation.memory.agent import OwnAgent
from waystation.memory.beginning import Beginning
from waystation.memory.errors import DoubtedStepWarning, LostStepWarning, MemoryTierWarning
from waystation.memory.loading import VersionLoading
from waystation.memory.records import CommittedRecord, Restores
from waystation.memory.recovering import Recovering
from waystation.memory.save_actions import Pause, SaveAction
from waystation.memory.saving import AgentSlots, saving_options
from waystation.memory.version_store import VersionStore
from waystation.memory.versions import Version, Whole, candidates
from waystation.training.logger import Logger
from waystation.training.place import Place
from waystation.training.restoring import Restorer
from waystation.training.save_decision_policies import (
    DecisionContext,
    SaveDecisionPolicy,
    is_same_everywhere,
)
from waystation.training.saving import Request
from waystation.training.step_metadata import CheckpointMetadata
from waystation.training.tiers import TierStatistics, Wish
from waystation.transfers.handle import AsyncResponse, Progress

T = TypeVar("T")

TIER = "memory"
AGENTS_S = 0.5
"""How long agents may keep a save from copying that does not wait for them."""
_LOOK_EVERY_S = 0.05  # at whether they do
_SKIPS_TOLD_EVERY_S = 60.0
_LEFT_OUT = {
    SaveAction.PAUSE: "saves before it have failed",
    SaveAction.BUSY: "what was begun before has not ended",
    SaveAction.OPEN: "the tier is opened first",
    SaveAction.GO_BACK: "the tier goes back to it first",
    SaveAction.ASK: "agents that have failed are asked first",
}

# What a load raises that no other version or tier would mend.
_OF_THE_CALL = (InvalidInput, Unsupported, Cancelled)
_ABOVE = 6  # frames of this package between a warning and the program's own call


@dataclass(frozen=True, slots=True)
class InFlight:
    """What runs in the background.

    Attributes:
        step: The step of the call that has begun it.
        response: Its result.
        is_save: Whether it saves that step, and does not only make the tier ready.
    """

    step: int
    response: AsyncResponse[None]
    is_save: bool


class OpenMemoryTier:
    """See `options.MemoryTier`, which has what it is given."""

    is_closed: bool

    def __init__(
        self,
        directory: str,
        run: str | None,
        policy: SaveDecisionPolicy,
        deadline_s: float,
        place: Place,
        logger: Logger,
    ) -> None:
        sequence = f"{_native.crc64(os.fsencode(storage.resolved(place.root))):016x}"
        self._directory = directory
        self._beginning = Beginning(OwnAgent(directory, run, deadline_s), sequence)
        self._store: VersionStore | None = None  # once the program has begun with it
        self._policy = policy
        self._deadline_s = deadline_s
        self._place = place
        self._disk = DiskFallback(place)
        self._logger = logger
        self._restores = Restores(Path(place.root))
        self._committed = CommittedRecord(Path(place.root))
        self._calls = threading.RLock()  # one call at a time
        self._known = threading.Lock()  # of what the thread of a save changes
        self._statistics = TierStatistics()
        self._whole: list[Whole] = []  # the newest first
        self._in_flight: InFlight | None = None
        self._pause = Pause()
        self._is_ready = False  # whether agents have answered since they last failed
        self._untold_skips, self._skips_told_s = 0, -_SKIPS_TOLD_EVERY_S
        self._recovering = Recovering()
        self._is_primary = self._was_warned = self.is_closed = False
        self._loaded: set[Version] = set()  # of earlier programs, since the last save
        self._dropped: set[Version] = set()  # damaged or deleted
        self._doubted: frozenset[Version] = frozenset()  # that programs began with in vain
        self._recorded: Version | None = None  # the newest commit, as the directory has it
        self._told: set[Version] = set()  # of what was warned of, as lost or in doubt
        self._has_older = True  # versions in the store that this program has not saved
        self._uncommitted: Version | None = None  # of what is whole
        self._last_step: int | None = None  # that was saved in this epoch, or was to be
        _forks.watch(self)

    def begin_in_child(self) -> None:
        """See `waystation._forks.Watched`: the client refuses what the child asks for."""
        self._calls = threading.RLock()
        self._known = threading.Lock()

    # ---- what it is ----------------------------------------------------------------------------

    @property
    def statistics(self) -> TierStatistics:
        """What it has done so far."""
        with self._known:
            return self._statistics

    def checkpoints(self) -> list[CheckpointMetadata[None]]:
        """The checkpoints that it has, ascending, as far as it knows."""
        with self._known:
            whole = list(self._whole)
        if self._disk.newest() is not None or any(entry.version not in self._doubted for entry in whole):
            whole = [entry for entry in whole if entry.version not in self._doubted]
        # What an earlier epoch has of later steps is of a past that the program went back from.
        steps = {entry.version.step for entry in whole if entry.version.step <= whole[0].version.step}
        path = Path(self._directory)
        return [CheckpointMetadata(step, path, metadata=None, tiers=(TIER,)) for step in sorted(steps)]

    def begin(self, options: Options, *, start_from_nothing: bool) -> None:
        """Begins an epoch and finds out what memory holds.

        Args:
            options: Of the call.
            start_from_nothing: Whether the program may begin from nothing where something was committed.

        Raises:
            MemoryTooSmall: The agent of some process has too few slots.
            CommittedStepsLost: Something was committed, and there is nothing to begin with.
        """
        limited = saving_options(options, self._deadline_s)
        with self._calls:
            with self._degrading("be opened", None, (MemoryTooSmall,)):
                self._open(limited, is_waited_for=True)
            if self._store is not None:
                self._tell_disagreement(self._store)
                self._tell_doubts(self._store)
            if not start_from_nothing:
                self._require_beginning(limited)

    def _require_beginning(self, options: Options) -> None:
        """Raises what keeps the program from beginning anew by mistake, in all processes."""

        def look() -> bytes:
            committed = self._committed.read()
            has_any = self._whole or self._disk.newest() is not None
            return json.dumps(None if committed is None or has_any else committed.step).encode()

        with self._session("see whether there is anything to begin with", options) as session:
            step = json.loads(session.broadcast(look))
        if step is not None:
            lost = None if self._store is None else self._store.lost
            raise self._nothing_left(step if lost is None else lost.step)

    def _nothing_left(self, step: int) -> CommittedStepsLost:
        why = self.statistics.last_failure
        self._log("memory_lost", step, None, why)
        because = "" if why is None else f" ({why})"
        return CommittedStepsLost(
            f"memory has had committed steps of '{self._place.root}', at least up to step {step}, and "
            f"neither memory nor the directory has one that can be loaded{because}. If agents that may have "
            "them do not run, start those; to begin from nothing, give MemoryTier(start_from_nothing=True)",
            step=step,
            path=self._place.root,
        )

    def _open(self, options: Options, *, is_waited_for: bool) -> VersionStore:
        with self._session("open the memory tier", options) as session:
            return self._open_in(session, is_waited_for=is_waited_for)

    def _open_in(self, session: Session, *, is_waited_for: bool) -> VersionStore:
        self._recovering.begins()
        self._is_primary = session.is_primary
        store, offered = self._beginning.begin(session, is_waited_for=is_waited_for)
        whole = self._disk.loadable(offered, session)
        deleted = [[version.epoch, version.step] for version in self._restores.deleted()]
        deleted = json.loads(session.broadcast(lambda: json.dumps(deleted).encode()))
        self._note_doubts(store, session)
        self._dropped.update(Version(*version) for version in deleted)
        with self._known:
            self._whole = [entry for entry in whole if entry.version not in self._dropped]
        self._last_step = None
        self._store, self._is_ready = store, True
        self._recovering.is_prepared(store.transfer_s())
        return store

    def _note_doubts(self, store: VersionStore, session: Session) -> None:
        """Which versions programs began with in vain: agents count that, and programs remember it."""

        def spent() -> bytes:
            return json.dumps([[version.epoch, version.step] for version in self._restores.spent()]).encode()

        remembered = {Version(*version) for version in json.loads(session.broadcast(spent))}
        self._doubted = frozenset((store.doubted | remembered) - self._loaded)

        def committed() -> bytes:
            version = self._committed.read()
            return json.dumps(None if version is None else [version.epoch, version.step]).encode()

        version = json.loads(session.broadcast(committed))
        self._recorded = None if version is None else Version(*version)

    def _lost(self, store: VersionStore) -> Version | None:
        """The newest commit, if it can be restored no more: agents know that, or only the record does."""
        if store.lost is not None or self._recorded is None:
            return store.lost
        is_there = any(entry.version >= self._recorded for entry in self._whole)
        return None if is_there or store.disagreement is not None else self._recorded

    def _tell_disagreement(self, store: VersionStore) -> None:
        """Warns where agents do not agree, and what this program's hosts have is restored all the same."""
        if store.disagreement is None:
            return
        self._log("memory_disagreement", None, None, store.disagreement)
        warnings.warn(store.disagreement, MemoryTierWarning, stacklevel=_ABOVE)

    def _tell_doubts(self, store: VersionStore) -> None:
        """Warns of what was lost, and of what is in doubt and would otherwise be restored; of each once."""
        on_disk = self._disk.newest()
        order = candidates(self._whole, None, on_disk, self._doubted)
        doubted = [entry.version for entry in self._whole if entry.version in self._doubted]
        restored = order[0].version.step if order else on_disk
        lost = self._lost(store)
        if lost is not None and (restored is None or restored >= lost.step):
            lost = None  # the disk has it, or nothing is left, which is raised
        with self._known:
            self._statistics = dataclasses.replace(
                self._statistics,
                doubted_steps=tuple(sorted({version.step for version in doubted})),
                lost_step=None if lost is None else lost.step,
            )
        if restored is None:
            return
        tier = TIER if order else "directory"
        if lost is not None and lost not in self._told:
            self._told.add(lost)
            self._log("memory_lost", lost.step, None, f"step {restored} is restored instead")
            warnings.warn(LostStepWarning(lost.step, restored, (tier,)), stacklevel=_ABOVE)
        for version in doubted:
            if version not in self._told and (not order or version >= order[0].version):
                self._told.add(version)
                self._log("memory_doubt", version.step, None, f"step {restored} is restored")
                warnings.warn(DoubtedStepWarning(version.step, restored, tier), stacklevel=_ABOVE)

    # ---- saving --------------------------------------------------------------------------------

    def should_save(self, step: int, options: Options) -> bool:
        """Whether its policy says to save a step."""
        own = self._ask(step, options)
        if process_count(options) == 1 or is_same_everywhere(self._policy):
            return own
        with self._calls, self._degrading("decide", step):
            limited = saving_options(options, self._deadline_s)
            with self._session(f"decide whether to keep step {step} in memory", limited) as session:
                part = b"yes" if own else b""
                return session.round(lambda: part, lambda parts: parts[session.primary]) == b"yes"
        return False

    def _ask(self, step: int, options: Options) -> bool:
        present = CheckpointMetadata(
            step, Path(self._directory), metadata=None, init_timestamp_nsecs=time.time_ns()
        )
        context = DecisionContext(
            is_saving_in_progress=False,  # a save waits for the one before, or counts as skipped
            reached_preemption=False,
            multiprocessing_options=options.multiprocessing,
        )
        return bool(self._policy.should_save(present, self.checkpoints(), context=context))

    def save(self, request: Request, options: Options, *, force: bool, waits: bool) -> None:
        """Saves a step, if its policy says so; returns once the program may change its state. Unless it
        `waits`, the step is left out where it would have to."""
        if (recovery := self._recovering.steps(is_primary=self._is_primary)) is not None:
            with self._known:
                self._statistics = dataclasses.replace(self._statistics, recovery=recovery)
        if not (force or self.should_save(request.step, options)):
            return
        begun = time.monotonic()
        with self._calls:
            self._hear_of_last(waits=waits)
            with self._degrading("save", request.step):
                self._take_turn(request, saving_options(options, self._deadline_s), waits=waits)
        self._count(blocked_s=time.monotonic() - begun)

    def _take_turn(self, request: Request, options: Options, *, waits: bool) -> None:
        """Saves, or does what all processes have to do before they can."""
        own = self._own_action(request.step, waits=waits)
        with self._session(f"see whether memory can take step {request.step}", options) as session:
            action = own.agreed(session)
            if waits and not action.leaves_out:
                self._make_ready(action, session)
        if action is SaveAction.SAVE or (waits and not action.leaves_out):
            self._save(request, options, waits=waits)
            return
        self._leave_out(request.step, _LEFT_OUT[action])
        if not action.leaves_out:
            self._make_ready_in_background(action, request.step, options)

    def _own_action(self, step: int, *, waits: bool) -> SaveAction:
        """What this process would have to do."""
        is_paused = self._pause.leaves_out() and not self._is_ready
        if self._in_flight is not None:
            return SaveAction.BUSY
        if is_paused:
            return SaveAction.PAUSE
        if self._store is None:
            return SaveAction.OPEN
        if self._last_step is not None and step <= self._last_step:
            return SaveAction.GO_BACK
        return SaveAction.SAVE if waits or self._is_ready else SaveAction.ASK

    def _make_ready(self, action: SaveAction, session: Session) -> None:
        """Does what has to be done before a save, and waits for agents."""
        store = self._open_in(session, is_waited_for=False) if action is SaveAction.OPEN else self._store
        assert store is not None, "all processes have agreed that they have one"
        if action is SaveAction.ASK:
            store.ask(session)
        else:
            store.before_save(session, goes_back=action is SaveAction.GO_BACK, waits=True)
        if action is SaveAction.GO_BACK:
            self._last_step = None
        if self._uncommitted is not None and store.commit(self._uncommitted):
            self._uncommitted = None
        self._is_ready = True

    def _make_ready_in_background(self, action: SaveAction, step: int, options: Options) -> None:
        """Does the same for the next save, of which this call does not wait for any part."""
        what = f"making the memory tier ready after step {step}"
        session = open_session(what, options)

        def work(_: Progress) -> None:
            try:
                self._make_ready(action, session)
            finally:
                session.close()

        try:
            response = AsyncResponse(what, work)
        except BaseException:
            session.close()
            raise
        self._in_flight = InFlight(step, response, is_save=False)

    def _leave_out(self, step: int, why: str) -> None:
        """Counts a step that memory does not get, and tells of such steps now and then."""
        self._count(skipped=1)
        self._untold_skips += 1
        now_s = time.monotonic()
        if now_s - self._skips_told_s >= _SKIPS_TOLD_EVERY_S:
            self._log("memory_skipped", step, None, skipped=self._untold_skips, reason=why)
            self._untold_skips, self._skips_told_s = 0, now_s

    def _save(self, request: Request, options: Options, *, waits: bool) -> None:
        store = self._store
        assert store is not None, "the tier is ready"
        self._last_step = request.step
        self._forget_freed(store, store.kept_while_saving)
        layout = CutStates()
        slots = AgentSlots(store, request.step, layout, waits=waits)
        saving = Saving(
            f"step {request.step} in memory",
            options,
            layout,
            slots,
            deadline_s=options.multiprocessing.deadline_s,
            begun_ns=request.begun_ns,
        )
        parts = request.parts()
        with saving.closed_on_error():
            saving.begin(parts, request.custom_metadata)
            saving.prepare(parts)
        self._finish_in_background(saving, slots, store, request.step, waits=waits)

    def _finish_in_background(
        self, saving: Saving, slots: AgentSlots, store: VersionStore, step: int, *, waits: bool
    ) -> None:
        """Has the rest of a save done; returns once the program may change its state."""
        is_copied = threading.Event()

        def work(progress: Progress) -> None:
            try:
                with saving:
                    saving.finish(progress, is_copied.set)
            except Unavailable:
                is_copied.set()
                if self._has_older:
                    self._make_room()
                raise
            finally:
                is_copied.set()
            assert slots.version is not None, "it is sealed"
            self._has_saved(store, Whole(slots.version, saving.process_count), slots.saved_bytes)

        with saving.closed_on_error():
            response = AsyncResponse(f"saving {saving.target}", work)
        self._in_flight = InFlight(step, response, is_save=True)
        try:
            while not is_copied.wait(None if waits else _LOOK_EVERY_S):
                if slots.awaits_agents_s() >= AGENTS_S:
                    response.cancel()
                    if slots.leave():
                        return
        except BaseException:  # Ctrl-C: the program may change what is still read
            response.cancel()
            raise

    def _has_saved(self, store: VersionStore, entry: Whole, saved_bytes: int) -> None:
        """A version is whole."""
        self._uncommitted = None if store.commit(entry.version) else entry.version
        if self._is_primary:
            self._committed.note(entry.version)
        with self._known:
            self._whole.insert(0, entry)
        kept = self._forget_freed(store, store.kept)
        if self._has_older and len(kept) > 1 and kept[-1].version.epoch == store.epoch:
            store.retire_before(kept[-1].version)
            self._has_older = False
        if self._loaded and self._is_primary:
            self._restores.forget()
        self._loaded.clear()
        with self._known:
            self._statistics = dataclasses.replace(
                self._statistics,
                saves=self._statistics.saves + 1,
                saved_bytes=self._statistics.saved_bytes + saved_bytes,
                last_saved_step=entry.version.step,
            )

    def _forget_freed(self, store: VersionStore, most: int) -> list[Whole]:
        """Does not list any more what may be overwritten: the oldest, but first what agents have in doubt."""
        with self._known:
            newest, older = self._whole[:1], self._whole[1:]
            older.sort(key=lambda entry: entry.version in store.doubted)  # stable: the newest first
            self._whole = sorted([*newest, *older][:most], reverse=True)
            return list(self._whole)

    def _hear_of_last(self, *, waits: bool = True) -> None:
        """Takes notice of how what runs in the background has ended, and waits for that if it is to."""
        if self._in_flight is None:
            return
        in_flight, self._in_flight = self._in_flight, None
        with self._degrading("save", in_flight.step):
            if not (waits or in_flight.response.done()):
                self._in_flight = in_flight
                return
            try:
                in_flight.response.result()
            except Cancelled as error:  # in some process, which could not wait for its agent
                self._is_ready = False
                self._leave_out(in_flight.step, error.message)
                return
            if in_flight.is_save:
                self._pause.succeeded()
                self._was_warned = False
                self._is_ready = self._uncommitted is None

    # ---- loading -------------------------------------------------------------------------------

    def load(self, wish: Wish, options: Options, load: Callable[[Loading], T]) -> tuple[int, T] | None:
        """Loads a step, if one that memory has is to be preferred to what the directory has."""
        with self._calls:
            self._hear_of_last()
            chosen, has_disk = self._to_try(wish, options)
            for entry in chosen:
                with self._degrading("be loaded", entry.version.step, _OF_THE_CALL):
                    loaded = self._load(entry, wish, options, load)
                    self._count(loads=1)
                    return entry.version.step, loaded
        if chosen and wish.step is None and not has_disk:
            raise self._nothing_left(chosen[0].version.step)
        return None

    def _load(
        self, entry: Whole, wish: Wish, options: Options, load: Callable[[Loading], T], *, mends: bool = True
    ) -> T:
        store, version = self._store, entry.version
        assert store is not None, "it has offered the version"
        is_own = store.is_own(version)
        if not is_own and version not in self._loaded:
            self._loaded.add(version)
            if self._is_primary:
                self._restores.note(version)
        begun = time.monotonic()
        loading = VersionLoading(
            store.source,
            store.sequence,
            entry,
            wish.names,
            options,
            functools.partial(self._disk.held, version.step, saving_options(options, self._deadline_s)),
        )
        try:
            loaded = load(loading)
        except Corrupt as damage:
            if mends:
                self._mend(store, saving_options(options, self._deadline_s))
                with contextlib.suppress(NotFound, Unavailable):  # then there was no other copy
                    return self._load(entry, wish, options, load, mends=False)
            self._dropped.add(version)  # what is damaged of it the agents have freed
            with self._known:
                self._whole = [other for other in self._whole if other.version != version]
            if self._whole and self._is_primary:
                self._committed.go_back_to(self._whole[0].version)  # this program is told of it now
            raise damage
        if not is_own:
            self._recovering.has_loaded(version.step, time.monotonic() - begun, loading.brought_s)
        self._log("memory_restore", version.step, begun)
        return loaded

    def _mend(self, store: VersionStore, options: Options) -> None:
        """Has the agents of all processes mend what they can."""

        def work() -> bytes:
            store.mend()
            return b""

        with self._session("mend what is in memory", options) as session:
            session.round(work, lambda _: b"")

    def _to_try(self, wish: Wish, options: Options) -> tuple[list[Whole], bool]:
        """The versions to try, in this order, before the directory, and whether that has any step."""
        limited = saving_options(options, self._deadline_s)
        with self._degrading("be looked into", None):
            store = self._store or self._open(limited, is_waited_for=False)
            with self._session("choose a version in memory", limited) as session:
                whole = [entry for entry in store.offered(session) if entry.version not in self._dropped]
                whole = self._disk.loadable(whole, session)
                self._note_doubts(store, session)

                def choose() -> bytes:
                    on_disk = self._disk.newest()
                    chosen = candidates(whole, wish.step, on_disk, self._doubted)
                    if wish.step is not None and self._disk.has(wish.step):
                        chosen = []
                    return json.dumps([[entry.to_json() for entry in chosen], on_disk is not None]).encode()

                chosen, has_disk = json.loads(session.broadcast(choose))
            with self._known:
                self._whole = whole
            return [Whole.from_json(entry) for entry in chosen], has_disk
        return [], True

    # ---- the rest ------------------------------------------------------------------------------

    def forget(self, step: int) -> bool:
        """Does not load a step any more, which the program deletes; returns whether it had that."""
        with self._calls:
            self._hear_of_last()
            with self._known:
                versions = [entry.version for entry in self._whole if entry.version.step == step]
            for version in versions:
                if not self._drop(version) and self._is_primary:
                    self._restores.note_deleted(version)
            if versions and self._is_primary:
                if self._whole:
                    self._committed.go_back_to(self._whole[0].version)
                else:
                    self._committed.forget()
        return bool(versions)

    def _drop(self, version: Version) -> bool:
        """Does not load a version any more; returns whether later programs will not either."""
        self._dropped.add(version)
        with self._known:
            self._whole = [entry for entry in self._whole if entry.version != version]
        return self._store is not None and self._store.discard(version)

    def wait(self) -> None:
        """Waits for the save in the background."""
        with self._calls:
            self._hear_of_last()
            self._committed.write()

    def close(self) -> None:
        """Is not used any more; idempotent."""
        self.is_closed = True
        self._committed.write()

    @contextlib.contextmanager
    def _session(self, what: str, options: Options) -> Iterator[Session]:
        session = open_session(what, options)
        try:
            yield session
        finally:
            session.close()

    def _degrading(self, what: str, step: int | None, passes: tuple[type[Exception], ...] = ()) -> Degrading:
        """Takes notice of what the block fails with instead of raising it, but for errors of some classes."""
        return Degrading(functools.partial(self._failed, what, step), passes)

    def _failed(self, what: str, step: int | None, error: Exception) -> None:
        of_step = "" if step is None else f" step {step}"
        kind = error.kind if isinstance(error, WaystationError) else type(error).__name__
        if what == "save":
            self._pause.failed()
            self._is_ready = False
            self._count(failures=1)
        with self._known:
            self._statistics = dataclasses.replace(self._statistics, last_failure=f"{kind}: {error}")
        self._log("memory_failure", step, None, f"{kind}: {error}")
        if not self._was_warned:
            self._was_warned = True
            warnings.warn(
                f"the memory tier could not {what}{of_step}, and the program goes on without it ({kind}): "
                f"{error}",
                MemoryTierWarning,
                stacklevel=_ABOVE,
            )

    def _make_room(self) -> None:
        """Frees what keeps slots from being used: versions of earlier programs (of another number of
        processes, another sequence) that are older than those that are kept, or on the disk in a newer form;
        if that was not enough, all but the newest one."""
        on_disk = self._disk.newest()
        with self._known:
            needed = [
                entry.version for entry in self._whole if on_disk is None or entry.version.step > on_disk
            ]
        if self._store is not None:
            kept = needed[: self._store.kept_while_saving if self._pause.failures == 0 else 1]
            self._store.retire_before(kept[-1] if kept else Version(self._store.epoch, 0))

    def _count(self, *, failures: int = 0, skipped: int = 0, loads: int = 0, blocked_s: float = 0.0) -> None:
        with self._known:
            self._statistics = dataclasses.replace(
                self._statistics,
                failures=self._statistics.failures + failures,
                skipped=self._statistics.skipped + skipped,
                loads=self._statistics.loads + loads,
                blocked_s=self._statistics.blocked_s + blocked_s,
            )

    def _log(
        self, event: str, step: int | None, begun: float | None, failure: str | None = None, **more: object
    ) -> None:
        entry: dict[str, Any] = {"event_type": event, "step": step, "directory": self._place.root}
        if begun is not None:
            entry["blocking_s"] = time.monotonic() - begun
        if failure is not None:
            entry["failure"] = failure
        self._logger.log_entry(entry | more)


class Degrading(AbstractContextManager[None, bool]):
    """Such a block. What ends the program, or a thread, passes through.

    Args:
        on_failure: Is told.
        passes: Errors of these classes are raised all the same.
    """

    def __init__(
        self, on_failure: Callable[[Exception], object], passes: tuple[type[Exception], ...] = ()
    ) -> None:
        self._on_failure = on_failure
        self._passes = passes

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception) or isinstance(error, self._passes):
            return False
        self._on_failure(error)
        return True


class DiskFallback:
    """The directory on disk that the tier falls back to: its saves of steps that memory has, or has lost.

    Within a session the primary alone looks at the directory, so that all processes hear the same.

    Args:
        place: The directory.
    """

    def __init__(self, place: Place) -> None:
        self._place = place

    def newest(self) -> int | None:
        """The newest step that it has; None if it has none."""
        committed = self._place.catalogue.committed()
        return committed[-1].step if committed else None

    def has(self, step: int) -> bool:
        """Whether it has a step."""
        return any(info.step == step for info in self._place.catalogue.committed())

    def loadable(self, offered: list[Whole], session: Session) -> list[Whole]:
        """The versions that need no disk, or whose step the directory has."""

        def choose() -> bytes:
            kept = [entry for entry in offered if not entry.needs_disk or self.has(entry.version.step)]
            return json.dumps([entry.to_json() for entry in kept]).encode()

        if not any(entry.needs_disk for entry in offered):
            return offered
        return [Whole.from_json(entry) for entry in json.loads(session.broadcast(choose))]

    @contextlib.contextmanager
    def held(self, step: int, options: Options) -> Iterator[storage.AnyPath]:
        """The checkpoint of a step, which nobody removes within the block; entered by all processes.

        Raises:
            StepNotFoundError: There is none.
        """
        with Restorer(self._place).held(step, options) as chosen:
            yield chosen.info.path
