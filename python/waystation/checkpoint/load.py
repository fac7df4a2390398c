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
from waystation.checkpoint import opening, remote_state, wanted
from waystation.checkpoint.handlers.choice import STATE
from waystation.checkpoint.loading import Loading
from waystation.checkpoint.metadata import CheckpointMetadata
from waystation.checkpoint.paths import PathLike, locate, naming_checkpoint
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
        abstract_state: The requested state: the same tree with abstract leaves (`jax.ShapeDtypeStruct` with
            or without a sharding, tensors on any device, NumPy arrays, types or values of scalars), or the
            result of `metadata`. Any other object with a shape and a dtype requests a NumPy array, or with a
            sharding a JAX array. A sharding over an abstract mesh uses the mesh that the calling thread has
            set (`jax.set_mesh`). Each leaf loads as the kind of array of its abstract leaf, with that dtype
            and sharding, in the given containers. Without an abstract state everything loads as it was
            saved. For an array of the runtime, its hosts load a new array of that shape, dtype, sharding and
            slice; the other leaves of such a state can be arrays of NumPy, JAX and torch, and scalars.
        checkpointable_name: The checkpointable to load; by default `state`, or the first state by name if no
            checkpointable has that name.
        framework: `numpy` loads every array as a NumPy array, for example on fewer devices than it was saved
            on. Only without an abstract state. It sets the option `array.loading.restore_on_host` for one
            call.

    Returns:
        The state.

    Raises:
        CheckpointNotFound: No checkpoint exists at the path.
        CheckpointableNotFound: The checkpoint has no such checkpointable.
        InvalidInput: The path is not a checkpoint, the checkpointable is not a state, or a leaf cannot be
            loaded as requested.
        StructureMismatch: The checkpoint and the abstract state differ; the message shows how.
        Corrupt: Bytes differ from what was written; the message names file and array.
        Unavailable: The checkpoint was replaced each time that the load began.
        Unsupported: The checkpoint has a newer format version.
    """
    options = _options(framework, abstract_state)
    backend = remote_state.backend_of(abstract_state)
    if backend is not None:
        _require_plain(checkpointable_name)
        return backend.load(locate(path), abstract_state)
    loading = Loading(locate(path), [state_name(checkpointable_name)], options)
    return loading.run(abstract_state, Progress())


def load_async(
    path: PathLike,
    abstract_state: Any = None,
    *,
    checkpointable_name: str | None = AUTO,
    framework: Literal["numpy"] | None = None,
) -> AsyncResponse[Any]:
    """Loads a state in the background; takes what `load` takes, and its handle raises what it raises.

    In a program of several processes, each reads what it needs, because collectives of a background thread
    could come between those of the program. The option `array.loading.load_and_broadcast = True` permits
    them; the program must then use no collectives until the handle is done.
    """
    options = _options(framework, abstract_state)
    backend = remote_state.backend_of(abstract_state)
    if backend is not None:
        _require_plain(checkpointable_name)
        return backend.load_async(locate(path), abstract_state)
    name = state_name(checkpointable_name)
    loading = Loading(locate(path), [name], options, is_in_background=True)
    loading.require_checkpoint()
    run = with_mesh_in_effect(functools.partial(loading.run, abstract_state))
    return loading.in_background(run)


def _options(framework: str | None, abstract_state: Any) -> Options:
    """The options in effect, with what `framework` says of them."""
    options = current_options()
    if framework is None:
        return options
    if framework != "numpy":
        raise InvalidInput(
            f"framework must be 'numpy' or None, not {framework!r}; the leaves of an abstract state ask for "
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
        abstract_checkpointables: Names and abstract values: for a state what `load` takes, for an object
            that saves itself the object to update, for others what their handler accepts; None loads a
            checkpointable as it was saved. Others are not loaded. The result of `checkpointables_metadata`
            is accepted as well. By default everything is loaded as it was saved.

    Returns:
        The loaded checkpointables, by name.

    Raises:
        CheckpointNotFound: No checkpoint exists at the path.
        CheckpointableNotFound: The checkpoint has no checkpointable of a given name.
        NoHandler: No registered handler can load one of them.
        HandlerFailed: A handler raised an exception.
        InvalidInput, StructureMismatch, Corrupt, Unsupported: As `load` does.
    """
    loading, abstracts = _opened(path, abstract_checkpointables, is_in_background=False)
    loading.begin(abstracts, Progress())
    return loading.end()


def load_checkpointables_async(
    path: PathLike, abstract_checkpointables: Any = None
) -> AsyncResponse[dict[str, Any]]:
    """Loads several checkpointables in the background; takes what `load_checkpointables` takes.

    Errors of the arguments or the metadata are raised at once, others by the handle. Collectives are used as
    in `load_async`.
    """
    loading, abstracts = _opened(path, abstract_checkpointables, is_in_background=True)
    progress = Progress()
    loading.begin(abstracts, progress)
    return loading.in_background(lambda _: loading.end(), progress)


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
            f"abstract_checkpointables must be a dict of what to load by name, not {abstracts!r:.60}"
        )
    check_names(abstracts or {})
    return list(abstracts) if abstracts else None, dict(abstracts or {})


def _opened(path: PathLike, asked: Any, *, is_in_background: bool) -> tuple[Loading, dict[str, Any]]:
    """A load of what is asked for, which is empty where everything is."""
    names, abstracts = asked_for(asked)
    loading = Loading(locate(path), names, current_options(), is_in_background=is_in_background)
    return loading, abstracts


def require_match(path: PathLike, abstract_state: Any) -> None:
    """Refuses an abstract state that `load` would refuse for its containers, leaves or shapes.

    In one process; no data file is opened.

    Raises:
        CheckpointNotFound, CheckpointableNotFound, InvalidInput, StructureMismatch, Corrupt, Unsupported: As
            `waystation.load`.
    """
    target, options = locate(path), current_options()
    opened = opening.open_checkpoint(target, [AUTO], options)
    (stored,) = opened.stored.values()
    tree = opening.require_state(stored, target).tree
    with naming_checkpoint(target):
        decided = wanted.as_asked(tree, abstract_state, options.pytree.loading)
        extents_may_differ = options.array.loading.enable_padding_and_truncation
        wanted.check_shapes(tree, decided, extents_may_differ=extents_may_differ)
