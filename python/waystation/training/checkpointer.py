"""`Checkpointer`: a sequence of checkpoints in one directory, one for each step that is saved.

It decides when to save (`decisions`), saves (`saving`), removes what is not wanted any more (`collection`),
and loads the newest checkpoint that is whole (`restoring`). This file is its surface, and adds what holds for
calls of all kinds: the options in effect, that nothing is begun after `close`, and that a failure in the
background is told once.

In a program of several processes all of them make every call, in the same order. Calls from several threads
of a process are safe.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from types import TracebackType
from typing import Any, Self

from typing_extensions import deprecated

from waystation import _forks
from waystation._errors import InvalidInput, WrongType
from waystation._options import Options
from waystation.checkpoint.context import Context, copy_of_current
from waystation.checkpoint.handlers.choice import STATE
from waystation.checkpoint.sessions import is_primary
from waystation.training import deleting, opening
from waystation.training.collection import Collector
from waystation.training.costs import SaveCosts
from waystation.training.decisions import Decisions
from waystation.training.errors import StepAlreadyExistsError
from waystation.training.in_flight import SavesInFlight
from waystation.training.logger import Logger, StandardLogger
from waystation.training.place import Place
from waystation.training.preservation_policies import PreservationPolicy, PreserveAll
from waystation.training.reading import ReadingCheckpointer, Step, root_of
from waystation.training.remote import OpenRemote, Remote
from waystation.training.save_decision_policies import SaveDecisionPolicy, default_policy
from waystation.training.saving import Request, Saver
from waystation.training.step_metadata import as_step
from waystation.training.step_names import NameFormat, PathLike, standard_name_format
from waystation.training.tiers import Tier
from waystation.transfers.handle import AsyncResponse

_log = logging.getLogger("waystation")
_MOST_SHOWN = 5

# What each argument has to have, and what to give. Another object would fail at the first save only.
_NEEDED = {
    "save_decision_policy": ("should_save", "a policy of training.save_decision_policies"),
    "preservation_policy": ("should_preserve", "a policy of training.preservation_policies"),
    "step_name_format": ("find_all", "a name format of waystation.path.step"),
    "logger": ("log_entry", "an object with a method log_entry"),
    "memory": ("open", "a waystation.memory.MemoryTier"),
}


def _few(steps: list[int]) -> str:
    """Steps for people, the last ones of many."""
    return ", ".join(map(str, steps)) if len(steps) <= _MOST_SHOWN else f"… {_few(steps[-_MOST_SHOWN:])}"


def _check_arguments(**arguments: object) -> None:
    for name, value in arguments.items():
        method, wanted = _NEEDED[name]
        if value is None or (not isinstance(value, type) and callable(getattr(value, method, None))):
            continue
        given = f"the class {value.__name__}; call it" if isinstance(value, type) else f"{value!r:.60}"
        raise WrongType(f"{name} must be {wanted} or None, not {given}")


def _check_saves_in_flight(count: object) -> None:
    if not isinstance(count, int) or isinstance(count, bool):
        raise WrongType(f"max_saves_in_flight must be an integer, not {count!r:.60}")
    if count < 1:
        raise InvalidInput(f"max_saves_in_flight must be 1 or more, not {count}")


class Checkpointer(ReadingCheckpointer):
    """Manages the checkpoints of a training run: saves steps, removes old ones, and loads.

    Example:
        ```python
        with Checkpointer("run", preservation_policy=preservation_policies.LatestN(3)) as checkpointer:
            start = 0
            if checkpointer.latest is not None:
                start, state = checkpointer.latest.step + 1, checkpointer.load(None, abstract_state)
            for step in range(start, steps):
                state = train_step(state)
                checkpointer.save_async(step, state)
        ```

    Args:
        directory: The directory of the sequence, which is created, or a location in an object store
            (`s3://bucket/run`). Each checkpoint is a directory in it, named by its step.
        context: The options of all calls outside of a context's block; by default those in effect here.
        save_decision_policy: Which steps to save. By default whenever no earlier save is running, and when
            the program has been told that it will be ended.
        preservation_policy: Which checkpoints to keep; by default all.
        step_name_format: The names of directories; by default the number of the step.
        custom_metadata: A dict of JSON values to keep with the whole sequence. Existing metadata of the
            directory stay.
        cleanup_tmp_directories: Remove leftovers of interrupted saves: those of Waystation whose process is
            certainly dead, and all of Orbax.
        lightweight_initialize: Read nothing of the checkpoints at first. Their times and metrics are unknown
            until they are needed.
        logger: Receives an entry for each save and load.
        max_saves_in_flight: Maximum number of saves in the background. Another one waits.
        memory: A tier above the directory, `waystation.memory.MemoryTier`. Saves also go there, as often as
            its own policy says, and loads prefer a newer version there. Its failures are warnings.
        reuse_unchanged: Do not write arrays again that are equal to those of the newest committed checkpoint:
            the new one shares its data files, if enough of them is unchanged, as with `unchanged_from` of
            `save`. So do the steps of a remote in an object store.
        remote: A `Remote` below the directory, to which steps are copied in the background. Loads take from
            there what the directory does not have whole. Its failures are warnings, until `wait` or `close`.
        removed_to: A directory in that of the sequence, to which steps are moved instead of being removed.

    Raises:
        InvalidInput: An argument cannot be one; the remote is the directory itself, inside it, or around it.
        Conflict: The remote is that of another sequence of checkpoints.
    """

    def __init__(
        self,
        directory: PathLike,
        *,
        context: Context | None = None,
        save_decision_policy: SaveDecisionPolicy | None = None,
        preservation_policy: PreservationPolicy | None = None,
        step_name_format: NameFormat | None = None,
        custom_metadata: dict[str, Any] | None = None,
        cleanup_tmp_directories: bool = False,
        lightweight_initialize: bool = False,
        logger: Logger | None = None,
        max_saves_in_flight: int = 1,
        memory: Tier | None = None,
        reuse_unchanged: bool = False,
        remote: Remote | None = None,
        removed_to: str | None = None,
    ) -> None:
        _check_saves_in_flight(max_saves_in_flight)
        if not isinstance(reuse_unchanged, bool):
            raise WrongType(f"reuse_unchanged must be True or False, not {reuse_unchanged!r:.60}")
        _check_arguments(
            save_decision_policy=save_decision_policy,
            preservation_policy=preservation_policy,
            step_name_format=step_name_format,
            logger=logger,
            memory=memory,
        )
        if remote is not None and not isinstance(remote, Remote):
            raise WrongType(f"remote must be a waystation.training.Remote or None, not {remote!r:.60}")
        own = copy_of_current() if context is None else Context(context)
        place = Place(root_of(directory), step_name_format or standard_name_format(), own, removed_to)
        super().__init__(place, logger or StandardLogger())
        costs = SaveCosts()
        policy = preservation_policy or PreserveAll()
        self._with_records = not lightweight_initialize
        self._in_flight = SavesInFlight(max_saves_in_flight)
        collector = Collector(place, policy)
        self._saver = Saver(place, collector, costs, reuse_unchanged=reuse_unchanged)
        if remote is not None:
            self._remote = OpenRemote(
                remote, place, root_of(remote.directory), reuse_unchanged=reuse_unchanged
            )
            self._restorer.remote = self._remote.place
            self._restorer.in_remote = self._remote.versions.current
            # Not by way of this object: in a circle it would keep what its tiers have mapped.
            self._saver.on_committed = self._remote.committed
            self._saver.on_told = self._remote.versions.told
        self._decisions = Decisions(place, self._in_flight, costs, save_decision_policy or default_policy())
        self._deleter = deleting.Deleter(place)
        self._beginning = threading.RLock()  # one save or deletion begins at a time
        _forks.watch(self)
        self._is_closed = False
        self._told_of: set[int] = set()  # steps later than one that was saved
        with place.options() as options:
            opening.check(place, options, has_tier=memory is not None, has_remote=remote is not None)
            opening.open_directory(
                place,
                options,
                custom_metadata,
                clean_up=cleanup_tmp_directories,
                with_records=self._with_records,
                remote=None if self._remote is None else self._remote.place.root,
            )
            if self._remote is not None:
                self._remote.take_stock(options)
            self._tier = None if memory is None else memory.open(place, options, self._logger)

    def begin_in_child(self) -> None:
        """See `waystation._forks.Watched`."""
        self._beginning = threading.RLock()

    # ---- when ----------------------------------------------------------------------------------

    def should_save(self, step: Step) -> bool:
        """Whether `save` would save this step: it comes after the one that was saved last, and the policy
        says so; or that of the memory tier does."""
        number = as_step(step)
        with self._place.options() as options, self._beginning:
            in_tier = self._tier is not None and self._tier.should_save(number, options)
            return self._decisions.should_save(number, options) or in_tier

    @property
    def is_preempted(self) -> bool:
        """Whether the program was told that it will be ended, as the last save or `should_save` has found."""
        return self._decisions.is_preempted

    # ---- saving --------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: Any,
        *,
        checkpointable_name: str = STATE,
        force: bool = False,
        overwrite: bool = False,
        metrics: Any = None,
        custom_metadata: Any = None,
    ) -> bool:
        """Saves a state as the checkpoint of a step, if the policy says so.

        Waits first until there are fewer saves in the background than there may be, and until the memory tier
        has kept the step before.

        Args:
            step: The step.
            state: What `waystation.save` takes.
            checkpointable_name: Under which name the state stands in the checkpoint.
            force: Save whatever the policy says.
            overwrite: Replace a checkpoint of this step. It stays whole until the new one is, also if the
                policy says not to save.
            metrics: A JSON value that tells good checkpoints from bad ones (`preservation_policies.BestN`).
            custom_metadata: A JSON value to keep with the checkpoint.

        Returns:
            Whether it was saved to the directory.

        Raises:
            StepAlreadyExistsError: The step has a checkpoint, and `overwrite` is False.
            WaystationError: What `waystation.save` raises; or what an earlier save in the background failed
                with, if nobody has heard of that.
        """
        return self.save_checkpointables(
            step,
            {checkpointable_name: state},
            force=force,
            overwrite=overwrite,
            metrics=metrics,
            custom_metadata=custom_metadata,
        )

    def save_async(
        self,
        step: int,
        state: Any,
        *,
        checkpointable_name: str = STATE,
        force: bool = False,
        overwrite: bool = False,
        metrics: Any = None,
        custom_metadata: Any = None,
    ) -> AsyncResponse[bool] | None:
        """Saves a state in the background; takes what `save` takes.

        It never waits for the memory tier: that leaves out a step if it has not kept the one before yet
        (`tier_statistics.skipped`).

        Returns:
            The handle, whose `result()` is True once the step is committed and what is not wanted any more
            is removed; None if the policy says not to save. If it fails and is not asked for its result, the
            next save, `wait` or `close` raises the error.
        """
        return self.save_checkpointables_async(
            step,
            {checkpointable_name: state},
            force=force,
            overwrite=overwrite,
            metrics=metrics,
            custom_metadata=custom_metadata,
        )

    def save_checkpointables(
        self,
        step: int,
        checkpointables: dict[str, Any],
        *,
        force: bool = False,
        overwrite: bool = False,
        metrics: Any = None,
        custom_metadata: Any = None,
    ) -> bool:
        """Saves several things as the checkpoint of a step, if the policy says so.

        Takes and returns what `save` does, with what `waystation.save_checkpointables` takes.
        """
        request = Request.of(step, checkpointables, overwrite, metrics, custom_metadata)
        begun = time.monotonic()
        with self._place.options() as options, self._beginning:
            waited_s = self._turn_of(request, options, force=force, waits=True)
            if waited_s is None:
                return False
            self._saver.save(self._over_damaged(request), options)
            self._decisions.has_saved()
        self._log("save", request.step, begun, is_asynchronous=False, waited_s=waited_s)
        return True

    def save_checkpointables_async(
        self,
        step: int,
        checkpointables: dict[str, Any],
        *,
        force: bool = False,
        overwrite: bool = False,
        metrics: Any = None,
        custom_metadata: Any = None,
    ) -> AsyncResponse[bool] | None:
        """Saves several things in the background; takes what `save_checkpointables` takes.

        Returns:
            What `save_async` returns.
        """
        request = Request.of(step, checkpointables, overwrite, metrics, custom_metadata)
        begun = time.monotonic()
        with self._place.options() as options, self._beginning:
            waited_s = self._turn_of(request, options, force=force, waits=False)
            if waited_s is None:
                return None
            response = self._saver.save_async(self._over_damaged(request), options)
            self._in_flight.add(response)
            self._decisions.has_saved()
        self._log("save", request.step, begun, is_asynchronous=True, waited_s=waited_s)
        return response

    def _turn_of(self, request: Request, options: Options, *, force: bool, waits: bool) -> float | None:
        """Saves to memory, and decides about the directory; if it is to have the step, waits until there is
        room for another save.

        Args:
            request: What is saved.
            options: Of the call.
            force: Save whatever the policies say.
            waits: Whether to wait for memory, too, until that has kept the step before.

        Returns:
            The seconds for which it has waited for earlier saves and deletions; None if the directory is not
            to have the step.
        """
        self._require_open()
        if self._remote is not None:
            self._remote.tell()
        if self._tier is not None:
            self._tier.save(request, options, force=force, waits=waits)
        self._in_flight.raise_failure()
        begun = time.monotonic()
        if request.overwrite:
            self._in_flight.wait_for_step(request.step)
        elif self._place.catalogue.is_known(request.step):
            path = self._place.path_of(request.step)
            raise StepAlreadyExistsError(
                f"step {request.step} has a checkpoint already: '{path}'; give overwrite=True to replace it",
                step=request.step,
                path=str(path),
            )
        waited_s = time.monotonic() - begun
        if force:
            self._decisions.reached_preemption(request.step, options)
        elif not self._decisions.should_save(request.step, options, replaced=request.overwrite):
            return None
        self._tell_of_later(request.step, options)
        begun = time.monotonic()
        self._in_flight.wait_for_room()
        return waited_s + time.monotonic() - begun

    def _tell_of_later(self, step: int, options: Options) -> None:
        """Logs, once of the same ones, that later steps are there, which a restart will load."""
        later = [info.step for info in self._place.catalogue.committed() if info.step > step]
        if later and not set(later) <= self._told_of and is_primary(options):
            self._told_of = set(later)
            _log.warning(
                "step %d is saved to '%s' while later steps are there: %s. A program that is started again "
                "loads the greatest step, not this one; to continue from step %d, delete the later ones",
                step,
                self._place.root,
                _few(later),
                step,
            )

    def _over_damaged(self, request: Request) -> Request:
        """A damaged checkpoint of the step gives way."""
        is_damaged = any(info.step == request.step for info in self._place.catalogue.damaged())
        return dataclasses.replace(request, overwrite=True) if is_damaged else request

    def is_saving_in_progress(self) -> bool:
        """Whether a save has not ended."""
        return bool(self._place.catalogue.in_flight() or self._in_flight.running(deletions=False))

    @deprecated("use save")
    def save_pytree(self, *args: Any, **kwargs: Any) -> bool:
        """`save`."""
        return self.save(*args, **kwargs)

    @deprecated("use save_async")
    def save_pytree_async(self, *args: Any, **kwargs: Any) -> AsyncResponse[bool] | None:
        """`save_async`."""
        return self.save_async(*args, **kwargs)

    # ---- deleting ------------------------------------------------------------------------------

    def delete(self, step: Step, *, checkpointable_name: str | None = None, missing_ok: bool = False) -> bool:
        """Deletes the checkpoint of a step, or one of its checkpointables, whatever the policy says.

        Waits first for every save and deletion in the background.

        Args:
            step: The step.
            checkpointable_name: Delete this one only; the others stay.
            missing_ok: Return False instead of raising if it is not there.

        Returns:
            Whether something was deleted.

        Raises:
            StepNotFoundError: The step has no checkpoint.
            NotFound: The checkpoint has no such checkpointable.
            InvalidInput: It has no other one: delete the checkpoint instead.
        """
        return self.delete_async(
            step, checkpointable_name=checkpointable_name, missing_ok=missing_ok
        ).result()

    def delete_async(
        self, step: Step, *, checkpointable_name: str | None = None, missing_ok: bool = False
    ) -> AsyncResponse[bool]:
        """Deletes in the background; takes what `delete` takes, and its handle has what that returns.

        Later saves and deletions wait for it.
        """
        number = as_step(step)
        deleting.check_arguments(checkpointable_name, missing_ok)
        with self._place.options() as options, self._beginning:
            self._require_open()
            self._in_flight.wait()
            if self._tier is not None and checkpointable_name is None:
                missing_ok |= self._tier.forget(number)
            if self._remote is not None and checkpointable_name is None:
                missing_ok |= self._remote.delete(number, options)
            response = self._deleter.begin(number, checkpointable_name, options, missing_ok=missing_ok)
            self._in_flight.add(response)
        return response

    def cancel(self, step: Step | None = None) -> None:
        """Stops saves in the background, and deletes the checkpoint of a step.

        Args:
            step: The step; None stops all saves, and deletes nothing that is committed.
        """
        number = None if step is None else as_step(step)
        with self._place.options(), self._beginning:
            stopped = self._in_flight.running(deletions=False)
            for response in stopped:
                response.cancel()
            for response in stopped:
                response.wait()
                response.exception()  # which is that it was cancelled
        # What is in a remote, the primary alone may know.
        if number is not None and (
            self._remote is not None or self._place.catalogue.find(number) is not None
        ):
            self.delete(number, missing_ok=True)

    # ---- the end -------------------------------------------------------------------------------

    def reload(self) -> None:
        """Looks into the directory again, for what other programs have changed there."""
        with self._place.options() as options, self._beginning:
            self._in_flight.wait()
            opening.look_again(self._place, options, with_records=self._with_records)
            if self._remote is not None:
                self._remote.take_stock(options)

    def wait(self) -> None:
        """Waits for everything in the background. Uploads to a remote that have failed are tried again first,
        and all processes know then what is there.

        Raises:
            WaystationError: What something failed with, if nobody has heard of that; or what an upload fails
                with now.
        """
        self._wait_for_saves()
        if self._remote is not None:
            with self._place.options() as options:
                self._remote.wait(options)

    def _wait_for_saves(self) -> None:
        if self._tier is not None:
            self._tier.wait()
        self._in_flight.wait()

    def close(self) -> None:
        """Waits for everything in the background, and begins nothing any more; idempotent. Uploads to a
        remote that have failed are tried once more.

        Raises:
            WaystationError: What something failed with, if nobody has heard of that.
        """
        self._end(together=True)

    def _end(self, *, together: bool) -> None:
        with self._beginning:
            was_closed, self._is_closed = self._is_closed, True
            if self._tier is not None:
                self._tier.close()
        try:
            self._wait_for_saves()
            if self._remote is not None and not was_closed:
                with self._place.options() as options:
                    self._remote.wait(options, is_last=True, together=together)
        finally:
            if self._remote is not None:
                self._remote.close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise InvalidInput(f"the checkpointer of '{self.directory}' was closed; make another one")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self._end(together=False)  # the error may be of this process alone, and no other one come
        except Exception as failure:
            # It is not to hide the first.
            error.add_note(f"A save in the background has failed, too: {failure}")
