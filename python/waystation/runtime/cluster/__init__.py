"""The cluster: islands of hosts on Ray, which come, go, and are rebuilt when a host is lost.

`connect` gives a program its `Cluster`. Behind it is one actor, the manager (`manager`), with a `supervisor`
for each island, which keeps a `gang` of hosts: all of them or none. `watchdog` decides, without Ray, who is
stuck. Importing this package does not import Ray.
"""

from waystation.runtime.client.backend import Backend as ClusterBackend
from waystation.runtime.cluster.cluster import Cluster
from waystation.runtime.cluster.connecting import connect, look, looking
from waystation.runtime.cluster.island import Island
from waystation.runtime.cluster.status import (
    ClusterStatus,
    HostStatus,
    IslandState,
    IslandStatus,
    OwnerStatus,
)

__all__ = [
    "Cluster",
    "ClusterBackend",
    "ClusterStatus",
    "HostStatus",
    "Island",
    "IslandState",
    "IslandStatus",
    "OwnerStatus",
    "connect",
    "look",
    "looking",
]
