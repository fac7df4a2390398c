"""Checkpoints: save, load, metadata, delete, and the options in effect."""

from waystation._options import StorageOptions
from waystation.checkpoint.context import Context
from waystation.checkpoint.copy import CopyStatistics, copy
from waystation.checkpoint.delete import delete, delete_async
from waystation.checkpoint.handlers.types import (
    AbstractCheckpointable,
    Checkpointable,
    CheckpointableHandler,
    StatefulCheckpointable,
)
from waystation.checkpoint.load import (
    load,
    load_async,
    load_checkpointables,
    load_checkpointables_async,
    load_pytree,
    load_pytree_async,
)
from waystation.checkpoint.metadata import (
    CheckpointMetadata,
    PyTreeMetadata,
    checkpointables_metadata,
    metadata,
    pytree_metadata,
)
from waystation.checkpoint.opening import is_orbax_checkpoint
from waystation.checkpoint.paths import is_checkpoint
from waystation.checkpoint.save import (
    add_checkpointables,
    save,
    save_async,
    save_checkpointables,
    save_checkpointables_async,
    save_pytree,
    save_pytree_async,
)
from waystation.checkpoint.verify import Damage, Verification, verify
from waystation.checkpoint.wanted import PLACEHOLDER
from waystation.transfers.handle import AsyncResponse
from waystation.transfers.statistics import LoadStatistics, SaveStatistics

__all__ = [
    "PLACEHOLDER",
    "AbstractCheckpointable",
    "AsyncResponse",
    "CheckpointMetadata",
    "Checkpointable",
    "CheckpointableHandler",
    "Context",
    "CopyStatistics",
    "Damage",
    "LoadStatistics",
    "PyTreeMetadata",
    "SaveStatistics",
    "StatefulCheckpointable",
    "StorageOptions",
    "Verification",
    "add_checkpointables",
    "checkpointables_metadata",
    "copy",
    "delete",
    "delete_async",
    "is_checkpoint",
    "is_orbax_checkpoint",
    "load",
    "load_async",
    "load_checkpointables",
    "load_checkpointables_async",
    "load_pytree",
    "load_pytree_async",
    "metadata",
    "pytree_metadata",
    "save",
    "save_async",
    "save_checkpointables",
    "save_checkpointables_async",
    "save_pytree",
    "save_pytree_async",
    "verify",
]
