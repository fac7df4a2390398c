"""`torch.distributed.checkpoint` on this engine: `import waystation.integrations.dcp as dcp`, or `install()`.

`save`, `load` and `async_save` take the arguments of torch's functions and act as these do, on checkpoints of
Waystation: asynchronous without a second process, committed at once, verified by checksums. Checkpoints that
torch has written are still loaded, by torch's own function, so a run goes on from where it was. Planners and
storages that define formats of their own go to torch's functions, too. Every other name is torch's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager
from torch.distributed.checkpoint.stateful import Stateful

from waystation import storage
from waystation._errors import Conflict, InvalidInput, StructureMismatch
from waystation._options import in_effect
from waystation.checkpoint import CheckpointMetadata, metadata
from waystation.checkpoint import load as load_state
from waystation.checkpoint import save as save_state
from waystation.checkpoint import save_async as save_state_async
from waystation.checkpoint.paths import locate
from waystation.checkpoint.sessions import open_session
from waystation.coordination import collective
from waystation.integrations import differing
from waystation.integrations.state_dicts import asked, filling, having, is_of_tensors, plain, put, taking_part
from waystation.storage.foreign import TORCH_METADATA
from waystation.transfers.handle import future_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

__all__ = ["async_save", "install", "load", "save", "uninstall"]

_log = logging.getLogger("waystation")

# Not all of its names are exported, as type checkers see it.
genuine: Any = torch.distributed.checkpoint
# Torch's own functions, also once `install` has put ours in their place.
_SAVE, _LOAD, _ASYNC_SAVE = genuine.save, genuine.load, genuine.async_save
# Older releases of torch do not export the readers and writers by fsspec.
_STORAGES = tuple(
    getattr(genuine, name)
    for name in ("FileSystemReader", "FileSystemWriter", "FsspecReader", "FsspecWriter")
    if hasattr(genuine, name)
)
_PLANNERS = (genuine.DefaultLoadPlanner, genuine.DefaultSavePlanner)
# What `install` has replaced: the names of a module, which of them, and what it was.
_replaced: list[tuple[dict[str, Any], str, Any]] = []


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: Any = None,
    planner: Any = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Any:
    """Saves a state dict, as `torch.distributed.checkpoint.save` does; returns once that is committed.

    Args:
        state_dict: Tensors, DTensors, numbers, strings, None and containers of these. Of each `Stateful` its
            `state_dict()` is saved. Processes may have different keys; of what several have at one key and is
            no DTensor, one is saved, as torch does.
        checkpoint_id: The directory or location of the checkpoint.
        storage_writer: One of torch's for file systems, whose path is taken; others write formats of their
            own, and are given to torch's function.
        planner: Torch's default planner, or None; others are given to torch's function.
        process_group: The processes that save; by default all.
        no_dist: This process saves alone.
        use_collectives: Without effect.

    Returns:
        None, where torch returns metadata of its own format.

    Raises:
        InvalidInput: No place is given.
        Conflict: There is something else than a checkpoint of Waystation at that place.
        StructureMismatch: Two processes have different tensors at one key.
        Unsupported: A leaf is an object that only pickle could save.
        WaystationError: As `waystation.save` does.
    """
    if not _is_ours(storage_writer, planner):
        return _SAVE(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_writer=storage_writer,
            planner=planner,
            process_group=process_group,
            **_beyond_defaults(no_dist=(no_dist, False), use_collectives=(use_collectives, True)),
        )
    path = _place(checkpoint_id, storage_writer)
    with taking_part(process_group, no_dist=no_dist):
        state = differing.joined_by_all(plain(_of_stateful(state_dict)), path)
        save_state(path, state, overwrite=_may_overwrite(storage_writer))
    return None


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: Any = None,
    planner: Any = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: Any = None,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Future[Any] | AsyncSaveResponse:
    """Saves a state dict in the background, as `torch.distributed.checkpoint.async_save` does.

    Takes the arguments of `save`. The tensors may be changed once it returns, whatever the stager.

    Args:
        state_dict: See `save`.
        checkpoint_id: See `save`.
        storage_writer: See `save`.
        planner: See `save`.
        process_group: See `save`.
        async_checkpointer_type: Without effect: threads of the engine write, and hold no lock of Python.
        async_stager: With one that stages in the background, the result is an `AsyncSaveResponse`, whose
            staging is complete.
        no_dist: See `save`.
        use_collectives: Without effect.

    Returns:
        A future, whose result is None once the checkpoint is committed. A failure that nobody asks it for is
        logged at the end of the program, which ends with status 1 then.
    """
    if not _is_ours(storage_writer, planner):
        given: Future[Any] | AsyncSaveResponse = _ASYNC_SAVE(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_writer=storage_writer,
            planner=planner,
            process_group=process_group,
            **_beyond_defaults(
                async_checkpointer_type=(async_checkpointer_type, None),
                async_stager=(async_stager, None),
                no_dist=(no_dist, False),
                use_collectives=(use_collectives, True),
            ),
        )
        return given
    path = _place(checkpoint_id, storage_writer)
    with taking_part(process_group, no_dist=no_dist):
        state = differing.joined_by_all(plain(_of_stateful(state_dict)), path)
        response = save_state_async(path, state, overwrite=_may_overwrite(storage_writer))
    uploaded: Future[Any] = future_of(response)
    both: Any = getattr(state_dict_saver, "AsyncSaveResponse", None)  # older releases lack it
    if both is None or async_stager is None or isinstance(async_stager, BlockingAsyncStager):
        return uploaded
    staged: Future[None] = Future()
    staged.set_result(None)
    response_of_both: AsyncSaveResponse = both(staging_completion=staged, upload_completion=uploaded)
    return response_of_both


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: Any = None,
    planner: Any = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """Loads into a state dict, as `torch.distributed.checkpoint.load` does.

    Tensors are loaded in place, whatever devices, meshes and placements they have; other values of the dict
    are replaced by what was saved, a list or tuple without tensors as a whole. Each `Stateful` is given its
    part by `load_state_dict()`. The checkpoint may hold more than is asked for, and processes may ask for
    different keys.

    Args:
        state_dict: What is loaded.
        checkpoint_id: The checkpoint: one of Waystation, or one that torch has written.
        storage_reader: One of torch's for file systems, whose path is taken; others are given to torch's
            function.
        planner: Torch's default planner, or None; others are given to torch's function. With its
            `allow_partial_load`, or with the option `pytree.loading.keep_missing`, values that the checkpoint
            lacks stay as they are.
        process_group: The processes that load; by default all.
        no_dist: This process loads alone.

    Raises:
        InvalidInput: No place is given.
        CheckpointNotFound: There is no checkpoint at that place.
        StructureMismatch: The checkpoint lacks a value, or a tensor has another shape.
        Conflict: The checkpoint was replaced while it was loaded; tensors may hold a part of it.
        WaystationError: As `waystation.load` does.
    """
    is_ours = _is_ours(storage_reader, planner)
    path = _place(checkpoint_id, storage_reader) if is_ours else ""
    if not is_ours or storage.is_there(os.path.join(path, TORCH_METADATA)):
        _log.info("torch loads '%s'", path or checkpoint_id)
        _LOAD(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_reader=storage_reader,
            planner=planner,
            process_group=process_group,
            **_beyond_defaults(no_dist=(no_dist, False)),
        )
        return
    states = _of_stateful(state_dict)
    keep_missing = in_effect.current_options().pytree.loading.keep_missing
    keep_missing = keep_missing or getattr(planner, "allow_partial_load", False)
    with (
        taking_part(process_group, no_dist=no_dist) as options,
        filling(options, keep_missing=keep_missing),
    ):
        loaded = _loaded_by_all(path, states)
    for key, value in state_dict.items():
        if isinstance(value, Stateful):
            value.load_state_dict(put(states[key], loaded[key]))
        else:
            state_dict[key] = put(value, loaded[key])


def install() -> None:
    """Puts `save`, `load` and `async_save` in the place of torch's, for libraries that call these.

    Modules that have imported the functions by name get the new ones, too. What keeps one of torch's
    elsewhere (an attribute of an object, the default of an argument) keeps it.
    """
    ours = {id(_SAVE): save, id(_LOAD): load, id(_ASYNC_SAVE): async_save}
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if names is globals() or not isinstance(names, dict):
            continue
        for name, value in list(names.items()):
            if id(value) in ours:
                names[name] = ours[id(value)]
                _replaced.append((names, name, value))


def uninstall() -> None:
    """Puts torch's own functions back where `install` has replaced them."""
    while _replaced:
        names, name, value = _replaced.pop()
        if names.get(name) in (save, load, async_save):
            names[name] = value


def __getattr__(name: str) -> Any:
    return getattr(genuine, name)


def _is_ours(own_storage: Any, planner: Any) -> bool:
    """Whether neither says that the format is another one."""
    return (own_storage is None or type(own_storage) in _STORAGES) and (
        planner is None or type(planner) in _PLANNERS
    )


def _beyond_defaults(**arguments: tuple[Any, Any]) -> dict[str, Any]:
    """The arguments that torch's function has to be given: older releases do not have all of them."""
    return {name: value for name, (value, default) in arguments.items() if value is not default}


def _place(checkpoint_id: str | os.PathLike[str] | None, own_storage: Any) -> str:
    """The location that is meant."""
    if checkpoint_id is None:
        checkpoint_id = getattr(own_storage, "path", None)
    if checkpoint_id is None:
        raise InvalidInput("give the place of the checkpoint as checkpoint_id")
    return locate(checkpoint_id)


def _may_overwrite(writer: Any) -> bool:
    """Whether a checkpoint is replaced, as torch's writers do unless they are told otherwise."""
    return bool(getattr(writer, "overwrite", True))


def _of_stateful(state_dict: dict[str, Any]) -> dict[str, Any]:
    """What is saved of each value, or loaded into it."""
    return {
        key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state_dict.items()
    }


def _loaded_by_all(path: str, states: dict[str, Any]) -> dict[str, Any]:
    """Loads what all processes ask for: together if that is the same, else each its own, and all or none."""
    options = in_effect.current_options()
    with contextlib.closing(open_session(f"keys of '{path}'", options)) as session:
        if not differing.have_same_keys(states, session):
            own = session.processes[session.process_index]
            alone = options.thawed()
            alone.multiprocessing.active_processes = {own}
            alone.multiprocessing.primary_host = own
            with having(alone):
                loaded, _ = collective.attempt(session, lambda: _loaded(path, states))
            return loaded
    return _loaded(path, states)


def _loaded(path: str, states: dict[str, Any]) -> dict[str, Any]:
    """Loads tensors as they are, and in the places of other values what is stored there."""
    loaded: dict[str, Any]
    if is_of_tensors(states):
        loaded = load_state(path, states)
        return loaded
    found = metadata(path)
    try:
        loaded = load_state(path, asked(states, found.metadata))
    except StructureMismatch:
        _require_same_version(path, found)
        raise
    _require_same_version(path, found)
    return loaded


def _require_same_version(path: str, found: CheckpointMetadata[Any]) -> None:
    """Refuses what was loaded of another version than the one that was asked what is stored."""
    if metadata(path).commit_timestamp_ns != found.commit_timestamp_ns:
        raise Conflict(
            f"'{path}' was replaced while it was loaded; load it again (tensors may hold a part of it)",
            path=path,
        )
