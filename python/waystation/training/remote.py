"""A remote copy of a sequence of checkpoints: steps are uploaded in the background, from a directory.

The primary uploads, one step at a time and the newest first, by the copy that `waystation.copy` makes: so an
upload is verified, atomic, and goes on after a restart. The step that is uploaded has a lease, and so has the
newest one that waits; older ones that wait are uploaded if they are still there.

What can go wrong, in order: the remote cannot be listed when the `Checkpointer` is opened: a warning, and the
next step lists it again. An upload fails: a warning at the next save, and the next step tries again. The
program ends: it waits for uploads. It is killed: the next one uploads what the remote lacks. Nothing of this
keeps a save from being made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import threading
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

from waystation import _forks, storage
from waystation._errors import Conflict, Corrupt, InvalidInput, WaystationError, WrongType
from waystation._options import Options
from waystation.checkpoint.copy import Copying, CopyStatistics
from waystation.checkpoint.paths import is_checkpoint
from waystation.layouts.native import commit
from waystation.storage.attempts import new_attempt_id
from waystation.storage.bandwidth import Bandwidth
from waystation.training.catalogue import Info, Listing, described
from waystation.training.collection import Collector
from waystation.training.errors import RemoteWarning
from waystation.training.mirror import same
from waystation.training.place import Place
from waystation.training.preservation_policies import (
    PreservationContext,
    PreservationPolicy,
    PreserveAll,
)
from waystation.training.step_metadata import CheckpointMetadata
from waystation.training.step_names import PathLike
from waystation.transfers.handle import AsyncResponse, Progress

_log = logging.getLogger("waystation")

REMOTE = "remote"  # as `CheckpointMetadata.tiers` has it

_ABOVE = 4  # frames of this package between a warning and the program's own call


@dataclass(frozen=True)
class Remote:
    """Another place, to which a `Checkpointer` copies its steps in the background.

    Attributes:
        directory: Where: a location in an object store, such as `s3://bucket/run`, or a directory.
        every: Copy the steps that are multiples of this.
        keep: Which of them to keep there; by default all.
        bytes_per_second: How much to copy in a second at most, on average; None for no bound.
    """

    directory: PathLike
    _: dataclasses.KW_ONLY
    every: int = 1
    keep: PreservationPolicy | None = None
    bytes_per_second: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int):
            raise WrongType(f"every must be an integer, not {self.every!r:.60}")
        if self.every < 1:
            raise InvalidInput(f"every must be 1 or more, not {self.every}")
        if self.keep is not None and not callable(getattr(self.keep, "should_preserve", None)):
            raise WrongType(
                f"keep must be a policy of training.preservation_policies or None, not {self.keep!r:.60}"
            )
        Bandwidth(self.bytes_per_second)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteStatistics:
    """What has been uploaded so far by this process; only the primary uploads.

    Attributes:
        uploads: Steps that were uploaded.
        uploaded_bytes: Bytes of their files, but for those that an earlier upload had put there.
        failures: How often an upload has failed.
        last_failure: Why the last one that failed did so; None if none has.
        waiting: The steps that are to be uploaded, the one that is being uploaded among them.
    """

    uploads: int = 0
    uploaded_bytes: int = 0
    failures: int = 0
    last_failure: str | None = None
    waiting: tuple[int, ...] = ()


class OpenRemote:
    """The remote of one `Checkpointer`.

    Args:
        remote: What the program has asked for.
        local: The directory that steps are uploaded from.

    Attributes:
        place: Where they go; its catalogue is what is known to be there.
    """

    def __init__(self, remote: Remote, local: Place, root: str) -> None:
        self.place = Place(root, local.name_format, local.context)
        self._remote = remote
        self._local = local
        self._policy = remote.keep or PreserveAll()
        self._collector = Collector(self.place, self._policy)
        self._lock = threading.Lock()
        _forks.watch(self)
        self._waiting: set[int] = set()
        self._lease: tuple[int, contextlib.ExitStack] | None = None
        self._running: AsyncResponse[None] | None = None
        self._is_listed = False
        self._failure: WaystationError | None = None
        self._untold: str | None = None
        self._statistics = RemoteStatistics()

    def begin_in_child(self) -> None:
        """See `waystation._forks.Watched`: the parent uploads."""
        self._lock = threading.Lock()
        self._waiting, self._running, self._lease = set(), None, None

    @property
    def statistics(self) -> RemoteStatistics:
        """What it has done so far."""
        with self._lock:
            return dataclasses.replace(self._statistics, waiting=tuple(sorted(self._waiting)))

    # ---- what is there ---------------------------------------------------------------------------

    def take_stock(self, options: Options) -> None:
        """Finds out what is there, together with the other processes; uploads what it lacks."""
        session = self.place.session("look for uploaded checkpoints", options)
        try:
            listed, problem = json.loads(session.broadcast(self._look))
            is_primary = session.is_primary
        finally:
            session.close()
        if problem is None:
            self.place.catalogue.replace(Listing.decode(json.dumps(listed).encode()))
        else:
            warnings.warn(
                f"what was uploaded to '{self.place.root}' is not known: {problem}; it is looked again at "
                "the next step",
                RemoteWarning,
                stacklevel=_ABOVE,
            )
        if is_primary:
            self._is_listed = problem is None
            self._upload_all(info.step for info in self._local.catalogue.committed())

    def _look(self) -> bytes:
        try:
            found = Listing.read(self.place.root, self.place.name_format, with_records=True)
        except WaystationError as error:
            return json.dumps([None, error.message]).encode()
        return json.dumps([json.loads(found.encode()), None]).encode()

    def checkpoints(self) -> list[Info]:
        """The checkpoints that are there, ascending, as far as this process knows."""
        return [dataclasses.replace(info, tiers=(REMOTE,)) for info in self.place.catalogue.committed()]

    # ---- uploading -------------------------------------------------------------------------------

    def committed(self, step: int) -> None:
        """A step is committed in the directory; called by the primary before anything is collected there."""
        self._upload_all([step])

    def _upload_all(self, steps: Iterable[int]) -> None:
        wanted = [step for step in steps if step % self._remote.every == 0]
        with self._lock:
            self._waiting.update(wanted)
            if wanted:
                self._hold(max(wanted))
            self._start()

    def _hold(self, step: int) -> None:
        """Keeps the newest step that waits from being collected. The one that is uploaded has a lease of its
        copy."""
        info = self._local.catalogue.find(step)
        if info is None or (self._lease is not None and self._lease[0] >= step):
            return
        lease = contextlib.ExitStack()
        try:
            lease.enter_context(self._local.leases.hold(info.path.name))
        except WaystationError as error:
            _log.warning("step %d waits for its upload without a lease: %s", step, error)
            return
        self._let_go()
        self._lease = step, lease

    def _let_go(self) -> None:
        if self._lease is not None:
            _, lease = self._lease
            self._lease = None
            lease.close()

    def _start(self) -> None:
        if self._waiting and self._running is None:
            try:
                self._running = AsyncResponse(f"uploading to '{self.place.root}'", self._run)
            except WaystationError as error:  # the system starts no thread
                self._failure = error
                self._tell_of(error)

    def _run(self, progress: Progress) -> None:
        while (step := self._next()) is not None:
            try:
                self._upload(step, progress)
            except WaystationError as error:
                if not self._is_without_use(step, error):
                    with self._lock:
                        self._failure = error
                        self._running = None
                        self._tell_of(error)
                    return
            except BaseException:
                with self._lock:
                    self._running = None
                raise
            else:
                with self._lock:
                    if self._failure is not None:
                        self._failure = self._untold = None
            with self._lock:
                self._waiting.discard(step)

    def _is_without_use(self, step: int, error: WaystationError) -> bool:
        """Whether another try would fail as well: the step has been collected, it is damaged, or something of
        somebody else is in its place there."""
        info = self._local.catalogue.find(step)
        if info is None or not is_checkpoint(info.path):
            _log.info("step %d was removed before it was uploaded to '%s'", step, self.place.root)
            return True
        if isinstance(error, Corrupt | Conflict):
            with self._lock:
                self._tell_of(error)
            return True
        return False

    def _next(self) -> int | None:
        """The step that is uploaded next; None once there is none, and then nothing runs any more."""
        with self._lock:
            if self._waiting:
                return max(self._waiting)
            self._running = None
            self._failure = None
            self._let_go()
            return None

    def _tell_of(self, error: WaystationError) -> None:
        self._untold = error.message
        self._statistics = dataclasses.replace(
            self._statistics, failures=self._statistics.failures + 1, last_failure=error.message
        )
        _log.warning("the upload to '%s' has failed: %s", self.place.root, error)

    def _upload(self, step: int, progress: Progress) -> None:
        if not self._is_listed:
            listing = Listing.read(self.place.root, self.place.name_format, with_records=True)
            self.place.catalogue.replace(listing)
            self._is_listed = True
        info = self._local.catalogue.find(step)
        if info is None or not self._is_wanted(info):
            return
        source, target = os.fspath(info.path), os.path.join(self.place.root, info.path.name)
        is_there = is_checkpoint(target)
        if not is_there or not same(source, target):
            with Bandwidth(self._remote.bytes_per_second) as bandwidth:
                copying = Copying(bandwidth, progress, lambda _done, _total: None)
                self._count(copying.run(source, target, overwrite=is_there))
        uploaded = CheckpointMetadata(step, storage.as_path(target), metadata=None)
        self.place.catalogue.commit(described(uploaded))
        with self._collector.chosen() as going:
            self._collector.remove(going)

    def _is_wanted(self, info: Info) -> bool:
        """Whether the policy would keep a step."""
        others = [found for found in self.place.catalogue.committed() if found.step != info.step]
        infos = sorted([*others, info], key=lambda found: found.step)
        flags = self._policy.should_preserve(infos, context=PreservationContext())
        return bool(flags[infos.index(info)])

    def _count(self, done: CopyStatistics) -> None:
        with self._lock:
            self._statistics = dataclasses.replace(
                self._statistics,
                uploads=self._statistics.uploads + 1,
                uploaded_bytes=self._statistics.uploaded_bytes + done.nbytes - done.found_bytes,
            )

    def tell(self) -> None:
        """Warns of a failure that the program has not heard of."""
        with self._lock:
            untold, self._untold = self._untold, None
        if untold is not None:
            warnings.warn(
                f"the upload to '{self.place.root}' has failed: {untold}; it is tried again at the next step",
                RemoteWarning,
                stacklevel=_ABOVE,
            )

    # ---- deleting, and the end -------------------------------------------------------------------

    def delete(self, step: int, options: Options) -> bool:
        """Deletes a step there, in the primary; returns in all processes whether it was there."""
        session = self.place.session(f"delete the uploaded step {step}", options)

        def remove() -> bytes:
            with self._lock:
                self._waiting.discard(step)
            info = self.place.catalogue.find(step)
            if info is None:
                return b""
            commit.withdraw(os.fspath(info.path), new_attempt_id())
            return b"deleted"

        try:
            was_there = session.broadcast(remove) == b"deleted"
        finally:
            session.close()
        self.place.catalogue.drop([step])
        return was_there

    def wait(self) -> None:
        """Waits for the uploads, after another try of those that have failed.

        Raises:
            WaystationError: What some have failed with.
        """
        with self._lock:
            self._start()
        while True:
            with self._lock:
                running, failure = self._running, self._failure
                if running is None:
                    break
            error = running.exception()
            if error is not None:
                raise error
        if failure is not None:
            with self._lock:
                self._untold = None
            raise failure
        self.tell()

    def close(self) -> None:
        """Keeps nothing from being collected any more; the uploads have been waited for."""
        with self._lock:
            self._let_go()
