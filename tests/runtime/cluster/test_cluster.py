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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.runtime.cluster.driving import HANDLES, WAIT_S, Slice, program, wait_until
from tests.support.long import only_long

from waystation.errors import Conflict, InvalidInput, Unavailable
from waystation.runtime.cluster import Cluster, Island, IslandState, connect
from waystation.runtime.cluster.connection import ask
from waystation.runtime.control.connector import Connector
from waystation.runtime.control.credentials import Role
from waystation.runtime.errors import (
    FunctionNotFound,
    HostLost,
    IslandFailed,
    NoSuchIsland,
    NotEnoughDevices,
    ObjectNotFound,
)
from waystation.runtime.hosts.world import Process
from waystation.runtime.resources import SliceRequest

pytestmark = pytest.mark.skipif(sys.version_info < (3, 12), reason="the runtime needs Python 3.12")

DEADLINE_S = 6.0
VALUES = np.arange(8, dtype=np.float32)


def put_and_step(on: Slice) -> None:
    """Steps three times, without waiting in between, and checks the result."""
    made = on.steps(on.put(VALUES), 3)
    expected = VALUES
    for _ in range(3):
        expected = expected + expected.sum()
    np.testing.assert_array_equal(on.backend.get(made, WAIT_S), expected)
    on.backend.free([made])


def is_gone(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.timeout(900)  # on a busy machine each of a dozen processes takes long to start
@pytest.mark.long
@only_long
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
        # An agent of Ray's own looks only once a minute whether its raylet lives.
        agents = {each for each in ray if b"Agent" in Path(f"/proc/{each}/cmdline").read_bytes()}
        assert host.process_id not in agents
        controller.kill()
        wait_until(lambda: all(map(is_gone, ray - agents)))
        for agent in agents:
            with contextlib.suppress(ProcessLookupError):
                os.kill(agent, signal.SIGKILL)


def live_and_die(cluster: Cluster) -> None:
    with ThreadPoolExecutor(2) as pool:
        adding = [
            pool.submit(cluster.add_island, "left", hosts=2, devices_per_host=2, labels={"place": "a"}),
            pool.submit(cluster.add_island, "right", hosts=1, devices_per_host=2),
        ]
        left, right = (each.result() for each in adding)
    backend = cluster.backend()
    on_left, on_right = (Slice(backend, each.name, each.device_count) for each in (left, right))
    for on in (on_left, on_right):
        put_and_step(on)
    check_refusals(cluster, on_left)
    check_that_a_killed_program_is_counted_out(cluster)
    check_the_command(cluster)
    check_that_a_killed_host_fells_its_island_only(left, right, on_left, on_right)
    check_that_stuck_hosts_are_found(cluster)
    put_and_step(on_right)
    hosts = [host.process_id for host in left.status().hosts]
    cluster.remove_island("left")
    with pytest.raises(NoSuchIsland, match="the cluster has no island 'left'; it has 'right'"):
        cluster.island("left")
    with pytest.raises(NoSuchIsland, match="island 'left' has been removed"):
        put_and_step(on_left)
    wait_until(lambda: all(map(is_gone, hosts)))
    again = cluster.add_island("left", devices_per_host=2)
    assert again.status().epoch > 1  # it takes up the order of the one that is gone
    put_and_step(Slice(backend, again.name, again.device_count))


def check_refusals(cluster: Cluster, on: Slice) -> None:
    backend = cluster.backend()
    with pytest.raises(ObjectNotFound, match="has no array 4711"):
        backend.get(4711, WAIT_S)
    unknown = Slice(backend, "left", 4, key="unknown")
    with pytest.raises(FunctionNotFound, match="no function 'unknown' has been registered"):
        backend.get(unknown.step(unknown.put(VALUES)), WAIT_S)
    given = on.put(VALUES)
    made = next(HANDLES)
    backend.run(on.fingerprint, [on.number], [given, given], [made])
    with pytest.raises(InvalidInput, match="program 'train' takes 1 arrays, not 2"):
        backend.get(made, WAIT_S)
    with pytest.raises(NotEnoughDevices, match="island 'left' has 4 free of 4"):
        backend.grant(SliceRequest.of(5, island="left", shared=True))
    with pytest.raises(Conflict, match="there is an island 'left' already"):
        cluster.add_island("left")
    with pytest.raises(InvalidInput, match="programs cannot call '_controller' of their controller"):
        cluster._connection.ask("_controller")
    check_that_a_program_cannot_be_a_host(cluster)
    put_and_step(on)  # it is none the worse for that


def check_that_a_program_cannot_be_a_host(cluster: Cluster) -> None:
    """Not even with all that the manager has given to it."""
    manager = cluster._connection.manager
    attended = manager.attend.remote("impostor")
    entrance = ask(manager.enter.remote("impostor", [attended]))
    for name in ("left/0/e1", "left/0/e2"):
        forged = replace(entrance.credential, role=Role.HOST, name=name)
        with pytest.raises(Unavailable, match="has another secret"):
            Connector(entrance.controller, forged)
    with pytest.raises(Unavailable, match="has another secret"):
        Connector(entrance.controller, replace(entrance.credential, name=cluster.client))
    ask(manager.leave.remote("impostor"))


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


def check_that_a_killed_host_fells_its_island_only(
    left: Island, right: Island, on_left: Slice, on_right: Slice
) -> None:
    before = left.status().hosts
    given = on_left.put(VALUES)
    on_left.backend.wait([given], WAIT_S)
    # It does not end before the host is dead, as the other host never hears of it.
    os.kill(before[0].process_id, signal.SIGSTOP)
    lost = on_left.step(given)
    wait_until(lambda: left.status().pending > 0)  # else it would be told that its array is lost
    os.kill(before[1].process_id, signal.SIGKILL)
    with pytest.raises(HostLost) as raised:
        on_left.backend.get(lost, WAIT_S)
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
    with pytest.raises(HostLost, match="an array of program 'put' was lost"):
        on_left.backend.get(given, WAIT_S)
    put_and_step(on_right)
    put_and_step(on_left)  # waits until it is rebuilt; the function is there again
    status = left.status()
    assert (status.state, status.epoch, status.restarts) == (IslandState.READY, 2, 1)
    assert "has died" in status.last_loss
    assert all(map(is_gone, (host.process_id for host in before)))  # the stopped one too
    assert right.status().epoch == 1


def check_that_stuck_hosts_are_found(cluster: Cluster) -> None:
    """Both ways of being stuck, on two islands at once, since each takes its deadline."""
    with ThreadPoolExecutor(2) as pool:
        stopped_island = pool.submit(
            cluster.add_island, "stopped", deadline_s=DEADLINE_S, max_restarts=0
        ).result()
        cluster._host_class = "tests.runtime.cluster.hosts:DeafHost"
        deaf_island = cluster.add_island("deaf", hosts=2, deadline_s=DEADLINE_S, max_restarts=0)
    backend = cluster.backend()
    stopped, deaf = Slice(backend, "stopped", 1), Slice(backend, "deaf", 2)
    unheard = Slice(backend, "deaf", 2, name="unheard")
    for on in (stopped, deaf):
        put_and_step(on)
    given = [stopped.put(VALUES), unheard.put(VALUES)]
    backend.wait(given, WAIT_S)
    (host,) = stopped_island.status().hosts
    os.kill(host.process_id, signal.SIGSTOP)
    calls = [stopped.step(given[0]), unheard.step(given[1])]
    errors = []
    for made in calls:
        with pytest.raises(HostLost) as raised:
            backend.get(made, WAIT_S)
        errors.append(raised.value)
    assert [error.context["host"] for error in errors] == ["stopped/0", "deaf/1"]
    assert "has not answered for 6 s" in errors[0].message
    assert "has not begun what 'deaf/0' waits in ('add_sum') for 6 s" in errors[1].message
    for island, on in ((stopped_island, stopped), (deaf_island, deaf)):
        with pytest.raises(IslandFailed, match="as often as it may be"):
            put_and_step(on)
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
