"""The runtime: one controller that drives many hosts, after Pathways (Barham et al., MLSys 2022).

What is decided here is decided by *pure machines*: classes without clock, threads or I/O, whose methods take
what has happened and return what is to be done. They need neither Ray nor JAX, so that the same code drives
real hosts and modelled ones. `devices` says what there is, `resources` who has which devices, `ir` what
programs are and what each host does for them, `scheduling` who runs when, `objects` what stays in memory, and
`exchange` when a shard has all that others send it.

`cluster` has the hosts themselves, on Ray; `connect` starts one. `client` is what a program has of it:
functions on slices, arrays, programs that `tracing` records; `local` starts one on the devices of this
process, and `execution` does what hosts are told, in either. Importing this imports neither Ray nor JAX.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from waystation.runtime.cluster import Cluster, connect
from waystation.runtime.devices import DeviceId, Host, Island
from waystation.runtime.needs import needing_packages
from waystation.runtime.resources import Assignment, Placement, ResourceManager, SliceRequest

if TYPE_CHECKING:
    from waystation.runtime.client.client import Client
    from waystation.runtime.client.current import make_virtual_device_set
    from waystation.runtime.client.pmap import pmap
    from waystation.runtime.client.programs import program
    from waystation.runtime.client.slices import Slice
    from waystation.runtime.tracing.arrays import Array

__all__ = [
    "Array",
    "Assignment",
    "Client",
    "Cluster",
    "DeviceId",
    "Host",
    "Island",
    "Placement",
    "ResourceManager",
    "Slice",
    "SliceRequest",
    "connect",
    "jit",
    "local",
    "make_virtual_device_set",
    "pmap",
    "program",
]

# What needs JAX, by where it is.
_HOMES = {
    "Array": "tracing.arrays",
    "Client": "client.client",
    "Slice": "client.slices",
    "make_virtual_device_set": "client.current",
    "pmap": "client.pmap",
    "program": "client.programs",
}


def local(islands: Mapping[str, int] | None = None, *, devices: int | None = None) -> Client:
    """Starts a client on devices of this process: for tests, notebooks and one machine.

    The controller is that of a cluster, and each island has threads of its own. The client is the one that is
    meant where none is named, until it is closed.

    Args:
        islands: How many devices each island has, by name; by default one island of all.
        devices: The same, for one island.

    Raises:
        InvalidInput: JAX has not so many devices. On CPUs there are as many as are asked for, if JAX has not
            been used before.
        Unsupported: JAX is not installed.
    """
    with needing_packages():
        from waystation.runtime.client.starting import start_local

    return start_local(islands, devices)


def jit(function: Any, on: Slice, **options: Any) -> Any:
    """Places a function on a slice; see `Client.jit`."""
    return on.client.jit(function, on, **options)


def __getattr__(name: str) -> Any:
    """Imports a name from its home."""
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    with needing_packages():
        home = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    value = globals()[name] = getattr(home, name)
    return value
