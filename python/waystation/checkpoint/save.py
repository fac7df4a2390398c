"""`save` and `save_async`: a state becomes a committed checkpoint, or leaves no trace.

The caller's thread takes the state apart, refuses what can be refused, and makes the state safe from
later changes. Then one thread writes, makes durable, and commits. Cancelled or failed at any point,
the attempt's directory is removed and what stood at the destination stays.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from waystation._errors import Cancelled, InvalidInput, WaystationError
from waystation._options import Options
from waystation.checkpoint import prepare, snapshot
from waystation.checkpoint.context import current_options
from waystation.checkpoint.handle import AsyncResponse, Progress
from waystation.checkpoint.paths import PathLike, check_destination, resolve
from waystation.layouts.native import commit, orphans
from waystation.layouts.native.attempts import Attempt, remove_dead
from waystation.layouts.native.records import dump_json
from waystation.layouts.native.write import Observer, Prepared, write_checkpoint

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
        DiskFull, PermissionDenied, Unavailable: The disk refuses; nothing is left behind.
    """
    target, options = _check(path, checkpointable_name, custom_metadata, overwrite=overwrite)
    prepared = prepare.plan(checkpointable_name, prepare.describe(state), options)
    _write(target, [prepared], custom_metadata, options, Progress(), overwrite=overwrite)


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
    target, options = _check(path, checkpointable_name, custom_metadata, overwrite=overwrite)
    described = prepare.describe(state)
    drain = snapshot.take(described.sources, options.memory)
    prepared = prepare.plan(checkpointable_name, described, options)
    # The thread must not keep what the caller may want to be freed: leaves that were copied.
    del state, described
    copied_out = threading.Event()
    work = _background_work(
        target, [prepared], custom_metadata, options, copied_out, drain, overwrite=overwrite
    )
    response = AsyncResponse(f"saving '{target}'", work)
    if drain:
        copied_out.wait()
    return response


def _check(
    path: PathLike, checkpointable_name: str, custom_metadata: Any, *, overwrite: bool
) -> tuple[str, Options]:
    """Everything that can be refused without looking at the state."""
    target = resolve(path)
    if not _is_plain_name(checkpointable_name):
        raise InvalidInput(
            f"{checkpointable_name!r} cannot be the name of a checkpointable: use a plain file name"
        )
    try:
        dump_json(custom_metadata)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"custom_metadata must be a JSON value: {error}") from error
    check_destination(target, overwrite=overwrite)
    return target, current_options()


def _is_plain_name(name: object) -> bool:
    """Whether a name can be that of a directory inside the checkpoint."""
    plain = isinstance(name, str) and name.isprintable() and not set(name) & {"/", "\\"}
    return plain and bool(name) and not str(name).startswith(".")


def _background_work(
    target: str,
    prepared: list[Prepared],
    custom_metadata: Any,
    options: Options,
    copied_out: threading.Event,
    drain: int,
    *,
    overwrite: bool,
) -> Callable[[Progress], None]:
    def work(progress: Progress) -> None:
        try:
            _write(
                target,
                prepared,
                custom_metadata,
                options,
                progress,
                overwrite=overwrite,
                on_copied_out=lambda _: copied_out.set(),
                drain=drain,
            )
        finally:
            copied_out.set()
            prepared.clear()

    return work


def _write(
    target: str,
    prepared: list[Prepared],
    custom_metadata: Any,
    options: Options,
    progress: Progress,
    *,
    overwrite: bool,
    on_copied_out: Callable[[str], None] = lambda _: None,
    drain: int = 0,
) -> None:
    try:
        _attempt(
            target, prepared, custom_metadata, options, progress, on_copied_out, drain, overwrite=overwrite
        )
    except WaystationError as error:
        raise error.where(checkpoint=target)


def _attempt(
    target: str,
    prepared: list[Prepared],
    custom_metadata: Any,
    options: Options,
    progress: Progress,
    on_copied_out: Callable[[str], None],
    drain: int,
    *,
    overwrite: bool,
) -> None:
    parent, name = os.path.split(target)
    remove_dead(parent, name)
    if overwrite:
        orphans.remove_dead(target)
    attempt = Attempt(target, options.file.path_permission_mode)
    try:
        observer = Observer(progress.add, on_copied_out, {entry.name: drain for entry in prepared})
        write_checkpoint(attempt, prepared, custom_metadata, options, observer)
        if progress.cancelled:
            raise Cancelled(f"saving '{target}' was cancelled; nothing was written", path=target)
        if overwrite and os.path.lexists(target):
            commit.publish_over(attempt)
        else:
            commit.publish_new(attempt)
    except BaseException:
        attempt.discard()
        raise
