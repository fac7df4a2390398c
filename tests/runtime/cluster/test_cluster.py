"""Islands on a real Ray: they compute side by side, are lost by SIGKILL and SIGSTOP, and come back.

To start Ray and hosts takes seconds of CPU each, so one cluster is used for a whole story, told in order;
what can be tested without processes is tested without them (`test_watchdog.py`, `tests/runtime/hosts`).
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np
import pytest

from waystation.errors import Conflict, Fenced, InvalidInput
from waystation.runtime.cluster import Cluster, Island, IslandState, connect
from waystation.runtime.hosts.errors import (
    BufferNotFound,
    FunctionNotFound,
    HostLost,
    IslandFailed,
    NoSuchIsland,
)
from waystation.runtime.hosts.instructions import Exec
from waystation.runtime.hosts.world import Process

pytestmark = pytest.mark.skipif(sys.version_info < (3, 12), reason="the runtime needs Python 3.12")

WAIT_S = 120.0
DEADLINE_S = 6.0
VALUES = np.arange(8, dtype=np.float32)
PROGRAM = [sys.executable, "-m", "tests.runtime.cluster.programs"]


def add_sum(devices: int) -> Any:
    """`x + sum(x)`, where the sum is a collective over all devices; exported by this process alone."""
    sharding = sharded(devices)

    def step(x: Any) -> Any:
        return x + jax.numpy.sum(x)

    jitted = jax.jit(step, in_shardings=sharding, out_shardings=sharding)
    return jax.export.export(jitted, platforms=["cpu"])(jax.ShapeDtypeStruct((8,), np.float32))


def sharded(devices: int) -> Any:
    mesh = jax.sharding.AbstractMesh((devices,), ("d",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))


def put_and_step(island: Island, key: str) -> None:
    """Steps three times, without waiting in between, and checks the result."""
    island.put("x", VALUES, sharded(island.device_count))
    expected = VALUES
    for _ in range(3):
        island.run([Exec(key, ("x",), ("x",))], program="train")
        expected = expected + expected.sum()
    np.testing.assert_array_equal(island.get("x", WAIT_S), expected)


@contextlib.contextmanager
def program(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """A program in a process of its own, and what it says."""
    process = subprocess.Popen([*PROGRAM, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def wait_until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def is_gone(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.timeout(900)  # on a busy machine each of a dozen processes takes long to start
def test_islands_live_and_die_on_the_cluster_of_another_program() -> None:
    """The cluster is that of a program in another process, which is killed in the end."""
    with program() as (controller, said):
        with connect(said["address"]) as cluster:
            live_and_die(cluster)
            (host,) = cluster.island("right").status().hosts
        ray = descendants(controller.pid)
        assert host.process_id in ray
        assert not is_gone(host.process_id)
        os.kill(host.process_id, signal.SIGSTOP)  # which must not save it
        controller.kill()
        wait_until(lambda: all(map(is_gone, ray)))


def live_and_die(cluster: Cluster) -> None:
    with ThreadPoolExecutor(2) as pool:
        adding = [
            pool.submit(cluster.add_island, "left", hosts=2, devices_per_host=2, labels={"place": "a"}),
            pool.submit(cluster.add_island, "right", hosts=1, devices_per_host=2),
        ]
        left, right = (each.result() for each in adding)
    keys = [island.register(add_sum(island.device_count)) for island in (left, right)]
    for island, key in zip((left, right), keys, strict=True):
        put_and_step(island, key)
    check_refusals(cluster, left, right, keys[0])
    check_that_a_killed_program_is_counted_out(cluster)
    check_the_command(cluster)
    check_that_a_killed_host_fells_its_island_only(left, right, keys)
    check_that_stuck_hosts_are_found(cluster)
    put_and_step(right, keys[1])
    hosts = [host.process_id for host in left.status().hosts]
    cluster.remove_island("left")
    with pytest.raises(NoSuchIsland, match="the cluster has no island 'left'; it has 'right'"):
        left.get("x")
    wait_until(lambda: all(map(is_gone, hosts)))


def check_refusals(cluster: Cluster, left: Island, right: Island, key: str) -> None:
    with pytest.raises(BufferNotFound, match="there is no buffer 'y'"):
        left.get("y", WAIT_S)
    with pytest.raises(FunctionNotFound, match="no function 'unknown' has been registered"):
        left.run([Exec("unknown", ("x",), ("y",))]).result(WAIT_S)
    with pytest.raises(InvalidInput, match="computation 'step' takes 1 operands and gives 1 results, not 2"):
        left.run([Exec(key, ("x", "x"), ("y",))]).result(WAIT_S)
    with pytest.raises(InvalidInput, match="exported for 4 devices, and island 'right' has 2"):
        right.register(add_sum(4))
    with pytest.raises(Conflict, match="there is an island 'left' already"):
        cluster.add_island("left")
    left.get("x", WAIT_S)  # it is none the worse for that


def check_that_a_killed_program_is_counted_out(cluster: Cluster) -> None:
    with program(cluster.address) as (other, said):
        assert (said["clients"], len(said["hosts"])) == (3, 3)
        other.kill()
        wait_until(lambda: cluster.status().clients == 2)
    assert [island.epoch for island in cluster.status().islands] == [1, 1]


def check_the_command(cluster: Cluster) -> None:
    command = [str(Path(sys.executable).parent / "waystation"), "runtime", "status", cluster.address]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    document = json.loads(done.stdout)
    islands = [
        (island["name"], island["state"], island["epoch"], island["restarts"], len(island["hosts"]))
        for island in document["islands"]
    ]
    assert islands == [("left", "ready", 1, 0, 2), ("right", "ready", 1, 0, 1)]
    assert document["address"] == cluster.address
    assert [host["name"] for host in document["islands"][0]["hosts"]] == ["left/0", "left/1"]
    assert document["islands"][0]["labels"] == [["place", "a"]]


def check_that_a_killed_host_fells_its_island_only(left: Island, right: Island, keys: list[str]) -> None:
    before = left.status().hosts
    # It does not end before the host is dead, as the other host never hears of it.
    os.kill(before[0].process_id, signal.SIGSTOP)
    lost = left.run([Exec(keys[0], ("x",), ("x",))], program="train", epoch=1)
    os.kill(before[1].process_id, signal.SIGKILL)
    with pytest.raises(HostLost) as raised:
        lost.result(WAIT_S)
    context = raised.value.context
    assert {name: context[name] for name in ("program", "computation", "host", "island", "epoch")} == {
        "program": "train",
        "computation": "step",
        "host": "left/1",
        "island": "left",
        "epoch": 1,
    }
    assert context["device"] == ", ".join(before[1].devices)
    assert "host 'left/1' (process" in raised.value.message
    put_and_step(right, keys[1])
    put_and_step(left, keys[0])  # waits until it is rebuilt; the function is there again
    status = left.status()
    assert (status.state, status.epoch, status.restarts) == (IslandState.READY, 2, 1)
    assert "has died" in status.last_loss
    assert all(map(is_gone, (host.process_id for host in before)))  # the stopped one too
    assert right.status().epoch == 1
    with pytest.raises(Fenced, match="is in epoch 2, and what epoch 1 had is gone"):
        left.run([Exec(keys[0], ("x",), ("x",))], epoch=1).result(WAIT_S)


def check_that_stuck_hosts_are_found(cluster: Cluster) -> None:
    """Both ways of being stuck, on two islands at once, since each takes its deadline."""
    with ThreadPoolExecutor(2) as pool:
        stopped_island = pool.submit(
            cluster.add_island, "stopped", deadline_s=DEADLINE_S, max_restarts=0
        ).result()
        cluster._host_class = "tests.runtime.cluster.hosts:DeafHost"
        deaf_island = cluster.add_island("deaf", hosts=2, deadline_s=DEADLINE_S, max_restarts=0)
    stopped = stopped_island.register(add_sum(1))
    deaf = deaf_island.register(add_sum(2))
    put_and_step(stopped_island, stopped)
    put_and_step(deaf_island, deaf)
    (host,) = stopped_island.status().hosts
    os.kill(host.process_id, signal.SIGSTOP)
    calls = [
        stopped_island.run([Exec(stopped, ("x",), ("x",))], program="train"),
        deaf_island.run([Exec(deaf, ("x",), ("x",))], program="unheard"),
    ]
    errors = []
    for call in calls:
        with pytest.raises(HostLost) as raised:
            call.result(WAIT_S)
        errors.append(raised.value)
    assert [error.context["host"] for error in errors] == ["stopped/0", "deaf/1"]
    assert "has not answered for 6 s" in errors[0].message
    assert "has not begun what 'deaf/0' waits in ('step') for 6 s" in errors[1].message
    for island in (stopped_island, deaf_island):
        with pytest.raises(IslandFailed, match="as often as it may be"):
            island.get("x", WAIT_S)
        assert island.status().state is IslandState.FAILED
        cluster.remove_island(island.name)
    wait_until(lambda: is_gone(host.process_id))


def descendants(process_id: int) -> set[int]:
    """Processes that a process has started, and theirs."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = {process_id}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {process_id}


def test_a_process_is_killed_only_if_it_is_the_same() -> None:
    own = Process.own()
    Process(own.process_id, "1").kill()  # another process of this id, long ago
    assert own == Process.own()
