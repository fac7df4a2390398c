"""Tensors of torch and PRNG keys of a program, saved and loaded by hosts that need not know them.

They are small, as all that travels through the controller. To be saved they go as what a checkpoint says of
them and their bytes; in a load hosts give the numbers, of which the program makes what it has asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from waystation._errors import InvalidInput
from waystation.frameworks import dtypes
from waystation.frameworks.base import ArraySource, StoredArray
from waystation.frameworks.carried import AbstractKeys, CarriedArray
from waystation.frameworks.jax_dtypes import logical_of
from waystation.frameworks.registry import AbstractNumpy, codec_for
from waystation.grid import whole
from waystation.layouts.native.blocks import view_of


def is_carried(leaf: Any) -> bool:
    """Whether a leaf, concrete or abstract, travels so."""
    codec = codec_for(leaf)
    return codec is not None and (codec.name == "torch" or _is_key(leaf))


def check_carried(leaf: Any) -> None:
    """Raises for what cannot be saved so; copies nothing.

    Raises:
        InvalidInput: It is spread over devices of this program.
        Unsupported: It is of a kind that cannot be saved at all.
    """
    _source_of(leaf)


def carry(leaf: Any) -> CarriedArray:
    """A leaf as it travels to be saved: as it is now.

    Raises:
        InvalidInput, Unsupported: See `check_carried`.
    """
    source = _source_of(leaf)
    stored = StoredArray(
        source.shape,
        source.dtype,
        source.framework,
        source.storage_dtype,
        source.storage_shape,
        source.sharding,
        source.extra,
    )
    if source.blocks and source.blocks[0].device >= 0:
        source = _source_of(_on_host(leaf))
    item = dtypes.storage_numpy_dtype(source.storage_dtype)
    data = np.empty(source.storage_shape, item)
    if data.size:
        [block] = source.blocks
        np.copyto(data, view_of(block, len(block.shape), item))
    return CarriedArray(stored, source.storage_item_bytes, data.reshape(-1).view(np.uint8))


def asked_of(leaf: Any) -> AbstractNumpy | AbstractKeys:
    """What hosts are asked for in the place of an abstract leaf."""
    logical = _logical_of(leaf)
    if logical.category == "key":
        return AbstractKeys(tuple(leaf.shape), logical.name)
    return AbstractNumpy(tuple(leaf.shape), logical.host)


def making(leaf: Any) -> Callable[[Any], Any]:
    """What makes the leaf that is wanted of the numbers that hosts give.

    Raises:
        InvalidInput: It is wanted on a device that is not here, or spread over several.
    """
    logical = _logical_of(leaf)
    if logical.category == "key":
        name = dtypes.key_implementation(logical.name)
        return lambda data: jax.random.wrap_key_data(jnp.asarray(data), impl=name)
    codec = codec_for(leaf)
    assert codec is not None, "only leaves of frameworks come here"
    shape = tuple(leaf.shape)
    storage_shape = logical.storage_shape(shape)
    stored = StoredArray(shape, logical.name, "torch", logical.storage, storage_shape, None, {})
    targets = codec.targets([leaf], [stored])
    if targets[0].boxes != [whole(shape)]:
        raise InvalidInput(
            "hosts cannot load a tensor that is spread over processes beside their own arrays; ask for a "
            "plain tensor, or load it by itself"
        )
    return lambda data: codec.assemble(targets, [[np.asarray(data)]])[0]


def _is_key(leaf: Any) -> bool:
    is_jax = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
    return is_jax and jnp.issubdtype(leaf.dtype, jax.dtypes.extended)


def _logical_of(leaf: Any) -> dtypes.LogicalDtype:
    if _is_key(leaf):
        return logical_of(leaf.dtype)
    from waystation.frameworks import torch_memory  # a leaf of torch's is there, so torch is

    return torch_memory.logical_of(leaf)


def _source_of(leaf: Any) -> ArraySource:
    codec = codec_for(leaf)
    assert codec is not None, "only leaves of frameworks come here"
    [source] = codec.sources([leaf])
    if len(source.blocks) > 1 or any(block.shape != source.storage_shape for block in source.blocks):
        raise InvalidInput(
            "hosts cannot save what is spread over devices of this program; put it on one device, or on a "
            "slice (client.put)"
        )
    return source


def _on_host(leaf: Any) -> Any:
    return jax.device_put(leaf, jax.local_devices(backend="cpu")[0]) if _is_key(leaf) else leaf.cpu()
