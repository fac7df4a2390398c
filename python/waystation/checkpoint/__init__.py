"""Checkpoints: save, load, metadata, delete, and the options in effect."""

from waystation._options import StorageOptions
from waystation.checkpoint.context import Context
from waystation.checkpoint.delete import delete
from waystation.checkpoint.handle import AsyncResponse
from waystation.checkpoint.load import load, load_async
from waystation.checkpoint.metadata import CheckpointMetadata, metadata
from waystation.checkpoint.paths import is_checkpoint
from waystation.checkpoint.save import save, save_async
from waystation.checkpoint.statistics import LoadStatistics
from waystation.checkpoint.verify import Damage, Verification, verify
from waystation.checkpoint.wanted import PLACEHOLDER

__all__ = [
    "PLACEHOLDER",
    "AsyncResponse",
    "CheckpointMetadata",
    "Context",
    "Damage",
    "LoadStatistics",
    "StorageOptions",
    "Verification",
    "delete",
    "is_checkpoint",
    "load",
    "load_async",
    "metadata",
    "save",
    "save_async",
    "verify",
]
