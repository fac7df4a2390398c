"""The memory tier: checkpoints that hosts keep in memory for each other.

`MemoryTier` keeps the newest checkpoints of a `training.Checkpointer` in the memory of this host, whose agent
`agent_program` finds; `Recovery` is how long a program took to go on from there. `place` and the odds are the
plan for several hosts: which keep copies of whose shards, and what that survives.

What needs NumPy and checkpoints is imported when it is first used: `waystation launch` does not.
"""

from typing import TYPE_CHECKING

from waystation.memory.agent import DIRECTORY_VARIABLE, RECOVERY_VARIABLE, agent_program
from waystation.memory.errors import DoubtedStepWarning, LostStepWarning, MemoryTierWarning
from waystation.memory.placement import Placement, place
from waystation.memory.survival_probability import (
    Odds,
    domain_recovery_odds,
    grouped_recovery_bound,
    recovery_probability,
)

if TYPE_CHECKING:
    from waystation.memory.options import MemoryTier
    from waystation.training.recovery import Recovery
else:
    # Hidden from type checkers, which would otherwise let any attribute pass.
    _HOMES = {"MemoryTier": "waystation.memory.options", "Recovery": "waystation.training.recovery"}

    def __getattr__(name):
        import importlib

        if name not in _HOMES:
            raise AttributeError(f"module 'waystation.memory' has no attribute '{name}'")
        value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
        return value

    def __dir__():
        return sorted({*globals(), *__all__})


__all__ = [
    "DIRECTORY_VARIABLE",
    "RECOVERY_VARIABLE",
    "DoubtedStepWarning",
    "LostStepWarning",
    "MemoryTier",
    "MemoryTierWarning",
    "Odds",
    "Placement",
    "Recovery",
    "agent_program",
    "domain_recovery_odds",
    "grouped_recovery_bound",
    "place",
    "recovery_probability",
]
