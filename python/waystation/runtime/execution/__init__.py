"""What a host does for a program, with JAX: the low list, run on its devices.

`HostExecution` holds the arrays of a host (`buffers`), the functions that it can call (`functions`), and the
lists that it was given (`lists`). How blocks travel between hosts is an `Exchange`, which is given.
"""

from waystation.runtime.execution.buffers import Buffers
from waystation.runtime.execution.exchange import Exchange, Expected, LocalExchange
from waystation.runtime.execution.functions import Function, Functions
from waystation.runtime.execution.host_execution import HostExecution
from waystation.runtime.execution.lists import LoadedList, Run

__all__ = [
    "Buffers",
    "Exchange",
    "Expected",
    "Function",
    "Functions",
    "HostExecution",
    "LoadedList",
    "LocalExchange",
    "Run",
]
