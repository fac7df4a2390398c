"""A program whose state is on several islands: it saves, loads, is suspended, and has less memory than state.

A process of its own: it limits its memory.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tests.runtime.client.training_states import check_training_states
from tests.runtime.cluster.driving import wait_until

import waystation
import waystation.runtime as pw
from waystation.errors import Conflict, StructureMismatch
from waystation.runtime.errors import NotEnoughDevices, SliceNotPlaced

VALUES = np.arange(64, dtype=np.float32).reshape(8, 8)
LARGE = 32 << 20  # elements
HEADROOM_BYTES = 96 << 20


def filled(client: pw.Client, on: pw.Slice, number: float) -> pw.Array:
    """An array that is made on hosts."""

    def fill(x: Any) -> Any:
        return x + jnp.arange(64, dtype=jnp.float32).reshape(8, 8)

    made: pw.Array = client.jit(fill, on, out_shardings=P("x"))(np.float32(number))
    return made


def loaded_here(path: str) -> Any:
    """What is in a checkpoint, without hosts."""
    context = waystation.Context()
    context.array.loading.restore_on_host = True
    with context:
        return waystation.load(path)


def check_saves_over_both_islands(client: pw.Client, directory: str) -> None:
    """One checkpoint of arrays on both islands; also of one whose slice has moved since."""
    devices = client.make_virtual_device_set()
    lower, upper = (devices.add_slice(devices=2, island=name) for name in ("lower", "upper"))
    moving = devices.add_slice(devices=2)
    state = {
        "model": {"w": filled(client, lower, 1), "v": filled(client, upper, 2)},
        "moved": filled(client, moving, 3),
    }
    state["moved"].block_until_ready()
    moving.remap(island="upper" if moving.placement.island == "lower" else "lower")
    path = os.path.join(directory, "both")
    waystation.save(path, state)
    assert os.listdir(directory) == ["both"], os.listdir(directory)
    for loaded in (loaded_here(path), client.load(path, state)):
        np.testing.assert_array_equal(loaded["model"]["w"], VALUES + 1)
        np.testing.assert_array_equal(loaded["model"]["v"], VALUES + 2)
        np.testing.assert_array_equal(loaded["moved"], VALUES + 3)
    assert not waystation.verify(path).damages
    check_refusals(client, state, path)
    # What was on one island is loaded to the other one, and replaces the checkpoint.
    crossed = {"model": {"w": state["model"]["v"], "v": state["moved"]}, "moved": state["model"]["w"]}
    loaded = waystation.load(path, crossed)
    assert loaded["model"]["w"].slice is upper
    client.save(path, {"model": loaded["model"], "moved": filled(client, lower, 4)}, overwrite=True)
    found = loaded_here(path)
    np.testing.assert_array_equal(found["model"]["w"], VALUES + 1)
    np.testing.assert_array_equal(found["model"]["v"], VALUES + 2)
    np.testing.assert_array_equal(found["moved"], VALUES + 4)
    assert os.listdir(directory) == ["both"], os.listdir(directory)
    devices.release()


def check_refusals(client: pw.Client, state: dict[str, Any], path: str) -> None:
    """What cannot be saved or loaded is said, and nothing is left of it."""
    with pytest.raises(Conflict, match="exists already"):
        waystation.save(path, state)
    fewer = client.load(path, {"model": state["model"]})
    for array in fewer["model"].values():
        with pytest.raises(StructureMismatch, match=r"\['moved'\]: only in the checkpoint"):
            array.numpy()


def check_that_resuming_waits_for_an_island(cluster: pw.Cluster, client: pw.Client) -> None:
    """The island of a suspended program is lost, and it is resumed before that is there again."""
    on = client.make_virtual_device_set().add_slice(devices=2, island="upper")
    array = filled(client, on, 5)
    client.suspend()
    island = cluster.islands["upper"]
    os.kill(island.status().hosts[0].process_id, signal.SIGKILL)
    wait_until(lambda: bool(island.status().last_loss))
    client.resume()
    np.testing.assert_array_equal(array, VALUES + 5)
    assert on.placement.island == "upper"
    on.release()


def check_suspension(cluster: pw.Cluster, client: pw.Client, directory: str) -> None:
    """The state outlives the island that it was on, in memory and on disk; the program goes on with it."""
    on = client.make_virtual_device_set().add_slice(devices=2)
    step = client.jit(lambda x: x + x.sum(), on, in_shardings=P("x"), out_shardings=P("x"))
    x = filled(client, on, 0)
    y = step(x)
    expected = VALUES + VALUES.sum()
    memory = Path(directory, "memory")
    memory.mkdir()
    cluster.keep_suspended(memory=str(memory), memory_bytes=1 << 20, directory=directory)
    before = on.placement.island
    client.suspend()
    [suspended] = memory.glob("*/*")
    assert waystation.is_checkpoint(str(suspended))
    gc.collect()  # what errors have kept of arrays from before
    wait_until(lambda: all(owner.array_bytes == 0 for owner in cluster.status().owners))
    with pytest.raises(SliceNotPlaced, match="resume client 'state'"):
        y.numpy()
    cluster.remove_island(before)
    client.resume()
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(step(x), expected)
    hosts = on.placement.hosts
    assert on.placement.island != before
    (every,) = (island.status().hosts for island in cluster.islands.values())
    with pytest.raises(NotEnoughDevices):
        client.migrate(without_hosts=[host.name for host in every])
    np.testing.assert_array_equal(y, expected)
    cluster.keep_suspended(memory_bytes=0, directory=directory)  # all of it goes to disk
    cluster.add_island("north", devices_per_host=2)
    client.migrate(without_hosts=hosts)
    assert on.placement.island == "north"
    np.testing.assert_array_equal(step(y), expected + expected.sum())
    on.release()


def check_state_larger_than_memory(client: pw.Client, directory: str) -> None:
    """This program can hold none of its arrays, and drives, saves and loads them all the same."""
    on = client.make_virtual_device_set().add_slice(devices=2)
    fill = client.jit(lambda x: jnp.full((LARGE,), x), on, out_shardings=P("x"))
    add = client.jit(lambda x, y: x + y, on)
    total = client.jit(lambda x: x.sum(), on)
    used = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmData" in line)
    limit_bytes = int(used.split()[1]) * 1024 + HEADROOM_BYTES
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, before[1]))
    with pytest.raises(MemoryError):
        np.ones(LARGE, np.float32)
    state = {"a": fill(np.float32(1)), "b": fill(np.float32(2))}
    state["b"] = add(state["a"], state["b"])
    path = Path(directory, "large")
    client.save(path, state)
    loaded = client.load(path, state)
    assert float(total(add(loaded["a"], loaded["b"]))) == 4.0 * LARGE
    resource.setrlimit(resource.RLIMIT_DATA, before)
    on.release()


def main() -> None:
    """All of it, on a cluster that has the islands `lower` and `upper`."""
    address, directory = sys.argv[1:]
    with pw.connect(address, name="state") as cluster, cluster.start_client() as client:
        saved = Path(directory, "saved")
        saved.mkdir()
        check_saves_over_both_islands(client, str(saved))
        check_training_states(client, os.path.join(directory, "training"))
        check_that_resuming_waits_for_an_island(cluster, client)
        check_suspension(cluster, client, directory)
        check_state_larger_than_memory(client, directory)


if __name__ == "__main__":
    main()
