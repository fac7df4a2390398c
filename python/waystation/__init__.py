"""Waystation keeps the state of distributed array programs: saves it, loads it, protects it.

Names are imported when they are first used: NumPy and the engine are no part of `waystation --help`.
"""

# For its effect: the interpreter waits for threads at exit only if it knows of them before, and tells by it
# whether it has waited (`waystation.transfers.handle`).
import threading as _threading  # noqa: F401
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from waystation import (
        arrays,
        errors,
        handlers,
        memory,
        multihost,
        options,
        partial,
        path,
        runtime,
        safetensors,
        telemetry,
        training,
        tree,
    )
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
    from waystation.checkpoint.verify import verify
    from waystation.checkpoint.wanted import PLACEHOLDER
    from waystation.layouts.native.memory import release_memory
    from waystation.transfers.handle import AsyncResponse
    from waystation.transfers.statistics import LoadStatistics, SaveStatistics
    from waystation.tree import register_node
else:
    # Hidden from type checkers, which would otherwise let any attribute pass.
    _MODULES = (
        *("arrays", "checkpoint", "errors", "handlers", "memory", "multihost"),
        *("options", "partial", "path", "runtime", "safetensors", "telemetry", "training", "tree"),
    )
    _HOMES = {
        **dict.fromkeys(_MODULES),
        "register_node": "waystation.tree",
        "release_memory": "waystation.layouts.native.memory",
    }

    # Names of Orbax's v0 interface, and what takes their place.
    _REPLACED = {
        "CheckpointManager": "waystation.training.Checkpointer",
        "CheckpointManagerOptions": "the arguments of waystation.training.Checkpointer",
        "PyTreeCheckpointer": "waystation.save and waystation.load",
        "StandardCheckpointer": "waystation.save and waystation.load",
        "Checkpointer": "waystation.training.Checkpointer, or waystation.save and waystation.load",
        "AsyncCheckpointer": "waystation.save_async",
        "PyTreeCheckpointHandler": "waystation.save and waystation.load",
        "RestoreArgs": "an abstract state, see waystation.load",
        "ArrayRestoreArgs": "an abstract state, see waystation.load",
        "args": "waystation.save_checkpointables and waystation.load_checkpointables",
    }

    def __getattr__(name):
        """Imports a public name from its home, `waystation.checkpoint` unless the table says otherwise."""
        import importlib

        if name not in __all__ and name not in _HOMES:
            other = _REPLACED.get(name)
            advice = "" if other is None else f"; Waystation has Orbax's v1 interface: use {other}"
            raise AttributeError(f"module 'waystation' has no attribute '{name}'{advice}")
        home = _HOMES.get(name, "waystation.checkpoint")
        if home is None:
            return importlib.import_module(f"waystation.{name}")
        value = globals()[name] = getattr(importlib.import_module(home), name)
        return value

    def __dir__():
        return sorted({*globals(), *__all__, *_HOMES})


__version__ = "0.1.0"

__all__ = [
    "PLACEHOLDER",
    "AbstractCheckpointable",
    "AsyncResponse",
    "CheckpointMetadata",
    "Checkpointable",
    "CheckpointableHandler",
    "Context",
    "CopyStatistics",
    "LoadStatistics",
    "PyTreeMetadata",
    "SaveStatistics",
    "StatefulCheckpointable",
    "StorageOptions",
    "add_checkpointables",
    "arrays",
    "checkpointables_metadata",
    "copy",
    "delete",
    "delete_async",
    "errors",
    "handlers",
    "is_checkpoint",
    "is_orbax_checkpoint",
    "load",
    "load_async",
    "load_checkpointables",
    "load_checkpointables_async",
    "load_pytree",
    "load_pytree_async",
    "memory",
    "metadata",
    "multihost",
    "options",
    "partial",
    "path",
    "pytree_metadata",
    "register_node",
    "release_memory",
    "runtime",
    "safetensors",
    "save",
    "save_async",
    "save_checkpointables",
    "save_checkpointables_async",
    "save_pytree",
    "save_pytree_async",
    "telemetry",
    "training",
    "tree",
    "verify",
]
