"""`save`, `save_checkpointables` and both in the background: what is given becomes a committed checkpoint, or
leaves no trace.

The caller's thread takes states apart, has handlers take what is theirs, refuses what can be refused, and
makes everything safe from later changes. Then one thread writes, makes durable, and commits. Cancelled or
failed at any point, the attempt's directory is removed and what stood at the destination stays.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import TypeVar

from waystation import storage
from waystation._arguments import require_type
from waystation._errors import Conflict, InvalidInput, Unsupported
from waystation._options.in_effect import current_options
from waystation.checkpoint import published, remote_state
from waystation.checkpoint.handlers.choice import METRICS, STATE
from waystation.checkpoint.local_saving import OwnStorage
from waystation.checkpoint.native_saving import (
    EarlierCheckpoint,
    FileLayout,
    NativeLayout,
    NewPlace,
    SharedStorage,
)
from waystation.checkpoint.orbax_saving import OrbaxLayout
from waystation.checkpoint.paths import PathLike, locate, require_native_checkpoint, resolve
from waystation.checkpoint.saving import Destination, Saving
from waystation.checkpoint.store_saving import SharedStore
from waystation.layouts.native import commit, orphans
from waystation.storage.attempts import Attempt
from waystation.transfers.handle import AsyncResponse, Progress

R = TypeVar("R", bound=AsyncResponse[Any], default=AsyncResponse[None])

# A checkpointable of such a name could not be told from what the library itself means by it.
RESERVED_NAMES = frozenset({"AUTO", METRICS, "_CHECKPOINT_DELETION"})


def save(
    path: PathLike,
    state: Any,
    *,
    checkpointable_name: str = STATE,
    overwrite: bool = False,
    custom_metadata: Any = None,
    unchanged_from: PathLike | None = None,
) -> None:
    """Saves a state and returns when it is durable and committed.

    Args:
        path: The directory that becomes the checkpoint. Missing parents are created.
        state: A tree of containers (dict, list, tuple, named tuple, dataclass, registered nodes)
            with arrays (JAX, torch, NumPy), numbers, strings and bytes as leaves. If it contains arrays of
            the runtime, their hosts save the checkpoint. The controller sends them the other leaves (tensors
            of torch included), at most 16 MiB in one state.
        checkpointable_name: The name of the state in the checkpoint.
        overwrite: Replace an existing checkpoint, which stays whole until the new one is committed.
        custom_metadata: A dict of JSON values, with strings as keys, to keep with the checkpoint.
        unchanged_from: An earlier checkpoint, on the same file system, or beside `path` in the same store.
            Arrays that are equal to its own are not written again: the new checkpoint shares its data files,
            if enough of them is unchanged.

    Raises:
        Conflict: `path` exists and is not an empty directory; with `overwrite`, it is no checkpoint either.
        CheckpointNotFound: There is no checkpoint at `unchanged_from`. One that is damaged is not an error:
            what cannot be shared is written.
        Unsupported: A leaf's type cannot be saved; the message has its key path.
        InvalidInput: A leaf, option or path is wrong.
        DiskFull, PermissionDenied, Unavailable: The disk refuses; nothing is left behind. Unavailable as
            well if another process of the program has died or does not come.
    """
    check_names([checkpointable_name])
    if published.is_saved_as_model(current_options()):
        _save_model(path, state, checkpointable_name, overwrite, custom_metadata, unchanged_from)
        return
    backend = remote_state.backend_of(state)
    if backend is None:
        write(
            path,
            {checkpointable_name: state},
            overwrite,
            custom_metadata,
            is_state=True,
            earlier=EarlierCheckpoint.given(unchanged_from),
        )
        return
    _require_state(path, checkpointable_name, unchanged_from)
    backend.save(locate(path), state, overwrite=overwrite, custom_metadata=custom_metadata)


def save_async(
    path: PathLike,
    state: Any,
    *,
    checkpointable_name: str = STATE,
    overwrite: bool = False,
    custom_metadata: Any = None,
    unchanged_from: PathLike | None = None,
) -> AsyncResponse[None]:
    """Saves a state in the background. Changes to the state after this returns do not affect the checkpoint.

    Takes the arguments of `save`. JAX arrays on the CPU are held by view, which keeps their values even if
    they are donated or deleted. NumPy arrays, torch tensors and arrays in GPU memory are copied, up to
    `memory.snapshot_bytes`; beyond that the call blocks until the rest has been written. Hosts save arrays
    of the runtime with their present values, regardless of later calls; such a save cannot be cancelled.

    Returns:
        The handle: `result()` returns once the checkpoint is durable and committed.

    Raises:
        Conflict, Unsupported, InvalidInput, PermissionDenied: As `save` does, before it returns. The handle
            raises later failures, including those of hosts.
    """
    check_names([checkpointable_name])
    if published.is_saved_as_model(current_options()):
        _save_model(path, state, checkpointable_name, overwrite, custom_metadata, unchanged_from)
        return AsyncResponse(f"saving '{locate(path)}'", lambda _: None)
    backend = remote_state.backend_of(state)
    if backend is None:
        return write_async(
            path,
            {checkpointable_name: state},
            overwrite,
            custom_metadata,
            is_state=True,
            earlier=EarlierCheckpoint.given(unchanged_from),
        )
    _require_state(path, checkpointable_name, unchanged_from)
    return backend.save_async(locate(path), state, overwrite=overwrite, custom_metadata=custom_metadata)


def save_checkpointables(
    path: PathLike,
    checkpointables: dict[str, Any],
    *,
    overwrite: bool = False,
    custom_metadata: Any = None,
    unchanged_from: PathLike | None = None,
) -> None:
    """Saves several checkpointables as one checkpoint. Each can be loaded and deleted separately.

    Args:
        path: The directory that becomes the checkpoint. Missing parents are created.
        checkpointables: Names and objects: states, JSON values, messages of protocol buffers, objects that
            save themselves (`StatefulCheckpointable`), and objects of registered handlers
            (`waystation.handlers`).
        overwrite: Replace an existing checkpoint, which stays whole until the new one is committed.
        custom_metadata: A dict of JSON values, with strings as keys, to keep with the checkpoint.
        unchanged_from: An earlier checkpoint, on the same file system, or beside `path` in the same store.
            Arrays that are equal to its own are not written again: the new checkpoint shares its data files,
            if enough of them is unchanged.

    Raises:
        NoHandler: No handler can save one of them; the message names it.
        HandlerFailed: A handler raised an exception; nothing is saved.
        Conflict, Unsupported, InvalidInput, DiskFull, PermissionDenied, Unavailable: As `save` does.
    """
    check_checkpointables(checkpointables)
    earlier = EarlierCheckpoint.given(unchanged_from)
    write(path, checkpointables, overwrite, custom_metadata, earlier=earlier)


def save_checkpointables_async(
    path: PathLike,
    checkpointables: dict[str, Any],
    *,
    overwrite: bool = False,
    custom_metadata: Any = None,
    unchanged_from: PathLike | None = None,
) -> AsyncResponse[None]:
    """Saves several checkpointables as one checkpoint in the background.

    Takes the arguments of `save_checkpointables`. Changes to states after this returns do not affect the
    checkpoint, as with `save_async`. Each handler has finished its first phase when this returns.

    Returns:
        The handle: `result()` returns once the checkpoint is durable and committed.
    """
    check_checkpointables(checkpointables)
    earlier = EarlierCheckpoint.given(unchanged_from)
    return write_async(path, checkpointables, overwrite, custom_metadata, earlier=earlier)


def save_pytree(*args: Any, **kwargs: Any) -> None:
    """Deprecated: use `save`."""
    warnings.warn("save_pytree is deprecated: use save", DeprecationWarning, stacklevel=2)
    save(*args, **kwargs)


def save_pytree_async(*args: Any, **kwargs: Any) -> AsyncResponse[None]:
    """Deprecated: use `save_async`."""
    warnings.warn("save_pytree_async is deprecated: use save_async", DeprecationWarning, stacklevel=2)
    return save_async(*args, **kwargs)


def write(
    path: PathLike,
    checkpointables: Mapping[str, Any],
    overwrite: bool,
    custom_metadata: Any,
    *,
    is_state: bool = False,
    begun_ns: int | None = None,
    on_set_aside: Callable[[str], None] | None = None,
    earlier: EarlierCheckpoint | None = None,
    on_committed: Callable[[], object] = lambda: None,
    is_flat: bool = False,
) -> None:
    """Saves, without asking whether names are reserved; for callers that know what they mean by them.

    Data files may be shared with `earlier`. `on_committed` is called once the checkpoint is committed, before
    the program hears of it. See `open_saving` for `is_flat`.
    """
    with open_saving(
        path,
        overwrite=overwrite,
        begun_ns=begun_ns,
        on_set_aside=on_set_aside,
        earlier=earlier,
        is_flat=is_flat,
    ) as saving:
        saving.begin(checkpointables, custom_metadata, is_state=is_state)
        saving.prepare(checkpointables)
        saving.finish(Progress())
    on_committed()
    saving.report()


def write_async(
    path: PathLike,
    checkpointables: Mapping[str, Any],
    overwrite: bool,
    custom_metadata: Any,
    *,
    is_state: bool = False,
    earlier: EarlierCheckpoint | None = None,
    is_flat: bool = False,
) -> AsyncResponse[None]:
    """Saves in the background, as `write` does."""
    timeout_s = current_options().asynchronous.timeout_secs
    saving = open_saving(path, overwrite=overwrite, timeout_s=timeout_s, earlier=earlier, is_flat=is_flat)
    return in_background(saving, checkpointables, custom_metadata, is_state=is_state)


def in_background(
    saving: Saving,
    checkpointables: Mapping[str, Any],
    custom_metadata: Any,
    *,
    is_state: bool = False,
    respond: Callable[[str, Callable[[Progress], None]], R] = AsyncResponse,  # type: ignore[assignment]
    on_committed: Callable[[], object] = lambda: None,
) -> R:
    """Takes the steps of a save: all that has to be done now at once, the rest in the background.

    Args:
        saving: The save.
        checkpointables: What is saved, by name.
        custom_metadata: A JSON value.
        is_state: Whether the caller says that it is a state, whatever handlers there are.
        respond: Makes the response, which runs what it is given in the background.
        on_committed: Called there once the checkpoint is committed, before the program hears of it.
    """
    copied_out = threading.Event()
    callback = current_options().asynchronous.post_finalization_callback

    def work(progress: Progress) -> None:
        try:
            with saving:
                saving.finish(progress, copied_out.set)
        finally:
            copied_out.set()
        on_committed()
        saving.report()
        if callback is not None:
            called_back(callback, saving.target)

    with saving.closed_on_error():
        saving.begin(checkpointables, custom_metadata, is_state=is_state)
        drained = saving.prepare(checkpointables, snapshot=True)
        # The thread must not keep what the caller may want to be freed: leaves that were copied.
        del checkpointables
        response = respond(f"saving '{saving.target}'", work)
    if not drained:
        try:
            copied_out.wait()
        except BaseException:  # Ctrl-C: the caller may change what is still read, and has no handle
            response.cancel()
            raise
    return response


def called_back(callback: Callable[[], object], path: str) -> None:
    """Calls what the program wants to be called once a checkpoint is committed; what it raises says so."""
    try:
        callback()
    except Exception as error:
        error.add_note(f"raised by asynchronous.post_finalization_callback; '{path}' is whole")
        raise


def _save_model(
    path: PathLike,
    state: Any,
    checkpointable_name: str,
    overwrite: bool,
    custom_metadata: Any,
    unchanged_from: PathLike | None,
) -> None:
    published.save_model(
        locate(path),
        state,
        checkpointable_name=checkpointable_name,
        overwrite=overwrite,
        custom_metadata=custom_metadata,
        shares=unchanged_from is not None,
    )


def _require_state(path: PathLike, checkpointable_name: str, unchanged_from: PathLike | None) -> None:
    """Refuses other names than the one under which hosts save, and what they cannot do."""
    if unchanged_from is not None:
        raise Unsupported(f"hosts write all arrays of a save, so unchanged_from must be None for '{path}'")
    if checkpointable_name != STATE:
        raise Unsupported(
            f"arrays of hosts are saved under the name '{STATE}', not '{checkpointable_name}': '{path}'"
        )


def open_saving(
    path: PathLike,
    *,
    overwrite: bool,
    timeout_s: float | None = None,
    begun_ns: int | None = None,
    on_set_aside: Callable[[str], None] | None = None,
    earlier: EarlierCheckpoint | None = None,
    is_flat: bool = False,
) -> Saving:
    """A save to the kind of storage that the options say, of a call that began then, or now.

    See `paths.check_destination` for `on_set_aside`. Data files may be shared with `earlier`. In Orbax's
    layouts the one checkpointable of a save that `is_flat` lies in the directory of the checkpoint itself.
    """
    options, target = current_options(), locate(path)
    deadline_s = options.multiprocessing.deadline_s
    if timeout_s is not None:
        deadline_s = min(deadline_s, timeout_s)
    is_native = options.array.saving.use_ocdbt is None
    is_in_store = storage.of(target).renames is None
    is_local = options.multiprocessing.primary_host is None
    if is_in_store and is_local:
        raise Unsupported(
            "parts of processes with storage of their own are saved to file systems only, not to "
            f"'{target}'; set multiprocessing.primary_host = 0, or save to a directory",
            path=target,
        )
    if earlier is not None and (is_local or not is_native):
        raise Unsupported(
            "checkpoints share data files in Waystation's own layout only, in storage that all "
            f"processes share, and '{target}' would be neither; save without unchanged_from",
            path=target,
        )
    layout: NativeLayout | OrbaxLayout = NativeLayout(earlier=earlier) if is_native else OrbaxLayout()
    destination: Destination = SharedStorage(NewPlace(target, overwrite, on_set_aside), layout)
    if is_in_store:
        destination = _in_store(layout, overwrite=overwrite, on_set_aside=on_set_aside)
    elif is_native and is_local:
        destination = OwnStorage(layout, overwrite=overwrite)
    begun_ns = begun_ns or time.time_ns()
    return Saving(
        target,
        options,
        layout,
        destination,
        deadline_s=deadline_s,
        begun_ns=begun_ns,
        is_ordered=True,
        is_flat=is_flat and not is_native,
        overwrites=overwrite,
    )


def _in_store(
    layout: NativeLayout | OrbaxLayout, *, overwrite: bool, on_set_aside: Callable[[str], None] | None
) -> Destination:
    if isinstance(layout, NativeLayout):
        return SharedStore(layout, overwrite=overwrite, on_set_aside=on_set_aside)
    return SharedStore(layout, overwrite=overwrite, on_set_aside=on_set_aside)


def check_checkpointables(checkpointables: object) -> None:
    """Refuses what is no set of checkpointables, and names that mean something else."""
    if not isinstance(checkpointables, dict) or not checkpointables:
        raise InvalidInput(
            f"checkpointables must be a dict of what to save by name, not {checkpointables!r:.60}"
        )
    check_names(checkpointables)


def check_names(names: Collection[str]) -> None:
    """Refuses names that mean something else, to save and to load."""
    for name in names:
        require_type("the name of a checkpointable", name, str, "a string")
    reserved = sorted(RESERVED_NAMES.intersection(names))
    if reserved:
        raise InvalidInput(f"'{reserved[0]}' cannot be the name of a checkpointable: it is reserved")


# ---- more for a checkpoint that is there --------------------------------------------------------
#
# What it has stays where it is. The new checkpointables are written like a checkpoint of their own, in an
# attempt beside it; then they move in, and a new generation of the record names them too. That is the act:
# killed before it, the checkpoint is what it was, and data that have moved in are removed like those of any
# dead overwrite.


@dataclass(frozen=True, slots=True)
class _ExistingCheckpoint:
    """A checkpoint that is there, as the place of more checkpointables."""

    target: str
    replaces = True

    def check(self, checkpointables: Collection[str]) -> None:
        """Refuses checkpoints that nothing can be added to, and names that are there."""
        require_native_checkpoint(self.target)
        orphans.remove_dead(self.target)
        record = commit.read_record(self.target)
        if record.local is not None:
            raise Unsupported(
                f"'{self.target}' is a part of a save to local storage, to which nothing can be added",
                path=self.target,
            )
        both = sorted(record.checkpointables.keys() & set(checkpointables))
        if both:
            raise Conflict(
                f"checkpoint '{self.target}' has a checkpointable '{both[0]}' already; delete that first, or "
                "give another name",
                path=self.target,
            )

    def publish(self, attempt: Attempt, layout: FileLayout) -> None:
        """Commits."""
        commit.add_in_place(attempt)
        commit.remove_replaced(attempt)


def add_checkpointables(path: PathLike, checkpointables: dict[str, Any]) -> None:
    """Adds checkpointables to a checkpoint, in one visible act; those that it has are not touched.

    In a program of several processes all call it. What loads the checkpoint meanwhile sees all of them, or
    none.

    Args:
        path: The checkpoint.
        checkpointables: Names that it does not have yet, and what is saved under them, as
            `save_checkpointables` takes it.

    Raises:
        CheckpointNotFound: There is nothing at `path`.
        Conflict: It has a checkpointable of such a name.
        Unsupported: It is a part of a save to local storage, or a leaf cannot be saved.
        NoHandler, HandlerFailed, InvalidInput, DiskFull, PermissionDenied, Unavailable: As
            `save_checkpointables` does; the checkpoint stays as it was.
    """
    check_checkpointables(checkpointables)
    options = current_options()
    if options.multiprocessing.primary_host is None:
        raise Unsupported("nothing can be added to checkpoints in local storage; save all at once")
    target, layout = resolve(path), NativeLayout()
    destination = SharedStorage(_ExistingCheckpoint(target), layout)
    deadline_s = options.multiprocessing.deadline_s
    begun_ns = time.time_ns()
    with Saving(
        target, options, layout, destination, deadline_s=deadline_s, begun_ns=begun_ns, is_ordered=True
    ) as saving:
        saving.await_those_before(Progress())  # what they leave is added to
        saving.begin(checkpointables, None)
        saving.prepare(checkpointables)
        saving.finish(Progress())
    saving.report()
