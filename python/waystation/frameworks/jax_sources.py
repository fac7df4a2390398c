"""JAX arrays as blocks to be saved.

Every computation is awaited. Memory of CPU devices is viewed, never copied; such a view
keeps its bytes whatever becomes of the array (a donated or deleted buffer lives on under it). Memory of
CUDA devices is named by its address, and may be donated away, so it counts as mutable. Anything else is
copied to the host, all copies under way before the first is awaited.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from waystation._errors import InvalidInput, UnsupportedLeaf, WaystationError
from waystation.coordination import jax_private
from waystation.frameworks import dtypes
from waystation.frameworks.base import ArraySource, Block, Contiguous
from waystation.frameworks.jax_dtypes import logical_of
from waystation.frameworks.jax_shardings import describe_sharding, spread_of
from waystation.frameworks.kinds import contiguous_by_kind
from waystation.frameworks.numpy_arrays import host_block
from waystation.grid import Spread, contiguous_strides


def sources(leaves: Sequence[Any]) -> list[ArraySource]:
    """Describes concrete arrays, see `Codec.sources`."""
    _check_readable(leaves)
    found = _forms(leaves)
    plain = all(form.plain for form in set(found))
    data = leaves if plain else _started(leaves, found)
    try:
        return [_source(leaf, array, form) for leaf, array, form in zip(leaves, data, found, strict=True)]
    except WaystationError:
        raise
    except Exception as error:
        _blame(leaves, error)
        raise


def contiguous(leaves: Sequence[Any]) -> Contiguous:
    """Describes concrete arrays that one CPU device holds, see `Codec.contiguous`."""
    _check_readable(leaves)
    forms = _forms(leaves)
    alike = [form if form.single and form.plain else None for form in forms]
    viewed = [like is not None and form.reader is _viewed for like, form in zip(alike, forms, strict=True)]
    arrays: Sequence[Any] = leaves
    if any(viewed):  # the buffer protocol does not know their dtype, that of NumPy does
        try:
            columns = zip(leaves, viewed, strict=True)
            arrays = [_host_array(leaf) if is_viewed else leaf for leaf, is_viewed in columns]
        except Exception as error:
            _blame(leaves, error)
            raise
    return contiguous_by_kind(
        lambda place: _described(leaves[place].shape, forms[place], []), arrays, alike, hold=True
    )


def _started(leaves: Sequence[Any], found: Sequence[_Form]) -> list[Any]:
    """What is to be read of each leaf: all computed, and copies of it to the host under way."""
    _await(leaves)
    data = [
        jax.random.key_data(leaf) if form.logical.category == "key" else leaf
        for leaf, form in zip(leaves, found, strict=True)
    ]
    for array, form in zip(data, found, strict=True):
        if form.reader is _copied:
            array.copy_to_host_async()
    return data


# ---- refusals ----------------------------------------------------------------------------------


def _check_readable(leaves: Sequence[Any]) -> None:
    concrete: set[type] = set()
    for index, leaf in enumerate(leaves):
        if type(leaf) not in concrete:
            _check_concrete(leaf, index)
            concrete.add(type(leaf))
        if leaf.is_deleted():
            raise InvalidInput(
                f"this array of {leaf.dtype} {leaf.shape} has been deleted or donated; save before donating "
                "it, or save what the donating function returned",
                index=index,
            )


def _check_concrete(leaf: Any, index: int) -> None:
    if isinstance(leaf, jax.core.Tracer):
        raise UnsupportedLeaf(
            f"{leaf} is a tracer: its value does not exist yet; save outside of jit, grad and vmap, from "
            "what the transformed function returns",
            index=index,
        )
    if not isinstance(leaf, jax.Array):
        raise InvalidInput(f"{leaf!r} is an abstract leaf; save the array itself", index=index)


def _await(leaves: Sequence[Any]) -> None:
    try:
        jax.block_until_ready(list(leaves))
    except Exception as error:
        _blame(leaves, error)
        raise


def _blame(leaves: Sequence[Any], error: Exception) -> None:
    """Raises the error of a failed computation as that of its array."""
    for index, leaf in enumerate(leaves):
        try:
            leaf.block_until_ready()
        except Exception as own:
            raise InvalidInput(f"the computation of this array failed: {own}", index=index) from error


# ---- blocks ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Form:
    """What arrays of one dtype and sharding (and shape, where several devices share one) have in common."""

    logical: dtypes.LogicalDtype
    single: bool
    plain: bool  # reading awaits the computation and needs no preparation
    reader: Callable[[Any, dtypes.LogicalDtype, tuple[int, ...]], Block]
    storage: str
    storage_item_bytes: int
    sharding: dict[str, Any]
    spread: Spread | None
    only_here: bool


def _forms(leaves: Sequence[Any]) -> list[_Form]:
    """The form of each leaf; equal ones are made once."""
    known: dict[Any, _Form] = {}
    found = []
    single_device = jax_private.single_device()
    alone = jax.process_count() == 1
    for index, leaf in enumerate(leaves):
        sharding = leaf.sharding
        # Only where several devices share an array does its description depend on its shape.
        key: tuple[Any, ...]
        if alone and type(sharding) is SingleDeviceSharding:
            key = (leaf.dtype, single_device(sharding), leaf.committed)
        else:
            key = (leaf.dtype, sharding, leaf.committed, leaf.shape)
        form = known.get(key)
        if form is None:
            try:
                form = known[key] = _make_form(leaf.shape, leaf.dtype, sharding, leaf.committed, known)
            except WaystationError as error:
                raise error.where(index=index)
        found.append(form)
    return found


def _make_form(
    shape: tuple[int, ...], dtype: Any, sharding: Sharding, committed: bool, forms: dict[Any, _Form]
) -> _Form:
    spread = _spread(sharding, shape)
    if getattr(getattr(sharding, "spec", None), "unreduced", None):
        raise UnsupportedLeaf(
            f"an array with {sharding} holds partial sums; reduce it before saving, for example by "
            "jax.reshard"
        )
    logical = logical_of(dtype)
    description = describe_sharding(sharding, shape, committed)
    if spread is None and jax.process_count() > 1:
        description["each_process"] = True
    # Equal descriptions become one object, which later layers tell by identity.
    description = next(
        (form.sharding for form in forms.values() if form.sharding == description), description
    )
    reader = _reader(sharding, logical)
    return _Form(
        logical,
        len(sharding.device_set) == 1 and spread is None,
        reader in (_viewed, _viewed_by_buffer) and logical.category != "key",
        reader,
        logical.storage,
        logical.storage_item_bytes,
        description,
        spread,
        spread is not None and sharding.is_fully_addressable,
    )


def _spread(sharding: Sharding, shape: tuple[int, ...]) -> Spread | None:
    """Which processes hold what of arrays of this shape; None for an array of this process's own."""
    if sharding.is_fully_addressable and (jax.process_count() == 1 or len(sharding.device_set) == 1):
        return None
    return spread_of(sharding, shape)


def _reader(
    sharding: Sharding, logical: dtypes.LogicalDtype
) -> Callable[[Any, dtypes.LogicalDtype, tuple[int, ...]], Block]:
    if logical.name in dtypes.SUB_BYTE:  # JAX packs them, so there is nothing to view
        return _copied
    device: Any = next(iter(sharding.device_set))
    if device.platform == "cpu":
        # Plain dtypes go through the buffer protocol, which is the fastest way of all.
        by_buffer = logical.host.isbuiltin == 1 and (not logical.trailing or bool(logical.host_trailing))
        return _viewed_by_buffer if by_buffer else _viewed
    in_device_memory = sharding.memory_kind in (None, device.default_memory().kind)
    is_cuda = "cuda" in device.client.platform_version.lower()
    return _on_cuda if is_cuda and in_device_memory else _copied


def _source(leaf: Any, data: Any, form: _Form) -> ArraySource:
    shape = leaf.shape
    rank = len(shape) + len(form.logical.trailing)
    if form.single:
        blocks = [form.reader(data, form.logical, (0,) * rank)]
    else:
        blocks = _shards(data, form, rank)
    return _described(shape, form, blocks)


def _described(shape: tuple[int, ...], form: _Form, blocks: list[Block]) -> ArraySource:
    logical = form.logical  # blocks of one array are all on the host, or all on devices
    return ArraySource(
        shape,
        logical.name,
        "jax",
        form.storage,
        shape + logical.trailing,
        form.sharding,
        storage_item_bytes=form.storage_item_bytes,
        blocks=blocks,
        mutable=bool(blocks) and blocks[0].device >= 0,
        spread=form.spread,
        only_here=form.only_here,
    )


def _shards(data: Any, form: _Form, rank: int) -> list[Block]:
    """The distinct shards; of replicas the first."""
    distinct: dict[tuple[int, ...], Block] = {}
    for shard in data.addressable_shards:
        offset = tuple(part.start or 0 for part in shard.index)
        offset += (0,) * (rank - len(offset))
        if offset not in distinct:
            distinct[offset] = form.reader(shard.data, form.logical, offset)
    return list(distinct.values())


def _viewed(array: Any, logical: dtypes.LogicalDtype, offset: tuple[int, ...]) -> Block:
    view = _host_array(array)
    if logical.trailing and not logical.host_trailing:
        return host_block(view, logical, offset)
    return Block(offset, view.shape, view.strides, view.__array_interface__["data"][0], view)


def _viewed_by_buffer(array: Any, logical: dtypes.LogicalDtype, offset: tuple[int, ...]) -> Block:
    # The view awaits the computation and keeps the bytes, and costs a third of a NumPy array.
    try:
        view = memoryview(array)
    except BufferError:  # a layout of its own
        return _viewed(array, logical, offset)
    return Block(offset, view.shape or (), view.strides or (), array.unsafe_buffer_pointer(), view)


def _host_array(array: Any) -> np.ndarray[Any, Any]:
    return jax_private.host_array()(array)


def _copied(array: Any, logical: dtypes.LogicalDtype, offset: tuple[int, ...]) -> Block:
    return host_block(_host_array(array), logical, offset)


def _on_cuda(array: Any, logical: dtypes.LogicalDtype, offset: tuple[int, ...]) -> Block:
    layout = getattr(getattr(array, "format", None), "layout", None)  # JAX before 0.7 cannot say
    if layout is None or tuple(layout.major_to_minor) != tuple(range(array.ndim)) or layout.tiling:
        return _copied(array, logical, offset)
    (device,) = array.sharding.device_set
    # The ordinal as this process's driver counts, whatever JAX was told to see of its devices.
    ordinal = device.local_hardware_id
    if ordinal is None or ordinal < 0 or not array.size:
        return _copied(array, logical, offset)
    strides = contiguous_strides(array.shape, logical.host.itemsize)
    shape = array.shape if logical.host_trailing else array.shape + logical.trailing
    return Block(
        offset,
        shape,
        logical.storage_strides(strides),
        array.unsafe_buffer_pointer(),
        array,
        ordinal,
    )
