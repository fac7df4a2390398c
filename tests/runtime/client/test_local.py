"""Clients of this process can do what clients of a cluster can: the same controller orders their programs."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tests.orbax import oracle
from tests.runtime.client.state_on_a_cluster import check_saves_over_both_islands
from tests.runtime.client.training_states import check_training_states
from tests.runtime.cluster.driving import HANDLES, WAIT_S, Slice
from tests.runtime.cluster.test_programs import (
    check_checkpoints,
    check_host_calls,
    check_pipelines,
    check_that_an_array_follows_its_slice,
    check_that_memory_is_kept,
)

import waystation
from waystation import runtime
from waystation.errors import Conflict, InvalidInput, NotFound, Unsupported, WaystationError
from waystation.runtime.client.backend import Backend
from waystation.runtime.client.client import Client
from waystation.runtime.client.local import LocalCluster
from waystation.runtime.controller import MemoryLimits
from waystation.runtime.ir import Arg, HostCall, Program, Result, SliceShape, prepare
from waystation.runtime.suspended_state import KeepSuspended

VALUES = np.arange(32, dtype=np.float32).reshape(8, 4)


# ---- the checks of a cluster -----------------------------------------------------------------------


def test_programs_run_as_on_a_cluster(tmp_path: Path) -> None:
    backend = Backend(LocalCluster({"left": 4, "right": 2}).connect())
    left = Slice(backend, "left", 4)
    check_pipelines(backend)
    check_host_calls(backend, left)
    check_that_an_array_follows_its_slice(backend)
    check_checkpoints(backend, left, tmp_path)
    backend.close()


def test_memory_is_admitted_as_on_a_cluster() -> None:
    backend = Backend(LocalCluster({"right": 2}, limits=MemoryLimits(64, 64)).connect())
    check_that_memory_is_kept(backend)
    backend.close()


def test_states_over_two_islands_are_saved_as_on_a_cluster(tmp_path: Path) -> None:
    with runtime.local({"lower": 4, "upper": 4}) as client:
        saved = tmp_path / "saved"
        saved.mkdir()
        check_saves_over_both_islands(client, str(saved))


def test_states_of_training_are_saved_as_on_a_cluster(tmp_path: Path) -> None:
    with runtime.local({"lower": 4, "upper": 4}) as client:
        check_training_states(client, str(tmp_path))


# ---- checkpoints -----------------------------------------------------------------------------------


def state_on(client: runtime.Client, *islands: str) -> dict[str, Any]:
    devices = client.make_virtual_device_set()
    slices = [devices.add_slice(devices=4, island=island, shared=True) for island in islands]
    return {f"w{at}": client.put(VALUES + at, on, P("x")) for at, on in enumerate(slices)}


@pytest.fixture
def saved(client: runtime.Client, tmp_path: Path) -> str:
    path = str(tmp_path / "saved")
    client.save(path, state_on(client, "left", "right") | {"step": 7}, custom_metadata={"run": 1})
    client.close()
    return path


def test_a_state_is_loaded_onto_other_devices(saved: str) -> None:
    with runtime.local({"only": 2}) as client:
        on = client.make_virtual_device_set().add_slice(devices=2)
        like = {f"w{at}": client.put(np.zeros_like(VALUES), on, P(None, "x")) for at in range(2)}
        for load in (client.load, waystation.load):
            found = load(saved, like | {"step": int})
            assert found["step"] == 7
            for at in range(2):
                assert found[f"w{at}"].sharding.spec == P(None, "x")
                np.testing.assert_array_equal(found[f"w{at}"], VALUES + at)
        later = client.load_async(saved, like | {"step": ...}).result()
        np.testing.assert_array_equal(later["w1"], VALUES + 1)


def test_a_state_is_loaded_without_a_client(saved: str) -> None:
    assert not waystation.verify(saved).damages
    assert waystation.metadata(saved).custom_metadata == {"run": 1}
    sharding = jax.sharding.NamedSharding(jax.make_mesh((2,), ("x",), devices=jax.devices()[:2]), P("x"))
    like = {f"w{at}": jax.ShapeDtypeStruct(VALUES.shape, VALUES.dtype, sharding=sharding) for at in range(2)}
    found = waystation.load(saved, like | {"step": int})
    for at in range(2):
        assert found[f"w{at}"].sharding == sharding
        np.testing.assert_array_equal(found[f"w{at}"], VALUES + at)


@pytest.mark.parametrize("use_ocdbt", [False, True])
def test_orbax_reads_what_is_saved_in_its_layouts(
    client: runtime.Client, tmp_path: Path, use_ocdbt: bool
) -> None:
    context = waystation.Context()
    context.array.saving.use_ocdbt = use_ocdbt
    with context:
        waystation.save(str(tmp_path / "saved"), state_on(client, "left"))
        with pytest.raises(Unsupported, match="several sets of hosts"):
            waystation.save(str(tmp_path / "both"), state_on(client, "left", "right"))
    on_one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = {"w0": jax.ShapeDtypeStruct(VALUES.shape, VALUES.dtype, sharding=on_one)}
    np.testing.assert_array_equal(oracle.load(tmp_path / "saved", like)["w0"], VALUES)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_save_in_the_background_has_what_was_there_when_it_was_called(
    client: runtime.Client, tmp_path: Path
) -> None:
    state = state_on(client, "left", "right")
    steps = {
        name: client.jit(lambda x: x + 100, array.slice, donate_argnums=0) for name, array in state.items()
    }
    saving = waystation.save_async(str(tmp_path / "saved"), state)
    after = {name: steps[name](array) for name, array in state.items()}
    assert saving.result() is None
    found = client.load(str(tmp_path / "saved"), after)
    for at in range(2):
        np.testing.assert_array_equal(after[f"w{at}"], VALUES + at + 100)
        np.testing.assert_array_equal(found[f"w{at}"], VALUES + at)


def test_what_cannot_be_saved_or_loaded_is_said(client: runtime.Client, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    for islands in (("left",), ("left", "right")):
        state = state_on(client, *islands)
        client.save(path, state, overwrite=True)
        with pytest.raises(Conflict, match="exists already"):
            client.save(path, state)
        with pytest.raises(Conflict, match="exists already"):
            client.save_async(path, state).result()
        missing = client.load(f"{path}-not", state)
        with pytest.raises(NotFound):
            missing["w0"].numpy()
        with pytest.raises(NotFound):
            client.load_async(f"{path}-not", state).result()
        np.testing.assert_array_equal(client.load(path, state)["w0"], VALUES)
        for on in {array.slice for array in state.values()}:
            on.release()
    assert os.listdir(tmp_path) == ["saved"]


def test_a_client_that_ends_waits_for_its_saves(client: runtime.Client, tmp_path: Path) -> None:
    state = state_on(client, "left", "right")
    for at in range(3):
        client.save_async(str(tmp_path / f"{at}"), state)
    client.close()
    for at in range(3):
        np.testing.assert_array_equal(waystation.load(str(tmp_path / f"{at}"))["w1"], VALUES + 1)


# ---- suspension ------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory_bytes", [0, 1 << 20])
def test_arrays_of_a_suspended_client_leave_its_devices(tmp_path: Path, memory_bytes: int) -> None:
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    for directory in (memory, disk):
        directory.mkdir()
    cluster = LocalCluster({"left": 4, "right": 4})
    cluster.keep_suspended(KeepSuspended(str(memory), memory_bytes, str(disk)))
    first, second = (Backend(cluster.connect(name)) for name in ("first", "second"))
    with Client(first) as client, Client(second) as other:
        state = state_on(client, "left", "right")
        client.suspend()
        assert len(list(memory.glob("*/*"))) == 2 * bool(memory_bytes)
        assert len(list(disk.glob("*/*"))) == 2 * (not memory_bytes)
        theirs = state_on(other, "left", "right")  # the devices are free
        np.testing.assert_array_equal(theirs["w1"], VALUES + 1)
        for array in theirs.values():
            array.slice.release()
        client.resume()
        for at in range(2):
            np.testing.assert_array_equal(state[f"w{at}"], VALUES + at)
    assert not [*memory.iterdir(), *disk.iterdir()]


# ---- who runs when ---------------------------------------------------------------------------------


class Noted:
    """Programs of several clients on one device, which note when they begin; one holds all others up."""

    def __init__(self) -> None:
        self.cluster = LocalCluster({"island": 1})
        self.clients: dict[str, Backend] = {}
        self.given: dict[str, tuple[str, int]] = {}
        self.order: list[str] = []
        self.gate, self.is_at_gate = threading.Event(), threading.Event()

    def client(self, name: str) -> Slice:
        """A client whose program, and its argument, are there."""
        backend = self.clients[name] = Backend(self.cluster.connect(name))
        on = Slice(backend, "island", 1)

        def note(shards: Any) -> Any:
            self.order.append(name)
            return [[block for _, block in shards]]

        program, x = self.program(on, note), on.put(np.zeros(8))
        backend.prepare(program, [on.number])
        backend.wait([x], WAIT_S)
        self.given[name] = program, x
        return on

    def program(self, on: Slice, function: Any) -> str:
        key = on.backend.register_host_function("note", function)
        result = HostCall("note", key, 0, (0,), (on.sharding,), (on.value(1),))
        nodes = (Arg("x", on.value(0)), result, Result((1,)))
        return on.backend.install(prepare(Program("note", (SliceShape(0, (1,)),), nodes)))

    def hold_up(self, on: Slice) -> None:
        def wait(shards: Any) -> Any:
            self.is_at_gate.set()
            assert self.gate.wait(WAIT_S)
            return [[block for _, block in shards]]

        given, made = on.put(np.zeros(8)), next(HANDLES)
        on.backend.wait([given], WAIT_S)  # so that only the run has a place in the order
        on.backend.run(self.program(on, wait), [on.number], [given], [made], cost_seconds=1.0)
        assert self.is_at_gate.wait(WAIT_S)

    def submit(self, on: Slice, count: int, **manner: Any) -> list[int]:
        program, x = self.given[on.backend.client]
        made = [next(HANDLES) for _ in range(count)]
        for handle in made:
            on.backend.run(program, [on.number], [x], [handle], **manner)
        on.backend.is_done(made[-1])  # its calls have been taken
        return made

    def close(self) -> None:
        self.gate.set()
        for backend in self.clients.values():
            backend.close()


@pytest.fixture
def noted() -> Iterator[Noted]:
    noted = Noted()
    yield noted
    noted.close()


def test_runs_of_a_higher_priority_go_first(noted: Noted) -> None:
    first, low, high = (noted.client(name) for name in ("first", "low", "high"))
    noted.hold_up(first)
    made = [noted.submit(low, 10, cost_seconds=1.0), noted.submit(high, 10, cost_seconds=1.0, priority=1)]
    noted.gate.set()
    for on, handles in zip((low, high), made, strict=True):
        on.backend.wait(handles, WAIT_S)
    # One of low's has its place before those of high come.
    assert noted.order == ["low"] + ["high"] * 10 + ["low"] * 9


def test_time_is_divided_by_shares(noted: Noted) -> None:
    first, one, three = (noted.client(name) for name in ("first", "one", "three"))
    noted.hold_up(first)
    noted.cluster.share({"three": 3})
    made = [noted.submit(on, 40, cost_seconds=1e-4) for on in (one, three)]
    noted.gate.set()
    for on, handles in zip((one, three), made, strict=True):
        on.backend.wait(handles, WAIT_S)
    # The first one has its place before. Those after it get theirs at once, when the gate opens, before
    # anybody knows how long they take.
    assert 14 <= noted.order[1:21].count("three") <= 16


# ---- interruptions, processes ----------------------------------------------------------------------


def test_a_client_that_is_interrupted_goes_on(noted: Noted) -> None:
    on = noted.client("one")
    noted.hold_up(on)
    (made,) = noted.submit(on, 1)
    interrupting = threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        on.backend.get(made, WAIT_S)
    interrupting.join()
    noted.gate.set()
    np.testing.assert_array_equal(on.backend.get(made, WAIT_S), np.zeros(8))


def test_nobody_waits_for_a_host_that_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = LocalCluster({"left": 1, "right": 1})
    backend = Backend(cluster.connect())
    left, right = Slice(backend, "left", 1), Slice(backend, "right", 1)
    given = [left.put(np.ones(8)), right.put(np.ones(8))]
    backend.wait(given, WAIT_S)

    def fail(message: Any) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(cluster._hosts["left"], "begin", fail)
    for made in (left.step(given[0]), left.put(np.ones(8)), given[0]):
        with pytest.raises(WaystationError, match=r"has failed: ValueError: a defect|no devices"):
            backend.get(made, WAIT_S)
    np.testing.assert_array_equal(backend.get(right.step(given[1]), WAIT_S), np.full(8, 9))
    backend.close()  # it waits for what runs


FORKING = """
import os, sys, warnings
import jax, numpy as np

jax.config.update("jax_platforms", "cpu")
warnings.simplefilter("ignore")

from waystation import runtime
from waystation.errors import InvalidInput

with runtime.local(devices=1) as client:
    on = client.make_virtual_device_set().add_slice(devices=1)
    step = client.jit(lambda x: x + 1, on)
    x = step(np.zeros(2))
    assert x.tolist() == [1, 1]
    child = os.fork()
    if child == 0:
        for use in (x.numpy, client.suspend, lambda: client.backend.get(0), on.release):
            try:
                use()
            except InvalidInput as error:
                assert f"process {os.getppid()}" in str(error), error
            else:
                os._exit(1)
        client.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert step(x).tolist() == [2, 2]
"""


def test_a_forked_child_is_refused() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert ended.returncode == 0, ended.stderr


# ---- random sequences ------------------------------------------------------------------------------


class Model:
    """What a client has, beside what it should have."""

    def __init__(self, client: runtime.Client, seed: int, directory: Path) -> None:
        self.client, self.chance, self.directory = client, random.Random(seed), directory
        devices = client.make_virtual_device_set()
        self.slices = [devices.add_slice(devices=2) for _ in range(2)]
        self.steps = [client.jit(lambda x, y: x + 2 * y, on) for on in self.slices]
        self.donating = [client.jit(lambda x: x - 3, on, donate_argnums=0) for on in self.slices]
        self.arrays: list[tuple[runtime.Array, np.ndarray]] = []
        self.saves: list[tuple[str, list[np.ndarray]]] = []
        self.put()

    def any(self) -> int:
        return self.chance.randrange(len(self.arrays))

    def put(self) -> None:
        values = np.full(4, self.chance.randrange(100), np.int32)
        spec = self.chance.choice([P(), P("x")])
        self.arrays.append((self.client.put(values, self.chance.choice(self.slices), spec), values))

    def step(self) -> None:
        (x, a), (y, b) = self.arrays[self.any()], self.arrays[self.any()]
        self.arrays.append((self.chance.choice(self.steps)(x, y), a + 2 * b))

    def donate(self) -> None:
        at = self.any()
        x, a = self.arrays[at]
        step = next(each for each, on in zip(self.donating, self.slices, strict=True) if on is x.slice)
        self.arrays[at] = step(x), a - 3

    def drop(self) -> None:
        if len(self.arrays) > 1:
            del self.arrays[self.any()]

    def read(self) -> None:
        x, a = self.arrays[self.any()]
        np.testing.assert_array_equal(x, a)

    def save(self) -> None:
        path = str(self.directory / f"{len(self.saves)}")
        waystation.save(path, [x for x, _ in self.arrays])
        self.saves.append((path, [a for _, a in self.arrays]))

    def load(self) -> None:
        if not self.saves:
            return
        path, values = self.chance.choice(self.saves)
        like = [self.arrays[0][0]] * len(values)
        self.arrays = list(zip(waystation.load(path, like), values, strict=True))

    def suspend(self) -> None:
        self.client.suspend()
        self.client.resume()

    def remap(self) -> None:
        on = self.chance.choice(self.slices)
        on.remap(island="right" if on.placement.island == "left" else "left")

    def run(self, count: int) -> None:
        every = [self.put, self.step, self.donate, self.drop, self.read, self.save, self.load]
        every += [self.step, self.step, self.donate, self.suspend, self.remap]
        for _ in range(count):
            self.chance.choice(every)()
        for x, a in self.arrays:
            np.testing.assert_array_equal(x, a)


@pytest.mark.share(2)
@pytest.mark.parametrize("seed", range(4))
def test_random_sequences_of_calls(client: runtime.Client, tmp_path: Path, seed: int) -> None:
    Model(client, seed, tmp_path).run(60)


def test_clients_of_one_process_share_arrays_by_name() -> None:
    cluster = LocalCluster({"left": 2})
    with Client(Backend(cluster.connect("first"))) as first:
        with Client(Backend(cluster.connect("second"))) as second:
            on = second.make_virtual_device_set().add_slice(devices=2)
            second.share(second.put(np.arange(4), on), "base")
        with pytest.raises(Conflict, match="connected as 'first' already"):
            cluster.connect("first")
        np.testing.assert_array_equal(first.named("base"), np.arange(4))


def test_names_of_islands_are_those_of_a_cluster() -> None:
    with pytest.raises(InvalidInput, match="no name of an island"):
        runtime.local({"left/right": 1})
