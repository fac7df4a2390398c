"""The memory tier: checkpoints that hosts keep in memory for each other.

So far its plan: which hosts keep copies of whose shards, and what such a plan survives.
"""

from waystation.memory.odds import (
    Odds,
    domain_recovery_odds,
    grouped_recovery_bound,
    recovery_probability,
)
from waystation.memory.placement import Placement, place

__all__ = [
    "Odds",
    "Placement",
    "domain_recovery_odds",
    "grouped_recovery_bound",
    "place",
    "recovery_probability",
]
