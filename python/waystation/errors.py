"""Public errors of Waystation."""

from waystation._errors import (
    Cancelled,
    Conflict,
    Corrupt,
    DiskFull,
    Fenced,
    Internal,
    InvalidInput,
    NotFound,
    PermissionDenied,
    StructureMismatch,
    Unavailable,
    Unsupported,
    WaystationError,
)

__all__ = [
    "Cancelled",
    "Conflict",
    "Corrupt",
    "DiskFull",
    "Fenced",
    "Internal",
    "InvalidInput",
    "NotFound",
    "PermissionDenied",
    "StructureMismatch",
    "Unavailable",
    "Unsupported",
    "WaystationError",
]
