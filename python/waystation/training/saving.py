"""Saves the checkpoint of a step, then tells everybody, and collects what is not wanted any more.

What can go wrong, in order: the state is refused, or the save fails or is killed: the step is as it was.
Killed after the commit: the step is there, and the next collection makes up for what was not removed. The
policy that says what to keep fails: the step is there, and the save raises that error.

What is in the place of a step and is no checkpoint is renamed: it would stop every restart of a run there. A
checkpoint that the storage did not let go is replaced: the program does not know it any more. One that
another program has saved meanwhile stays.

Several saves may run at once. Each has a session for what comes after its commit, which is opened with those
of the save itself: so sessions come in the same order in all processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from waystation import storage
from waystation._errors import Conflict, Unsupported
from waystation._options import Options
from waystation.checkpoint.handlers.choice import METRICS
from waystation.checkpoint.native_saving import EarlierCheckpoint
from waystation.checkpoint.paths import is_checkpoint
from waystation.checkpoint.save import check_checkpointables, in_background, open_saving, write
from waystation.checkpoint.saving import check_name
from waystation.coordination import Session
from waystation.layouts.native.records import callers_json
from waystation.storage.foreign import described as described_foreign
from waystation.training.catalogue import Info, described, from_json, relocated, to_json
from waystation.training.collection import Collector
from waystation.training.costs import SaveCost, SaveCosts
from waystation.training.errors import DamagedCheckpointWarning, StepAlreadyExistsError
from waystation.training.in_flight import StepResponse
from waystation.training.place import Place
from waystation.training.step_metadata import CheckpointMetadata, as_step
from waystation.transfers.handle import Progress

_ABOVE = 5  # frames of this package between a warning and the program's own call


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be saved.

    Attributes:
        step: The step.
        checkpointables: What is saved, by name.
        overwrite: Whether to replace a checkpoint of the step.
        metrics: Of the step; None for none.
        custom_metadata: The caller's own.
        begun_ns: When the call began, nanoseconds since 1970, by which what it has saved in several places is
            known to be the same.
    """

    step: int
    checkpointables: Mapping[str, Any]
    overwrite: bool
    metrics: Any
    custom_metadata: Any
    begun_ns: int

    @classmethod
    def of(
        cls,
        step: object,
        checkpointables: dict[str, Any],
        overwrite: bool,
        metrics: Any,
        custom_metadata: Any,
    ) -> Self:
        """What a call asks for.

        Raises:
            InvalidInput: The step or a name cannot be one.
        """
        check_checkpointables(checkpointables)
        for name in checkpointables:
            check_name(name)  # also where the policy says no, as in Orbax
        return cls(
            as_step(step), checkpointables, overwrite, _plain(metrics), custom_metadata, time.time_ns()
        )

    def parts(self) -> dict[str, Any]:
        """All that the checkpoint is to hold."""
        if self.metrics is None:
            return dict(self.checkpointables)
        return {**self.checkpointables, METRICS: callers_json(self.metrics, "metrics", allow_nan=True)}


@contextlib.contextmanager
def _naming_step(info: Info, *, overwrite: bool) -> Iterator[None]:
    """Tells what is raised where another program has saved the step since this one has looked as what it is.

    Raises:
        StepAlreadyExistsError: The step has a checkpoint.
    """
    try:
        yield
    except Conflict as error:
        path = os.fspath(info.path)
        about = error.context.get("path")
        is_about_step = about is not None and storage.resolved(str(about)) == storage.resolved(path)
        if overwrite or isinstance(error, StepAlreadyExistsError) or not is_about_step:
            raise
        if not is_checkpoint(path):
            raise
        raise StepAlreadyExistsError(
            f"step {info.step} has a checkpoint already, which this Checkpointer does not list: '{path}'; "
            "give overwrite=True to replace it, or call reload to have it listed",
            step=info.step,
            path=path,
        ) from error


def _tell_of(aside: Sequence[str], info: Info) -> None:
    for path in aside:
        foreign = described_foreign(path)
        what = "no checkpoint; to" if foreign is None else f"no checkpoint of Waystation, but {foreign}. To"
        warnings.warn(
            f"what was at '{info.path}' is {what} save step {info.step} there, it was renamed to '{path}'. "
            "Remove it once you need nothing of it",
            DamagedCheckpointWarning,
            stacklevel=_ABOVE,
        )


def _plain(metrics: Any) -> Any:
    """Metrics with Python numbers in the place of scalars of NumPy, JAX and torch."""
    if isinstance(metrics, dict):
        return {name: _plain(value) for name, value in metrics.items()}
    if isinstance(metrics, list | tuple):
        return [_plain(value) for value in metrics]
    is_scalar = callable(getattr(metrics, "item", None)) and getattr(metrics, "shape", None) == ()
    return metrics.item() if is_scalar else metrics


class Saver:
    """Saves the steps of one `Checkpointer`.

    Args:
        place: Where.
        collector: Removes what is not wanted any more.
        costs: Is told what a save costs.
        reuse_unchanged: Whether a step shares data files with the newest one where arrays are equal.

    Attributes:
        on_committed: Called in the primary with each step that is committed, before anything is removed, and
            with whether the program has asked for an earlier version to be replaced.
        on_told: Called in the other processes with each checkpoint that is committed, once they know.
    """

    def __init__(
        self,
        place: Place,
        collector: Collector,
        costs: SaveCosts,
        *,
        reuse_unchanged: bool = False,
    ) -> None:
        self._place = place
        self._collector = collector
        self._costs = costs
        self._reuse_unchanged = reuse_unchanged
        self.on_committed: Callable[[int, bool], None] = lambda _step, _overwrite: None
        self.on_told: Callable[[Info], None] = lambda _info: None

    def save(self, request: Request, options: Options) -> None:
        """Saves, and returns when that is done."""
        begun = time.monotonic()
        info = self._described(request)
        aside: list[str] = []
        earlier = self._earlier(options)
        overwrite = request.overwrite or self._collector.gives_way(request.step)
        with self._telling(info, options) as session, _naming_step(info, overwrite=overwrite):

            def on_committed() -> None:
                self._costs.record(SaveCost(time.monotonic() - begun, 0.0))
                self._tell(info, session, options, overwrite=request.overwrite)

            try:
                write(
                    info.path,
                    request.parts(),
                    overwrite,
                    request.custom_metadata,
                    begun_ns=request.begun_ns,
                    on_set_aside=aside.append,
                    earlier=earlier,
                    on_committed=on_committed,
                )
            finally:
                _tell_of(aside, info)

    def save_async(self, request: Request, options: Options) -> StepResponse:
        """Saves in the background; returns once the state may change."""
        begun = time.monotonic()
        unblocked: list[float] = []  # when that was
        step, info, is_asked_for = request.step, self._described(request), request.overwrite
        overwrite = is_asked_for or self._collector.gives_way(step)
        aside: list[str] = []
        earlier = self._earlier(options)

        # What goes on in the background must not hold the request, or the state could not be freed.
        with contextlib.ExitStack() as stack:
            stack.enter_context(_naming_step(info, overwrite=overwrite))
            session = stack.enter_context(self._telling(info, options))
            until_told = contextlib.ExitStack()

            def on_committed() -> None:
                now = time.monotonic()
                blocking_s = (unblocked[0] if unblocked else now) - begun
                self._costs.record(SaveCost(blocking_s, now - begun - blocking_s))
                self._tell(info, session, options, overwrite=is_asked_for)

            def respond(what: str, work: Callable[[Progress], None]) -> StepResponse:
                until_told.push(stack.pop_all())

                def run(progress: Progress) -> bool:
                    with until_told:
                        work(progress)
                    return True

                return StepResponse(step, what, run, is_save=True)

            saving = open_saving(
                info.path,
                overwrite=overwrite,
                timeout_s=options.asynchronous.timeout_secs,
                begun_ns=request.begun_ns,
                on_set_aside=aside.append,
                earlier=earlier,
            )
            try:
                response = in_background(
                    saving,
                    request.parts(),
                    request.custom_metadata,
                    respond=respond,
                    on_committed=on_committed,
                )
            finally:
                _tell_of(aside, info)
        unblocked.append(time.monotonic())
        return response

    def _earlier(self, options: Options) -> EarlierCheckpoint | None:
        """The newest checkpoint of the sequence, if files are to be shared with it. It may go at any time.

        Raises:
            Unsupported: Checkpoints of this kind share none. The first save says so, not the second.
        """
        if not self._reuse_unchanged:
            return None
        if options.array.saving.use_ocdbt is not None or options.multiprocessing.primary_host is None:
            root = os.fspath(self._place.root)
            raise Unsupported(
                f"the Checkpointer of '{root}' has reuse_unchanged=True, and Orbax's layouts and storage of "
                "each process's own share no files; leave it out, or save in the native layout to storage "
                "that all processes share",
                path=root,
            )
        committed = self._place.catalogue.committed_by_age()
        return EarlierCheckpoint(os.fspath(committed[-1].path)) if committed else None

    def _described(self, request: Request) -> Info:
        return CheckpointMetadata(
            request.step,
            self._place.path_of(request.step),
            metadata=None,
            init_timestamp_nsecs=request.begun_ns,
            custom_metadata=request.custom_metadata,
            metrics=request.metrics,
        )

    @contextlib.contextmanager
    def _telling(self, info: Info, options: Options) -> Iterator[Session]:
        """Lists a step as one that is being saved, and has a session to tell the others how that ended."""
        session = self._place.session(f"tell of step {info.step}", options)
        self._place.catalogue.begin(info)
        try:
            yield session
        finally:
            self._place.catalogue.abandon(info.step)
            session.close()

    def _tell(self, info: Info, session: Session, options: Options, *, overwrite: bool) -> None:
        """Tells all processes that a step is committed, and removes what is not wanted any more."""
        catalogue = self._place.catalogue
        with contextlib.ExitStack() as until_removed:
            decide = partial(self._decide, info, overwrite, until_removed)
            try:
                decision = session.round(lambda: b"", decide)
            except BaseException:
                if info.step in catalogue.in_flight():
                    catalogue.commit(info)  # it is there all the same
                raise
            committed, *going = [
                relocated(from_json(entry), self._place.root) for entry in json.loads(decision)
            ]
            if not session.is_primary:
                self.on_told(committed)
                catalogue.commit(committed)
                catalogue.drop(other.step for other in going)
            if session.is_primary or options.multiprocessing.primary_host is None:
                self._collector.remove(going)
        if going:
            session.barrier()

    def _decide(
        self, info: Info, overwrite: bool, until_removed: contextlib.ExitStack, _: Sequence[bytes]
    ) -> bytes:
        """What the primary says: the checkpoint that is there now, and those that go."""
        committed = described(info)
        self._place.catalogue.commit(committed)
        self.on_committed(committed.step, overwrite)
        going = until_removed.enter_context(self._collector.chosen())
        return json.dumps([to_json(committed), *map(to_json, going)]).encode()
