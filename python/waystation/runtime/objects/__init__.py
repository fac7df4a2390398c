"""Objects: arrays in the memory of devices, by opaque handles.

`ObjectTable` is the controller's: who refers to what, and what ends when. `HostMemory` is a host's: which run
gets its memory now, and what is spilled to make room. Both are pure machines, driven by messages and by
deaths; what they return is to be carried out. `footprint` says what a run will need. `Held` is for what has a
name: programs, and the functions that these call.
"""

from waystation.runtime.objects.admission import (
    Admit,
    Decision,
    HostMemory,
    Refuse,
    Reservation,
    Restore,
    Spill,
    Stalled,
)
from waystation.runtime.objects.footprint import BytesByDevice, Footprint, footprint
from waystation.runtime.objects.holders import Held
from waystation.runtime.objects.table import Collect, Handle, ObjectTable, StoredObject

__all__ = [
    "Admit",
    "BytesByDevice",
    "Collect",
    "Decision",
    "Footprint",
    "Handle",
    "Held",
    "HostMemory",
    "ObjectTable",
    "Refuse",
    "Reservation",
    "Restore",
    "Spill",
    "Stalled",
    "StoredObject",
    "footprint",
]
