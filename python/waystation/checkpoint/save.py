"""`save` and `save_async`: a state becomes a committed checkpoint, or leaves no trace.

The caller's thread takes the state apart, refuses what can be refused, and makes the state safe from
later changes. Then one thread writes, makes durable, and commits. Cancelled or failed at any point,
the attempt's directory is removed and what stood at the destination stays.
"""

from __future__ import annotations

import threading
from typing import Any

from waystation.checkpoint.context import current_options
from waystation.checkpoint.handle import AsyncResponse, Progress
from waystation.checkpoint.local_saving import LocalSaving
from waystation.checkpoint.paths import PathLike, resolve
from waystation.checkpoint.saving import Saving

DEFAULT_NAME = "state"


def save(
    path: PathLike,
    state: Any,
    *,
    checkpointable_name: str = DEFAULT_NAME,
    overwrite: bool = False,
    custom_metadata: Any = None,
) -> None:
    """Saves a state and returns when it is durable and committed.

    Args:
        path: The directory that becomes the checkpoint. Missing parents are created.
        state: A tree of containers (dict, list, tuple, named tuple, dataclass, registered nodes)
            with arrays (JAX, torch, NumPy), numbers, strings and bytes as leaves.
        checkpointable_name: Under which name the state stands in the checkpoint.
        overwrite: Replace a checkpoint that is there; it stays whole until the new one is.
        custom_metadata: A JSON value to keep with the checkpoint.

    Raises:
        Conflict: Something is at `path` (and is no checkpoint, with `overwrite`).
        Unsupported: A leaf's type cannot be saved; the message has its key path.
        InvalidInput: A leaf, option or path is wrong.
        DiskFull, PermissionDenied, Unavailable: The disk refuses; nothing is left behind. Unavailable as
            well if another process of the program has died or does not come.
    """
    with _open(path, checkpointable_name, overwrite=overwrite) as saving:
        saving.begin(custom_metadata)
        saving.prepare(state)
        saving.finish(Progress())


def save_async(
    path: PathLike,
    state: Any,
    *,
    checkpointable_name: str = DEFAULT_NAME,
    overwrite: bool = False,
    custom_metadata: Any = None,
) -> AsyncResponse[None]:
    """Saves a state in the background, safe from whatever happens to it after this returns.

    Takes what `save` takes. CPU JAX arrays are held by view, which keeps their values even when they
    are donated or deleted. NumPy arrays, torch tensors and arrays in GPU memory are copied, up to
    `memory.snapshot_bytes`; beyond that the call blocks until the rest has been written out.

    Returns:
        The handle: `result()` returns once the checkpoint is durable and committed.

    Raises:
        Conflict, Unsupported, InvalidInput, PermissionDenied: As `save` does, before it returns. What
            fails later is raised by the handle.
    """
    saving = _open(path, checkpointable_name, overwrite=overwrite)
    with saving.closed_on_error():
        saving.begin(custom_metadata)
        drained = saving.prepare(state, snapshot=True)
    # The thread must not keep what the caller may want to be freed: leaves that were copied.
    del state
    copied_out = threading.Event()

    def work(progress: Progress) -> None:
        try:
            with saving:
                saving.finish(progress, copied_out.set)
        finally:
            copied_out.set()

    response = AsyncResponse(f"saving '{saving.target}'", work)
    if not drained:
        try:
            copied_out.wait()
        except BaseException:  # Ctrl-C: the caller may change what is still read, and has no handle
            response.cancel()
            raise
    return response


def _open(path: PathLike, name: str, *, overwrite: bool) -> Saving:
    """A save to the kind of storage that the options say."""
    options = current_options()
    kind = LocalSaving if options.multiprocessing.primary_host is None else Saving
    return kind(resolve(path), name, options, overwrite=overwrite)
