"""What is known of the checkpoints of a sequence: `CheckpointMetadata` of one, `RootMetadata` of all.

Times are nanoseconds since 1970, and None where nothing tells them. Objects are immutable; those of a
sequence's list have `metadata=None`, since no structure is read for a list.
"""

from __future__ import annotations

import dataclasses
import datetime
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from waystation import storage
from waystation._errors import InvalidInput, WrongType

T = TypeVar("T")

# What a time counts as that nothing tells: long ago, and comparable with all others.
UNKNOWN_TIME = datetime.datetime.min.replace(tzinfo=datetime.UTC)


@dataclasses.dataclass(frozen=True, slots=True)
class Unread:
    """What stands in a `CheckpointMetadata` for a value that is read once somebody asks for it.

    Attributes:
        read: Reads it.
        place: Where it is, for other processes.
    """

    read: Callable[[], Any]
    place: Sequence[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointMetadata(Generic[T]):
    """What is known of the checkpoint of one step.

    Attributes:
        step: The step.
        path: Its directory: a `pathlib.Path`, or a `waystation.path.Location` in an object store.
        metadata: What `waystation.metadata` says of its state, or of each of its checkpointables; None in a
            list of checkpoints.
        init_timestamp_nsecs: When its save began.
        commit_timestamp_nsecs: When it was committed.
        custom_metadata: What was given to the save.
        metrics: What was given to the save to tell good checkpoints from bad ones. In an object store they
            are read when they are asked for: of one checkpoint of a list at first, then of all. None, too, if
            the checkpoint has gone before. Corrupt and what else a load raises are raised then.
        tiers: Where it can be loaded from, the fastest first: `memory`, `directory`, `remote`. Of one that
            only memory has, `path` is the directory of the agent, and nothing more is known.
    """

    step: int
    path: storage.AnyPath
    metadata: T = dataclasses.field(kw_only=True)
    init_timestamp_nsecs: int | None = dataclasses.field(default=None, kw_only=True)
    commit_timestamp_nsecs: int | None = dataclasses.field(default=None, kw_only=True)
    custom_metadata: Any = dataclasses.field(default=None, kw_only=True)
    metrics: Any = dataclasses.field(default=None, kw_only=True)
    tiers: tuple[str, ...] = dataclasses.field(default=("directory",), kw_only=True)

    if not TYPE_CHECKING:  # which would take any name for an attribute

        def __getattribute__(self, name: str) -> Any:
            value = object.__getattribute__(self, name)
            return value.read() if type(value) is Unread else value

    @property
    def init_timestamp(self) -> datetime.datetime | None:
        """When its save began, in UTC."""
        return _utc(self.init_timestamp_nsecs)

    @property
    def commit_timestamp(self) -> datetime.datetime | None:
        """When it was committed, in UTC."""
        return _utc(self.commit_timestamp_nsecs)

    @property
    def time(self) -> datetime.datetime:
        """When it was committed, in UTC; of one that is being saved, when that began."""
        return self.commit_timestamp or self.init_timestamp or UNKNOWN_TIME


def stored_metrics(info: CheckpointMetadata[Any]) -> Any:
    """The metrics of a checkpoint; `Unread` where they have not been asked for."""
    return object.__getattribute__(info, "metrics")


def changed(info: CheckpointMetadata[T], **given: Any) -> CheckpointMetadata[T]:
    """The same with other values; metrics that were not asked for stay so."""
    return dataclasses.replace(info, **{"metrics": stored_metrics(info), **given})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RootMetadata:
    """What is known of a whole sequence of checkpoints.

    Attributes:
        directory: Where its checkpoints are.
        custom_metadata: What was given to the first `Checkpointer` there.
    """

    directory: storage.AnyPath
    custom_metadata: Any = None


def as_step(step: object) -> int:
    """The number of a step that is given as an integer of any kind, or as what is known of its checkpoint.

    Raises:
        WrongType: It is neither.
        InvalidInput: It is negative.
    """
    if isinstance(step, CheckpointMetadata):
        return step.step
    if isinstance(step, bool):
        raise WrongType(f"a step must be an integer, not {step}")
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError as error:
        raise WrongType(
            f"a step must be an integer, not {type(step).__name__}; give the step first, then the state"
        ) from error
    if number < 0:
        raise InvalidInput(f"step {number} is negative; steps count from 0")
    return number


def _utc(nanoseconds: int | None) -> datetime.datetime | None:
    if nanoseconds is None:
        return None
    return datetime.datetime.fromtimestamp(nanoseconds / 1e9, tz=datetime.UTC)
