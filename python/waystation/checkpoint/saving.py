"""One save, step by step, as every process of the program takes it, to storage that all of them share.

`begin` (may this be saved there, and by whom?), `prepare` (take the states apart, make them safe, agree that
all save the same; call the handlers of what is no state), `finish` (write, merge, commit). Between the steps
the processes agree in a session, so that a failure of one is raised by all. All checkpointables go through
the same rounds, into one attempt that is committed once. A program of one process takes the same steps with
nobody to ask. A layout of its own overrides what is below "what a layout decides".

What can go wrong, in order: a process refuses its state: nothing has been made. A handler fails, or a process
fails or dies while data are written: the primary removes the attempt once nobody writes to it any more, or
the next save does if the primary itself is gone. The primary fails to merge or commit: likewise. Killed after
the commit: the checkpoint is whole, whatever the other processes are told.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from waystation import _native
from waystation._errors import (
    Cancelled,
    InvalidInput,
    WaystationError,
    WrongType,
    from_os_error,
)
from waystation._options import Options
from waystation.checkpoint import fingerprints, prepare, snapshot, state_parts
from waystation.checkpoint.handlers import choice
from waystation.checkpoint.handlers.calls import HandlerCalls
from waystation.checkpoint.handlers.created_path import CreatedPath
from waystation.checkpoint.handlers.types import type_name
from waystation.checkpoint.paths import check_destination, is_checkpoint
from waystation.checkpoint.prepare import Described, Taken
from waystation.checkpoint.published import require_layout_for_saves
from waystation.checkpoint.scoped_options import with_scoped_options
from waystation.checkpoint.sessions import are_all, open_session
from waystation.checkpoint.write_limits import WriteShares, bound_engine
from waystation.layouts.native import commit, handler_files, names, orphans
from waystation.layouts.native.attempts import Attempt, remove_dead
from waystation.layouts.native.chunks import Writer
from waystation.layouts.native.merge import Part
from waystation.layouts.native.records import CheckpointRecord, LocalPart, callers_json, dump_json
from waystation.layouts.native.write import Handled, Observer, Prepared, write_data, write_metadata
from waystation.transfers.handle import Progress


class Saving:
    """A save that all processes of the program make together.

    Attributes:
        target: The destination, resolved.
        begun_ns: When the call began, nanoseconds since 1970; from `begin` on what the primary says.
    """

    # If set, what is at the destination and is no checkpoint is renamed, and this called with its new path.
    on_set_aside: Callable[[str], None] | None = None

    def __init__(self, target: str, options: Options, *, overwrite: bool, deadline_s: float) -> None:
        require_layout_for_saves(options)
        self.target = target
        self._is_local = options.multiprocessing.primary_host is None
        what = "save to local storage" if self._is_local else f"save '{target}'"
        self._options = options
        self._overwrite = overwrite
        self.begun_ns = time.time_ns()
        self._custom_metadata: Any = None
        # By the name of the checkpointable, what the layout has planned of it.
        self._states: dict[str, Any] = {}
        self._handlers: dict[str, Any] = {}  # of those that are no states
        self._calls: HandlerCalls | None = None
        self._waited_for: dict[str, list[tuple[int, int]]] = {}
        self._attempt: Any = None
        self._path: str | None = None  # of the attempt, in all processes
        # Of what this process has written and not made durable; from before its first file on.
        self._group: Any = None
        self._own_parts: list[Part] = []
        self._session = open_session(what, options, deadline_s=deadline_s)
        # For a failed save only, whose first session is over.
        self._ending = open_session(f"the end of: {what}", options, deadline_s=deadline_s)
        self._writer = Writer(
            self._session.process_index, self._session.process_count, self._session.primary, self._is_local
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
        if isinstance(error, WaystationError):
            error.where(checkpoint=self.target)

    def _close(self) -> None:
        if self._calls is not None:
            self._calls.close()
        self._states = {}
        self._session.close()
        self._ending.close()

    @contextlib.contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Ends the save if the block fails."""
        try:
            yield
        except BaseException:
            self._close()
            raise

    # ---- the steps -----------------------------------------------------------------------------

    def begin(
        self, checkpointables: Mapping[str, Any], custom_metadata: Any, *, is_state: bool = False
    ) -> None:
        """Refuses what can be refused without taking anything apart.

        Args:
            checkpointables: What is saved, by name.
            custom_metadata: The caller's JSON value.
            is_state: Whether the caller says that it is a state, whatever handlers there are.
        """

        def work() -> bytes:
            self._check_call(checkpointables, custom_metadata, is_state=is_state)
            return b""

        def decide(_: Sequence[bytes]) -> bytes:
            self._check_destination()
            return str(self.begun_ns).encode()

        self.begun_ns = int(self._session.round(work, decide))

    def _check_call(
        self, checkpointables: Mapping[str, Any], custom_metadata: Any, *, is_state: bool
    ) -> None:
        """Refuses what is wrong with the arguments, and keeps what is not needed before the end."""
        if custom_metadata is not None and not (
            isinstance(custom_metadata, dict) and all(isinstance(key, str) for key in custom_metadata)
        ):
            raise InvalidInput(
                f"custom_metadata is a dict with strings as keys, or None, not {custom_metadata!r:.60}"
            )
        self._custom_metadata = callers_json(custom_metadata, "custom_metadata")
        registry = self._options.checkpointables.registry
        for name, checkpointable in checkpointables.items():
            check_name(name)
            self._check_place_of(name)
            if is_state and checkpointable is None:
                raise InvalidInput("a state is a tree of arrays and other leaves, not None")
            handler = choice.saver(registry, name, checkpointable, is_state=is_state)
            if handler is not None:
                self._handlers[name] = handler

    def prepare(self, checkpointables: Mapping[str, Any], *, snapshot: bool = False) -> bool:
        """Takes the states apart and plans the files of this process; handlers take what is theirs.

        Args:
            checkpointables: What is saved, by name.
            snapshot: Copy what could change afterwards, as far as the options allow.

        Returns:
            Whether the caller may change the leaves of states now; otherwise once they have been copied out.
        """
        lines: list[str] = []

        def work() -> bytes:
            lines.extend(self._prepare(checkpointables, with_snapshot=snapshot))
            return fingerprints.digest(lines)

        def decide(parts: Sequence[bytes]) -> bytes:
            return b"" if len(set(parts)) == 1 else b"differ"

        if self._session.round(work, decide):
            self._session.round(
                lambda: dump_json(lines),
                lambda parts: fingerprints.explain_difference(parts, self._session.processes),
            )
        if self._handlers:
            self._start()
            with self._undone_on_error():
                self._session.round(lambda: self._call_handlers(checkpointables), lambda _: b"")
        return not self._waited_for

    def _prepare(self, checkpointables: Mapping[str, Any], *, with_snapshot: bool) -> list[str]:
        states = {name: state for name, state in checkpointables.items() if name not in self._handlers}
        is_only = len(checkpointables) == 1
        described = {name: self._describe(name, state, is_only=is_only) for name, state in states.items()}
        self._options = with_scoped_options(self._options, states, described)
        lines: list[str] = []
        if self._writer.process_count > 1:
            handlers = {name: type_name(type(handler)) for name, handler in self._handlers.items()}
            lines = fingerprints.of_save(described, handlers, self._options.array.saving)
        taken = {name: self._take(name, entry, is_only=is_only) for name, entry in described.items()}
        if lines:
            lines += [line for name, entry in taken.items() for line in self._fingerprint(name, entry)]
        shares = WriteShares.of(self._options.memory, with_snapshot=with_snapshot)
        if with_snapshot:
            # In this order the last ones are copied, for which the caller would wait longest.
            for name, entry in reversed(taken.items()):
                waited_for = snapshot.take(
                    entry.chunks, entry.sources, self._options.memory, shares, entry.cast
                )
                if waited_for:
                    self._waited_for[name] = waited_for
        self._options = bound_engine(self._options, shares)
        self._states = {name: self._plan(name, entry) for name, entry in taken.items()}
        return lines

    def _describe(self, name: str, state: Any, *, is_only: bool) -> Described:
        with naming(None if is_only else name):
            described = prepare.describe(state)
            prepare.limit_to(described, self._session.processes, are_all=are_all(self._options))
            return described

    def _take(self, name: str, described: Described, *, is_only: bool) -> Taken:
        with naming(None if is_only else name):
            return prepare.take(described, self._options, self._writer)

    def _fingerprint(self, name: str, taken: Any) -> list[str]:
        """How arrays are stored, as far as that has to be the same in every process."""
        return fingerprints.of_casts(name, taken.labels, taken.cast)

    def _call_handlers(self, checkpointables: Mapping[str, Any]) -> bytes:
        """Has every handler take what may change afterwards."""
        assert self._path is not None, "the attempt has been started"
        self._calls = HandlerCalls("save")
        path = self._path

        def call(name: str, handler: Any) -> Callable[[], Any]:
            directory = CreatedPath(self._options.file.path_class(self._files_directory(path, name)))
            return lambda: handler.save(directory, checkpointables[name])

        self._calls.begin({name: call(name, handler) for name, handler in self._handlers.items()})
        return b""

    def finish(self, progress: Progress, on_copied_out: Callable[[], None] = lambda: None) -> None:
        """Writes, makes durable and commits; `on_copied_out` is called once the states may be changed."""
        self._start()
        with self._undone_on_error():
            self._session.round(
                lambda: self._write(progress, on_copied_out),
                lambda parts: self._commit(parts, progress),
            )
        self._close_group()

    def _start(self) -> None:
        """Makes the attempt, if that has not been done."""
        if self._path is None:
            self._path = os.fsdecode(self._session.round(lambda: b"", lambda _: self._start_attempt()))

    def _write(self, progress: Progress, on_copied_out: Callable[[], None]) -> bytes:
        """Writes what this process has of all checkpointables; returns what the primary is told of it."""
        assert self._path is not None, "the attempt has been started"
        if self._group is None:
            self._group = _native.SyncGroup(self._path)
        if self._calls is not None:
            self._calls.start()
            progress.add(self._calls)
        told = self._write_states(self._path, progress, on_copied_out)
        if self._calls is not None:
            self._calls.finish()
        self._check_cancelled(progress)
        directories = [self._files_directory(self._path, name) for name in self._handlers]
        if self._writer.process_count == 1 or self._is_local:
            for directory in directories:
                self._group.add(handler_files.to_sync(directory))
            return told
        for directory in directories:
            handler_files.sync_present(directory)
        self._group.sync()
        return told

    def _check_cancelled(self, progress: Progress) -> None:
        if progress.cancelled:
            raise Cancelled(f"saving '{self.target}' was cancelled; nothing was written", path=self.target)

    def _commit(self, told: Sequence[bytes], progress: Progress) -> bytes:
        self._write_metadata(told)
        self._check_cancelled(progress)
        self._publish()
        return b""

    @contextlib.contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        """Removes the attempt if the block fails."""
        try:
            yield
        except BaseException:
            self._close_group()  # some file systems keep a file that is open
            self._undo()
            raise

    def _close_group(self) -> None:
        if self._group is not None:
            self._group.close()

    def _undo(self) -> None:
        """Removes the attempt once every process has stopped writing to it, or cannot be waited for."""
        if self._calls is not None:
            self._calls.close()
        if self._writer.process_count > 1:
            with contextlib.suppress(WaystationError):
                self._ending.barrier()
        if self._attempt is not None:
            self._attempt.discard()

    # ---- what a layout decides -----------------------------------------------------------------

    def _check_destination(self) -> None:
        """Refuses a destination, in the primary."""
        check_destination(self.target, overwrite=self._overwrite, on_set_aside=self.on_set_aside)

    def _plan(self, name: str, taken: Taken) -> Any:
        """What this process writes of a state; the addresses of its chunks are final."""
        return prepare.plan(name, taken, self._options, self._writer.process)

    def _start_attempt(self) -> bytes:
        """Makes the place that is written to, and a directory for each checkpointable, in the primary.
        `_attempt` is set to something that can be discarded.

        Returns:
            Its path.
        """
        self._attempt = self._new_attempt()
        return os.fsencode(self._attempt.path)

    def _new_attempt(self, transaction: str | None = None) -> Attempt:
        parent, name = os.path.split(self.target)
        remove_dead(parent, name)
        if self._overwrite:
            orphans.remove_dead(self.target)
        attempt = Attempt(self.target, self._options.file.path_permission_mode, transaction)
        directory = attempt.path
        try:
            self._group = _native.SyncGroup(attempt.path)
            for own in self._states:
                directory = os.path.join(attempt.path, own)
                os.mkdir(directory)
            for own in self._handlers:
                directory = self._files_directory(attempt.path, own)
                os.makedirs(directory)
        except WaystationError:
            self._close_group()
            attempt.discard()
            raise
        except OSError as error:
            self._close_group()
            attempt.discard()
            raise from_os_error(error, "create", directory) from error
        return attempt

    def _files_directory(self, path: str, name: str) -> str:
        """Where the handler of a checkpointable puts its files, in the place that is written to."""
        return self._handled(name).directory(path)

    def _write_states(self, path: str, progress: Progress, on_copied_out: Callable[[], None]) -> bytes:
        """Writes what this process has of the states; what is not durable yet goes to `_group`.

        Returns:
            What the primary has to know of it.
        """
        parts = self._write_data(path, progress, on_copied_out)
        if self._writer.process_count == 1:
            self._own_parts = parts
            return b""
        return state_parts.write(path, list(self._states), parts, self._writer.process)

    def _write_data(self, path: str, progress: Progress, on_copied_out: Callable[[], None]) -> list[Part]:
        observer = Observer(
            progress.add,
            on_copied_out,
            dict(self._waited_for),
            self._attempt.heartbeat if self._attempt else lambda: None,
            self._writer.process_count == 1,
        )
        return write_data(path, self._prepared(), self._options, observer, self._group)

    def _write_metadata(self, told: Sequence[bytes]) -> None:
        """Makes what all processes have written a checkpoint, in the primary."""
        prepared = self._prepared()
        if self._writer.process_count == 1:
            parts = [[part] for part in self._own_parts]
        else:
            parts = state_parts.collect(self._attempt.path, list(self._states), told, Part.decode)
        self._write_records(list(zip(prepared, parts, strict=True)))

    def _write_records(
        self, states: Sequence[tuple[Prepared, Sequence[Part]]], local: LocalPart | None = None
    ) -> None:
        record = CheckpointRecord(1, {}, time.time_ns(), self._custom_metadata, local, begun_ns=self.begun_ns)
        handled = [self._handled(name) for name in self._handlers]
        write_metadata(self._attempt, states, self._group, record, handled)

    def _check_place_of(self, name: str) -> None:
        """Refuses the name of a checkpointable that is that of a file of the layout."""
        if name in (names.RECORD, names.OWNER):
            raise InvalidInput(f"'{name}' cannot be the name of a checkpointable: the layout has such a file")

    def _publish(self) -> None:
        """Commits, in the primary."""
        attempt = self._attempt
        if self._overwrite and is_checkpoint(self.target):
            commit.publish_over(attempt)
            commit.remove_replaced(attempt)
        else:
            commit.publish_new(attempt)

    def _prepared(self) -> list[Prepared]:
        return list(self._states.values())

    def _handled(self, name: str) -> Handled:
        count = 1 if self._is_local else self._writer.process_count
        return Handled(name, type_name(type(self._handlers[name])), count)


def check_name(name: object) -> None:
    """Refuses names that cannot be that of a directory inside the checkpoint."""
    plain = isinstance(name, str) and name.isprintable() and not set(name) & {"/", "\\"}
    if not plain or not name or str(name).startswith("."):
        raise (InvalidInput if isinstance(name, str) else WrongType)(
            f"{name!r} cannot be the name of a checkpointable: use a plain file name"
        )


@contextlib.contextmanager
def naming(name: str | None) -> Iterator[None]:
    """Says in an error which checkpointable it is about, where there are several."""
    try:
        yield
    except WaystationError as error:
        raise error.where(checkpointable=name)
