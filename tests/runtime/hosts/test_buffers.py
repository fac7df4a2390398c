"""What a host knows of its arrays, whatever computations do to these meanwhile."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from waystation.runtime.execution import Buffers


def test_the_bytes_of_arrays_are_counted_although_one_is_donated_meanwhile() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    buffers = Buffers()
    for handle, spec in enumerate((PartitionSpec("x"), PartitionSpec(), PartitionSpec("x"))):
        array = jax.device_put(np.zeros((8, 3), np.float32), NamedSharding(mesh, spec))
        buffers.set(handle, array)
    array.delete()  # as a computation does that is begun after the arrays were listed
    assert buffers.held_bytes == 96 + 4 * 96 + 96
