"""Public handlers: what saves and loads checkpointables, and where it is registered."""

from waystation.checkpoint.handlers.pytree_handler import PyTreeHandler
from waystation.checkpoint.handlers.registry import (
    CheckpointableHandlerRegistry,
    global_registry,
    local_registry,
    register_handler,
)
from waystation.checkpoint.handlers.simple import JsonHandler, ProtoHandler
from waystation.checkpoint.handlers.types import (
    AbstractCheckpointable,
    Checkpointable,
    CheckpointableHandler,
    StatefulCheckpointable,
)

__all__ = [
    "AbstractCheckpointable",
    "Checkpointable",
    "CheckpointableHandler",
    "CheckpointableHandlerRegistry",
    "JsonHandler",
    "ProtoHandler",
    "PyTreeHandler",
    "StatefulCheckpointable",
    "global_registry",
    "local_registry",
    "register_handler",
]
