"""`MemoryTier`: the options of the memory tier, and the warning that it gives where others raise."""

from __future__ import annotations

import os
import re
import weakref
from dataclasses import dataclass, field
from typing import Any

from waystation import storage
from waystation._errors import Conflict, InvalidInput, WrongType
from waystation._options import Options
from waystation.memory.agent import DIRECTORY_VARIABLE
from waystation.memory.open_tier import OpenMemoryTier
from waystation.training.logger import Logger
from waystation.training.place import Place
from waystation.training.save_decision_policies import FixedIntervalPolicy, SaveDecisionPolicy


@dataclass(frozen=True, kw_only=True)
class MemoryTier:
    """Keeps the newest checkpoints in the memory of this host, for `training.Checkpointer(memory=…)`.

    The agent of the host (`waystation agent run`, or `waystation launch --agent`) owns that memory, so
    checkpoints outlive the program and the agent. With several agents, hosts keep copies for each other, so
    checkpoints also outlive a host. One sequence of checkpoints at a time uses an agent: a later program that
    uses it fences the earlier one, and a second `Checkpointer` of the same program with another directory is
    refused until the first is closed.

    Attributes:
        directory: The directory of the agent's store. None takes it from the environment variable
            `WAYSTATION_AGENT_DIRECTORY`, which `waystation launch --agent` sets.
        save_decision_policy: Which steps to save to memory, independent of the directory; by default every
            step. `save_async` leaves out those that come before memory has kept the one before.
        run: The id that the agent's store must have (32 hexadecimal digits), so that the memory of another
            program is not used by mistake. None accepts any.
        deadline_s: How long a save or load waits for the agent, and for other processes, before it continues
            without memory. `save_async` does that in the background.
        start_from_nothing: Whether a program may start without a checkpoint although memory once had
            committed steps of the sequence. Otherwise `Checkpointer(…)` raises `errors.CommittedStepsLost`.
    """

    directory: str | os.PathLike[str] | None = None
    save_decision_policy: SaveDecisionPolicy = field(default_factory=lambda: FixedIntervalPolicy(1))
    run: str | None = None
    deadline_s: float = 60.0
    start_from_nothing: bool = False

    def __post_init__(self) -> None:
        given: Any = self.directory
        if given is not None and not isinstance(given, str | os.PathLike):
            raise WrongType(f"directory must be a path, not {given!r:.60}")
        policy: Any = self.save_decision_policy
        if isinstance(policy, type) or not callable(getattr(policy, "should_save", None)):
            raise WrongType(
                f"save_decision_policy must be one of training.save_decision_policies, not {policy!r:.60}"
            )
        if self.run is not None and re.fullmatch("[0-9a-fA-F]{32}", str(self.run)) is None:
            raise InvalidInput(f"run must be the id of a store, 32 hexadecimal digits, not {self.run!r:.60}")
        deadline: Any = self.deadline_s
        if isinstance(deadline, bool) or not isinstance(deadline, int | float):
            raise WrongType(f"deadline_s must be a number of seconds, not {deadline!r:.60}")
        if not deadline > 0:
            raise InvalidInput(f"deadline_s is {deadline}; it must be above 0 seconds")
        nothing: Any = self.start_from_nothing
        if not isinstance(nothing, bool):
            raise WrongType(f"start_from_nothing must be True or False, not {nothing!r:.60}")

    def open(self, place: Place, options: Options, logger: Logger) -> OpenMemoryTier:
        """Opens the tier for the checkpoints of a directory. What else goes wrong is warned of, not raised.

        Raises:
            InvalidInput: Nothing says where the agent is.
            MemoryTooSmall: The agent has too few slots for the versions that it is to keep.
            CommittedStepsLost: Memory once had committed steps, and there is nothing to begin with any more.
            Conflict: Another `Checkpointer` of this process, of another directory, uses the agent.
        """
        directory = self.directory or os.environ.get(DIRECTORY_VARIABLE)
        if directory is None:
            raise InvalidInput(
                "the memory tier needs an agent: start the program with 'waystation launch --agent', or run "
                "'waystation agent run' and give its directory, MemoryTier(directory=…), or set "
                f"{DIRECTORY_VARIABLE}"
            )
        agent = storage.resolved(directory)
        _check_unused(agent, place)
        tier = OpenMemoryTier(
            os.fspath(directory), self.run, self.save_decision_policy, self.deadline_s, place, logger
        )
        _opened[agent] = storage.resolved(place.root), weakref.ref(tier)
        try:
            tier.begin(options, start_from_nothing=self.start_from_nothing)
        except BaseException:
            tier.close()  # another one may be opened in its place
            raise
        return tier


# By the directories of agents, what this process has opened last: for which checkpoints, and the tier.
_opened: dict[str, tuple[str, weakref.ref[OpenMemoryTier]]] = {}


def _check_unused(agent: str, place: Place) -> None:
    """Refuses a second sequence of checkpoints: each would fence the other, and none would be kept."""
    root, opened = _opened.get(agent, ("", None))
    tier = None if opened is None else opened()
    if tier is not None and not tier.is_closed and root != storage.resolved(place.root):
        raise Conflict(
            f"the agent in '{agent}' keeps the checkpoints of '{root}' for this program already; save "
            "several states as checkpointables of one step (save_checkpointables), close the other "
            "Checkpointer first, or give this one an agent of its own",
            path=agent,
        )
