"""Names of the directories of steps, under the names of Orbax's modules."""

from waystation.compat.orbax import step

__all__ = ["step"]
