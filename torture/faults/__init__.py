"""The faults, by name."""

from torture.faults.base import Done, Fault
from torture.faults.calls import CALL_FAULTS

FAULTS: dict[str, Fault] = {fault.name: fault for fault in CALL_FAULTS}

__all__ = ["FAULTS", "Done", "Fault"]
