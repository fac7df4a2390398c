"""Version 0 of Orbax's interface on Waystation: `import waystation.compat.orbax as ocp`.

A program that imports `orbax.checkpoint` needs no change but one call before that import:
`waystation.compat.orbax.install()`. Checkpoints are in Orbax's layout, which Orbax reads, unless
`set_layout("native")` says otherwise. `docs/orbax-version-0.md` lists what differs.
"""

from waystation.compat.orbax import (
    abstract_checkpoint_manager,
    args,
    arrays,
    checkpoint_args,
    checkpoint_manager,
    checkpoint_managers,
    checkpoint_utils,
    checkpointers,
    future,
    handlers,
    logging,
    metadata,
    multihost,
    options,
    path,
    pathways,
    step,
    test_utils,
    transform_utils,
    tree,
    type_handlers,
    utils,
)
from waystation.compat.orbax._install import install, refused
from waystation.compat.orbax.abstract_checkpoint_manager import AbstractCheckpointManager
from waystation.compat.orbax.checkpoint_manager import CheckpointManager, CheckpointManagerOptions
from waystation.compat.orbax.checkpointers import (
    AbstractCheckpointer,
    AsyncCheckpointer,
    Checkpointer,
    PyTreeCheckpointer,
    StandardCheckpointer,
)
from waystation.compat.orbax.future import Future
from waystation.compat.orbax.handlers import (
    ArrayCheckpointHandler,
    AsyncCheckpointHandler,
    BasePyTreeCheckpointHandler,
    CheckpointHandler,
    CheckpointHandlerRegistry,
    CompositeCheckpointHandler,
    CompositeOptions,
    DefaultCheckpointHandlerRegistry,
    JaxRandomKeyCheckpointHandler,
    JsonCheckpointHandler,
    NumpyRandomKeyCheckpointHandler,
    ProtoCheckpointHandler,
    PyTreeCheckpointHandler,
    StandardCheckpointHandler,
)
from waystation.compat.orbax.options import AsyncOptions, set_layout
from waystation.compat.orbax.transform_utils import (
    RestoreTransform,
    Transform,
    apply_transformations,
    merge_trees,
)
from waystation.compat.orbax.type_handlers import ArrayRestoreArgs, RestoreArgs, SaveArgs
from waystation.compat.orbax.version import __version__

PLACEHOLDER = ...

__all__ = [
    "PLACEHOLDER",
    "AbstractCheckpointManager",
    "AbstractCheckpointer",
    "ArrayCheckpointHandler",
    "ArrayRestoreArgs",
    "AsyncCheckpointHandler",
    "AsyncCheckpointer",
    "AsyncOptions",
    "BasePyTreeCheckpointHandler",
    "CheckpointHandler",
    "CheckpointHandlerRegistry",
    "CheckpointManager",
    "CheckpointManagerOptions",
    "Checkpointer",
    "CompositeCheckpointHandler",
    "CompositeOptions",
    "DefaultCheckpointHandlerRegistry",
    "Future",
    "JaxRandomKeyCheckpointHandler",
    "JsonCheckpointHandler",
    "NumpyRandomKeyCheckpointHandler",
    "ProtoCheckpointHandler",
    "PyTreeCheckpointHandler",
    "PyTreeCheckpointer",
    "RestoreArgs",
    "RestoreTransform",
    "SaveArgs",
    "StandardCheckpointHandler",
    "StandardCheckpointer",
    "Transform",
    "__version__",
    "abstract_checkpoint_manager",
    "apply_transformations",
    "args",
    "arrays",
    "checkpoint_args",
    "checkpoint_manager",
    "checkpoint_managers",
    "checkpoint_utils",
    "checkpointers",
    "future",
    "handlers",
    "install",
    "logging",
    "merge_trees",
    "metadata",
    "multihost",
    "options",
    "path",
    "pathways",
    "set_layout",
    "step",
    "test_utils",
    "transform_utils",
    "tree",
    "type_handlers",
    "utils",
]


def __getattr__(name: str) -> object:
    """Says why a name of Orbax's is not here; `v1` is `waystation` itself."""
    return refused(name)
