"""Waystation keeps the state of distributed array programs: saves it, loads it, protects it."""

from waystation import errors
from waystation.checkpoint import (
    AsyncResponse,
    CheckpointMetadata,
    Context,
    delete,
    is_checkpoint,
    load,
    load_async,
    metadata,
    save,
    save_async,
    verify,
)
from waystation.tree import register_node

__version__ = "0.1.0"

__all__ = [
    "AsyncResponse",
    "CheckpointMetadata",
    "Context",
    "delete",
    "errors",
    "is_checkpoint",
    "load",
    "load_async",
    "metadata",
    "register_node",
    "save",
    "save_async",
    "verify",
]
