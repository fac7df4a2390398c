"""Programs that share the memory of an island, on a real host."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from tests.runtime.cluster.driving import HANDLES, WAIT_S, Slice, visiting, wait_until

from waystation.runtime.cluster import Cluster, connect
from waystation.runtime.errors import DeviceMemoryExceeded

pytestmark = pytest.mark.skipif(sys.version_info < (3, 12), reason="the runtime needs Python 3.12")

LONG_S = 3600.0
BUDGET_BYTES = 160


def put(on: Slice, *shape: int) -> int:
    handle = next(HANDLES)
    on.backend.put(handle, np.ones(shape, np.float32), on.number, on.sharding)
    return handle


def twice(x: Any) -> Any:
    return x * 2


@pytest.mark.timeout(600)
def test_one_program_that_waits_for_memory_holds_up_no_other(address: str) -> None:
    """The holder has 96 of 160 bytes, and frees them only after it has gone on; the other wants 96, too."""
    with visiting(address, name="holder") as cluster:
        cluster.add_island("full", device_memory_bytes=BUDGET_BYTES, deadline_s=LONG_S)
        with connect(address, name="other") as second:
            check_that_the_holder_goes_on(cluster, second)


def check_that_the_holder_goes_on(cluster: Cluster, second: Cluster) -> None:
    holder = Slice(cluster.backend(), "full", 1, twice)
    other = Slice(second.backend(), "full", 1, twice)
    held, small = put(holder, 24), put(holder, 8)
    holder.backend.wait([held, small], WAIT_S)
    wanted = put(other, 24)
    wait_until(lambda: cluster.island("full").status().pending > 0)
    too_big = put(other, 41)
    made = holder.step(small)
    np.testing.assert_array_equal(holder.backend.get(made, WAIT_S), np.full(8, 2, np.float32))
    assert not other.backend.is_done(wanted)

    never = put(holder, 41)
    with pytest.raises(DeviceMemoryExceeded, match="needs 164 bytes on device full/0:0 of 160"):
        holder.backend.get(never, WAIT_S)
    holder.backend.free([held])
    np.testing.assert_array_equal(other.backend.get(wanted, WAIT_S), np.ones(24, np.float32))
    with pytest.raises(DeviceMemoryExceeded, match="needs 164 bytes on device full/0:0 of 160"):
        other.backend.get(too_big, WAIT_S)
