"""What a host knows of its arrays, whatever computations and clients do to these meanwhile."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from waystation.errors import InvalidInput
from waystation.runtime.errors import BufferNotFound
from waystation.runtime.execution import Buffers


def test_the_bytes_of_arrays_are_counted_although_one_is_donated_meanwhile() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    buffers = Buffers()
    for handle, spec in enumerate((PartitionSpec("x"), PartitionSpec(), PartitionSpec("x"))):
        array = jax.device_put(np.zeros((8, 3), np.float32), NamedSharding(mesh, spec))
        buffers.set(handle, array)
    array.delete()  # as a computation does that is begun after the arrays were listed
    assert buffers.held_bytes == 96 + 4 * 96 + 96


def test_what_was_freed_or_never_made_need_not_be_spilled() -> None:
    buffers = Buffers()
    buffers.set(1, jax.numpy.zeros(3))
    buffers.set(2, InvalidInput("it is broken"))
    for handle in (1, 2, 3):
        if handle == 1:
            buffers.free([1])  # its client does that, while the work that needs its memory is in line
        buffers.spill(handle)
    for handle, error in ((1, BufferNotFound), (2, InvalidInput), (3, BufferNotFound)):
        with pytest.raises(error):
            buffers.get(handle)
