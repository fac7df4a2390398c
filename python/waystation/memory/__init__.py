"""The memory tier: checkpoints that hosts keep in memory for each other.

`placement` and `odds` are its plan: which hosts keep copies of whose shards, and what that survives.
`program` finds the agent that keeps versions in the memory of a host.
"""

from waystation.memory.odds import (
    Odds,
    domain_recovery_odds,
    grouped_recovery_bound,
    recovery_probability,
)
from waystation.memory.placement import Placement, place
from waystation.memory.program import agent_program

__all__ = [
    "Odds",
    "Placement",
    "agent_program",
    "domain_recovery_odds",
    "grouped_recovery_bound",
    "place",
    "recovery_probability",
]
