"""The groups of options, as a `Context` holds them."""

from waystation._options import (
    ArrayOptions,
    AsyncOptions,
    AtomicityMode,
    AtomicityOptions,
    CheckpointablesOptions,
    CheckpointLayout,
    DeletionOptions,
    EngineOptions,
    FileOptions,
    MemoryOptions,
    MultiprocessingOptions,
    PathwaysOptions,
    PyTreeMetadataOptions,
    PyTreeOptions,
    SafetensorsOptions,
    StorageOptions,
)

__all__ = [
    "ArrayOptions",
    "AsyncOptions",
    "AtomicityMode",
    "AtomicityOptions",
    "CheckpointLayout",
    "CheckpointablesOptions",
    "DeletionOptions",
    "EngineOptions",
    "FileOptions",
    "MemoryOptions",
    "MultiprocessingOptions",
    "PathwaysOptions",
    "PyTreeMetadataOptions",
    "PyTreeOptions",
    "SafetensorsOptions",
    "StorageOptions",
]
