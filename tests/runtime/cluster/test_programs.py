"""Programs on the hosts of a real cluster: a story for each, since each host takes seconds to start."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

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
    run_client,
    visiting,
    wait_until,
)
from tests.runtime.cluster.host_functions import fail, tell
from tests.support.long import only_long

from waystation.errors import InvalidInput
from waystation.runtime.cluster import Cluster, ClusterBackend, connect
from waystation.runtime.controller import Dispatch
from waystation.runtime.errors import DeviceMemoryExceeded, HostLost, ObjectNotFound
from waystation.runtime.ir import (
    Arg,
    Compute,
    HostCall,
    Node,
    Program,
    Result,
    Sharding,
    SliceShape,
    Value,
    prepare,
)
from waystation.runtime.resources import SliceRequest

pytestmark = pytest.mark.skipif(sys.version_info < (3, 12), reason="the runtime needs Python 3.12")

VALUES = np.arange(8, dtype=np.float32)


def double(x: Any) -> Any:
    return x * 2


@pytest.mark.timeout(900)
def test_programs_over_slices_of_two_islands(address: str, tmp_path: Path) -> None:
    with visiting(address) as cluster:
        cluster.add_island("left", hosts=2, devices_per_host=2)
        cluster.add_island("right", devices_per_host=2, device_memory_bytes=64, spill_bytes=64)
        check_a_client(address)
        backend = cluster.backend()
        left = Slice(backend, "left", 4)
        check_pipelines(backend)
        check_host_calls(backend, left)
        check_that_an_array_follows_its_slice(backend)
        check_that_memory_is_kept(backend)
        check_checkpoints(backend, left, tmp_path)
        check_that_a_killed_client_leaves_nothing(cluster, left)
        check_that_a_loss_reaches_other_islands(cluster, left)


def check_a_client(address: str) -> None:
    """Figure 2 over both islands, in a process of its own, since it wraps what JAX has."""
    run_client("on_a_cluster", address)


def pipeline(backend: ClusterBackend, times: int) -> Program:
    """A sum over four devices of one island, then one over two of the other, so many times."""
    keys = [backend.register("add_sum", exported(add_sum, devices)) for devices in (4, 2)]
    four, two = rows(4), rows(2)
    nodes: list[Node] = [Arg("x", Value(0, (8,), "float32", 0, four))]
    for made in range(0, 2 * times, 2):
        front, back = (Value(made + 1, (8,), "float32", 0, four), Value(made + 2, (8,), "float32", 1, two))
        nodes.append(Compute("front", keys[0], 0, (made,), (four,), (front,)))
        nodes.append(Compute("back", keys[1], 1, (made + 1,), (two,), (back,)))
    nodes.append(Result((2 * times,)))
    return prepare(Program("pipeline", (SliceShape(0, (4,)), SliceShape(1, (2,))), tuple(nodes)))


def check_pipelines(backend: ClusterBackend) -> None:
    """What comes back from the other island depends on what was sent there in the same run."""
    slices = [
        backend.grant(SliceRequest.of(devices, island=island, shared=True))
        for devices, island in ((4, "left"), (2, "right"))
    ]
    for times, dispatch in ((1, Dispatch.PARALLEL), (1, Dispatch.SEQUENTIAL), (3, Dispatch.PARALLEL)):
        expected = VALUES
        for _ in range(2 * times):
            expected = expected + expected.sum()
        fingerprint = backend.install(pipeline(backend, times), dispatch)
        argument = next(HANDLES)
        backend.put(argument, VALUES, slices[0], rows(4))
        made = [call(backend, fingerprint, slices, argument) for _ in range(2)]
        for handle in made:
            np.testing.assert_array_equal(backend.get(handle, WAIT_S), expected)
        backend.free([argument, *made])
    for number in slices:
        backend.release(number)


def check_host_calls(backend: ClusterBackend, left: Slice) -> None:
    """Two functions of one name; hosts have the first when the second comes."""
    made = []
    argument = left.put(VALUES)
    for name, function in (("tell", tell), ("fail", fail)):
        key = backend.register_host_function("call", function)
        nodes = (
            Arg("x", left.value(0)),
            HostCall(name, key, 0, (0,), (left.sharding,), (left.value(1),)),
            Result((1,)),
        )
        program = prepare(Program(f"to {name}", (SliceShape(0, (4,)),), nodes))
        made.append(call(backend, backend.install(program), [left.number], argument))
    after = left.step(made[1])
    np.testing.assert_array_equal(backend.get(made[0], WAIT_S), VALUES + np.repeat([0, 2, 4, 6], 2))
    for handle in (made[1], after):
        with pytest.raises(InvalidInput, match="this host will not") as raised:
            backend.get(handle, WAIT_S)
        context = raised.value.context
        assert (context["program"], context["computation"]) == ("to fail", "call")
        assert context["host"] in {"left/0", "left/1"}
        assert context["device"].startswith(context["host"])
    backend.free([argument, *made, after])


def check_that_an_array_follows_its_slice(backend: ClusterBackend) -> None:
    """Nothing of a program changes when its slice moves."""
    number = backend.grant(SliceRequest.of(2, shared=True))
    key = backend.register("double", exported(double, 2))
    two = rows(2)
    nodes = (
        Arg("x", Value(0, (8,), "float32", 0, two)),
        Compute("double", key, 0, (0,), (two,), (Value(1, (8,), "float32", 0, two),)),
        Result((1,)),
    )
    fingerprint = backend.install(prepare(Program("double", (SliceShape(0, (2,)),), nodes)))
    argument = next(HANDLES)
    backend.put(argument, VALUES, number, two)
    islands = []
    for _ in range(2):
        islands.append(backend.placement(number).island)
        made = call(backend, fingerprint, [number], argument)
        np.testing.assert_array_equal(backend.get(made, WAIT_S), VALUES * 2)
        backend.free([made])
        other = "right" if islands[-1] == "left" else "left"
        backend.remap(number, island=other)
    assert set(islands) == {"left", "right"}
    backend.free([argument])
    backend.release(number)


def check_that_memory_is_kept(backend: ClusterBackend) -> None:
    """Of five arrays of 16 bytes a device, four fit, and one is in the memory of the host."""
    right = Slice(backend, "right", 2)
    arrays = [right.put(VALUES + number) for number in range(5)]
    for number, handle in enumerate(arrays):
        np.testing.assert_array_equal(backend.get(handle, WAIT_S), VALUES + number)
    wide = Sharding((("d", 2),))
    handle = next(HANDLES)
    backend.put(handle, np.zeros(32, np.float32), right.number, wide)
    with pytest.raises(DeviceMemoryExceeded, match="needs 128 bytes on device right/0:0 of 64"):
        backend.get(handle, WAIT_S)
    backend.free([*arrays, handle])
    backend.release(right.number)


def check_checkpoints(backend: ClusterBackend, left: Slice, directory: Path) -> None:
    made = left.step(left.put(VALUES))
    path = str(directory / "saved")
    backend.save(path, {"x": made}, timeout_s=WAIT_S)
    expected = VALUES + VALUES.sum()
    state = json.loads((directory / "saved" / "checkpoint.json").read_text())
    assert state
    two = Sharding((("d", 2),), (("d",),))
    number = backend.grant(SliceRequest.of(2, island="left", shared=True))
    loaded = next(HANDLES)
    backend.load(path, {"x": (loaded, Value(loaded, (8,), "float32", number, two))})
    np.testing.assert_array_equal(backend.get(loaded, WAIT_S), expected)
    missing = next(HANDLES)
    backend.load(f"{path}-not", {"x": (missing, Value(missing, (8,), "float32", number, two))})
    with pytest.raises(FileNotFoundError):
        backend.get(missing, WAIT_S)
    backend.free([made, loaded, missing])
    backend.release(number)


def bytes_of_owners(cluster: Cluster) -> dict[str, int]:
    return {owner.name: owner.array_bytes for owner in cluster.status().owners}


def check_that_a_killed_client_leaves_nothing(cluster: Cluster, left: Slice) -> None:
    backend = cluster.backend()
    base, own = left.put(VALUES), left.put(VALUES)
    backend.share(base, "base")
    backend.wait([own], WAIT_S)
    command = [sys.executable, "-m", "tests.runtime.cluster.clients", cluster.address]
    other = subprocess.Popen([*command, "doomed", "base", "its base"], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert json.loads(other.stdout.readline()) == {"shape": [8], "total": float(VALUES.sum())}
        # The status is asked over another connection, and may be older than the arrays.
        wait_until(lambda: "doomed" in bytes_of_owners(cluster))
        # 32 bytes each; what is shared counts once, under its name.
        before = bytes_of_owners(cluster)
        assert (before["doomed"], before["base"], before["its base"]) == (32, 32, 32)
        other.send_signal(signal.SIGKILL)
        wait_until(lambda: "doomed" not in bytes_of_owners(cluster))
    finally:
        other.kill()
        other.communicate()
    assert bytes_of_owners(cluster) == before_without(before, "doomed")
    total = sum(bytes_of_owners(cluster).values())
    wait_until(lambda: sum(host.array_bytes for host in cluster.island("left").status().hosts) == total)
    np.testing.assert_array_equal(backend.get(own, WAIT_S), VALUES)
    backend.withdraw("its base")
    with pytest.raises(ObjectNotFound, match="no object is shared as 'its base'"):
        backend.named("its base", next(HANDLES))


def before_without(before: dict[str, int], name: str) -> dict[str, int]:
    return {other: held for other, held in before.items() if other != name}


def check_that_a_loss_reaches_other_islands(cluster: Cluster, left: Slice) -> None:
    """What waits for data of an island that is lost fails with that loss; the waiting island goes on."""
    backend = cluster.backend()
    program = backend.install(pipeline(backend, 1))
    right = Slice(backend, "right", 2)
    slices = [left.number, right.number]
    argument = left.put(VALUES)
    backend.wait([argument], WAIT_S)
    hosts = cluster.island("left").status().hosts
    os.kill(hosts[0].process_id, signal.SIGSTOP)
    lost = call(backend, program, slices, argument)
    wait_until(lambda: cluster.island("left").status().pending > 0)  # else its argument would be what is lost
    os.kill(hosts[1].process_id, signal.SIGKILL)
    with pytest.raises(HostLost, match="program 'pipeline' was lost") as raised:
        backend.get(lost, WAIT_S)
    assert raised.value.context["host"] == "left/1"
    made = right.step(right.put(VALUES))
    np.testing.assert_array_equal(backend.get(made, WAIT_S), VALUES + VALUES.sum())
    again = call(backend, program, slices, left.put(VALUES))  # waits until the island is there again
    expected = VALUES + VALUES.sum()
    np.testing.assert_array_equal(backend.get(again, WAIT_S), expected + expected.sum())


def wrong_results(cluster: Cluster, island: str, rounds: int) -> int:
    """How many results of two clients are wrong: sums of the same shape, each of other values."""
    wrong = 0
    with connect(cluster.address, name=f"other on {island}") as second:
        sides = [Slice(each.backend(), island, 2) for each in (cluster, second)]
        values = [[VALUES * factor * number for factor in (1, 1000)] for number in range(1, rounds + 1)]
        given = [[side.put(own) for side, own in zip(sides, each, strict=True)] for each in values]
        for side, handles in zip(sides, zip(*given, strict=True), strict=True):
            side.backend.wait(list(handles), WAIT_S)
        made = [[side.step(handle) for side, handle in zip(sides, each, strict=True)] for each in given]
        for handles, owns in zip(made, values, strict=True):
            for side, handle, own in zip(sides, handles, owns, strict=True):
                try:
                    found = side.backend.get(handle, WAIT_S)
                except HostLost:  # they wait for each other for ever, and the watchdog ends that
                    return wrong + 1
                wrong += not np.array_equal(found, own + own.sum())
    return wrong


@pytest.mark.timeout(900)
@pytest.mark.long
@only_long
def test_without_an_order_two_clients_get_wrong_sums_and_with_it_never(address: str) -> None:
    with visiting(address) as cluster:
        cluster.add_island("ordered", hosts=2)
        cluster._host_class = "tests.runtime.cluster.hosts:UnorderedHost"
        cluster.add_island("unordered", hosts=2, deadline_s=10.0, max_restarts=0)
        assert wrong_results(cluster, "unordered", 10) > 0
        assert wrong_results(cluster, "ordered", 50) == 0


def test_lists_that_call_the_same_function_are_prepared_in_any_order(address: str) -> None:
    """The second is prepared before the first, with which the function was sent."""
    with visiting(address, name="held") as cluster:
        cluster._host_class = "tests.runtime.cluster.hosts:HeldHost"
        cluster.add_island("held", devices_per_host=2)
        backend = cluster.backend()
        slices = [Slice(backend, "held", 2, name=name) for name in ("first", "second")]
        made = [each.step(each.put(VALUES)) for each in slices]
        for handle in made:
            np.testing.assert_array_equal(backend.get(handle, WAIT_S), VALUES + VALUES.sum())
