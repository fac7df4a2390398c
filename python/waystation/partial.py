"""Saves of a state in parts: `save` as many as there are, then `finalize`."""

from waystation.checkpoint.partial_saving import finalize, save, save_async

__all__ = ["finalize", "save", "save_async"]
