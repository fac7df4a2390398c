"""Checkpoints of states of a client: hosts move the bytes of their arrays, this program says what is where.

A save is in the order of calls: it has what arrays were when it was called. Leaves that are no arrays of
hosts, which are small, travel through here and the controller; containers need be known here only.
`waystation.save` and `load`, and both in the background, come here when they find an array of the runtime.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import jax
import numpy as np

from waystation._errors import InvalidInput, UnsupportedLeaf, WaystationError
from waystation._options import StorageOptions
from waystation._options.in_effect import current_options
from waystation.checkpoint import PLACEHOLDER, remote_state
from waystation.checkpoint.prepare import SCALARS
from waystation.checkpoint.save import called_back
from waystation.checkpoint.wanted import is_scalar, scalar_type
from waystation.frameworks import dtypes
from waystation.frameworks.base import StoredArray
from waystation.frameworks.registry import AbstractNumpy, codec_for
from waystation.layouts.native.records import callers_json
from waystation.runtime.client.carrying import asked_of, carry, check_carried, is_carried, making
from waystation.runtime.host_options import (
    SaveManner,
    options_for_hosts,
    storage_of,
)
from waystation.runtime.ir import Sharding, Value
from waystation.runtime.state_trees import StateTree, require_small
from waystation.runtime.tracing import Array
from waystation.storage import PathLike
from waystation.transfers.handle import AsyncResponse, Progress
from waystation.tree import Structure, flatten, format_key_path, iterate_leaves, unflatten

if TYPE_CHECKING:
    from waystation.runtime.client.client import Client


@dataclass(frozen=True, slots=True)
class Apart:
    """A state, or an abstract state, taken apart.

    Attributes:
        structure: Its containers.
        arrays: Its arrays of hosts, by the numbers of their leaves.
        values: Its other leaves, likewise, but for placeholders.
    """

    structure: Structure
    arrays: dict[int, Array]
    values: dict[int, Any]

    @classmethod
    def of(cls, state: Any, check: Callable[[Any], None]) -> Apart:
        """Takes a state apart.

        Args:
            state: The state.
            check: Refuses leaves that are no arrays of hosts.

        Raises:
            InvalidInput: There is no array of hosts, or what is none is too large.
            WaystationError: A leaf is refused; names its key path.
        """
        leaves, structure = flatten(state)
        arrays = {number: leaf for number, leaf in enumerate(leaves) if isinstance(leaf, Array)}
        if not arrays:
            raise InvalidInput("there is no array of the runtime in this state; use waystation.save and load")
        values = {number: leaf for number, leaf in enumerate(leaves) if number not in arrays}
        for number, leaf in values.items():
            try:
                check(leaf)
            except WaystationError as error:
                error.context.pop("index", None)
                raise error.where(array=_key_path(structure, number))
        values = {number: leaf for number, leaf in values.items() if leaf is not PLACEHOLDER}
        if values:
            places = structure.key_paths()
            require_small({format_key_path(places[number]): value for number, value in values.items()})
        return cls(structure, arrays, values)


def begin_save(
    client: Client, path: PathLike, state: Any, *, overwrite: bool, custom_metadata: Any = None
) -> Callable[[float | None], None]:
    """Has a state saved as it is now, with the options in effect; returns what waits until it is committed.

    Raises:
        Unsupported: Hosts cannot heed an option.
        UnsupportedLeaf, InvalidInput: A leaf cannot be saved; names its key path. Or the custom metadata are
            no JSON value.
    """
    custom_metadata = callers_json(custom_metadata, "custom_metadata")
    apart = Apart.of(state, _check_saved)
    options = options_for_hosts(current_options(), _storage_of(apart))
    arrays, values = dict(apart.arrays), dict[int, Any]()
    first = next(iter(arrays.values()))
    for number, leaf in apart.values.items():
        if is_carried(leaf):
            values[number] = carry(leaf)
        elif isinstance(leaf, jax.Array):  # is saved as one, which only hosts that hold it together can do
            arrays[number] = client.put_laid(leaf, Sharding(first.kind.sharding.axes), first.slice)
        elif isinstance(leaf, np.ndarray):
            values[number] = np.array(leaf)  # may change, or be of a class that others do not have
        else:
            values[number] = leaf
    handles: dict[int, int] = {}
    for number, array in arrays.items():
        try:
            handles[number] = array.usable("saved", client).handle
        except WaystationError as error:  # which the array keeps
            raise copy.copy(error).where(array=_key_path(apart.structure, number)) from None
    manner = SaveManner(overwrite, custom_metadata, options)
    return client.backend.begin_save(os.fspath(path), StateTree.of(apart.structure, values), handles, manner)


def in_background(wait: Callable[[float | None], None], path: PathLike) -> Callable[[Progress], None]:
    """What a thread does for a save that has begun: it waits, and calls what options say, as they are now."""
    callback = current_options().asynchronous.post_finalization_callback

    def work(progress: Progress) -> None:
        wait(None)
        if callback is not None:
            called_back(callback, os.fspath(path))

    return work


def begin_load(client: Client, path: PathLike, abstract_state: Any) -> Callable[[float | None], Any]:
    """Has a state loaded with the options in effect; returns what waits for its values, and gives the state.

    Raises:
        Unsupported: Hosts cannot heed an option.
        InvalidInput: An abstract leaf is nothing that hosts load; names its key path.
    """
    apart = Apart.of(abstract_state, _check_wanted)
    options = options_for_hosts(current_options())
    makers = {number: making(leaf) for number, leaf in apart.values.items() if is_carried(leaf)}
    client.flush()
    made: dict[int, Any] = {}
    wanted: dict[int, tuple[int, Value]] = {}
    with client.lock:
        for number, array in apart.arrays.items():
            if array.owner is not client:
                raise InvalidInput(
                    "an array that tells how to load one is of another client",
                    array=_key_path(apart.structure, number),
                )
            made[number], handle = client.array_like(array)
            wanted[number] = handle, value_like(array, handle)
        asked = {number: _asked(leaf) for number, leaf in apart.values.items()}
        tree = StateTree.of(apart.structure, asked)
        wait = client.backend.begin_load(os.fspath(path), tree, wanted, options=options)
    structure = apart.structure
    shardings = {
        number: leaf.sharding
        for number, leaf in apart.values.items()
        if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
    }

    def finish(timeout_s: float | None) -> Any:
        leaves = made | (dict(zip(asked, wait(timeout_s), strict=True)) if asked else {})
        for number, make in makers.items():
            leaves[number] = make(leaves[number])
        for number, sharding in shardings.items():
            leaves[number] = jax.device_put(leaves[number], sharding)
        return unflatten(
            structure, [leaves.get(number, PLACEHOLDER) for number in range(structure.leaf_count)]
        )

    return finish


def value_like(array: Array, number: int) -> Value:
    """How an array is to lie that is like another one, which need not be there any more."""
    kind = array.kind
    return Value(number, kind.shape, kind.dtype, array.slice.number, kind.sharding)


def _storage_of(apart: Apart) -> dict[int, StorageOptions]:
    """How single arrays are to be stored, by the numbers of their leaves, as far as options say so."""
    ask = storage_of(current_options())
    if ask is None:
        return {}
    found: dict[int, StorageOptions] = {}
    paths, labels = apart.structure.key_paths(), apart.structure.labels()
    for number, leaf in {**apart.arrays, **apart.values}.items():
        if is_scalar(leaf):
            continue
        try:
            answer = ask(paths[number], labels[number], _described(leaf), leaf)
        except WaystationError as error:
            raise error.where(array=_key_path(apart.structure, number))
        if answer is not None:
            found[number] = answer
    return found


def _described(leaf: Any) -> StoredArray:
    """What a checkpoint would say of an array."""
    if not isinstance(leaf, Array):
        codec = codec_for(leaf)
        assert codec is not None, "other leaves are refused before"
        return codec.sources([leaf])[0]
    logical = dtypes.of_name(leaf.kind.dtype)
    shape = leaf.kind.shape
    return StoredArray(shape, logical.name, "jax", logical.storage, logical.storage_shape(shape), None, {})


def _check_saved(leaf: Any) -> None:
    """Refuses what cannot be saved beside arrays of hosts."""
    if type(leaf) in SCALARS:
        return
    codec = codec_for(leaf)
    if codec is None:
        raise UnsupportedLeaf(
            f"hosts cannot save {_named(leaf)}; save arrays, numbers, strings, bytes, or containers of them"
        )
    if is_carried(leaf):
        check_carried(leaf)
    else:
        codec.sources([leaf])


def _check_wanted(leaf: Any) -> None:
    """Refuses what cannot be loaded beside arrays of hosts."""
    if leaf is PLACEHOLDER or is_scalar(leaf):
        return
    if codec_for(leaf) is None:
        raise InvalidInput(
            f"hosts cannot load {_named(leaf)}; give an array of the runtime, of NumPy, JAX or torch, or a "
            "scalar or its type"
        )
    if is_carried(leaf):
        making(leaf)


def _asked(leaf: Any) -> Any:
    """What hosts are told of an abstract leaf."""
    if is_scalar(leaf):
        return scalar_type(leaf)
    if is_carried(leaf):
        return asked_of(leaf)
    if isinstance(leaf, np.ndarray | np.generic | jax.Array | jax.ShapeDtypeStruct):
        return AbstractNumpy(leaf.shape, leaf.dtype, isinstance(leaf, np.generic))
    if isinstance(leaf, AbstractNumpy):  # of a class that others may not have
        return AbstractNumpy(leaf.shape, leaf.dtype, leaf.scalar)
    return leaf


def _named(leaf: Any) -> str:
    return f"a {type(leaf).__module__}.{type(leaf).__qualname__}"


def _key_path(structure: Structure, number: int) -> str:
    return format_key_path(structure.key_paths()[number])


class _RemoteStateBackend:
    """Hands over from `waystation.save` and `load` to the client of the arrays."""

    def has(self, leaf: Any) -> bool:
        """See `remote_state.RemoteStateBackend`."""
        return isinstance(leaf, Array)

    def save(self, path: str, state: Any, *, overwrite: bool, custom_metadata: Any) -> None:
        """See `remote_state.RemoteStateBackend`."""
        _client(state).save(path, state, overwrite=overwrite, custom_metadata=custom_metadata)

    def save_async(
        self, path: str, state: Any, *, overwrite: bool, custom_metadata: Any
    ) -> AsyncResponse[None]:
        """See `remote_state.RemoteStateBackend`."""
        return _client(state).save_async(path, state, overwrite=overwrite, custom_metadata=custom_metadata)

    def load(self, path: str, abstract_state: Any) -> Any:
        """See `remote_state.RemoteStateBackend`."""
        return _client(abstract_state).load(path, abstract_state)

    def load_async(self, path: str, abstract_state: Any) -> AsyncResponse[Any]:
        """See `remote_state.RemoteStateBackend`."""
        return _client(abstract_state).load_async(path, abstract_state)


def _client(tree: Any) -> Client:
    owners = {id(leaf.owner): leaf.owner for leaf in iterate_leaves(tree) if isinstance(leaf, Array)}
    if len(owners) > 1:
        raise InvalidInput("these arrays are of several clients; save and load those of each by themselves")
    return cast("Client", next(iter(owners.values())))


remote_state.register(_RemoteStateBackend())
