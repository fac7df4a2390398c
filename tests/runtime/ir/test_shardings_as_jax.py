"""Shardings mean what JAX's mean."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.runtime.ir.strategies import shardings

from waystation.grid import box_of_slices


@pytest.mark.skipif(len(jax.devices()) < 6, reason="needs six devices")
@given(data=st.data())
def test_every_device_has_the_box_that_jax_gives_it(data: st.DataObject) -> None:
    count = data.draw(st.sampled_from([1, 2, 3, 4, 6]))
    shape = tuple(data.draw(st.lists(st.sampled_from([12, 24]), max_size=3)))
    sharding = data.draw(shardings(count, len(shape)))
    sizes = tuple(size for _, size in sharding.axes)
    devices = jax.devices()[:count]
    mesh = Mesh(np.array(devices).reshape(sizes), tuple(name for name, _ in sharding.axes))
    found = NamedSharding(mesh, PartitionSpec(*sharding.spec)).devices_indices_map(shape)
    expected = [box_of_slices(found[device], shape) for device in devices]
    assert list(sharding.boxes(shape)) == expected
