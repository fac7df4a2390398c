"""The address that a save reads a plain CPU array at is the array's own memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from waystation.frameworks.registry import codec_by_name


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (2, 0, 3)])
@pytest.mark.parametrize("dtype", ["float32", "int32", "uint8", "bool", "complex64", "float16"])
def test_address(shape: tuple[int, ...], dtype: str) -> None:
    array = jnp.ones(shape, dtype)
    (source,) = codec_by_name("jax").sources([array])
    (block,) = source.blocks
    host = np.asarray(array)
    assert block.shape == host.shape
    assert block.strides == host.strides
    if host.size:
        assert block.address == host.__array_interface__["data"][0]


def test_the_view_keeps_the_bytes_of_a_donated_array() -> None:
    array = jnp.arange(1000.0) + 1
    (source,) = codec_by_name("jax").sources([array])
    (block,) = source.blocks
    step: Any = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    result = step(array)
    for _ in range(3):
        result = step(result)
    array.delete()
    np.testing.assert_array_equal(np.asarray(block.owner), np.arange(1000.0, dtype=np.float32) + 1)


def test_pending_computations_are_awaited() -> None:
    array = jnp.ones((600, 600))
    for _ in range(5):
        array = array @ jnp.ones((600, 600)) / 600
    (source,) = codec_by_name("jax").sources([array])
    np.testing.assert_allclose(np.asarray(source.blocks[0].owner), 1.0, rtol=1e-3)
