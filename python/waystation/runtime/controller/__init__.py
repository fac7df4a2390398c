"""The controller of a cluster, without the cluster: what clients ask and what happens become what hosts do.

A pure machine of the others: it has no clock, threads or I/O, and drives real hosts and modelled ones alike.
`Controller` takes calls and events; what is to be carried out is in `Controller.orders.effects`.
"""

from waystation.runtime.controller.controller import Controller
from waystation.runtime.controller.islands import MemoryLimits
from waystation.runtime.controller.lowered import Dispatch
from waystation.runtime.controller.works import (
    Abandon,
    Begin,
    Effect,
    ForgetLists,
    Prepare,
    Release,
    Stall,
    Work,
)

__all__ = [
    "Abandon",
    "Begin",
    "Controller",
    "Dispatch",
    "Effect",
    "ForgetLists",
    "MemoryLimits",
    "Prepare",
    "Release",
    "Stall",
    "Work",
]
