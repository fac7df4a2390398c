"""A remote copy of a sequence of checkpoints: steps are uploaded in the background, from a directory.

The primary uploads, one step at a time and the newest first, by the copy that `waystation.copy` makes: so an
upload is verified, atomic, and goes on after a restart. The step that is uploaded has a lease, and so has the
newest one that waits; older ones that wait are uploaded if they are still there.

A remote belongs to one sequence, and what others have put there is neither replaced nor collected
(`upload_record`).

What can go wrong, in order: the remote is that of another sequence: Conflict, when the `Checkpointer` is
opened if the remote answers then, else from `wait`. The remote cannot be listed then, or does not answer
soon: a warning, and the next step lists it again. A step is saved again, or deleted, while it is uploaded:
the newer request counts. An upload fails: a warning at the next save, and the next step tries again. The
program ends: it waits for uploads. It is killed: the next one uploads what the remote lacks. Nothing of this
keeps a save from being made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import os
import threading
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field

from waystation import _forks, storage
from waystation._errors import (
    Conflict,
    Corrupt,
    InvalidInput,
    NotFound,
    Unsupported,
    WaystationError,
    WrongType,
)
from waystation._options import Options
from waystation.checkpoint.copy import Copying, CopyStatistics
from waystation.checkpoint.delete import withdraw
from waystation.checkpoint.paths import is_checkpoint, layout_at
from waystation.layouts.native import commit
from waystation.layouts.orbax import in_store as orbax_in_store
from waystation.storage.attempts import new_attempt_id
from waystation.storage.bandwidth import Bandwidth
from waystation.training import step_records
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
from waystation.training.remote_versions import RemoteVersions, committed_at
from waystation.training.step_metadata import CheckpointMetadata, changed
from waystation.training.step_names import PathLike
from waystation.training.upload_record import UploadRecord
from waystation.transfers.handle import AsyncResponse, Progress

_log = logging.getLogger("waystation")

REMOTE = "remote"  # as `CheckpointMetadata.tiers` has it

_ABOVE = 4  # frames of this package between a warning and the program's own call

# How long a program that can go on with what its directory has waits for the remote to answer.
_ANSWERS_WITHIN_S = 5.0
# How long the other processes wait for the primary at a time, while that waits for uploads.
_ROUND_S = 5.0


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
        uploaded_bytes: Bytes of their files, but for those that an earlier upload had put there, for this
            step or for one that it shares them with.
        failures: How often an upload has failed.
        last_failure: Why the last one that failed did so; None if none has.
        waiting: The steps that are to be uploaded, the one that is being uploaded among them.
    """

    uploads: int = 0
    uploaded_bytes: int = 0
    failures: int = 0
    last_failure: str | None = None
    waiting: tuple[int, ...] = ()


@dataclass(slots=True)
class _Upload:
    """A step that is being uploaded.

    Attributes:
        step: The step.
        request: Which request to upload it this is; a later one asks for what was saved later.
        name: Of its directory, once that is known.
        progress: By which it is stopped.
        is_withdrawn: Whether the step was deleted meanwhile.
        has_ended: Once nothing is done to the step in the remote any more.
    """

    step: int
    request: int
    name: str = ""
    progress: Progress = field(default_factory=Progress)
    is_withdrawn: bool = False
    has_ended: threading.Event = field(default_factory=threading.Event)


class OpenRemote:
    """The remote of one `Checkpointer`.

    Args:
        remote: What the program has asked for.
        local: The directory that steps are uploaded from.
        root: Where they go.
        reuse_unchanged: Whether a step refers to data files of others there that hold the same, in a store.

    Attributes:
        place: Where they go; its catalogue is what is known to be there.
        versions: Which versions of steps that are, and which of them are outdated.
    """

    def __init__(self, remote: Remote, local: Place, root: str, *, reuse_unchanged: bool = False) -> None:
        self._reuse_unchanged = reuse_unchanged and storage.is_in_store(root)
        self.place: Place = Place(root, local.name_format, local.context)
        self._remote = remote
        self._local = local
        self._policy = remote.keep or PreserveAll()
        self._record = UploadRecord(local.root, root)
        self.versions: RemoteVersions = RemoteVersions(local, self.place, self._record)
        self._collector = Collector(self.place, self._policy, self.versions.current_of_ours)
        self._lock = threading.Lock()
        # Whoever lists the remote, or changes what is there, and so the catalogue and the record of uploads.
        self._changing = threading.RLock()
        _forks.watch(self)
        self._requests = itertools.count()
        self._waiting: dict[int, int] = {}  # the last request for each step
        self._overwritten: set[int] = set()  # by this program, as it has asked
        # What was replaced there by a version that never comes, and stays: by step and time.
        self._left_alone: set[tuple[int, int]] = set()
        self._current: _Upload | None = None
        self._lease: tuple[int, contextlib.ExitStack] | None = None
        self._running: AsyncResponse[None] | None = None
        self._is_listed = self._was_listed = False
        self._has_passed_over = False
        self._failure: WaystationError | None = None
        self._raised: set[int] = set()  # the steps of which a failure was raised
        self._untold: str | None = None  # the last failure, if the program has not heard of it
        self._notices: list[str] = []
        self._statistics = RemoteStatistics()

    def begin_in_child(self) -> None:
        """See `waystation._forks.Watched`: the parent uploads."""
        self._lock, self._changing = threading.Lock(), threading.RLock()
        self._waiting, self._current, self._running, self._lease = {}, None, None, None
        self._failure = None

    @property
    def statistics(self) -> RemoteStatistics:
        """What it has done so far."""
        with self._lock:
            return dataclasses.replace(self._statistics, waiting=tuple(sorted(self._waiting)))

    # ---- what is there ---------------------------------------------------------------------------

    def take_stock(self, options: Options) -> None:
        """Finds out what is there, together with the other processes; uploads what it lacks.

        Raises:
            Conflict: The remote is that of another sequence.
        """
        session = self.place.session("look for uploaded checkpoints", options)
        try:
            listed, problem = json.loads(session.broadcast(self._take_stock))
            is_primary = session.is_primary
        finally:
            session.close()
        if problem is not None:
            warnings.warn(
                f"what was uploaded to '{self.place.root}' is not known: {problem}; it is looked again at "
                "the next step",
                RemoteWarning,
                stacklevel=_ABOVE,
            )
        elif not is_primary:
            self.versions.take_over(Listing.decode(json.dumps(listed).encode()))
        if is_primary:
            self._upload_all(info.step for info in self._local.catalogue.committed())
            self.tell()

    def _take_stock(self) -> bytes:
        self._is_listed = False
        try:
            problem = self._look_soon()
        except WaystationError as error:
            if "sequence" in error.context:
                raise
            problem = error.message
        return b"[null, %s]" % json.dumps(problem).encode() if problem else b"[%s, null]" % self._encoded()

    def _look_soon(self) -> str | None:
        """Lists the remote; gives up waiting for it soon where the program can go on without, and returns
        why it did."""
        if not self._local.catalogue.committed():
            self._look()
            return None
        look = AsyncResponse(
            f"looking for what is at '{self.place.root}'",
            lambda _: self._failure_of_look(),
            waits_if_late=False,
        )
        if not look.wait(_ANSWERS_WITHIN_S):
            return f"it has not answered within {_ANSWERS_WITHIN_S:g} s"
        failure = look.result()
        if failure is not None:
            raise failure
        return None

    def _failure_of_look(self) -> WaystationError | None:
        try:
            self._look()
        except WaystationError as error:
            return error
        return None

    def _look(self) -> None:
        """Finds out what is there, unless that is known.

        Raises:
            Conflict: The remote is that of another sequence.
        """
        with self._changing:
            if not self._is_listed:
                listing = Listing.read(self.place.root, self.place.name_format, with_records=True)
                self._record.look(self._local.catalogue.committed())
                counts = self.versions.that_counts(listing)
                self.versions.note_listed(counts.committed, was_listed=self._was_listed)
                self.place.catalogue.replace(counts)
                self._is_listed = self._was_listed = True
                self._note_sequence()

    def _note_sequence(self) -> None:
        """Has the program told that it goes on with the steps of another directory, as that may be the one of
        another run."""
        uploader, self._record.gone_on_from = self._record.gone_on_from, None
        committed = self.place.catalogue.committed()
        if uploader is not None and committed:
            with self._lock:
                self._notices.append(
                    f"'{self._local.root}' has no checkpoints, and goes on with those in "
                    f"'{self.place.root}', which were uploaded from {uploader}, the newest of step "
                    f"{committed[-1].step}. If that is another run, give this one a remote and a new "
                    "directory of its own"
                )

    def _encoded(self) -> bytes:
        return Listing(self.versions.current(), self.place.catalogue.damaged()).encode()

    def checkpoints(self) -> list[Info]:
        """The same, as `Checkpointer.checkpoints` tells of them."""
        return [changed(info, tiers=(REMOTE,)) for info in self.versions.current()]

    # ---- uploading -------------------------------------------------------------------------------

    def committed(self, step: int, overwrite: bool) -> None:
        """A step is committed in the directory; called by the primary before anything is collected there.

        Args:
            step: The step.
            overwrite: Whether the program has asked for another version of the step to be replaced.
        """
        info = self._local.catalogue.find(step)
        time = None if info is None else self.versions.time_here(info)
        with self._lock:
            self.versions.saved(step, next(self._requests), time)
            if overwrite:
                self._overwritten.add(step)
        if info is not None and time is not None:
            self._note_version(info, time)
        self._upload_all([step])

    def _note_version(self, info: Info, time: int) -> None:
        """Has the next program know of a step that was saved again, whose earlier version is in the remote,
        as far as is known."""
        there = self.place.catalogue.find(info.step)
        if self._is_listed and (there is None or committed_at(there) == time):
            return
        try:
            self._record.note_version(info.path.name, time)
        except WaystationError as error:
            _log.warning("that step %d was saved again is not written down: %s", info.step, error)

    def _upload_all(self, steps: Iterable[int]) -> None:
        wanted = [step for step in steps if step % self._remote.every == 0]
        with self._lock:
            for step in wanted:
                self._waiting[step] = next(self._requests)
            self._raised.difference_update(wanted)
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
        if self._waiting and (self._running is None or self._running.done()):
            if self._running is not None:
                self._running.exception()  # of which the program is told otherwise
            try:
                # The upload asks for the lock that is held here.
                self._running = AsyncResponse(
                    f"uploading to '{self.place.root}'", lambda _: self._run(), waits_if_late=False
                )
            except WaystationError as error:  # the system starts no thread
                self._failure = error
                self._note_failure(error)
                self._untold = f"{error.message}; it is tried again at the next step"

    def _run(self) -> None:
        while (upload := self._next()) is not None:
            try:
                failure = self._try(upload)
            except BaseException as error:  # of a policy of the program; `wait` raises it
                with self._lock:
                    self._current = None
                    self._untold = f"{error!r:.200}; it is tried again at the next step"
                upload.has_ended.set()
                raise
            with self._lock:
                self._end(upload, failure)
            if failure is not None:
                return

    def _next(self) -> _Upload | None:
        """The step that is uploaded next; None once there is none, and then nothing runs any more."""
        with self._lock:
            if self._waiting:
                step = max(self._waiting)
                self._current = _Upload(step, self._waiting[step])
                return self._current
            self._running = None
            self._failure = None
            self._let_go()
            return None

    def _try(self, upload: _Upload) -> WaystationError | None:
        """Uploads a step; returns what that has failed with, if another try may help."""
        failure = self._failure_of_look()
        if failure is not None:
            return failure
        try:
            try:
                self._upload(upload)
            except WaystationError as error:
                if not (upload.is_withdrawn or self._is_without_use(upload.step, error)):
                    raise
            self._remove_outdated(upload)
        except WaystationError as error:
            return error
        with self._lock:
            if self._failure is not None:
                self._failure = self._untold = None
            self._raised.clear()
        return None

    def _end(self, upload: _Upload, failure: WaystationError | None) -> None:
        self._current = None
        upload.has_ended.set()
        if failure is not None:
            self._failure = failure
            self._running = None
            self._note_failure(failure)
            self._untold = f"{failure.message}; it is tried again at the next step"
        elif self._waiting.get(upload.step) == upload.request:  # else it was saved again meanwhile
            del self._waiting[upload.step]

    def _is_without_use(self, step: int, error: WaystationError) -> bool:
        """Whether another try would fail as well: the step has been collected, it is damaged, or something of
        somebody else is in its place there."""
        if "sequence" in error.context or self._record.is_about(error):
            return False
        info = self._local.catalogue.find(step)
        if info is None or not is_checkpoint(info.path):
            _log.info("step %d was removed before it was uploaded to '%s'", step, self.place.root)
            return True
        if isinstance(error, Conflict) and orbax_in_store.is_begun(self._target(info.path.name)):
            return False  # by a program that was killed lately, as a rule, whose lease has to run out
        if isinstance(error, Corrupt | Conflict):
            with self._lock:
                self._note_failure(error)
                self._notices.append(
                    f"step {step} is not uploaded to '{self.place.root}', and not tried again: "
                    f"{error.message}"
                )
            return True
        return False

    def _note_failure(self, error: WaystationError) -> None:
        self._statistics = dataclasses.replace(
            self._statistics, failures=self._statistics.failures + 1, last_failure=error.message
        )
        _log.warning("the upload to '%s' has failed: %s", self.place.root, error)

    def _upload(self, upload: _Upload) -> None:
        info = self._local.catalogue.find(upload.step)
        if info is not None and not self._can_be_copied(info):
            return
        if info is None or not self._is_wanted(info):
            return
        upload.name = info.path.name
        source, target = os.fspath(info.path), self._target(upload.name)
        is_there = is_checkpoint(target)
        is_done = is_there and same(source, target)
        if not is_done:
            judged = self._require_replaceable(upload.step, source, target) if is_there else None
            self._copy(upload, source, target, judged)
        there = described(self._there(upload))
        committed_ns = there.commit_timestamp_nsecs
        if is_done and committed_ns is not None and self.versions.is_begun(upload.name, committed_ns):
            self._write_down(upload.name, committed_ns)
        with self._changing:
            if upload.is_withdrawn:
                return
            self.place.catalogue.commit(there)
            with self._collector.chosen() as going:
                gone = self._collector.remove(going)
                self._record.forget([other.path.name for other in gone])

    def _remove_outdated(self, upload: _Upload) -> None:
        """Removes the versions there of steps that were saved again, where the newer one never comes: it was
        collected here before, or the remote is not to have it. A later program would load the older one for
        it. What an upload would leave alone stays. So does all there is: a directory that has lost
        everything has not collected it, and what is older is better than nothing.
        """
        with self._changing:
            there = self.place.catalogue.committed()
            outdated = [info for info in there if self.versions.is_outdated(info)]
            if len(outdated) == len(there):
                return
            for info in outdated:
                with self._lock:
                    is_deleted = upload.is_withdrawn and info.step == upload.step
                    waits = self._waiting.get(info.step, upload.request) != upload.request
                if not (is_deleted or waits) and self._never_comes(info.step):
                    self._remove_version(info)

    def _never_comes(self, step: int) -> bool:
        """Whether the version of a step that was saved last is not uploaded any more."""
        local = self._local.catalogue.find(step)
        if local is not None and is_checkpoint(local.path):
            return step % self._remote.every != 0 or not self._is_wanted(local)
        return any(is_checkpoint(other.path) for other in reversed(self._local.catalogue.committed()))

    def _remove_version(self, there: Info) -> None:
        """Removes a version there, unless somebody reads it: then that is tried again after the next upload,
        and so is what the remote refuses. No upload fails by it."""
        step, name, target = there.step, there.path.name, os.fspath(there.path)
        source, leases = os.fspath(self._local.path_of(step)), self.place.leases
        if (step, committed_at(there)) in self._left_alone:
            return
        try:
            judged = self._require_replaceable(step, source, target)
            if step_records.committed_ns(target) != committed_at(there) or leases.is_held(name):
                return
            with leases.condemned(name) as may_go:
                if not may_go:
                    return
                if storage.is_in_store(target):
                    self._make_room(target, layout_at(target), judged, committed_at(there))
                else:
                    withdraw(target, created_ns=committed_at(there))
        except (Conflict, NotFound) as error:
            self._left_alone.add((step, committed_at(there)))
            _log.info("'%s' stays, of which '%s' was another version: %s", target, source, error)
        except WaystationError as error:
            _log.warning("'%s', of which '%s' was a newer version, stays for now: %s", target, source, error)
        else:
            self.place.catalogue.drop([step])
            self._record.forget([name])
            self.versions.forget(step)

    def _can_be_copied(self, info: Info) -> bool:
        """Whether a step is whole in itself, and says when it was committed; else that is told once."""
        source = os.fspath(info.path)
        try:
            if layout_at(source) == "orbax":
                reason = "nothing in it says when it was committed, which tells versions of a step apart"
                if step_records.committed_ns(source) is not None:
                    return True
            else:
                reason = "each host has a part of it, and a remote takes whole checkpoints"
                if commit.read_record(source).local is None:
                    return True
        except (Corrupt, InvalidInput, NotFound, Unsupported):
            return True  # the copy says more
        with self._lock:
            if not self._has_passed_over:
                self._has_passed_over = True
                self._notices.append(
                    f"step {info.step} is not copied to '{self.place.root}', nor are others like it: "
                    f"{reason}; load it and save it again to have it there"
                )
        return False

    def _target(self, name: str) -> str:
        return os.path.join(self.place.root, name)

    def _there(self, upload: _Upload) -> Info:
        return CheckpointMetadata(upload.step, storage.as_path(self._target(upload.name)), metadata=None)

    def _require_replaceable(self, step: int, source: str, target: str) -> storage.Identity:
        """Refuses to replace what is in the place of a step there, unless this sequence has uploaded it: from
        this directory, or the program has asked for that.

        Returns:
            The version of it that was judged, which alone is to be replaced.

        Raises:
            Conflict: It has not.
        """
        with self._changing:  # another sequence may have begun, or another program of this one
            self._record.look(self._local.catalogue.committed())
            is_of_another = self._record.is_of_another_directory(os.path.basename(target))
        with self._lock:
            was_asked_for = step in self._overwritten
        if is_of_another and not was_asked_for:
            raise Conflict(
                f"'{target}' was uploaded from another directory of this sequence, and is another checkpoint "
                f"than '{source}', so it is left alone; save the step with overwrite=True to replace it",
                path=target,
            )
        judged = self.versions.version_of_ours(target)
        if judged is None:
            raise Conflict(
                f"'{target}' is another checkpoint than '{source}', and was not uploaded by this sequence, "
                "so it is left alone; remove it, or give another remote",
                path=target,
            )
        return judged

    def _copy(self, upload: _Upload, source: str, target: str, judged: storage.Identity | None) -> None:
        """Copies a step, to where nothing is, or in the place of the version that was judged."""
        replaced_ns = None
        if judged is not None:
            with contextlib.suppress(Corrupt, InvalidInput, NotFound, Unsupported):
                replaced_ns = step_records.committed_ns(target)
        self._write_down(upload.name, self._committed_ns(source), replaced_ns)
        is_there = judged is not None
        if is_there and "orbax" in (layouts := (layout_at(source), layout_at(target))):
            if storage.is_in_store(target):
                self._make_room(target, layouts[1], judged, replaced_ns)
                is_there = False
            judged = None
        with Bandwidth(self._remote.bytes_per_second) as bandwidth:
            copying = Copying(bandwidth, upload.progress, lambda _done, _total: None, may_go_on=False)
            beside = self._beside(upload.name)
            self._count(copying.run(source, target, overwrite=is_there, replaces=judged, beside=beside))
        # It may have been saved again before it was read.
        self._write_down(upload.name, self._committed_ns(target))

    def _make_room(
        self, target: str, layout: str | None, judged: storage.Identity | None, replaced_ns: int | None
    ) -> None:
        """Removes what a step is to replace in a store, where no act replaces a checkpoint of Orbax's, or by
        one. Until the copy is there, the directory alone has the step."""
        if layout == "orbax":
            orbax_in_store.withdraw(target, expected=judged)
        else:
            commit.withdraw(target, new_attempt_id(), created_ns=replaced_ns)

    def _committed_ns(self, path: str) -> int:
        """When a checkpoint was committed; in the order of steps, one that does not say it comes first."""
        return step_records.committed_ns(path) or 0

    def _beside(self, name: str) -> str | None:
        """The youngest other step there, to whose files a step may refer."""
        if not self._reuse_unchanged:
            return None
        others = self.versions.ours(
            found for found in self.place.catalogue.committed() if found.path.name != name
        )
        youngest = os.fspath(others[-1].path) if others else None
        return youngest if youngest is not None and layout_at(youngest) == "native" else None

    def _write_down(self, name: str, committed_ns: int, replaced_ns: int | None = None) -> None:
        with self._changing:
            order = self.versions.order()
            present = self._local.catalogue.committed()
            self._record.begin(name, committed_ns, present, replaced_ns=replaced_ns, order=order)

    def _is_wanted(self, info: Info) -> bool:
        """Whether the policy would keep a step."""
        if info.commit_timestamp_nsecs is None:
            info = described(info)
        self._collector.with_records()
        there = self.place.catalogue.committed()
        others = self.versions.current_of_ours(found for found in there if found.step != info.step)
        infos = sorted([*others, info], key=self.versions.age)
        flags = self._policy.should_preserve(infos, context=PreservationContext())
        # By comparison it would be found as well, for which metrics would have to be read.
        place = next(number for number, other in enumerate(infos) if other is info)
        return bool(flags[place])

    def _count(self, done: CopyStatistics) -> None:
        with self._lock:
            self._statistics = dataclasses.replace(
                self._statistics,
                uploads=self._statistics.uploads + 1,
                uploaded_bytes=self._statistics.uploaded_bytes
                + done.nbytes
                - done.found_bytes
                - done.shared_bytes,
            )

    def tell(self) -> None:
        """Warns of what the program has not heard of."""
        with self._lock:
            untold, self._untold = self._untold, None
            notices, self._notices = self._notices, []
        if untold is not None:
            notices.append(f"the upload to '{self.place.root}' has failed: {untold}")
        for notice in notices:
            warnings.warn(notice, RemoteWarning, stacklevel=_ABOVE)

    # ---- deleting, and the end -------------------------------------------------------------------

    def delete(self, step: int, options: Options) -> bool:
        """Deletes a step there, in the primary; returns in all processes whether it was there.

        Raises:
            Conflict: Another program has replaced the step there; it stays.
            WaystationError: What is there cannot be listed, or not removed; the step stays.
        """
        session = self.place.session(f"delete the uploaded step {step}", options)
        try:
            was_there = session.broadcast(lambda: self._delete(step)) == b"deleted"
        finally:
            session.close()
        self.place.catalogue.drop([step])
        self.versions.forget(step)
        return was_there

    def _delete(self, step: int) -> bytes:
        self._look()
        with self._lock:
            was_waiting = self._waiting.pop(step, None) is not None
        try:
            self._stop(step)
            with self._changing:
                info = self.place.catalogue.find(step)
                if info is None:
                    return b""
                self._withdraw(info)
                self.place.catalogue.drop([step])
                self._record.forget([info.path.name])
                self.versions.forget(step)
        except BaseException:
            if was_waiting:
                self._upload_all([step])
            raise
        return b"deleted"

    def _withdraw(self, info: Info) -> None:
        path = os.fspath(info.path)
        try:
            withdraw(path, created_ns=info.commit_timestamp_nsecs)
        except Conflict as error:
            raise Conflict(
                f"'{path}' is not the checkpoint that this program knows there: another one has replaced it, "
                "so it stays; look at it, and then call reload, and delete the step again",
                path=path,
            ) from error

    def _stop(self, step: int) -> None:
        """Ends the upload of a step that does not wait for one any more. What that has committed before is in
        the catalogue then."""
        with self._lock:
            if self._lease is not None and self._lease[0] == step:
                self._let_go()
            upload = self._current
            if upload is None or upload.step != step:
                return
            upload.is_withdrawn = True
        upload.progress.cancel()
        upload.has_ended.wait()
        if upload.name and self.versions.version_of_ours(self._target(upload.name)) is not None:
            self.place.catalogue.commit(self._there(upload))

    def wait(self, options: Options, *, is_last: bool = False, together: bool = True) -> None:
        """Waits for the uploads, after another try of those that have failed; then all processes know what
        is there.

        Args:
            options: Of the call.
            is_last: Whether nothing is raised of failures that were raised before.
            together: Whether the other processes take part; else each waits for its own.

        Raises:
            WaystationError: What some have failed with.
        """
        with self._lock:
            self._start()
        if together:
            self._wait_together(options, is_last=is_last)
        else:
            while not self._wait_a_while(is_last=is_last):
                pass
        self.tell()

    def _wait_together(self, options: Options, *, is_last: bool) -> None:
        session = self.place.session("wait for uploads", options)
        try:
            while not (found := session.broadcast(lambda: self._wait_a_while(is_last=is_last))):
                pass
            if not session.is_primary:
                self.versions.take_over(Listing.decode(found))
        finally:
            session.close()

    def _wait_a_while(self, *, is_last: bool) -> bytes:
        """What is there once nothing is uploaded any more; nothing while something is."""
        with self._lock:
            running = self._running
        if running is not None:
            if not running.wait(_ROUND_S):
                return b""
            error = running.exception()
            if error is not None:
                with self._lock:
                    self._untold = None
                raise error
            return b""  # another one may have begun
        self._raise_failure(is_last=is_last)
        return self._encoded()

    def _raise_failure(self, *, is_last: bool) -> None:
        with self._lock:
            failure, waiting = self._failure, set(self._waiting)
            if failure is None:
                return
            self._untold = None
            if is_last and waiting <= self._raised:
                return
            self._raised |= waiting
        raise failure

    def close(self) -> None:
        """Keeps nothing from being collected any more; the uploads have been waited for."""
        with self._lock:
            self._let_go()
