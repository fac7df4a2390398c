"""Virtual devices and who has which physical ones.

`ResourceManager` is a pure machine: calls are what clients ask and what happens to the cluster, and return
what has changed. A client writes programs against the devices of a `VirtualDeviceSet`.
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
from waystation.runtime.resources.virtual import (
    SliceGranter,
    VirtualDevice,
    VirtualDeviceSet,
    VirtualSlice,
    make_virtual_device_set,
)

__all__ = [
    "Assignment",
    "Placement",
    "ResourceManager",
    "Slice",
    "SliceChanged",
    "SliceGranter",
    "SliceRequest",
    "SliceState",
    "VirtualDevice",
    "VirtualDeviceSet",
    "VirtualSlice",
    "make_virtual_device_set",
]
