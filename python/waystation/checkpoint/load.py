"""`load` and `load_async`: a checkpoint becomes a state, in the containers and kinds that are wanted.

First everything is decided: which stored leaf each wanted leaf takes, where its bytes go, what has to
be cast. Then one engine job reads all that needs no cast; casts follow in bounded pieces. Last the
frameworks make their arrays, in batches.
"""

from __future__ import annotations

from typing import Any

from waystation._errors import Corrupt
from waystation._options import Options
from waystation.checkpoint import fill, wanted
from waystation.checkpoint.context import current_options
from waystation.checkpoint.handle import AsyncResponse, Progress
from waystation.checkpoint.metadata import CheckpointMetadata, choose_checkpointable
from waystation.checkpoint.paths import PathLike, require_checkpoint, resolve
from waystation.layouts.native.read import open_checkpoint, open_checkpointable
from waystation.tree import unflatten

AUTO = "AUTO"


def load(path: PathLike, abstract_state: Any = None, *, checkpointable_name: str = AUTO) -> Any:
    """Loads a state.

    Args:
        path: The checkpoint.
        abstract_state: What is wanted: the same tree with abstract leaves (`jax.ShapeDtypeStruct`
            with or without a sharding, tensors on any device, NumPy arrays, types or values of
            scalars), or what `metadata` returned. Each leaf comes back as the kind of array that the
            abstract leaf is, with its dtype and sharding, in the given containers. Without it
            everything comes back as it was saved.
        checkpointable_name: Which checkpointable; by default the only one, or `state`.

    Returns:
        The state.

    Raises:
        NotFound: There is no checkpoint, or no such checkpointable.
        InvalidInput: The path is no checkpoint, or a leaf cannot be had as wanted.
        StructureMismatch: The checkpoint and the abstract state differ; the message shows how.
        Corrupt: Bytes are not what was written; names file and array.
        Unsupported: The checkpoint is of a newer format version.
    """
    return _load(path, abstract_state, checkpointable_name, current_options(), Progress())


def load_async(
    path: PathLike, abstract_state: Any = None, *, checkpointable_name: str = AUTO
) -> AsyncResponse[Any]:
    """Loads a state in the background; takes what `load` takes, and its handle raises what it raises."""
    options = current_options()
    target = resolve(path)
    require_checkpoint(target)
    return AsyncResponse(
        f"loading '{target}'",
        lambda progress: _load(target, abstract_state, checkpointable_name, options, progress),
    )


def _load(
    path: PathLike, abstract_state: Any, checkpointable_name: str, options: Options, progress: Progress
) -> Any:
    target = resolve(path)
    require_checkpoint(target)
    record = open_checkpoint(target)
    name = choose_checkpointable(record, checkpointable_name, target)
    opened = open_checkpointable(target, record, name)
    if isinstance(abstract_state, CheckpointMetadata):
        abstract_state = abstract_state.metadata
    if abstract_state is None:
        decided = wanted.as_saved(opened.tree)
    else:
        decided = wanted.as_asked(opened.tree, abstract_state)
    try:
        leaves = fill.fill(opened, decided, options, progress)
    except Corrupt as error:
        raise error.where(checkpoint=target)
    return unflatten(decided.structure, leaves)
