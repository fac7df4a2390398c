"""Saves, loads and computations that take longer than the deadline of their island, on real hosts."""

from __future__ import annotations

import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.runtime.cluster.driving import (
    HANDLES,
    WAIT_S,
    Slice,
    exported,
    manager_of,
    rows,
    visiting,
    wait_until,
)
from tests.support.long import only_long

from waystation.runtime.cluster import Cluster, ClusterBackend, connect
from waystation.runtime.errors import HostLost
from waystation.runtime.host_options import SaveManner
from waystation.runtime.ir import Value
from waystation.runtime.state_trees import StateTree

pytestmark = pytest.mark.skipif(sys.version_info < (3, 12), reason="the runtime needs Python 3.12")

VALUES = np.arange(8, dtype=np.float32)
SUMMED = VALUES + VALUES.sum()
DEADLINE_S = 2.0
FOR_EVER = 2**30


def turns(x: Any) -> Any:
    """Multiplies a matrix as many times as the first element says, and adds what is nothing."""

    def turn(_: Any, matrix: Any) -> Any:
        return jax.numpy.tanh(matrix @ matrix)

    matrix = jax.lax.fori_loop(0, x[0].astype(int), turn, jax.numpy.zeros((256, 256)))
    return x + matrix[0, 0]


@pytest.mark.timeout(900)
@pytest.mark.long
@only_long
def test_what_only_takes_long_is_not_lost_and_holds_nobody_up(address: str, tmp_path: Path) -> None:
    with visiting(address, name="long") as cluster:
        with ThreadPoolExecutor(2) as pool:
            adding = [
                pool.submit(cluster.add_island, "long-busy", deadline_s=DEADLINE_S),
                pool.submit(cluster.add_island, "long-limited", computation_limit_s=1.0, max_restarts=0),
            ]
            for each in adding:
                each.result()
        cluster._host_class = "tests.runtime.cluster.hosts:SlowHost"
        cluster.add_island("long-slow", hosts=2, deadline_s=DEADLINE_S)
        given, made = begin_to_compute(cluster.backend(), "long-busy", turns_in(2 * DEADLINE_S))
        with connect(address, name="other") as other:
            check_transfers(cluster, other.backend(), str(tmp_path / "saved"))
        np.testing.assert_array_equal(cluster.backend().get(made, WAIT_S), given)
        check_that_nothing_was_lost(cluster, "long-busy")
        _, endless = begin_to_compute(cluster.backend(), "long-limited", FOR_EVER)
        with pytest.raises(HostLost, match="for 1 s, the limit of computations of its island"):
            cluster.backend().get(endless, WAIT_S)


@pytest.mark.timeout(600)
@pytest.mark.long
@only_long
def test_time_in_which_processes_are_stopped_is_no_evidence(address: str) -> None:
    """As when their machine is suspended: a host, while the manager waits for its word, and then both."""
    deadline_s = 6.0
    with visiting(address, name="stopped") as cluster:
        (host,) = cluster.add_island("stopped", deadline_s=deadline_s).status().hosts
        manager = manager_of(cluster)
        given, made = begin_to_compute(cluster.backend(), "stopped", turns_in(deadline_s))
        wait_until(lambda: cluster.island("stopped").status().hosts[0].doing == "turns")
        stopped = [host.process_id, manager]
        os.kill(host.process_id, signal.SIGSTOP)
        time.sleep(1.2)  # it is asked each second
        os.kill(manager, signal.SIGSTOP)
        time.sleep(deadline_s)
        for process_id in stopped:
            os.kill(process_id, signal.SIGCONT)
        np.testing.assert_array_equal(cluster.backend().get(made, WAIT_S), given)
        check_that_nothing_was_lost(cluster, "stopped")


def turns_in(seconds: float) -> int:
    """How many turns this machine does in that time."""
    function = jax.jit(turns)
    function(VALUES).block_until_ready()
    count = 1 << 6
    while True:
        began_s = time.monotonic()
        function(np.full(8, count, np.float32)).block_until_ready()
        if (taken_s := time.monotonic() - began_s) > 0.1:
            return int(count * seconds / taken_s)
        count *= 2


def begin_to_compute(backend: ClusterBackend, island: str, count: int) -> tuple[np.ndarray, int]:
    key = backend.register("turns", exported(turns, 1))
    on = Slice(backend, island, 1, key=key)
    given = np.full(8, count, np.float32)
    return given, on.step(on.put(given))


def check_transfers(cluster: Cluster, other: ClusterBackend, path: str) -> None:
    """Neither a save nor a load of one program holds up another one, whatever time they take."""
    backend = cluster.backend()
    own, others = Slice(backend, "long-slow", 2), Slice(other, "long-slow", 2)
    saved = own.put(VALUES)
    end_save = backend.begin_save(path, StateTree.of_names(["x"]), {0: saved}, SaveManner())
    after = own.step(saved)
    check_that_it_is_under_way(cluster, others, f"save '{path}'")
    np.testing.assert_array_equal(backend.get(after, WAIT_S), SUMMED)  # of the same program, too
    Path(f"{path}.go").touch()
    end_save(WAIT_S)
    Path(f"{path}.go").unlink()

    loaded = next(HANDLES)
    backend.load(path, {"x": (loaded, Value(loaded, (8,), "float32", own.number, rows(2)))})
    after = own.step(loaded)  # waits for it, and holds up nobody else
    check_that_it_is_under_way(cluster, others, f"load '{path}'")
    assert not backend.is_done(loaded)
    assert not backend.is_done(after)
    Path(f"{path}.go").touch()
    np.testing.assert_array_equal(backend.get(after, WAIT_S), SUMMED)
    np.testing.assert_array_equal(backend.get(loaded, WAIT_S), VALUES)
    check_that_nothing_was_lost(cluster, "long-slow")


def check_that_it_is_under_way(cluster: Cluster, others: Slice, what: str) -> None:
    began_s = time.monotonic()
    while time.monotonic() < began_s + 2 * DEADLINE_S:
        np.testing.assert_array_equal(others.backend.get(others.step(others.put(VALUES)), WAIT_S), SUMMED)
    wait_until(
        lambda: all(host.doing.startswith(what) for host in cluster.island("long-slow").status().hosts)
    )


def check_that_nothing_was_lost(cluster: Cluster, island: str) -> None:
    status = cluster.island(island).status()
    assert (status.epoch, status.restarts, status.last_loss) == (1, 0, "")
