"""Who runs when: a gang scheduler for each island, and a sequencer for what spans several.

Pure machines, told of submissions, completions, deaths and rebuilt islands; what they return are messages: a
`Dispatch` for every host of an island, or a `Submission` for the scheduler of an island. A client numbers
what it submits with `ClientNumbers`; a host puts what it gets back into order with a `ReorderBuffer`.
"""

from waystation.runtime.scheduling.island import IslandScheduler
from waystation.runtime.scheduling.policies import Candidate, FirstInFirstOut, Policy, ProportionalShare
from waystation.runtime.scheduling.reorder import ReorderBuffer
from waystation.runtime.scheduling.sequencer import Routed, Sequencer
from waystation.runtime.scheduling.submissions import (
    ClientNumbers,
    Dispatch,
    RunKey,
    SpanningSubmission,
    Submission,
)

__all__ = [
    "Candidate",
    "ClientNumbers",
    "Dispatch",
    "FirstInFirstOut",
    "IslandScheduler",
    "Policy",
    "ProportionalShare",
    "ReorderBuffer",
    "Routed",
    "RunKey",
    "Sequencer",
    "SpanningSubmission",
    "Submission",
]
