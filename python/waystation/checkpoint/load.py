"""`load`, `load_checkpointables` and both in the background: a checkpoint becomes what was saved.

First everything is decided: which stored leaf each wanted leaf takes, where its bytes go, what has to
be cast, and in a program of several processes whether one reads for others. Then one engine job for each
state reads all that needs no cast; casts follow in bounded pieces. Last the frameworks make their arrays, in
batches. What handlers have saved they load, from files that have been verified.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any, Literal

from waystation._errors import InvalidInput, Unsupported
from waystation._options import Options
from waystation._options.in_effect import current_options
from waystation.checkpoint import remote_state
from waystation.checkpoint.handlers.choice import STATE
from waystation.checkpoint.loading import Loading
from waystation.checkpoint.metadata import CheckpointMetadata
from waystation.checkpoint.paths import PathLike, resolve
from waystation.checkpoint.save import check_names
from waystation.checkpoint.stored import AUTO, state_name
from waystation.frameworks.mesh_in_effect import with_mesh_in_effect
from waystation.transfers.handle import AsyncResponse, Progress


def load(
    path: PathLike,
    abstract_state: Any = None,
    *,
    checkpointable_name: str | None = AUTO,
    framework: Literal["numpy"] | None = None,
) -> Any:
    """Loads a state.

    Args:
        path: The checkpoint; with the option `checkpoint_layout`, also a safetensors file, or a directory of
            such files, whose tensors are then a flat dict.
        abstract_state: What is wanted: the same tree with abstract leaves (`jax.ShapeDtypeStruct`
            with or without a sharding, tensors on any device, NumPy arrays, types or values of
            scalars; any object with a shape and a dtype asks for a NumPy array, with a sharding for one of
            JAX), or what `metadata` returned. A sharding over an abstract mesh is over the mesh that the
            calling thread has set (`jax.set_mesh`). Each leaf comes back as the kind of array that the
            abstract leaf is, with its dtype and sharding, in the given containers. Without it
            everything comes back as it was saved. For an array of the runtime there is a new one of its
            shape, dtype, sharding and slice, which its hosts load; other leaves of such a state can be
            arrays of NumPy and JAX, and scalars.
        checkpointable_name: Which checkpointable; by default `state`, or the first state by name where there
            is none of that name.
        framework: `numpy` loads every array as one of NumPy, whatever saved it and wherever it was: on fewer
            devices than it was saved on, say. Only without an abstract state. It is the option
            `array.loading.restore_on_host` for one call.

    Returns:
        The state.

    Raises:
        CheckpointNotFound: There is no checkpoint.
        CheckpointableNotFound: It has no such checkpointable.
        InvalidInput: The path is no checkpoint, the checkpointable no state, or a leaf cannot be had as
            wanted.
        StructureMismatch: The checkpoint and the abstract state differ; the message shows how.
        Corrupt: Bytes are not what was written; names file and array.
        Unavailable: The checkpoint was replaced each time that the load began.
        Unsupported: The checkpoint is of a newer format version.
    """
    options = _options(framework, abstract_state)
    backend = remote_state.backend_of(abstract_state)
    if backend is not None:
        _require_plain(checkpointable_name)
        return backend.load(resolve(path), abstract_state)
    loading = Loading(resolve(path), [state_name(checkpointable_name)], options)
    return loading.run(abstract_state, Progress())


def load_async(
    path: PathLike,
    abstract_state: Any = None,
    *,
    checkpointable_name: str | None = AUTO,
    framework: Literal["numpy"] | None = None,
) -> AsyncResponse[Any]:
    """Loads a state in the background; takes what `load` takes, and its handle raises what it raises.

    In a program of several processes, each reads what it needs: collectives from a thread in the background
    could come between those of the program. With the option `array.loading.load_and_broadcast = True` there
    are such; let the program have none of its own then until the handle is done.
    """
    options = _options(framework, abstract_state)
    backend = remote_state.backend_of(abstract_state)
    if backend is not None:
        _require_plain(checkpointable_name)
        return backend.load_async(resolve(path), abstract_state)
    name = state_name(checkpointable_name)
    loading = Loading(resolve(path), [name], options, is_in_background=True)
    loading.require_checkpoint()
    run = with_mesh_in_effect(functools.partial(loading.run, abstract_state))
    return AsyncResponse(f"loading '{loading.target}'", run)


def _options(framework: str | None, abstract_state: Any) -> Options:
    """The options in effect, with what `framework` says of them."""
    options = current_options()
    if framework is None:
        return options
    if framework != "numpy":
        raise InvalidInput(
            f"framework is 'numpy' or None, not {framework!r}; the leaves of an abstract state ask for "
            "arrays of other frameworks"
        )
    if abstract_state is not None:
        raise InvalidInput("framework='numpy' and an abstract state both say what arrays become; give one")
    changed = options.thawed()
    changed.array.loading.restore_on_host = True
    return changed.frozen()


def _require_plain(checkpointable_name: str | None) -> None:
    """Refuses what hosts do not load."""
    if checkpointable_name not in {None, AUTO, STATE}:
        raise Unsupported(f"hosts load what was saved as '{STATE}', not '{checkpointable_name}'")


def load_checkpointables(path: PathLike, abstract_checkpointables: Any = None) -> dict[str, Any]:
    """Loads several checkpointables of one checkpoint.

    Args:
        path: The checkpoint.
        abstract_checkpointables: Names, and what is wanted of each: for a state what `load` takes, for an
            object that saves itself the object that is to be changed into what was saved, for others what
            their handler says; None for what was saved, as it was. What is not named is not loaded. What
            `checkpointables_metadata` returned is such, too. By default everything is loaded as it was saved.

    Returns:
        What was loaded, by name.

    Raises:
        CheckpointNotFound: There is no checkpoint.
        CheckpointableNotFound: It has no checkpointable of a name that is given.
        NoHandler: No registered handler can load one of them.
        HandlerFailed: The handler of one of them did.
        InvalidInput, StructureMismatch, Corrupt, Unsupported: As `load` does.
    """
    loading, abstracts = _opened(path, abstract_checkpointables, is_in_background=False)
    loading.begin(abstracts, Progress())
    return loading.end()


def load_checkpointables_async(
    path: PathLike, abstract_checkpointables: Any = None
) -> AsyncResponse[dict[str, Any]]:
    """Loads several checkpointables in the background; takes what `load_checkpointables` takes.

    What is wrong with the call or the metadata is raised at once, the rest by the handle. Collectives are as
    `load_async` says.
    """
    loading, abstracts = _opened(path, abstract_checkpointables, is_in_background=True)
    progress = Progress()
    loading.begin(abstracts, progress)
    return AsyncResponse(f"loading '{loading.target}'", lambda _: loading.end(), progress)


def load_pytree(*args: Any, **kwargs: Any) -> Any:
    """Deprecated: use `load`."""
    warnings.warn("load_pytree is deprecated: use load", DeprecationWarning, stacklevel=2)
    return load(*args, **kwargs)


def load_pytree_async(*args: Any, **kwargs: Any) -> AsyncResponse[Any]:
    """Deprecated: use `load_async`."""
    warnings.warn("load_pytree_async is deprecated: use load_async", DeprecationWarning, stacklevel=2)
    return load_async(*args, **kwargs)


def asked_for(asked: Any) -> tuple[list[str] | None, dict[str, Any]]:
    """The names of what is asked for, None for everything, and what each is wanted as."""
    abstracts = asked.metadata if isinstance(asked, CheckpointMetadata) else asked
    if abstracts is not None and not isinstance(abstracts, dict):
        raise InvalidInput(
            f"abstract_checkpointables is a dict of names and what is wanted of each, not {abstracts!r:.60}"
        )
    check_names(abstracts or {})
    return list(abstracts) if abstracts else None, dict(abstracts or {})


def _opened(path: PathLike, asked: Any, *, is_in_background: bool) -> tuple[Loading, dict[str, Any]]:
    """A load of what is asked for, which is empty where everything is."""
    names, abstracts = asked_for(asked)
    loading = Loading(resolve(path), names, current_options(), is_in_background=is_in_background)
    return loading, abstracts
