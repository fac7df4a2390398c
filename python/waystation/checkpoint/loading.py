"""One load, step by step, as every process of the program takes it.

`open` (the primary reads the metadata of all that is wanted, and sends it to the others), `prepare` (decide
where everything comes from and goes to; verify the files of handlers, and call these), `finish` (read,
exchange, make arrays). All checkpointables go through the same rounds; a failure of one process is raised by
all. Where each process has a storage of its own, each reads its own metadata, and only its own data.

A checkpoint that is replaced while it is read is read again from the first step on, by all processes, in
the same session (`replaced.py`).

Invariant: after `prepare` a state can fail by damage of its data only.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from waystation import storage
from waystation._errors import InvalidInput
from waystation._options import Options
from waystation.checkpoint import broadcast, fill, local_storage, opening, published, wanted
from waystation.checkpoint.handlers import choice
from waystation.checkpoint.handlers.calls import HandlerCalls
from waystation.checkpoint.metadata import CheckpointMetadata
from waystation.checkpoint.opening import require_state
from waystation.checkpoint.paths import MOST_ATTEMPTS, always_replaced, naming_checkpoint
from waystation.checkpoint.replaced import Held, Replaced, Rounds, telling_of_deletion
from waystation.checkpoint.sessions import are_all, open_session
from waystation.checkpoint.stored import AUTO, OpenCheckpoint, Stored
from waystation.frameworks.participation import participation
from waystation.layouts.native import handler_files
from waystation.layouts.native.read import OpenCheckpointable
from waystation.layouts.opened import Opened
from waystation.storage.scratch import ScratchDirectory
from waystation.transfers.handle import AsyncResponse, Progress
from waystation.transfers.statistics import failures_published, tell
from waystation.tree import unflatten

T = TypeVar("T")
Asked = Callable[[OpenCheckpoint], dict[str, Any]]  # the names of what is wanted, and what as

_DIFFERENT_NAMES = (
    "the processes of the program load different checkpointables; give all the same names, and abstract "
    "checkpointables of the same kinds"
)


@dataclass(slots=True)
class _State:
    """A state that is loaded: its metadata, what is wanted of it, its leaves in the making."""

    opened: Opened
    decided: wanted.Decided
    filling: fill.Filling
    plan: broadcast.Plan


class Loading:
    """A load that all processes of the program make together.

    Attributes:
        target: The checkpoint, resolved.
    """

    def __init__(
        self,
        target: str,
        names: Sequence[str] | None,
        options: Options,
        *,
        is_in_background: bool = False,
    ) -> None:
        self.target = target
        self._begun_s = time.monotonic()
        self._is_in_background = is_in_background
        self._names = names
        self._options = options
        self._is_local = options.multiprocessing.primary_host is None
        self._is_settled = False
        self._is_model = False
        self._held: Held | None = None
        self._begin: Callable[[], None] = lambda: None
        self._is_begun = False
        self._asked: list[str] = []
        self._states: dict[str, _State] = {}
        self._decisions: list[bytes] = []
        self._calls: HandlerCalls | None = None
        self._scratch = ScratchDirectory()  # of files that handlers read, where no file system has them
        what = "load from local storage" if self._is_local else f"load '{target}'"
        self._session = Rounds(open_session(what, options), self._was_replaced)
        self._ticket = Ticket()

    # ---- whole loads ---------------------------------------------------------------------------

    def run(self, abstract_state: Any, progress: Progress) -> Any:
        """Loads the one checkpointable that was named, which has to be a state."""

        def asked(opened: OpenCheckpoint) -> dict[str, Any]:
            (stored,) = opened.stored.values()
            return {stored.name: abstract_state}

        try:
            if isinstance(abstract_state, CheckpointMetadata):
                abstract_state = abstract_state.metadata
            self._begin = lambda: self._prepare(asked, progress, are_states=True)
            with self._failures_published():
                (state,) = self._until_whole(self._finish).values()
            self._tell()
            return state
        finally:
            self.close()

    def begin(self, abstracts: Mapping[str, Any], progress: Progress) -> None:
        """Loads any checkpointables: the part that the caller waits for.

        Args:
            abstracts: What each is wanted as, by name; what is not among them, as it was saved.
            progress: Of the load.
        """

        def asked(opened: OpenCheckpoint) -> dict[str, Any]:
            published.require_checkpointables(opened)
            return {name: abstracts.get(name) for name in opened.stored}

        try:
            self._begin = lambda: self._prepare(asked, progress, are_states=False)
            with self._failures_published():
                self._until_whole(lambda: None)
        except BaseException:
            self.close()
            raise

    def end(self) -> dict[str, Any]:
        """The rest of what was begun; returns what was loaded, by name."""
        try:
            with self._failures_published():
                made = self._until_whole(self._finish)
            self._tell()
            return made
        finally:
            self.close()

    def _tell(self) -> None:
        """Tells what was loaded, now that all processes have their parts."""
        ended = [state.filling.statistics for state in self._states.values()]
        tell(ended, self._options.array.loading.on_statistics, "array.loading.on_statistics")

    def _failures_published(self) -> contextlib.AbstractContextManager[None]:
        return failures_published("load", self.target, self._begun_s)

    def _until_whole(self, go_on: Callable[[], T]) -> T:
        """Begins, where that is not done, and goes on; again and again while the checkpoint is replaced.

        Raises:
            Unavailable: The checkpoint was replaced during every attempt.
            CheckpointNotFound: It was deleted meanwhile.
        """
        for attempt in range(MOST_ATTEMPTS):
            try:
                with telling_of_deletion(self.target, was_there=attempt > 0):
                    if not self._is_begun:
                        self._begin()
                        self._is_begun = True
                    return go_on()
            except Replaced as error:
                failure = error.__cause__
                self._forget()
        raise always_replaced(self.target) from failure

    def _forget(self) -> None:
        """Lets go of what an attempt has made."""
        if self._calls is not None:
            self._calls.close()
        self._scratch.remove()
        self._held = self._calls = None
        self._scratch = ScratchDirectory()
        self._is_begun = self._is_settled = False
        self._states, self._decisions = {}, []

    def _notices_absence(self) -> bool:
        """Whether this would have failed if files had gone. Handlers go by paths, which may have led to
        another version."""
        return self._calls is None and all(state.opened.notices_absence for state in self._states.values())

    def _was_replaced(self) -> bool:
        return self._held is not None and self._held.was_replaced()

    def in_background(
        self, work: Callable[[Progress], T], progress: Progress | None = None
    ) -> AsyncResponse[T]:
        """Has the rest of the load done in the background; ends the load if that cannot begin."""
        try:
            return AsyncResponse(f"loading '{self.target}'", work, progress)
        except BaseException:
            self.close()
            raise

    def require_checkpoint(self) -> None:
        """Refuses a path that holds no checkpoint; ends the load then."""
        try:
            with self._failures_published():
                if self._is_local:
                    self._settle()
                else:
                    self._session.broadcast(self._require)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the load; idempotent."""
        self._ticket.end()  # first: whatever interrupts the rest, other loads go on
        self._forget()
        self._begin = lambda: None  # which would keep the load, and the directory that it holds, for a while
        self._session.close()

    # ---- the steps -----------------------------------------------------------------------------

    def _settle(self) -> None:
        """Has all processes find parts of the same checkpoint."""
        if not self._is_settled:
            local_storage.settle(self._session, self.target, local_storage.require_agreement)
        self._is_settled = True

    def _require(self) -> bytes:
        opening.recognise(self.target, self._options.checkpoint_layout)
        return b""

    def _open(self) -> Callable[[], OpenCheckpoint]:
        """Has the primary read the metadata; what is returned makes sense of them, in the next round."""
        if self._is_local:
            self._settle()
            return lambda: self._decode(self._read())
        read = self._session.broadcast(self._read)
        return lambda: self._decode(read)

    def _read(self) -> bytes:
        self._held = Held(self.target, self._options)
        return opening.read(self._held, self._names, self._options)

    def _decode(self, read: bytes) -> OpenCheckpoint:
        """Makes sense of what was read, here or in the primary; holds the checkpoint, too."""
        if self._held is None:
            self._held = Held(self.target, self._options)
            if not opening.is_same(self._held, read):
                raise Replaced
        opened = opening.decode(self._held, read, self._options)
        self._is_model = opened.is_model
        self._check_readable(opened)
        return opened

    def _check_readable(self, opened: OpenCheckpoint) -> None:
        """Refuses to have all processes read what one host holds."""
        part = opened.local
        if part is None or self._is_local:
            return
        if self._session.process_count > 1 and part.process_count > 1:
            raise InvalidInput(
                f"'{self.target}' is the part of process {part.process} of a checkpoint that "
                f"{part.process_count} processes saved to local storage; load it with "
                "multiprocessing.primary_host = None, so that each process reads its own part",
                path=self.target,
            )

    def _prepare(self, asked_of: Asked, progress: Progress, *, are_states: bool) -> None:
        """Opens the checkpoint, decides about all states, and has handlers begin."""
        decode = self._open()

        def work() -> bytes:
            opened = decode()
            asked = asked_of(opened)
            self._asked = list(asked)
            self._require_same_names(opened)
            self._ticket.wait()  # what follows may make device meshes
            with naming_checkpoint(self.target), participation(of_all=are_all(self._options)):
                handled = self._sort(opened, asked, progress, are_states=are_states)
                self._ticket.end()
                self._call_handlers(handled, asked)
            return json.dumps([state.plan.proposal().decode() for state in self._states.values()]).encode()

        decided = self._session.round(work, _decide_broadcasts)
        self._decisions = [decision.encode() for decision in json.loads(decided)]

    def _require_same_names(self, opened: OpenCheckpoint) -> None:
        """Refuses that this process asks for others than the one that has read the metadata."""
        names = self._names
        if names is None:
            names = opening.choose(opened.names, None, self.target, lambda _: False)
        if AUTO not in names and set(names) != opened.stored.keys():
            raise InvalidInput(_DIFFERENT_NAMES)

    def _sort(
        self, opened: OpenCheckpoint, asked: Mapping[str, Any], progress: Progress, *, are_states: bool
    ) -> dict[str, tuple[Any, Stored]]:
        """Decides about states; returns what is left to handlers, with these."""
        handled: dict[str, tuple[Any, Stored]] = {}
        registry = self._options.checkpointables.registry
        for name, abstract in asked.items():
            stored = opened.stored[name]
            handler = None
            if not are_states:
                is_state = stored.state is not None
                handler = choice.loader(registry, name, abstract, stored.handler, is_state=is_state)
            if handler is None:
                self._states[name] = self._decide(
                    name, require_state(stored, self.target), abstract, progress
                )
            else:
                handled[name] = handler, stored
        return handled

    def _decide(self, name: str, opened: Opened, abstract: Any, progress: Progress) -> _State:
        loading = self._options.pytree.loading
        if self._is_model:
            count = self._session.process_count
            decided = published.decide(self.target, opened.tree, abstract, loading, process_count=count)
        elif abstract is None:
            decided = wanted.as_saved(opened.tree, loading)
        else:
            decided = wanted.as_asked(opened.tree, abstract, loading)
        wish = self._wish()
        filling = fill.Filling(
            opened,
            decided,
            self._options,
            progress,
            self.target,
            name,
            are_shared=wish is not False,
            begun_s=self._begun_s,
        )
        plan = broadcast.Plan.of(filling.resident, self._options.array.loading, wish)
        return _State(opened, decided, filling, plan)

    def _wish(self) -> bool | None:
        """Whether to broadcast; None: if it is faster."""
        loading = self._options.array.loading
        if self._session.process_count == 1 or self._is_local:
            return False  # nobody is there to send to, or each reads from its own disk
        if not are_all(self._options):
            return False  # shardings name processes that do not take part, for which collectives would wait
        if loading.load_and_broadcast is None and (loading.mmap or self._is_in_background):
            return False  # nothing is read that is mapped; collectives would come at any time
        return loading.load_and_broadcast

    def _call_handlers(self, handled: Mapping[str, tuple[Any, Stored]], asked: Mapping[str, Any]) -> None:
        """Verifies the files of handlers, each file in one process, and has the handlers begin."""
        if not handled:
            return
        directories = {name: self._given_files(stored) for name, (_, stored) in handled.items()}
        self._calls = HandlerCalls("load")
        path_class = self._options.file.path_class

        def call(handler: Any, stored: Stored) -> Callable[[], Any]:
            return lambda: handler.load(path_class(directories[stored.name]), asked[stored.name])

        self._calls.begin({name: call(*pair) for name, pair in handled.items()})

    def _given_files(self, stored: Stored) -> str:
        """The directory that a handler is given, whose files are verified."""
        if storage.is_in_store(stored.directory):
            return stored.downloaded(self._scratch, self._options)
        if self._options.array.loading.verify is not False:
            share = self._own_share(sorted(stored.files))
            handler_files.verify(stored.directory, stored.files, share, stored.root)
        return stored.directory

    def _own_share(self, files: Sequence[str]) -> Sequence[str]:
        """The files that this process verifies."""
        if self._is_local:
            return files
        return files[self._session.process_index :: self._session.process_count]

    def _finish(self) -> dict[str, Any]:
        """Reads and makes everything."""
        received = [
            broadcast.Broadcast(self._session, state.plan, state.filling.reading, self.target).run(decision)
            for state, decision in zip(self._states.values(), self._decisions, strict=True)
        ]
        received_bytes = dict(zip(self._states, received, strict=True))
        made: dict[str, Any] = {}

        def make(name: str) -> bytes:
            state = self._states[name]
            with naming_checkpoint(self.target), participation(of_all=are_all(self._options)):
                leaves = state.filling.finish(received_bytes[name])
                made[name] = unflatten(state.decided.structure, leaves)
            return b""

        def make_rest() -> bytes:
            for name in self._states:
                if name not in made:
                    make(name)
            if self._calls is not None:
                made.update(self._calls.finish())
            if self._held is not None and not self._notices_absence():
                self._held.require_current()
            return b""

        if self._is_local:
            for name, state in self._states.items():
                opened = state.opened
                assert isinstance(opened, OpenCheckpointable), "parts are of the native layout"
                local_storage.tell_holders(self._session, opened, functools.partial(make, name))
        self._session.round(make_rest, local_storage.nothing)
        return {name: made[name] for name in self._asked}


def _decide_broadcasts(parts: Sequence[bytes]) -> bytes:
    """Whether to broadcast each state, from what all processes propose."""
    proposals = [json.loads(part) for part in parts]
    if len({len(proposal) for proposal in proposals}) > 1:
        raise InvalidInput(_DIFFERENT_NAMES)
    columns = zip(*proposals, strict=True)
    decisions = [broadcast.decide([proposal.encode() for proposal in column]) for column in columns]
    return json.dumps([decision.decode() for decision in decisions]).encode()


# ---- what concurrent loads make in the order in which the program called them ------------------
#
# Some places for arrays, such as torch's device meshes with their process groups, are made by all processes
# together and in the same order. Each load runs in its own thread, and no two processes schedule threads
# alike, but the program calls the loads in the same order in every process. So a load takes a ticket when it
# is called, and makes such places once all earlier tickets have ended.
#
# Invariants: a ticket waits for earlier tickets only, so waits form no circle; every ticket taken ends.
# A forked child begins without tickets, because the threads that would end its parent's are not in it.


class _Queue:
    """The tickets that have not ended, in the order in which they were taken."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begins without tickets, with a condition that no thread holds."""
        self.condition = threading.Condition()
        self.waiting: deque[weakref.ref[Ticket]] = deque()

    def drop(self, place: weakref.ref[Ticket]) -> None:
        """Takes a place out of the order."""
        with self.condition:
            with contextlib.suppress(ValueError):
                self.waiting.remove(place)
            self.condition.notify_all()


_queue = _Queue()
os.register_at_fork(after_in_child=_queue.begin)


class Ticket:
    """The place of one load in the order; taken when it is made.

    One that is dropped has ended: Ctrl-C may come before its load has anything that could end it.
    """

    def __init__(self) -> None:
        self._place = weakref.ref(self, _queue.drop)
        with _queue.condition:
            _queue.waiting.append(self._place)

    def wait(self) -> None:
        """Waits until all earlier tickets have ended."""
        pause_s = 1.0
        with _queue.condition:
            waiting, place = _queue.waiting, self._place
            while not _queue.condition.wait_for(lambda: place not in waiting or waiting[0] is place, pause_s):
                gc.collect()  # a load that was interrupted may be in a cycle with its error
                pause_s = min(2 * pause_s, 60.0)

    def end(self) -> None:
        """Lets the next ticket go on. Idempotent, and allowed before all earlier tickets have ended."""
        _queue.drop(self._place)
