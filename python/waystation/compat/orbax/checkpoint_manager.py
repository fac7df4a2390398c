"""`CheckpointManager`: the checkpoints of a run, of version 0 of Orbax's interface.

It stands on `training.Checkpointer`, which saves, commits, removes and reads. This file adds what is visible
of version 0: options, items with their arguments, and which steps a program sees. A step is seen from the
call that saves it, and one that the options do not keep is not seen from that call on, while both happen in
the background.

In a program of several processes all of them make every call, in the same order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from waystation import storage
from waystation._errors import (
    InvalidInput,
    StepAlreadyExistsError,
    StepNotFoundError,
    Unsupported,
)
from waystation.checkpoint.context import Context, copy_of_current
from waystation.checkpoint.handlers.choice import METRICS
from waystation.compat.orbax import _items
from waystation.compat.orbax import args as args_lib
from waystation.compat.orbax.args import Composite
from waystation.compat.orbax.metadata import RootMetadata, StepMetadata
from waystation.compat.orbax.options import (
    AsyncOptions,
    AtomicityOptions,
    FileOptions,
    MultiprocessingOptions,
    apply_async,
    apply_files,
    apply_multiprocessing,
    context_with,
)
from waystation.coordination import jax_preemption
from waystation.training import opening, root_metadata
from waystation.training import preservation_policies as preserve
from waystation.training import save_decision_policies as decide
from waystation.training.checkpointer import Checkpointer as Sequencer
from waystation.training.logger import StandardLogger
from waystation.training.place import Place
from waystation.training.preservation_policies import PreservationContext, PreservationPolicy
from waystation.training.reading import ReadingCheckpointer, root_of
from waystation.training.save_decision_policies import DecisionContext, SaveDecisionPolicy
from waystation.training.step_metadata import CheckpointMetadata, as_step
from waystation.training.step_names import NameFormat, standard_name_format

__all__ = [
    "AsyncOptions",
    "CheckpointManager",
    "CheckpointManagerOptions",
    "FileOptions",
    "MultiprocessingOptions",
    "RootMetadata",
    "StepAlreadyExistsError",
    "StepMetadata",
]

DEFAULT_ITEM_NAME = "default"
METRIC_ITEM_NAME = METRICS
METADATA_ITEM_NAME = "metadata"
RESERVED_ITEM_NAMES: list[str] = []

_log = logging.getLogger("waystation")
Info = CheckpointMetadata[None]


@dataclasses.dataclass
class CheckpointManagerOptions:
    """Options of a `CheckpointManager`.

    Attributes:
        save_interval_steps: Save at multiples of this; the first step of a run always.
        max_to_keep: How many checkpoints stay; None for all.
        keep_time_interval: Of those that would go, keep one in so much time.
        keep_period: Of those that would go, keep multiples of this.
        best_fn: Says of the metrics of a step how good it is; then the best ones stay, not the latest.
        best_mode: `max` or `min`.
        keep_checkpoints_without_metrics: With `best_fn`, keep all that have no metrics.
        step_prefix: What stands before the number in the name of a directory.
        step_format_fixed_length: To how many digits the number is padded.
        step_name_format: The names of directories, instead of these two.
        create: Make the directory at once; else the first save makes it.
        cleanup_tmp_directories: Remove what interrupted saves have left.
        save_on_steps: Save at these steps, too.
        single_host_load_and_broadcast: Has no effect: one process always lists the steps for all.
        todelete_subdir: Move checkpoints to a directory of this name instead of removing them.
        todelete_full_path: Refused but for None: it is about a store that cannot be reached.
        enable_background_delete: Has no effect: saves in the background remove in the background.
        num_deletion_threads: Has no effect.
        read_only: Save and remove nothing.
        enable_async_checkpointing: Save in the background.
        async_options: Saves in the background.
        multiprocessing_options: The processes that take part.
        should_save_fn: Says of a step, and of the last one, whether to save; instead of intervals and steps.
        file_options: Files.
        atomicity_options: How a checkpoint becomes visible.
        save_root_metadata: Keep the metadata of the sequence.
        temporary_path_class: Refused but for None.
        save_decision_policy: When to save, instead of all options about that.
        preservation_policy: What to keep, instead of all options about that.
        prevent_write_metrics: Do not write metrics; they count in this program.
        enable_should_save_is_saving_in_progress_check: If False, policies are told that no save is running.
        enable_per_process_directory_creation: Has no effect; needs `primary_host` to be None.
        lightweight_initialize: Do not read the metrics and times of checkpoints at first, where no option
            needs them.
    """

    save_interval_steps: int = 1
    max_to_keep: int | None = None
    keep_time_interval: datetime.timedelta | None = None
    keep_period: int | None = None
    best_fn: Callable[[Any], float] | None = None
    best_mode: str = "max"
    keep_checkpoints_without_metrics: bool = True
    step_prefix: str | None = None
    step_format_fixed_length: int | None = None
    step_name_format: NameFormat | None = None
    create: bool = True
    cleanup_tmp_directories: bool = False
    save_on_steps: Iterable[int] | None = None
    single_host_load_and_broadcast: bool = False
    todelete_subdir: str | None = None
    todelete_full_path: str | None = None
    enable_background_delete: bool = False
    num_deletion_threads: int | None = None
    read_only: bool = False
    enable_async_checkpointing: bool = True
    async_options: AsyncOptions | None = None
    multiprocessing_options: MultiprocessingOptions = dataclasses.field(
        default_factory=MultiprocessingOptions
    )
    should_save_fn: Callable[[int, int | None], bool] | None = None
    file_options: FileOptions = dataclasses.field(default_factory=FileOptions)
    atomicity_options: AtomicityOptions | None = None
    save_root_metadata: bool = True
    temporary_path_class: type[Any] | None = None
    save_decision_policy: SaveDecisionPolicy | None = None
    preservation_policy: PreservationPolicy | None = None
    prevent_write_metrics: bool = False
    enable_should_save_is_saving_in_progress_check: bool = True
    enable_per_process_directory_creation: bool = False
    lightweight_initialize: bool = False

    def __post_init__(self) -> None:
        if self.save_interval_steps < 1:
            raise InvalidInput(f"save_interval_steps must be 1 or more, not {self.save_interval_steps}")
        if self.best_mode not in ("min", "max"):
            raise InvalidInput(f"best_mode must be 'min' or 'max', not {self.best_mode!r:.60}")
        if self.max_to_keep is not None and self.max_to_keep < 0:
            raise InvalidInput(f"max_to_keep must be None or 0 or more, not {self.max_to_keep}")
        of_deletion = (self.max_to_keep, self.keep_time_interval, self.keep_period)
        if self.preservation_policy is not None and any(value is not None for value in of_deletion):
            raise InvalidInput(
                "preservation_policy says all of what stays; leave out max_to_keep, keep_time_interval and "
                "keep_period"
            )
        if self.enable_per_process_directory_creation and (
            self.multiprocessing_options.primary_host is not None
        ):
            raise InvalidInput(
                "enable_per_process_directory_creation is for processes with a storage of their own: set "
                "multiprocessing_options.primary_host to None"
            )
        if self.todelete_full_path is not None:
            raise Unsupported(
                "todelete_full_path must be None: checkpoints are moved within their directory only, see "
                "todelete_subdir"
            )
        if self.save_on_steps is not None:
            self.save_on_steps = frozenset(self.save_on_steps)

    def name_format(self) -> NameFormat:
        """The names of directories."""
        return self.step_name_format or standard_name_format(
            step_prefix=self.step_prefix, step_format_fixed_length=self.step_format_fixed_length
        )

    @property
    def is_light(self) -> bool:
        """Whether the metrics and times of checkpoints are left unread."""
        needing = (self.best_fn, self.keep_time_interval, self.preservation_policy, self.save_decision_policy)
        return self.lightweight_initialize and all(option is None for option in needing)

    def save_policy(self) -> SaveDecisionPolicy:
        """When to save."""
        if self.save_decision_policy is not None:
            return _Told(self.save_decision_policy, self)
        policies: list[SaveDecisionPolicy] = [decide.PreemptionCheckpointingPolicy()]
        if self.should_save_fn is not None:
            policies.append(_ByFunction(self.should_save_fn))
        else:
            policies += [decide.InitialSavePolicy(), _Interval(self.save_interval_steps)]
            if self.save_on_steps is not None:
                policies.append(decide.SpecificStepsPolicy(frozenset(self.save_on_steps)))
        return decide.AnySavePolicy(policies)

    def policy_of_keeping(self) -> PreservationPolicy:
        """What to keep."""
        if self.preservation_policy is not None:
            return self.preservation_policy
        if self.max_to_keep is None:
            return preserve.PreserveAll()
        first: PreservationPolicy = preserve.LatestN(self.max_to_keep)
        if self.best_fn is not None:
            first = preserve.BestN(
                get_metric_fn=self.best_fn,
                reverse=self.best_mode == "min",
                n=self.max_to_keep,
                keep_checkpoints_without_metrics=self.keep_checkpoints_without_metrics,
            )
        policies = [first]
        if self.keep_time_interval is not None:
            seconds: Any = self.keep_time_interval.total_seconds()
            policies.append(preserve.EveryNSeconds(seconds))
        if self.keep_period is not None:
            policies.append(preserve.EveryNSteps(self.keep_period))
        return preserve.AnyPreservationPolicy(policies)

    def changes(self, context: Context) -> None:
        """Sets the options of a context."""
        apply_multiprocessing(self.multiprocessing_options, context)
        apply_files(self.file_options, self.atomicity_options, self.temporary_path_class, context)
        apply_async(self.async_options, context)


@dataclasses.dataclass
class _Interval(SaveDecisionPolicy):
    """Saves at multiples of a number."""

    interval: int
    is_same_everywhere = True

    def should_save(self, step: Info, previous_steps: Sequence[Info], *, context: DecisionContext) -> bool:
        return step.step % self.interval == 0


@dataclasses.dataclass
class _ByFunction(SaveDecisionPolicy):
    """Saves when a function of the program says so."""

    function: Callable[[int, int | None], bool]

    def should_save(self, step: Info, previous_steps: Sequence[Info], *, context: DecisionContext) -> bool:
        return bool(self.function(step.step, previous_steps[-1].step if previous_steps else None))


@dataclasses.dataclass
class _Told(SaveDecisionPolicy):
    """A policy of the program."""

    policy: SaveDecisionPolicy
    options: CheckpointManagerOptions

    def should_save(self, step: Info, previous_steps: Sequence[Info], *, context: DecisionContext) -> bool:
        if not self.options.enable_should_save_is_saving_in_progress_check:
            context = dataclasses.replace(context, is_saving_in_progress=False)
        return self.policy.should_save(step, previous_steps, context=context)


class _Seen:
    """The steps that a program sees, by age; what it does not see any more the core is to remove.

    As a preservation policy it keeps what is seen, what other programs have saved, and what gives way to a
    step whose save has not ended.

    Attributes:
        infos: What is seen.
        in_flight: Says which steps are being saved.
        beginning: A step that will be, if nothing is in the way.
    """

    def __init__(self, policy: PreservationPolicy) -> None:
        self._policy = policy
        self.infos: list[Info] = []
        self.in_flight: Callable[[], Collection[int]] = tuple
        self._gone: dict[int, int] = {}  # with the step that each gives way to
        self.beginning: int | None = None

    def saved(self) -> tuple[list[Info], dict[int, int]]:
        """What `restore` takes."""
        return self.infos, dict(self._gone)

    def restore(self, before: tuple[list[Info], dict[int, int]]) -> None:
        """As it was before."""
        self.infos, self._gone = before

    def begin(self, infos: Sequence[Info]) -> None:
        """These are there."""
        self.infos = list(infos)
        for info in infos:
            self._gone.pop(info.step, None)

    @contextlib.contextmanager
    def adding(self, info: Info) -> Iterator[None]:
        """A step begins to be saved within the block; what is not kept beside it is not seen any more. If the
        block fails, it is seen again."""
        before = self.saved()
        self.beginning = info.step
        try:
            self._add(info)
            yield
        except BaseException:
            self.restore(before)
            raise
        finally:
            self.beginning = None

    def _add(self, info: Info) -> None:
        known = [*(other for other in self.infos if other.step != info.step), info]
        flags = self._policy.should_preserve(known, context=PreservationContext())
        gone = {other.step: info.step for other, keeps in zip(known, flags, strict=True) if not keeps}
        self._gone.pop(info.step, None)
        self._gone = {**self._gone, **gone}
        self.infos = [other for other, keeps in zip(known, flags, strict=True) if keeps]

    def recount(self, infos: Sequence[Info]) -> None:
        """These are there or being saved, after one that was could not be."""
        flags = self._policy.should_preserve(infos, context=PreservationContext())
        self.infos = [info for info, keeps in zip(infos, flags, strict=True) if keeps]
        gone = [info.step for info, keeps in zip(infos, flags, strict=True) if not keeps]
        self._gone = dict.fromkeys(gone, infos[-1].step if infos else 0)

    def drop(self, step: int) -> None:
        """A step is not there any more."""
        self.infos = [info for info in self.infos if info.step != step]

    def should_preserve(self, checkpoints: Sequence[Info], *, context: PreservationContext) -> Sequence[bool]:
        """See `PreservationPolicy`."""
        unsure = {self.beginning, *self.in_flight()} - {info.step for info in checkpoints}
        gone = self._gone
        return [info.step not in gone or gone[info.step] in unsure for info in checkpoints]


class _Core(Sequencer):
    """The checkpoints of one manager, by the core."""

    def __init__(self, directory: str, seen: _Seen, **options: Any) -> None:
        super().__init__(directory, preservation_policy=seen, **options)
        self._decisions.known = lambda: seen.infos
        seen.in_flight = self._place.catalogue.in_flight

    def known(self) -> list[Info]:
        """The steps that are there or being saved, by age."""
        return self._place.catalogue.known_by_age()

    def is_known(self, step: int) -> bool:
        """Whether a step is there or being saved."""
        return self._place.catalogue.is_known(step)

    def described(self, step: int, metrics: Any) -> Info:
        """What is known of a step that is about to be saved."""
        now = time.time_ns()
        return CheckpointMetadata(
            step, self._place.path_of(step), metadata=None, init_timestamp_nsecs=now, metrics=metrics
        )

    def wait_for(self, step: int) -> None:
        """Waits until nothing is being done to a step any more."""
        self._in_flight.wait_for_step(step)

    def raise_failure(self) -> None:
        """Raises what has failed, unless somebody has heard of it."""
        self._in_flight.raise_failure()


class _Reading(ReadingCheckpointer):
    """Checkpoints that are read only; their directory may not be there."""

    def __init__(self, place: Place, *, with_records: bool) -> None:
        super().__init__(place, StandardLogger())
        self._with_records = with_records
        self.reload()

    def reload(self) -> None:
        """Looks into the directory again."""
        with self._place.options() as options:
            opening.look_again(self._place, options, with_records=self._with_records)


class CheckpointManager:
    """Manages the checkpoints of a run.

    Example:
        ```python
        options = CheckpointManagerOptions(max_to_keep=3)
        with CheckpointManager("run", options=options) as manager:
            for step in range(steps):
                state = train_step(state)
                manager.save(step, args=args.StandardSave(state))
            state = manager.restore(manager.latest_step(), args=args.StandardRestore(abstract_state))
        ```

    Args:
        directory: The directory of the checkpoints, or a location in an object store.
        checkpointers: In older programs: the checkpointer of the items, or of each by name.
        options: Options.
        metadata: A dict of JSON values to keep with the whole sequence; that of the first manager stays.
        item_names: The names of items, whose handlers follow from their arguments.
        item_handlers: The handler of the item, or of each by name.
        logger: Receives an entry for each save and restore.
        handler_registry: Which handler takes which item.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        checkpointers: Any = None,
        options: CheckpointManagerOptions | None = None,
        metadata: Mapping[str, Any] | None = None,
        item_names: Sequence[str] | None = None,
        item_handlers: Any = None,
        logger: Any = None,
        handler_registry: Any = None,
    ) -> None:
        self._options = options or CheckpointManagerOptions()
        self._metadata = metadata
        self._is_single: bool | None = None
        given = {
            "checkpointers": checkpointers,
            "item_names": item_names,
            "item_handlers": item_handlers,
            "handler_registry": handler_registry,
        }
        self._items = self._items_of(given)
        self._seen = _Seen(self._options.policy_of_keeping())
        self._metrics: dict[int, Any] = {}  # of this program's saves
        context = copy_of_current()
        self._options.changes(context)
        self._core: _Core | None = None
        self._begin: Callable[[], _Core] | None = None  # of a directory that is not there yet
        self._reader: ReadingCheckpointer = self._opened(directory, context, logger)
        self._look()

    # ---- what was given -------------------------------------------------------------------------

    def _items_of(self, given: Mapping[str, Any]) -> _items.Items:
        """The items, by whichever of the arguments says them."""
        named = [name for name, value in given.items() if value]
        registry = given["handler_registry"]
        for first, others in (
            ("handler_registry", ("item_names", "item_handlers", "checkpointers")),
            ("checkpointers", ("item_names", "item_handlers")),
        ):
            both = [name for name in others if first in named and name in named]
            if both:
                raise InvalidInput(f"{first} and {both[0]} both say the items; give one of them")
        handlers = given["item_handlers"] or given["checkpointers"] or {}
        self._is_legacy = bool(given["checkpointers"])
        if not isinstance(handlers, Mapping):
            handlers = {DEFAULT_ITEM_NAME: handlers}
            self._is_single = True
        elif handlers or given["item_names"] or registry is not None:
            self._is_single = False
        if registry is not None:
            self._is_single = None if not any(item for item, _ in registry.get_all_entries()) else False
        handlers = {name: getattr(value, "handler", value) for name, value in handlers.items()}
        for name, handler in handlers.items():
            if isinstance(handler, type) or not callable(getattr(handler, "restore", None)):
                shown = handler.__name__ if isinstance(handler, type) else f"a {type(handler).__name__}"
                raise InvalidInput(
                    f"item '{name}' must have a handler or a checkpointer, an object with save and restore, "
                    f"not {shown}; options are given by their name, options=…"
                )
        return _items.Items(given["item_names"] or (), handlers, registry)

    def _opened(
        self, directory: str | os.PathLike[str], context: Context, logger: Any
    ) -> ReadingCheckpointer:
        options = self._options
        root = root_of(directory)
        if options.read_only:
            place = Place(root, options.name_format(), context)
            return _Reading(place, with_records=not options.is_light)

        def begin() -> _Core:
            return _Core(
                root,
                self._seen,
                context=context,
                save_decision_policy=options.save_policy(),
                step_name_format=options.name_format(),
                custom_metadata=dict(self._metadata)
                if self._metadata and options.save_root_metadata
                else None,
                cleanup_tmp_directories=options.cleanup_tmp_directories,
                lightweight_initialize=options.is_light,
                logger=logger,
                removed_to=options.todelete_subdir,
            )

        if not options.create and not storage.is_in_store(root) and not storage.is_there(root):
            self._begin = begin
            return _Reading(Place(root, options.name_format(), context), with_records=not options.is_light)
        self._core = begin()
        return self._core

    def _saving(self) -> _Core | None:
        """What saves; None where nothing may. Without `create` the first save makes the directory."""
        if self._begin is not None:
            self._core, self._begin = self._begin(), None
            self._reader = self._core
            self._look()
        return self._core

    def _look(self) -> None:
        self._metrics = {}
        self._seen.begin(self._reader.checkpoints)

    @property
    def directory(self) -> Any:
        """The directory of the checkpoints."""
        return self._reader.directory

    # ---- steps ----------------------------------------------------------------------------------

    def all_steps(self, read: bool = False) -> Sequence[int]:
        """The steps, by age; with `read`, those that are in the directory now."""
        if read:
            self.reload()
        return [info.step for info in self._known()]

    def _known(self) -> list[Info]:
        """What is seen, without what could not be saved."""
        core = self._core
        if core is None:
            return self._seen.infos
        beginning = self._seen.beginning  # of another thread
        if not all(core.is_known(info.step) or info.step == beginning for info in self._seen.infos):
            self._seen.recount(core.known())  # a save has failed: what it was to replace stays
        return self._seen.infos

    def latest_step(self) -> int | None:
        """The step that was saved last; None if there is none."""
        known = self._known()
        return known[-1].step if known else None

    def best_step(self) -> int | None:
        """The step with the best metrics by `best_fn`, else the latest; None if there is none."""
        best_fn = self._options.best_fn
        if best_fn is None:
            return self.latest_step()
        pairs = ((info.step, self._metrics_of(info)) for info in self._known())
        measured = [(step, metrics) for step, metrics in pairs if metrics is not None]
        if not measured:
            return None
        is_less_better = self._options.best_mode == "min"
        ranked = sorted(measured, key=lambda pair: best_fn(pair[1]), reverse=is_less_better)
        return ranked[-1][0]

    def _metrics_of(self, info: Info) -> Any:
        kept = self._metrics.get(info.step)
        return info.metrics if kept is None else kept

    def metrics(self, step: int) -> Any:
        """The metrics that the checkpoint of a step has, if there is `best_fn`; None if it has none."""
        is_unwritten = self._options.prevent_write_metrics and step in self._metrics
        if self._options.best_fn is None or is_unwritten:
            return None
        return next((self._metrics_of(info) for info in self._known() if info.step == step), None)

    def reload(self) -> None:
        """Looks into the directory again, for what other programs have changed there."""
        core = self._core
        if core is not None:
            core.reload()
        elif isinstance(self._reader, _Reading):
            self._reader.reload()
        self._look()

    def should_save(self, step: int) -> bool:
        """Whether `save` would save a step."""
        core = self._saving()
        return core is not None and core.should_save(as_step(step))

    def reached_preemption(self, step: int) -> bool:
        """Whether this is the step to save at because the program will be ended."""
        return jax_preemption.reached_sync_point(step)

    # ---- saving ---------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        items: Any = None,
        save_kwargs: Any = None,
        metrics: Any = None,
        force: bool | None = False,
        args: Any = None,
        custom_metadata: dict[str, Any] | None = None,
    ) -> bool:
        """Saves the items of a step, if the options say so.

        Args:
            step: The step.
            items: In older programs: the item, or each by name.
            save_kwargs: More arguments of their classes.
            metrics: JSON values that tell good checkpoints from bad ones, if there is `best_fn`.
            force: Save whatever the options say.
            args: The arguments of the item, or a `Composite` of several.
            custom_metadata: JSON values to keep with the checkpoint.

        Returns:
            Whether it was saved, or is being saved.

        Raises:
            StepAlreadyExistsError: The step has a checkpoint, and `force` is True. (A ValueError.)
            ValueError: The arguments are not those of the items.
            WaystationError: What an earlier save in the background has failed with.
        """
        own = self._arguments(items, save_kwargs, args)
        core = self._saving()
        if core is None:
            _log.warning("step %s is not saved: the manager of '%s' is read-only", step, self.directory)
            return False
        number = as_step(step)
        if not force and not core.should_save(number):
            return False
        prepared = {name: (self._items.for_save(name, value), value) for name, value in own.items()}
        if not prepared:
            raise InvalidInput("there is no item to save; give args")
        self._save(core, number, _items.saved(prepared), metrics, custom_metadata)
        return True

    def _save(self, core: _Core, step: int, saved: _items.Saved, metrics: Any, custom_metadata: Any) -> None:
        options = self._options
        if any(info.step == step for info in self._known()):
            path = core.described(step, None).path
            raise StepAlreadyExistsError(
                f"step {step} has a checkpoint already: '{path}'", step=step, path=str(path)
            )
        core.wait_for(step)  # which may have been removed, by the program's view of it
        counted = metrics if options.best_fn is not None else None
        act = (
            core.save_checkpointables_async
            if options.enable_async_checkpointing
            else core.save_checkpointables
        )
        # First: what is not kept beside it goes with its commit, which may come at once.
        with self._seen.adding(core.described(step, counted)), context_with(options.changes, *saved.changes):
            act(
                step,
                saved.checkpointables,
                force=True,
                overwrite=core.is_known(step),  # the only one that is whole, which the core has kept
                metrics=None if options.prevent_write_metrics else counted,
                custom_metadata=custom_metadata,
            )
        self._metrics[step] = counted

    def _arguments(self, items: Any, save_kwargs: Any, args: Any) -> dict[str, Any]:
        """The arguments of each item."""
        if args is None and items is not None:
            return self._of_older(items, save_kwargs, for_save=True)
        if args is None:
            raise InvalidInput("there is no item to save; give args, such as args.StandardSave(state)")
        if not args_lib.is_args(args):
            raise InvalidInput(
                f"args must be arguments such as args.StandardSave, not a {type(args).__name__}"
            )
        self._settle(args)
        return {DEFAULT_ITEM_NAME: args} if self._is_single else dict(args.items())

    def _settle(self, args: Any) -> None:
        """One item without a name or several: the first call decides, and others have to be alike."""
        is_composite = isinstance(args, Composite) or type(args).__name__ == "CompositeArgs"
        if self._is_single is None:
            self._is_single = not is_composite
        if self._is_single and is_composite:
            raise InvalidInput(
                "this manager has one item without a name, and args are a Composite of several"
            )
        if not self._is_single and not is_composite:
            raise InvalidInput(
                "this manager has items with names: args must be a Composite of their arguments"
            )

    def _of_older(self, items: Any, kwargs: Any, *, for_save: bool) -> dict[str, Any]:
        """The arguments of items that are given as they are."""
        if self._is_single is None:
            self._is_single = True
        given = {DEFAULT_ITEM_NAME: items} if self._is_single else dict(items or {})
        more = {DEFAULT_ITEM_NAME: kwargs or {}} if self._is_single else dict(kwargs or {})
        made = {}
        for name in {**given, **more}:
            handler = self._items.known_handler(name)
            if handler is None:
                raise InvalidInput(
                    f"item '{name}' has no handler; give args, such as args.StandardSave(state)"
                )
            kind: Any = _items.Plain
            if args_lib.has_registered_args(handler):
                kind = args_lib.get_registered_args_cls(handler)[0 if for_save else 1]
            made[name] = kind(given.get(name), **(more.get(name) or {}))
        return made

    # ---- restoring ------------------------------------------------------------------------------

    def restore(
        self,
        step: int | None,
        items: Any = None,
        restore_kwargs: Any = None,
        directory: str | os.PathLike[str] | None = None,
        args: Any = None,
    ) -> Any:
        """Restores the items of a step.

        Args:
            step: The step; None for the latest.
            items: In older programs: the item to restore, or each by name.
            restore_kwargs: More arguments of their classes.
            directory: That of another sequence, to restore from.
            args: The arguments of the item, or a `Composite` of several; None for what was saved.

        Returns:
            The item, or a `Composite` of several.

        Raises:
            FileNotFoundError: There is no such step.
            KeyError: The checkpoint has no such item.
            ValueError: It is not what is asked for.
        """
        if step is None:
            step = self.latest_step()
            if step is None:
                raise StepNotFoundError(
                    f"there is no checkpoint in '{self.directory}'", path=str(self.directory)
                )
        path = self._path_of(as_step(step), directory)
        with context_with(self._options.changes):
            found = _items.Found.at(path)
            wanted: Any = None
            if args is not None:
                if not args_lib.is_args(args):
                    raise InvalidInput(
                        f"args must be arguments such as args.StandardRestore, not a {type(args).__name__}"
                    )
                self._settle(args)
                wanted = {DEFAULT_ITEM_NAME: args} if self._is_single else dict(args.items())
            elif items is not None or restore_kwargs is not None:
                wanted = self._of_older(items, restore_kwargs, for_save=False)
            elif self._is_single is None:
                self._is_single = set(found.items) == {DEFAULT_ITEM_NAME}
            restored = self._restore(found, wanted)
        if self._is_single:
            return restored[DEFAULT_ITEM_NAME]
        return restored

    def _restore(self, found: _items.Found, wanted: Any) -> Composite:
        if self._is_single and wanted is None:
            wanted = {DEFAULT_ITEM_NAME: None}
        return self._items.restore(found.path, wanted, found)

    def _path_of(self, step: int, directory: str | os.PathLike[str] | None = None) -> str:
        """The checkpoint of a step, which is committed.

        Raises:
            StepNotFoundError: There is none.
        """
        if self._core is not None and directory is None:
            self._core.wait_for(step)
        root = storage.located(self.directory if directory is None else directory)
        try:
            return os.fspath(self._options.name_format().find_step(root, step).path)
        except ValueError as error:
            raise StepNotFoundError(
                f"there is no checkpoint of step {step} in '{root}'", step=step, path=root
            ) from error

    # ---- looking --------------------------------------------------------------------------------

    def item_metadata(self, step: int) -> Any:
        """What is known of the items of a step: a `Composite` of several, or of the one without a name.

        Raises:
            FileNotFoundError: There is no such step.
        """
        return self._described(as_step(step)).item_metadata

    def metadata(self, step: int | None = None) -> RootMetadata | StepMetadata:
        """What is known of a step, or without one of the whole sequence.

        Raises:
            FileNotFoundError: There is no such step.
        """
        if step is not None:
            return self._described(as_step(step))
        with context_with(self._options.changes):
            found = root_metadata.read(storage.located(self.directory))
        if not found and self._metadata and self._core is None:
            found = dict(self._metadata)
        return RootMetadata(custom_metadata=found)

    def _described(self, step: int) -> StepMetadata:
        path = self._path_of(step)
        with context_with(self._options.changes):
            described = self._items.metadata(path)
        items = described.item_metadata
        is_single = self._is_single
        if is_single is None:
            is_single = set(items) - {METRICS} == {DEFAULT_ITEM_NAME}
        if is_single:
            described.item_metadata = items.get(DEFAULT_ITEM_NAME)
        if self._options.best_fn is not None:
            described.metrics = self.metrics(step) or {}
        return described

    # ---- the end --------------------------------------------------------------------------------

    def delete(self, step: int) -> None:
        """Removes the checkpoint of a step.

        Raises:
            FileNotFoundError: There is none.
        """
        number = as_step(step)
        core = self._saving() if number in self.all_steps() else self._core
        if self._options.read_only:
            _log.warning("step %s is not removed: the manager of '%s' is read-only", step, self.directory)
            return
        if core is None or number not in self.all_steps():
            raise StepNotFoundError(
                f"there is no checkpoint of step {number} in '{self.directory}'",
                step=number,
                path=str(self.directory),
            )
        self._seen.drop(number)
        with context_with(self._options.changes):
            core.delete(number)

    def is_saving_in_progress(self) -> bool:
        """Whether a save has not ended."""
        return self._core is not None and self._core.is_saving_in_progress()

    def check_for_errors(self) -> None:
        """Raises what a save that has ended has failed with."""
        if self._core is not None:
            self._core.raise_failure()

    def wait_until_finished(self) -> None:
        """Waits for everything in the background.

        Raises:
            WaystationError: What something has failed with.
        """
        if self._core is not None:
            self._core.wait()

    def close(self) -> None:
        """Waits for everything in the background, and lets go of everything; idempotent.

        Raises:
            WaystationError: What something has failed with.
        """
        try:
            if self._core is not None:
                self._core.close()
        finally:
            self._items.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
