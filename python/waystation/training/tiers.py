"""A tier above the directory: another place where a `Checkpointer` keeps its newest checkpoints.

Protocols alone; `waystation.memory` has the implementation. Invariants that implementations keep: nothing
that goes wrong in a tier is raised into the program; all processes of the program make every call, in the
same order, and come to the same decision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from waystation._options import Options
from waystation.checkpoint.loading import Loading
from waystation.training.logger import Logger
from waystation.training.place import Place
from waystation.training.recovery import Recovery
from waystation.training.saving import Request
from waystation.training.step_metadata import CheckpointMetadata, changed

T = TypeVar("T")


def merged(
    above: Sequence[CheckpointMetadata[None]],
    below: Sequence[CheckpointMetadata[None]],
    *,
    preferred: Literal[0, 1] = 1,
) -> list[CheckpointMetadata[None]]:
    """The checkpoints of two tiers, ascending; one that both have is listed once, as that one of them tells
    which is preferred."""
    found = {info.step: info for info in above}
    for info in below:
        other = found.get(info.step)
        tiers = (*other.tiers, *info.tiers) if other is not None else info.tiers
        told = info if other is None or preferred else other
        found[info.step] = changed(told, tiers=tiers)
    return [found[step] for step in sorted(found)]


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be loaded of a tier.

    Attributes:
        step: The step; None for the newest.
        names: The checkpointables; None for all that the user has named.
    """

    step: int | None
    names: Sequence[str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStatistics:
    """What a tier has done so far in this process.

    Attributes:
        saves: How many versions it has saved.
        failures: How many saves have failed; the program went on without.
        skipped: How many steps were left out: `save_async` was called before the version before was kept, or
            while agents did not answer, or saves before had failed.
        saved_bytes: What this process has put into memory, over all saves.
        blocked_s: Seconds for which the program could not go on.
        last_saved_step: The newest step that it has saved; None if it has saved none.
        last_failure: Why the last save that failed did so; None if none has.
        loads: How many states came from it.
        doubted_steps: Steps that it has and that programs began with in vain; they are restored only if there
            is nothing else.
        lost_step: A step that was committed and that it could not restore when it was opened.
        recovery: How long it took to come from the last state of an earlier program to the next step; None
            if there was none.
    """

    saves: int = 0
    failures: int = 0
    skipped: int = 0
    saved_bytes: int = 0
    blocked_s: float = 0.0
    last_saved_step: int | None = None
    last_failure: str | None = None
    loads: int = 0
    doubted_steps: tuple[int, ...] = ()
    lost_step: int | None = None
    recovery: Recovery | None = None


class OpenTier(Protocol):
    """A tier of one `Checkpointer`."""

    @property
    def statistics(self) -> TierStatistics:
        """What it has done so far."""
        ...

    def checkpoints(self) -> list[CheckpointMetadata[None]]:
        """The checkpoints that it has, ascending, as far as it knows."""
        ...

    def should_save(self, step: int, options: Options) -> bool:
        """Whether its policy says to save a step."""
        ...

    def save(self, request: Request, options: Options, *, force: bool, waits: bool) -> None:
        """Saves a step, if its policy says so; returns once the program may change its state.

        Args:
            request: What is saved.
            options: Of the call.
            force: Save whatever the policy says.
            waits: Whether to wait until the tier can take the step. If not, all processes leave the step out
                where one of them would have to wait.
        """
        ...

    def load(self, wish: Wish, options: Options, load: Callable[[Loading], T]) -> tuple[int, T] | None:
        """Loads a step, if one that this tier has is to be preferred to what the directory has.

        Args:
            wish: What.
            options: Of the call.
            load: Does it, given a load that was opened.

        Returns:
            The step, and what `load` gave; None if the directory has to do.
        """
        ...

    def forget(self, step: int) -> bool:
        """Does not load a step any more, which the program deletes; returns whether it had that."""
        ...

    def wait(self) -> None:
        """Waits for what it does in the background."""
        ...

    def close(self) -> None:
        """Is not used any more; idempotent."""
        ...


class Tier(Protocol):
    """What a `Checkpointer` is given: how to make one."""

    def open(self, place: Place, options: Options, logger: Logger) -> OpenTier:
        """Opens the tier for the checkpoints of a directory."""
        ...
