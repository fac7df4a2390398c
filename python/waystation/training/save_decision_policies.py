"""When a checkpoint is saved: policies that a `Checkpointer` asks at each step.

A policy has one method, `should_save`. In a program of several processes each asks its own, and what the
primary's says counts for all; so a policy may look at a clock. Where nothing but the step and the context
decides, a policy says so by `is_same_everywhere`: a program of several processes then need not talk about
steps at which it says no.
"""

from __future__ import annotations

import datetime
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, SupportsIndex, runtime_checkable

from waystation._arguments import require_type
from waystation._errors import InvalidInput, WrongType
from waystation.training.adaptive_interval import AdaptiveInterval
from waystation.training.costs import SaveCost
from waystation.training.preservation_policies import check_members, check_seconds
from waystation.training.step_metadata import CheckpointMetadata


@dataclass(frozen=True, kw_only=True)
class DecisionContext:
    """What a policy may take into account besides the steps.

    Attributes:
        is_saving_in_progress: Whether a save now would have to wait for earlier ones.
        reached_preemption: Whether the program was told that it will be ended: this is the step to save.
        multiprocessing_options: How the processes of the program act together.
        save_cost: What a save costs, as measured by this program; None before its first one has ended.
        since_last_save_s: Seconds since this program last began to save; None before it has.
    """

    is_saving_in_progress: bool
    reached_preemption: bool
    multiprocessing_options: Any
    save_cost: SaveCost | None = None
    since_last_save_s: float | None = None


@runtime_checkable
class SaveDecisionPolicy(Protocol):
    """Decides when a checkpoint is saved."""

    def should_save(
        self,
        step: CheckpointMetadata[None],
        previous_steps: Sequence[CheckpointMetadata[None]],
        *,
        context: DecisionContext,
    ) -> bool:
        """Whether to save now.

        Args:
            step: The present step and time.
            previous_steps: The steps that have a checkpoint or are being saved: those that this program has
                found, ascending, then those that it has saved, in this order.
            context: What else may matter.
        """
        ...


@dataclass
class FixedIntervalPolicy(SaveDecisionPolicy):
    """Saves at steps that are a multiple of a number.

    Attributes:
        interval: The number.
    """

    interval: int
    is_same_everywhere: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.interval, SupportsIndex):
            raise WrongType(f"an interval must be an integer number of steps, not {self.interval!r:.60}")
        if self.interval < 1:
            raise InvalidInput(f"an interval of {self.interval} steps cannot be kept; give 1 or more")

    def should_save(
        self,
        step: CheckpointMetadata[None],
        previous_steps: Sequence[CheckpointMetadata[None]],
        *,
        context: DecisionContext,
    ) -> bool:
        """Whether the step is a multiple."""
        return step.step % self.interval == 0


@dataclass
class SpecificStepsPolicy(SaveDecisionPolicy):
    """Saves at given steps.

    Attributes:
        steps: The steps, in anything that can tell whether one is among them.
    """

    steps: Container[int]
    is_same_everywhere: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.steps, str | bytes) or not isinstance(self.steps, Container):
            raise WrongType(f"steps must be a list or another container of steps, not {self.steps!r:.60}")

    def should_save(
        self,
        step: CheckpointMetadata[None],
        previous_steps: Sequence[CheckpointMetadata[None]],
        *,
        context: DecisionContext,
    ) -> bool:
        """Whether the step is one of them."""
        return step.step in self.steps


@dataclass
class ContinuousCheckpointingPolicy(SaveDecisionPolicy):
    """Saves as often as that does not make the program wait for an earlier save.

    Attributes:
        minimum_interval_secs: Seconds that have to pass since the last checkpoint; None: none.
    """

    minimum_interval_secs: int | None = None

    def __post_init__(self) -> None:
        if self.minimum_interval_secs is not None:
            check_seconds("minimum_interval_secs", self.minimum_interval_secs)

    def should_save(
        self,
        step: CheckpointMetadata[None],
        previous_steps: Sequence[CheckpointMetadata[None]],
        *,
        context: DecisionContext,
    ) -> bool:
        """Whether no save is in progress, and the last checkpoint is old enough."""
        if context.is_saving_in_progress:
            return False
        if not previous_steps or self.minimum_interval_secs is None:
            return True
        return step.time - previous_steps[-1].time >= datetime.timedelta(seconds=self.minimum_interval_secs)


class PreemptionCheckpointingPolicy(SaveDecisionPolicy):
    """Saves once the program was told that it will be ended."""

    is_same_everywhere: ClassVar[bool] = True  # a context says the same of this in all processes

    def should_save(
        self,
        step: CheckpointMetadata[None],
        previous_steps: Sequence[CheckpointMetadata[None]],
        *,
        context: DecisionContext,
    ) -> bool:
        """Whether it was told so."""
        return context.reached_preemption


class InitialSavePolicy(SaveDecisionPolicy):
    """Saves where there is no checkpoint yet."""

    def should_save(
        self,
        step: CheckpointMetadata[None],
        previous_steps: Sequence[CheckpointMetadata[None]],
        *,
        context: DecisionContext,
    ) -> bool:
        """Whether there is none."""
        return not previous_steps


@dataclass
class AnySavePolicy(SaveDecisionPolicy):
    """Saves if any of several policies does.

    Attributes:
        policies: These; they are asked in order until one says yes.
    """

    policies: Sequence[SaveDecisionPolicy]

    def __post_init__(self) -> None:
        check_members(self.policies, SaveDecisionPolicy)

    @property
    def is_same_everywhere(self) -> bool:
        """Whether that is so of every one of them."""
        return all(is_same_everywhere(policy) for policy in self.policies)

    def should_save(
        self,
        step: CheckpointMetadata[None],
        previous_steps: Sequence[CheckpointMetadata[None]],
        *,
        context: DecisionContext,
    ) -> bool:
        """Whether one of them says yes."""
        return any(policy.should_save(step, previous_steps, context=context) for policy in self.policies)


@dataclass
class AdaptiveIntervalPolicy(SaveDecisionPolicy):
    """Saves as often as makes the program end soonest, given what a save costs and how often it fails.

    Too few checkpoints lose much work at a failure, too many cost time themselves. The best interval follows
    from the measured cost of a save and the mean time between failures; `AdaptiveInterval` says how. The cost
    is measured as the program runs, so the first save is made at once.

    For several tiers of storage, give each its own policy with the mean time between the failures that only
    this tier or a slower one survives, and, where this `Checkpointer` does not measure it, its own `cost`.

    Attributes:
        interval: How the interval follows from costs.
        cost: What a save costs; None: as measured.
    """

    interval: AdaptiveInterval
    cost: SaveCost | None = None

    def __post_init__(self) -> None:
        require_type("interval", self.interval, AdaptiveInterval, "an AdaptiveInterval")
        require_type("cost", self.cost, (SaveCost, type(None)), "a SaveCost or None")

    def should_save(
        self,
        step: CheckpointMetadata[None],
        previous_steps: Sequence[CheckpointMetadata[None]],
        *,
        context: DecisionContext,
    ) -> bool:
        """Whether the best interval has passed since the last save."""
        if context.is_saving_in_progress:
            return False
        if context.since_last_save_s is None:
            return True
        cost = self.cost or context.save_cost
        return cost is not None and context.since_last_save_s >= self.interval.seconds(cost)


def is_same_everywhere(policy: SaveDecisionPolicy) -> bool:
    """Whether a policy says the same in all processes, whatever their clocks and lists of steps."""
    return bool(getattr(policy, "is_same_everywhere", False))


def default_policy() -> SaveDecisionPolicy:
    """What a `Checkpointer` does that is not told otherwise."""
    return AnySavePolicy(
        [InitialSavePolicy(), ContinuousCheckpointingPolicy(), PreemptionCheckpointingPolicy()]
    )


__all__ = [
    "AdaptiveInterval",
    "AdaptiveIntervalPolicy",
    "AnySavePolicy",
    "ContinuousCheckpointingPolicy",
    "DecisionContext",
    "FixedIntervalPolicy",
    "InitialSavePolicy",
    "PreemptionCheckpointingPolicy",
    "SaveCost",
    "SaveDecisionPolicy",
    "SpecificStepsPolicy",
]
