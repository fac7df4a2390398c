"""The memory tier: checkpoints that hosts keep in memory for each other.

`MemoryTier` keeps the newest checkpoints of a `training.Checkpointer` in the memory of this host, whose agent
`agent_program` finds; `Recovery` is how long a program took to go on from there. `place` and the odds are the
plan for several hosts: which keep copies of whose shards, and what that survives.
"""

from waystation.memory.errors import MemoryTierWarning
from waystation.memory.odds import (
    Odds,
    domain_recovery_odds,
    grouped_recovery_bound,
    recovery_probability,
)
from waystation.memory.options import DIRECTORY_VARIABLE, MemoryTier
from waystation.memory.placement import Placement, place
from waystation.memory.program import agent_program
from waystation.memory.recovering import RECOVERY_VARIABLE
from waystation.training.recovery import Recovery

__all__ = [
    "DIRECTORY_VARIABLE",
    "RECOVERY_VARIABLE",
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
