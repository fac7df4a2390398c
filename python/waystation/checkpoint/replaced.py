"""Readers of a checkpoint that may be overwritten, deleted or collected while they read it.

A reader holds the directory of the checkpoint open and opens every file beneath it, so that all files are
of one version. An overwrite moves that directory aside and deletes its files; where names cannot be swapped
it replaces the record, and moves aside what the earlier one named. A reader that fails, and finds that
another version has the place now, begins again with that: what it raised may come of files that have gone.
All processes of a load begin again together, in the session that they have: what one of them met is a part
of the round, which ends for all with the same decision.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from waystation import storage
from waystation._errors import (
    Cancelled,
    CheckpointableNotFound,
    CheckpointNotFound,
    InvalidInput,
    InvalidLayoutError,
    NotFound,
    PermissionDenied,
    WaystationError,
)
from waystation._options import CheckpointLayout, Options
from waystation.checkpoint.paths import MOST_ATTEMPTS, always_replaced, refuse_signed, require_checkpoint
from waystation.coordination import Session
from waystation.layouts.native import names

T = TypeVar("T")

_WORKED, _REPLACED = b"w", b"r"


class Replaced(Exception):
    """The checkpoint was replaced while it was read: to be read again. Never leaves the package."""


class Held:
    """A checkpoint whose directory is held open.

    Args:
        target: Its path.
        options: Whether links out of it are followed.

    Attributes:
        target: Its path.
        root_if_directory: The directory; what is opened beneath it is of this checkpoint, whatever has its
            path by now. None for a published model that is one file.

    Raises:
        NotFound, InvalidInput: There is no checkpoint.
    """

    def __init__(self, target: str, options: Options) -> None:
        self.target = target
        is_model = options.checkpoint_layout is not CheckpointLayout.ORBAX and storage.is_file(target)
        self.root_if_directory: storage.Root | None = None if is_model else _opened(target, options)
        self._record = os.path.join(target, names.RECORD)
        self._seen = self._identity()

    @property
    def root(self) -> storage.Root:
        """The directory of a checkpoint that is one."""
        assert self.root_if_directory is not None, "a published model of one file has no directory"
        return self.root_if_directory

    def was_replaced(self) -> bool:
        """Whether another checkpoint, another version of it, or nothing, is at the path by now."""
        if self.root_if_directory is None:
            return False  # what reads the file compares what identifies it
        try:
            return not self.root.is_current() or self._identity() != self._seen
        except WaystationError:
            return False  # what failed before says more

    def require_current(self) -> None:
        """Has the reader begin again if the checkpoint was replaced: for what does not fail where files are
        missing, and for what went by the path.

        Raises:
            Replaced: It was.
        """
        if self.was_replaced():
            raise Replaced

    def _identity(self) -> storage.Identity | None:
        """What differs between two versions of a record in one directory."""
        if self.root_if_directory is None:
            return None
        status = storage.status(self._record, self.root)
        return None if status is None else status.identity


def _opened(target: str, options: Options) -> storage.Root:
    for _ in range(MOST_ATTEMPTS):
        try:
            return storage.of(target).hold(target, follow_links_out=options.file.follow_links_out)
        except WaystationError as error:
            if not storage.is_absence(error):
                if isinstance(error, InvalidInput | PermissionDenied):
                    refuse_signed(target)
                raise  # of a directory that could not be opened, nothing tells that it is no checkpoint
            failure = error
        try:
            require_checkpoint(target)  # which tells best what is there instead
        except WaystationError as better:
            if isinstance(better, NotFound) or not isinstance(failure, NotFound):
                raise
            failure = better
        # Something came between the two looks.
    raise failure


@contextlib.contextmanager
def telling_of_deletion(target: str, *, was_there: bool) -> Iterator[None]:
    """Says of a checkpoint that was there, and is not any more, that it was deleted. What a deletion has not
    removed yet looks like anything but a checkpoint.

    Raises:
        CheckpointNotFound: It was.
    """
    try:
        yield
    except (NotFound, InvalidLayoutError) as error:
        if not was_there or isinstance(error, CheckpointNotFound | CheckpointableNotFound):
            raise
        raise CheckpointNotFound(
            f"checkpoint '{target}' was deleted while it was read: there is none any more", path=target
        ) from error


def read_what_is_there(target: str, options: Options, read: Callable[[Held], T]) -> T:
    """Calls `read` until it succeeds, or the checkpoint was not replaced while it failed.

    Raises:
        Unavailable: The checkpoint was replaced during every attempt.
        CheckpointNotFound: It was deleted meanwhile.
    """
    for attempt in range(MOST_ATTEMPTS):
        with telling_of_deletion(target, was_there=attempt > 0):
            held = Held(target, options)
            try:
                return read(held)
            except Replaced as error:
                failure: BaseException | None = error.__cause__
            except WaystationError as error:
                if isinstance(error, Cancelled) or not held.was_replaced():
                    raise
                failure = error
    raise always_replaced(target) from failure


class Rounds:
    """A session in whose rounds the processes of a load learn together that the checkpoint was replaced.

    It takes the place of the session that it is given, see `coordination.base.Session`. A round in which a
    process failed for that reason ends with `Replaced` in all of them; the session goes on.

    Args:
        session: Of the load.
        was_replaced: Whether what this process reads was replaced.
    """

    def __init__(self, session: Session, was_replaced: Callable[[], bool]) -> None:
        self._session = session
        self._was_replaced = was_replaced
        self.process_index: int = session.process_index
        self.process_count: int = session.process_count
        self.primary: int = session.primary
        self.processes: tuple[int, ...] = session.processes

    @property
    def is_primary(self) -> bool:
        """Whether this process decides."""
        return self._session.is_primary

    def round(self, work: Callable[[], bytes], decide: Callable[[Sequence[bytes]], bytes]) -> bytes:
        """Does this process's part, has the primary decide, and returns the decision.

        Raises:
            Replaced: The checkpoint was replaced while some process did its part, or the primary decided.
        """
        failure: Exception | None = None

        def noticing(act: Callable[[], bytes]) -> bytes:
            nonlocal failure
            try:
                return _WORKED + act()
            except Replaced as error:
                failure = error
            except WaystationError as error:
                if isinstance(error, Cancelled) or not self._was_replaced():
                    raise
                failure = error
            return _REPLACED

        def decide_or_notice(parts: Sequence[bytes]) -> bytes:
            if any(part.startswith(_REPLACED) for part in parts):
                return _REPLACED
            return noticing(lambda: decide([part.removeprefix(_WORKED) for part in parts]))

        decision = self._session.round(lambda: noticing(work), decide_or_notice)
        if decision.startswith(_REPLACED):
            raise Replaced from failure
        return decision.removeprefix(_WORKED)

    def barrier(self) -> None:
        """Waits until every process is here."""
        self._session.barrier()

    def look(self) -> None:
        """Raises what another process has failed with since the last round."""
        self._session.look()

    def broadcast(self, make: Callable[[], bytes]) -> bytes:
        """What `make` returns in the primary, in which alone it is called."""
        return self.round(lambda: b"", lambda parts: make())

    def gather(self, part: bytes) -> list[bytes] | None:
        """The parts of all processes by their index in the primary, None elsewhere."""
        return self._session.gather(part)

    def close(self) -> None:
        """Ends the session; idempotent."""
        self._session.close()

    def close_together(self) -> None:
        """See `Session`."""
        self._session.close_together()
