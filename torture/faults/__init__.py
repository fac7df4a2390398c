"""The faults, by name."""

from torture.faults.agents import AGENTS
from torture.faults.base import Done, Fault
from torture.faults.calls import CALL_FAULTS
from torture.faults.damage import DAMAGE
from torture.faults.fuse import FUSE
from torture.faults.geometry import GEOMETRIES
from torture.faults.in_process import IN_PROCESS
from torture.faults.power import POWER_CUTS
from torture.faults.sandbox import SANDBOXES
from torture.faults.together import TOGETHER

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in [
        *CALL_FAULTS,
        *DAMAGE,
        *TOGETHER,
        *SANDBOXES,
        *GEOMETRIES,
        *POWER_CUTS,
        *IN_PROCESS,
        *FUSE,
        *AGENTS,
    ]
}

__all__ = ["FAULTS", "Done", "Fault"]
