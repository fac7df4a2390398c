"""What is lost, and what only takes long, on real islands."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tests.runtime.cluster.driving import (
    HANDLES,
    WAIT_S,
    Slice,
    add_sum,
    call,
    exported,
    rows,
    visiting,
    wait_until,
)
from tests.runtime.cluster.host_functions import REST_S, rest

from waystation.runtime.cluster import Cluster, ClusterBackend, IslandState
from waystation.runtime.errors import HostLost
from waystation.runtime.ir import Arg, Compute, HostCall, Program, Result, SliceShape, Value, prepare
from waystation.runtime.resources import SliceRequest

pytestmark = pytest.mark.skipif(sys.version_info < (3, 12), reason="the runtime needs Python 3.12")

VALUES = np.arange(8, dtype=np.float32)
DEADLINE_S = 8.0


@pytest.mark.timeout(900)
def test_a_cut_connection_and_a_long_wait(address: str) -> None:
    """Two stories at a time: hosts of `patient` wait for longer than their deadline."""
    with visiting(address, name="losses") as cluster:
        with ThreadPoolExecutor(2) as pool:
            adding = [
                pool.submit(cluster.add_island, "patient", hosts=2, deadline_s=DEADLINE_S, max_restarts=0),
                pool.submit(cluster.add_island, "slow"),
            ]
            for each in adding:
                each.result()
        made = begin_to_wait(cluster.backend())
        cluster._host_class = "tests.runtime.cluster.hosts:CutHost"
        cluster.add_island("cut", devices_per_host=2)
        check_that_a_cut_connection_fells_the_island(cluster)
        check_the_wait(cluster, made)


def begin_to_wait(backend: ClusterBackend) -> list[int]:
    """One island rests; both hosts of the other one wait for what it gives, and for each other."""
    resting = backend.register_host_function("rest", rest)
    key = backend.register("add_sum", exported(add_sum, 2))
    one, two = rows(1), rows(2)
    nodes = (
        Arg("x", Value(0, (8,), "float32", 0, one)),
        HostCall("rest", resting, 0, (0,), (one,), (Value(1, (8,), "float32", 0, one),)),
        Compute("back", key, 1, (1,), (two,), (Value(2, (8,), "float32", 1, two),)),
        Result((2,)),
    )
    program = backend.install(prepare(Program("rests", (SliceShape(0, (1,)), SliceShape(1, (2,))), nodes)))
    slices = [
        backend.grant(SliceRequest.of(devices, island=island, shared=True))
        for devices, island in ((1, "slow"), (2, "patient"))
    ]
    argument = next(HANDLES)
    backend.put(argument, VALUES, slices[0], one)
    made = call(backend, program, slices, argument)
    patient = Slice(backend, "patient", 2)
    return [made, patient.step(patient.put(VALUES))]


def check_the_wait(cluster: Cluster, made: list[int]) -> None:
    assert REST_S > DEADLINE_S
    for handle in made:
        np.testing.assert_array_equal(cluster.backend().get(handle, WAIT_S), VALUES + VALUES.sum())
    status = cluster.island("patient").status()
    assert (status.state, status.epoch, status.last_loss) == (IslandState.READY, 1, "")


def check_that_a_cut_connection_fells_the_island(cluster: Cluster) -> None:
    backend = cluster.backend()
    island = cluster.island("cut")
    (before,) = island.status().hosts
    on, again = (Slice(backend, "cut", 2, name=name) for name in ("cut", "again"))
    given = on.put(VALUES)
    backend.wait([given], WAIT_S)
    lost = on.step(given)
    with pytest.raises(
        HostLost, match=r"host 'cut/0' .* has lost its connection to the controller"
    ) as raised:
        backend.get(lost, WAIT_S)
    context = raised.value.context
    assert {name: context[name] for name in ("program", "computation", "host", "epoch", "process_id")} == {
        "program": "cut",
        "computation": "step",
        "host": "cut/0",
        "epoch": 1,
        "process_id": before.process_id,
    }
    assert context["device"] == ", ".join(before.devices)
    late = Slice(backend, "cut", 2)  # waits until it is rebuilt
    made = late.step(late.put(VALUES))
    np.testing.assert_array_equal(backend.get(made, WAIT_S), VALUES + VALUES.sum())
    with pytest.raises(HostLost, match="an array of program 'put' was lost"):
        backend.get(given, WAIT_S)
    made = again.step(again.put(VALUES))
    np.testing.assert_array_equal(backend.get(made, WAIT_S), VALUES + VALUES.sum())
    status = island.status()
    assert (status.state, status.epoch, status.restarts) == (IslandState.READY, 2, 1)
    wait_until(lambda: not Path(f"/proc/{before.process_id}").exists())
