"""Virtual devices and who has which physical ones.

`ResourceManager` is a pure machine: calls are what clients ask and what happens to the cluster, and return
what has changed. What a client holds of its slices is in `waystation.runtime.client.slices`.
"""

from waystation.runtime.resources.manager import ResourceManager
from waystation.runtime.resources.requests import (
    Assignment,
    Placement,
    Slice,
    SliceChanged,
    SliceRequest,
    SliceState,
)

__all__ = [
    "Assignment",
    "Placement",
    "ResourceManager",
    "Slice",
    "SliceChanged",
    "SliceRequest",
    "SliceState",
]
