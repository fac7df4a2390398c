"""Timelines of a real cluster: two clients on two islands, one host of which is killed; one story."""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import ray
import ray.util
from tests.runtime.cluster.driving import WAIT_S, Slice, add_sum, call, exported, rows, visiting, wait_until

from waystation.runtime.cluster import Cluster, ClusterBackend, IslandState
from waystation.runtime.ir import Arg, Compute, Program, Result, SliceShape, Value, prepare
from waystation.runtime.timeline import Timeline

pytestmark = pytest.mark.skipif(sys.version_info < (3, 12), reason="the runtime needs Python 3.12")

VALUES = np.arange(8, dtype=np.float32)


@pytest.mark.timeout(600)  # on a busy machine each process of Ray and each host takes long to start
def test_what_two_clients_did_on_two_islands(address: str, tmp_path: Path) -> None:
    with visiting(address, "watched", timeline=True) as cluster:
        cluster.add_island("east", devices_per_host=2)
        cluster.add_island("west", devices_per_host=2)
        check_names(cluster)
        check_a_pipeline(cluster, tmp_path)
        check_that_it_is_kept_when_a_host_is_killed(cluster)
        check_that_it_ends(cluster)


def check_names(cluster: Cluster) -> None:
    """What Ray's dashboard shows comes from this table."""
    await_actors({"waystation manager", "east/0, epoch 1", "west/0, epoch 1"})
    assert {each.name for each in cluster.islands.values()} == {"east", "west"}


def await_actors(names: set[str]) -> None:
    """Waits until Ray has these actors; those of an island that was removed before may still be ending."""
    found: set[str] = set()

    def are_there() -> bool:
        found.clear()
        found.update(actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True))
        return found == names

    wait_until(are_there, found)


def pipeline(backend: ClusterBackend) -> str:
    """Two sums on one island, then one on the other."""
    key = backend.register("add_sum", exported(add_sum, 2))
    two = rows(2)
    nodes = (
        Arg("x", Value(0, (8,), "float32", 0, two)),
        Compute("front", key, 0, (0,), (two,), (Value(1, (8,), "float32", 0, two),)),
        Compute("middle", key, 0, (1,), (two,), (Value(2, (8,), "float32", 0, two),)),
        Compute("back", key, 1, (2,), (two,), (Value(3, (8,), "float32", 1, two),)),
        Result((3,)),
    )
    return backend.install(prepare(Program("pipeline", (SliceShape(0, (2,)), SliceShape(1, (2,))), nodes)))


def check_a_pipeline(cluster: Cluster, directory: Path) -> None:
    backend = cluster.backend()
    left, right = (Slice(backend, name, 2) for name in ("east", "west"))
    argument = left.put(VALUES)
    fingerprint = pipeline(backend)
    made = [call(backend, fingerprint, [left.number, right.number], argument) for _ in range(5)]
    backend.wait(made, WAIT_S)
    left.backend.wait([left.steps(left.put(VALUES), 5)], WAIT_S)
    timeline = cluster.timeline()
    assert timeline.clients == ("watched",)
    assert not timeline.lost
    assert timeline.devices == tuple((f"{name}/0", device) for name in ("east", "west") for device in (0, 1))
    # Clocks of one machine are one clock.
    assert set(timeline.uncertainty_ns.values()) == {0}

    works = [work for work in timeline.works.values() if work.program == "pipeline"]
    assert len(works) == 5
    for work in works:
        check_order(timeline, work.number)
        called = [each for each in timeline.computations if each.work == work.number]
        counts = {
            host: sum(1 + each.unseen for each in called if (each.host, each.device) == (host, 0))
            for host in ("east/0", "west/0")
        }
        assert counts == {"east/0": 2, "west/0": 1}
        went = [each for each in timeline.transfers if each.work == work.number]
        sent, brought = ([each for each in went if each.is_sent is which] for which in (True, False))
        assert {each.host for each in sent} == {"east/0"}
        assert {each.host for each in brought} == {"west/0"}
        assert sum(each.size_bytes for each in sent) == sum(each.size_bytes for each in brought) == 32
        last = min(each.begin_ns for each in called if each.host == "west/0")
        assert all(each.end_ns <= last for each in brought)
    cluster.write_timeline(directory / "timeline.json")
    events = json.loads((directory / "timeline.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "b", "e", "s", "f"}
    timeline.draw(directory / "timeline.png")
    backend.free([argument, *made])


def check_order(timeline: Timeline, number: int) -> None:
    """What the controller and a host stamped for a work comes in the order in which it must happen."""
    work = timeline.works[number]
    for phases in timeline.host_phases:
        if phases.work != number:
            continue
        island = work.islands[phases.host.partition("/")[0]]
        times = [work.submitted_ns, island.scheduled_ns, island.admitted_ns, island.dispatched_ns]
        times += [phases.received_ns, phases.begun_ns, phases.dispatched_ns, phases.ended_ns]
        known = [time for time in (*times, work.completed_ns) if time is not None]
        assert len(known) == 9
        assert known == sorted(known)
        for each in timeline.computations:
            if (each.work, each.host) == (number, phases.host):
                assert phases.begun_ns is not None
                assert phases.ended_ns is not None
                assert phases.begun_ns <= each.begin_ns <= each.end_ns <= phases.ended_ns


def check_that_it_is_kept_when_a_host_is_killed(cluster: Cluster) -> None:
    before = cluster.timeline()
    island = cluster.island("west")
    os.kill(island.status().hosts[0].process_id, signal.SIGKILL)
    wait_until(lambda: island.status().epoch == 2 and island.status().state is IslandState.READY)
    on_right = Slice(cluster.backend(), "west", 2, name="again")
    cluster.backend().wait([on_right.step(on_right.put(VALUES))], WAIT_S)
    after = cluster.timeline(forget=True)
    assert set(before.computations) <= set(after.computations)
    assert {source.epoch for source in after.sources if source.name == "west/0"} == {1, 2}
    assert "again" in {each.program for each in after.computations if each.host == "west/0"}
    # Ray may learn later than the manager that the killed host is gone.
    await_actors({"waystation manager", "east/0, epoch 1", "west/0, epoch 2"})


def check_that_it_ends(cluster: Cluster) -> None:
    cluster.record_timeline(False)
    cluster.timeline(forget=True)
    left = Slice(cluster.backend(), "east", 2)
    cluster.backend().wait([left.step(left.put(VALUES))], WAIT_S)
    timeline = cluster.timeline()
    assert not timeline.works
    assert not timeline.computations
