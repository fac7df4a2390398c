"""Handlers of checkpointables; `waystation.handlers` is their public face."""
