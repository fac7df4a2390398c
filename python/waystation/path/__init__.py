"""Paths: the types by which checkpoints are named, and how the steps of a sequence are (`step`)."""

from pathlib import Path

from waystation.checkpoint.handlers.types import PathAwaitingCreation
from waystation.checkpoint.paths import PathLike
from waystation.path import step
from waystation.storage import Location

__all__ = ["Location", "Path", "PathAwaitingCreation", "PathLike", "step"]
