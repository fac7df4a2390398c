"""`ReadingCheckpointer`: the part of a `Checkpointer` that looks and loads.

What is asked of a step by number is asked of that step. What is asked of no step in particular is asked of
the newest that is whole.
"""

from __future__ import annotations

import contextvars
import functools
import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from typing_extensions import deprecated

from waystation import storage
from waystation._options import Options
from waystation.checkpoint.handlers.choice import STATE
from waystation.checkpoint.load import (
    asked_for,
    load,
    load_async,
    load_checkpointables,
    load_checkpointables_async,
)
from waystation.checkpoint.loading import Loading
from waystation.checkpoint.metadata import checkpointables_metadata, metadata
from waystation.checkpoint.paths import locate
from waystation.checkpoint.sessions import process_count
from waystation.frameworks.mesh_in_effect import with_mesh_in_effect
from waystation.training import root_metadata
from waystation.training.errors import StepNotFoundError
from waystation.training.logger import Logger
from waystation.training.place import Place
from waystation.training.remote import OpenRemote, RemoteStatistics
from waystation.training.restoring import Restorer
from waystation.training.step_metadata import CheckpointMetadata, RootMetadata, as_step, stored_metrics
from waystation.training.step_names import PathLike
from waystation.training.tiers import OpenTier, TierStatistics, Wish, merged
from waystation.transfers.handle import AsyncResponse, Progress

T = TypeVar("T")
Step = int | CheckpointMetadata[Any]


class ReadingCheckpointer:
    """See `Checkpointer`."""

    def __init__(self, place: Place, logger: Logger) -> None:
        self._tier: OpenTier | None = None
        self._remote: OpenRemote | None = None
        self._place = place
        self._restorer = Restorer(place)
        self._logger = logger

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: '{self._place.root}'>"

    @property
    def directory(self) -> storage.AnyPath:
        """Where the checkpoints are: a `pathlib.Path`, or a `waystation.path.Location` in an object store."""
        return storage.as_path(self._place.root)

    @property
    def latest(self) -> CheckpointMetadata[None] | None:
        """The committed checkpoint of the greatest step, in memory or in the directory; None if there is
        none."""
        known = self.checkpoints
        return known[-1] if known else None

    @property
    def checkpoints(self) -> Sequence[CheckpointMetadata[None]]:
        """The committed checkpoints, ascending, as far as this `Checkpointer` knows without looking again
        (`reload`); those that are known to be damaged are not among them. `tiers` says where each is."""
        committed = self._place.catalogue.committed()
        if self._remote is not None:
            committed = merged(committed, self._remote.checkpoints(), preferred=0)
        return committed if self._tier is None else merged(self._tier.checkpoints(), committed)

    @property
    def damaged(self) -> Sequence[CheckpointMetadata[None]]:
        """The checkpoints that are known to be damaged, ascending. A save of such a step replaces it."""
        return self._place.catalogue.damaged()

    @property
    def tier_statistics(self) -> TierStatistics | None:
        """What the memory tier has done so far in this process; None if there is none."""
        return None if self._tier is None else self._tier.statistics

    @property
    def remote_statistics(self) -> RemoteStatistics | None:
        """What this process has uploaded so far; None if there is no remote."""
        return None if self._remote is None else self._remote.statistics

    # ---- loading -------------------------------------------------------------------------------

    def load(
        self, step: Step | None = None, abstract_state: Any = None, *, checkpointable_name: str = STATE
    ) -> Any:
        """Loads the state of a step.

        With a memory tier, the newest is taken from there unless the directory has a newer one, and what
        cannot be loaded from memory comes from an older version or from the directory, with a warning. With a
        remote, what the directory does not have, or has damaged, comes from there. A step
        that is asked for by number comes from the directory if it is there.

        Args:
            step: The step; None for the newest that is whole. Where newer ones turn out to be damaged, a
                `DamagedCheckpointWarning` names them, and they are not listed any more.
            abstract_state: As `waystation.load` takes it.
            checkpointable_name: Which checkpointable the state is.

        Returns:
            The state.

        Raises:
            StepNotFoundError: The step has no checkpoint, or there is none at all.
            Corrupt: It is damaged; with no step given, all are.
            WaystationError: What `waystation.load` raises.
        """
        return self._load(step, _Wanted.state(abstract_state, checkpointable_name))

    def load_checkpointables(
        self, step: Step | None = None, abstract_checkpointables: Any = None
    ) -> dict[str, Any]:
        """Loads several things of a step; takes a step as `load` does, and raises what it raises.

        Args:
            step: The step; None for the newest that is whole.
            abstract_checkpointables: As `waystation.load_checkpointables` takes them.
        """
        return self._load(step, _Wanted.checkpointables(abstract_checkpointables))

    def load_async(
        self, step: Step | None = None, abstract_state: Any = None, *, checkpointable_name: str = STATE
    ) -> AsyncResponse[Any]:
        """Loads the state of a step in the background; takes what `load` takes, and its handle raises what
        that raises.
        """
        return self._load_async(step, _Wanted.state(abstract_state, checkpointable_name))

    def load_checkpointables_async(
        self, step: Step | None = None, abstract_checkpointables: Any = None
    ) -> AsyncResponse[dict[str, Any]]:
        """Loads several things of a step in the background, as `load_async` does."""
        return self._load_async(step, _Wanted.checkpointables(abstract_checkpointables))

    def _load(self, step: Step | None, wanted: _Wanted[T]) -> T:
        number = None if step is None else as_step(step)
        begun = time.monotonic()
        was_in_tier = self._is_in_tier(number)
        with self._place.options() as options:
            found = self._load_from_tier(number, wanted, options)
            if found is None:
                try:
                    info, loaded = self._restorer.run(number, options, wanted.now)
                except StepNotFoundError as error:
                    if was_in_tier:
                        raise self._not_from_tier(error) from error
                    raise
                found = info.step, loaded
        self._log("restore", found[0], begun, is_asynchronous=False)
        return found[1]

    def _load_from_tier(self, step: int | None, wanted: _Wanted[T], options: Options) -> tuple[int, T] | None:
        """The step and what was loaded, if the tier above the directory has something better than this."""
        if self._tier is None:
            return None
        return self._tier.load(Wish(step, wanted.names), options, wanted.through)

    def _is_in_tier(self, step: int | None) -> bool:
        """Whether the tier above the directory has a step, or any."""
        known = [] if self._tier is None else self._tier.checkpoints()
        return any(step in (None, info.step) for info in known)

    def _not_from_tier(self, error: StepNotFoundError) -> StepNotFoundError:
        """What is raised of a step that only the tier has, and that could not be loaded from there."""
        failure = None if self._tier is None else self._tier.statistics.last_failure
        why = "" if failure is None else f": {failure}"
        return StepNotFoundError(
            f"{error.message}. It was in memory only, and could not be loaded from there{why}",
            **error.context,
        )

    def _load_async(self, step: Step | None, wanted: _Wanted[T]) -> AsyncResponse[T]:
        number = None if step is None else as_step(step)
        with self._place.options() as options:
            if process_count(options) == 1:
                if self._tier is None:
                    self._restorer.existing(number)
                load = with_mesh_in_effect(functools.partial(self._load, step, wanted))
                # The thread is to see the options of this call.
                run: Callable[[], T] = functools.partial(contextvars.copy_context().run, load)
            else:
                # Sessions come in the same order in all processes only if this thread opens them. Memory is
                # read while the caller waits, since it is over soon.
                found = self._load_from_tier(number, wanted, options)
                run = (
                    self._restorer.begin(
                        number, options, wanted.in_background, with_mesh_in_effect(wanted.now)
                    )
                    if found is None
                    else functools.partial(operator.itemgetter(1), found)
                )
        what = "the newest step" if number is None else f"step {number}"
        return AsyncResponse(f"loading {what} of '{self.directory}'", lambda _: run())

    # ---- looking -------------------------------------------------------------------------------

    def metadata(self, step: Step | None = None) -> CheckpointMetadata[Any]:
        """What is known of a step that the directory has, with the abstract state of its state as `metadata`.

        Args:
            step: The step; None for the newest there.

        Raises:
            StepNotFoundError: The directory has no checkpoint of the step.
            WaystationError: What `waystation.metadata` raises.
        """
        return self._metadata(step, metadata)

    def checkpointables_metadata(self, step: Step | None = None) -> CheckpointMetadata[dict[str, Any]]:
        """What is known of a step, with a dict of what is known of its checkpointables as `metadata`.

        Takes and raises what `metadata` does.
        """
        return self._metadata(step, checkpointables_metadata)

    def _metadata(self, step: Step | None, read: Callable[[storage.AnyPath], Any]) -> CheckpointMetadata[Any]:
        number = None if step is None else as_step(step)
        with self._place.options() as options:
            try:
                info, found = self._restorer.run(number, options, self._together(read, options))
            except StepNotFoundError as error:
                if not self._is_in_tier(number):
                    raise
                raise StepNotFoundError(
                    f"{error.message}. Memory has {'others' if number is None else 'it'}, of which only "
                    "`checkpoints` tells; `load` loads them",
                    **error.context,
                ) from error
        return CheckpointMetadata(
            info.step,
            info.path,
            metadata=found.metadata,
            init_timestamp_nsecs=found.init_timestamp_nsecs,
            commit_timestamp_nsecs=found.commit_timestamp_nsecs,
            custom_metadata=found.custom_metadata,
            metrics=stored_metrics(info),
        )

    def _together(
        self, read: Callable[[storage.AnyPath], T], options: Options
    ) -> Callable[[storage.AnyPath], T]:
        """Has all processes read the same, and fail if one does."""

        def run(path: storage.AnyPath) -> T:
            found: list[T] = []

            def work() -> bytes:
                found.append(read(path))
                return b""

            session = self._place.session(f"look at '{path.name}'", options)
            try:
                session.round(work, lambda _: b"")
            finally:
                session.close()
            return found[0]

        return run

    def root_metadata(self) -> RootMetadata:
        """What is known of the whole sequence.

        Raises:
            Corrupt: It cannot be read.
        """
        with self._place.options():
            found = root_metadata.read(self._place.root)
        return RootMetadata(directory=self.directory, custom_metadata=found)

    def _log(
        self, event: str, step: int, begun: float, *, is_asynchronous: bool, waited_s: float | None = None
    ) -> None:
        entry = {
            "event_type": event,
            "step": step,
            "directory": str(self.directory),
            "synchronous": not is_asynchronous,
            "blocking_s": time.monotonic() - begun,
        }
        self._logger.log_entry(entry if waited_s is None else {**entry, "waited_s": waited_s})

    # ---- older names ---------------------------------------------------------------------------

    @deprecated("use load")
    def load_pytree(self, *args: Any, **kwargs: Any) -> Any:
        """`load`."""
        return self.load(*args, **kwargs)

    @deprecated("use load_async")
    def load_pytree_async(self, *args: Any, **kwargs: Any) -> AsyncResponse[Any]:
        """`load_async`."""
        return self.load_async(*args, **kwargs)

    @deprecated("use metadata")
    def pytree_metadata(self, *args: Any, **kwargs: Any) -> CheckpointMetadata[Any]:
        """`metadata`."""
        return self.metadata(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class _Wanted(Generic[T]):
    """What is to be loaded of a step: how to, how to in the background, and how to of a load that was
    opened, of the checkpointables of these names."""

    now: Callable[[storage.AnyPath], T]
    in_background: Callable[[storage.AnyPath], AsyncResponse[T]]
    through: Callable[[Loading], T]
    names: Sequence[str] | None

    @classmethod
    def state(cls, abstract: Any, name: str) -> _Wanted[Any]:
        wanted = abstract.metadata if isinstance(abstract, CheckpointMetadata) else abstract
        return _Wanted(
            lambda path: load(path, wanted, checkpointable_name=name),
            lambda path: load_async(path, wanted, checkpointable_name=name),
            lambda loading: loading.run(wanted, Progress()),
            [name],
        )

    @classmethod
    def checkpointables(cls, abstract: Any) -> _Wanted[dict[str, Any]]:
        wanted = abstract.metadata if isinstance(abstract, CheckpointMetadata) else abstract

        def through(loading: Loading) -> dict[str, Any]:
            loading.begin(abstracts, Progress())
            return loading.end()

        names, abstracts = asked_for(wanted)
        return _Wanted(
            lambda path: load_checkpointables(path, wanted),
            lambda path: load_checkpointables_async(path, wanted),
            through,
            names,
        )


def root_of(directory: PathLike) -> str:
    """The location of the directory in which checkpoints are to be.

    Raises:
        InvalidInput: It cannot be one.
    """
    locate(directory)
    return storage.located(directory)
