"""Which checkpoints stay: policies that a `Checkpointer` asks each time that it has saved one.

A policy sees all committed checkpoints, and says of each whether it wants to keep it: first those that this
program has found, ascending, then those that it has saved, in this order. What none keeps is removed; but
never one that somebody reads, nor the only good one, whatever the policy says. Policies are asked in the
primary process only.
"""

from __future__ import annotations

import datetime
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, SupportsIndex, runtime_checkable

from waystation._arguments import INTEGER, NUMBER, require_type
from waystation._errors import InvalidInput, WrongType
from waystation.training.step_metadata import CheckpointMetadata

Checkpoints = Sequence[CheckpointMetadata[None]]


@dataclass(frozen=True, kw_only=True)
class PreservationContext:
    """What a policy may take into account besides the checkpoints: nothing as yet."""


@runtime_checkable
class PreservationPolicy(Protocol):
    """Decides which checkpoints stay."""

    def should_preserve(self, checkpoints: Checkpoints, *, context: PreservationContext) -> Sequence[bool]:
        """Says of each checkpoint whether to keep it."""
        ...


@dataclass
class PreserveAll(PreservationPolicy):
    """Keeps everything."""

    def should_preserve(self, checkpoints: Checkpoints, *, context: PreservationContext) -> Sequence[bool]:
        """Keeps each."""
        return [True] * len(checkpoints)


@dataclass
class LatestN(PreservationPolicy):
    """Keeps the last ones.

    Attributes:
        n: How many; None keeps all.
    """

    n: int | None = None

    def __post_init__(self) -> None:
        _check_count("n", self.n)

    def should_preserve(self, checkpoints: Checkpoints, *, context: PreservationContext) -> Sequence[bool]:
        """Keeps the last n."""
        return _last(checkpoints, self.n)


@dataclass
class EveryNSeconds(PreservationPolicy):
    """Keeps the first one, and each that was committed so long after the last one kept.

    Attributes:
        interval_secs: Seconds that lie between, at least.
    """

    interval_secs: int

    def __post_init__(self) -> None:
        check_seconds("interval_secs", self.interval_secs)

    def should_preserve(self, checkpoints: Checkpoints, *, context: PreservationContext) -> Sequence[bool]:
        """Keeps those that are far enough from the one kept before."""
        interval = datetime.timedelta(seconds=self.interval_secs)
        flags: list[bool] = []
        kept: datetime.datetime | None = None
        for checkpoint in checkpoints:
            flags.append(kept is None or checkpoint.time - kept >= interval)
            if flags[-1]:
                kept = checkpoint.time
        return flags


@dataclass
class EveryNSteps(PreservationPolicy):
    """Keeps checkpoints at a distance of so many steps.

    Attributes:
        interval_steps: The distance.
        exact_interval: Keep those whose step is a multiple of it; else the first one, and each that is at
            least so far from the last one kept.
        max_to_keep: Of these, keep only the last so many; None and 0 keep all.
    """

    interval_steps: int
    exact_interval: bool = True
    max_to_keep: int | None = None

    def __post_init__(self) -> None:
        require_type("interval_steps", self.interval_steps, INTEGER, "an integer")
        _check_count("max_to_keep", self.max_to_keep)

    def should_preserve(self, checkpoints: Checkpoints, *, context: PreservationContext) -> Sequence[bool]:
        """Keeps those at the distance."""
        _check_interval(self.interval_steps)
        flags: list[bool] = []
        kept: int | None = None
        for checkpoint in checkpoints:
            if self.exact_interval:
                flags.append(checkpoint.step % self.interval_steps == 0)
                continue
            flags.append(kept is None or checkpoint.step - kept >= self.interval_steps)
            if flags[-1]:
                kept = checkpoint.step
        return _at_most(flags, self.max_to_keep)


@dataclass
class EveryNStepsClosest(PreservationPolicy):
    """Keeps, for every multiple of a number of steps, the checkpoint that is closest to it, and the last one.

    Where steps are irregular this does not drift, as keeping a distance to the last one kept would.

    Attributes:
        interval_steps: The number.
        max_to_keep: Of these, keep only the last so many; None and 0 keep all.
    """

    interval_steps: int
    max_to_keep: int | None = None

    def __post_init__(self) -> None:
        require_type("interval_steps", self.interval_steps, INTEGER, "an integer")
        _check_count("max_to_keep", self.max_to_keep)

    def should_preserve(self, checkpoints: Checkpoints, *, context: PreservationContext) -> Sequence[bool]:
        """Keeps the closest; of two that are equally close, the later."""
        _check_interval(self.interval_steps)
        closest: dict[int, tuple[int, int]] = {}
        for index, checkpoint in enumerate(checkpoints):
            multiple = round(checkpoint.step / self.interval_steps)
            distance = abs(checkpoint.step - multiple * self.interval_steps)
            if multiple not in closest or distance <= closest[multiple][0]:
                closest[multiple] = distance, index
        kept = {index for _, index in closest.values()} | {len(checkpoints) - 1}
        return _at_most([index in kept for index in range(len(checkpoints))], self.max_to_keep)


@dataclass
class CustomSteps(PreservationPolicy):
    """Keeps given steps.

    Attributes:
        steps: The steps.
    """

    steps: Iterable[int]

    def __post_init__(self) -> None:
        if not isinstance(self.steps, Iterable):
            raise WrongType(f"steps must be a list of steps, not {self.steps!r:.60}")
        self.steps = frozenset(self.steps)

    def should_preserve(self, checkpoints: Checkpoints, *, context: PreservationContext) -> Sequence[bool]:
        """Keeps those."""
        steps = frozenset(self.steps)
        return [checkpoint.step in steps for checkpoint in checkpoints]


@dataclass(kw_only=True)
class BestN(PreservationPolicy):
    """Keeps the checkpoints with the best metrics.

    Attributes:
        get_metric_fn: Of the metrics that were given to a save, the number that counts. The greatest is the
            best; what is not a number is the worst.
        reverse: The least is the best.
        n: How many to keep; None keeps all.
        keep_checkpoints_without_metrics: Keep those too that were saved without metrics.
    """

    get_metric_fn: Callable[[Any], float]
    reverse: bool = False
    n: int | None = None
    keep_checkpoints_without_metrics: bool = True

    def __post_init__(self) -> None:
        if not callable(self.get_metric_fn):
            raise WrongType(f"get_metric_fn must be a function of metrics, not {self.get_metric_fn!r:.60}")
        _check_count("n", self.n)

    def _value(self, checkpoint: CheckpointMetadata[None]) -> float:
        try:
            return float(self.get_metric_fn(checkpoint.metrics))
        except Exception as error:
            raise InvalidInput(
                f"get_metric_fn gives no number for the metrics {checkpoint.metrics!r:.100}: "
                f"{type(error).__name__}: {error}",
                step=checkpoint.step,
            ) from error

    def should_preserve(self, checkpoints: Checkpoints, *, context: PreservationContext) -> Sequence[bool]:
        """Keeps the best; of equal ones, the later."""
        if self.n is None or len(checkpoints) <= self.n:
            return [True] * len(checkpoints)
        if self.n == 0:
            return [False] * len(checkpoints)
        values = {
            index: self._value(checkpoint)
            for index, checkpoint in enumerate(checkpoints)
            if checkpoint.metrics is not None
        }
        worst = [index for index, value in values.items() if math.isnan(value)]
        others = [index for index, value in values.items() if not math.isnan(value)]
        ranked = worst + sorted(others, key=values.__getitem__, reverse=self.reverse)
        kept = set(ranked[-self.n :])
        return [
            index in kept or (self.keep_checkpoints_without_metrics and index not in values)
            for index in range(len(checkpoints))
        ]


@dataclass
class LatestDuration(PreservationPolicy):
    """Keeps the checkpoints of the last while, and all after the first of those.

    Attributes:
        duration: How old they may be.
    """

    duration: datetime.timedelta

    def __post_init__(self) -> None:
        if not isinstance(self.duration, datetime.timedelta):
            raise WrongType(f"duration must be a datetime.timedelta, not {self.duration!r:.60}")

    def should_preserve(self, checkpoints: Checkpoints, *, context: PreservationContext) -> Sequence[bool]:
        """Keeps what is not older."""
        now = datetime.datetime.now(tz=datetime.UTC)
        young = (index for index, found in enumerate(checkpoints) if now - found.time <= self.duration)
        return _last(checkpoints, len(checkpoints) - next(young, len(checkpoints)))


@dataclass
class AnyPreservationPolicy(PreservationPolicy):
    """Keeps what any of several policies keeps.

    Attributes:
        policies: These.
    """

    policies: Sequence[PreservationPolicy]

    def __post_init__(self) -> None:
        check_members(self.policies, PreservationPolicy)

    def should_preserve(self, checkpoints: Checkpoints, *, context: PreservationContext) -> Sequence[bool]:
        """Keeps what one of them does."""
        answers = [policy.should_preserve(checkpoints, context=context) for policy in self.policies]
        return [any(flags) for flags in zip(*answers, strict=True)] or [False] * len(checkpoints)


def may_ask_for_metrics(policy: PreservationPolicy) -> bool:
    """Whether a policy may look at the metrics of checkpoints, which take requests in an object store."""
    if type(policy) is AnyPreservationPolicy:
        return any(map(may_ask_for_metrics, policy.policies))
    return type(policy) not in _WITHOUT_METRICS


_WITHOUT_METRICS = {
    PreserveAll,
    LatestN,
    EveryNSteps,
    EveryNStepsClosest,
    EveryNSeconds,
    CustomSteps,
    LatestDuration,
}


def _last(checkpoints: Checkpoints, count: int | None) -> list[bool]:
    first = 0 if count is None else max(0, len(checkpoints) - count)
    return [index >= first for index in range(len(checkpoints))]


def _at_most(flags: list[bool], count: int | None) -> list[bool]:
    """The same flags, of which only the last so many are set; 0 stands for no bound, as in Orbax."""
    kept = [index for index, flag in enumerate(flags) if flag]
    if not count or len(kept) <= count:
        return flags
    stays = set(kept[len(kept) - count :])
    return [index in stays for index in range(len(flags))]


def _check_count(name: str, count: object) -> None:
    if count is None:
        return
    if not isinstance(count, SupportsIndex):
        raise WrongType(f"{name} must be an integer or None, not {count!r:.60}")
    if operator.index(count) < 0:
        raise InvalidInput(f"{name} must not be negative, but is {count}; None keeps all")


def check_seconds(name: str, seconds: object) -> None:
    """Refuses what is no number of seconds.

    Args:
        name: The parameter.
        seconds: What was given.

    Raises:
        WrongType: It is none.
        InvalidInput: It is negative, or not finite.
    """
    require_type(name, seconds, NUMBER, "a number of seconds")
    if not 0 <= seconds < math.inf:  # type: ignore[operator]  # it is a number
        raise InvalidInput(f"{name} must be a number of seconds from 0 on, not {seconds}")


def check_members(policies: object, protocol: type) -> None:
    """Refuses what is no sequence of instances of policies.

    Args:
        policies: What was given.
        protocol: What each has to be.

    Raises:
        WrongType: It is none, or holds something else.
    """
    if not isinstance(policies, Sequence):
        raise WrongType(f"policies must be a list of policies, not {policies!r:.60}")
    for policy in policies:
        if isinstance(policy, type) or not isinstance(policy, protocol):
            raise WrongType(f"policies must hold instances of policies, not {policy!r:.60}")


def _check_interval(steps: int) -> None:
    if steps == 0:
        raise InvalidInput("interval_steps must not be 0")


__all__ = [
    "AnyPreservationPolicy",
    "BestN",
    "CustomSteps",
    "EveryNSeconds",
    "EveryNSteps",
    "EveryNStepsClosest",
    "LatestDuration",
    "LatestN",
    "PreservationContext",
    "PreservationPolicy",
    "PreserveAll",
]
