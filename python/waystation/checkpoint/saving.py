"""One save, step by step, as every process of the program takes it, to storage that all of them share.

`begin` (may this be saved there?), `prepare` (take the state apart, make it safe, agree that all save the
same), `finish` (write, merge, commit). Between the steps the processes agree in a session, so that a
failure of one is raised by all. A program of one process takes the same steps with nobody to ask.

What can go wrong, in order: a process refuses its state: nothing has been made. One fails or dies while
data are written: the primary removes the attempt once nobody writes to it any more, or the next save does
if the primary itself is gone. The primary fails to merge or commit: likewise. Killed after the commit: the
checkpoint is whole, whatever the other processes are told.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from waystation import _native, coordination
from waystation._errors import Cancelled, InvalidInput, StructureMismatch, WaystationError, from_os_error
from waystation._options import Options
from waystation.checkpoint import prepare, snapshot
from waystation.checkpoint.handle import Progress
from waystation.checkpoint.paths import check_destination
from waystation.checkpoint.write_limits import WriteShares, bound_engine
from waystation.layouts.native import commit, orphans
from waystation.layouts.native.attempts import Attempt, remove_dead
from waystation.layouts.native.chunks import Writer
from waystation.layouts.native.merge import Part
from waystation.layouts.native.records import Digest, dump_json
from waystation.layouts.native.write import Observer, Prepared, write_data, write_metadata

_PART_LIMIT_BYTES = 16 << 30
_SHOWN_DIFFERENCES = 5


class Saving:
    """A save that all processes of the program make together.

    Attributes:
        target: The destination, resolved.
    """

    def __init__(self, target: str, name: str, options: Options, *, overwrite: bool) -> None:
        self.target = target
        is_local = options.multiprocessing.primary_host is None
        primary = options.multiprocessing.primary_host or 0
        what = "save to local storage" if is_local else f"save '{target}'"
        self._name = name
        self._options = options
        self._overwrite = overwrite
        self._custom_metadata: Any = None
        self._prepared: Prepared | None = None
        self._waited_for: list[tuple[int, int]] = []
        self._attempt: Attempt | None = None
        self._own: tuple[Part, list[str]] | None = None
        coordinator = coordination.current()
        opened = [
            coordinator.open(title, deadline_s=options.multiprocessing.deadline_s, primary=primary)
            for title in (what, f"the end of: {what}")
        ]
        # The second one is for a failed save only, whose first session is over.
        self._session, self._ending = opened
        self._writer = Writer(self._session.process_index, self._session.process_count, primary, is_local)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._prepared = None
        self._session.close()
        self._ending.close()
        if isinstance(error, WaystationError):
            error.where(checkpoint=self.target)

    @contextlib.contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Ends the sessions if the block fails."""
        try:
            yield
        except BaseException:
            self._session.close()
            self._ending.close()
            raise

    def begin(self, custom_metadata: Any) -> None:
        """Refuses what can be refused without looking at the state."""

        def work() -> bytes:
            self._check_call(custom_metadata)
            return b""

        def decide(_: Sequence[bytes]) -> bytes:
            check_destination(self.target, overwrite=self._overwrite)
            return b""

        self._session.round(work, decide)

    def _check_call(self, custom_metadata: Any) -> None:
        """Refuses what is wrong with the arguments, and keeps what is not needed before the end."""
        _check_name(self._name)
        try:
            dump_json(custom_metadata)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidInput(f"custom_metadata must be a JSON value: {error}") from error
        self._custom_metadata = custom_metadata

    def prepare(self, state: Any, *, snapshot: bool = False) -> bool:
        """Takes the state apart and plans the files of this process.

        Args:
            state: The state.
            snapshot: Copy what could change afterwards, as far as the options allow.

        Returns:
            Whether the caller may change its leaves now; otherwise once they have been copied out.
        """
        lines: list[str] = []

        def work() -> bytes:
            lines.extend(self._prepare(state, with_snapshot=snapshot))
            return str(Digest.of("\n".join(lines).encode())).encode()

        def decide(parts: Sequence[bytes]) -> bytes:
            return b"" if len(set(parts)) == 1 else b"differ"

        if self._session.round(work, decide):
            self._session.round(lambda: dump_json(lines), _explain_difference)
        return not self._waited_for

    def _prepare(self, state: Any, *, with_snapshot: bool) -> list[str]:
        described = prepare.describe(state)
        lines = prepare.fingerprint(described) if self._writer.process_count > 1 else []
        taken = prepare.take(described, self._options, self._writer)
        shares = WriteShares.of(self._options.memory, with_snapshot=with_snapshot)
        if with_snapshot:
            self._waited_for = snapshot.take(
                taken.chunks, taken.sources, self._options.memory, shares, taken.cast
            )
        self._options = bound_engine(self._options, shares)
        self._prepared = prepare.plan(self._name, taken, self._options, self._writer.process)
        return lines

    def finish(self, progress: Progress, on_copied_out: Callable[[], None] = lambda: None) -> None:
        """Writes, makes durable and commits; `on_copied_out` is called once the state may be changed."""
        path = os.fsdecode(self._session.round(lambda: b"", lambda _: self._start_attempt()))
        try:
            self._session.round(
                lambda: self._write(path, progress, on_copied_out),
                lambda parts: self._commit(parts, progress),
            )
        except BaseException:
            self._undo()
            raise

    def _start_attempt(self, transaction: str | None = None) -> bytes:
        parent, name = os.path.split(self.target)
        remove_dead(parent, name)
        if self._overwrite:
            orphans.remove_dead(self.target)
        attempt = Attempt(self.target, self._options.file.path_permission_mode, transaction)
        directory = os.path.join(attempt.path, self._name)
        try:
            os.mkdir(directory)
        except OSError as error:
            attempt.discard()
            raise from_os_error(error, "create", directory) from error
        self._attempt = attempt
        return os.fsencode(attempt.path)

    def _write(self, path: str, progress: Progress, on_copied_out: Callable[[], None]) -> bytes:
        part, unsynced = self._write_data(path, progress, on_copied_out)
        if self._writer.process_count == 1:
            self._own = part, unsynced
            return b""
        _native.sync_paths(unsynced)
        encoded = part.encode()
        _native.write_small_files([(self._part_path(path, self._writer.process), encoded)], sync=False)
        return dump_json(Digest.of(encoded).to_json())

    def _write_data(
        self, path: str, progress: Progress, on_copied_out: Callable[[], None]
    ) -> tuple[Part, list[str]]:
        """Writes the files of this process; returns what is said of them, and those not yet durable."""
        observer = Observer(
            progress.add,
            lambda _: on_copied_out(),
            {self._name: self._waited_for},
            self._attempt.heartbeat if self._attempt else lambda: None,
            self._writer.process_count == 1,
        )
        unsynced: list[str] = []
        part = write_data(path, self._present(), self._options, observer, unsynced)
        self._check_cancelled(progress)
        return part, unsynced

    def _check_cancelled(self, progress: Progress) -> None:
        if progress.cancelled:
            raise Cancelled(f"saving '{self.target}' was cancelled; nothing was written", path=self.target)

    def _part_path(self, path: str, process: int) -> str:
        return os.path.join(path, self._name, f"p{process:05}.part")

    def _commit(self, digests: Sequence[bytes], progress: Progress) -> bytes:
        attempt = self._attempt
        assert attempt is not None, "the primary has started the attempt"
        if self._own is not None:
            parts, unsynced = [self._own[0]], self._own[1]
        else:
            parts, unsynced = self._collect(attempt.path, digests), []
        write_metadata(attempt, [(self._present(), parts)], self._custom_metadata, unsynced)
        self._check_cancelled(progress)
        if self._overwrite and os.path.lexists(self.target):
            commit.publish_over(attempt)
            commit.remove_replaced(attempt)
        else:
            commit.publish_new(attempt)
        return b""

    def _collect(self, path: str, digests: Sequence[bytes]) -> list[Part]:
        """Reads and removes what each process has written about its files."""
        paths = [self._part_path(path, process) for process in range(len(digests))]
        contents = _native.read_small_files(paths, limit_bytes=_PART_LIMIT_BYTES)
        parts = []
        for process, (content, digest) in enumerate(zip(contents, digests, strict=True)):
            Digest.from_json(digest, paths[process]).check(content, paths[process])
            parts.append(Part.decode(content))
        for part_path in paths:
            os.unlink(part_path)
        return parts

    def _undo(self) -> None:
        """Removes the attempt once every process has stopped writing to it, or cannot be waited for."""
        if self._writer.process_count > 1:
            with contextlib.suppress(WaystationError):
                self._ending.barrier()
        if self._attempt is not None:
            self._attempt.discard()

    def _present(self) -> Prepared:
        assert self._prepared is not None, "the save has been prepared and has not ended"
        return self._prepared


def _check_name(name: object) -> None:
    """Refuses names that cannot be that of a directory inside the checkpoint."""
    plain = isinstance(name, str) and name.isprintable() and not set(name) & {"/", "\\"}
    if not plain or not name or str(name).startswith("."):
        raise InvalidInput(f"{name!r} cannot be the name of a checkpointable: use a plain file name")


def _explain_difference(parts: Sequence[bytes]) -> bytes:
    """Raises the error that shows where the first process that differs from process 0 does so."""
    states = [prepare.fingerprint_from_json(part) for part in parts]
    process = next(number for number, lines in enumerate(states) if lines != states[0])
    shown = []
    for number, other in ((0, process), (process, 0)):
        present = set(states[other])
        own = [line for line in states[number] if line not in present]
        more = f"\n    and {len(own) - _SHOWN_DIFFERENCES} more" if len(own) > _SHOWN_DIFFERENCES else ""
        lines = "".join(f"\n    {line}" for line in own[:_SHOWN_DIFFERENCES]) or "\n    (nothing else)"
        shown.append(f"\n  only process {number}:{lines}{more}")
    raise StructureMismatch(
        "the processes of the program save different states; every process must give the same tree, "
        f"with the same shapes, dtypes and shardings:{''.join(shown)}"
    )
