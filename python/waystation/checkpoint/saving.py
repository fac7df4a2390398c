"""One save: the stages that every process of the program takes, whatever the layout, wherever it goes.

`begin` (may this be saved there, and by whom?), `prepare` (take the states apart, make them safe, agree that
all save the same; call the handlers of what is no state), `finish` (write, merge, commit). Between the stages
the processes agree in a session, so that a failure of one is raised by all. All checkpointables go through
the same rounds, into one attempt that is committed once. A program of one process takes the same stages with
nobody to ask.

What differs between saves is in two objects: a `Layout` says how states become bytes, a `Destination` where
these go and what makes them visible. Nothing here knows any of them.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

from waystation import _forks
from waystation._errors import Cancelled, Conflict, InvalidInput, WaystationError, WrongType, naming_memory
from waystation._launched import note_step
from waystation._options import Options
from waystation.checkpoint import prepare, snapshot
from waystation.checkpoint.handlers import choice
from waystation.checkpoint.handlers.calls import CreatedPath, HandlerCalls
from waystation.checkpoint.handlers.registry import Remembering
from waystation.checkpoint.handlers.types import CheckpointableHandler, type_name
from waystation.checkpoint.prepare import Described
from waystation.checkpoint.published import require_layout_for_saves
from waystation.checkpoint.sessions import are_all, open_session
from waystation.checkpoint.snapshot import WriteShares, bound_engine
from waystation.checkpoint.status_calls import StatusCalls
from waystation.coordination import Session
from waystation.frameworks.base import ArraySource
from waystation.layouts.native.chunks import Chunk, Writer
from waystation.layouts.native.records import callers_json
from waystation.transfers.handle import Progress
from waystation.transfers.statistics import SaveStatistics, TransferFailure, give, publish

# How often a save that waits for the one before looks whether it was cancelled.
_LOOK_EVERY_S = 0.1

_COPY_LESS = (
    "lower memory.snapshot_bytes, so that less is copied and the call waits for the rest, or set "
    "memory.caller_keeps and leave the arrays alone until the save has ended"
)

# Of the plan of each state: what is copied out before the rest, as the caller waits for it.
Ranges = Mapping[str, Sequence[tuple[int, int]]]


@dataclass(slots=True)
class Clock:
    """When a save came how far, in seconds since `begun_s`; None where it has not.

    Attributes:
        begun_s: When it was called, by the monotonic clock.
        blocked_s: When the states could be changed.
        written_s: When this process had written all that it had to.
        synced_s: When that was on stable storage.
    """

    begun_s: float = field(default_factory=time.monotonic)
    blocked_s: float | None = None
    written_s: float | None = None
    synced_s: float | None = None

    def now_s(self) -> float:
        """Seconds since the call."""
        return time.monotonic() - self.begun_s


@dataclass(slots=True)
class Save:
    """What the stages of one save have in common.

    Attributes:
        target: The destination, resolved.
        options: Of the save; stages bound what later ones may take.
        session: Of the processes that save.
        writer: This process among them.
        begun_ns: When the call began, nanoseconds since 1970; from `begin` on what the primary says.
        custom_metadata: The caller's JSON value.
        handlers: Those of what is no state, by name.
        calls: Their calls, once these have begun.
        clock: When it came how far.
        status: What the caller is told of single arrays.
        shared_bytes: Bytes of arrays in data files that are shared with an earlier checkpoint.
        is_flat: Whether its one checkpointable lies in the directory of the checkpoint itself.
    """

    target: str
    options: Options
    session: Session
    writer: Writer
    begun_ns: int
    custom_metadata: Any = None
    handlers: dict[str, CheckpointableHandler[Any, Any]] = field(default_factory=dict)
    calls: HandlerCalls | None = None
    clock: Clock = field(default_factory=Clock)
    status: StatusCalls = field(default_factory=StatusCalls)
    shared_bytes: int = 0
    is_flat: bool = False

    def place_of(self, name: str) -> str:
        """The directory of a checkpointable, from that of the checkpoint; empty where it is the same."""
        return "" if self.is_flat else name

    @property
    def handler_names(self) -> dict[str, str]:
        """The names of the types of handlers."""
        return {name: self._handler_name(name, handler) for name, handler in self.handlers.items()}

    def _handler_name(self, name: str, handler: CheckpointableHandler[Any, Any]) -> str:
        registry = self.options.checkpointables.registry
        remembered = registry.remembered(name) if isinstance(registry, Remembering) else None
        return type_name(type(handler)) if remembered is None else remembered.handler

    def wrote(self) -> None:
        """Notes that this process has written all that it has to."""
        self.clock.written_s = self.clock.now_s()
        self.status.written()

    def check_cancelled(self, progress: Progress) -> None:
        """Ends a save that was cancelled."""
        if progress.cancelled:
            raise Cancelled(f"saving '{self.target}' was cancelled; nothing was written", path=self.target)

    def begin(self, check: Callable[[], None], decide: Callable[[], str | None] = lambda: None) -> None:
        """Has every process check what it was given, then the primary whether it can be saved.

        Args:
            check: What every process does.
            decide: What the primary does; another target than `target`, or None.
        """

        def work() -> bytes:
            check()
            return b""

        def decided(_: Sequence[bytes]) -> bytes:
            return b"%d %s" % (self.begun_ns, os.fsencode(decide() or ""))

        begun_ns, _, target = self.session.round(work, decided).partition(b" ")
        self.begun_ns = int(begun_ns)
        self.target = os.fsdecode(target) or self.target


class Cut(Protocol):
    """A state that has been cut."""

    @property
    def chunks(self) -> Sequence[Chunk]:
        """What this process writes of it."""
        ...

    @property
    def sources(self) -> Sequence[ArraySource]:
        """Its arrays."""
        ...

    @property
    def cast(self) -> Mapping[int, str]:
        """The dtypes of those that have been cast, by number: their chunks are copies."""
        ...


class Layout(Protocol):
    """How states become bytes. One object serves one save, and keeps what it has decided about each state."""

    def check(self, save: Save, checkpointables: Collection[str]) -> None:
        """Refuses options, and names of checkpointables, for which the layout has no place."""
        ...

    def bounded(self, options: Options) -> Options:
        """The options, without what the layout itself takes of the bound on memory."""
        ...

    def cut(self, name: str, described: Described, save: Save) -> Cut:
        """Decides which chunks of a state this process writes. Afterwards only these keep memory alive: what
        others write may be changed or freed at once."""
        ...

    def fingerprint(self, name: str) -> list[str]:
        """How the arrays of a state are stored, as far as that has to be the same in every process."""
        ...

    def plan(self, save: Save, waited_for: Ranges) -> None:
        """Decides where every byte goes; the addresses of the chunks are final."""
        ...

    def release(self) -> None:
        """Lets go of the states."""
        ...


class Destination(Protocol):
    """Where a save goes, and what makes it visible. One object serves one save.

    A failed save leaves nothing there, in whatever stage it fails.
    """

    def begin(self, save: Save, checkpointables: Collection[str], check: Callable[[], None]) -> None:
        """Refuses what can be refused before states are taken apart.

        Args:
            save: The save.
            checkpointables: Their names.
            check: What every process checks of its arguments.
        """
        ...

    def start(self, save: Save) -> str:
        """Makes the directory that handlers write to, if that has not been done; returns its path."""
        ...

    def finish(self, save: Save, progress: Progress, on_copied_out: Callable[[], None]) -> None:
        """Writes, makes durable and commits; `on_copied_out` is called once the states may be changed."""
        ...

    def undo(self, save: Save) -> None:
        """Removes what this save has made."""
        ...

    def close(self) -> None:
        """Lets go of everything; idempotent."""
        ...


@dataclass(eq=False, slots=True)
class RunningSave:
    """A save of this process, among those to the same path.

    Attributes:
        target: The path.
        ended: Set when the save has ended, well or not.
        has_committed: Whether it has made a checkpoint.
    """

    target: str
    ended: threading.Event = field(default_factory=threading.Event)
    has_committed: bool = False


class CallOrder:
    """The saves of this process that run, in the order of their calls; those to one path commit so.

    It has no lock, since a signal handler that saves may interrupt any step: to append and to remove are one
    act each.
    """

    def __init__(self) -> None:
        self.begin_in_child()
        _forks.watch(self)

    def begin_in_child(self) -> None:
        """See `waystation._forks.Watched`: the parent's saves are none of the child's."""
        self._running: list[RunningSave] = []

    def enter(self, save: RunningSave) -> list[RunningSave]:
        """Adds a save that is called now; returns those to the same path that were called before."""
        self._running.append(save)
        running = tuple(self._running)
        return [each for each in running[: running.index(save)] if each.target == save.target]

    def leave(self, save: RunningSave) -> None:
        """Says that a save has ended; does nothing the second time."""
        save.ended.set()
        with contextlib.suppress(ValueError):
            self._running.remove(save)


_order = CallOrder()
# The save that calls what runs now.
_outer: contextvars.ContextVar[RunningSave | None] = contextvars.ContextVar("outer_save", default=None)


@contextlib.contextmanager
def undone_on_error(destination: Destination, save: Save) -> Iterator[None]:
    """Removes what the save has made if the block fails; if that fails too, the first error tells of it."""
    try:
        yield
    except BaseException as error:
        if save.calls is not None:
            save.calls.close()
        try:
            destination.undo(save)
        except WaystationError as left:
            error.add_note(f"then what the save had made could not be removed: {left}")
        raise


class Saving:
    """A save that all processes of the program make together.

    Args:
        target: The destination, resolved.
        options: How.
        layout: How states become bytes.
        destination: Where these go.
        deadline_s: How long one process waits for another.
        begun_ns: When the call began, nanoseconds since 1970.
        is_ordered: Whether it commits after those of this process to the same target that were called before.
        is_flat: Whether the one checkpointable lies in the directory of the checkpoint itself.
        overwrites: Whether it may have the place of another checkpoint.
    """

    def __init__(
        self,
        target: str,
        options: Options,
        layout: Layout,
        destination: Destination,
        *,
        deadline_s: float,
        begun_ns: int,
        is_ordered: bool = False,
        is_flat: bool = False,
        overwrites: bool = True,
    ) -> None:
        require_layout_for_saves(options)
        note_step()
        is_local = options.multiprocessing.primary_host is None
        what = "save to local storage" if is_local else f"save '{target}'"
        self._layout = layout
        self._destination = destination
        self._is_background = False
        self._is_ordered = is_ordered
        self._overwrites = overwrites
        self._own = RunningSave(target)
        self._outer = _outer.get()
        self._before: list[RunningSave] | None = None  # None: it has no place in the order yet
        session = open_session(what, options, deadline_s=deadline_s)
        writer = Writer(session.process_index, session.process_count, session.primary, is_local)
        self._save = Save(target, options, session, writer, begun_ns, is_flat=is_flat)

    @property
    def target(self) -> str:
        """The destination, resolved."""
        return self._save.target

    @property
    def process_count(self) -> int:
        """How many processes make the save."""
        return self._save.writer.process_count

    def __enter__(self) -> Self:
        self._outside = _outer.set(self._own)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _outer.reset(self._outside)
        self._close()
        if isinstance(error, WaystationError):
            error.where(checkpoint=self.target)
        if error is not None:
            self._publish_failure(error)

    def _close(self) -> None:
        _order.leave(self._own)
        if self._save.calls is not None:
            self._save.calls.close()
        self._layout.release()
        self._save.session.close()
        self._destination.close()

    @contextlib.contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Ends the save if the block fails."""
        outside = _outer.set(self._own)
        try:
            yield
        except BaseException as error:
            self._close()
            self._publish_failure(error)
            raise
        finally:
            _outer.reset(outside)

    def _publish_failure(self, error: BaseException) -> None:
        publish(TransferFailure("save", self.target, self._save.clock.now_s(), error))

    # ---- the stages ----------------------------------------------------------------------------

    def begin(
        self, checkpointables: Mapping[str, Any], custom_metadata: Any, *, is_state: bool = False
    ) -> None:
        """Refuses what can be refused without taking anything apart.

        Args:
            checkpointables: What is saved, by name.
            custom_metadata: The caller's JSON value.
            is_state: Whether the caller says that it is a state, whatever handlers there are.
        """
        self._destination.begin(
            self._save,
            checkpointables,
            lambda: self._check_call(checkpointables, custom_metadata, is_state=is_state),
        )
        self._enter_order()

    def await_those_before(self, progress: Progress) -> None:
        """Waits for the saves of this process to the same path that were called before. What bounds them
        bounds this.

        A save that is cancelled meanwhile goes on to where all processes hear of that.
        """
        self._enter_order()
        for earlier in self._before or ():
            while not progress.cancelled and not earlier.ended.wait(_LOOK_EVERY_S):
                pass

    def _enter_order(self) -> None:
        """Takes its place among the saves of this process.

        It waits for none if another save that has not ended calls it: by a handler, or by a signal handler or
        destructor in its thread. That save would wait for this one.
        """
        if self._is_ordered and self._before is None:
            before = _order.enter(self._own)
            is_inside = self._outer is not None and not self._outer.ended.is_set()
            self._before = [] if is_inside else before

    def _check_call(
        self, checkpointables: Mapping[str, Any], custom_metadata: Any, *, is_state: bool
    ) -> None:
        """Refuses what is wrong with the arguments, and keeps what is not needed before the end."""
        if custom_metadata is not None and not (
            isinstance(custom_metadata, dict) and all(isinstance(key, str) for key in custom_metadata)
        ):
            raise InvalidInput(
                f"custom_metadata must be a dict with strings as keys, or None, not {custom_metadata!r:.60}"
            )
        save = self._save
        save.custom_metadata = callers_json(custom_metadata, "custom_metadata")
        for name in checkpointables:
            check_name(name)
        self._layout.check(save, checkpointables)
        for name, checkpointable in checkpointables.items():
            if is_state and checkpointable is None:
                raise InvalidInput("a state is a tree of arrays and other leaves, not None")
            handler = choice.saver(
                save.options.checkpointables.registry, name, checkpointable, is_state=is_state
            )
            if handler is not None:
                save.handlers[name] = handler

    def prepare(self, checkpointables: Mapping[str, Any], *, snapshot: bool = False) -> bool:
        """Takes the states apart and plans the files of this process; handlers take what is theirs.

        Args:
            checkpointables: What is saved, by name.
            snapshot: Copy what could change afterwards, as far as the options allow.

        Returns:
            Whether the caller may change the leaves of states now; otherwise once they have been copied out.
        """
        save = self._save
        waited_for: dict[str, list[tuple[int, int]]] = {}

        def work() -> list[str]:
            lines = self._cut(self._describe(checkpointables), waited_for, with_snapshot=snapshot)
            if snapshot and not waited_for:
                save.status.transferred()
            return lines

        prepare.agree(save.session, work)
        if save.handlers:
            path = self._destination.start(save)
            with undone_on_error(self._destination, save):
                save.session.round(lambda: self._call_handlers(path, checkpointables), lambda _: b"")
        self._is_background = snapshot
        if snapshot and not waited_for:
            save.clock.blocked_s = save.clock.now_s()
        return not waited_for

    def _describe(self, checkpointables: Mapping[str, Any]) -> dict[str, Described]:
        """Describes the states, and asks the caller's function how they are stored."""
        save = self._save
        save.options = self._layout.bounded(save.options)
        states = {name: state for name, state in checkpointables.items() if name not in save.handlers}
        described: dict[str, Described] = {}
        for name, state in states.items():
            with self._naming(name, checkpointables):
                described[name] = prepare.describe(state)
                prepare.limit_to(described[name], save.session.processes, are_all=are_all(save.options))
        save.options = prepare.with_scoped_options(save.options, states, described)
        save.status = StatusCalls.begun(save.options, states, described)
        return described

    def _cut(
        self,
        described: Mapping[str, Described],
        waited_for: dict[str, list[tuple[int, int]]],
        *,
        with_snapshot: bool,
    ) -> list[str]:
        """Cuts, copies and plans the states. Returns what must be the same in every process."""
        save, layout = self._save, self._layout
        lines: list[str] = []
        if save.writer.process_count > 1:
            lines = prepare.fingerprint_of_save(described, save.handler_names, save.options.array.saving)
        cut: dict[str, Cut] = {}
        for name, entry in described.items():
            with self._naming(name, (*described, *save.handlers)):
                cut[name] = layout.cut(name, entry, save)
        if lines:
            lines += [line for name in cut for line in layout.fingerprint(name)]
        shares = WriteShares.of(save.options.memory, with_snapshot=with_snapshot)
        if with_snapshot:
            # In this order the last ones are copied, for which the caller would wait longest.
            for name, own in reversed(cut.items()):
                with naming_memory("for the copy of what is saved to", save.target, _COPY_LESS):
                    ranges = snapshot.take(own.chunks, own.sources, save.options.memory, shares, own.cast)
                if ranges:
                    waited_for[name] = ranges
        save.options = bound_engine(save.options, shares)
        layout.plan(save, waited_for)
        return lines

    def _call_handlers(self, path: str, checkpointables: Mapping[str, Any]) -> bytes:
        """Has every handler take what may change afterwards."""
        save = self._save
        save.calls = HandlerCalls("save")

        def call(name: str, handler: CheckpointableHandler[Any, Any]) -> Callable[[], Any]:
            directory = CreatedPath(save.options.file.path_class(os.path.join(path, save.place_of(name))))
            return lambda: handler.save(directory, checkpointables[name])

        save.calls.begin({name: call(name, handler) for name, handler in save.handlers.items()})
        return b""

    def finish(self, progress: Progress, on_copied_out: Callable[[], None] = lambda: None) -> None:
        """Writes, makes durable and commits; `on_copied_out` is called once the states may be changed."""
        save = self._save

        def copied_out() -> None:
            if self._is_background and save.clock.blocked_s is None:
                save.clock.blocked_s = save.clock.now_s()
            save.status.transferred()
            on_copied_out()

        self.await_those_before(progress)
        with self._telling_of_those_before():
            self._destination.finish(save, progress, copied_out)
        self._own.has_committed = True
        self._statistics = self._measured(progress)
        publish(self._statistics)

    @contextlib.contextmanager
    def _telling_of_those_before(self) -> Iterator[None]:
        """Says so where a save of this process that was called before has what this one wanted to make."""
        try:
            yield
        except Conflict as error:
            if self._overwrites or not any(earlier.has_committed for earlier in self._before or ()):
                raise
            raise Conflict(
                f"an earlier save of this program to '{self.target}' was in flight when this one was called, "
                "and has made its checkpoint there; save to another path, or replace it with overwrite=True",
                path=self.target,
            ) from error

    def _measured(self, progress: Progress) -> SaveStatistics:
        """What the save has moved, once it is committed."""
        clock, duration_s = self._save.clock, self._save.clock.now_s()
        return SaveStatistics(
            path=self.target,
            bytes_written=progress.fraction()[0],
            blocked_s=duration_s if clock.blocked_s is None else clock.blocked_s,
            written_s=duration_s if clock.written_s is None else clock.written_s,
            synced_s=duration_s if clock.synced_s is None else clock.synced_s,
            duration_s=duration_s,
            bytes_shared=self._save.shared_bytes,
        )

    def report(self) -> None:
        """Gives the program the statistics, last of all, since its function may fail."""
        on_statistics = self._save.options.array.saving.on_statistics
        give(self._statistics, on_statistics, "array.saving.on_statistics")

    @contextlib.contextmanager
    def _naming(self, name: str, checkpointables: Collection[str]) -> Iterator[None]:
        """Says in an error which checkpointable it is about, where there are several."""
        try:
            yield
        except WaystationError as error:
            raise error.where(checkpointable=None if len(checkpointables) == 1 else name)


def check_name(name: object) -> None:
    """Refuses names that cannot be that of a directory inside the checkpoint."""
    plain = isinstance(name, str) and name.isprintable() and not set(name) & {"/", "\\"}
    if not plain or not name or str(name).startswith("."):
        raise (InvalidInput if isinstance(name, str) else WrongType)(
            f"{name!r} cannot be the name of a checkpointable: use a plain file name"
        )
