"""The runtime: one controller that drives many hosts, after Pathways (Barham et al., MLSys 2022).

What is decided here is decided by *pure machines*: classes without clock, threads or I/O, whose methods take
what has happened and return what is to be done. They need neither Ray nor JAX, so that the same code drives
real hosts and modelled ones. `devices` says what there is, `resources` who has which devices, `ir` what
programs are and what each host does for them, `scheduling` who runs when, `objects` what stays in memory, and
`exchange` when a shard has all that others send it.

`cluster` has the hosts themselves, on Ray; `connect` starts one. Importing this imports neither Ray nor JAX.
"""

from waystation.runtime.cluster import Cluster, connect
from waystation.runtime.devices import DeviceId, Host, Island
from waystation.runtime.resources import (
    Assignment,
    Placement,
    ResourceManager,
    SliceRequest,
    VirtualDevice,
    VirtualDeviceSet,
    VirtualSlice,
    make_virtual_device_set,
)

__all__ = [
    "Assignment",
    "Cluster",
    "DeviceId",
    "Host",
    "Island",
    "Placement",
    "ResourceManager",
    "SliceRequest",
    "VirtualDevice",
    "VirtualDeviceSet",
    "VirtualSlice",
    "connect",
    "make_virtual_device_set",
]
